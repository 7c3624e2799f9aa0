//! Blocks that several selections of one read share, as forks of one prompt do. They are read once and are the same for
//! all.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};
use stratakv::options::CacheOptions;
use stratakv::pipeline::Pipeline;
use stratakv::{
    AttendOptions, Budget, ByteSize, CreateOptions, OpenSequence, ReadBatch, SelectRequest, Selection, Sequence, Store,
};
use stratakv_testing::{GroupPattern, TestStore, medium};

const HEADS: usize = 2;
const DIM: usize = 128;
const GROUP: usize = 4;
const GROUPS: u64 = 200;
const PATTERN: GroupPattern = GroupPattern { heads: HEADS, dim: DIM, group: GROUP };
const PLANE: usize = PATTERN.plane_bytes();

/// Writes a sequence and opens it again, so that all of it is on devices.
fn filled(store: &Store) -> Sequence {
    drop(PATTERN.write(store, CreateOptions::new().key("s"), GROUPS));
    store.open_sequence("s", OpenSequence::new()).unwrap()
}

/// Returns a sequence and forks of it.
fn family(store: &Store) -> Vec<Sequence> {
    let mut first = filled(store);
    let forks: Vec<Sequence> = (0..3).map(|_| first.fork().unwrap()).collect();
    std::iter::once(first).chain(forks).collect()
}

#[test]
fn a_block_of_several_views_is_read_once() {
    let store = TestStore::new(medium());
    let family = family(&store);
    let groups =
        |member: usize| -> Vec<u64> { (0..60).map(|at| at * 3 + u64::from(at % 10 == member as u64)).collect() };
    let views: Vec<Selection> =
        (0..4).map(|at| family[at].select(0, SelectRequest::groups(&groups(at))).unwrap()).collect();
    let refs: Vec<&Selection> = views.iter().collect();
    let mut different: Vec<u64> = (0..4).flat_map(groups).collect();
    different.sort_unstable();
    different.dedup();
    let bytes = different.len() as u64 * 2 * PLANE as u64;
    let brought = || store.status().devices.iter().map(|device| device.counters.read_bytes).sum::<u64>();
    let all_right = |batch: &ReadBatch| (0..4).for_each(|at| PATTERN.check(batch, at, &groups(at)));

    let before = brought();
    let ticket = store.read(&refs).submit().unwrap();
    assert_eq!((ticket.selected_bytes(), ticket.device_bytes()), (bytes, bytes));
    all_right(&ticket.wait().unwrap());
    assert_eq!(brought() - before, bytes);
    all_right(&store.read(&refs).wait().unwrap());
    let mut ticket = pin!(store.read(&refs).submit().unwrap());
    let batch = loop {
        if let std::task::Poll::Ready(batch) = ticket.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            break batch.unwrap();
        }
    };
    all_right(&batch);
    // The same selection twice counts twice but is read once.
    let ticket = store.read(&[&views[1], &views[1]]).submit().unwrap();
    assert_eq!(ticket.selected_bytes(), 60 * 2 * PLANE as u64);
    let batch = ticket.wait().unwrap();
    (0..2).for_each(|at| PATTERN.check(&batch, at, &groups(1)));

    // Attention may start with any selection, here with the last.
    let query = vec![0.01; HEADS * DIM];
    let alone = |view: &Selection| {
        let mut out = vec![0.0; HEADS * DIM];
        let batch = store.read(&[view]).submit().unwrap().wait().unwrap();
        stratakv::attend(&query, view, batch.get(0).unwrap(), &mut out).unwrap();
        out
    };
    let mut ticket = store.read(&refs).submit().unwrap();
    for at in (0..4).rev() {
        let mut out = vec![0.0; HEADS * DIM];
        ticket.attend(at, &query, &views[at], &AttendOptions::default(), &mut out).unwrap();
        assert_eq!(out, alone(&views[at]));
    }
}

