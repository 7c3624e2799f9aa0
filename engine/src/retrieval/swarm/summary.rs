//! The co-activation clusters of one layer.
//!
//! How the summary takes in groups:
//! 1. Without a profile, it counts them.
//! 2. [`LayerSummary::profile`] builds clusters of all sealed groups from recorded queries.
//! 3. A group that is pushed later waits with its keys. Each selection says which medoids and which waiting tokens its
//!    query activates ([`SwarmLayer::record`]).
//! 4. While more than [`WINDOW`] tokens wait, [`LayerSummary::advance`] takes the oldest group out of the window. Each
//!    of its tokens joins clusters that have room, whose medoids were activated in the same steps.
//! 5. A token that no step activated together with a medoid joins the medoid with the nearest key. With `:members`
//!    there are no keys. Such tokens form clusters of the mean size, in their order.
//!
//! Invariants:
//! - Each token that does not wait is in at least one cluster and in at most as many as the options say.
//! - With keys, a cluster is opened only when all others are full.
//! - The clusters depend on the tokens, the cuts, the profile and the selections, not on how the tokens were cut into
//!   appends. Only the newest selection between two appends counts.

use super::members::Members;
use super::window::WindowGroups;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::lock;
use crate::retrieval::cluster_choice::{ChosenBy, ClusterOptions, RecentChanges};
use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter};
use crate::retrieval::clusters::{
    ActivationRule, ClusterLists, ClusterMaintenance, CoActivation, MaintenanceRadius, MedoidClustering,
    MedoidClusters, MedoidOptions, Representatives,
};
use crate::retrieval::key_shape::KeyShape;
use crate::retrieval::recorded_attention::{each_weights, weight_bytes};
use crate::retrieval::sealed_keys::QueryProfile;
use crate::retrieval::summary::{KeyGroup, LayerSummary, SummarySpec};
use std::sync::Mutex;

/// The tokens of the window, in which appended tokens wait (SWARM, section 5.2). Each is chosen by itself, or all are
/// attended.
pub(super) const WINDOW: usize = 256;
/// The first tokens, which the queries of a profile never activate, because they would join every cluster.
const SINKS: usize = 4;
/// The entries of the largest cluster, if clusters of twice the mean size are smaller.
const MAX_SIZE: usize = 16;
/// The decode steps that decide which clusters a token joins (`W` of SWARM, section 6.2).
pub(super) const STEPS: usize = 256;
/// The fewest and the most entries of a profile by which the radius of new entries is calibrated.
const CALIBRATED_ENTRIES: [usize; 2] = [16, 512];
/// The most pairs of an entry and a medoid by which it is calibrated, if that leaves enough entries.
const CALIBRATED_PAIRS: usize = 1 << 18;

/// The specification of co-activation clusters.
#[derive(Clone, Copy, Debug)]
pub(super) struct SwarmSpec {
    pub(super) options: ClusterOptions,
}

impl SummarySpec for SwarmSpec {
    fn id(&self) -> String {
        // Selections decide which clusters new tokens join, so methods that choose differently have their own.
        let ClusterOptions { mean_size, chosen_by, whole_window, single, .. } = self.options;
        let window = if whole_window { "window" } else { "tokens" };
        format!("swarm/{mean_size}/{chosen_by:?}/{window}{}", if single { "/single" } else { "" })
    }

    fn layer(&self, _layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        Ok(Box::new(SwarmLayer::new(shape, self.options)))
    }
}

/// The way in which a token that no step activated together with a medoid finds its cluster.
pub(super) enum Unactivated {
    /// By the nearest key of a medoid. These are the keys of all medoids, also of those that were cut.
    Key(Representatives),
    /// By age: it joins the cluster that such a token opened last, until that has the mean size. None if there is no
    /// such cluster.
    Age(Option<usize>),
}

/// The clusters of a layer that has a profile.
pub(super) struct ProfiledClusters {
    pub(super) members: Members,
    pub(super) unactivated: Unactivated,
    /// The share of the profile's queries that activated the medoid, of clusters of the profile.
    pub(super) profiled: Vec<f32>,
    /// The clusters that took in tokens.
    pub(super) changes: RecentChanges,
    /// The newest steps of the medoids and of the tokens that wait. Slots are these tokens, from the oldest on.
    pub(super) recent: ClusterMaintenance,
    pub(super) radius: MaintenanceRadius,
}

