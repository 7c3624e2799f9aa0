//! Damage of derived frames in the golden store with pools. Each kind has its code, and none costs a token.

use kvfsck::{Code, EXIT_CLEAN, EXIT_DAMAGE, Options, Report, Severity, check};
use std::fs;
use std::path::{Path, PathBuf};
use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity, crc_with_hole, page_crc};
use stratakv_format::frame::{FramePlace, FrameView, KIND_CLUSTER_DIRECTORY};
use stratakv_format::manifest::BatchHeader;
use stratakv_format::pool::{EntryHeads, StateFields};
use stratakv_format::{DeviceIndex, Location, PAGE_BYTES, SegmentId, SequenceId};
use tempfile::TempDir;
use zerocopy::FromBytes;

const SEGMENT: &str = "segments/00000002";
const MANIFEST: [&str; 2] = ["manifest/0000000000000003-0", "manifest/0000000000000003-1"];
const MANIFEST_NONCE: u64 = 0x6d61_6e69_6665_7374;
/// The derived frame is stored in the pages 1 to 12 of its segment.
const PLACE: FramePlace = FramePlace {
    store_id: *b"golden-store-id!",
    location: Location { device: DeviceIndex(0), segment: SegmentId(2), page: 1, pages: 12 },
    segment_generation: 5,
    segment_nonce: 0x7365_676d_656e_7432,
};
/// The first page of each pool in the frame.
const POOLS: [usize; 3] = [2, 6, 10];
/// The page of the frame that was never written.
const UNWRITTEN: usize = 9;

/// A copy of the golden store.
struct Store {
    root: TempDir,
}

impl Store {
    fn copy() -> Self {
        let store = Self { root: tempfile::tempdir().expect("a directory") };
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../format-spec/golden/v0.4/store-pools");
        for name in ["superblock", MANIFEST[0], MANIFEST[1], "segments/00000001", SEGMENT] {
            let to = store.path(name);
            fs::create_dir_all(to.parent().expect("a parent")).expect("a directory");
            fs::copy(golden.join(name), to).expect("a copy");
        }
        store
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut [u8])) {
        let mut bytes = fs::read(self.path(name)).expect("a file");
        change(&mut bytes);
        fs::write(self.path(name), bytes).expect("written");
    }

    fn check(&self) -> Report {
        check(&[self.root.path().to_path_buf()], &Options::default(), &()).expect("a report")
    }

    /// Checks the store, and compares each entry with its token.
    fn check_fully(&self) -> Report {
        let options = Options { full: true, ..Options::default() };
        check(&[self.root.path().to_path_buf()], &options, &()).expect("a report")
    }

    /// Changes piece `nth` of the directories, and corrects every checksum above it.
    fn change_piece(&self, nth: usize, change: impl FnOnce(&mut [u8])) {
        let mut crcs = (0, 0);
        self.change(SEGMENT, |file| {
            let frame = &mut file[PAGE_BYTES..13 * PAGE_BYTES];
            let view = FrameView::verify(frame, &PLACE).expect("valid");
            let descriptor = *view.descriptors().get(nth).expect("a piece");
            assert_eq!(descriptor.kind.get(), KIND_CLUSTER_DIRECTORY);
            let header = *view.header();
            let tables = [header.layout_bytes.get(), header.key_bytes.get()].map(|bytes| bytes.next_multiple_of(8));
            let sums = 144 + (tables[0] + tables[1] + header.descriptors.get() * 56) as usize;
            let start = descriptor.offset.get() as usize;
            let piece = start..start + descriptor.bytes.get() as usize;
            change(&mut frame[piece.clone()]);
            let identity = PlaneIdentity::new(
                header.nonce.get(),
                SequenceId(header.sequence.get()),
                KIND_CLUSTER_DIRECTORY,
                descriptor.layer.get(),
                descriptor.first_token.get(),
                descriptor.tokens.get(),
            );
            let sum = PayloadChecksum::Crc64Nvme.compute(&identity, &frame[piece]);
            frame[sums + 8 * nth..sums + 8 * nth + 8].copy_from_slice(&sum.to_le_bytes());
            let crc = crc_with_hole(&PLACE.segment_nonce.to_le_bytes(), &frame[..PAGE_BYTES], 4..8);
            crcs = (header.crc.get(), crc);
            frame[4..8].copy_from_slice(&crc.to_le_bytes());
        });
        for name in MANIFEST {
            self.change(name, |file| {
                let (batch, _) = BatchHeader::ref_from_prefix(&file[PAGE_BYTES..]).expect("a batch");
                let bytes = batch.pages.get() as usize * PAGE_BYTES;
                let batch = &mut file[PAGE_BYTES..PAGE_BYTES + bytes];
                let at = batch.windows(4).position(|word| word == crcs.0.to_le_bytes()).expect("the CRC of the frame");
                batch[at..at + 4].copy_from_slice(&crcs.1.to_le_bytes());
                let crc = crc_with_hole(&MANIFEST_NONCE.to_le_bytes(), batch, 4..8);
                batch[4..8].copy_from_slice(&crc.to_le_bytes());
            });
        }
    }
}

