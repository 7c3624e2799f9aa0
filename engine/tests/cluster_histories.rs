//! Random histories of a sequence with methods that choose entries, beside a plain model.
//!
//! A history appends, cuts, forks, opens again, attaches, profiles and selects. After every selection:
//! - each KV head attends to tokens that exist, each once, and to the whole tail;
//! - a method that has clusters and no window of its own stays within its budget;
//! - the output is that of the plain model over exactly these entries, so no cut token is ever attended.
//!
//! `STRATAKV_TEST_HISTORIES` sets the number of histories, `STRATAKV_TEST_SEED` the first seed.

use fastrand::Rng;
use std::collections::BTreeSet;
use std::sync::Arc;
use stratakv::retrieval::{Adapter, Codebook, HeadAggregation, MethodSpec, SelectorId};
use stratakv::{
    Budget, CreateOptions, DType, Durability, KvLayout, OpenSequence, SelectOptions, SelectRequest, Selection,
    Sequence, Store, TensorView, attend,
};

const KV_HEADS: usize = 2;
const Q_HEADS: usize = 4;
const DIM: usize = 4;
const GROUP: usize = 8;
/// The most tokens of a history.
const TOKENS_MAX: usize = 900;
/// The methods that histories attach.
const METHODS: &[&str] = &[
    "tokens",
    "dynakv:4",
    "dynakv:8:joint",
    "dynakv:8:members",
    "clusterkv:8",
    "clusterkv:8:members:heads",
    "kmeans:8",
    "pqcache:16",
    "swarm:4",
    "swarm:4:members",
    "infllm:16",
];

/// Returns codes of 16 levels for each element of a key, without a transform.
fn adapter() -> Arc<Adapter> {
    let width = KV_HEADS * DIM;
    let identity: Vec<f32> = (0..width * width).map(|at| f32::from(u8::from(at % (width + 1) == 0))).collect();
    let packing = (0..width as u32 / 2).map(|byte| vec![2 * byte, 2 * byte + 1]).collect();
    let levels = vec![(0..16).map(|level| level as f32 / 2.0 - 3.75).collect(); width];
    let book = Codebook::new(vec![0.0; width], identity.clone(), identity, packing, levels, 0.0).unwrap();
    Arc::new(Adapter::new("codes", 1, vec![book.into()]).unwrap())
}

/// Returns the row of a token, `[KV_HEADS, DIM]`, around one of a few centres. No two tokens have equal rows.
fn row(token: u64, plane: u64) -> Vec<f32> {
    let mut own = Rng::with_seed(2 * token + plane);
    let mut centre = Rng::with_seed(own.u64(0..9));
    (0..KV_HEADS * DIM).map(|_| 2.0 * (centre.f32() - 0.5) + own.f32() - 0.5).collect()
}

/// One sequence and what it should hold.
struct History {
    store: Store,
    sequence: Sequence,
    key: String,
    /// The number of each token, which makes its rows.
    tokens: Vec<u64>,
    methods: Vec<(&'static str, SelectorId)>,
    next: u64,
    rng: Rng,
}

impl History {
    fn append(&mut self, count: usize) {
        let new: Vec<u64> = (self.next..self.next + count as u64).collect();
        self.next += count as u64;
        let [keys, values] = [0, 1].map(|plane| new.iter().flat_map(|at| row(*at, plane)).collect::<Vec<f32>>());
        let view = |rows| TensorView::token_major(rows, count, KV_HEADS, DIM);
        self.sequence.append(0, view(&keys), view(&values)).unwrap();
        self.tokens.extend(new);
    }

    fn attach(&mut self) {
        let name = METHODS[self.rng.usize(..METHODS.len())];
        let spec: MethodSpec = name.parse().unwrap();
        let selector = spec.selector(spec.adapter_name().map(|_| adapter())).unwrap();
        self.methods.push((name, self.sequence.attach(selector).unwrap()));
        let (name, id) = self.methods[self.methods.len() - 1];
        if name.starts_with("swarm") || name.starts_with("infllm") {
            self.profile(id);
        }
    }

    fn profile(&mut self, id: SelectorId) {
        // A profile needs a sealed group.
        if self.tokens.len() < GROUP {
            self.append(GROUP);
        }
        let queries: Vec<Vec<f32>> = (0..self.rng.usize(1..40)).map(|_| self.query()).collect();
        let views: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
        self.sequence.profile(id, 0, &views, None).unwrap();
    }

    /// Starts over with the handle's selectors gone.
    fn forget_methods(&mut self) {
        self.methods.clear();
        self.attach();
    }

    fn query(&mut self) -> Vec<f32> {
        (0..Q_HEADS / KV_HEADS).flat_map(|_| row(self.rng.u64(..self.next + 9), 0)).collect()
    }

    fn reopen(&mut self) {
        self.sequence.commit(Durability::Lazy).unwrap();
        let open = |store: &Store, key: &str| store.open_sequence(key, OpenSequence::new());
        // The handle holds the sequence, so a fork takes its place for a moment.
        let other = self.sequence.fork().unwrap();
        drop(std::mem::replace(&mut self.sequence, other));
        self.sequence = open(&self.store, &self.key).unwrap();
        self.forget_methods();
    }

