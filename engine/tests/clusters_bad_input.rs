//! Bad input of methods that choose entries. Each case is refused with an error, and nothing has changed afterwards:
//! tokens, clusters, selections, memory, and the bytes on the device.

use std::sync::Arc;
use stratakv::layout::LayerSpec;
use stratakv::retrieval::clusters::{
    ActivationRule, AdaptOptions, AdaptiveClusters, ClusterLists, ClusterRadius, CoActivation, KMeans, KMeansOptions,
    MedoidClustering, MedoidOptions, Normalisation,
};
use stratakv::retrieval::{Adapter, HeadAggregation, LayerAdapter, MethodSpec, Selector, SelectorId};
use stratakv::{
    Budget, ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, Result, SelectOptions, SelectRequest,
    Sequence, SequenceReader, Store, TensorView,
};
use stratakv_testing::{EntrySequence, EntryShape, TestStore, summary_bytes};

const SHAPE: EntryShape = EntryShape { kv_heads: 2, q_heads: 4, dim: 8, group: 8 };
/// A method of each kind of summary. The last two need a profile.
const METHODS: [&str; 8] =
    ["balanced:8", "dynakv:8", "clusterkv:8:joint", "kmeans:8", "pqcache:16", "tokens", "swarm:8", "infllm:16"];
const TOKENS: usize = 700;

/// The state of a sequence, its methods and its store, as a caller sees it.
#[derive(Debug, PartialEq)]
struct State {
    length: u64,
    committed: u64,
    summary_bytes: usize,
    written_bytes: u64,
    /// The entries of each KV head and the output, of each method.
    selections: Vec<(Vec<Vec<u64>>, Vec<f32>)>,
    method_bytes: Vec<u64>,
}

/// A sequence with one method of each kind.
struct Subject {
    stored: EntrySequence,
    methods: Vec<SelectorId>,
    /// The state after the last refused call; none if something has changed since.
    known: Option<State>,
}

impl Subject {
    fn new() -> Self {
        Self::in_memory(ByteSize::mib(256), &METHODS)
    }

    fn in_memory(limit: ByteSize, methods: &[&str]) -> Self {
        let mut stored = EntrySequence::new(SHAPE, Store::options().memory_limit(limit));
        stored.append(TOKENS, 3);
        stored.sequence.commit(Durability::Sync).unwrap();
        let attach = |name: &&str| {
            let id = stored.attach(name);
            if name.starts_with("swarm") || name.starts_with("infllm") {
                stored.profile(id);
            }
            id
        };
        let methods = methods.iter().map(attach).collect();
        Self { stored, methods, known: None }
    }

    fn state(&self) -> State {
        let (sequence, store) = (&self.stored.sequence, &self.stored.store);
        let mut selections = Vec::new();
        for id in &self.methods {
            let query = SHAPE.query(1);
            let chosen = self.stored.select(*id, &query, 320);
            selections.push((SHAPE.entries(&chosen), self.stored.output(&query, &chosen)));
        }
        State {
            length: sequence.len(),
            committed: sequence.committed(),
            summary_bytes: summary_bytes(store),
            written_bytes: store.status().devices.iter().map(|device| device.counters.write_bytes).sum(),
            selections,
            method_bytes: self.methods.iter().map(|id| sequence.selector_bytes(*id).unwrap()).collect(),
        }
    }

    /// Checks that a call is refused and changes nothing.
    fn refuses<T>(&mut self, what: &str, kind: ErrorKind, call: impl FnOnce(&mut EntrySequence) -> Result<T>) {
        let before = self.known.take().unwrap_or_else(|| self.state());
        let refused = call(&mut self.stored).map(drop).expect_err(what);
        assert_eq!(refused.kind(), kind, "{what}: {refused}");
        let after = self.state();
        assert_eq!(after, before, "{what}");
        self.known = Some(after);
    }

    /// Returns the sequence for calls that change it.
    fn change(&mut self) -> &mut EntrySequence {
        self.known = None;
        &mut self.stored
    }
}

fn parse(name: &str) -> Result<Arc<dyn Selector>> {
    let spec: MethodSpec = name.parse()?;
    spec.selector(spec.adapter_name().map(|_| SHAPE.codes()))
}

