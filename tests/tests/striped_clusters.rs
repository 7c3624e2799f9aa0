//! Stored clusters on several devices: placement, entries with several places, and devices that go and come.
//!
//! Each selection is compared with the one that reads groups: the same entries, the same bytes of each, and an output
//! that differs by rounding alone.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::PathBuf;
use stratakv::options::{BalancePolicy, ClusterStripe, StoreClusterOptions};
use stratakv::read::ReadTicket;
use stratakv::retrieval::{MethodSpec, SelectorId};
use stratakv::{
    Budget, ByteSize, CreateOptions, DType, Durability, KvLayout, OpenSequence, SelectRequest, Selection, Sequence,
    Store, StoreOptions, TensorView, attend,
};
use stratakv_tests::disk::{check, device_dirs, small_options};

const HEADS: usize = 2;
const DIM: usize = 64;
const GROUP: u64 = 8;
const TOKENS: usize = 1200;
const QUERIES: u64 = 5;

fn pages(count: u32) -> ClusterStripe {
    ClusterStripe::Pages(NonZeroU32::new(count).expect("a unit"))
}

fn query(seed: u64) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..2 * HEADS * DIM).map(|_| 3.0 * (rng.f32() - 0.5)).collect()
}

fn attach(sequence: &mut Sequence, method: &str) -> SelectorId {
    let spec: MethodSpec = method.parse().expect("a method");
    let id = sequence.attach(spec.selector(None).expect("a selector")).expect("a selector that is attached");
    if method.starts_with("swarm") {
        let queries: Vec<Vec<f32>> = (0..40).map(|seed| query(100 + seed)[..HEADS * DIM].to_vec()).collect();
        let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
        sequence.profile(id, 0, &queries, None).expect("a profile");
    }
    id
}

/// A selection as it was read: the output, and keys and values of each entry.
#[derive(PartialEq)]
struct ReadSelection {
    output: Vec<f32>,
    entries: BTreeMap<(usize, u64), Vec<u8>>,
    pages: usize,
}

/// A store on several devices, whose groups have two copies.
struct StripedStore {
    store: Store,
    sequence: Sequence,
    dirs: Vec<PathBuf>,
    _scratch: tempfile::TempDir,
}

impl StripedStore {
    fn new(devices: usize) -> Self {
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let dirs = device_dirs(scratch.path(), devices);
        let store = small_options(&dirs).open().expect("a store");
        let layout = KvLayout::builder().layers(1).kv_heads(HEADS as u16).head_dim(DIM as u16);
        let layout = layout.group_tokens(GROUP as u16).dtype(DType::F32).build().expect("a layout");
        let create = CreateOptions::new().key("key").copies(2);
        let mut sequence = store.create_sequence(&layout, create).expect("a sequence");
        let mut rng = fastrand::Rng::with_seed(1);
        let mut rows: Vec<f32> = Vec::new();
        for _ in 0..TOKENS {
            let mut centre = fastrand::Rng::with_seed(rng.u64(0..24));
            rows.extend((0..HEADS * DIM).map(|_| 2.0 * (centre.f32() - 0.5) + 0.5 * (rng.f32() - 0.5)));
        }
        let view = TensorView::token_major(&rows, TOKENS, HEADS, DIM);
        sequence.append(0, view, view).expect("an append");
        sequence.commit(Durability::Sync).expect("a commit");
        Self { store, sequence, dirs, _scratch: scratch }
    }

    /// Opens the store on devices `kept` with these options.
    fn reopened(self, kept: &[usize], options: impl Fn(StoreOptions) -> StoreOptions) -> Self {
        let Self { store, sequence, dirs, _scratch } = self;
        drop(sequence);
        store.close().expect("a close");
        let kept: Vec<&PathBuf> = kept.iter().map(|at| &dirs[*at]).collect();
        let store = options(small_options(&kept).allow_degraded(true)).open().expect("the store opens");
        let sequence = store.open_sequence("key", OpenSequence::new()).expect("the sequence opens");
        Self { store, sequence, dirs, _scratch }
    }

    fn store(&mut self, id: SelectorId, stripe: ClusterStripe) {
        let options = StoreClusterOptions::new().stripe(stripe);
        self.sequence.store_clusters_with(id, options).expect("stored clusters");
    }

    fn select(&self, id: SelectorId, seed: u64) -> Selection {
        let query = query(seed);
        let request = SelectRequest::query(&query).budget(Budget::tokens(160)).selector(id);
        self.sequence.select(0, request).expect("a selection")
    }

    fn read(&self, id: SelectorId, seed: u64) -> ReadSelection {
        let selection = self.select(id, seed);
        let batch = self.store.read(&[&selection]).submit().and_then(ReadTicket::wait).expect("a read");
        let blocks = batch.get(0).expect("the selection");
        let mut output = vec![0.0; 2 * HEADS * DIM];
        attend(&query(seed), &selection, blocks, &mut output).expect("attention");
        let mut entries = BTreeMap::new();
        for (nth, group) in selection.groups().enumerate() {
            let (keys, values) = blocks.group(nth).expect("planes");
            for head in 0..HEADS {
                for token in selection.entries(head).filter(|token| token / GROUP == group) {
                    let at = (head * GROUP as usize + (token % GROUP) as usize) * DIM * 4;
                    let bytes = [&keys[at..at + DIM * 4], &values[at..at + DIM * 4]].concat();
                    entries.insert((head, token), bytes);
                }
            }
        }
        ReadSelection { output, entries, pages: selection.stored_pages() }
    }

    fn read_all(&self, id: SelectorId) -> Vec<ReadSelection> {
        (0..QUERIES).map(|seed| self.read(id, seed)).collect()
    }

