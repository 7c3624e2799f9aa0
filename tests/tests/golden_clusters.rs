//! The golden store `v0.5/store-clusters`, which the engine wrote: clusters as `Sequence::store_clusters` stores them.
//!
//! A generator made the golden store with pools of `v0.4` from the format alone. This one shows that what an engine
//! stored stays readable. `cargo test -p stratakv-tests --test golden_clusters -- --ignored` writes it if it does not
//! exist.

use std::fs;
use std::path::{Path, PathBuf};
use stratakv::retrieval::SelectorId;
use stratakv::sim::{Geometry, Simulation};
use stratakv::{
    Budget, ByteSize, CreateOptions, Durability, OpenSequence, SelectRequest, Selection, Sequence, Store, StoreOptions,
};
use stratakv_format::frame::{FramePlace, FrameView, KIND_CLUSTER_DIRECTORY};
use stratakv_format::pool::{DirectoryPiece, PieceTables};
use stratakv_format::segment::{KIND_POOL, SegmentPage};
use stratakv_format::{DeviceIndex, Location, PAGE_BYTES, SegmentId, Unverified};
use stratakv_testing::EntryShape;
use stratakv_tests::disk::{check, device_dirs, fast_scratch, files};
use stratakv_tests::rng::mix;

const SHAPE: EntryShape = EntryShape { kv_heads: 2, q_heads: 4, dim: 8, group: 8 };
const TOKENS: usize = 340;
/// The sequences and the method of their clusters: per KV head with centroids, and over all heads with medoids.
const SEQUENCES: [(&str, &str); 2] = [("heads", "dynakv:8"), ("joint", "swarm:8:joint")];
/// The fork of the first sequence, and its tokens.
const FORK: (&str, usize) = ("heads-fork", TOKENS - 2);

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../format-spec/golden/v0.5/store-clusters")
}

fn copied(root: &Path) -> Vec<PathBuf> {
    let to = device_dirs(root, 1);
    for file in files(&golden()) {
        let target = to[0].join(&file);
        private_directory(target.parent().expect("a parent"));
        fs::copy(golden().join(&file), &target).expect("a copy");
    }
    to
}

fn private_directory(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::create_dir_all(path).expect("a directory");
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).expect("permissions");
}

fn options() -> StoreOptions {
    let options = Store::options().memory_limit(ByteSize::mib(32)).segment_bytes(ByteSize::kib(64));
    options.frame_bytes(ByteSize::kib(64))
}

fn planes() -> [Vec<f32>; 2] {
    [1, 2].map(|seed| SHAPE.rows(0, TOKENS, seed))
}

fn attach(sequence: &mut Sequence, method: &str) -> SelectorId {
    let id = sequence.attach(SHAPE.selector(method)).expect("a selector");
    if method.starts_with("swarm") {
        let queries: Vec<Vec<f32>> = (0..40).map(|seed| SHAPE.query(seed)).collect();
        let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
        sequence.profile(id, 0, &queries, None).expect("a profile");
    }
    id
}

fn select(sequence: &Sequence, id: SelectorId, seed: u64) -> Selection {
    let query = SHAPE.query(seed);
    sequence.select(0, SelectRequest::query(&query).budget(Budget::tokens(100)).selector(id)).expect("a selection")
}

/// Writes the golden store with the public interface of the engine, on a simulated disk with small manifests.
#[test]
#[ignore = "writes the golden store, once"]
fn generate() {
    assert!(!golden().exists(), "golden files never change");
    let geometry = Geometry {
        devices: 1,
        device_bytes: 4 << 20,
        manifest_pages: 4,
        batch_bytes: 12_000,
        whole: false,
        open_files: None,
    };
    let simulation = Simulation::new(&geometry, 1);
    let store = simulation.open(options()).expect("a store");
    let [keys, values] = planes();
    for (key, method) in SEQUENCES {
        let mut sequence = store.create_sequence(&SHAPE.layout(), CreateOptions::new().key(key)).expect("a sequence");
        SHAPE.append(&mut sequence, &keys, &values).expect("an append");
        sequence.commit(Durability::Sync).expect("a commit");
        let id = attach(&mut sequence, method);
        sequence.store_clusters(id).expect("stored clusters");
    }
    let mut sequence = store.open_sequence("heads", OpenSequence::new()).expect("a sequence");
    let mut fork = sequence.fork_as(FORK.0).expect("a fork");
    fork.truncate(FORK.1 as u64).expect("a cut behind the clusters");
    fork.commit(Durability::Sync).expect("a commit");
    drop((sequence, fork));
    store.close().expect("a close");
    let scratch = fast_scratch();
    simulation.dump(scratch.path()).expect("files");
    for file in files(&scratch.path().join("0")) {
        let target = golden().join(&file);
        fs::create_dir_all(target.parent().expect("a parent")).expect("a directory");
        fs::copy(scratch.path().join("0").join(&file), &target).expect("a copy");
    }
}

/// The clusters of one directory, as its bytes say.
#[derive(Debug, PartialEq, Eq)]
struct Stored {
    method: String,
    head: String,
    clusters: Vec<Vec<u32>>,
}

impl Stored {
    /// Returns a number that depends on every token and on its cluster.
    fn digest(&self) -> u64 {
        let add = |sum: u64, cluster: &Vec<u32>| {
            cluster.iter().fold(mix(sum ^ cluster.len() as u64), |sum, token| mix(sum ^ u64::from(*token)))
        };
        self.clusters.iter().fold(0, add)
    }
}

