//! Statistics of stores whose content is known: bytes by what they hold, frames, and clusters.

mod common;

use common::{Image, SEGMENT_PAGES};
use kvfsck::{
    ClusterStats, Code, DeviceStats, EXIT_CLEAN, EXIT_DAMAGE, EXIT_IN_USE, EXIT_USAGE, Options, Report, check,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use stratakv_format::PAGE_BYTES;
use stratakv_format::superblock::{STATE_CLOSED, STATE_OPEN};

const PAGE: u64 = PAGE_BYTES as u64;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../format-spec/golden").join(name)
}

/// Returns the report of a check that reads no payload.
fn headers(dirs: &[PathBuf]) -> Report {
    let options = Options { headers_only: true, ..Options::default() };
    check(dirs, &options, &()).expect("a report")
}

/// Returns the bytes of all files below a directory.
fn files(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry"));
    let bytes = |path: PathBuf| if path.is_dir() { files(&path) } else { fs::metadata(path).expect("a file").len() };
    entries.map(|entry| bytes(entry.path())).sum()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory");
    for entry in fs::read_dir(from).expect("a directory").map(|entry| entry.expect("an entry")) {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).expect("a copy");
        }
    }
}

#[test]
fn the_parts_of_a_device_are_all_bytes_of_its_files() {
    let one =
        ["v0.1/store-crc64", "v0.2/store-planes", "v0.2/store-retrieval", "v0.3/store-codecs", "v0.4/store-pools"];
    let more = ["v0.5/store-clusters", "v0.6/store-states"];
    let mut stores: Vec<Vec<PathBuf>> = one.iter().chain(&more).map(|name| vec![golden(name)]).collect();
    stores.push(["device-0", "device-1"].map(|name| golden("v0.2/store-copies").join(name)).to_vec());
    for dirs in stores {
        let report = headers(&dirs);
        assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 0), "{dirs:?}: {}", report.to_text());
        let found: Vec<u64> = report.stats.devices.iter().map(|own| own.file_bytes).collect();
        let expected: Vec<u64> = dirs.iter().map(|dir| files(dir)).collect();
        assert_eq!(found, expected, "{dirs:?}: {:?}", report.stats);
        assert!(report.stats.devices.iter().all(|own| own.keys_values_bytes > 0 && own.unknown_bytes == 0), "{dirs:?}");
        // A check of every byte counts the same.
        let whole = check(&dirs, &Options::default(), &()).expect("a report");
        assert_eq!((&whole.stats, &whole.pools), (&report.stats, &report.pools), "{dirs:?}");
        assert!(
            report.checked.headers_only && !whole.checked.headers_only && whole.checked.bytes > report.checked.bytes
        );
    }
}

#[test]
fn clusters_of_the_golden_store_with_pools_are_summed_up() {
    let stats = headers(&[golden("v0.4/store-pools")]).stats;
    // Sequence 2 has 8 tokens, and its fork 7.
    assert_eq!((stats.sequences, stats.tokens, stats.adapters), (2, 15, 0));
    assert_eq!((stats.frames, stats.derived_frames), (2, 1));
    let expected = ClusterStats {
        sets: 2,
        directories: 4,
        clusters: 8,
        entries: 34,
        pool_frames: 1,
        pages: 10,
        named_pages: 9,
        dead_pages: 0,
        free_pages: 1,
        dead_share: 0.0,
        page_entries: 34,
        entries_per_page: 34.0 / 9.0,
        fill: 34.0 / 86.0,
        runs: 8,
        mean_run_pages: 1.125,
        longest_run_pages: 2,
    };
    assert_eq!(stats.clusters, expected);
    let [own] = &stats.devices[..] else { panic!("{stats:?}") };
    assert_eq!((own.named_page_bytes, own.dead_page_bytes, own.free_page_bytes), (9 * PAGE, 0, PAGE));
    assert_eq!((own.segments, own.free_segments, own.frames, own.state_bytes), (2, 0, 2, 0));
    let text = stats.to_text();
    for line in [
        "2 sequences, 15 tokens, 0 adapters; 2 frames, 1 of them derived\n",
        "named pages of pools         36.0 KiB\n",
        "clusters: 2 sets, 4 directories, 8 clusters of 34 entries\n",
        "pools: 1 frames, 10 pages: 9 named, 0 dead (0.0 %), 1 free\n",
        "named pages: 34 entries, 3.8 per page, 39.5 % full; 8 runs, mean 1.1 pages, longest 2\n",
    ] {
        assert!(text.contains(line), "{text}");
    }
}

#[test]
fn pieces_of_states_summaries_and_adapters_have_parts_of_their_own() {
    let states = &headers(&[golden("v0.6/store-states")]).stats.devices[0];
    // The three states have 15267 bytes. Each piece adds its header and its method.
    assert_eq!((states.state_bytes, states.free_segments), (15552, 2));
    let retrieval = headers(&[golden("v0.2/store-retrieval")]).stats;
    assert_eq!((retrieval.sequences, retrieval.adapters, retrieval.tokens), (1, 1, 8));
    assert_eq!((retrieval.devices[0].summary_bytes, retrieval.devices[0].adapter_bytes), (480, 672));
    // Two devices hold a copy of both frames, and the second one an earlier copy of a frame.
    let copies = headers(&["device-0", "device-1"].map(|name| golden("v0.2/store-copies").join(name))).stats;
    assert_eq!((copies.frames, copies.devices[0].frames, copies.devices[1].frames), (2, 2, 2));
    assert_eq!((copies.devices[0].dead_bytes, copies.devices[1].dead_bytes), (0, 3 * PAGE));
}

