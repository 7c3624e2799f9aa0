//! Stores that the engine writes and kvfsck checks.
//!
//! - A store is clean after a close, a drop, a kill, many checkpoints, and while it is open.
//! - kvfsck finds a flipped byte of a live page at its place. The engine reports it too and serves everything else.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use stratakv::options::ChecksumChoice;
use stratakv::{CreateOptions, DType, Durability, ErrorKind, OpenSequence, Store, StoreOptions, StoredSummary};
use stratakv_tests::content::{LayerShape, Order, SequenceShape, damaged_groups};
use stratakv_tests::count_from_env;
use stratakv_tests::disk::{assert_clean, check, copy_devices, device_dirs, fast_scratch, small_options};
use stratakv_tests::image::{Part, Region, live_regions};
use stratakv_tests::rng::{Rng, mix};

/// A store of the matrix.
#[derive(Clone, Copy, Debug)]
struct Case {
    devices: usize,
    dtype: DType,
    /// True if blocks have a page or more. Otherwise several blocks share a page.
    pages: bool,
    checksum: ChecksumChoice,
}

impl Case {
    fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for (index, devices) in [1, 2, 4].into_iter().enumerate() {
            for (nth, dtype) in [DType::F32, DType::F16, DType::Bf16].into_iter().enumerate() {
                for pages in [false, true] {
                    let crc32 = (index + nth + usize::from(pages)) % 2 == 1;
                    let checksum = if crc32 { ChecksumChoice::Crc32 } else { ChecksumChoice::Crc64Nvme };
                    cases.push(Self { devices, dtype, pages, checksum });
                }
            }
        }
        cases
    }

    fn options(self, dirs: &[PathBuf]) -> StoreOptions {
        small_options(dirs).checksum(self.checksum)
    }

    fn shape(self) -> SequenceShape {
        let layers = if self.pages {
            vec![LayerShape::full(2, 64), LayerShape { value_dim: 48, ..LayerShape::full(3, 80) }]
        } else {
            vec![
                LayerShape::full(2, 16),
                LayerShape::full(0, 0),
                LayerShape { value_dim: 0, ..LayerShape::full(1, 24) },
                LayerShape { window: Some(37), value_dim: 8, ..LayerShape::full(1, 16) },
            ]
        };
        SequenceShape { layers, dtype: self.dtype, group: if self.pages { 16 } else { 5 } }
    }
}

/// The expected number of tokens by sequence key. [`seed`] gives the seed of each token.
type Expected = BTreeMap<String, usize>;

fn seed(key: &str, token: usize) -> u64 {
    mix(key.bytes().fold(token as u64, |h, b| mix(h ^ u64::from(b))))
}

fn seeds(key: &str, tokens: std::ops::Range<usize>) -> Vec<u64> {
    tokens.map(|t| seed(key, t)).collect()
}

/// Grows, creates and deletes sequences of an open store. Calls `report` with what is durable.
fn round(
    store: &Store,
    shape: &SequenceShape,
    number: usize,
    expected: &mut Expected,
    mut report: impl FnMut(&Expected),
) {
    let mut rng = Rng(number as u64 * 77 + 5);
    for index in 0..4 {
        let key = format!("s{}", (index + number) % 5);
        let mut tokens = expected.get(&key).copied();
        if tokens.is_some() && rng.below(4) == 0 {
            let sequence = store.open_sequence(&key, OpenSequence::new()).expect("the sequence");
            sequence.delete(if rng.below(2) == 0 { Durability::Sync } else { Durability::Lazy }).expect("a delete");
            expected.remove(&key);
            tokens = None;
        }
        let mut sequence = match tokens {
            Some(_) => store.open_sequence(&key, OpenSequence::new()).expect("the sequence"),
            None => {
                let options = CreateOptions::new().key(&key).store_summary(StoredSummary::MinMax);
                store.create_sequence(&shape.layout().expect("a layout"), options).expect("a sequence")
            }
        };
        let mut length = tokens.unwrap_or(0);
        assert_eq!(sequence.len(), length as u64, "{key}");
        for step in 0..3 {
            let count = if rng.below(3) == 0 { 40 + rng.below(60) } else { 1 + rng.below(7) };
            for layer in shape.kv_layers() {
                let new = seeds(&key, length..length + count);
                shape.append(&mut sequence, layer, &new, Order::nth(step + layer)).expect("an append");
            }
            let ids: Vec<u32> = (length..length + count).map(|t| t as u32).collect();
            sequence.append_token_ids(&ids).expect("token ids");
            length += count;
            let durability = [Durability::Lazy, Durability::None, Durability::Sync][step];
            sequence.commit_with(format!("{key} has {length}").as_bytes(), durability).expect("a commit");
        }
        expected.insert(key, length);
        report(expected);
        if rng.below(3) == 0 {
            // These tokens are not committed, so they disappear with the handle.
            let more = seeds("beyond", 0..9);
            shape.append(&mut sequence, 0, &more, Order::TokenMajor).expect("an append");
        }
    }
}

