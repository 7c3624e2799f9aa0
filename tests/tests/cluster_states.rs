//! The state of a method that is stored with its clusters: an attachment takes it instead of clustering keys again.
//!
//! A second store does the same without being closed. What the reopened sequence chooses must be what this one chooses,
//! also after more tokens.

use kvfsck::ClusterTotals;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use stratakv::retrieval::SelectorId;
use stratakv::sequence::StoredClusters;
use stratakv::sim::{Geometry, Simulation};
use stratakv::{
    Budget, ByteSize, CreateOptions, Durability, ErrorKind, OpenSequence, SelectRequest, Sequence, Store, StoreOptions,
};
use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity};
use stratakv_format::frame::{FramePlace, FrameView, KIND_CLUSTER_DIRECTORY};
use stratakv_format::ids::NUMBER_MAX;
use stratakv_format::pool::StatePiece;
use stratakv_format::segment::{KIND_POOL, SegmentPage};
use stratakv_format::{DeviceIndex, Location, PAGE_BYTES, SegmentId, Unverified};
use stratakv_testing::EntryShape;
use stratakv_tests::damage::{Image, seal};
use stratakv_tests::disk::{check, device_dirs, fast_scratch, files};
use tempfile::TempDir;

const SHAPE: EntryShape = EntryShape { kv_heads: 2, q_heads: 4, dim: 8, group: 8 };
const TOKENS: usize = 900;
/// Clusters by centroids per KV head, by members' codes, and by medoids.
const METHODS: [&str; 7] = [
    "balanced:8",
    "balanced:8:members",
    "dynakv:8",
    "dynakv:8:members",
    "dynakv:8:joint",
    "swarm:8",
    "swarm:8:members",
];

fn options(dirs: &[PathBuf]) -> StoreOptions {
    let options = dirs.iter().fold(Store::options(), |options, dir| options.device(dir));
    options.memory_limit(ByteSize::mib(32)).segment_bytes(ByteSize::kib(256)).frame_bytes(ByteSize::kib(128))
}

/// A store with the sequence `key`.
struct Fixture {
    store: Store,
    sequence: Sequence,
    dirs: Vec<PathBuf>,
    scratch: TempDir,
    /// What kvfsck found in the store before it was opened.
    totals: ClusterTotals,
}

impl Fixture {
    fn new() -> Self {
        let scratch = fast_scratch();
        let dirs = device_dirs(scratch.path(), 1);
        let store = options(&dirs).open().expect("a store");
        let sequence = store.create_sequence(&SHAPE.layout(), CreateOptions::new().key("key")).expect("a sequence");
        Self { store, sequence, dirs, scratch, totals: ClusterTotals::default() }
    }

    /// Returns a sequence whose method has grown with it, while selections chose. All tokens are committed.
    fn grown(method: &str) -> (Self, SelectorId) {
        let mut own = Self::new();
        append(&mut own.sequence, TOKENS - 200);
        own.commit();
        let id = attach(&mut own.sequence, method, true);
        for step in 0..5 {
            choices(&own.sequence, id, step * 3..step * 3 + 3);
            append(&mut own.sequence, 40);
        }
        own.commit();
        choices(&own.sequence, id, 20..24);
        (own, id)
    }

    fn commit(&mut self) {
        self.sequence.commit(Durability::Sync).expect("a commit");
    }

    fn close(self) -> (Vec<PathBuf>, TempDir) {
        drop(self.sequence);
        self.store.close().expect("a close");
        (self.dirs, self.scratch)
    }

    fn open((dirs, scratch): (Vec<PathBuf>, TempDir)) -> Self {
        let store = options(&dirs).open().expect("the store opens");
        let sequence = store.open_sequence("key", OpenSequence::new()).expect("the sequence opens");
        Self { store, sequence, dirs, scratch, totals: ClusterTotals::default() }
    }

    /// Closes the store, checks it with kvfsck, and opens it again.
    fn reopened(self) -> Self {
        let closed = self.close();
        let report = check(&closed.0);
        assert!(report.clean, "{}", report.to_text());
        Self { totals: report.checked.clusters, ..Self::open(closed) }
    }

