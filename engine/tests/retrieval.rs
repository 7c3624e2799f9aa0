//! Selectors on stored sequences.
//!
//! - Selecting everything is full attention with every method.
//! - Summaries grow, shrink and are reopened with the sequence, and do not depend on how its tokens were appended.
//! - An embedder can define a method of its own in one file.

use half::f16;
use std::sync::Arc;
use stratakv::retrieval::{
    Adapter, HeadAggregation, InfiniGen, KeyGroup, KeyShape, KvSwap, LayerAdapter, LayerSummary, LeoAm, LowRankAdapter,
    Oracle, Quest, ScoreRequest, Selector, ShadowKv, SignBits, SummarySpec, summary_as,
};
use stratakv::{
    Budget, ByteSize, CreateOptions, Durability, ErrorKind, OpenSequence, Result, SelectOptions, SelectRequest,
    Sequence, Store, TensorView, attend,
};
use stratakv_testing::rng::noise;
use stratakv_testing::{TestStore, medium, uniform_layout};

const HEADS: usize = 2;
const DIM: usize = 16;
const Q_HEADS: usize = 4;
const GROUP: usize = 4;

/// Returns numbers in -2..2 that f16 represents exactly.
fn halves(seed: usize, count: usize) -> Vec<f32> {
    noise(seed, count).into_iter().map(|x| f16::from_f32(2.0 * x).to_f32()).collect()
}

fn row(layer: usize, token: usize) -> Vec<f32> {
    halves(layer * 100_000 + token, HEADS * DIM)
}

fn append(sequence: &mut Sequence, tokens: std::ops::Range<usize>) {
    for layer in 0..2 {
        let rows: Vec<f32> = tokens.clone().flat_map(|t| row(layer, t)).collect();
        let view = TensorView::token_major(&rows, tokens.len(), HEADS, DIM);
        sequence.append(layer, view, view).unwrap();
    }
}

fn identity() -> Arc<Adapter> {
    let width = HEADS * DIM;
    let mut matrix = vec![0.0; width * width];
    (0..width).for_each(|i| matrix[i * width + i] = 1.0);
    let layer = || LayerAdapter::from(LowRankAdapter::new(width, width, matrix.clone()).unwrap());
    Arc::new(Adapter::new("identity", 1, vec![layer(), layer()]).unwrap())
}

fn all() -> Vec<Arc<dyn Selector>> {
    #[cfg_attr(not(feature = "calibrate"), expect(unused_mut, reason = "one more with calibration"))]
    let mut list: Vec<Arc<dyn Selector>> = vec![
        Arc::new(Quest),
        Arc::new(LeoAm::default()),
        Arc::new(ShadowKv::default()),
        Arc::new(SignBits),
        Arc::new(KvSwap::new(identity())),
        Arc::new(InfiniGen::new(identity())),
        Arc::new(Oracle),
    ];
    #[cfg(feature = "calibrate")]
    {
        use stratakv::retrieval::{Calibrator, CodeOptions, TransformCoded};
        let mut calibrator = Calibrator::new(&[(HEADS, DIM), (HEADS, DIM)]);
        for layer in 0..2 {
            (0..500).for_each(|t| calibrator.keys(layer, &row(layer, 5000 + t)));
            calibrator.queries(layer, &halves(7, 50 * Q_HEADS * DIM), Q_HEADS, true);
            calibrator.queries(layer, &halves(8, 90 * Q_HEADS * DIM), Q_HEADS, false);
        }
        let options = CodeOptions { bits: 64, dimension_bits_max: 4, decode_only: false };
        let adapter = calibrator.codes("tck-64", 1, options).unwrap();
        assert_eq!(Adapter::from_bytes(&adapter.to_bytes()).unwrap(), adapter);
        list.push(Arc::new(TransformCoded::new(Arc::new(adapter))));
    }
    list
}

