//! The golden store `v0.6/store-states`, which the engine wrote: clusters with the states of their methods.
//!
//! What an engine stored stays readable, and a state gives the clusters that it gave then. `cargo test -p
//! stratakv-tests --test golden_states -- --ignored` writes the store if it does not exist.

use std::fs;
use std::path::{Path, PathBuf};
use stratakv::retrieval::SelectorId;
use stratakv::sim::{Geometry, Simulation};
use stratakv::{
    Budget, ByteSize, CreateOptions, Durability, OpenSequence, SelectRequest, Sequence, Store, StoreOptions,
};
use stratakv_testing::EntryShape;
use stratakv_tests::disk::{check, device_dirs, fast_scratch, files};
use stratakv_tests::rng::mix;

const SHAPE: EntryShape = EntryShape { kv_heads: 2, q_heads: 4, dim: 8, group: 8 };
const TOKENS: usize = 420;
/// The sequences, the method of their clusters, and a digest of the clusters: clusters per KV head with centroids, over
/// all heads with medoids, and over all heads by age.
const SEQUENCES: [(&str, &str, u64); 3] = [
    ("heads", "dynakv:8", 0xc845_c3b8_b03a_7b9e),
    ("joint", "swarm:8", 0x995d_9cd2_397a_1e9d),
    ("ages", "swarm:8:members", 0xa24a_c9ec_d35c_562a),
];

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../format-spec/golden/v0.6/store-states")
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

/// Appends the next tokens.
fn append(sequence: &mut Sequence, tokens: usize) {
    let [keys, values] = [1, 2].map(|plane| SHAPE.rows(sequence.len() as usize, tokens, plane));
    SHAPE.append(sequence, &keys, &values).expect("an append");
}

/// Returns a number that depends on the cluster of every token, after a check that queries read pages of clusters.
fn digest(sequence: &Sequence, id: SelectorId) -> u64 {
    for seed in 50..54 {
        let query = SHAPE.query(seed);
        let request = SelectRequest::query(&query).budget(Budget::tokens(100)).selector(id);
        assert!(sequence.select(0, request).expect("a selection").stored_pages() > 0, "query {seed}");
    }
    let summaries = sequence.selector_summaries(id, 0).expect("summaries");
    let lists: Vec<_> = summaries.iter().flat_map(|own| own.cluster_lists()).collect();
    let add = |sum: u64, cluster: &[u32]| {
        cluster.iter().fold(mix(sum ^ cluster.len() as u64), |sum, token| mix(sum ^ u64::from(*token)))
    };
    lists.iter().flat_map(|lists| lists.iter()).fold(0, add)
}

/// Writes the golden store with the public interface of the engine, on a simulated disk with small manifests. The
/// methods grow with their sequences, so that the states are not those of fresh clusters.
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
    for (key, method, _) in SEQUENCES {
        let mut sequence = store.create_sequence(&SHAPE.layout(), CreateOptions::new().key(key)).expect("a sequence");
        append(&mut sequence, TOKENS - 60);
        let id = sequence.attach(SHAPE.selector(method)).expect("a selector");
        if method.starts_with("swarm") {
            let queries: Vec<Vec<f32>> = (0..40).map(|seed| SHAPE.query(seed)).collect();
            let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
            sequence.profile(id, 0, &queries, None).expect("a profile");
        }
        for step in 0..6 {
            let query = SHAPE.query(60 + step);
            let request = SelectRequest::query(&query).budget(Budget::tokens(100)).selector(id);
            sequence.select(0, request).expect("a selection");
            append(&mut sequence, 10);
        }
        sequence.commit(Durability::Sync).expect("a commit");
        let stored = sequence.store_clusters(id).expect("stored clusters");
        assert!(stored.state_bytes > 0, "{key}");
        println!("{key}: {:#x}", digest(&sequence, id));
    }
    store.close().expect("a close");
    let scratch = fast_scratch();
    simulation.dump(scratch.path()).expect("files");
    for file in files(&scratch.path().join("0")) {
        let target = golden().join(&file);
        fs::create_dir_all(target.parent().expect("a parent")).expect("a directory");
        fs::copy(scratch.path().join("0").join(&file), &target).expect("a copy");
    }
}

#[test]
fn kvfsck_reads_every_state() {
    let scratch = fast_scratch();
    let dirs = copied(scratch.path());
    let report = kvfsck::check(&dirs, &kvfsck::Options { full: true, ..kvfsck::Options::default() }, &());
    let report = report.expect("a report");
    assert!(report.clean, "{}", report.to_text());
    let totals = report.checked.clusters;
    assert_eq!((totals.directories, totals.states, totals.state_bytes), (4, 3, 15267), "{}", report.to_text());
}

#[test]
fn methods_have_the_clusters_of_the_golden_states() {
    for read_only in [true, false] {
        let scratch = fast_scratch();
        let dirs = copied(scratch.path());
        let options = Store::options().device(&dirs[0]).memory_limit(ByteSize::mib(32)).read_only(read_only);
        let store = options.open().expect("a store");
        for (nth, (key, method, expected)) in (1..).zip(SEQUENCES) {
            let mut sequence = store.open_sequence(key, OpenSequence::new()).expect("a sequence");
            let id = sequence.attach(SHAPE.selector(method)).expect("a selector");
            assert_eq!(store.health().restored_layers, nth, "{key}");
            assert_eq!(digest(&sequence, id), expected, "{key}");
        }
        assert_eq!(store.health().dropped_clusters, 0);
        store.close().expect("closed");
        assert!(check(&dirs).clean);
    }
}
