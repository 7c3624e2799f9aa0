//! Clusters that a sequence stores: what is on the devices afterwards, and what happens to it.
//!
//! kvfsck is the second reader: it compares every page and directory, and the tokens that they cover.

use kvfsck::ClusterTotals;
use std::path::PathBuf;
use stratakv::layout::{LayerSpec, PlaneCodec};
use stratakv::retrieval::{MethodSpec, SelectorId};
use stratakv::sequence::StoredClusters;
use stratakv::{
    Budget, ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, SelectRequest, Selection,
    Sequence, Store, TensorView, attend,
};
use stratakv_format::segment::KIND_POOL;
use stratakv_tests::disk::{check, device_dirs, small_options};

const HEADS: usize = 2;
const DIM: usize = 16;
const TOKENS: usize = 900;

/// Returns a layout of two whole layers, with one of a window between them.
fn layout(dtype: DType, codec: PlaneCodec) -> KvLayout {
    let (heads, dim) = (HEADS as u16, DIM as u16);
    let layers = [LayerSpec::full(heads, dim), LayerSpec::sliding(heads, dim, 32), LayerSpec::full(heads, dim)];
    let specs = layers.map(|layer| layer.codecs(codec, codec));
    KvLayout::builder().layer_specs(specs).group_tokens(8).dtype(dtype).build().expect("a layout")
}

/// Appends tokens around 9 centres to all layers.
fn append(sequence: &mut Sequence, tokens: usize, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut rows: Vec<f32> = Vec::new();
    for _ in 0..tokens {
        let mut centre = fastrand::Rng::with_seed(rng.u64(0..9));
        rows.extend((0..HEADS * DIM).map(|_| 2.0 * (centre.f32() - 0.5) + 0.5 * (rng.f32() - 0.5)));
    }
    let view = TensorView::token_major(&rows, tokens, HEADS, DIM);
    (0..3).for_each(|layer| sequence.append(layer, view, view).expect("an append"));
}

fn attach(sequence: &mut Sequence, method: &str) -> SelectorId {
    let spec: MethodSpec = method.parse().expect("a method");
    let id = sequence.attach(spec.selector(None).expect("a selector")).expect("a selector that is attached");
    if method.starts_with("swarm") || method.starts_with("infllm") {
        let queries: Vec<Vec<f32>> = (0..40)
            .map(|seed| {
                let mut rng = fastrand::Rng::with_seed(seed);
                (0..HEADS * DIM).map(|_| rng.f32() - 0.5).collect()
            })
            .collect();
        let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
        (0..3).for_each(|layer| sequence.profile(id, layer, &queries, None).expect("a profile"));
    }
    id
}

/// Checks a store with kvfsck, and compares each entry of its clusters with the group of its token.
fn full_check(dirs: &[PathBuf]) {
    let options = kvfsck::Options { full: true, ..kvfsck::Options::default() };
    let report = kvfsck::check(dirs, &options, &()).expect("a report");
    assert!(report.clean, "{report:?}");
}

/// A store with one sequence, `key`, of [`TOKENS`] committed tokens.
struct Fixture {
    store: Store,
    sequence: Sequence,
    dirs: Vec<PathBuf>,
    _scratch: tempfile::TempDir,
}

impl Fixture {
    fn new(devices: usize, layout: &KvLayout) -> Self {
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let dirs = device_dirs(scratch.path(), devices);
        let store = small_options(&dirs).open().expect("a store");
        let mut sequence = store.create_sequence(layout, CreateOptions::new().key("key")).expect("a sequence");
        append(&mut sequence, TOKENS, 1);
        sequence.commit(Durability::Sync).expect("a commit");
        Self { store, sequence, dirs, _scratch: scratch }
    }

    fn store(&mut self, method: &str) -> StoredClusters {
        let id = attach(&mut self.sequence, method);
        let stored = self.sequence.store_clusters(id).expect("stored clusters");
        self.sequence.detach(id).expect("a selector");
        stored
    }

