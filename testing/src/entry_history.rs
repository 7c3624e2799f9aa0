//! Random histories of a sequence with methods that choose entries, beside a plain model.
//!
//! A step appends, cuts, forks, opens again, attaches, profiles, splits clusters or selects. After every selection:
//! - each KV head attends to tokens that exist, each once, and to the whole tail;
//! - a method that has clusters and no window of its own stays within its budget;
//! - the output is that of the plain model over exactly these entries, so no cut token is ever attended.
//!
//! While devices fail, a step appends, cuts, attaches, profiles, splits clusters or selects. [`DeviceState`] says what
//! may then fail. An operation that fails changes nothing.

use crate::entries::EntryShape;
use fastrand::Rng;
use std::num::NonZeroU32;
use stratakv::options::{ClusterStripe, StoreClusterOptions};
use stratakv::retrieval::{HeadAggregation, SelectorId};
use stratakv::{
    Budget, CreateOptions, Durability, ErrorKind, OpenSequence, Result, SelectOptions, SelectRequest, Selection,
    Sequence, Store,
};

const SHAPE: EntryShape = EntryShape { kv_heads: 2, q_heads: 4, dim: 4, group: 8 };
/// The most tokens of a history.
const TOKENS_MAX: usize = 900;
/// The methods that histories attach.
const METHODS: &[&str] = &[
    "tokens",
    "balanced:4:members",
    "dynakv:4",
    "dynakv:8:joint",
    "dynakv:8:members",
    "clusterkv:8",
    "clusterkv:8:members:heads",
    "kmeans:8",
    "pqcache:16",
    "swarm:4",
    "swarm:4:members",
    "swarm:4:members:window",
    "infllm:16",
];

/// The faults that the devices of a history may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// Every operation succeeds.
    Sound,
    /// Writes may fail. Each stored group has a copy that can be read.
    Degraded,
    /// Writes may fail, and so may reads of what is on devices only.
    Unreadable,
}

/// One sequence and what it should hold.
#[derive(Debug)]
pub struct EntryHistory {
    /// None after [`Self::leave`]. Declared first, because it is dropped before its store.
    sequence: Option<Sequence>,
    store: Option<Store>,
    key: String,
    /// The number of each token, which makes its rows.
    tokens: Vec<u64>,
    methods: Vec<(&'static str, SelectorId)>,
    next: u64,
    devices: DeviceState,
    rng: Rng,
    /// Selections that read pages of stored clusters.
    paged: usize,
}

impl EntryHistory {
    /// Creates the sequence of a history, appends its first tokens and attaches a method.
    ///
    /// # Panics
    /// The store refuses it.
    #[must_use]
    pub fn new(store: Store, key: String, options: CreateOptions, seed: u64) -> Self {
        let sequence = store.create_sequence(&SHAPE.layout(), options.key(&key)).expect("a sequence");
        let mut history = Self {
            sequence: Some(sequence),
            store: Some(store),
            key,
            tokens: Vec::new(),
            methods: Vec::new(),
            next: 0,
            devices: DeviceState::Sound,
            rng: Rng::with_seed(seed),
            paged: 0,
        };
        history.append(1 + history.rng.clone().usize(..TOKENS_MAX / 2));
        history.attach();
        history
    }

    /// Runs a whole history on sound devices, and deletes the sequence. Returns [`Self::paged`].
    ///
    /// # Panics
    /// A check fails.
    pub fn run(mut self) -> usize {
        (0..self.rng.usize(4..24)).for_each(|_| self.step());
        if let Some(sequence) = self.sequence.take() {
            sequence.delete(Durability::Lazy).expect("a deletion");
        }
        self.paged
    }

    /// Returns how many selections have read pages of stored clusters.
    #[must_use]
    pub fn paged(&self) -> usize {
        self.paged
    }

    /// Sets what the devices may do from now on.
    pub fn set_devices(&mut self, devices: DeviceState) {
        self.devices = devices;
    }