/// Returns the pages of frame `nth` of an image.
fn pages(image: &Image, nth: usize) -> u64 {
    u64::from(image.frames[nth].location.pages)
}

#[test]
fn frames_without_a_reference_are_dead_and_pages_behind_the_last_frame_are_free() {
    // Frame 2 is dead. It is stored between the frames 1 and 3. An image has an unused page behind each frame.
    let image = Image::standard(1, STATE_OPEN);
    let stats = headers(&image.dirs).stats;
    let [own] = &stats.devices[..] else { panic!("{stats:?}") };
    assert_eq!((stats.sequences, stats.tokens, stats.frames), (2, 13 + 5, 2));
    let dead = 1 + pages(&image, 1) + 1;
    let free = u64::from(SEGMENT_PAGES) - 2 - pages(&image, 0) - dead - pages(&image, 2);
    assert_eq!((own.dead_bytes, own.free_bytes), (dead * PAGE, free * PAGE));
    // Frame 1 has 9 token ids, and frame 3 has 5. Their caller states are "caller state" and "more".
    assert_eq!((own.token_id_bytes, own.caller_state_bytes), (4 * (9 + 5), 12 + 4));
    let superblock = 2 * PAGE;
    let manifest = fs::metadata(image.path(0, "manifest/0000000000000001-0")).unwrap().len();
    assert_eq!(own.metadata_bytes, superblock + 2 * manifest + 2 * PAGE);
}

#[test]
fn a_frame_with_a_damaged_header_is_unknown() {
    let image = Image::standard(1, STATE_CLOSED);
    let before = headers(&image.dirs).stats.devices[0].clone();
    let offset = image.frames[0].location.offset() as usize;
    common::flip(&image.path(0, "segments/00000000"), offset + 200, 1);
    let report = headers(&image.dirs);
    assert!(report.has(Code::FrameHeader) && report.exit_code == EXIT_DAMAGE, "{}", report.to_text());
    let own = &report.stats.devices[0];
    assert_eq!((own.unknown_bytes, own.file_bytes), (image.frames[0].location.bytes(), before.file_bytes));
    let rest = |own: &DeviceStats| (own.dead_bytes, own.free_bytes, own.metadata_bytes, own.frames);
    assert_eq!(rest(own), rest(&before));
}

#[test]
fn headers_are_read_without_planes_and_pages_but_with_directories() {
    let store = tempfile::tempdir().unwrap();
    copy(&golden("v0.4/store-pools"), store.path());
    let dirs = [store.path().to_path_buf()];
    let segment = store.path().join("segments/00000002");
    // The first page of the first pool: the frame starts at page 1, and its front has two pages.
    common::flip(&segment, 3 * PAGE_BYTES + 100, 1);
    assert!(check(&dirs, &Options::default(), &()).unwrap().has(Code::ClusterPage));
    let report = headers(&dirs);
    assert!(report.clean, "{}", report.to_text());
    let line = "only headers and directories were read; `kvfsck check` reads everything\nclean\n";
    assert!(report.to_text().ends_with(line), "{}", report.to_text());
    // `headers_only` takes precedence.
    let options = Options { headers_only: true, full: true, ..Options::default() };
    assert!(check(&dirs, &options, &()).unwrap().clean);
    // The first directory.
    common::flip(&segment, 2 * PAGE_BYTES + 33, 1);
    let report = headers(&dirs);
    assert!(report.has(Code::ClusterDirectory) && report.exit_code == EXIT_DAMAGE, "{}", report.to_text());
    let clusters = &report.stats.clusters;
    assert_eq!((clusters.directories, clusters.named_pages, clusters.dead_pages), (3, 7, 2));
    assert_eq!(clusters.dead_share, 0.2);
}

#[test]
fn program_prints_statistics_and_returns_the_exit_codes_of_a_check() {
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_kvfsck")).args(args).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    };
    let pools = golden("v0.4/store-pools");
    let (code, text, _) = run(&["stats", pools.to_str().unwrap()]);
    assert!(code == 0 && text.starts_with("2 sequences, 15 tokens") && text.ends_with("\nclean\n"), "{code} {text}");
    let (code, text, _) = run(&["stats", "--json", pools.to_str().unwrap()]);
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let stats = &report["stats"];
    assert_eq!((code, &stats["clusters"]["longest_run_pages"], &stats["tokens"]), (0, &2.into(), &15.into()));
    assert_eq!(stats["devices"][0]["named_page_bytes"], 9 * PAGE);
    let (code, text, _) = run(&["stats", "--help"]);
    assert!(code == 0 && text.contains("kvfsck stats --json /nvme0/kv | jq .stats.clusters"), "{text}");
    assert_eq!(run(&["stats"]).0, i32::from(EXIT_USAGE));
    let (code, _, error) = run(&["stats", "/no/such/directory"]);
    assert_eq!((code, &*error), (i32::from(EXIT_USAGE), "kvfsck: open /no/such/directory: no such directory\n"));
    let image = Image::standard(1, STATE_CLOSED);
    let dir = image.dirs[0].to_str().unwrap();
    let writer = fs::File::open(dir).unwrap();
    writer.lock().unwrap();
    assert_eq!(run(&["stats", dir]).0, i32::from(EXIT_IN_USE));
}
