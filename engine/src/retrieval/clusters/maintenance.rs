//! Clusters of new entries: SWARM's cluster maintenance.
//!
//! Source: SWARM, section 6.2. New entries wait in a window of W decode steps. With `f(e, m)` the number of these steps
//! that activate both entry e and medoid m, the distance of e to the cluster of m is `1 - f(e, m) / sum over m of f`.
//! 1. Each step records the medoids and the waiting entries that it activates ([`ClusterMaintenance::record`]).
//! 2. An entry that leaves the window joins every cluster within the radius, and the nearest one if there is none
//!    ([`ClusterMaintenance::assign`]).
//! 3. Its slot then belongs to a newer entry ([`ClusterMaintenance::clear_slot`]).
//!
//! The paper compares this distance with the radius of its clusters. The two have different scales, because equation 2
//! divides by the sum over all pairs. [`ClusterMaintenance::calibrate`] therefore finds a radius of its own, with which
//! entries join as many clusters as the caller asks for. Entries of existing clusters that take the place of new ones
//! are a good sample.
//!
//! Invariants:
//! - Only the last W steps count. They are one bit per medoid and per slot.
//! - All comparisons are in integers. Ties are broken by the lower cluster.
//! - An entry that no step activated together with a medoid joins no cluster. Its key decides then.

use super::coactivation::MAX_PROFILE_ENTRIES;
use super::recent_steps::RecentSteps;
use crate::error::{Error, ErrorKind, Result};
use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter, require};
use std::cmp::Ordering;

/// The most steps of a window.
pub const MAX_MAINTENANCE_STEPS: usize = 1 << 15;

/// The radius of new entries: the least share of an entry's common steps that a cluster within the radius has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaintenanceRadius {
    /// The least share is `common / total`. It is above 1 if no cluster is within the radius.
    least: StepShare,
}

impl MaintenanceRadius {
    /// The radius within which there is no cluster. Each entry joins the nearest one.
    pub const NEAREST: Self = Self { least: StepShare { common: 2, total: 1 } };

    /// Appends the radius.
    pub(crate) fn put_state(self, out: &mut StateWriter) {
        out.put_u64(self.least.common);
        out.put_u64(self.least.total);
    }

    /// Returns the radius of a state.
    ///
    /// # Errors
    /// It is none that a calibration gives.
    pub(crate) fn from_state(state: &mut StateReader<'_>) -> std::result::Result<Self, StateError> {
        let (common, total) = (state.u64()?, state.u64()?);
        // Counts of steps and entries are below this.
        let is_sound = (1..1 << 31).contains(&common) && (1..1 << 31).contains(&total);
        require(is_sound, || format!("a radius of {common} of {total} steps"))?;
        Ok(Self { least: StepShare { common, total } })
    }

    /// Returns the distance of the radius. An entry joins if its distance is at most this.
    #[must_use]
    pub fn distance(self) -> f64 {
        1.0 - self.least.common as f64 / self.least.total as f64
    }
}

/// The steps that an entry has in common with one medoid, of those that it has in common with all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StepShare {
    common: u64,
    /// At least 1.
    total: u64,
}

impl StepShare {
    /// Compares two shares without rounding. Both products are below 2^62.
    fn compare(self, other: Self) -> Ordering {
        (self.common * other.total).cmp(&(other.common * self.total))
    }
}

/// The recent steps of medoids and of entries that wait in the window.
#[derive(Clone, Debug)]
pub struct ClusterMaintenance {
    steps: u64,
    medoids: RecentSteps,
    waiting: RecentSteps,
}

impl ClusterMaintenance {
    /// Returns the maintenance of `clusters` clusters with `slots` waiting entries, over the last `window` steps.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the window is 0 or above [`MAX_MAINTENANCE_STEPS`], or there are more clusters
    /// or slots than [`MAX_PROFILE_ENTRIES`].
    pub fn new(clusters: usize, slots: usize, window: usize) -> Result<Self> {
        if window == 0 || window > MAX_MAINTENANCE_STEPS || clusters.max(slots) > MAX_PROFILE_ENTRIES {
            return refused(format!(
                "a window of {window} steps for {clusters} clusters and {slots} entries; give 1 to \
                 {MAX_MAINTENANCE_STEPS} steps and at most {MAX_PROFILE_ENTRIES} of each"
            ));
        }
        let (medoids, waiting) = (RecentSteps::new(clusters, window), RecentSteps::new(slots, window));
        Ok(Self { steps: 0, medoids, waiting })
    }