    /// Closes the store, checks it with kvfsck, and opens it again.
    fn reopened(self) -> (Self, ClusterTotals) {
        let Self { store, sequence, dirs, _scratch } = self;
        drop(sequence);
        store.close().expect("a close");
        full_check(&dirs);
        let totals = check(&dirs).checked.clusters;
        let store = small_options(&dirs).open().expect("the store opens");
        let sequence = store.open_sequence("key", OpenSequence::new()).expect("the sequence opens");
        (Self { store, sequence, dirs, _scratch }, totals)
    }
}

#[test]
fn kvfsck_reads_the_clusters_of_every_method() {
    let cases = [
        ("balanced:8:joint", DType::F16, PlaneCodec::Raw, false),
        ("dynakv:8", DType::F16, PlaneCodec::Raw, true),
        ("dynakv:8:joint", DType::F32, PlaneCodec::Int8, false),
        ("kmeans:16:joint", DType::Bf16, PlaneCodec::Int4, false),
        ("clusterkv:8:heads", DType::F16, PlaneCodec::Raw, true),
        ("swarm:8", DType::F16, PlaneCodec::Int8, false),
        ("infllm:32", DType::F32, PlaneCodec::Raw, false),
    ];
    for (nth, (method, dtype, codec, per_head)) in cases.into_iter().enumerate() {
        let mut fixture = Fixture::new(1 + nth % 3, &layout(dtype, codec));
        let stored = fixture.store(method);
        let lists = if per_head { HEADS as u64 } else { 1 };
        assert!(stored.tokens >= 600 && stored.tokens < TOKENS as u64, "{method}: {stored:?}");
        assert!(stored.entries >= 2 * lists * stored.tokens, "{method}: {stored:?}");
        assert!(stored.device_bytes >= stored.page_bytes + stored.directory_bytes, "{method}: {stored:?}");
        let (fixture, totals) = fixture.reopened();
        assert_eq!((stored.layers, totals.directories), (2, 2 * lists), "{method}");
        assert_eq!((totals.clusters, totals.pages), (stored.clusters, stored.pages), "{method}");
        assert_eq!((totals.pool_pages, fixture.sequence.len()), (stored.pages, TOKENS as u64), "{method}");
        // A cluster has at most one run of pages on each device.
        let runs = totals.clusters * (1 + nth as u64 % 3) + totals.frames;
        assert!(totals.frames > 0 && totals.runs <= runs, "{method}: {totals:?}");
    }
}

#[test]
fn clusters_that_grow_keep_most_pages_and_every_check() {
    let cases = [
        ("balanced:8", DType::F16, PlaneCodec::Int8),
        ("dynakv:8", DType::F16, PlaneCodec::Raw),
        ("dynakv:8:joint", DType::F32, PlaneCodec::Int8),
        ("clusterkv:8:heads", DType::Bf16, PlaneCodec::Raw),
        ("swarm:8", DType::F16, PlaneCodec::Raw),
        ("infllm:32", DType::F32, PlaneCodec::Raw),
    ];
    for (nth, (method, dtype, codec)) in cases.into_iter().enumerate() {
        let mut fixture = Fixture::new(1 + nth % 3, &layout(dtype, codec));
        let id = attach(&mut fixture.sequence, method);
        let mut before = fixture.sequence.store_clusters(id).expect("stored clusters");
        assert_eq!(before.kept_pages, 0, "{method}");
        for round in 0..6 {
            append(&mut fixture.sequence, 64, 10 + round);
            fixture.sequence.commit(Durability::Sync).expect("a commit");
            let grown = fixture.sequence.store_clusters(id).expect("stored clusters");
            // ClusterKV makes clusters of 320 new tokens at a time, and SWARM has a window of 256.
            assert!(grown.tokens >= before.tokens, "{method}, {round}: {grown:?}");
            assert!(grown.kept_pages * 2 > before.pages, "{method}, {round}: {grown:?} after {before:?}");
            before = grown;
        }
        // Nothing has changed. A cluster at the limit of its runs may still be written in one.
        let same = fixture.sequence.store_clusters(id).expect("stored clusters");
        assert!(same.tokens > 1000 && same.kept_pages * 10 >= same.pages * 9, "{method}: {same:?}");
        let (fixture, totals) = fixture.reopened();
        assert_eq!(totals.pages, same.pages, "{method}");
        assert!(totals.pool_pages >= same.pages, "{method}: {totals:?}");
        drop(fixture);
    }
}