    fn fork(&mut self) {
        let key = format!("{}-{}", self.key, self.next);
        let mut child = self.sequence.fork_as(&key).unwrap();
        child.commit(Durability::Lazy).unwrap();
        std::mem::replace(&mut self.sequence, child).delete(Durability::Lazy).unwrap();
        self.key = key;
        self.forget_methods();
    }

    fn select(&mut self) {
        let (name, id) = self.methods[self.rng.usize(..self.methods.len())];
        let query = self.query();
        let budget = self.rng.usize(1..self.tokens.len() + 40);
        let aggregation = if self.rng.bool() { HeadAggregation::Softmax } else { HeadAggregation::Sum };
        let sinks = self.rng.usize(..20);
        let options = SelectOptions::new(Budget::tokens(budget)).aggregation(aggregation).sinks(sinks);
        let request = SelectRequest::query(&query).options(options).selector(id);
        let chosen = match self.sequence.select(0, request) {
            Ok(chosen) => chosen,
            // A cut to nothing forgets the profile.
            Err(e) => {
                assert!(e.to_string().contains("profile"), "{name}: {e}");
                self.profile(id);
                return;
            }
        };
        self.check(name, &query, budget.max(sinks.next_multiple_of(GROUP) + 2 * GROUP), &chosen);
    }

    fn check(&self, name: &str, query: &[f32], most: usize, chosen: &Selection) {
        let length = self.tokens.len();
        let mut out = vec![0.0; Q_HEADS * DIM];
        let batch = self.store.read(&[chosen]).wait().unwrap();
        attend(query, chosen, batch.get(0).unwrap(), &mut out).unwrap();
        for head in 0..KV_HEADS {
            let entries: Vec<usize> = chosen.entries(head).map(|token| token as usize).collect();
            let distinct: BTreeSet<usize> = entries.iter().copied().collect();
            assert!(distinct.len() == entries.len() && entries.iter().all(|at| *at < length), "{name}: {entries:?}");
            assert!((length - length % GROUP..length).all(|at| distinct.contains(&at)), "{name}: the tail");
            // SWARM and InfLLM attend to their window whole, whatever the budget is.
            let has_window = length < 320 || name.starts_with("swarm") || name.starts_with("infllm");
            assert!(has_window || entries.len() <= most || entries.len() == length, "{name}: {}", entries.len());
            let own = |at: usize, plane| row(self.tokens[at], plane)[head * DIM..][..DIM].to_vec();
            for q_head in head * Q_HEADS / KV_HEADS..(head + 1) * Q_HEADS / KV_HEADS {
                let q = &query[q_head * DIM..][..DIM];
                let logit = |at: &usize| own(*at, 0).iter().zip(q).map(|(k, q)| f64::from(k * q)).sum::<f64>() / 2.0;
                let weights: Vec<f64> = entries.iter().map(|at| logit(at).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for dim in 0..DIM {
                    let values = entries.iter().zip(&weights).map(|(at, w)| w * f64::from(own(*at, 1)[dim]));
                    let (expected, got) = (values.sum::<f64>() / sum, f64::from(out[q_head * DIM + dim]));
                    assert!((expected - got).abs() < 1e-3, "{name}: head {q_head}: {got}, the model has {expected}");
                }
            }
        }
    }

    fn run(mut self) {
        self.append(1 + self.rng.clone().usize(..TOKENS_MAX / 2));
        self.attach();
        for _ in 0..self.rng.usize(4..24) {
            match self.rng.u8(..20) {
                0..=6 if self.tokens.len() < TOKENS_MAX => {
                    let most = if self.rng.bool() { 12 } else { 200 };
                    let count = self.rng.usize(1..most);
                    self.append(count);
                }
                7 => {
                    let left = self.rng.usize(..=self.tokens.len());
                    self.sequence.truncate(left as u64).unwrap();
                    self.tokens.truncate(left);
                    // A layer without tokens has nothing to select.
                    self.append(1);
                }
                8 => self.fork(),
                9 => self.reopen(),
                10 if self.methods.len() < 3 => self.attach(),
                11 => self.sequence.commit(Durability::Lazy).unwrap(),
                _ => self.select(),
            }
        }
        self.sequence.delete(Durability::Lazy).unwrap();
    }
}

#[test]
fn every_history_attends_to_each_entry_once_and_to_its_own_bytes() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    let (histories, first) =
        (number("STRATAKV_TEST_HISTORIES").unwrap_or(40), number("STRATAKV_TEST_SEED").unwrap_or(1));
    let dir = tempfile::tempdir().unwrap();
    let store = Store::options().device(dir.path()).open().unwrap();
    let layout = KvLayout::builder().layers(1).kv_heads(KV_HEADS as u16).head_dim(DIM as u16);
    let layout = layout.group_tokens(GROUP as u16).dtype(DType::F32).build().unwrap();
    for seed in first..first + histories {
        let run = std::panic::AssertUnwindSafe(|| {
            let key = format!("history-{seed}");
            let sequence = store.create_sequence(&layout, CreateOptions::new().key(&key)).unwrap();
            let (store, rng) = (store.clone(), Rng::with_seed(seed));
            History { store, sequence, key, tokens: Vec::new(), methods: Vec::new(), next: 0, rng }.run();
        });
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("repeat with STRATAKV_TEST_HISTORIES=1 STRATAKV_TEST_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