    /// Appends the steps of all clusters and slots.
    pub(crate) fn put_state(&self, out: &mut StateWriter) {
        out.put_u64(self.steps);
        self.medoids.put_state(out);
        self.waiting.put_state(out);
    }

    /// Returns the maintenance of a state with `clusters` clusters and at most `slots` waiting entries.
    ///
    /// # Errors
    /// There are others.
    pub(crate) fn from_state(
        state: &mut StateReader<'_>,
        (clusters, slots): (usize, usize),
        window: usize,
    ) -> std::result::Result<Self, StateError> {
        let steps = state.u64()?;
        let medoids = RecentSteps::from_state(state, clusters.min(MAX_PROFILE_ENTRIES), window)?;
        let waiting = RecentSteps::from_state(state, slots.min(MAX_PROFILE_ENTRIES), window)?;
        require(medoids.items() == clusters, || format!("{} of {clusters} medoids have steps", medoids.items()))?;
        // Steps are counted one by one, so this many never happen.
        require(steps < 1 << 62, || format!("{steps} steps"))?;
        Ok(Self { steps, medoids, waiting })
    }

    /// Returns the bytes of the state.
    #[must_use]
    pub fn bytes_for(clusters: usize, slots: usize, window: usize) -> usize {
        RecentSteps::bytes_for(clusters, window).saturating_add(RecentSteps::bytes_for(slots, window))
    }

    /// Records a step: the clusters whose medoids it activated, and the slots of the entries that it activated.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such cluster or slot. Nothing changed.
    pub fn record(&mut self, medoids: &[u32], slots: &[u32]) -> Result<()> {
        for (what, activated, items) in [("cluster", medoids, &self.medoids), ("slot", slots, &self.waiting)] {
            if let Some(item) = activated.iter().find(|item| **item as usize >= items.items()) {
                return refused(format!("{what} {item} was activated, but there are {}", items.items()));
            }
        }
        self.medoids.record(self.steps, medoids);
        self.waiting.record(self.steps, slots);
        self.steps += 1;
        Ok(())
    }

    /// Gives a slot to a new entry, which no step has activated yet.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such slot.
    pub fn clear_slot(&mut self, slot: u32) -> Result<()> {
        self.check_slot(slot)?;
        self.waiting.clear(slot as usize);
        Ok(())
    }

    /// Returns the most bytes once it has grown to `clusters` clusters and `slots` waiting entries.
    #[must_use]
    pub fn bytes_once(&self, clusters: usize, slots: usize) -> usize {
        self.medoids.bytes_once(clusters).saturating_add(self.waiting.bytes_once(slots))
    }

    /// Returns the number of clusters.
    #[must_use]
    pub fn clusters(&self) -> usize {
        self.medoids.items()
    }