#[test]
fn grown_clusters_go_with_a_cut_and_leave_no_pool() {
    let mut fixture = Fixture::new(2, &layout(DType::F16, PlaneCodec::Raw));
    let id = attach(&mut fixture.sequence, "dynakv:8");
    let first = fixture.sequence.store_clusters(id).expect("stored clusters");
    append(&mut fixture.sequence, 200, 5);
    fixture.sequence.commit(Durability::Sync).expect("a commit");
    let grown = fixture.sequence.store_clusters(id).expect("stored clusters");
    assert!(grown.kept_pages > 0 && grown.tokens > first.tokens);
    // The cut takes tokens of the second set alone, whose directories name pages of the first.
    fixture.sequence.truncate(first.tokens + 8).expect("a cut");
    fixture.sequence.commit(Durability::Sync).expect("a commit");
    let (_, totals) = fixture.reopened();
    assert_eq!((totals.frames, totals.directories), (0, 0));
}

#[test]
fn a_fork_that_grows_writes_pages_of_its_own() {
    let mut fixture = Fixture::new(1, &layout(DType::F16, PlaneCodec::Raw));
    let id = attach(&mut fixture.sequence, "dynakv:8");
    let own = fixture.sequence.store_clusters(id).expect("stored clusters");
    let mut fork = fixture.sequence.fork_as("fork").expect("a fork");
    append(&mut fork, 64, 7);
    fork.commit(Durability::Sync).expect("a commit");
    let other = attach(&mut fork, "dynakv:8");
    let stored = fork.store_clusters(other).expect("stored clusters");
    assert!(stored.kept_pages == 0 && stored.pages > own.pages, "{stored:?}");
    // The parent grows while the fork has its own set.
    append(&mut fixture.sequence, 64, 8);
    fixture.sequence.commit(Durability::Sync).expect("a commit");
    let grown = fixture.sequence.store_clusters(id).expect("stored clusters");
    assert!(grown.kept_pages > 0, "{grown:?}");
    drop(fork);
    let (_, totals) = fixture.reopened();
    assert_eq!(totals.pages, stored.pages + grown.pages);
}

#[test]
fn a_sequence_has_one_stored_set_and_may_drop_it() {
    let mut fixture = Fixture::new(2, &layout(DType::F16, PlaneCodec::Raw));
    fixture.store("dynakv:8");
    let second = fixture.store("kmeans:8:joint");
    let (mut fixture, totals) = fixture.reopened();
    assert_eq!((totals.directories, totals.pages), (2, second.pages));
    let third = fixture.store("dynakv:16");
    let (mut fixture, totals) = fixture.reopened();
    assert_eq!((totals.directories, totals.pages), (4, third.pages));
    fixture.sequence.drop_stored_clusters().expect("a commit");
    fixture.sequence.drop_stored_clusters().expect("nothing to do");
    let (_, totals) = fixture.reopened();
    assert_eq!(totals, ClusterTotals::default());
}

#[test]
fn clusters_cover_committed_tokens_and_go_with_a_cut_below_them() {
    let mut fixture = Fixture::new(1, &layout(DType::F16, PlaneCodec::Raw));
    append(&mut fixture.sequence, 100, 2);
    let stored = fixture.store("kmeans:8");
    assert!(stored.tokens <= TOKENS as u64, "{stored:?}");
    // A cut that no commit has recorded yet: the tokens behind it are others on the device.
    fixture.sequence.commit(Durability::Sync).expect("a commit");
    fixture.sequence.truncate(500).expect("a cut");
    append(&mut fixture.sequence, 300, 3);
    let stored = fixture.store("kmeans:8");
    assert_eq!(stored.tokens, 496);
    fixture.sequence.commit(Durability::Sync).expect("a commit");
    let (mut fixture, totals) = fixture.reopened();
    assert_eq!(totals.pages, stored.pages);
    fixture.sequence.truncate(496).expect("a cut");
    fixture.sequence.commit(Durability::Sync).expect("a commit");
    let (mut fixture, totals) = fixture.reopened();
    assert_eq!(totals.pages, stored.pages);
    fixture.sequence.truncate(495).expect("a cut");
    fixture.sequence.commit(Durability::Sync).expect("a commit");
    let (_, totals) = fixture.reopened();
    assert_eq!(totals, ClusterTotals::default());
}

