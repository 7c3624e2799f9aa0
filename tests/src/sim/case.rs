//! A case: everything that happens, decided from the seed before the case starts.
//!
//! 1. [`Case::generate`] draws the regime, geometry, layout and settings, then the rounds.
//! 2. A [`Round`] is a list of operations, a crash, and what follows it: crashes during recovery, bit rot, a lost disk.
//! 3. [`Case::from_bytes`] takes settings from a seed and operations from bytes, so that a fuzzer can choose them.
//!
//! Settings added later draw from generators of their own, so that older seeds keep their histories.

use super::operation::Operation;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::num::NonZeroU32;
use stratakv::options::ClusterStripe;
use stratakv::sim::{Faults, Geometry, Rng};
use stratakv::{DType, Durability};

/// The largest number of sequences that a case uses at a time.
pub(super) const SLOTS: usize = 4;

/// The faults of a case besides power failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Regime {
    /// Nothing.
    Plain,
    /// Space is short.
    Tight,
    /// Reads, writes, syncs and changes of files and names fail.
    Errors,
    /// Bits flip on the medium while the power is off.
    Rot,
    /// Writes report success but reach another place or none.
    Astray,
    /// One read returns a wrong bit.
    Flips,
}

/// The operations up to a crash, and what follows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Round {
    /// The operations.
    pub operations: Vec<Operation>,
    /// The power failure: the index of an operation, and the number of device operations from its start.
    pub crash: (usize, u64),
    /// Power failures during recovery, each after this many device operations.
    pub again: Vec<u64>,
    /// Faults, with the operation before which they are set.
    pub faults: Option<(usize, Faults)>,
    /// Bit rot while the power is off: path prefix, copies, and offset limit.
    pub rot: Option<(Cow<'static, str>, usize, u64)>,
    /// True if the store is opened read-only before it is recovered.
    #[serde(default)]
    pub look: bool,
    /// A disk that is missing after the power failure. Ignored unless everything has copies.
    #[serde(default)]
    pub lost: Option<usize>,
}

/// The expiry and eviction settings of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lifetime {
    /// The time to live in milliseconds; 0 for none.
    pub ttl: u64,
    /// The priority of eviction; 0 if the sequence is not evictable.
    pub evictable: u8,
}

/// One history.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Case {
    /// The seed of the case, and of the behaviour of its devices.
    pub seed: u64,
    /// The faults besides power failures.
    pub regime: Regime,
    /// The sizes of the simulation.
    pub geometry: Geometry,
    /// The pages of a segment.
    pub segment_pages: u64,
    /// The capacity in segments.
    pub capacity: Option<u64>,
    /// Layers, KV heads, head dim, group tokens.
    pub layout: (u16, u16, u16, u16),
    /// The element type.
    #[serde(with = "dtype")]
    pub dtype: DType,
    /// The bits per element of encoded groups, 0 for raw groups; and the share of encoded layers.
    #[serde(default)]
    pub codec: (u8, f64),
    /// True if sequences store min/max summaries.
    pub summaries: bool,
    /// True if selections stream these summaries.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub streamed: bool,
    /// The method of entries that is attached after each crash; none for no method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entries: Option<Cow<'static, str>>,
    /// The lifetimes of sequences by slot. Further slots have none.
    #[serde(default)]
    pub ends: Vec<Lifetime>,
    /// The copies of each sequence.
    #[serde(default = "one")]
    pub copies: u8,
    /// The largest number of shards that serve the disks; none for one per disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shards: Option<usize>,
    /// The rounds in order.
    pub rounds: Vec<Round>,
}

fn one() -> u8 {
    1
}

/// Element types by name.
mod dtype {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
    use stratakv::DType;

    const ALL: [DType; 3] = [DType::F16, DType::F32, DType::Bf16];