#[test]
fn names_and_sizes_out_of_range_are_refused() {
    let mut subject = Subject::new();
    let names = [
        "dynakv:0",
        "dynakv:-1",
        "dynakv:8.5",
        "dynakv:nan",
        "dynakv:inf",
        "dynakv:99999999999999999999999",
        "dynakv:8:16",
        "dynakv:8:raw:8",
        "balanced:0",
        "balanced:window",
        "kmeans:0",
        "clusterkv:x",
        "pqcache:0",
        "pqcache:65537",
        "pqcache:members",
        "pqcache:8:joint",
        "tokens:3",
        "tokens:members",
        "swarm:0",
        "swarm:65537",
        "swarm:18446744073709551615",
        "swarm:heads",
        "swarm:8:members:heads",
        "balanced:8:single",
        "dynakv:8:single",
        "infllm:0",
        "infllm:65537",
        "infllm:joint",
        "cluster",
    ];
    for name in names {
        subject.refuses(name, ErrorKind::InvalidArgument, |_| parse(name));
    }
    for name in ["balanced:members", "dynakv:members", "clusterkv:members", "kmeans:members", "swarm:members"] {
        let spec: MethodSpec = name.parse().unwrap();
        subject.refuses(name, ErrorKind::InvalidArgument, |_| spec.selector(None));
    }
    let both: MethodSpec = "swarm:8:members:single".parse().unwrap();
    let refused = both.selector(None).map(drop).unwrap_err().to_string();
    assert!(refused.contains("in one cluster anyway"), "{refused}");
}

#[test]
fn a_mean_size_above_the_entries_makes_one_cluster() {
    for name in [
        "balanced:18446744073709551615",
        "dynakv:1000000",
        "dynakv:18446744073709551615:joint",
        "kmeans:100000",
        "clusterkv:18446744073709551615",
    ] {
        let mut stored = EntrySequence::new(SHAPE, Store::options());
        stored.append(TOKENS, 3);
        let id = stored.attach(name);
        stored.append(400, 3);
        let chosen = stored.select(id, &SHAPE.query(1), 1100);
        assert!(SHAPE.entries(&chosen).iter().all(|own| own.len() == 1100), "{name}");
    }
    // More centroids than tokens.
    let mut stored = EntrySequence::new(SHAPE, Store::options());
    stored.append(330, 3);
    let id = stored.attach("pqcache:60000");
    assert!(SHAPE.entries(&stored.select(id, &SHAPE.query(1), 96)).iter().all(|own| own.len() == 96));
}

#[test]
fn adapters_of_other_layouts_are_refused() {
    let mut subject = Subject::new();
    let other = EntryShape { dim: 4, ..SHAPE };
    let adapter = |layers| Arc::new(Adapter::new("codes", 1, layers).unwrap());
    let (none, fewer) = (adapter(vec![LayerAdapter::None]), adapter(Vec::new()));
    for name in
        ["balanced:8:members", "dynakv:8:members", "clusterkv:8:members", "kmeans:8:members:heads", "swarm:4:members"]
    {
        let spec: MethodSpec = name.parse().unwrap();
        subject.refuses(name, ErrorKind::LayoutMismatch, |own| own.sequence.attach(other.selector(name)));
        subject.refuses(name, ErrorKind::InvalidArgument, |own| {
            own.sequence.attach(spec.selector(Some(Arc::clone(&none)))?)
        });
        subject.refuses(name, ErrorKind::InvalidArgument, |own| {
            own.sequence.attach(spec.selector(Some(Arc::clone(&fewer)))?)
        });
    }
}