/// The clusters of a layer.
pub(super) struct SwarmLayer {
    pub(super) shape: KeyShape,
    mean_size: usize,
    limits: MedoidOptions,
    /// None until there is a profile.
    pub(super) clusters: Option<ProfiledClusters>,
    /// True if codes are scored, so that no keys are kept.
    pub(super) by_members: bool,
    /// The window. Without a profile it has no group, and begins at the next one.
    pub(super) waiting: WindowGroups,
    /// The entries that the newest selection since the last append activated: medoids, then waiting tokens.
    pub(super) activated: Mutex<Option<Vec<u32>>>,
}

impl SwarmLayer {
    pub(super) fn new(shape: KeyShape, options: ClusterOptions) -> Self {
        let memberships = match options.chosen_by {
            ChosenBy::Representative if !options.single => 2,
            ChosenBy::Representative | ChosenBy::Members => 1,
        };
        let max_size = MAX_SIZE.max(2 * options.mean_size);
        let limits =
            MedoidOptions { max_size: Some(max_size), memberships: Some(memberships), ..MedoidOptions::default() };
        let by_members = options.chosen_by == ChosenBy::Members;
        Self {
            shape,
            mean_size: options.mean_size,
            limits,
            clusters: None,
            by_members,
            waiting: WindowGroups::new(shape, 0, !by_members),
            activated: Mutex::default(),
        }
    }

    /// Returns the clusters.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no profile.
    pub(super) fn clusters(&self) -> Result<&ProfiledClusters> {
        let text = "the layer has no clusters yet; call Sequence::profile with recorded queries first";
        self.clusters.as_ref().ok_or_else(|| Error::new(ErrorKind::InvalidArgument, text))
    }

    /// Returns the groups that wait.
    pub(super) fn waiting(&self) -> &WindowGroups {
        &self.waiting
    }

    /// Takes note of the entries that a selection activated: medoids by their cluster, then waiting tokens.
    pub(super) fn record(&self, activated: Vec<u32>) {
        *lock(&self.activated) = Some(activated);
    }

    pub(super) fn max_size(&self) -> usize {
        self.limits.max_size.unwrap_or(usize::MAX)
    }

    pub(super) fn memberships(&self) -> usize {
        self.limits.memberships.unwrap_or(usize::MAX)
    }

