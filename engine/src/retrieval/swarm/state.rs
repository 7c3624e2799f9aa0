//! The state of the co-activation clusters of a layer: members, what finds clusters for other tokens, and the newest
//! steps.
//!
//! The keys of waiting tokens are not part of it. The engine pushes their groups again.

use super::members::Members;
use super::summary::{ProfiledClusters, STEPS, SwarmLayer, Unactivated};
use super::window::WindowGroups;
use crate::metrics::lock;
use crate::retrieval::cluster_choice::RecentChanges;
use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter, require};
use crate::retrieval::clusters::{ClusterMaintenance, MaintenanceRadius, Representatives};

/// How tokens without a step find a cluster: by the keys of medoids.
const BY_KEY: u64 = 0;
/// By age, and no such cluster is open.
const BY_AGE: u64 = 1;
/// By age, and the cluster that follows is open.
const BY_AGE_OPEN: u64 = 2;

impl SwarmLayer {
    /// The version of the encoding. Whatever changes the meaning of a state changes it.
    pub(super) const STATE_ENCODING: u32 = 1;

    /// Returns the most bytes of the state.
    pub(super) fn bytes_of_state(&self) -> usize {
        let Some(clusters) = &self.clusters else { return 0 };
        let (own, recent) = (clusters.members.len(), &clusters.recent);
        // Keys take 2 bytes per element, an exponent and a norm.
        let keys = if self.by_members { 0 } else { own * (self.shape.width() * 2 + 8) };
        let steps = ClusterMaintenance::bytes_for(own, recent.slots(), STEPS);
        let activated = lock(&self.activated).as_ref().map_or(0, Vec::len) * size_of::<u32>();
        clusters.members.bytes_for(own) + own * size_of::<f32>() + keys + steps + activated + 24 * size_of::<u64>()
    }

    /// Appends the state, if there is a profile and every waiting token has its slot.
    pub(super) fn write_state(&self, out: &mut StateWriter) -> bool {
        let waiting = self.waiting.tokens().len();
        let Some(clusters) = self.clusters.as_ref().filter(|own| own.recent.slots() == waiting) else {
            return false;
        };
        out.put_u64(self.waiting.groups().start as u64);
        clusters.members.put_state(out);
        match &clusters.unactivated {
            Unactivated::Key(keys) => {
                out.put_u64(BY_KEY);
                keys.put_state(out);
            }
            Unactivated::Age(None) => out.put_u64(BY_AGE),
            Unactivated::Age(Some(open)) => {
                out.put_u64(BY_AGE_OPEN);
                out.put_u64(*open as u64);
            }
        }
        out.put_f32s(&clusters.profiled);
        clusters.radius.put_state(out);
        clusters.recent.put_state(out);
        let activated = lock(&self.activated);
        out.put_u64(u64::from(activated.is_some()));
        out.put_u32s(activated.as_deref().unwrap_or_default());
        true
    }

    /// Returns the most bytes that a state takes in memory. Each cluster has a slot, however few members it has.
    pub(super) fn bytes_of_taken(&self, state: &StateReader<'_>) -> usize {
        let mut clusters = state.clone();
        let slots = clusters.u64().map_or(0, |_| Members::slot_bytes(&mut clusters, self.max_size()));
        // Members are copied and counted, and all other tables are copied.
        state.left().saturating_mul(4).saturating_add(slots)
    }

    /// Takes the state of the first `groups` groups.
    pub(super) fn read_state(&mut self, state: &mut StateReader<'_>, groups: usize) -> Result<(), StateError> {
        let (group_tokens, width) = (self.shape.group_tokens, self.shape.width());
        let start = state.count("groups in clusters", groups)?;
        require(start > 0, || "no group is in clusters".into())?;
        let tokens = start.saturating_mul(group_tokens);
        let members = Members::from_state(state, self.max_size(), (tokens, self.memberships()))?;
        let unactivated = match (state.u64()?, self.by_members) {
            (BY_KEY, false) => Unactivated::Key(Representatives::from_state(state, width, members.len())?),
            (BY_AGE, true) => Unactivated::Age(None),
            (BY_AGE_OPEN, true) => Unactivated::Age(Some(state.count("clusters", members.len().saturating_sub(1))?)),
            (other, _) => return Err(StateError::new(format!("tokens find clusters in way {other}"))),
        };
        let profiled = state.positive_f32s("shares of queries", members.len())?;
        let radius = MaintenanceRadius::from_state(state)?;
        let waiting = (groups - start) * group_tokens;
        let recent = ClusterMaintenance::from_state(state, (members.len(), waiting), STEPS)?;
        require(recent.slots() == waiting, || format!("{} of {waiting} waiting tokens have slots", recent.slots()))?;
        let has_activated = state.count("selections", 1)? == 1;
        let activated = state.u32s("activated entries", members.len() + waiting)?;
        state.end()?;
        let is_known = activated.iter().all(|entry| (*entry as usize) < members.len() + waiting);
        require(is_known, || "an activated entry is neither a medoid nor a waiting token".into())?;
        *lock(&self.activated) = has_activated.then_some(activated);
        let changes = RecentChanges::new();
        self.clusters = Some(ProfiledClusters { members, unactivated, profiled, changes, recent, radius });
        self.waiting = WindowGroups::new(self.shape, start, !self.by_members);
        Ok(())
    }
}