    pub(super) fn serialize<S: Serializer>(dtype: &DType, to: S) -> Result<S::Ok, S::Error> {
        format!("{dtype:?}").serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<DType, D::Error> {
        let name = String::deserialize(from)?;
        let found = ALL.into_iter().find(|dtype| format!("{dtype:?}") == name);
        found.ok_or_else(|| D::Error::custom(format!("no element type {name}")))
    }
}

pub(super) fn pick<T: Copy>(rng: &mut Rng, from: &[T]) -> T {
    from[rng.below(from.len() as u64) as usize]
}

impl Case {
    /// Generates the case of this seed.
    #[must_use]
    pub fn generate(seed: u64) -> Self {
        let mut rng = Rng::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0xca5e);
        let rng = &mut rng;
        let regime = match rng.below(24) {
            0..=12 => Regime::Plain,
            13..=16 => Regime::Tight,
            17..=20 => Regime::Errors,
            21 => Regime::Rot,
            22 => Regime::Astray,
            _ => Regime::Flips,
        };
        let devices = pick(rng, &[1, 1, 1, 2, 3]);
        let segment_pages = pick(rng, &[8, 8, 10, 12, 16]);
        let tight = regime == Regime::Tight;
        let full = tight && rng.one_in(2);
        let whole = full && rng.one_in(2);
        let manifest_pages = pick(rng, &[4, 4, 5, 6, 24]);
        // The space of two manifest generations of two copies, with the largest state.
        let metadata = if whole { 4096 * (2 + 4 * (manifest_pages + 24)) } else { 0 };
        let geometry = Geometry {
            devices,
            device_bytes: if full { 4096 * (40 + rng.below(80)) + metadata } else { 64 << 20 },
            manifest_pages,
            batch_bytes: pick(rng, &[256, 400, 1000, 4000, 4000, 12_000]),
            whole,
            open_files: Rng::new(seed.wrapping_mul(0xd6e8_feb8_6659_fd93) ^ 0xf11e).one_in(4).then_some(1),
        };
        // A generator of its own, so that seeds keep the histories that they had without codecs.
        let mut own = Rng::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0xc0dec);
        let codec = pick(&mut own, &[(0, 1.0), (0, 1.0), (0, 1.0), (8, 1.0), (8, 0.5), (4, 1.0)]);
        let copies = if devices > 1 && rng.one_in(2) { 2 + rng.below(devices as u64 - 1) as u8 } else { 1 };
        // A generator of its own, so that seeds keep the histories that they had without shards.
        let mut of_shards = Rng::new(seed.wrapping_mul(0x9e6c_63d0_76cc_4b6d) ^ 0x5a4d);
        let shards = (devices > 1 && of_shards.one_in(3)).then(|| 1 + of_shards.below(2) as usize);
        let rounds = 2 + rng.below(2) as usize;
        let length = 20_u64.div_ceil(rounds as u64) + rng.below(12);
        let ending = rng.one_in(if tight { 2 } else { 4 });
        // A cache uses all slots, because the order of eviction shows only among several sequences.
        let cache = tight && ending;
        let slots = if cache { SLOTS } else { 1 + rng.below(SLOTS as u64) as usize };
        let ends = if ending {
            let end = |rng: &mut Rng| Lifetime {
                ttl: pick(rng, &[0, 0, 5_000, 30_000]),
                evictable: pick(rng, &[0, 1, 1, 2]),
            };
            (0..slots).map(|_| end(rng)).collect()
        } else {
            Vec::new()
        };
        let case = Self {
            seed,
            regime,
            geometry,
            segment_pages,
            capacity: match (cache, tight || rng.one_in(6)) {
                (true, _) => Some(devices as u64 * (2 + rng.below(3))),
                (false, limited) => limited.then(|| devices as u64 * (3 + rng.below(5))),
            },
            layout: (
                1 + rng.below(2) as u16,
                1 + rng.below(2) as u16,
                pick(rng, &[8, 16, 32]),
                pick(rng, &[2, 4, 4, 8]),
            ),
            dtype: pick(rng, &[DType::F16, DType::F16, DType::F32, DType::Bf16]),
            codec,
            summaries: rng.one_in(3),
            streamed: false,
            entries: None,
            ends,
            copies,
            shards,
            rounds: (0..rounds).map(|_| Round::generate(rng, regime, length, slots, devices, cache)).collect(),
        };
        // From the seed itself, so that seeds keep the histories that they had without streaming.
        Self { streamed: case.summaries && seed % 2 == 1, ..case }.with_later_settings()
    }

    /// Draws the settings that have generators of their own.
    fn with_later_settings(self) -> Self {
        self.with_entries().with_neighbour().with_stored_clusters().with_states()
    }

    /// Gives a share of the cases a second store, which is used between the operations of the first.
    fn with_neighbour(mut self) -> Self {
        let mut rng = Rng::new(self.seed.wrapping_mul(0xd6e8_feb8_6659_fd93) ^ 0x2b);
        if rng.one_in(32) {
            for round in &mut self.rounds {
                for _ in 0..2 {
                    let at = rng.below(round.operations.len() as u64) as usize;
                    round.operations[at] = Operation::Neighbour { tokens: 1 + rng.below(40) as usize };
                }
            }
        }
        self
    }

    /// Has a third of the cases store clusters, and some open their store twice.
    fn with_stored_clusters(mut self) -> Self {
        // A generator of its own, so that the other operations of a seed stay the same.
        let mut rng = Rng::new(self.seed.wrapping_mul(0xa24b_aed4_963e_e407) ^ 0xc105);
        if self.entries.is_none() && rng.below(10) < 3 {
            self.entries = Some(pick(&mut rng, &STORED).into());
        }
        if self.entries.as_ref().is_some_and(|method| method != "tokens") {
            let cache = !self.ends.is_empty() && self.regime == Regime::Tight;
            if cache {
                // Pools have segments of their own.
                let more = self.geometry.devices as u64 * 2;
                self.capacity = self.capacity.map(|segments| segments + more);
            }
            let devices = self.geometry.devices as u64;
            self.rounds.iter_mut().for_each(|round| round.store_clusters(&mut rng, devices, cache));
        }
        if rng.one_in(16) {
            let round = rng.below(self.rounds.len() as u64) as usize;
            let at = rng.below(self.rounds[round].operations.len() as u64) as usize;
            self.rounds[round].insert(at, &[Operation::OpenTwice]);
        }
        self
    }

    /// Has cases whose method has a state store it while tokens wait for clusters. Then they cut or lose such tokens.
    fn with_states(mut self) -> Self {
        // A generator of its own, so that seeds keep their other operations.
        let mut rng = Rng::new(self.seed.wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ 0x57a7);
        let has_state = |method: &Cow<'_, str>| method.starts_with("swarm") || method.starts_with("dynakv");
        let is_roomy = self.capacity.is_none() && self.regime != Regime::Tight;
        if is_roomy && self.entries.as_ref().is_some_and(has_state) {
            self.rounds.iter_mut().for_each(|round| round.store_states(&mut rng));
        }
        self
    }

    /// Returns how the pages of stored clusters are placed on devices, at random.
    pub(super) fn stripe(&self) -> ClusterStripe {
        // A generator of its own, so that seeds keep their histories.
        let mut rng = Rng::new(self.seed.wrapping_mul(0x9e6c_63d0_876a_9a55) ^ 0x57a1);
        match rng.below(8) {
            0 => ClusterStripe::Stretch,
            1 | 2 => ClusterStripe::Cluster,
            unit => ClusterStripe::Pages(NonZeroU32::MIN.saturating_add(unit as u32 - 3)),
        }
    }

    /// Gives a share of the cases a method of entries. Methods that build clusters by k-means need a long prompt.
    fn with_entries(mut self) -> Self {
        // A generator of its own, so that seeds keep the histories that they had without methods of entries.
        let mut rng = Rng::new(self.seed.wrapping_mul(0x8cb9_2ba7_2f3d_8dd7) ^ 0xe47);
        let is_roomy = self.capacity.is_none() && self.regime != Regime::Tight;
        if is_roomy && rng.one_in(40) {
            self.entries = Some(pick(&mut rng, &CLUSTERING).into());
            let tokens = PROMPT_TOKENS + rng.below(40) as usize;
            if let Some(round) = self.rounds.first_mut() {
                round.operations.insert(0, Operation::Append { slot: 0, tokens, layers: u8::MAX });
                round.crash.0 += 1;
                round.faults = round.faults.map(|(at, faults)| (at + 1, faults));
            }
        } else if rng.one_in(12) {
            self.entries = Some(pick(&mut rng, &CHOOSING).into());
        }
        self
    }
}