    /// Returns the clusters of all tokens of a profile.
    fn build(&self, profile: &QueryProfile<'_>) -> Result<ProfiledClusters> {
        let (tokens, width) = (profile.keys.tokens().len(), self.shape.width());
        if tokens == 0 {
            let text = "the profile is of a layer without a sealed group; append a group first";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let rule = ActivationRule { sinks: SINKS, window: WINDOW.min(tokens / 4), ..ActivationRule::default() };
        let mut activations = CoActivation::new(tokens, profile.queries.len())?;
        let mut activated = Vec::with_capacity(profile.queries.len());
        each_weights(profile, &mut |weights| {
            activated.push(rule.activated(weights)?);
            activated.last().map_or(Ok(()), |entries| activations.record(entries))
        })?;
        let clustering = MedoidClustering::new(&activations, self.limits)?;
        let (_, mut found) = clustering.cluster_to_mean_size(self.mean_size as f64)?;
        let lists = found.lists().iter().filter(|list| !list.is_empty());
        let share = |list: &[u32]| activations.count(list[0]) as f32 / activations.queries() as f32;
        let profiled: Vec<f32> = lists.map(share).collect();
        drop((clustering, activations));
        let radius = calibrated(&found, &activated, tokens)?;
        drop(activated);
        let mut key = |token: u32, row: &mut Vec<f32>| {
            profile.keys.rows(token as usize..token as usize + 1, None, row);
        };
        found.assign_by(width, &mut key)?;
        let members = Members::new(found.lists(), self.max_size());
        let unactivated = match self.by_members {
            true => Unactivated::Age(None),
            false => {
                let (mut keys, mut row) = (Representatives::with_capacity(width, members.len()), Vec::new());
                for medoid in members.medoids() {
                    row.clear();
                    key(*medoid, &mut row);
                    keys.push(&row);
                }
                Unactivated::Key(keys)
            }
        };
        let recent = ClusterMaintenance::new(members.len(), 0, STEPS)?;
        Ok(ProfiledClusters { members, unactivated, profiled, changes: RecentChanges::new(), recent, radius })
    }

    /// Returns the most clusters once `waiting` more tokens have left the window.
    fn clusters_for(&self, clusters: &ProfiledClusters, waiting: usize) -> usize {
        match &clusters.unactivated {
            Unactivated::Key(_) => clusters.members.clusters_for(waiting, self.memberships()),
            Unactivated::Age(_) => clusters.members.clusters_by_age(waiting, self.mean_size),
        }
    }

    /// Returns the number of tokens that wait, once there are `groups` more groups.
    fn waiting_tokens(&self, groups: usize) -> usize {
        self.waiting.tokens().len() + groups * self.shape.group_tokens
    }
}

/// Returns the radius within which new entries join as many clusters as the entries of the profile did.
///
/// Entries of the profile that are no medoids take the place of new entries, at most [`CALIBRATED_ENTRIES`] of them.
/// `activated` holds the entries that each query activated.
fn calibrated(found: &MedoidClusters, activated: &[Vec<u32>], tokens: usize) -> Result<MaintenanceRadius> {
    const NONE: u32 = u32::MAX;
    let (mut cluster_of, mut memberships) = (vec![NONE; tokens], vec![0_u32; tokens]);
    for (cluster, list) in (0..).zip(found.lists().iter()) {
        cluster_of[list[0] as usize] = cluster;
        list.iter().for_each(|entry| memberships[*entry as usize] += 1);
    }
    let is_other = |entry: &usize| memberships[*entry] > 0 && cluster_of[*entry] == NONE;
    let others: Vec<usize> = (0..tokens).filter(is_other).collect();
    let [fewest, most] = CALIBRATED_ENTRIES;
    let sample = (CALIBRATED_PAIRS / found.lists().len().max(1)).clamp(fewest, most);
    let every = others.len().div_ceil(sample).max(1);
    let (mut slot_of, mut slots, mut sum) = (vec![NONE; tokens], 0, 0);
    for entry in others.into_iter().step_by(every) {
        slot_of[entry] = slots;
        slots += 1;
        sum += memberships[entry];
    }
    if slots == 0 {
        return Ok(MaintenanceRadius::NEAREST);
    }
    let mut steps = ClusterMaintenance::new(found.lists().len(), slots as usize, activated.len())?;
    let numbers = |entries: &[u32], of: &[u32]| -> Vec<u32> {
        entries.iter().map(|entry| of[*entry as usize]).filter(|number| *number != NONE).collect()
    };
    for entries in activated {
        steps.record(&numbers(entries, &cluster_of), &numbers(entries, &slot_of))?;
    }
    let slots: Vec<u32> = (0..slots).collect();
    steps.calibrate(&slots, f64::from(sum) / slots.len() as f64)
}

impl ProfiledClusters {
    /// Records the entries that a selection activated, as the next step.
    fn record(&mut self, activated: &[u32]) -> Result<()> {
        let clusters = self.members.len() as u32;
        let (medoids, waiting): (Vec<u32>, Vec<u32>) = activated.iter().partition(|entry| **entry < clusters);
        let slots = waiting.into_iter().map(|entry| entry - clusters);
        let slots: Vec<u32> = slots.filter(|slot| (*slot as usize) < self.recent.slots()).collect();
        self.recent.record(&medoids, &slots)
    }

    /// Returns the share of the profile's queries that activated a cluster; 0 for a later cluster.
    pub(super) fn profiled_share(&self, cluster: usize) -> f32 {
        self.profiled.get(cluster).copied().unwrap_or(0.0)
    }

    /// Adds a token to a cluster that has room.
    fn join(&mut self, cluster: usize, token: u32) {
        self.members.add(cluster, token);
        self.changes.add(cluster as u32);
    }

    /// Returns the bytes of what it keeps beside members, keys and steps.
    fn other_bytes(&self) -> usize {
        self.profiled.capacity() * size_of::<f32>() + size_of::<RecentChanges>()
    }