/// Checks that the store holds exactly what is expected.
fn verify(store: &Store, shape: &SequenceShape, expected: &Expected) {
    let keys: Vec<String> = store.sequences().into_iter().map(|info| info.key).collect();
    assert_eq!(keys.len(), expected.len(), "{keys:?}");
    for (key, tokens) in expected {
        let sequence = store.open_sequence(key, OpenSequence::new()).expect("a sequence that was committed");
        assert_eq!(sequence.caller_state(), Some(format!("{key} has {tokens}").as_bytes()));
        assert!(sequence.token_ids().iter().copied().eq(0..*tokens as u32));
        shape.check_all(store, &sequence, |_| seeds(key, 0..*tokens));
    }
}

fn write_closed(case: Case, dirs: &[PathBuf], rounds: usize) -> Expected {
    let shape = case.shape();
    let mut expected = Expected::new();
    for number in 0..rounds {
        let store = case.options(dirs).open().expect("the store");
        verify(&store, &shape, &expected);
        round(&store, &shape, number, &mut expected, |_| {});
        if number % 2 == 0 {
            store.close().expect("close");
        }
    }
    expected
}

#[test]
fn clean_after_close_and_drop() {
    for case in Case::all() {
        let root = fast_scratch();
        let dirs = device_dirs(root.path(), case.devices);
        let shape = case.shape();
        let mut expected = Expected::new();
        for number in 0..6 {
            let store = case.options(&dirs).open().expect("the store");
            verify(&store, &shape, &expected);
            round(&store, &shape, number, &mut expected, |_| {});
            verify(&store, &shape, &expected);
            if number % 2 == 0 {
                store.close().expect("close");
            } else {
                drop(store);
            }
            assert_clean(&dirs, &format!("{case:?}, round {number}"));
        }
    }
}

/// The copy is made while the store is open.
#[test]
fn clean_while_open() {
    let mut rng = Rng(3);
    for case in Case::all().into_iter().step_by(2) {
        let root = fast_scratch();
        let dirs = device_dirs(&root.path().join("first"), case.devices);
        let shape = case.shape();
        let mut expected = Expected::new();
        let store = case.options(&dirs).open().expect("the store");
        for number in 0..3 {
            round(&store, &shape, number, &mut expected, |_| {});
            store.flush().expect("flush");
            let copy = copy_devices(&dirs, &root.path().join(format!("copy-{number}")), &mut rng);
            assert_clean(&copy, &format!("{case:?}, copied in round {number}"));
            let again = case.options(&copy).open().expect("the copy");
            verify(&again, &shape, &expected);
            drop(again);
            assert_clean(&copy, &format!("{case:?}, opened after round {number}"));
        }
    }
}

/// The commits fill the manifest several times, and the store is opened many times.
#[test]
fn clean_after_checkpoints() {
    let root = fast_scratch();
    let case = Case { devices: 2, dtype: DType::F16, pages: false, checksum: ChecksumChoice::Crc64Nvme };
    let dirs = device_dirs(root.path(), 2);
    let shape = case.shape();
    let generation = |dirs: &[PathBuf]| {
        let bytes = fs::read(dirs[0].join("superblock")).expect("the superblock");
        stratakv_format::superblock::newest(&bytes).expect("a slot").manifest_generation.get()
    };
    let mut length = 0;
    let mut filled = 0;
    for number in 0..3 {
        let store = case.options(&dirs).open().expect("the store");
        let before = generation(&dirs);
        let options = CreateOptions::new().key("long").store_summary(StoredSummary::MinMax);
        let mut sequence = match number {
            0 => store.create_sequence(&shape.layout().expect("a layout"), options).expect("a sequence"),
            _ => store.open_sequence("long", OpenSequence::new()).expect("the sequence"),
        };
        assert_eq!(sequence.len(), length as u64);
        for _ in 0..600 {
            for layer in shape.kv_layers() {
                let new = seeds("long", length..length + 1);
                shape.append(&mut sequence, layer, &new, Order::TokenMajor).expect("an append");
            }
            length += 1;
            sequence.commit(Durability::Sync).expect("a commit");
        }
        shape.check_all(&store, &sequence, |_| seeds("long", 0..length));
        drop(sequence);
        drop(store);
        filled += generation(&dirs) - before;
        assert_clean(&dirs, &format!("round {number}"));
    }
    assert!(filled > 0, "the manifest never filled");
}