#[test]
fn a_cache_is_asked_once_for_a_block_of_several_views() {
    let store = TestStore::new(medium().cache(CacheOptions::new(ByteSize::mib(8))));
    let family = family(&store);
    let groups: Vec<u64> = (0..50).map(|at| at * 4).collect();
    let views: Vec<Selection> = family.iter().map(|s| s.select(0, SelectRequest::groups(&groups)).unwrap()).collect();
    let refs: Vec<&Selection> = views.iter().collect();
    for round in 0..3 {
        let ticket = store.read(&refs).submit().unwrap();
        let bytes = ticket.selected_bytes();
        assert_eq!(bytes, if round == 0 { 50 * 2 * PLANE as u64 } else { 0 });
        let batch = ticket.wait().unwrap();
        (0..4).for_each(|at| PATTERN.check(&batch, at, &groups));
        let status = store.status().cache.unwrap();
        assert_eq!((status.misses, status.admitted, status.refused), (50, 50, 0));
        assert_eq!((status.hits, status.saved_bytes), (50 * round, 50 * round * 2 * PLANE as u64));
    }
}

#[test]
fn a_pipeline_reads_a_block_of_several_sequences_once() {
    let store = TestStore::new(medium());
    let family = family(&store);
    let views = |first: u64| -> Vec<Selection> {
        let groups: Vec<u64> = (0..40).map(|at| at * 4 + first).collect();
        family.iter().map(|s| s.select(0, SelectRequest::groups(&groups)).unwrap()).collect()
    };
    let mut pipeline = Pipeline::new(&store, Budget::All);
    let queries = [[0.01_f32; HEADS * DIM]; 4];
    let inputs: Vec<&[f32]> = queries.iter().map(<[f32; HEADS * DIM]>::as_slice).collect();
    let mut attended = |predicted: u64, now: u64| {
        pipeline.predict(0, &views(predicted)).unwrap();
        pipeline.read(0, &views(now)).unwrap();
        let mut outs = [[0.0_f32; HEADS * DIM]; 4];
        let mut slices: Vec<&mut [f32]> = outs.iter_mut().map(<[f32; HEADS * DIM]>::as_mut_slice).collect();
        pipeline.attend(0, &inputs, &AttendOptions::default(), &mut slices).unwrap();
        assert!(outs.iter().all(|out| *out == outs[0] && out[0] != 0.0));
        pipeline.take_report()
    };
    let report = attended(1, 1);
    assert_eq!((report.selected, report.prefetched, report.corrected), (40, 40, 0), "{report:?}");
    assert_eq!(report.read_bytes, 40 * 2 * PLANE as u64, "{report:?}");
    let report = attended(1, 2);
    assert_eq!((report.selected, report.prefetched, report.corrected, report.wasted), (40, 0, 40, 40), "{report:?}");
}

#[test]
fn what_is_wrong_in_one_view_is_not_in_the_others() {
    let mut store = TestStore::new(medium());
    drop(family(&store));
    store.close().unwrap();
    // The keys of group 7.
    let files = std::fs::read_dir(store.dirs()[0].join("segments")).unwrap().map(|file| file.unwrap().path());
    let found = files.filter_map(|path| {
        let bytes = std::fs::read(&path).unwrap();
        let at = bytes.chunks(512).position(|sector| sector == &PATTERN.planes(7)[0][..512])?;
        Some((path, bytes, at * 512))
    });
    let [(path, mut bytes, at)] = found.collect::<Vec<_>>().try_into().unwrap();
    bytes[at + 77] ^= 4;
    std::fs::write(&path, &bytes).unwrap();

    store.reopen();
    let mut first = store.open_sequence("s", OpenSequence::new()).unwrap();
    let fork = first.fork().unwrap();
    let damaged = first.select(0, SelectRequest::groups(&[5, 7, 9])).unwrap();
    let good = fork.select(0, SelectRequest::groups(&[4, 9])).unwrap();
    let bad_too = fork.select(0, SelectRequest::groups(&[7, 9])).unwrap();
    let views = [&damaged, &good, &bad_too];
    let checked = |batch: &ReadBatch| {
        assert_eq!(batch.get(0).map(|_| ()).unwrap_err().corruption().unwrap().code, "payload-checksum");
        PATTERN.check(batch, 1, &[4, 9]);
        assert_eq!(batch.get(2).map(|_| ()).unwrap_err().corruption().unwrap().code, "payload-checksum");
    };
    checked(&store.read(&views).submit().unwrap().wait().unwrap());
    checked(&store.read(&views).wait().unwrap());
}