/// Methods that build clusters from [`PROMPT_TOKENS`] tokens on.
const CLUSTERING: [&str; 8] =
    ["dynakv:8", "dynakv:8", "dynakv:4:joint", "balanced:8", "balanced:8", "kmeans:8", "clusterkv:8", "pqcache:8"];
/// Methods that choose among any number of tokens.
const CHOOSING: [&str; 4] = ["tokens", "swarm:2", "swarm:4", "infllm:3"];
/// Methods whose clusters are stored.
const STORED: [&str; 5] = ["infllm:2", "infllm:3", "infllm:4", "infllm:3", "swarm:2"];
/// The fewest tokens of a prompt with clusters: 256 that are clustered and the newest 64.
const PROMPT_TOKENS: usize = 328;

impl Case {
    /// Builds a case from any bytes. The first eight are a seed, the next three the crashes during recovery. The rest
    /// replaces the operations, four bytes each.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let (seed, rest) = bytes.split_at(bytes.len().min(8));
        let seed = seed.iter().fold(0, |seed, byte| seed << 8 | u64::from(*byte));
        let mut case = Self::generate(seed);
        let (again, rest) = rest.split_at(rest.len().min(3));
        let operations: Vec<_> = rest.as_chunks::<4>().0.iter().take(120).map(|b| Operation::from_bytes(*b)).collect();
        let rounds = case.rounds.len();
        let each = operations.len().div_ceil(rounds).max(1);
        for (round, operations) in case.rounds.iter_mut().zip(operations.chunks(each)) {
            round.operations = operations.to_vec();
            round.crash.0 = round.crash.0.min(operations.len() - 1);
            if let Some((at, _)) = &mut round.faults {
                *at = (*at).min(operations.len() - 1);
            }
            round.again = again.iter().filter(|at| **at < 128).map(|at| u64::from(*at)).collect();
        }
        case
    }
}

