//! Special cases of selectors: groups that are always selected, wrong arguments, and memory that is shared, freed and
//! accounted for.

use half::f16;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use stratakv::retrieval::{
    Adapter, HeadAggregation, KvSwap, LeoAm, LowRankAdapter, MethodSpec, Oracle, Quest, Selector, SelectorId, aggregate,
};
use stratakv::{
    Budget, ByteSize, ComputeThreads, CreateOptions, Durability, ErrorKind, SelectOptions, SelectRequest, Sequence,
    TensorView,
};
use stratakv_testing::{TestStore, medium, summary_bytes, uniform_layout};

const DIM: usize = 16;
const GROUP: usize = 4;

/// Appends groups. All key elements of a group are `level(group)`.
fn append_levels(sequence: &mut Sequence, groups: std::ops::Range<usize>, level: impl Fn(usize) -> f32) {
    for group in groups {
        let rows = vec![f16::from_f32(level(group)).to_f32(); GROUP * DIM];
        let view = TensorView::token_major(&rows, GROUP, 1, DIM);
        sequence.append(0, view, view).unwrap();
    }
}

fn groups(sequence: &Sequence, id: SelectorId, options: SelectOptions) -> Vec<u64> {
    let view = sequence.select(0, SelectRequest::query(&[1.0; DIM]).options(options).selector(id)).unwrap();
    view.groups().collect()
}

#[test]
fn groups_that_are_always_selected_do_not_use_up_the_budget() {
    let store = TestStore::new(medium());
    let mut sequence = store.create_sequence(&uniform_layout(1, 1, DIM, GROUP), CreateOptions::new()).unwrap();
    let level = |group: usize| match group {
        95..100 => 4.0 + group as f32 / 100.0,
        50..55 => 2.0 + group as f32 / 100.0,
        _ => -(group as f32) / 100.0,
    };
    append_levels(&mut sequence, 0..100, level);
    let flat = sequence.attach(Arc::new(Quest)).unwrap();
    let recent = SelectOptions::new(Budget::tokens(10 * GROUP)).recent(5 * GROUP);
    // Two of the nine groups are sinks and two are recent. The other five are the best of the rest.
    let sinks = SelectOptions::new(Budget::tokens(9 * GROUP)).sinks(2 * GROUP).recent(2 * GROUP);
    let expected: Vec<u64> = (50..55).chain(95..100).collect();
    assert_eq!(groups(&sequence, flat, recent), expected);
    for density in [None, Some(0.01), Some(0.9)] {
        let tree = sequence.attach(Arc::new(LeoAm { density })).unwrap();
        for form in [HeadAggregation::Sum, HeadAggregation::Softmax] {
            assert_eq!(groups(&sequence, tree, recent.aggregation(form)), expected, "{density:?} {form:?}");
        }
        assert_eq!(groups(&sequence, tree, sinks), groups(&sequence, flat, sinks), "{density:?}");
    }
}

/// A host with three threads, which counts calls.
#[derive(Default)]
struct Host(AtomicUsize);

impl ComputeThreads for Host {
    fn threads(&self) -> usize {
        3
    }

    fn run(&self, parts: usize, part: &(dyn Fn() + Sync)) {
        self.0.fetch_add(1, Ordering::Relaxed);
        std::thread::scope(|scope| (0..parts).for_each(|_| drop(scope.spawn(part))));
    }
}

/// A host with countless threads.
struct Crowd;

impl ComputeThreads for Crowd {
    fn threads(&self) -> usize {
        usize::MAX
    }

    fn run(&self, parts: usize, part: &(dyn Fn() + Sync)) {
        assert!((2..100).contains(&parts), "{parts} parts");
        std::thread::scope(|scope| (0..parts).for_each(|_| drop(scope.spawn(part))));
    }
}