#[test]
fn a_fork_keeps_the_clusters_of_a_deleted_parent() {
    let mut fixture = Fixture::new(2, &layout(DType::Bf16, PlaneCodec::Raw));
    let stored = fixture.store("dynakv:8");
    let mut fork = fixture.sequence.fork_as("fork").expect("a fork");
    append(&mut fork, 20, 4);
    // No commit has named the fork, so it has nothing to store clusters beside.
    let id = attach(&mut fork, "kmeans:8");
    assert_eq!(fork.store_clusters(id).expect_err("a refusal").kind(), ErrorKind::InvalidArgument);
    fork.commit(Durability::Sync).expect("a commit");
    drop(fork);
    let Fixture { store, sequence, dirs, _scratch } = fixture;
    sequence.delete(Durability::Sync).expect("a deletion");
    store.close().expect("a close");
    full_check(&dirs);
    assert_eq!(check(&dirs).checked.clusters.pages, stored.pages);
}

#[test]
fn clusters_that_cannot_be_stored_are_refused() {
    let refused = |sequence: &mut Sequence, method: &str| {
        let id = attach(sequence, method);
        let error = sequence.store_clusters(id).expect_err("a refusal");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        error.to_string()
    };
    let mut fixture = Fixture::new(1, &layout(DType::F16, PlaneCodec::Raw));
    for method in ["quest", "tokens"] {
        assert!(refused(&mut fixture.sequence, method).contains("no clusters"), "{method}");
    }
    let mut new = fixture.store.create_sequence(fixture.sequence.layout(), CreateOptions::new()).expect("a sequence");
    append(&mut new, 400, 1);
    assert!(refused(&mut new, "kmeans:8").contains("of 0 committed tokens"));
    let sliding = [LayerSpec::sliding(HEADS as u16, DIM as u16, 600), LayerSpec::none()];
    let sliding = KvLayout::builder().layer_specs(sliding).group_tokens(8).build().expect("a layout");
    let mut new = fixture.store.create_sequence(&sliding, CreateOptions::new()).expect("a sequence");
    let rows = vec![0.5_f32; 400 * HEADS * DIM];
    let view = TensorView::token_major(&rows, 400, HEADS, DIM);
    new.append(0, view, view).expect("an append");
    new.commit(Durability::Sync).expect("a commit");
    assert!(refused(&mut new, "kmeans:8").contains("window"));
    drop(new);
    let gone = attach(&mut fixture.sequence, "kmeans:8");
    fixture.sequence.detach(gone).expect("a selector");
    let error = fixture.sequence.store_clusters(gone).expect_err("a refusal");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_store_that_is_open_for_reading_stores_no_clusters() {
    let fixture = Fixture::new(1, &layout(DType::F16, PlaneCodec::Raw));
    let Fixture { store, sequence, dirs, _scratch } = fixture;
    drop(sequence);
    store.close().expect("a close");
    let store = small_options(&dirs).read_only(true).open().expect("the store opens");
    let mut sequence = store.open_sequence("key", OpenSequence::new()).expect("the sequence opens");
    let id = attach(&mut sequence, "kmeans:8");
    assert_eq!(sequence.store_clusters(id).expect_err("a refusal").kind(), ErrorKind::ReadOnly);
}

#[test]
fn a_full_store_gives_up_clusters_of_closed_sequences_and_evicts_none() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let dirs = device_dirs(scratch.path(), 1);
    let options = || small_options(&dirs).capacity(ByteSize::mib(32)).watermarks(1.0, 1.0);
    let store = options().open().expect("a store");
    let layout = layout(DType::F16, PlaneCodec::Raw);
    let mut stored = Vec::new();
    for nth in 0..40 {
        let create = CreateOptions::new().key(format!("{nth}")).evictable(10);
        let mut sequence = store.create_sequence(&layout, create).expect("a sequence");
        append(&mut sequence, 600, nth);
        sequence.commit(Durability::Sync).expect("a commit, which may evict");
        let id = attach(&mut sequence, "kmeans:8:joint");
        let before = store.sequences().len();
        match sequence.store_clusters(id) {
            Ok(_) => stored.push(nth),
            Err(e) => assert_eq!(e.kind(), ErrorKind::NoSpace, "{e}"),
        }
        assert_eq!(store.sequences().len(), before, "no sequence is evicted for clusters");
    }
    assert!(stored.len() > 6, "{stored:?}");
    store.close().expect("a close");
    full_check(&dirs);
    let totals = check(&dirs).checked.clusters;
    assert!(totals.directories < 4 * stored.len() as u64, "{totals:?}");
}