const CHILD: &str = "STRATAKV_TEST_FSCK_CHILD";

/// Runs the process that [`clean_after_sigkill`] kills. It is not a test of its own.
#[test]
fn child_that_is_killed() {
    let Ok(root) = std::env::var(CHILD) else { return };
    let case = Case::all()[root.rsplit('/').next().and_then(|name| name.parse::<usize>().ok()).expect("a case")];
    let dirs = device_dirs(Path::new(&root), case.devices);
    let store = case.options(&dirs).open().expect("the store");
    let mut expected = Expected::new();
    for number in 0..3 {
        round(&store, &case.shape(), number, &mut expected, |expected| {
            println!("\nheld {}", expected.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(" "));
        });
    }
    println!("\ndone");
    std::thread::sleep(std::time::Duration::from_secs(60));
}

#[test]
fn clean_after_sigkill() {
    for (index, case) in Case::all().into_iter().enumerate().step_by(3) {
        let root = fast_scratch();
        let path = root.path().join(index.to_string());
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "child_that_is_killed", "--nocapture", "--test-threads=1"])
            .env(CHILD, &path)
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child");
        let mut expected = Expected::new();
        for line in BufReader::new(child.stdout.take().expect("its output")).lines() {
            let line = line.expect("a line");
            if line == "done" {
                break;
            }
            if let Some(held) = line.strip_prefix("held ") {
                let entry = |e: &str| e.split_once('=').map(|(k, v)| (k.to_owned(), v.parse().expect("a number")));
                expected = held.split(' ').filter_map(entry).collect();
            }
        }
        child.kill().expect("SIGKILL");
        child.wait().expect("its end");
        let dirs = device_dirs(&path, case.devices);
        assert_clean(&dirs, &format!("{case:?}, killed"));
        let store = case.options(&dirs).open().expect("the store");
        verify(&store, &case.shape(), &expected);
        drop(store);
        assert_clean(&dirs, &format!("{case:?}, recovered"));
    }
}

fn flip(dirs: &[PathBuf], region: &Region, offset: usize, mask: u8) {
    use std::os::unix::fs::FileExt;
    let path = dirs[region.device].join(&region.file);
    let file = fs::OpenOptions::new().read(true).write(true).open(path).expect("the file");
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset as u64).expect("a byte");
    file.write_all_at(&[byte[0] ^ mask], offset as u64).expect("a byte");
}