/// Asserts that a report has damage of one code, and nothing else.
fn assert_only(report: &Report, code: Code) {
    assert!(!report.findings.is_empty() && report.exit_code == EXIT_DAMAGE, "{code}: {}", report.to_text());
    let is_it = |finding: &kvfsck::Finding| finding.code == code && finding.severity == Severity::Damage;
    assert!(report.findings.iter().all(is_it), "{code}: {}", report.to_text());
}

#[test]
fn good_store_with_pools_is_clean_and_counted() {
    let report = Store::copy().check();
    assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 0), "{}", report.to_text());
    let clusters = report.checked.clusters;
    assert_eq!((clusters.frames, clusters.directories, clusters.clusters), (1, 4, 8));
    assert_eq!((clusters.pages, clusters.runs, clusters.pool_pages), (9, 8, 10));
    assert!(report.to_text().contains("clusters: 8 in 4 directories of 1 derived frames, 9 of 10 pages in 8 runs\n"));
}

#[test]
fn flipped_bytes_of_pages_and_pieces_are_found_with_their_place() {
    for pool in POOLS {
        let store = Store::copy();
        let at = (1 + pool) * PAGE_BYTES + 100;
        store.change(SEGMENT, |file| file[at] ^= 0x40);
        let report = store.check();
        assert_only(&report, Code::ClusterPage);
        let finding = &report.findings[0];
        assert_eq!((finding.offset, finding.length), (Some(at as u64 - 100), Some(PAGE_BYTES as u64)));
        assert_eq!((finding.frame, finding.sequence, finding.plane), (Some(2), Some(2), Some("page")));
    }
    // The zeros of a page behind its entries are covered too.
    let store = Store::copy();
    store.change(SEGMENT, |file| file[(2 + POOLS[2]) * PAGE_BYTES - 1] ^= 1);
    assert_only(&store.check(), Code::ClusterPage);
    let store = Store::copy();
    store.change(SEGMENT, |file| file[2 * PAGE_BYTES + 33] ^= 1);
    let report = store.check();
    assert_only(&report, Code::ClusterDirectory);
    assert_eq!((report.findings[0].layer, report.findings[0].plane), (Some(0), Some("directory")));
    assert_eq!(report.checked.clusters.directories, 3);
}

#[test]
fn bytes_of_pages_that_no_directory_names_may_be_anything() {
    let store = Store::copy();
    store.change(SEGMENT, |file| file[(1 + UNWRITTEN) * PAGE_BYTES..(2 + UNWRITTEN) * PAGE_BYTES].fill(0x33));
    let report = store.check();
    assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 0), "{}", report.to_text());
}