    /// Returns the number of slots.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.waiting.items()
    }

    /// Keeps the first `slots` slots, or adds slots of entries that no step has activated yet.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: more slots than [`MAX_PROFILE_ENTRIES`].
    pub fn resize_slots(&mut self, slots: usize) -> Result<()> {
        if slots > MAX_PROFILE_ENTRIES {
            return refused(format!("{slots} slots; there are at most {MAX_PROFILE_ENTRIES}"));
        }
        self.waiting.resize(slots);
        Ok(())
    }

    /// Keeps the first `slots` slots, if there are more.
    pub fn truncate_slots(&mut self, slots: usize) {
        self.waiting.resize(slots.min(self.slots()));
    }

    /// Removes the first slots, whose entries have left the window. Later slots take their numbers.
    pub fn remove_slots(&mut self, slots: usize) {
        if slots > 0 {
            self.waiting.retain(|slot| slot >= slots);
        }
    }

    /// Adds a cluster whose medoid is the entry of a slot, with its steps.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such slot, or there are [`MAX_PROFILE_ENTRIES`] clusters.
    pub fn open_cluster(&mut self, slot: u32) -> Result<()> {
        self.check_slot(slot)?;
        if self.clusters() >= MAX_PROFILE_ENTRIES {
            return refused(format!("there are {} clusters, which is the most", self.clusters()));
        }
        self.medoids.add(&self.waiting.row(slot as usize));
        Ok(())
    }

    /// Keeps the clusters for which `keep` holds. Later clusters take the numbers of those that go.
    pub fn retain_clusters(&mut self, keep: impl Fn(usize) -> bool) {
        self.medoids.retain(keep);
    }

    /// Returns the clusters that the entry of a slot joins, as [`Self::assign`], but only those that have room, and at
    /// most `most` of them, nearest first.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such slot.
    pub fn assign_with_room(
        &self,
        slot: u32,
        radius: MaintenanceRadius,
        most: usize,
        has_room: impl Fn(usize) -> bool,
    ) -> Result<Vec<u32>> {
        let mut shares = self.shares(slot)?;
        shares.retain(|(cluster, _)| has_room(*cluster as usize));
        shares.sort_unstable_by_key(|(cluster, share)| (std::cmp::Reverse(share.common), *cluster));
        let within = shares.iter().take_while(|(_, share)| share.compare(radius.least) != Ordering::Less).count();
        shares.truncate(within.max(1).min(most));
        Ok(shares.into_iter().map(|(cluster, _)| cluster).collect())
    }

    /// Returns the clusters that the entry of a slot joins, in rising order: all within the radius, or the nearest one
    /// if there is none.
    ///
    /// There is none if no step of the window activated the entry together with a medoid.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such slot.
    pub fn assign(&self, slot: u32, radius: MaintenanceRadius) -> Result<Vec<u32>> {
        let shares = self.shares(slot)?;
        let is_within = |share: &StepShare| share.compare(radius.least) != Ordering::Less;
        let joined: Vec<u32> = shares.iter().filter(|(_, share)| is_within(share)).map(|(of, _)| *of).collect();
        if !joined.is_empty() {
            return Ok(joined);
        }
        let nearest = shares.iter().max_by_key(|(cluster, share)| (share.common, std::cmp::Reverse(*cluster)));
        Ok(nearest.map(|(cluster, _)| *cluster).into_iter().collect())
    }

    /// Returns the radius with which the entries of these slots join `memberships` clusters on average, as nearly as
    /// possible. Entries that join no cluster do not count.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such slot, or `memberships` is not a finite number from 1 on.
    pub fn calibrate(&self, slots: &[u32], memberships: f64) -> Result<MaintenanceRadius> {
        if !(memberships.is_finite() && memberships >= 1.0) {
            return refused(format!("{memberships} clusters per entry is not a finite number from 1 on"));
        }
        let (mut shares, mut counted) = (Vec::new(), 0_u64);
        for (at, slot) in slots.iter().enumerate() {
            let of_slot = self.shares(*slot)?;
            counted += u64::from(!of_slot.is_empty());
            shares.extend(of_slot.into_iter().map(|(_, share)| (share, at)));
        }
        shares.sort_unstable_by(|a, b| b.0.compare(a.0).then(a.1.cmp(&b.1)));
        let (target, mut joins) = (memberships * counted as f64, counted);
        let mut joined = vec![false; slots.len()];
        let (mut best, mut least_error) = (MaintenanceRadius::NEAREST, target - joins as f64);
        for equal in shares.chunk_by(|a, b| a.0.compare(b.0) == Ordering::Equal) {
            // The first cluster of an entry takes the place of the nearest one.
            for (_, at) in equal {
                joins += u64::from(joined[*at]);
                joined[*at] = true;
            }
            let error = (target - joins as f64).abs();
            if error < least_error {
                (best, least_error) = (MaintenanceRadius { least: equal[0].0 }, error);
            }
        }
        Ok(best)
    }

    /// Returns the share of each cluster that has a step in common with the entry of a slot.
    fn shares(&self, slot: u32) -> Result<Vec<(u32, StepShare)>> {
        self.check_slot(slot)?;
        let common = self.medoids.common(&self.waiting.row(slot as usize));
        let total = common.iter().map(|common| u64::from(*common)).sum();
        let shared = (0..).zip(common).filter(|(_, common)| *common > 0);
        Ok(shared.map(|(cluster, common)| (cluster, StepShare { common: common.into(), total })).collect())
    }

    fn check_slot(&self, slot: u32) -> Result<()> {
        let slots = self.waiting.items();
        if (slot as usize) < slots { Ok(()) } else { refused(format!("slot {slot} of {slots}")) }
    }
}