#[test]
fn a_full_store_gives_up_clusters_of_mostly_dead_pools_even_of_open_sequences() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let dirs = device_dirs(scratch.path(), 1);
    // A segment has space for several sets.
    let options = small_options(&dirs).segment_bytes(ByteSize::mib(1)).capacity(ByteSize::mib(32));
    let store = options.watermarks(1.0, 1.0).open().expect("a store");
    let layout = layout(DType::F16, PlaneCodec::Raw);
    let mut sequences: Vec<(Sequence, SelectorId)> = (0..12)
        .map(|nth| {
            let mut sequence = store.create_sequence(&layout, CreateOptions::new()).expect("a sequence");
            append(&mut sequence, 600, nth);
            sequence.commit(Durability::Sync).expect("a commit");
            let id = attach(&mut sequence, "kmeans:8:joint");
            sequence.store_clusters(id).expect("stored clusters");
            (sequence, id)
        })
        .collect();
    // The clusters of one sequence are left between dead ones.
    let (kept, id) = sequences.swap_remove(5);
    for (mut sequence, _) in sequences {
        sequence.drop_stored_clusters().expect("a commit");
    }
    let stored_pages = || {
        let query = query(1);
        let request = SelectRequest::query(&query).budget(Budget::tokens(120)).selector(id);
        let selection = kept.select(0, request).expect("a selection");
        let (mut out, batch) = (vec![0.0; 2 * HEADS * DIM], store.read(&[&selection]).submit().expect("a read"));
        attend(&query, &selection, batch.wait().expect("a read").get(0).expect("blocks"), &mut out).expect("attention");
        selection.stored_pages()
    };
    assert!(stored_pages() > 0);
    let refused = (0..1000).find_map(|nth| {
        let mut sequence = store.create_sequence(&layout, CreateOptions::new()).expect("a sequence");
        let rows = vec![nth as f32; 600 * HEADS * DIM];
        let view = TensorView::token_major(&rows, 600, HEADS, DIM);
        let appended = (0..3).try_for_each(|layer| sequence.append(layer, view, view));
        appended.and_then(|()| sequence.commit(Durability::Sync)).err()
    });
    assert_eq!(refused.expect("the store fills").kind(), ErrorKind::NoSpace);
    assert_eq!(stored_pages(), 0, "groups give the entries");
    drop(kept);
    store.close().expect("a close");
    full_check(&dirs);
    assert_eq!(check(&dirs).checked.clusters.pool_pages, 0);
}

/// Returns a query of 4 heads.
fn query(seed: u64) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..2 * HEADS * DIM).map(|_| 3.0 * (rng.f32() - 0.5)).collect()
}

/// The queries whose selections are compared.
const QUERIES: u64 = 6;

impl Fixture {
    fn select(&self, id: SelectorId, layer: usize, seed: u64) -> Selection {
        let query = query(seed);
        let request = SelectRequest::query(&query).budget(Budget::tokens(120)).selector(id);
        self.sequence.select(layer, request).expect("a selection")
    }

    /// Reads a selection and attends to it. Returns the output, and the requests of the read.
    fn output(&self, seed: u64, selection: &Selection) -> (Vec<f32>, usize) {
        let (query, mut out) = (query(seed), vec![0.0; 2 * HEADS * DIM]);
        let ticket = self.store.read(&[selection]).submit().expect("a read in flight");
        let requests = ticket.requests();
        let batch = ticket.wait().expect("a read");
        attend(&query, selection, batch.get(0).expect("the selection"), &mut out).expect("attention");
        (out, requests)
    }