    /// Returns the bytes that each device gives for the selections of all queries.
    fn bytes_by_device(&self, id: SelectorId) -> Vec<u64> {
        let counters =
            || -> Vec<u64> { self.store.status().devices.iter().map(|device| device.counters.read_bytes).collect() };
        let before = counters();
        self.read_all(id);
        counters().iter().zip(before).map(|(now, before)| now - before).collect()
    }
}

/// Checks that pages gave what groups give. Returns the number of pages.
fn compare(found: &[ReadSelection], expected: &[ReadSelection], what: &str) -> usize {
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.entries == expected.entries, "{what}: entries or their bytes differ");
        for (one, other) in found.output.iter().zip(&expected.output) {
            assert!((one - other).abs() <= 2e-5, "{what}: an output is {one}, not {other}");
        }
    }
    found.iter().map(|own| own.pages).sum()
}

#[test]
fn striped_pages_give_the_entries_and_bytes_of_groups() {
    // Bytes are compared below, so nothing may follow the measured speed of devices: no choice of a place, no read
    // over a gap, and no repetition of a late read.
    let by_count = |options: StoreOptions| {
        options.balance(BalancePolicy::FewestReads).gap_limit(ByteSize(0)).hedge_percentile(None)
    };
    let mut striped = StripedStore::new(3).reopened(&[0, 1, 2], by_count);
    for method in ["swarm:8", "dynakv:8", "kmeans:16:joint"] {
        let id = attach(&mut striped.sequence, method);
        let from_groups = striped.read_all(id);
        for stripe in [pages(1), pages(2), pages(8), ClusterStripe::Cluster, ClusterStripe::Stretch] {
            striped.store(id, stripe);
            let what = format!("{method} with {stripe:?}");
            assert!(compare(&striped.read_all(id), &from_groups, &what) > 0, "{what}");
            let bytes = striped.bytes_by_device(id);
            let (least, most) = (bytes.iter().min().expect("devices"), bytes.iter().max().expect("devices"));
            if stripe == pages(1) {
                assert!(least * 2 > *most, "{what}: {bytes:?}");
            }
        }
        striped.sequence.drop_stored_clusters().expect("a commit");
        striped.sequence.detach(id).expect("a selector");
    }
    let id = attach(&mut striped.sequence, "swarm:8");
    striped.store(id, pages(2));
    let dirs = striped.dirs.clone();
    let striped = striped.reopened(&[0, 1, 2], |options| options);
    drop(striped.sequence);
    striped.store.close().expect("a close");
    let options = kvfsck::Options { full: true, ..kvfsck::Options::default() };
    let report = kvfsck::check(&dirs, &options, &()).expect("a report");
    assert!(report.clean && check(&dirs).checked.clusters.pages > 0, "{report:?}");
}

#[test]
fn the_schedule_changes_no_entry_and_no_byte() {
    let mut striped = StripedStore::new(3);
    let id = attach(&mut striped.sequence, "swarm:8");
    let expected = striped.read_all(id);
    striped.store(id, pages(1));
    for policy in [BalancePolicy::FirstCopy, BalancePolicy::FewestReads, BalancePolicy::EarliestFinish] {
        striped = striped.reopened(&[0, 1, 2], |options| options.balance(policy));
        let id = attach(&mut striped.sequence, "swarm:8");
        assert!(compare(&striped.read_all(id), &expected, &format!("{policy:?}")) > 0);
    }
}

#[test]
fn pages_of_devices_that_go_are_read_from_groups_and_new_devices_take_pages() {
    let mut striped = StripedStore::new(3);
    let id = attach(&mut striped.sequence, "kmeans:16:joint");
    let expected = striped.read_all(id);
    striped.store(id, pages(1));
    let all = compare(&striped.read_all(id), &expected, "three devices");
    // A device that is gone takes its pages with it. One of the devices has the directory as well.
    let mut paged = 0;
    for lost in 0..3 {
        let kept: Vec<usize> = (0..3).filter(|device| *device != lost).collect();
        striped = striped.reopened(&kept, |options| options.read_only(true));
        let id = attach(&mut striped.sequence, "kmeans:16:joint");
        let left = compare(&striped.read_all(id), &expected, &format!("without device {lost}"));
        assert!(left < all, "{left} of {all} pages");
        paged += usize::from(left > 0);
    }
    assert!(paged >= 2, "{paged}");
    striped = striped.reopened(&[0, 2], |options| options);
    let id = attach(&mut striped.sequence, "kmeans:16:joint");
    let left_of_lost = compare(&striped.read_all(id), &expected, "without device 1");
    // Clusters that are stored now are dealt to the devices that are left.
    striped.store(id, pages(1));
    let stored = compare(&striped.read_all(id), &expected, "stored on two devices");
    assert!(stored > left_of_lost, "{stored} pages");
    striped.store.repair().expect("a repair");
    assert_eq!(compare(&striped.read_all(id), &expected, "repaired"), stored);
    // A new device takes pages of sets that are stored later.
    let added = device_dirs(&striped._scratch.path().join("added"), 1).remove(0);
    let index = striped.store.add_device(&added).expect("a device");
    assert_eq!(compare(&striped.read_all(id), &expected, "added"), stored);
    striped.sequence.drop_stored_clusters().expect("a commit");
    striped.store(id, pages(1));
    assert_eq!(compare(&striped.read_all(id), &expected, "stored on the new device"), all);
    let bytes = striped.bytes_by_device(id);
    assert!(bytes.iter().filter(|bytes| **bytes > 0).count() == 3, "{bytes:?}");
    // A device that is removed releases its pages, and groups give them.
    striped.store.remove_device(index).expect("a device that is removed");
    let left = compare(&striped.read_all(id), &expected, "removed");
    assert!(left < all, "{left} of {all} pages");
}