/// Offsets in piece 0: the first run is at 144, and its page at 148.
#[test]
fn directories_that_name_wrong_pages_are_damage() {
    for (page, text) in [(3, "named twice"), (6, "does not match"), (1, "in no pool"), (10, "in no pool")] {
        let store = Store::copy();
        store.change_piece(0, |piece| piece[148] = page);
        let report = store.check();
        assert!(report.exit_code == EXIT_DAMAGE, "page {page}: {}", report.to_text());
        let is_known = |code: Code| matches!(code, Code::ClusterDirectory | Code::ClusterPage);
        assert!(report.findings.iter().all(|finding| is_known(finding.code)), "page {page}: {}", report.to_text());
        let named = report.to_text().contains(text) || text == "does not match" && report.has(Code::ClusterPage);
        assert!(named, "page {page}: {}", report.to_text());
    }
    // A frame that is not live is passed over, because derived frames may be gone. A frame of tokens is not.
    for (frame, is_damage) in [(99, false), (1, true)] {
        let store = Store::copy();
        store.change_piece(0, |piece| piece[104] = frame);
        let report = store.check();
        assert_eq!(report.has(Code::ClusterDirectory), is_damage, "frame {frame}: {}", report.to_text());
        assert_eq!(report.clean, !is_damage);
    }
}

#[test]
fn directories_that_are_incomplete_or_of_another_version_are_found() {
    // Piece 1 has the positions of the first directory. Its set becomes another one.
    let store = Store::copy();
    store.change_piece(1, |piece| piece[8] = 9);
    assert_only(&store.check(), Code::ClusterDirectory);
    let store = Store::copy();
    store.change_piece(0, |piece| piece[112] = 0);
    assert_only(&store.check(), Code::ClusterDirectory);
    let store = Store::copy();
    store.change_piece(0, |piece| piece[0] = 2);
    let report = store.check();
    assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 1), "{}", report.to_text());
    assert_eq!((report.findings[0].code, report.findings[0].severity), (Code::ClusterDirectory, Severity::Note));
    assert_eq!(report.checked.clusters.directories, 3);
}

#[test]
fn parts_of_a_directory_that_state_other_entries_are_damage() {
    // The entries of the two clusters are at 104 and 108 of piece 1. They become 4 and 4.
    let store = Store::copy();
    store.change_piece(1, |piece| (piece[104], piece[108]) = (piece[104] + 1, piece[108] - 1));
    let report = store.check();
    assert_only(&report, Code::ClusterDirectory);
    assert!(report.to_text().contains("different numbers of entries of a cluster"), "{}", report.to_text());
}

/// Returns the checksum of a page of layer 0 or 1 for each number of entries and choice of heads.
fn page_sums(page: u32, bytes: &[u8]) -> Vec<u64> {
    let mut sums = Vec::new();
    for (layer, valid) in (0..3).flat_map(|layer| (1..64).map(move |valid| (layer, valid))) {
        for heads in [EntryHeads::All, EntryHeads::One(0), EntryHeads::One(1)] {
            let (nonce, origin) = (frame_nonce(), SequenceId(2));
            let identity = PlaneIdentity::of_page(nonce, origin, layer, heads, page, valid);
            sums.push(PayloadChecksum::Crc64Nvme.compute(&identity, bytes));
        }
    }
    sums
}

/// Returns the nonce of the derived frame.
fn frame_nonce() -> u64 {
    let bytes = fs::read(Store::copy().path(SEGMENT)).expect("a segment");
    let view = FrameView::verify(&bytes[PAGE_BYTES..13 * PAGE_BYTES], &PLACE).expect("valid");
    view.header().nonce.get()
}