/// Returns methods that score tokens or groups in tiles, for keys of two heads.
fn tiled(random: &mut dyn FnMut(usize) -> Vec<f32>) -> Vec<(&'static str, Arc<dyn Selector>)> {
    let named = |name: &'static str| (name, name.parse::<MethodSpec>().unwrap().selector(None).unwrap());
    let mut list: Vec<_> = ["signs", "quest", "shadowkv", "mean"].map(named).into();
    let matrix = LowRankAdapter::new(2 * DIM, 8, random(2 * DIM * 8)).unwrap();
    let adapter = Arc::new(Adapter::new("low-rank", 1, vec![matrix.into()]).unwrap());
    list.push(("kvswap", Arc::new(KvSwap::new(adapter))));
    #[cfg(feature = "calibrate")]
    {
        use stratakv::retrieval::{Calibrator, CodeOptions, TransformCoded};
        let mut calibrator = Calibrator::new(&[(2, DIM)]);
        calibrator.keys(0, &random(500 * 2 * DIM));
        calibrator.queries(0, &random(500 * 8 * DIM), 8, false);
        let options = CodeOptions { bits: 64, dimension_bits_max: 4, decode_only: false };
        let adapter = calibrator.codes("tck-64", 1, options).unwrap();
        list.push(("tck", Arc::new(TransformCoded::new(Arc::new(adapter)))));
    }
    list.push(("oracle", Arc::new(Oracle)));
    list
}

#[test]
fn threads_of_the_host_select_as_the_calling_thread_does() {
    const TOKENS: usize = 12_000;
    let store = TestStore::new(medium());
    let mut sequence = store.create_sequence(&uniform_layout(1, 2, DIM, GROUP), CreateOptions::new()).unwrap();
    let mut rng = fastrand::Rng::with_seed(7);
    let mut random = |count: usize| -> Vec<f32> { (0..count).map(|_| 4.0 * rng.f32() - 2.0).collect() };
    let (rows, query) = (random(TOKENS * 2 * DIM), random(8 * DIM));
    let view = TensorView::token_major(&rows, TOKENS, 2, DIM);
    sequence.append(0, view, view).unwrap();
    let host = Arc::new(Host::default());
    for (name, selector) in tiled(&mut random) {
        let id = sequence.attach(selector).unwrap();
        for form in [HeadAggregation::Sum, HeadAggregation::Softmax, HeadAggregation::GroupSoftmax] {
            let options = SelectOptions::new(Budget::tokens(TOKENS / 13)).aggregation(form);
            let select = || -> Vec<u64> {
                let request = SelectRequest::query(&query).options(options).selector(id);
                sequence.select(0, request).unwrap().groups().collect()
            };
            let (alone, before) = (select(), host.0.load(Ordering::Relaxed));
            store.set_compute_threads(Some(Arc::clone(&host) as _));
            assert_eq!(select(), alone, "{name} {form:?}");
            let calls = host.0.load(Ordering::Relaxed) - before;
            assert!(calls > 0 || form != HeadAggregation::Softmax, "{name} did not use the threads");
            store.set_compute_threads(Some(Arc::new(Crowd)));
            assert_eq!(select(), alone, "{name} {form:?}");
            store.set_compute_threads(None);
            assert_eq!(select(), alone, "{name} {form:?}");
        }
    }
}

#[test]
fn threads_of_the_host_build_the_same_summaries() {
    let store = TestStore::new(medium());
    let layers = 5;
    let mut sequence = store.create_sequence(&uniform_layout(layers, 2, DIM, GROUP), CreateOptions::new()).unwrap();
    let mut rng = fastrand::Rng::with_seed(8);
    for layer in 0..layers {
        let rows: Vec<f32> = (0..600 * 2 * DIM).map(|_| 4.0 * rng.f32() - 2.0).collect();
        let view = TensorView::token_major(&rows, 600, 2, DIM);
        sequence.append(layer, view, view).unwrap();
    }
    sequence.commit(Durability::Sync).unwrap();
    let host = Arc::new(Host::default());
    for name in ["signs", "leoam", "dynakv:16", "swarm:8"] {
        let spec: MethodSpec = name.parse().unwrap();
        let built = [None, Some(Arc::clone(&host) as Arc<dyn ComputeThreads>)].map(|threads| {
            store.set_compute_threads(threads);
            // A fork has no selectors.
            let mut fork = sequence.fork().unwrap();
            let id = fork.attach(spec.selector(None).unwrap()).unwrap();
            let mut built = Vec::new();
            for layer in 0..layers {
                for summary in fork.selector_summaries(id, layer).unwrap() {
                    let mut records = Vec::new();
                    summary.encode(0..summary.groups(), &mut records);
                    built.push((summary.groups(), records, format!("{:?}", summary.cluster_lists())));
                }
            }
            assert!(built.len() >= layers, "{name}");
            built
        });
        assert!(built[0] == built[1], "{name}");
    }
    assert!(host.0.load(Ordering::Relaxed) >= 4, "the threads were used");
}