    /// Returns the numbers of the tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u64] {
        &self.tokens
    }

    /// Returns the store.
    ///
    /// # Panics
    /// The history has left it.
    #[must_use]
    pub fn store(&self) -> &Store {
        self.store.as_ref().expect("an open store")
    }

    /// Commits.
    ///
    /// # Errors
    /// The commit fails, as in [`Sequence::commit`].
    pub fn commit(&mut self, durability: Durability) -> Result<()> {
        self.sequence().commit(durability)
    }

    /// Takes one random step, and checks it.
    ///
    /// # Panics
    /// A check fails.
    pub fn step(&mut self) {
        let is_sound = self.devices == DeviceState::Sound;
        match self.rng.u8(..23) {
            0..=6 if self.tokens.len() < TOKENS_MAX => {
                let most = if self.rng.bool() { 12 } else { 200 };
                let count = self.rng.usize(1..most);
                self.append(count);
            }
            7 => self.cut(),
            8 if is_sound => self.fork(),
            9 if is_sound => self.reopen(),
            10 if self.methods.len() < 3 => self.attach(),
            11 if is_sound => self.commit(Durability::Lazy).expect("a commit"),
            12 | 13 if is_sound => self.store_clusters(),
            14 => self.split(),
            _ => self.select(),
        }
    }

    /// Drops the handle and the store, as the death of the host does.
    pub fn leave(&mut self) {
        self.methods.clear();
        self.sequence = None;
        self.store = None;
    }

    /// Continues in a store that was opened again. The sequence must hold one of `states`.
    ///
    /// # Panics
    /// The sequence does not open, or holds none of them.
    pub fn resume(&mut self, store: Store, states: &[Vec<u64>]) {
        let sequence = store.open_sequence(self.key.as_str(), OpenSequence::new()).expect("the sequence opens");
        (self.sequence, self.store) = (Some(sequence), Some(store));
        let holds = |tokens: &&Vec<u64>| self.difference(tokens).is_none();
        let found = states.iter().find(holds).cloned();
        let lengths: Vec<usize> = states.iter().map(Vec::len).collect();
        self.tokens = found.unwrap_or_else(|| panic!("{} tokens, not one of {lengths:?}", self.sequence().len()));
        if self.tokens.is_empty() {
            self.append(1);
        }
        self.forget_methods();
    }

    /// Selects everything and compares it with the model.
    ///
    /// # Panics
    /// A comparison fails.
    pub fn check_all(&self) {
        assert_eq!(self.difference(&self.tokens), None);
    }

    fn sequence(&mut self) -> &mut Sequence {
        self.sequence.as_mut().expect("an open sequence")
    }

    /// Returns the value of an operation, or none if it failed as the devices allow. The length must be unchanged then.
    fn allowed<T>(&mut self, done: Result<T>, may_fail: bool) -> Option<T> {
        done.map_err(|e| {
            assert!(may_fail && e.kind() == ErrorKind::Io, "{:?}: {e:?}", self.devices);
            assert_eq!(self.sequence().len(), self.tokens.len() as u64);
        })
        .ok()
    }

    fn append(&mut self, count: usize) {
        let new: Vec<u64> = (self.next..self.next + count as u64).collect();
        self.next += count as u64;
        let [keys, values] = [0, 1].map(|plane| new.iter().flat_map(|at| SHAPE.row(*at, plane)).collect::<Vec<f32>>());
        let appended = SHAPE.append(self.sequence(), &keys, &values);
        if self.allowed(appended, self.devices != DeviceState::Sound).is_some() {
            self.tokens.extend(new);
        }
    }

    fn cut(&mut self) {
        let left = self.rng.usize(..=self.tokens.len());
        let cut = self.sequence().truncate(left as u64);
        if self.allowed(cut, self.devices == DeviceState::Unreadable).is_some() {
            self.tokens.truncate(left);
        }
        // A layer without tokens has nothing to select.
        self.append(1);
    }