#[test]
fn a_byte_of_a_page_that_belongs_to_no_entry_is_damage_even_if_the_checksum_is_right() {
    let store = Store::copy();
    let (page, mut sums) = (POOLS[0] as u32, [Vec::new(), Vec::new()]);
    store.change(SEGMENT, |file| {
        let bytes = &mut file[(1 + POOLS[0]) * PAGE_BYTES..(2 + POOLS[0]) * PAGE_BYTES];
        sums[0] = page_sums(page, bytes);
        bytes[PAGE_BYTES - 1] ^= 1;
        sums[1] = page_sums(page, bytes);
    });
    store.change_piece(0, |piece| {
        let place = |sum: &u64| piece.windows(8).position(|word| word == sum.to_le_bytes());
        let (nth, at) =
            sums[0].iter().enumerate().find_map(|(nth, sum)| Some((nth, place(sum)?))).expect("the sum of the page");
        piece[at..at + 8].copy_from_slice(&sums[1][nth].to_le_bytes());
    });
    let report = store.check();
    assert_only(&report, Code::ClusterPage);
    assert!(report.findings[0].message.contains("belongs to none of its"), "{}", report.to_text());
    assert_eq!(report.findings[0].offset, Some(((1 + POOLS[0]) * PAGE_BYTES) as u64));
}

#[test]
fn tokens_in_no_cluster_or_in_too_many_are_damage() {
    // The clusters are {0, 3, 5} and {1, 2, 4, 6, 7}. The first position of piece 1 is at 112.
    for token in [1, 3] {
        let store = Store::copy();
        store.change_piece(1, |piece| piece[112] = token);
        let report = store.check();
        assert_only(&report, Code::ClusterCoverage);
        assert_eq!(report.findings[0].layer, Some(0));
    }
}

#[test]
fn states_beside_directories_and_pools_are_damage() {
    // The pieces 0 and 1 of the frame are a directory. They become the first two pieces of a state, whose other pieces
    // are gone. A header and a method take 72 bytes.
    let store = Store::copy();
    let fields = StateFields { set: 9, generation: 1, number: 1, method: "method/8", encoding: 1, tokens: 8 };
    let mut first = 0_u64;
    for nth in [0, 1] {
        store.change_piece(nth, |piece| {
            let state = vec![7; piece.len() - 72];
            piece.copy_from_slice(&fields.encode(&state, usize::MAX).expect("a piece")[0]);
            piece[40..48].copy_from_slice(&4096_u64.to_le_bytes());
            piece[48..56].copy_from_slice(&first.to_le_bytes());
            first += state.len() as u64;
        });
    }
    let report = store.check();
    assert_only(&report, Code::ClusterState);
    let [found] = &report.findings[..] else { panic!("{}", report.to_text()) };
    assert_eq!(found.message, "the frame holds states of methods beside pools or directories");
    assert_eq!((found.frame, found.sequence, found.layer), (Some(2), Some(2), None));
    assert_eq!(found.file.as_deref(), Some(SEGMENT));
    assert_eq!((found.offset, found.length), (Some(PAGE_BYTES as u64), Some(12 * PAGE_BYTES as u64)));
    assert_eq!((report.checked.clusters.directories, report.checked.clusters.states), (3, 0));
}

#[test]
fn derived_frames_need_the_feature_of_pools() {
    let store = Store::copy();
    for name in MANIFEST {
        store.change(name, |file| {
            let page = &mut file[..PAGE_BYTES];
            page[32] &= !2;
            let crc = page_crc((&*page).try_into().expect("a page"));
            page[508..512].copy_from_slice(&crc.to_le_bytes());
        });
    }
    let report = store.check();
    assert!(report.has(Code::ManifestRecord) && report.exit_code == EXIT_DAMAGE, "{}", report.to_text());
}

#[test]
fn a_damaged_header_of_a_derived_frame_costs_no_token() {
    let store = Store::copy();
    store.change(SEGMENT, |file| file[PAGE_BYTES + 200] ^= 1);
    let report = store.check();
    assert_only(&report, Code::FrameHeader);
    assert_eq!(report.checked.clusters.frames, 0);
}

#[test]
fn a_full_check_finds_entries_that_are_not_those_of_their_tokens() {
    let report = Store::copy().check_fully();
    assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 0), "{}", report.to_text());
    // The first cluster is {0, 3, 5}. Its first two entries change places in the directory, but not in the page.
    let store = Store::copy();
    store.change_piece(1, |piece| piece.swap(112, 116));
    assert!(store.check().clean);
    let report = store.check_fully();
    assert_only(&report, Code::ClusterPage);
    assert!(report.to_text().contains("differs from its token"), "{}", report.to_text());
    assert_eq!((report.findings[0].layer, report.findings[0].frame), (Some(0), Some(2)));
}