    /// Returns how many layers were restored from a state, and how many directories and states were dropped.
    fn health(&self) -> (u64, u64) {
        let health = self.store.health();
        (health.restored_layers, health.dropped_clusters)
    }
}

fn append(sequence: &mut Sequence, tokens: usize) {
    append_of(sequence, tokens, 0);
}

/// Appends tokens. Other lives have other elements.
fn append_of(sequence: &mut Sequence, tokens: usize, life: u64) {
    let first = sequence.len() as usize;
    let [keys, values] = [1, 2].map(|plane| SHAPE.rows(first, tokens, plane + 2 * life));
    SHAPE.append(sequence, &keys, &values).expect("an append");
}

/// Attaches a method. SWARM builds its clusters from recorded queries, which a state makes needless.
fn attach(sequence: &mut Sequence, method: &str, profiles: bool) -> SelectorId {
    let id = sequence.attach(SHAPE.selector(method)).expect("a selector");
    if method.starts_with("swarm") && profiles {
        let queries: Vec<Vec<f32>> = (0..40).map(|seed| SHAPE.query(seed)).collect();
        let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
        sequence.profile(id, 0, &queries, None).expect("a profile");
    }
    id
}

/// Returns the entries that queries choose, and whether pages of stored clusters give some.
fn choices(sequence: &Sequence, id: SelectorId, seeds: std::ops::Range<u64>) -> (Vec<Vec<Vec<u64>>>, bool) {
    let mut has_pages = false;
    let each = seeds.map(|seed| {
        let query = SHAPE.query(seed);
        let request = SelectRequest::query(&query).budget(Budget::tokens(100)).selector(id);
        let selection = sequence.select(0, request).expect("a selection");
        has_pages |= selection.stored_pages() > 0;
        SHAPE.entries(&selection)
    });
    (each.collect(), has_pages)
}

fn store(sequence: &mut Sequence, id: SelectorId) -> StoredClusters {
    sequence.store_clusters(id).expect("stored clusters")
}

#[test]
fn a_reopened_sequence_chooses_and_grows_as_one_that_was_not_closed() {
    for method in METHODS {
        let (mut own, id) = Fixture::grown(method);
        let (mut twin, twin_id) = Fixture::grown(method);
        let stored = store(&mut own.sequence, id);
        assert!(stored.state_bytes > 0 && stored.state_bytes.is_multiple_of(PAGE_BYTES as u64), "{method}: {stored:?}");
        let mut own = own.reopened();
        let totals = own.totals;
        assert!(totals.states == 1 && totals.state_bytes <= stored.state_bytes, "{method}: {totals:?}");
        let id = attach(&mut own.sequence, method, false);
        assert_eq!(own.health(), (1, 0), "{method}");
        for step in 0..6 {
            let seeds = 30 + step * 4..34 + step * 4;
            let (found, has_pages) = choices(&own.sequence, id, seeds.clone());
            assert_eq!(found, choices(&twin.sequence, twin_id, seeds).0, "{method}, step {step}");
            assert!(has_pages, "{method}, step {step}");
            append(&mut own.sequence, 60);
            append(&mut twin.sequence, 60);
        }
    }
}

#[test]
fn tokens_behind_the_state_are_given_to_the_method() {
    for method in METHODS {
        let (mut own, id) = Fixture::grown(method);
        store(&mut own.sequence, id);
        let mut own = own.reopened();
        append(&mut own.sequence, 100);
        own.commit();
        let mut own = own.reopened();
        let reopened = attach(&mut own.sequence, method, false);
        assert_eq!(own.health(), (1, 0), "{method}");
        let (mut twin, id) = Fixture::grown(method);
        append(&mut twin.sequence, 100);
        assert_eq!(choices(&own.sequence, reopened, 30..40).0, choices(&twin.sequence, id, 30..40).0, "{method}");
    }
}