fn chosen(sequence: &Sequence, method: stratakv::retrieval::SelectorId, aggregation: HeadAggregation) -> Vec<Vec<u64>> {
    let query = halves(99, Q_HEADS * DIM);
    let options = SelectOptions::new(Budget::tokens(60)).aggregation(aggregation);
    (0..2)
        .map(|layer| {
            sequence
                .select(layer, SelectRequest::query(&query).options(options).selector(method))
                .unwrap()
                .groups()
                .collect()
        })
        .collect()
}

#[test]
fn selecting_everything_is_full_attention_by_every_method() {
    let store = TestStore::new(medium());
    let mut sequence =
        store.create_sequence(&uniform_layout(2, HEADS, DIM, GROUP), CreateOptions::new().key("a")).unwrap();
    append(&mut sequence, 0..203);
    sequence.commit(Durability::Sync).unwrap();
    let query = halves(3, Q_HEADS * DIM);
    let mut outs = vec![];
    for layer in 0..2 {
        let view = sequence.select(layer, SelectRequest::all()).unwrap();
        let batch = store.read(&[&view]).submit().unwrap().wait().unwrap();
        let mut out = vec![0.0; Q_HEADS * DIM];
        attend(&query, &view, batch.get(0).unwrap(), &mut out).unwrap();
        outs.push(out);
    }
    for method in all() {
        let id = sequence.attach(method).unwrap();
        for (layer, full) in outs.iter().enumerate() {
            let view = sequence.select(layer, SelectRequest::query(&query).budget(Budget::All).selector(id)).unwrap();
            let batch = store.read(&[&view]).submit().unwrap().wait().unwrap();
            let mut out = vec![0.0; Q_HEADS * DIM];
            attend(&query, &view, batch.get(0).unwrap(), &mut out).unwrap();
            assert_eq!(&out, full);
        }
    }
}

#[test]
fn summaries_are_the_same_however_the_tokens_came() {
    let mut store = TestStore::new(medium());
    let mut sequence =
        store.create_sequence(&uniform_layout(2, HEADS, DIM, GROUP), CreateOptions::new().key("a")).unwrap();
    // Half of the tokens are appended before the methods are attached, the others one by one afterwards.
    append(&mut sequence, 0..150);
    let ids: Vec<_> = all().into_iter().map(|method| sequence.attach(method).unwrap()).collect();
    (150..303).for_each(|t| append(&mut sequence, t..t + 1));
    sequence.commit(Durability::Sync).unwrap();
    let forms = [HeadAggregation::Sum, HeadAggregation::Softmax];
    let grown: Vec<_> = ids.iter().flat_map(|id| forms.map(|form| chosen(&sequence, *id, form))).collect();
    // The sequence is truncated and grown with the same tokens.
    sequence.truncate(97).unwrap();
    append(&mut sequence, 97..303);
    let again: Vec<_> = ids.iter().flat_map(|id| forms.map(|form| chosen(&sequence, *id, form))).collect();
    assert_eq!(grown, again);
    sequence.commit(Durability::Sync).unwrap();
    drop(sequence);
    // After an open, the summaries are computed at once from the stored keys.
    store.reopen();
    let mut sequence = store.open_sequence("a", OpenSequence::new()).unwrap();
    let ids: Vec<_> = all().into_iter().map(|method| sequence.attach(method).unwrap()).collect();
    let rebuilt: Vec<_> = ids.iter().flat_map(|id| forms.map(|form| chosen(&sequence, *id, form))).collect();
    assert_eq!(grown, rebuilt);
    for id in ids {
        assert!(sequence.selector_bytes(id).unwrap() > 0);
    }
}

