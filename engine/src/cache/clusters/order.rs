//! The ranks of units. The unit with the lowest rank is evicted first.
//!
//! A rank is computed when a unit is used, and holds until its next use. So a rank has to order a unit used now among
//! units that were used earlier, as if all of them were ranked now.

use crate::cache::policy::{PriceSource, ReadPrice};

/// The steps after which a use counts half ([`ByCost`]).
const HALF_LIFE_STEPS: f64 = 128.0;

/// Returns what a use counts after this many steps.
pub(super) fn faded(steps: u64) -> f64 {
    (-(steps as f64) / HALF_LIFE_STEPS).exp2()
}

/// Returns the uses of a unit that every step uses, in the long run.
pub(super) fn uses_of_every_step() -> f64 {
    1.0 / (1.0 - faded(1))
}

/// The facts that rank a unit at a use.
#[derive(Clone, Copy, Debug)]
pub(in crate::cache) struct UnitUse {
    /// The number of the use, over all units.
    pub(super) now: u64,
    /// The step of the use.
    pub(super) step: u64,
    /// The uses of the unit, each of which fades with the steps.
    pub(super) frequency: f64,
    /// The requests and the bytes that a read of its blocks would take.
    pub(super) requests: usize,
    pub(super) bytes: usize,
    /// The rank of a unit that is held.
    pub(super) held: Option<f64>,
}

/// A rule that ranks units.
pub(in crate::cache) trait UnitOrder: Send {
    /// Returns the rank of a unit that is used now.
    fn rank(&self, unit: &UnitUse) -> f64;

    /// Returns whether a unit of rank `own` may take the place of one of rank `lowest`.
    fn may_evict(&self, own: f64, lowest: f64) -> bool {
        let _ = (own, lowest);
        true
    }

    /// Takes note that a unit of this rank was evicted.
    fn evicted(&mut self, rank: f64) {
        let _ = rank;
    }

    /// Sets the price of reads from now on.
    fn set_price(&mut self, price: ReadPrice) {
        let _ = price;
    }
}

/// First in, first out.
#[derive(Default)]
pub(in crate::cache) struct FirstIn;

impl UnitOrder for FirstIn {
    fn rank(&self, unit: &UnitUse) -> f64 {
        unit.held.unwrap_or(unit.now as f64)
    }
}

/// The least recently used first.
#[derive(Default)]
pub(in crate::cache) struct LastUsed;

impl UnitOrder for LastUsed {
    fn rank(&self, unit: &UnitUse) -> f64 {
        unit.now as f64
    }
}

/// The least cost-effective first: uses times the time of a read, per byte (SWARM, equation 6).
///
/// The paper subtracts 1 from the uses at every step without one. A cluster that less than half of the steps use then
/// has none, however often it is used. Here uses fade by a constant factor per step. All ranks fade alike, so the
/// logarithm of a rank, relative to a fixed step, never changes.
pub(in crate::cache) struct ByCost {
    source: PriceSource,
}

impl ByCost {
    pub(in crate::cache) fn new(source: PriceSource) -> Self {
        Self { source }
    }
}

impl UnitOrder for ByCost {
    fn rank(&self, unit: &UnitUse) -> f64 {
        let bytes = unit.bytes.max(1) as f64;
        let score = unit.frequency * self.source.price.of(unit.requests as f64, bytes) / bytes;
        score.log2() + unit.step as f64 / HALF_LIFE_STEPS
    }

    fn may_evict(&self, own: f64, lowest: f64) -> bool {
        lowest < own
    }

    fn set_price(&mut self, price: ReadPrice) {
        self.source.set(price);
    }
}

/// Large units that were not used lately first.
///
/// Source: `DynaKV`, section 6.2, principle 1, which says only that small clusters go first. The rule here is
/// GreedyDual-Size (Cao and Irani, 1997) with equal costs: a use adds `1 / size` to the rank of the last unit evicted.
#[derive(Default)]
pub(in crate::cache) struct BySize {
    last_evicted: f64,
}

impl UnitOrder for BySize {
    fn rank(&self, unit: &UnitUse) -> f64 {
        self.last_evicted + 4096.0 / unit.bytes.max(1) as f64
    }

    fn evicted(&mut self, rank: f64) {
        self.last_evicted = self.last_evicted.max(rank);
    }
}