#[test]
fn a_cut_below_the_state_costs_the_state_and_not_the_clusters() {
    for method in ["dynakv:8", "swarm:8"] {
        let (mut own, id) = Fixture::grown(method);
        let stored = store(&mut own.sequence, id);
        let mut own = own.reopened();
        let cut = own.sequence.len() - 20;
        assert!(stored.tokens < cut, "{method}: {stored:?}");
        own.sequence.truncate(cut).expect("a cut");
        own.commit();
        append_of(&mut own.sequence, 60, 1);
        own.commit();
        let mut own = own.reopened();
        assert_eq!(own.totals.states, 0);
        let id = attach(&mut own.sequence, method, true);
        assert_eq!((own.health(), choices(&own.sequence, id, 30..34).1), ((0, 0), true), "{method}");
        // The same tokens in a sequence that never had a state.
        let mut fresh = Fixture::new();
        append(&mut fresh.sequence, cut as usize);
        append_of(&mut fresh.sequence, 60, 1);
        let fresh_id = attach(&mut fresh.sequence, method, true);
        assert_eq!(choices(&own.sequence, id, 40..44).0, {
            choices(&fresh.sequence, fresh_id, 30..34);
            choices(&fresh.sequence, fresh_id, 40..44).0
        });
    }
}

#[test]
fn a_cut_in_the_same_handle_ends_the_state_until_a_commit_writes_it_again() {
    let (mut own, id) = Fixture::grown("dynakv:8");
    store(&mut own.sequence, id);
    own.sequence.truncate(own.sequence.len() - 20).expect("a cut");
    append_of(&mut own.sequence, 60, 1);
    own.commit();
    let expected = choices(&own.sequence, id, 30..34).0;
    let mut own = own.reopened();
    assert_eq!(own.totals.states, 1);
    let id = attach(&mut own.sequence, "dynakv:8", false);
    assert_eq!((own.health(), choices(&own.sequence, id, 30..34).0), ((1, 0), expected));
}

/// Calls `change` with the bytes of each piece of a state, or of a directory if `is_state` is false. The checksum of a
/// piece is corrected if `corrects`.
fn change_pieces(
    dirs: &[PathBuf],
    root: &Path,
    (is_state, corrects): (bool, bool),
    change: impl Fn(&mut [u8]),
) -> usize {
    let mut changed = 0;
    let segments = dirs[0].join("segments");
    for file in files(&segments) {
        let mut bytes = std::fs::read(segments.join(&file)).expect("a segment");
        let page = Unverified::<SegmentPage>::at_front(&bytes[..PAGE_BYTES], "segment").and_then(|page| page.verify());
        let Some(page) = page.ok().filter(|page| page.kind == KIND_POOL) else { continue };
        let mut at = 1_u32;
        loop {
            let location =
                Location { device: DeviceIndex(0), segment: SegmentId(page.segment.get()), page: at, pages: 0 };
            let (segment_generation, segment_nonce) = (page.generation.get(), page.nonce.get());
            let place = FramePlace { store_id: page.store_id, location, segment_generation, segment_nonce };
            let start = at as usize * PAGE_BYTES;
            let Some(frame) = bytes.get(start..) else { break };
            let Ok(view) = FrameView::verify(frame, &place) else { break };
            let header = *view.header();
            let pieces: Vec<_> = view
                .descriptors()
                .iter()
                .filter(|own| own.kind.get() == KIND_CLUSTER_DIRECTORY)
                .map(|own| (*own, view.checksums(own)[0].get()))
                .collect();
            at += header.location.pages.get();
            for (own, before) in pieces {
                let from = start + own.offset.get() as usize;
                let piece = from..from + own.bytes.get() as usize;
                if StatePiece::is_meant(&bytes[piece.clone()]) != is_state {
                    continue;
                }
                change(&mut bytes[piece.clone()]);
                changed += 1;
                let (nonce, origin) = (header.nonce.get(), stratakv_format::SequenceId(header.sequence.get()));
                let (layer, first, tokens) = (own.layer.get(), own.first_token.get(), own.tokens.get());
                let identity = PlaneIdentity::new(nonce, origin, KIND_CLUSTER_DIRECTORY, layer, first, tokens);
                let sum = PayloadChecksum::Crc64Nvme.compute(&identity, &bytes[piece]);
                if corrects {
                    let table = &mut bytes[start..start + PAGE_BYTES];
                    let place = table.windows(8).position(|own| own == before.to_le_bytes()).expect("a checksum");
                    table[place..place + 8].copy_from_slice(&sum.to_le_bytes());
                }
            }
        }
        std::fs::write(segments.join(&file), bytes).expect("written");
    }
    if corrects {
        let read = |path: &PathBuf| std::fs::read(dirs[0].join(path)).expect("a file");
        let all = files(&dirs[0]);
        let own = all.iter().map(|path| (0, path.to_string_lossy().into_owned(), read(path))).collect();
        let mut image = Image { files: own, devices: 1 };
        seal(&mut image);
        let written = image.write(&root.join("sealed")).expect("written");
        for file in files(&written[0]) {
            std::fs::copy(written[0].join(&file), dirs[0].join(&file)).expect("a copy");
        }
    }
    changed
}