#[test]
fn exact_scores_choose_what_attention_weighs_most() {
    let store = TestStore::new(medium());
    let mut sequence = store.create_sequence(&uniform_layout(2, HEADS, DIM, GROUP), CreateOptions::new()).unwrap();
    let tokens = 240;
    append(&mut sequence, 0..tokens);
    let exact = sequence.attach(Arc::new(Oracle)).unwrap();
    let full_rank = sequence.attach(Arc::new(KvSwap::new(identity()))).unwrap();
    let query = halves(99, Q_HEADS * DIM);
    for form in [HeadAggregation::Sum, HeadAggregation::Softmax] {
        let found = chosen(&sequence, exact, form);
        assert_eq!(found, chosen(&sequence, full_rank, form), "a low rank that is not low is exact");
        for (layer, groups) in found.iter().enumerate() {
            let dot = |head: usize, t: usize| -> f64 {
                let key = row(layer, t);
                let key = &key[head / (Q_HEADS / HEADS) * DIM..][..DIM];
                query[head * DIM..][..DIM].iter().zip(key).map(|(q, k)| f64::from(q * k)).sum()
            };
            let mut scores = vec![0.0; tokens];
            for head in 0..Q_HEADS {
                let scale = if form == HeadAggregation::Softmax { 1.0 / (DIM as f64).sqrt() } else { 1.0 };
                let of: Vec<f64> = (0..tokens).map(|t| dot(head, t) * scale).collect();
                let sum: f64 = of.iter().map(|x| x.exp()).sum();
                let add = |x: &f64| if form == HeadAggregation::Softmax { x.exp() / sum } else { *x };
                scores.iter_mut().zip(&of).for_each(|(score, x)| *score += add(x));
            }
            let best = |g: u64| scores[g as usize * GROUP..][..GROUP].iter().copied().fold(f64::MIN, f64::max);
            let newest = (tokens / GROUP - 1) as u64;
            let free = groups.iter().filter(|g| **g != newest);
            let lowest = free.map(|g| best(*g)).fold(f64::MAX, f64::min);
            let left_out = (0..newest).filter(|g| !groups.contains(g));
            assert!(left_out.map(best).all(|score| score <= lowest + 1e-4), "{form:?}");
        }
    }
}

#[test]
fn bounds_and_their_tree_choose_alike() {
    let store = TestStore::new(medium());
    let mut sequence = store.create_sequence(&uniform_layout(2, HEADS, DIM, GROUP), CreateOptions::new()).unwrap();
    append(&mut sequence, 0..1000);
    let flat = sequence.attach(Arc::new(Quest)).unwrap();
    // The upper bound of a chunk is at least that of its groups, so the tree finds the same groups. It would differ
    // only if it took a whole chunk by its lower bound, which random keys do not allow.
    for density in [None, Some(0.01), Some(0.9)] {
        let tree = sequence.attach(Arc::new(LeoAm { density })).unwrap();
        assert_eq!(chosen(&sequence, flat, HeadAggregation::Sum), chosen(&sequence, tree, HeadAggregation::Sum));
    }
}

/// A method of an embedder. It scores a group by the mean length of its keys, whatever the query.
struct Loudest;
struct Lengths {
    shape: KeyShape,
    lengths: Vec<f32>,
}
struct LengthKind;

impl SummarySpec for LengthKind {
    fn id(&self) -> String {
        "lengths".into()
    }

    fn layer(&self, _layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        Ok(Box::new(Lengths { shape, lengths: Vec::new() }))
    }
}

impl LayerSummary for Lengths {
    fn groups(&self) -> usize {
        self.lengths.len()
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        let squares: f32 = group.tokens().iter().map(|x| x * x).sum();
        self.lengths.push((squares / self.shape.group_tokens as f32).sqrt());
    }

    fn truncate(&mut self, groups: usize) {
        self.lengths.truncate(groups);
    }

    fn bytes(&self) -> usize {
        self.lengths.capacity() * 4
    }

    fn bytes_for(&self, groups: usize) -> usize {
        2 * (self.lengths.capacity() + groups) * 4
    }
}

impl Selector for Loudest {
    fn name(&self) -> &str {
        "loudest"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::new(LengthKind)]
    }

    fn score(&self, summaries: &[&dyn LayerSummary], ask: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()> {
        let lengths: &Lengths = summary_as(summaries)?;
        scores.copy_from_slice(&lengths.lengths[ask.groups.clone()]);
        Ok(())
    }
}