impl Round {
    /// Inserts operations. The power failure and the faults stay at their operations.
    fn insert(&mut self, at: usize, operations: &[Operation]) {
        self.operations.splice(at..at, operations.iter().copied());
        self.crash.0 += if at <= self.crash.0 { operations.len() } else { 0 };
        let moved = |before: usize| before + if at <= before { operations.len() } else { 0 };
        self.faults = self.faults.take().map(|(before, faults)| (moved(before), faults));
    }

    /// Adds operations that store clusters. With `cache`, the sequence is closed, so that both may go. In a share
    /// of the rounds the power fails during one of them.
    fn store_clusters(&mut self, rng: &mut Rng, devices: u64, cache: bool) {
        let slot = if rng.one_in(2) { 0 } else { rng.below(SLOTS as u64) as usize };
        let at = rng.below(self.operations.len() as u64 + 1) as usize;
        let mut own = Vec::new();
        if rng.one_in(2) {
            let durability = pick(rng, &[Durability::Sync, Durability::Sync, Durability::Lazy]);
            own.push(Operation::Append { slot, tokens: 12 + rng.below(16) as usize, layers: u8::MAX });
            own.push(Operation::Commit { slot, durability, state: None });
        }
        let stores = at + own.len();
        own.push(Operation::StoreClusters { slot, keep: rng.one_in(4) });
        // The clusters grow with the sequence, and are stored again.
        for _ in 0..rng.below(4).saturating_sub(1) {
            own.push(Operation::Append { slot, tokens: 4 + rng.below(16) as usize, layers: u8::MAX });
            own.push(Operation::Commit { slot, durability: Durability::Sync, state: None });
            own.push(Operation::StoreClusters { slot, keep: rng.one_in(4) });
        }
        match rng.below(12) {
            _ if cache => own.push(Operation::Close { slot }),
            0 => own.push(Operation::DropClusters { slot }),
            1 => own.push(Operation::Fork { slot, to: rng.below(SLOTS as u64) as usize }),
            2 => own.push(Operation::Truncate { slot, back: 1 + rng.below(12) as usize }),
            3 | 4 => own.push(Operation::SpoilPools { slot, way: rng.below(4) as u8 }),
            5 => own.push(Operation::SpoilDirectories { slot }),
            6 if devices > 1 => own.push(Operation::Lose { disk: rng.below(devices) as usize }),
            _ => {}
        }
        self.insert(at, &own);
        if rng.one_in(3) {
            self.crash = (stores, rng.below(30));
        }
    }