/// Changes the pieces of a stored state. Returns the store, whose method is attached, and the choices of `30..34`.
fn with_changed_state(corrects: bool, change: impl Fn(&mut [u8])) -> (Fixture, Vec<Vec<Vec<u64>>>) {
    let (mut own, id) = Fixture::grown("dynakv:8");
    store(&mut own.sequence, id);
    let (dirs, scratch) = own.close();
    assert_eq!(change_pieces(&dirs, scratch.path(), (true, corrects), change), 1);
    let mut own = Fixture::open((dirs, scratch));
    let id = attach(&mut own.sequence, "dynakv:8", false);
    let (found, has_pages) = choices(&own.sequence, id, 30..34);
    assert!(has_pages, "the pages of the clusters are not damaged");
    (own, found)
}

#[test]
fn a_state_that_is_damaged_or_of_another_version_is_built_again_from_keys() {
    let mut fresh = Fixture::new();
    append(&mut fresh.sequence, TOKENS);
    let fresh_id = attach(&mut fresh.sequence, "dynakv:8", false);
    let expected = choices(&fresh.sequence, fresh_id, 30..34).0;
    type Change = fn(&mut [u8]);
    // Whether the checksum is right, the change, the dropped states, and whether kvfsck calls it damage.
    let cases: [(bool, Change, u64, bool); 7] = [
        (false, |piece| piece[1000] ^= 1, 1, true),
        (false, |piece| piece[500..].fill(0), 1, true),
        // The version of the pieces, and that of the encoding.
        (true, |piece| piece[0] = 3, 0, false),
        (true, |piece| piece[60] = 2, 0, false),
        // The set, the number of bytes, as if a piece were missing, and bytes of the state.
        (true, |piece| piece[8] ^= 1, 0, false),
        (true, |piece| piece[40] ^= 1, 0, false),
        (true, |piece| piece[110..140].fill(0xff), 0, false),
    ];
    for (row, (corrects, change, dropped, is_damage)) in cases.into_iter().enumerate() {
        let (own, found) = with_changed_state(corrects, change);
        assert_eq!((own.health(), found == expected), ((0, dropped), true), "row {row}");
        let report = check(&own.close().0);
        assert_eq!(report.clean, !is_damage, "row {row}: {}", report.to_text());
    }
    // Nothing was changed, so the choices of the grown sequence are there.
    let (own, found) = with_changed_state(true, |_| {});
    assert_eq!((own.health(), found == expected), ((1, 0), false));
}

#[test]
fn a_damaged_number_of_a_state_does_not_stop_the_next_one() {
    let (mut own, _) = with_changed_state(false, |piece| piece[24..32].fill(0xff));
    append(&mut own.sequence, 8);
    own.commit();
    let mut own = own.reopened();
    assert_eq!(own.totals.states, 1);
    attach(&mut own.sequence, "dynakv:8", false);
    assert_eq!(own.health(), (1, 0));
}