#[test]
fn queries_of_other_heads_and_dims_are_refused() {
    let mut subject = Subject::new();
    let good = SHAPE.query(1);
    let nan: Vec<f32> = [&good[1..], &[f32::NAN]].concat();
    let infinite: Vec<f32> = [&good[1..], &[f32::INFINITY]].concat();
    let many = vec![1.0; 4098 * SHAPE.dim];
    let queries = [
        ("no query", &[][..]),
        ("half a head", &good[..SHAPE.dim / 2]),
        ("one query head for two KV heads", &good[..SHAPE.dim]),
        ("three query heads", &good[..3 * SHAPE.dim]),
        ("not a number", &nan),
        ("not finite", &infinite),
        ("too many heads", &many),
    ];
    for (what, query) in queries {
        for id in subject.methods.clone() {
            let request = SelectRequest::query(query).budget(Budget::tokens(96)).selector(id);
            subject.refuses(what, ErrorKind::InvalidArgument, |own| own.sequence.select(0, request));
            subject.refuses(what, ErrorKind::InvalidArgument, |own| own.sequence.profile(id, 0, &[query], None));
            subject.refuses(what, ErrorKind::InvalidArgument, |own| own.sequence.profile(id, 0, &[&good, query], None));
        }
    }
}

#[test]
fn budgets_and_scales_out_of_range_are_refused() {
    let mut subject = Subject::new();
    let query = SHAPE.query(1);
    let shares = [0.0, -1.0, f64::NAN, f64::INFINITY].map(Budget::Share);
    for id in subject.methods.clone() {
        for budget in shares.into_iter().chain([Budget::tokens(0)]) {
            let request = SelectRequest::query(&query).budget(budget).selector(id);
            subject.refuses("budget", ErrorKind::InvalidArgument, |own| own.sequence.select(0, request));
        }
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let options = SelectOptions::new(Budget::tokens(96)).aggregation(HeadAggregation::Softmax).scale(scale);
            let request = SelectRequest::query(&query).options(options).selector(id);
            subject.refuses("scale", ErrorKind::InvalidArgument, |own| own.sequence.select(0, request));
            let profile = |own: &mut EntrySequence| own.sequence.profile(id, 0, &[&query], Some(scale));
            subject.refuses("scale of a profile", ErrorKind::InvalidArgument, profile);
        }
    }
}

#[test]
fn profiles_of_another_length_or_layout_are_refused() {
    let mut subject = Subject::new();
    let query = SHAPE.query(1);
    let huge = [f32::MAX; SHAPE.q_heads * SHAPE.dim];
    let half = &query[..SHAPE.kv_heads * SHAPE.dim];
    for (at, id) in subject.methods.clone().into_iter().enumerate() {
        let name = METHODS[at];
        let invalid = ErrorKind::InvalidArgument;
        subject.refuses(name, invalid, |own| own.sequence.profile(id, 0, &[], None));
        subject.refuses(name, invalid, |own| own.sequence.profile(id, 1, &[&query], None));
        subject.refuses(name, invalid, |own| own.sequence.profile(id, usize::MAX, &[&query], None));
        subject.refuses(name, invalid, |own| own.sequence.profile(id, 0, &[&query, half], None));
        subject.refuses(name, invalid, |own| own.sequence.profile(id, 0, &[&query, &huge], Some(f32::MAX)));
        if !name.starts_with("swarm") && !name.starts_with("infllm") {
            subject.refuses(name, invalid, |own| own.sequence.profile(id, 0, &[&query], None));
        }
    }
    // More queries than a profile records.
    let many: Vec<&[f32]> = vec![&query; (1 << 15) + 1];
    let swarm = subject.methods[5];
    let refused = subject.stored.sequence.profile(swarm, 0, &many, None).unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::InvalidArgument | ErrorKind::MemoryLimit), "{refused}");
}