    fn attach(&mut self) {
        let name = METHODS[self.rng.usize(..METHODS.len())];
        let attached = self.sequence().attach(SHAPE.selector(name));
        let Some(id) = self.allowed(attached, self.devices == DeviceState::Unreadable) else { return };
        self.methods.push((name, id));
        if name.starts_with("swarm") || name.starts_with("infllm") {
            self.profile(id);
        }
    }

    fn profile(&mut self, id: SelectorId) {
        // A profile needs a sealed group.
        if self.tokens.len() < SHAPE.group {
            self.append(SHAPE.group);
        }
        let queries: Vec<Vec<f32>> = (0..self.rng.usize(1..40)).map(|_| self.query()).collect();
        let views: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
        let profiled = self.sequence().profile(id, 0, &views, None);
        let _ = self.allowed(profiled, self.devices == DeviceState::Unreadable);
    }

    /// Starts over with the handle's selectors gone.
    fn forget_methods(&mut self) {
        self.methods.clear();
        self.attach();
    }

    /// Stores the clusters of a method, or drops those that are stored.
    fn store_clusters(&mut self) {
        if self.methods.is_empty() {
            return;
        }
        if self.rng.bool() {
            self.commit(Durability::Lazy).expect("a commit");
        }
        if self.rng.u8(..8) == 0 {
            self.sequence().drop_stored_clusters().expect("a commit");
        }
        let (name, id) = self.methods[self.rng.usize(..self.methods.len())];
        let stripe = match self.rng.u32(..8) {
            0 => ClusterStripe::Stretch,
            1 | 2 => ClusterStripe::Cluster,
            unit => ClusterStripe::Pages(NonZeroU32::MIN.saturating_add(unit - 3)),
        };
        match self.sequence().store_clusters_with(id, StoreClusterOptions::new().stripe(stripe)) {
            Ok(stored) => assert!(stored.tokens <= self.sequence().committed(), "{name}: {stored:?}"),
            // It has no clusters yet, or none of committed tokens.
            Err(e) => assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{name}: {e:?}"),
        }
    }

    /// Splits some clusters of a method, as in the idle time of the device.
    fn split(&mut self) {
        if self.methods.is_empty() {
            return;
        }
        let (name, id) = self.methods[self.rng.usize(..self.methods.len())];
        let limit = self.rng.usize(..9);
        let split = self.sequence().split_clusters(id, limit);
        let Some(split) = self.allowed(split, self.devices == DeviceState::Unreadable) else { return };
        let is_delayed = name.starts_with("dynakv");
        assert!(split <= limit && (is_delayed || split == 0), "{name}: {split} of {limit}");
        let summaries = self.sequence().selector_summaries(id, 0).expect("summaries");
        let waits = summaries.iter().any(|own| !own.buffer_sizes().is_empty());
        assert!(split == limit || !waits, "{name}: {split} of {limit}, and others wait");
    }

    fn query(&mut self) -> Vec<f32> {
        let heads = SHAPE.q_heads / SHAPE.kv_heads;
        (0..heads).flat_map(|_| SHAPE.row(self.rng.u64(..self.next + 9), 0)).collect()
    }

    fn reopen(&mut self) {
        self.commit(Durability::Lazy).expect("a commit");
        // The handle holds the sequence, so a fork takes its place for a moment.
        let other = self.sequence().fork().expect("a fork");
        self.sequence = Some(other);
        let opened = self.store().open_sequence(self.key.as_str(), OpenSequence::new());
        self.sequence = Some(opened.expect("the sequence opens again"));
        self.forget_methods();
    }