/// Reads every directory of the golden segments for pools with the format crate alone.
fn stored() -> Vec<Stored> {
    let mut all: Vec<Stored> = Vec::new();
    for file in files(&golden().join("segments")) {
        let bytes = fs::read(golden().join("segments").join(file)).expect("a segment");
        let page = Unverified::<SegmentPage>::at_front(&bytes[..PAGE_BYTES], "segment").and_then(|page| page.verify());
        let Some(page) = page.ok().filter(|page| page.kind == KIND_POOL) else { continue };
        let mut at = 1;
        loop {
            let location =
                Location { device: DeviceIndex(0), segment: SegmentId(page.segment.get()), page: at, pages: 0 };
            let (segment_generation, segment_nonce) = (page.generation.get(), page.nonce.get());
            let place = FramePlace { store_id: page.store_id, location, segment_generation, segment_nonce };
            let Ok(view) = FrameView::verify(&bytes[at as usize * PAGE_BYTES..], &place) else { break };
            directories(&view, &bytes[at as usize * PAGE_BYTES..], &mut all);
            at += view.header().location.pages.get();
        }
    }
    all
}

/// Adds the directories of a frame.
fn directories(view: &FrameView<'_>, bytes: &[u8], all: &mut Vec<Stored>) {
    for descriptor in view.descriptors().iter().filter(|own| own.kind.get() == KIND_CLUSTER_DIRECTORY) {
        let start = descriptor.offset.get() as usize;
        let piece = &bytes[start..start + descriptor.bytes.get() as usize];
        let piece = DirectoryPiece::verify(piece, view.layout(), descriptor.layer.get()).expect("a valid piece");
        let stored =
            || Stored { method: piece.method().to_owned(), head: format!("{:?}", piece.heads()), clusters: Vec::new() };
        match piece.tables() {
            PieceTables::Clusters(_) => all.push(stored()),
            PieceTables::Positions(table) => {
                let lists = table.clusters().map(|tokens| tokens.iter().map(|token| token.get()).collect());
                all.last_mut().expect("the clusters come first").clusters.extend(lists);
            }
        }
    }
}

/// The method, the heads, the number of clusters and the digest of each directory.
const DIRECTORIES: [(&str, &str, usize, u64); 3] = [
    ("dynakv/8/Representative/PerHead/", "One(0)", 5, 0x05ea_5774_a8f5_fe84),
    ("dynakv/8/Representative/PerHead/", "One(1)", 5, 0x4e4a_29b4_68d2_6207),
    ("swarm/8/Representative/tokens", "All", 14, 0xcc89_e9f3_0457_7c7c),
];

#[test]
fn the_directories_hold_the_clusters_that_the_engine_stored() {
    let found = stored();
    let found: Vec<_> = found.iter().map(|own| (&*own.method, &*own.head, own.clusters.len(), own.digest())).collect();
    assert_eq!(found, DIRECTORIES, "{:?}", stored());
}

#[test]
fn kvfsck_reads_every_cluster_and_compares_it_with_groups() {
    let scratch = fast_scratch();
    let dirs = copied(scratch.path());
    let report = kvfsck::check(&dirs, &kvfsck::Options { full: true, ..kvfsck::Options::default() }, &());
    let report = report.expect("a report");
    assert!(report.clean, "{}", report.to_text());
    let totals = report.checked.clusters;
    assert_eq!((totals.frames, totals.directories, totals.clusters), (5, 3, 24));
    assert_eq!((totals.pages, totals.pool_pages), (24, 24));
    let found: Vec<_> =
        report.pools.directories.iter().map(|own| (own.head, own.covered_tokens, own.entries)).collect();
    assert_eq!(found, [(Some(0), 272, 272), (Some(1), 272, 272), (None, 336, 389)]);
    let sharing: Vec<&[u64]> = report.pools.directories.iter().map(|own| &own.sequences[..]).collect();
    assert_eq!(sharing, [&[1, 3][..], &[1, 3], &[2]]);
}

#[test]
fn selections_read_the_pages_of_the_golden_clusters() {
    for read_only in [true, false] {
        let scratch = fast_scratch();
        let dirs = copied(scratch.path());
        let options = Store::options().device(&dirs[0]).memory_limit(ByteSize::mib(32)).read_only(read_only);
        let store = options.open().expect("a store");
        for (key, method) in SEQUENCES.into_iter().chain([(FORK.0, SEQUENCES[0].1)]) {
            let mut sequence = store.open_sequence(key, OpenSequence::new()).expect("a sequence");
            let length = if key == FORK.0 { FORK.1 } else { TOKENS };
            assert_eq!(sequence.len(), length as u64);
            let id = attach(&mut sequence, method);
            for seed in 50..54 {
                let selection = select(&sequence, id, seed);
                assert!(selection.stored_pages() > 0, "{key}, query {seed}");
                let chosen = SHAPE.entries(&selection);
                assert!(chosen.iter().all(|own| own.len() < TOKENS / 2), "{key}, query {seed}");
                let query = SHAPE.query(seed);
                let out = SHAPE.output(&store, &query, &selection).expect("a read");
                let width = SHAPE.width();
                let row = |token: u64, plane: u64| {
                    planes()[plane as usize][token as usize * width..(token as usize + 1) * width].to_vec()
                };
                let wanted = SHAPE.attention(&query, &chosen, row);
                let is_close = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs() < 1e-4;
                assert!(out.iter().zip(&wanted).all(is_close), "{key}, query {seed}: {out:?}, not {wanted:?}");
            }
        }
        let health = store.health();
        assert_eq!((health.checksum_failures, health.dropped_clusters), (0, 0), "{health:?}");
        assert_eq!(health.devices.iter().map(|device| device.rebuilt_pages).sum::<u64>(), 0);
        store.close().expect("closed");
        assert!(check(&dirs).clean);
    }
}