#[test]
fn profiles_of_layers_without_keys_or_tokens_are_refused() {
    let layers = [LayerSpec::full(2, 8), LayerSpec::none(), LayerSpec::full(1, 16), LayerSpec::full(2, 8)];
    let layout = KvLayout::builder().layer_specs(layers).dtype(DType::F32).group_tokens(8).build().unwrap();
    let store = TestStore::new(Store::options());
    let mut sequence = store.create_sequence(&layout, CreateOptions::new()).unwrap();
    let append = |sequence: &mut Sequence, layer, heads, dim| {
        let rows = SHAPE.rows(0, 400, 3);
        let view = TensorView::token_major(&rows[..400 * heads * dim], 400, heads, dim);
        sequence.append(layer, view, view).unwrap();
    };
    append(&mut sequence, 0, 2, 8);
    append(&mut sequence, 2, 1, 16);
    let swarm = sequence.attach(SHAPE.selector("swarm:8")).unwrap();
    let (queries, wide) = (SHAPE.query(1), [0.5; 17]);
    let refused = [
        sequence.profile(swarm, 1, &[&queries], None),
        sequence.profile(swarm, 3, &[&queries], None),
        sequence.profile(swarm, 4, &[&queries], None),
        sequence.profile(swarm, 2, &[&wide], None),
        sequence.select(1, SelectRequest::query(&queries).budget(Budget::tokens(9)).selector(swarm)).map(drop),
        sequence.select(3, SelectRequest::query(&queries).budget(Budget::tokens(9)).selector(swarm)).map(drop),
    ];
    for refused in refused {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(sequence.selector_bytes(swarm).unwrap(), 0);
    // A layer of other dims takes queries of its own.
    sequence.profile(swarm, 2, &[&queries[..16]], None).unwrap();
    assert!(sequence.selector_bytes(swarm).unwrap() > 0);
}

/// A call of a sequence.
type Call = Box<dyn Fn(&mut EntrySequence) -> Result<()>>;

/// Makes every call that takes a selector.
fn calls_of(id: SelectorId) -> [(&'static str, Call); 5] {
    let query = SHAPE.query(1);
    let request = move |own: &mut EntrySequence| {
        own.sequence.select(0, SelectRequest::query(&query).budget(Budget::tokens(96)).selector(id)).map(drop)
    };
    [
        ("select", Box::new(request)),
        ("profile", Box::new(move |own| own.sequence.profile(id, 0, &[&SHAPE.query(1)], None))),
        ("detach", Box::new(move |own| own.sequence.detach(id))),
        ("selector_bytes", Box::new(move |own| own.sequence.selector_bytes(id).map(drop))),
        ("selector_summaries", Box::new(move |own| own.sequence.selector_summaries(id, 0).map(drop))),
    ]
}

#[test]
fn a_method_of_another_sequence_is_refused() {
    let (mut subject, other) = (Subject::new(), Subject::new());
    let mut reader = subject.stored.sequence.reader().unwrap();
    let of_reader = reader.attach(SHAPE.selector("dynakv:8")).unwrap();
    let fork = subject.stored.sequence.fork().unwrap();
    for id in other.methods.iter().copied().chain([of_reader]) {
        for (what, call) in calls_of(id) {
            subject.refuses(what, ErrorKind::InvalidArgument, call);
        }
    }
    // A reader and a fork do not have the methods of the sequence either.
    let (own, query) = (subject.methods[0], SHAPE.query(1));
    let request = || SelectRequest::query(&query).budget(Budget::tokens(96)).selector(own);
    for refused in [reader.select(0, request()).map(drop), fork.select(0, request()).map(drop), reader.detach(own)] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn a_dropped_method_is_refused_and_its_selections_stay() {
    let mut subject = Subject::new();
    let query = SHAPE.query(1);
    for name in METHODS {
        let id = subject.methods.remove(0);
        let chosen = subject.stored.select(id, &query, 320);
        let (entries, output) = (SHAPE.entries(&chosen), subject.stored.output(&query, &chosen));
        subject.change().sequence.detach(id).unwrap();
        for (what, call) in calls_of(id) {
            subject.refuses(what, ErrorKind::InvalidArgument, call);
        }
        // A selection holds its tokens, so a cut of the sequence does not change it.
        assert_eq!((SHAPE.entries(&chosen), subject.stored.output(&query, &chosen)), (entries, output), "{name}");
    }
    let fresh = EntrySequence::new(SHAPE, Store::options());
    assert_eq!(summary_bytes(&subject.stored.store), summary_bytes(&fresh.store));
}

#[test]
fn two_builds_at_once_have_clusters_of_their_own() {
    let mut subject = Subject::new();
    // A sequence builds one profile at a time, because the call takes it exclusively. Its readers build beside it.
    let queries: Vec<Vec<f32>> = (0..40).map(|seed| SHAPE.query(seed)).collect();
    let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
    let before = subject.state();
    let mut readers: Vec<_> = (0..4).map(|_| subject.stored.sequence.reader().unwrap()).collect();
    let mut found: Vec<Vec<Vec<u64>>> = Vec::new();
    std::thread::scope(|scope| {
        let build = |reader: &mut SequenceReader| {
            let id = reader.attach(SHAPE.selector("swarm:8")).unwrap();
            reader.profile(id, 0, &queries, None).unwrap();
            let query = SHAPE.query(2);
            let options = SelectOptions::new(Budget::tokens(320)).aggregation(HeadAggregation::Softmax).recent(16);
            SHAPE.entries(&reader.select(0, SelectRequest::query(&query).options(options).selector(id)).unwrap())
        };
        let threads: Vec<_> = readers.iter_mut().map(|reader| scope.spawn(move || build(reader))).collect();
        found = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    });
    drop(readers);
    assert!(found.iter().all(|entries| *entries == found[0]));
    assert_eq!(subject.state(), before);
    // Methods of the same clusters share them, so a profile of either is one of both.
    let again = subject.stored.attach("swarm:8");
    let nth = METHODS.iter().position(|method| *method == "swarm:8").unwrap();
    let (swarm, query) = (subject.methods[nth], SHAPE.query(2));
    let entries = |id| SHAPE.entries(&subject.stored.select(id, &query, 320));
    assert_eq!(entries(again), entries(swarm));
    assert_eq!(entries(again), found[0]);
}

#[test]
fn a_method_without_memory_is_refused_before_anything_is_written() {
    let mut subject = Subject::in_memory(ByteSize::mib(12), &["dynakv:64", "infllm:16"]);
    for _ in 0..20 {
        subject.change().append(1000, 3);
        subject.change().sequence.commit(Durability::Sync).unwrap();
    }
    for name in ["kmeans:1", "clusterkv:1", "dynakv:1"] {
        subject.refuses(name, ErrorKind::MemoryLimit, |own| own.sequence.attach(SHAPE.selector(name)));
    }
    let swarm = subject.change().attach("swarm:8");
    let queries: Vec<Vec<f32>> = (0..40).map(|seed| SHAPE.query(seed)).collect();
    let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
    subject.refuses("profile", ErrorKind::MemoryLimit, |own| own.sequence.profile(swarm, 0, &queries, None));
    subject.change().sequence.detach(swarm).unwrap();
    // An append that does not fit changes no cluster, and smaller ones do.
    let rows = SHAPE.rows(0, 60_000, 4);
    subject.refuses("append", ErrorKind::MemoryLimit, |own| SHAPE.append(&mut own.sequence, &rows, &rows));
    subject.change().append(100, 3);
    assert_eq!(subject.state().length, (TOKENS + 20_100) as u64);
}

/// Returns everything that can be seen of adaptive clusters.
fn seen(clusters: &AdaptiveClusters) -> String {
    let lists = |cluster| (clusters.members(cluster).unwrap().to_vec(), clusters.buffer(cluster).unwrap().to_vec());
    let lists: Vec<_> = (0..clusters.len() as u32).map(lists).collect();
    format!("{lists:?} {:?} {:?}", clusters.stats(), clusters.centroids())
}

#[test]
fn adaptive_clusters_refuse_numbers_out_of_range_and_stay() {
    let mut lists = ClusterLists::new();
    lists.push(&[0, 1]);
    lists.push(&[2, 3]);
    let options = AdaptOptions { threshold: 1.0, ..AdaptOptions::default() };
    let mut clusters = AdaptiveClusters::new(&[0.0, 1.0, 10.0, 11.0], 1, &lists, options).unwrap();
    clusters.append(4, &[7.0]).unwrap();
    let before = seen(&clusters);
    for wrong in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 1.1] {
        assert_eq!(clusters.quantile_of_variances(wrong).unwrap_err().kind(), ErrorKind::InvalidArgument, "{wrong}");
        // 1.1 is a threshold, but no quantile.
        if wrong != 1.1 {
            assert_eq!(clusters.set_threshold(wrong).unwrap_err().kind(), ErrorKind::InvalidArgument, "{wrong}");
        }
    }
    for key in [&[][..], &[1.0, 2.0], &[f32::NAN], &[f32::INFINITY], &[2e15]] {
        assert_eq!(clusters.append(5, key).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(clusters.begin_step(&[0, 2]).unwrap_err().kind(), ErrorKind::InvalidArgument);
    for (cluster, keys) in [(0, &[0.0, 1.0][..]), (1, &[10.0, 11.0]), (2, &[]), (u32::MAX, &[])] {
        assert_eq!(clusters.split(cluster, keys).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(seen(&clusters), before);
    // A split that is due refuses keys of other entries, and stays due.
    clusters.begin_step(&[1]).unwrap();
    let due = clusters.next_split();
    for keys in [&[10.0, 11.0][..], &[10.0, f32::NAN, 7.0], &[1.0; 4]] {
        assert_eq!(clusters.split(1, keys).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!((seen(&clusters), clusters.next_split()), (before.clone(), due));
    }
    assert_eq!(clusters.split(1, &[10.0, 11.0, 7.0]).unwrap()[0], 1);
}

#[test]
fn co_activation_clusters_refuse_numbers_out_of_range_and_stay() {
    let mut profile = CoActivation::new(40, 4).unwrap();
    profile.record(&[0, 1, 2]).unwrap();
    profile.record(&[0, 1]).unwrap();
    let before = profile.clone();
    for wrong in [&[40][..], &[1, 1], &[2, 1], &[0, u32::MAX]] {
        assert_eq!(profile.record(wrong).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(profile, before);
    for distance in [f64::NAN, f64::INFINITY, -0.1, 1.1] {
        for normalisation in [Normalisation::Frequency, Normalisation::Conditional, Normalisation::Jaccard] {
            let refused = ClusterRadius::from_distance(distance, normalisation, &profile).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{distance}");
        }
    }
    for share in [0.0, -1.0, 1.1, f64::NAN, f64::INFINITY] {
        for rule in
            [ActivationRule { share, ..Default::default() }, ActivationRule { weight: share, ..Default::default() }]
        {
            assert_eq!(rule.activated(&[1.0; 40]).unwrap_err().kind(), ErrorKind::InvalidArgument, "{share}");
        }
    }
    let clustering = MedoidClustering::new(&profile, MedoidOptions::default()).unwrap();
    for mean_size in [f64::NAN, f64::INFINITY, 0.0, -8.0, 17.0] {
        let refused = clustering.cluster_to_mean_size(mean_size).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{mean_size}");
    }
    let mut found = clustering.cluster(ClusterRadius::above_common(0));
    let before = found.clone();
    let mut keys = vec![0.5; 40];
    assert!(found.assign_by_key(&keys[1..], 1).is_err() && found.assign_by_key(&keys, 0).is_err());
    for wrong in [f32::NAN, f32::INFINITY, 2e15] {
        keys[7] = wrong;
        assert_eq!(found.assign_by_key(&keys, 1).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(found, before);
}

#[test]
fn k_means_refuses_more_clusters_than_entries() {
    let keys = [0.0, 1.0, 2.0];
    let refused = |clusters, dim| {
        let options = KMeansOptions { clusters, seed: 1, metric: None };
        for fitted in [KMeans::fit(&keys, dim, &options), KMeans::lloyd(&keys, dim, &options, 2)] {
            assert_eq!(fitted.unwrap_err().kind(), ErrorKind::InvalidArgument, "{clusters} clusters");
        }
        let fitted = KMeans::fit_heads(&[&keys, &keys], dim, &options, 2).unwrap_err();
        assert_eq!(fitted.kind(), ErrorKind::InvalidArgument);
    };
    refused(4, 1);
    refused(usize::MAX, 1);
    refused(0, 1);
    refused(1, 2);
    refused(1, 0);
    let wrong_metrics: [&[f32]; 4] = [&[1.0, 2.0], &[-1.0], &[f32::NAN], &[f32::INFINITY]];
    for metric in wrong_metrics {
        let options = KMeansOptions { clusters: 2, seed: 1, metric: Some(metric) };
        assert_eq!(KMeans::fit(&keys, 1, &options).unwrap_err().kind(), ErrorKind::InvalidArgument, "{metric:?}");
    }
    let fitted = KMeans::fit(&keys, 1, &KMeansOptions { clusters: 2, seed: 1, metric: None }).unwrap();
    assert!(fitted.capped_lists(&keys, 0, 1).is_err() && fitted.capped_lists(&keys[1..], 2, 1).is_err());
}