    fn fork(&mut self) {
        let key = format!("{}-{}", self.key, self.next);
        let mut child = self.sequence().fork_as(&key).expect("a fork");
        child.commit(Durability::Lazy).expect("a commit");
        if let Some(parent) = self.sequence.replace(child) {
            parent.delete(Durability::Lazy).expect("a deletion");
        }
        self.key = key;
        self.forget_methods();
    }

    fn select(&mut self) {
        if self.methods.is_empty() {
            return;
        }
        let (name, id) = self.methods[self.rng.usize(..self.methods.len())];
        let query = self.query();
        let budget = self.rng.usize(1..self.tokens.len() + 40);
        let aggregation = if self.rng.bool() { HeadAggregation::Softmax } else { HeadAggregation::Sum };
        let sinks = self.rng.usize(..20);
        let options = SelectOptions::new(Budget::tokens(budget)).aggregation(aggregation).sinks(sinks);
        let request = SelectRequest::query(&query).options(options).selector(id);
        let chosen = match self.sequence().select(0, request) {
            Ok(chosen) => chosen,
            // A cut to nothing forgets the profile.
            Err(e) => {
                assert!(e.to_string().contains("profile"), "{name}: {e}");
                self.profile(id);
                return;
            }
        };
        self.check(name, &query, budget.max(sinks.next_multiple_of(SHAPE.group) + 2 * SHAPE.group), &chosen);
    }

    fn check(&mut self, name: &str, query: &[f32], most: usize, chosen: &Selection) {
        let length = self.tokens.len();
        assert_eq!(chosen.length(), length as u64, "{name}");
        let entries = SHAPE.entries(chosen);
        for own in &entries {
            let tail = (length - length % SHAPE.group) as u64..length as u64;
            assert!(tail.clone().all(|at| own.contains(&at)), "{name}: the tail {tail:?}");
            // SWARM and InfLLM may attend to their window whole, whatever the budget is.
            let has_window = length < 320 || name.ends_with("window") || name.starts_with("infllm");
            assert!(has_window || own.len() <= most || own.len() == length, "{name}: {}", own.len());
        }
        match SHAPE.output(self.store(), query, chosen) {
            Ok(out) => {
                assert_eq!(wrong_output(&self.tokens, query, &entries, &out), None, "{name}");
                let again = SHAPE.output(self.store(), query, chosen);
                assert!(again.is_ok_and(|again| again == out) || self.devices == DeviceState::Unreadable, "{name}");
                self.paged += usize::from(chosen.stored_pages() > 0);
            }
            Err(e) => assert!(self.devices == DeviceState::Unreadable && e.kind() == ErrorKind::Io, "{name}: {e:?}"),
        }
    }

    /// Returns how the sequence differs from one with these tokens.
    fn difference(&self, tokens: &[u64]) -> Option<String> {
        let sequence = self.sequence.as_ref().expect("an open sequence");
        if sequence.len() != tokens.len() as u64 {
            return Some(format!("{} tokens, not {}", sequence.len(), tokens.len()));
        }
        if tokens.is_empty() {
            return None;
        }
        let all = sequence.select(0, SelectRequest::all()).expect("a selection");
        let query = SHAPE.query(3);
        let out = SHAPE.output(self.store(), &query, &all).expect("a read");
        wrong_output(tokens, &query, &SHAPE.entries(&all), &out)
    }
}

/// Returns how an output differs from that of the plain model over these entries.
fn wrong_output(tokens: &[u64], query: &[f32], entries: &[Vec<u64>], out: &[f32]) -> Option<String> {
    let expected = SHAPE.attention(query, entries, |token, plane| SHAPE.row(tokens[token as usize], plane));
    let pairs = out.iter().zip(&expected).enumerate();
    let is_wrong = |got: f32, expected: f64| got.is_nan() || (f64::from(got) - expected).abs() > 1e-3;
    let mut wrong = pairs.filter(|(_, (got, expected))| is_wrong(**got, **expected));
    wrong.next().map(|(at, (got, expected))| format!("element {at}: {got}, the model has {expected}"))
}