#[test]
fn a_scale_that_is_not_positive_and_finite_is_refused() {
    let store = TestStore::new(medium());
    let mut sequence = store.create_sequence(&uniform_layout(1, 1, DIM, GROUP), CreateOptions::new()).unwrap();
    append_levels(&mut sequence, 0..20, |group| group as f32);
    let id = sequence.attach(Arc::new(Oracle)).unwrap();
    for scale in [-1.0, 0.0, f32::NAN, f32::INFINITY] {
        for budget in [Budget::tokens(20), Budget::All] {
            let options = SelectOptions::new(budget).aggregation(HeadAggregation::Softmax).scale(scale);
            let error =
                sequence.select(0, SelectRequest::query(&[1.0; DIM]).options(options).selector(id)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{scale}");
        }
    }
}

#[test]
fn a_selector_of_another_sequence_is_refused() {
    let store = TestStore::new(medium());
    let create = || {
        let mut sequence = store.create_sequence(&uniform_layout(1, 1, DIM, GROUP), CreateOptions::new()).unwrap();
        append_levels(&mut sequence, 0..20, |group| group as f32);
        sequence
    };
    let (mut one, mut other) = (create(), create());
    let quest = one.attach(Arc::new(Quest)).unwrap();
    let oracle = other.attach(Arc::new(Oracle)).unwrap();
    let wrong = [
        other.select(0, SelectRequest::query(&[1.0; DIM]).budget(Budget::tokens(20)).selector(quest)).map(drop),
        // A selector scores a query, and these requests have none.
        other.select(0, SelectRequest::all().selector(oracle)).map(drop),
        other.select(0, SelectRequest::groups(&[0]).selector(oracle)).map(drop),
        other.selector_bytes(quest).map(drop),
        other.selector_summaries(quest, 0).map(drop),
    ];
    for outcome in wrong {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    other.select(0, SelectRequest::query(&[1.0; DIM]).budget(Budget::tokens(20)).selector(oracle)).unwrap();
}

#[test]
fn a_detached_selector_leaves_the_others_and_no_memory() {
    let store = TestStore::new(medium());
    let mut sequence = store.create_sequence(&uniform_layout(1, 1, DIM, GROUP), CreateOptions::new()).unwrap();
    let level = |group: usize| ((group * 37) % 100) as f32 / 10.0;
    append_levels(&mut sequence, 0..100, level);
    let before = summary_bytes(&store);
    let oracle = sequence.attach(Arc::new(Oracle)).unwrap();
    let with_oracle = summary_bytes(&store);
    let quest = sequence.attach(Arc::new(Quest)).unwrap();
    let again = sequence.attach(Arc::new(Quest)).unwrap();
    let leoam = sequence.attach(Arc::new(LeoAm::default())).unwrap();
    let options = SelectOptions::new(Budget::tokens(10 * GROUP));
    let expected = [groups(&sequence, quest, options), groups(&sequence, leoam, options)];
    sequence.detach(oracle).unwrap();
    for outcome in [sequence.detach(oracle), sequence.selector_bytes(oracle).map(drop)] {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!([groups(&sequence, quest, options), groups(&sequence, leoam, options)], expected);
    // Another selector that shares the summaries keeps them.
    sequence.detach(quest).unwrap();
    append_levels(&mut sequence, 100..120, level);
    sequence.truncate(100 * GROUP as u64).unwrap();
    assert_eq!([groups(&sequence, again, options), groups(&sequence, leoam, options)], expected);
    for id in [again, leoam] {
        sequence.detach(id).unwrap();
    }
    assert_eq!(summary_bytes(&store), before);
    let oracle = sequence.attach(Arc::new(Oracle)).unwrap();
    assert_eq!(summary_bytes(&store), with_oracle);
    assert_eq!(groups(&sequence, oracle, options).len(), 10);
}

#[test]
fn combining_takes_any_shape() {
    for form in [HeadAggregation::Sum, HeadAggregation::Softmax] {
        let mut scores = [0.0; 2];
        aggregate(&mut [1.0; 16], (0, 0), 1, form, 1.0, &mut scores);
        aggregate(&mut [1.0; 16], (8, 8), 0, form, 1.0, &mut scores);
        aggregate(&mut [], (8, 8), 1, form, 1.0, &mut scores);
    }
    // Ten lanes, so that two lanes remain after a multiple of eight.
    let mut units: Vec<f32> = [[0.0; 8].as_slice(), &[1.0, 2.0], &[0.0; 8], &[3.0, 4.0]].concat();
    let mut scores = [0.0; 2];
    aggregate(&mut units, (10, 10), 1, HeadAggregation::Sum, 1.0, &mut scores);
    assert_eq!(scores, [3.0, 7.0]);
}

#[cfg(feature = "calibrate")]
#[test]
fn calibration_takes_layers_without_keys_and_queries_without_heads() {
    use stratakv::retrieval::{Calibrator, LayerAdapter};
    let mut calibrator = Calibrator::new(&[(2, 4), (0, 0)]);
    calibrator.keys(1, &[]);
    calibrator.keys(1, &[1.0; 8]);
    calibrator.queries(1, &[1.0; 8], 4, true);
    calibrator.queries(1, &[], 0, false);
    calibrator.queries(0, &[1.0; 8], 0, true);
    calibrator.keys(0, &[1.0; 24]);
    let adapter = calibrator.low_rank("a", 1, 2).unwrap();
    assert_eq!(adapter.layers()[1], LayerAdapter::None);
}

fn wide() -> Arc<Adapter> {
    let matrix = LowRankAdapter::new(1024, 128, vec![0.5; 1024 * 128]).unwrap();
    Arc::new(Adapter::new("wide", 1, vec![matrix.into()]).unwrap())
}

#[test]
fn an_adapter_is_in_the_account_once() {
    let store = TestStore::new(medium().memory_limit(ByteSize::mib(32)));
    let create = || store.create_sequence(&uniform_layout(1, 8, 128, GROUP), CreateOptions::new()).unwrap();
    let (before, adapter) = (summary_bytes(&store), wide());
    assert_eq!(adapter.bytes(), 1024 * 128 * 4);
    let mut sequences = Vec::new();
    for _ in 0..3 {
        let mut sequence = create();
        sequence.attach(Arc::new(KvSwap::new(Arc::clone(&adapter)))).unwrap();
        sequences.push(sequence);
        let more = summary_bytes(&store) - before;
        assert!((512 << 10..600 << 10).contains(&more), "{} sequences: {more} bytes", sequences.len());
    }
    // Another adapter of the same numbers takes memory of its own.
    let mut sequence = create();
    sequence.attach(Arc::new(KvSwap::new(wide()))).unwrap();
    assert!(summary_bytes(&store) - before >= 1 << 20);
    drop((sequence, sequences));
    assert_eq!(summary_bytes(&store), before);
    // An adapter for which the memory does not suffice is refused.
    let many = (0..70).map(|_| wide()).collect::<Vec<_>>();
    let mut sequences = Vec::new();
    let error = many.into_iter().find_map(|adapter| {
        sequences.push(create());
        sequences.last_mut()?.attach(Arc::new(KvSwap::new(adapter))).err()
    });
    assert_eq!(error.expect("32 MiB do not hold 70 of them").kind(), ErrorKind::MemoryLimit);
}

#[test]
fn memory_that_is_given_up_leaves_the_account() {
    let store = TestStore::new(medium());
    let mut sequence = store.create_sequence(&uniform_layout(1, 1, DIM, GROUP), CreateOptions::new()).unwrap();
    let before = summary_bytes(&store);
    sequence.attach(Arc::new(Oracle)).unwrap();
    append_levels(&mut sequence, 0..2000, |group| group as f32 / 100.0);
    let full = summary_bytes(&store) - before;
    assert!(full >= 2000 * GROUP * DIM * 2);
    sequence.truncate(0).unwrap();
    let left = summary_bytes(&store) - before;
    assert!(left <= full / 16, "{left} of {full} bytes after nothing was left");
}