    /// Adds the tokens of the oldest waiting group to clusters.
    fn take_in(&mut self, group: &LeavingGroup<'_>) -> Result<()> {
        let mut products = None;
        for column in 0..group.tokens {
            let (slot, token) = ((group.slot + column) as u32, (group.first + column) as u32);
            let members = &self.members;
            let has_room = |cluster: usize| members.has_room(cluster);
            let joins = self.recent.assign_with_room(slot, self.radius, group.memberships, has_room)?;
            joins.iter().for_each(|cluster| self.join(*cluster as usize, token));
            if !joins.is_empty() {
                continue;
            }
            let found = match &self.unactivated {
                Unactivated::Key(keys) => {
                    let products = products.get_or_insert_with(|| keys.products(&group.rows));
                    keys.nearest((&*products, column), group.rows[column], |at| self.members.has_room(at))
                }
                Unactivated::Age(open) => open.filter(|cluster| self.members.of(*cluster).len() < group.mean_size),
            };
            match found.filter(|cluster| self.members.has_room(*cluster)) {
                Some(cluster) => self.join(cluster, token),
                None => {
                    self.changes.add(self.members.len() as u32);
                    self.recent.open_cluster(slot)?;
                    self.members.open(token);
                    match &mut self.unactivated {
                        Unactivated::Key(keys) => keys.push(group.rows[column]),
                        Unactivated::Age(open) => *open = Some(self.members.len() - 1),
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the most bytes of the keys of medoids, once there are `clusters` clusters.
    fn key_bytes(&self, clusters: usize) -> usize {
        match &self.unactivated {
            Unactivated::Key(keys) => keys.bytes_for(clusters),
            Unactivated::Age(_) => 0,
        }
    }

    /// Returns the most bytes of scratch of [`Self::take_in`] for a group, once there are `clusters` clusters.
    fn scratch_bytes(&self, clusters: usize, shape: &KeyShape) -> usize {
        match &self.unactivated {
            Unactivated::Key(keys) => {
                let rows = shape.group_tokens * shape.width() * size_of::<f32>();
                rows + keys.product_bytes(clusters, shape.group_tokens)
            }
            Unactivated::Age(_) => 0,
        }
    }
}

/// The oldest waiting group, whose tokens leave the window.
struct LeavingGroup<'a> {
    /// The keys of its tokens, of all heads. Without keys there are none.
    rows: Vec<&'a [f32]>,
    tokens: usize,
    /// The first token.
    first: usize,
    /// The slot of the first token.
    slot: usize,
    memberships: usize,
    mean_size: usize,
}

impl LayerSummary for SwarmLayer {
    fn groups(&self) -> usize {
        self.waiting.groups().end
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        match &self.clusters {
            None => self.waiting.skip(),
            Some(_) => self.waiting.push(group),
        }
    }

    fn truncate(&mut self, groups: usize) {
        if groups >= self.groups() {
            return;
        }
        let covered = self.waiting.groups().start;
        self.waiting.truncate(groups);
        let (waiting, tokens) = (self.waiting_tokens(0), groups * self.shape.group_tokens);
        let Some(clusters) = &mut self.clusters else { return };
        clusters.recent.truncate_slots(waiting);
        let activated = self.activated.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        if groups >= covered {
            let kept = (clusters.members.len() + waiting) as u32;
            activated.iter_mut().for_each(|entries| entries.retain(|entry| *entry < kept));
            return;
        }
        *activated = None;
        if tokens == 0 {
            self.clusters = None;
            return;
        }
        let is_left = clusters.members.truncate(tokens as u32);
        match &mut clusters.unactivated {
            Unactivated::Key(keys) => keys.retain(|cluster| is_left[cluster]),
            Unactivated::Age(open) => *open = None,
        }
        clusters.recent.retain_clusters(|cluster| is_left[cluster]);
        let mut left = is_left.iter();
        clusters.profiled.retain(|_| left.next().copied().unwrap_or(false));
        clusters.changes.clear();
    }

    fn bytes(&self) -> usize {
        let Some(clusters) = &self.clusters else { return 0 };
        let (own, recent) = (clusters.members.len(), &clusters.recent);
        let activated = lock(&self.activated).as_ref().map_or(0, Vec::capacity) * size_of::<u32>();
        self.waiting.bytes()
            + clusters.members.bytes_for(own)
            + clusters.key_bytes(own)
            + recent.bytes_once(own, recent.slots())
            + clusters.other_bytes()
            + activated
    }

    fn bytes_for(&self, groups: usize) -> usize {
        let Some(clusters) = &self.clusters else { return 0 };
        let waiting = self.waiting_tokens(groups);
        let most = self.clusters_for(clusters, waiting);
        let scratch = if groups > 0 { clusters.scratch_bytes(most, &self.shape) } else { 0 };
        let activated = (most + waiting) * size_of::<u32>();
        self.waiting.bytes_for(groups)
            + clusters.members.bytes_for(most)
            + clusters.key_bytes(most)
            + clusters.recent.bytes_once(most, waiting)
            + clusters.other_bytes()
            + activated
            + scratch
    }

    fn has_clusters(&self) -> bool {
        true
    }

    fn advance(&mut self) -> Result<Vec<u64>> {
        let activated = lock(&self.activated).take();
        let waiting = self.waiting_tokens(0);
        let excess = waiting.saturating_sub(WINDOW);
        let (memberships, mean_size) = (self.memberships(), self.mean_size);
        let Some(clusters) = &mut self.clusters else { return Ok(Vec::new()) };
        if let Some(activated) = activated {
            clusters.record(&activated)?;
        }
        // The tokens of groups that were pushed have slots from now on.
        clusters.recent.resize_slots(waiting)?;
        let (group_tokens, width) = (self.shape.group_tokens, self.shape.width());
        let start = self.waiting.groups().start;
        let end = start + excess.div_ceil(group_tokens);
        for group in start..end {
            let mut rows = Vec::new();
            self.waiting.rows(group, &mut rows);
            let (first, slot) = (group * group_tokens, (group - start) * group_tokens);
            let rows = rows.chunks_exact(width).collect();
            clusters.take_in(&LeavingGroup { rows, tokens: group_tokens, first, slot, memberships, mean_size })?;
        }
        clusters.recent.remove_slots((end - start) * group_tokens);
        self.waiting.forget_before(end);
        Ok(Vec::new())
    }

    fn cluster_lists(&self) -> Vec<ClusterLists> {
        let of =
            |own: &ProfiledClusters| ClusterLists::of_clusters((0..own.members.len()).map(|at| own.members.of(at)));
        self.clusters.iter().map(of).collect()
    }

    fn state_encoding(&self) -> Option<u32> {
        Some(Self::STATE_ENCODING)
    }

    fn state_bytes(&self) -> usize {
        self.bytes_of_state()
    }

    fn put_state(&self, out: &mut StateWriter) -> bool {
        self.write_state(out)
    }

    fn take_state_bytes(&self, state: &StateReader<'_>) -> usize {
        self.bytes_of_taken(state)
    }

    fn take_state(&mut self, state: &mut StateReader<'_>, groups: usize) -> std::result::Result<(), StateError> {
        self.read_state(state, groups)
    }

    fn profile_bytes(&self, queries: usize) -> Option<usize> {
        let tokens = self.groups() * self.shape.group_tokens;
        let stored = self.memberships();
        // In the worst case each token is the medoid of a cluster.
        let lists = 3 * ClusterLists::bytes_for(tokens, tokens * stored);
        let row = self.max_size() + 2 + if self.by_members { 0 } else { self.shape.width() / 2 + 3 };
        let build = MedoidClustering::bytes_for(tokens, queries, stored);
        let [fewest, most] = CALIBRATED_ENTRIES;
        let pairs = CALIBRATED_PAIRS.min(most * tokens).max(fewest * tokens);
        // A pair takes 24 bytes, and a vector that grows twice that.
        let calibration = ClusterMaintenance::bytes_for(tokens, most, queries) + pairs * 64;
        let built = tokens * row * size_of::<f32>() + ClusterMaintenance::bytes_for(tokens, 0, STEPS);
        let assignment = MedoidClusters::assign_bytes_for(tokens, tokens * stored, self.shape.width()) + built;
        let phases = [weight_bytes(tokens, &self.shape), build, calibration, assignment];
        let activated = queries * (tokens / 34 + 1) * size_of::<u32>();
        let profiled = tokens * size_of::<f32>() + size_of::<RecentChanges>();
        let kept = CoActivation::bytes_for(tokens, queries) + activated + lists + profiled;
        Some(kept + phases.into_iter().max().unwrap_or(0))
    }

    fn profile(&mut self, profile: &QueryProfile<'_>) -> Result<()> {
        let clusters = self.build(profile)?;
        self.clusters = Some(clusters);
        self.waiting = WindowGroups::new(self.shape, profile.keys.groups().end, !self.by_members);
        *lock(&self.activated) = None;
        Ok(())
    }
}