    /// Adds operations that store the state of a method behind its clusters, and then change the tokens between them.
    fn store_states(&mut self, rng: &mut Rng) {
        let slot = rng.below(SLOTS as u64) as usize;
        let append = |tokens: u64| Operation::Append { slot, tokens: tokens as usize, layers: u8::MAX };
        let commit = Operation::Commit { slot, durability: Durability::Sync, state: None };
        let mut own = vec![append(12 + rng.below(16)), commit, Operation::StoreClusters { slot, keep: true }];
        own.push(append(8 + rng.below(24)));
        if !rng.one_in(3) {
            own.push(commit);
        }
        own.extend([Operation::DropClusters { slot }, Operation::StoreAttached { slot }]);
        match rng.below(4) {
            0 => own.extend([Operation::Truncate { slot, back: 1 + rng.below(10) as usize }, append(16), commit]),
            1 | 2 => own.extend([Operation::Close { slot }, append(24), commit]),
            _ => {}
        }
        own.push(Operation::Close { slot });
        let at = rng.below(self.operations.len() as u64 + 1) as usize;
        self.insert(at, &own);
    }

    fn generate(rng: &mut Rng, regime: Regime, length: u64, slots: usize, devices: usize, cache: bool) -> Self {
        let operations: Vec<_> = (0..length).map(|_| Operation::generate(rng, slots, devices, cache)).collect();
        // The crash is late in the round, because only earlier operations can be lost.
        let crash_at = operations.len() - 1 - (rng.below(length) * rng.below(length) / length) as usize;
        let again = match rng.below(8) {
            0..=4 => Vec::new(),
            5 | 6 => vec![rng.below(70)],
            _ => vec![rng.below(70), rng.below(70)],
        };
        let faults = Self::faults(rng, regime, devices).map(|faults| (rng.below(length) as usize, faults));
        let rot = (regime == Regime::Rot).then(|| match rng.below(4) {
            0 => ("segments/".into(), 1, u64::MAX),
            1 => ("segments/".into(), 1, 24 << 10),
            2 => ("manifest/".into(), 1, u64::MAX),
            _ => ("manifest/".into(), if devices == 1 { 2 } else { devices }, 48 << 10),
        });
        let lost = (devices > 1 && rng.one_in(4)).then(|| rng.below(devices as u64) as usize);
        Self { operations, crash: (crash_at, rng.below(24)), again, faults, rot, look: rng.one_in(8), lost }
    }

    fn faults(rng: &mut Rng, regime: Regime, devices: usize) -> Option<Faults> {
        let within = |rng: &mut Rng, most| rng.one_in(2).then(|| rng.below(most));
        let mut faults = Faults::default();
        // Faults that the engine must hide, in any regime.
        if rng.one_in(4) {
            faults.short = within(rng, 40);
            faults.interrupted = within(rng, 40);
            faults.slow = rng.one_in(2).then(|| rng.below(devices as u64) as usize);
            faults.slow_ms = if faults.slow.is_some() { pick(rng, &[0, 0, 40, 2_000]) } else { 0 };
            faults.hang = rng.one_in(4).then(|| (rng.below(devices as u64) as usize, rng.below(300), false));
        }
        match regime {
            Regime::Plain | Regime::Tight | Regime::Rot => {}
            Regime::Errors => {
                faults.read_stays = rng.one_in(2);
                let device = rng.below(devices as u64) as usize;
                match rng.below(12) {
                    0 => faults.write = Some(rng.below(20)),
                    1 => faults.sync = Some(rng.below(12)),
                    2 => faults.create = Some(rng.below(3)),
                    3 => faults.full = Some(rng.below(20)),
                    4 => faults.create_io = Some(rng.below(4)),
                    5 => faults.names = Some(rng.below(6)),
                    6 => faults.change = Some(rng.below(4)),
                    7 => faults.stale = Some((device, rng.below(40))),
                    8 => faults.read_only = Some((device, rng.below(30))),
                    9 => faults.hang = Some((device, rng.below(300), true)),
                    10 => faults.memory = Some((rng.below(60), 1 + rng.below(6))),
                    _ => {
                        faults.read = Some(rng.below(6));
                        faults.write = within(rng, 60);
                        faults.full = within(rng, 60);
                        faults.sync = within(rng, 60);
                    }
                }
            }
            Regime::Astray if rng.one_in(2) => faults.misdirected = Some(rng.below(8)),
            Regime::Astray => faults.phantom = Some(rng.below(8)),
            Regime::Flips => faults.flip = Some(rng.below(12)),
        }
        (faults != Faults::default()).then_some(faults)
    }
}