    fn counters(&self) -> (u64, u64) {
        let health = self.store.health();
        (health.devices.iter().map(|device| device.rebuilt_pages).sum(), health.dropped_clusters)
    }

    /// Returns the segment files of pools.
    fn pools(&self) -> Vec<PathBuf> {
        let files = self.dirs.iter().flat_map(|dir| std::fs::read_dir(dir.join("segments")).expect("a directory"));
        let files = files.map(|file| file.expect("a file").path());
        files.filter(|file| std::fs::read(file).expect("a segment")[kind_at()] == KIND_POOL).collect()
    }
}

/// Returns where a segment header has its kind.
fn kind_at() -> usize {
    std::mem::offset_of!(stratakv_format::segment::SegmentPage, kind)
}

fn entries(selection: &Selection) -> Vec<Vec<u64>> {
    (0..HEADS).map(|head| selection.entries(head).collect()).collect()
}

fn assert_close(one: &[f32], other: &[f32], what: &str) {
    for (at, (one, other)) in one.iter().zip(other).enumerate() {
        assert!((one - other).abs() <= 2e-5, "{what}: element {at} is {one}, not {other}");
    }
}

#[test]
fn selections_from_pages_equal_those_from_groups() {
    let cases = [
        ("dynakv:8", DType::F16, PlaneCodec::Raw),
        ("dynakv:8:joint", DType::F32, PlaneCodec::Raw),
        ("kmeans:8:joint", DType::F16, PlaneCodec::Int8),
        ("kmeans:16", DType::Bf16, PlaneCodec::Int4),
        ("swarm:8", DType::F16, PlaneCodec::Raw),
    ];
    for (method, dtype, codec) in cases {
        let mut fixture = Fixture::new(2, &layout(dtype, codec));
        // Tokens behind the clusters are attended from groups.
        append(&mut fixture.sequence, 40, 5);
        let id = attach(&mut fixture.sequence, method);
        let both = |fixture: &Fixture| {
            let all = (0..QUERIES).flat_map(|seed| [0, 1, 2].map(|layer| (seed, layer)));
            all.map(|(seed, layer)| {
                let selection = fixture.select(id, layer, seed);
                let (out, requests) = fixture.output(seed, &selection);
                assert_eq!(fixture.output(seed, &selection).0, out, "{method}: a repeated read has the same bits");
                (layer, entries(&selection), selection.stored_pages(), out, requests)
            })
            .collect::<Vec<_>>()
        };
        let before = both(&fixture);
        fixture.sequence.store_clusters(id).expect("stored clusters");
        let after = both(&fixture);
        for ((layer, entries, none, out, _), (_, same, pages, again, _)) in before.iter().zip(&after) {
            assert_eq!(entries, same, "{method}: layer {layer}");
            assert_eq!((*none, *pages > 0), (0, *layer != 1), "{method}: layer {layer}");
            assert_close(again, out, method);
        }
        assert_eq!(fixture.counters(), (0, 0), "{method}");
        // A layer without pages has the same bits.
        assert!(before.iter().zip(&after).filter(|(one, _)| one.0 == 1).all(|(one, other)| one.3 == other.3));
        fixture.sequence.drop_stored_clusters().expect("a commit");
        let dropped = both(&fixture);
        assert!(before.iter().zip(&dropped).all(|(one, other)| one.3 == other.3 && other.2 == 0), "{method}");
    }
}

#[test]
fn a_handle_that_attaches_the_method_again_reads_pages() {
    let mut fixture = Fixture::new(1, &layout(DType::F16, PlaneCodec::Raw));
    fixture.store("kmeans:8:joint");
    let (mut fixture, _) = fixture.reopened();
    let id = attach(&mut fixture.sequence, "kmeans:8:joint");
    let other = attach(&mut fixture.sequence, "dynakv:8");
    assert!(fixture.select(id, 0, 1).stored_pages() > 0);
    assert_eq!(fixture.select(other, 0, 1).stored_pages(), 0, "the clusters of another method");
    let mut fork = fixture.sequence.fork().expect("a fork");
    let own = attach(&mut fork, "kmeans:8:joint");
    let pages = |sequence: &Sequence, id| {
        let query = query(1);
        let request = SelectRequest::query(&query).budget(Budget::tokens(120)).selector(id);
        sequence.select(0, request).expect("a selection").stored_pages()
    };
    assert!(pages(&fork, own) > 0, "a fork shares them before its first commit");
    // Both hold other tokens from 400 on now, so neither may use the pages.
    fork.truncate(400).expect("a cut");
    append(&mut fork, 500, 8);
    assert_eq!(pages(&fork, own), 0);
    fork.detach(own).expect("a selector");
    let own = attach(&mut fork, "kmeans:8:joint");
    assert_eq!(pages(&fork, own), 0);
    assert!(pages(&fixture.sequence, id) > 0);
}