#[test]
fn a_new_set_follows_one_of_the_largest_generation() {
    for generation in [NUMBER_MAX - 1, NUMBER_MAX] {
        let (mut own, id) = Fixture::grown("dynakv:8");
        store(&mut own.sequence, id);
        let (dirs, scratch) = own.close();
        let change = |piece: &mut [u8]| piece[16..24].copy_from_slice(&generation.to_le_bytes());
        assert!(change_pieces(&dirs, scratch.path(), (false, true), change) > 0);
        let mut own = Fixture::open((dirs, scratch));
        let id = attach(&mut own.sequence, "dynakv:8", false);
        assert!(choices(&own.sequence, id, 30..34).1, "the pages are those of before");
        append(&mut own.sequence, 60);
        own.commit();
        let grown = store(&mut own.sequence, id);
        // Pages stay in the last generation. Behind it all pages are written again.
        assert_eq!(grown.kept_pages == 0, generation == NUMBER_MAX, "{grown:?}");
        let mut own = own.reopened();
        let id = attach(&mut own.sequence, "dynakv:8", false);
        assert_eq!((own.health(), choices(&own.sequence, id, 30..34).1), ((1, 0), true));
        let stored = store(&mut own.sequence, id);
        assert_eq!(stored.kept_pages == 0, generation < NUMBER_MAX, "{stored:?}");
    }
}

#[test]
fn a_fork_takes_the_state_of_its_parent_and_keeps_it() {
    let (mut own, id) = Fixture::grown("dynakv:8");
    store(&mut own.sequence, id);
    // The choices of a query do not change those of the next one before an append.
    let expected = choices(&own.sequence, id, 30..34).0;
    let mut fork = own.sequence.fork_as("fork").expect("a fork");
    fork.commit(Durability::Sync).expect("a commit");
    let fork_id = attach(&mut fork, "dynakv:8", false);
    assert_eq!((own.health(), &choices(&fork, fork_id, 30..34).0), ((1, 0), &expected));
    // A fork of fewer tokens has the clusters, and not the state.
    let mut short = own.sequence.fork_as("short").expect("a fork");
    short.truncate(TOKENS as u64 - 20).expect("a cut");
    short.commit(Durability::Sync).expect("a commit");
    let short_id = attach(&mut short, "dynakv:8", false);
    assert_eq!((own.health(), choices(&short, short_id, 30..34).1), ((1, 0), true));
    drop((fork, short));
    let Fixture { store, sequence, dirs, scratch, .. } = own.reopened();
    sequence.delete(Durability::Sync).expect("a deletion");
    store.close().expect("a close");
    assert!(check(&dirs).clean);
    let store = options(&dirs).open().expect("the store opens");
    let mut fork = store.open_sequence("fork", OpenSequence::new()).expect("a sequence");
    let fork_id = attach(&mut fork, "dynakv:8", false);
    assert_eq!((store.health().restored_layers, choices(&fork, fork_id, 30..34).0), (1, expected));
    drop((fork, store, scratch));
}

#[test]
fn a_state_of_tokens_that_are_not_committed_waits_for_the_commit() {
    let (mut own, id) = Fixture::grown("dynakv:8");
    append(&mut own.sequence, 60);
    let stored = store(&mut own.sequence, id);
    assert_eq!(stored.state_bytes, 0);
    let expected = choices(&own.sequence, id, 30..34).0;
    // Without the commit, the tokens are gone, and there is no state.
    own.commit();
    let mut own = own.reopened();
    let id = attach(&mut own.sequence, "dynakv:8", false);
    assert_eq!((own.health(), choices(&own.sequence, id, 30..34).0), ((1, 0), expected));
}