/// Flips one byte. kvfsck must find it there. The engine must serve everything else and no wrong byte.
fn flipped_byte(case: Case, expected: &Expected, dirs: &[PathBuf], region: &Region, at: usize) {
    let offset = region.start + at;
    let what = format!("{case:?} {:?} device {} {} byte {offset}", region.part, region.device, region.file);
    flip(dirs, region, offset, 1 << (at % 8));
    let report = check(dirs);
    let holds = |first: u64, len: u64| (first..first.saturating_add(len)).contains(&(offset as u64));
    let named = report.findings.iter().find(|f| {
        f.severity == kvfsck::Severity::Damage
            && f.device == Some(region.device as u16)
            && f.path.as_deref() == Some(dirs[region.device].as_path())
            && f.file.as_deref() == Some(region.file.as_str())
            && holds(f.offset.unwrap_or(u64::MAX), f.length.unwrap_or(0))
    });
    assert_eq!(report.exit_code, kvfsck::EXIT_DAMAGE, "{what}:\n{}", report.to_text());
    let named = named.unwrap_or_else(|| panic!("{what} is missing from\n{}", report.to_text()));
    let code = named.code;

    let store = match case.options(dirs).create(false).open() {
        Ok(store) => store,
        Err(e) => panic!("{what}: the store does not open: {e:?}"),
    };
    let shape = case.shape();
    let mut damaged = Vec::new();
    let metadata = matches!(region.part, Part::Superblock | Part::ManifestPage | Part::ManifestBatch);
    let found: Vec<u64> = store.health().devices.iter().map(|device| device.damaged_metadata).collect();
    assert_eq!(found.iter().sum::<u64>(), u64::from(metadata), "{what}: {found:?}");
    assert_eq!(found[region.device], u64::from(metadata), "{what}: {found:?}");
    assert_eq!(store.sequences().len(), expected.len(), "{what}");
    for (key, tokens) in expected {
        match store.open_sequence(key, OpenSequence::new()) {
            Ok(sequence) => {
                assert_eq!(sequence.len(), *tokens as u64, "{what}");
                assert_eq!(sequence.caller_state(), Some(format!("{key} has {tokens}").as_bytes()), "{what}");
                assert!(sequence.token_ids().iter().copied().eq(0..*tokens as u32), "{what}");
                let bad = damaged_groups(&shape, &store, &sequence, |_| seeds(key, 0..*tokens));
                if bad.is_empty() {
                    shape.check_all(&store, &sequence, |_| seeds(key, 0..*tokens));
                }
                damaged.extend(bad);
            }
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::Corruption, "{what}: {e:?}");
                damaged.push(e.corruption().unwrap_or_else(|| panic!("{what}: no place in {e:?}")).clone());
            }
        }
    }
    let counted: Vec<u64> = store.health().devices.iter().map(|device| device.checksum_failures).collect();
    assert_eq!(counted[region.device] > 0, !damaged.is_empty(), "{what}: {counted:?}, {damaged:?}");
    assert_eq!(counted.iter().sum::<u64>(), counted[region.device], "{what}: {counted:?}");
    for place in &damaged {
        assert_eq!(usize::from(place.device), region.device, "{what}: {place}");
        assert_eq!(place.file, region.file, "{what}: {place}");
        assert!(holds(place.offset, place.len), "{what}: {place}");
        assert_eq!(place.code, code.as_str(), "{what}: {place}");
    }
    // Groups before the window are live, but no selection can contain them.
    let behind_window = named.layer.is_some_and(|layer| shape.layers[usize::from(layer)].window.is_some());
    match code {
        kvfsck::Code::PayloadChecksum if behind_window && damaged.is_empty() => {}
        kvfsck::Code::PayloadChecksum | kvfsck::Code::FrameHeader => assert_eq!(damaged.len(), 1, "{what}"),
        _ => assert!(damaged.is_empty(), "{what}: {damaged:?}"),
    }
    store.close().unwrap_or_else(|e| panic!("{what}: close: {e:?}"));
    match region.part {
        // The open repaired the damage.
        Part::Superblock | Part::ManifestPage | Part::ManifestBatch => assert_clean(dirs, &what),
        _ => {
            let again = check(dirs);
            assert_eq!(again.exit_code, kvfsck::EXIT_DAMAGE, "{what}: the damage disappeared");
            assert!(again.has(code), "{what}");
        }
    }
}

fn flip_matrix(cases: &[Case], per_part: usize) {
    let mut rng = Rng(2024);
    let mut tried: BTreeMap<Part, usize> = BTreeMap::new();
    for case in cases {
        let root = fast_scratch();
        let dirs = device_dirs(&root.path().join("whole"), case.devices);
        let expected = write_closed(*case, &dirs, 4);
        assert_clean(&dirs, "before");
        let mut by_part: BTreeMap<Part, Vec<Region>> = BTreeMap::new();
        for region in live_regions(&dirs) {
            by_part.entry(region.part).or_default().push(region);
        }
        for (part, regions) in by_part {
            for nth in 0..per_part {
                let region = &regions[rng.below(regions.len())];
                // The start of a structure is hit more often than the zeros after it.
                let at = rng.below(if nth % 2 == 0 { region.len.min(512) } else { region.len });
                let copy = copy_devices(&dirs, &root.path().join("flipped"), &mut rng);
                flipped_byte(*case, &expected, &copy, region, at);
                fs::remove_dir_all(root.path().join("flipped")).expect("remove the copy");
                *tried.entry(part).or_default() += 1;
            }
        }
    }
    let total: usize = tried.values().sum();
    println!("{total} flipped bytes: {tried:?}");
    assert_eq!(tried.len(), 9, "{tried:?}");
}

#[test]
fn flipped_bytes_are_found_and_survived() {
    let (one, two) = (Case::all()[0], Case::all()[8]);
    let four = Case::all()[15];
    flip_matrix(&[one, two, four], count_from_env("STRATAKV_TEST_FLIPS", 8));
}