#[test]
fn the_map_lists_segments_for_pools_and_directories_of_clusters() {
    let map = Store::copy().check().pools;
    let page = PAGE_BYTES as u64;
    let segments: Vec<_> = map
        .segments
        .iter()
        .map(|own| (own.segment, own.frames, own.live_bytes, own.named_bytes, own.dead_bytes, own.free_bytes))
        .collect();
    assert_eq!(segments, [(2, 1, 12 * page, 9 * page, 0, page)]);
    let directories: Vec<_> = map
        .directories
        .iter()
        .map(|own| (own.set, own.layer, own.head, own.covered_tokens, own.clusters, own.entries, own.pages))
        .collect();
    let expected =
        [(1, 0, Some(0), 8, 2, 8, 2), (1, 0, Some(1), 8, 2, 8, 2), (2, 0, None, 8, 2, 9, 3), (2, 2, None, 8, 2, 9, 2)];
    assert_eq!(directories, expected);
    // The fork shares the directories of its parent.
    assert!(map.directories.iter().all(|own| own.origin == 2 && own.sequences == [2, 3]));
    assert!(map.to_text().contains("sequence 3: 4 directories, 8 clusters, 9 pages, 39400 bytes"));
}

/// Returns the only pool frame of a store: its pages by use, its runs, and the pages of the longest run.
fn pool_frame(report: &Report) -> ([u64; 4], u64, u64) {
    let [own] = &report.pools.frames[..] else { panic!("{:?}", report.pools.frames) };
    assert_eq!((own.device, own.segment, own.frame, own.origin), (0, 2, 2, 2));
    let bytes = [own.named_bytes, own.dead_bytes, own.free_bytes];
    assert_eq!(bytes, [own.named_pages, own.dead_pages, own.free_pages].map(|pages| pages * PAGE_BYTES as u64));
    ([own.pages, own.named_pages, own.dead_pages, own.free_pages], own.runs, own.longest_run_pages)
}

#[test]
fn the_map_counts_the_pages_and_runs_of_a_pool_frame() {
    let report = Store::copy().check();
    assert_eq!(pool_frame(&report), ([10, 9, 0, 1], 8, 2));
    let own = &report.pools.frames[0];
    // 4 pages of 8 entries hold 16, 3 pages of 4 hold 9, and 2 pages of 21 hold 9.
    assert_eq!((own.entries, own.slots, own.mean_run_pages), (34, 86, 1.125));
    let line = "pool frame 2 of sequence 2 segment 00000002 device 0: 10 pages, 9 named, 0 dead, 1 free; 8 runs, mean \
                1.1 pages, longest 2\n";
    assert!(report.pools.to_text().contains(line), "{}", report.pools.to_text());
}

#[test]
fn pages_that_no_directory_in_force_names_are_dead_or_free() {
    // A reader passes over the first directory, because its version is unknown. It named two runs of one page.
    let store = Store::copy();
    store.change_piece(0, |piece| piece[0] = 2);
    assert_eq!(pool_frame(&store.check()), ([10, 7, 2, 1], 6, 2));
    // The first cluster of the third directory names the unwritten page, and not its own any more.
    let store = Store::copy();
    store.change_piece(4, |piece| piece[148] = UNWRITTEN as u8);
    let report = store.check();
    assert_only(&report, Code::ClusterPage);
    assert_eq!(pool_frame(&report), ([10, 9, 1, 0], 8, 2));
    // A page that is named twice counts once. Its second run has no page.
    let store = Store::copy();
    store.change_piece(0, |piece| piece[148] = POOLS[0] as u8 + 1);
    assert_eq!(pool_frame(&store.check()), ([10, 8, 1, 1], 7, 2));
}