#[test]
fn a_state_is_written_again_when_enough_was_appended() {
    // Keys are long, so that a state is a small part of them.
    const WIDE: EntryShape = EntryShape { kv_heads: 1, q_heads: 2, dim: 256, group: 8 };
    let grow = |sequence: &mut Sequence, tokens: usize| {
        let first = sequence.len() as usize;
        let [keys, values] = [1, 2].map(|plane| WIDE.rows(first, tokens, plane));
        WIDE.append(sequence, &keys, &values).expect("an append");
        // A durable commit would write the state by itself.
        sequence.commit(Durability::Lazy).expect("a commit");
    };
    let chosen = |sequence: &Sequence, id| {
        let query = WIDE.query(7);
        let request = SelectRequest::query(&query).budget(Budget::tokens(100)).selector(id);
        WIDE.entries(&sequence.select(0, request).expect("a selection"))
    };
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), 1);
    let mut store = options(&dirs).open().expect("a store");
    let mut sequence = store.create_sequence(&WIDE.layout(), CreateOptions::new().key("key")).expect("a sequence");
    grow(&mut sequence, TOKENS);
    let id = sequence.attach(WIDE.selector("dynakv:8")).expect("a selector");
    let first = sequence.store_clusters(id).expect("stored clusters").state_bytes;
    let mut appended = 0;
    while appended < 100 * first {
        grow(&mut sequence, 200);
        chosen(&sequence, id);
        appended += 200 * WIDE.width() as u64 * 8;
        let stored = sequence.store_clusters(id).expect("stored clusters");
        assert!(stored.kept_pages > 0, "{stored:?}");
        if stored.state_bytes == 0 {
            continue;
        }
        // A frame has a header and padding beside the state.
        assert!(appended >= 20 * (stored.state_bytes - 2 * PAGE_BYTES as u64), "{appended} bytes: {stored:?}");
        let expected = chosen(&sequence, id);
        drop(sequence);
        store.close().expect("a close");
        let report = check(&dirs);
        assert!(report.clean && report.checked.clusters.states == 1, "{}", report.to_text());
        store = options(&dirs).open().expect("the store opens");
        sequence = store.open_sequence("key", OpenSequence::new()).expect("the sequence opens");
        let again = sequence.attach(WIDE.selector("dynakv:8")).expect("a selector");
        assert_eq!((store.health().restored_layers, chosen(&sequence, again)), (1, expected));
        return;
    }
    panic!("no state of {first} bytes was written again within {appended} bytes");
}

#[test]
fn dropped_clusters_take_their_state_along() {
    let (mut own, id) = Fixture::grown("swarm:8");
    store(&mut own.sequence, id);
    own.sequence.drop_stored_clusters().expect("dropped");
    own.commit();
    let mut own = own.reopened();
    assert_eq!(own.totals.states, 0);
    let id = attach(&mut own.sequence, "swarm:8", false);
    assert_eq!(own.health(), (0, 0));
    let query = SHAPE.query(1);
    let error = own.sequence.select(0, SelectRequest::query(&query).budget(Budget::tokens(100)).selector(id));
    assert_eq!(error.map(|_| ()).expect_err("no profile").kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_full_store_keeps_the_clusters_and_gives_up_the_state() {
    let mut outcomes = BTreeSet::new();
    for (tokens, segments) in (10..20).flat_map(|tokens| (3..14).map(move |segments| (tokens * 64, segments))) {
        let geometry = Geometry {
            devices: 1,
            device_bytes: 8 << 20,
            manifest_pages: 4,
            batch_bytes: 12_000,
            whole: false,
            open_files: None,
        };
        let simulation = Simulation::new(&geometry, 1);
        let capacity = ByteSize::kib(64 * segments + 4 * (4 + 16) * 4);
        let options = Store::options().memory_limit(ByteSize::mib(32)).segment_bytes(ByteSize::kib(64));
        let Ok(store) = simulation.open(options.frame_bytes(ByteSize::kib(64)).capacity(capacity)) else { continue };
        let mut sequence = store.create_sequence(&SHAPE.layout(), CreateOptions::new()).expect("a sequence");
        let [keys, values] = [1, 2].map(|plane| SHAPE.rows(0, tokens, plane));
        if SHAPE.append(&mut sequence, &keys, &values).is_err() || sequence.commit(Durability::Sync).is_err() {
            continue;
        }
        let id = attach(&mut sequence, "dynakv:8", false);
        outcomes.insert(match sequence.store_clusters(id) {
            Ok(stored) => {
                assert!(choices(&sequence, id, 30..34).1, "{stored:?}");
                if stored.state_bytes > 0 { "whole" } else { "clusters" }
            }
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::NoSpace);
                "none"
            }
        });
    }
    assert_eq!(outcomes, BTreeSet::from(["none", "clusters", "whole"]));
}