#[test]
fn a_method_of_the_embedder_selects() {
    let store = TestStore::new(medium());
    let mut sequence = store.create_sequence(&uniform_layout(2, HEADS, DIM, GROUP), CreateOptions::new()).unwrap();
    append(&mut sequence, 0..200);
    let id = sequence.attach(Arc::new(Loudest)).unwrap();
    let length = |g: u64| (0..GROUP).flat_map(|t| row(0, g as usize * GROUP + t)).map(|x| x * x).sum::<f32>();
    let groups = &chosen(&sequence, id, HeadAggregation::Sum)[0];
    let free = groups.iter().filter(|g| **g != 49);
    let lowest = free.map(|g| length(*g)).fold(f32::MAX, f32::min);
    assert!((0..49).filter(|g| !groups.contains(g)).all(|g| length(g) <= lowest));
}

#[test]
fn memory_is_accounted_and_its_end_is_an_error() {
    let small = medium().memory_limit(ByteSize::mib(8)).segment_bytes(ByteSize::mib(1));
    let store = TestStore::new(small.frame_bytes(ByteSize::kib(128)));
    let mut sequence = store.create_sequence(&uniform_layout(2, HEADS, DIM, GROUP), CreateOptions::new()).unwrap();
    let id = sequence.attach(Arc::new(Oracle)).unwrap();
    let mut tokens = 0;
    let error = loop {
        let rows: Vec<f32> = (tokens..tokens + 1000).flat_map(|t| row(0, t)).collect();
        let view = TensorView::token_major(&rows, 1000, HEADS, DIM);
        match sequence.append(0, view, view) {
            Ok(()) => tokens += 1000,
            Err(e) => break e,
        }
        let held: usize = store.status().memory.categories.iter().map(|c| c.used_bytes).sum();
        assert!(sequence.selector_bytes(id).unwrap() as usize <= held);
        assert!(store.status().memory.peak_bytes <= 8 << 20);
        assert!(tokens < 1_000_000, "the limit never came");
    };
    assert!(matches!(error.kind(), ErrorKind::MemoryLimit | ErrorKind::Busy), "{error}");
    assert_eq!(sequence.layer_len(0).unwrap(), tokens as u64, "the layer is as it was");
}

/// A selector that needs two kinds of summaries, one of which cannot be built.
struct Half(Arc<dyn SummarySpec>);
struct NoKind;

impl SummarySpec for NoKind {
    fn id(&self) -> String {
        "none".into()
    }

    fn layer(&self, layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        match layer {
            0 => LengthKind.layer(layer, shape),
            // A row has the wrong length, as in an adapter of another model.
            _ => LowRankAdapter::new(3, 1, vec![0.0]).map(|_| unreachable!()),
        }
    }
}

impl Selector for Half {
    fn name(&self) -> &str {
        "half"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::clone(&self.0), Arc::new(NoKind)]
    }

    fn score(&self, _: &[&dyn LayerSummary], _: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()> {
        scores.fill(0.0);
        Ok(())
    }
}

#[test]
fn a_selector_that_does_not_suit_leaves_the_sequence_as_it_was() {
    let store = TestStore::new(medium());
    let mut sequence = store.create_sequence(&uniform_layout(2, HEADS, DIM, GROUP), CreateOptions::new()).unwrap();
    append(&mut sequence, 0..200);
    let first = sequence.attach(Arc::new(Loudest)).unwrap();
    let used = |store: &Store| store.status().memory.used_bytes;
    let (before, bytes) = (used(&store), sequence.selector_bytes(first).unwrap());
    for kind in [Oracle.summaries(), SignBits.summaries()].concat() {
        sequence.attach_stored(Arc::new(Half(kind))).unwrap_err();
        assert_eq!((used(&store), sequence.selector_bytes(first).unwrap()), (before, bytes));
    }
    // A selector that is attached later has summaries of its own.
    let oracle = sequence.attach(Arc::new(Oracle)).unwrap();
    append(&mut sequence, 200..240);
    for layer in 0..2 {
        let counts =
            |id| sequence.selector_summaries(id, layer).unwrap().iter().map(|s| s.groups()).collect::<Vec<_>>();
        assert_eq!((counts(first), counts(oracle)), (vec![60], vec![60]));
    }
    assert!(sequence.selector_bytes(oracle).unwrap() > 0);
}