fn refused<T>(what: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidArgument, format!("cluster maintenance: {what}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const CLUSTERS: u32 = 11;
    const SLOTS: u32 = 9;

    /// One event: a step with what it activates, or a slot that gets a new entry.
    #[derive(Clone, Debug)]
    enum Event {
        Step(BTreeSet<u32>, BTreeSet<u32>),
        NewEntry(u32),
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let step = (prop::collection::btree_set(0..CLUSTERS, 0..6), prop::collection::btree_set(0..SLOTS, 0..6));
        let step = step.prop_map(|(medoids, slots)| Event::Step(medoids, slots));
        prop::collection::vec(prop_oneof![9 => step, 1 => (0..SLOTS).prop_map(Event::NewEntry)], 0..200)
    }

    /// The steps of the window that activated both, for each cluster and slot.
    fn by_definition(events: &[Event], window: usize) -> Vec<Vec<u64>> {
        let mut steps: Vec<(BTreeSet<u32>, BTreeSet<u32>)> = Vec::new();
        for event in events {
            match event {
                Event::Step(medoids, slots) => steps.push((medoids.clone(), slots.clone())),
                Event::NewEntry(slot) => {
                    for (_, slots) in &mut steps {
                        slots.remove(slot);
                    }
                }
            }
        }
        let recent = &steps[steps.len().saturating_sub(window)..];
        let common = |slot: u32, cluster: u32| {
            recent.iter().filter(|(medoids, slots)| medoids.contains(&cluster) && slots.contains(&slot)).count() as u64
        };
        (0..SLOTS).map(|slot| (0..CLUSTERS).map(|cluster| common(slot, cluster)).collect()).collect()
    }

    /// The clusters of shares of at least `least`, in floats.
    fn within(common: &[u64], least: f64) -> Vec<u32> {
        let total: u64 = common.iter().sum();
        let share = |cluster: &u32| common[*cluster as usize] as f64 / total as f64;
        let joined: Vec<u32> = (0..CLUSTERS).filter(|cluster| total > 0 && share(cluster) > least - 1e-9).collect();
        let most = common.iter().max().filter(|most| **most > 0);
        let nearest = most.and_then(|most| common.iter().position(|common| common == most));
        if joined.is_empty() { nearest.map(|cluster| cluster as u32).into_iter().collect() } else { joined }
    }

    proptest! {
        #[test]
        fn new_entries_join_the_clusters_of_the_plain_definition(
            events in events(), window in 1_usize..140, memberships in 1.0_f64..6.0,
        ) {
            let mut maintenance = ClusterMaintenance::new(CLUSTERS as usize, SLOTS as usize, window).unwrap();
            let list = |set: &BTreeSet<u32>| set.iter().copied().collect::<Vec<_>>();
            for event in &events {
                match event {
                    Event::Step(medoids, slots) => maintenance.record(&list(medoids), &list(slots)).unwrap(),
                    Event::NewEntry(slot) => maintenance.clear_slot(*slot).unwrap(),
                }
            }
            let common = by_definition(&events, window);
            let slots: Vec<u32> = (0..SLOTS).collect();
            let radius = maintenance.calibrate(&slots, memberships).unwrap();
            for (slot, common) in slots.iter().zip(&common) {
                let (found, least) = (maintenance.assign(*slot, radius).unwrap(), 1.0 - radius.distance());
                prop_assert_eq!(&found, &within(common, least), "slot {} of {:?}", slot, &common);
                // With room in all clusters, the nearest of them come first.
                let mut nearest = found;
                nearest.sort_by_key(|cluster| std::cmp::Reverse(common[*cluster as usize]));
                nearest.truncate(2);
                prop_assert_eq!(maintenance.assign_with_room(*slot, radius, 2, |_| true).unwrap(), nearest);
                // Without room in some, they are those that join if the others have no steps, but the same total.
                let joined = maintenance.assign_with_room(*slot, radius, 9, |cluster| cluster % 2 == 0).unwrap();
                let total = common.iter().sum::<u64>().max(1) as f64;
                let even = (0..CLUSTERS).step_by(2).filter(|cluster| common[*cluster as usize] > 0);
                let mut even: Vec<u32> = even.collect();
                even.sort_by_key(|cluster| std::cmp::Reverse(common[*cluster as usize]));
                let is_near = |cluster: &u32| common[*cluster as usize] as f64 / total >= least - 1e-9;
                let near = even.iter().filter(|cluster| is_near(cluster)).count();
                even.truncate(near.max(1));
                prop_assert_eq!(joined, even);
            }
            // No share as radius gives a number of clusters that is nearer to the one asked for.
            let joins = |least: f64| common.iter().map(|common| within(common, least).len()).sum::<usize>() as f64;
            let counted = common.iter().filter(|common| common.iter().any(|x| *x > 0)).count() as f64;
            let error = |least: f64| (joins(least) - memberships * counted).abs();
            let own = error(1.0 - radius.distance());
            for common in &common {
                let total = common.iter().sum::<u64>().max(1) as f64;
                prop_assert!(common.iter().all(|x| *x == 0 || own <= error(*x as f64 / total) + 1e-9));
            }
        }
    }

    #[test]
    fn entries_join_all_clusters_within_the_radius_or_the_nearest() {
        let mut maintenance = ClusterMaintenance::new(3, 2, 4).unwrap();
        for medoids in [&[0, 1][..], &[0, 1], &[0, 2], &[0]] {
            maintenance.record(medoids, &[1]).unwrap();
        }
        // Of 7 common steps the medoids have 4, 2 and 1.
        let radius = |common| MaintenanceRadius { least: StepShare { common, total: 7 } };
        for (common, joined) in [(5, &[0][..]), (4, &[0]), (2, &[0, 1]), (1, &[0, 1, 2])] {
            assert_eq!(maintenance.assign(1, radius(common)).unwrap(), joined);
        }
        assert_eq!(maintenance.assign(1, MaintenanceRadius::NEAREST).unwrap(), [0]);
        assert!(maintenance.assign(0, radius(1)).unwrap().is_empty());
        assert_eq!(maintenance.calibrate(&[0, 1], 2.2).unwrap(), radius(2));
        // Two steps later, the first two are forgotten.
        maintenance.record(&[2], &[]).unwrap();
        maintenance.record(&[2], &[1]).unwrap();
        assert_eq!(maintenance.assign(1, radius(1)).unwrap(), [0, 2]);
        maintenance.clear_slot(1).unwrap();
        assert!(maintenance.assign(1, radius(1)).unwrap().is_empty());
    }

    #[test]
    fn an_entry_that_opens_a_cluster_takes_its_steps_along() {
        let mut maintenance = ClusterMaintenance::new(1, 2, 4).unwrap();
        maintenance.record(&[0], &[0, 1]).unwrap();
        maintenance.record(&[], &[0, 1]).unwrap();
        maintenance.open_cluster(0).unwrap();
        maintenance.remove_slots(1);
        assert_eq!((maintenance.clusters(), maintenance.slots()), (2, 1));
        let assigned =
            |of: &ClusterMaintenance| of.assign_with_room(0, MaintenanceRadius::NEAREST, 2, |_| true).unwrap();
        assert_eq!(assigned(&maintenance), [1]);
        maintenance.retain_clusters(|cluster| cluster == 0);
        assert_eq!(assigned(&maintenance), [0]);
        maintenance.resize_slots(0).unwrap();
        maintenance.resize_slots(1).unwrap();
        assert!(assigned(&maintenance).is_empty());
    }

    #[test]
    fn wrong_arguments_are_refused_and_change_nothing() {
        let kind = |error: Error| assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        for (clusters, window) in [(1, 0), (1, MAX_MAINTENANCE_STEPS + 1), (MAX_PROFILE_ENTRIES + 1, 1)] {
            kind(ClusterMaintenance::new(clusters, 1, window).unwrap_err());
        }
        let mut maintenance = ClusterMaintenance::new(2, 2, 8).unwrap();
        maintenance.record(&[0], &[0]).unwrap();
        kind(maintenance.record(&[1, 2], &[0]).unwrap_err());
        kind(maintenance.record(&[1], &[2]).unwrap_err());
        kind(maintenance.clear_slot(2).unwrap_err());
        kind(maintenance.assign(2, MaintenanceRadius::NEAREST).unwrap_err());
        kind(maintenance.assign_with_room(2, MaintenanceRadius::NEAREST, 1, |_| true).unwrap_err());
        kind(maintenance.open_cluster(2).unwrap_err());
        kind(maintenance.resize_slots(MAX_PROFILE_ENTRIES + 1).unwrap_err());
        kind(maintenance.calibrate(&[0, 2], 1.0).unwrap_err());
        for memberships in [0.9, f64::NAN, f64::INFINITY] {
            kind(maintenance.calibrate(&[0], memberships).unwrap_err());
        }
        assert_eq!((maintenance.steps, maintenance.assign(0, MaintenanceRadius::NEAREST).unwrap()), (1, vec![0]));
        assert_eq!(ClusterMaintenance::bytes_for(9, 3, 65), (16 + 8) * 2 * 8);
    }
}