#[test]
fn a_page_that_rots_is_read_from_groups_with_the_same_bits() {
    for codec in [PlaneCodec::Raw, PlaneCodec::Int8] {
        let mut fixture = Fixture::new(1, &layout(DType::F16, codec));
        let id = attach(&mut fixture.sequence, "dynakv:8");
        fixture.sequence.store_clusters(id).expect("stored clusters");
        let selections: Vec<Selection> = (0..QUERIES).map(|seed| fixture.select(id, 0, seed)).collect();
        let outputs = |fixture: &Fixture| -> Vec<Vec<f32>> {
            (0..).zip(&selections).map(|(seed, selection)| fixture.output(seed, selection).0).collect()
        };
        let sound = outputs(&fixture);
        assert_eq!(fixture.counters(), (0, 0));
        for file in fixture.pools() {
            let mut bytes = std::fs::read(&file).expect("a segment");
            // Every second page.
            for page in bytes.chunks_mut(2 * 4096).skip(1) {
                page[..4096].iter_mut().for_each(|byte| *byte ^= 0x55);
            }
            std::fs::write(&file, bytes).expect("a segment");
        }
        assert!(outputs(&fixture) == sound, "{codec:?}");
        assert!(fixture.counters().0 > 0, "{codec:?}");
        assert!(fixture.store.health().checksum_failures > 0);
    }
}

#[test]
fn a_directory_that_rots_is_dropped_and_groups_give_everything() {
    let mut fixture = Fixture::new(1, &layout(DType::F16, PlaneCodec::Raw));
    fixture.store("kmeans:8:joint");
    let pools = fixture.pools();
    let Fixture { store, sequence, dirs, _scratch } = fixture;
    drop(sequence);
    store.close().expect("a close");
    for file in pools {
        let mut bytes = std::fs::read(&file).expect("a segment");
        bytes[4096..].iter_mut().for_each(|byte| *byte ^= 0x11);
        std::fs::write(&file, bytes).expect("a segment");
    }
    let store = small_options(&dirs).open().expect("the store opens");
    let sequence = store.open_sequence("key", OpenSequence::new()).expect("the sequence opens");
    let mut fixture = Fixture { store, sequence, dirs, _scratch };
    let id = attach(&mut fixture.sequence, "kmeans:8:joint");
    let selection = fixture.select(id, 0, 1);
    assert_eq!(selection.stored_pages(), 0);
    fixture.output(1, &selection);
    let (_, dropped) = fixture.counters();
    assert!(dropped > 0);
    // The clusters can be stored again.
    fixture.sequence.store_clusters(id).expect("stored clusters");
    assert!(fixture.select(id, 0, 1).stored_pages() > 0);
    let (_, totals) = fixture.reopened();
    assert_eq!(totals.directories, 2);
}

#[test]
fn neighbouring_pages_are_one_request() {
    let mut fixture = Fixture::new(1, &layout(DType::F32, PlaneCodec::Raw));
    let id = attach(&mut fixture.sequence, "kmeans:16:joint");
    fixture.sequence.store_clusters(id).expect("stored clusters");
    for seed in 0..QUERIES {
        let query = query(seed);
        let request = SelectRequest::query(&query).budget(Budget::tokens(700)).selector(id);
        let selection = fixture.sequence.select(0, request).expect("a selection");
        let (_, requests) = fixture.output(seed, &selection);
        assert!(requests * 2 < selection.stored_pages(), "{requests} requests for {} pages", selection.stored_pages());
    }
}
