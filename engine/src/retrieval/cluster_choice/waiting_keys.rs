//! [`WaitingKeys`]: the keys of groups that are in no cluster yet, and when the first clusters are built from them.
//! Clusters of codes have the transformed keys in their place.
//!
//! 1. A pushed group waits with its keys.
//! 2. The first clusters are built when the method is attached, from the keys that the sequence has. A sequence that is
//!    shorter than [`FIRST_ENTRIES`] tokens is clustered when it has that many.
//! 3. The newest tokens keep waiting ([`RecentTokens`]). The keys of groups that clusters have taken in are dropped.

use crate::retrieval::cluster_choice::clustered_keys::FIRST_ENTRIES;
use crate::retrieval::cluster_choice::key_space::KeySpace;
use crate::retrieval::cluster_choice::recent_tokens::{RECENT_TOKENS, RecentTokens};
use crate::retrieval::key_group::KeyGroup;
use crate::retrieval::key_shape::KeyShape;
use crate::retrieval::sealed_keys::SealedKeys;
use std::ops::Range;

/// The keys of groups that wait for clusters.
#[derive(Clone, Debug)]
pub(crate) struct WaitingKeys {
    group_tokens: usize,
    keys: SealedKeys,
    /// True if the first clusters are to be built from all waiting tokens but the recent ones.
    builds_all: bool,
}

impl WaitingKeys {
    pub(crate) fn new(shape: KeyShape) -> Self {
        Self { group_tokens: shape.group_tokens, keys: SealedKeys::new(shape, 0), builds_all: false }
    }

    /// Returns no groups. The first one that is pushed has the index `first`.
    pub(crate) fn starting_at(shape: KeyShape, first: usize) -> Self {
        Self { keys: SealedKeys::new(shape, first), ..Self::new(shape) }
    }

    /// Returns the keys.
    pub(crate) fn keys(&self) -> &SealedKeys {
        &self.keys
    }

    /// Returns the groups that wait. The last one is the newest group of the layer.
    pub(crate) fn groups(&self) -> Range<usize> {
        self.keys.groups()
    }

    /// Returns the tokens that wait.
    pub(crate) fn tokens(&self) -> Range<usize> {
        self.keys.tokens()
    }

    /// Returns the number of tokens that wait, once there are `groups` more groups.
    pub(crate) fn tokens_after(&self, groups: usize) -> usize {
        self.tokens().len() + groups * self.group_tokens
    }

    /// Returns the tokens that clusters may take in: all but the newest ones.
    pub(crate) fn ready(&self) -> Range<usize> {
        let tokens = self.tokens();
        tokens.start..tokens.end.saturating_sub(RECENT_TOKENS.next_multiple_of(self.group_tokens)).max(tokens.start)
    }

    /// Returns the tokens of one list that wait, from `first` on. A list has the keys of `head`, or of all heads.
    pub(crate) fn recent(&self, first: usize, head: Option<usize>, with_keys: bool) -> RecentTokens<'_> {
        RecentTokens::new(&self.keys, first, head, with_keys)
    }

    /// Takes note that the groups so far are those that the sequence had when the method was attached.
    pub(crate) fn attached(&mut self) {
        self.builds_all = true;
    }

    /// Returns the number of tokens that the first clusters are built from. Returns none while there are too few, or if
    /// the waiting keys do not begin with the first token.
    pub(crate) fn first_entries(&self) -> Option<usize> {
        let ready = self.ready();
        let entries = if self.builds_all { ready.end } else { FIRST_ENTRIES.next_multiple_of(self.group_tokens) };
        (ready.start == 0 && ready.end >= entries.max(FIRST_ENTRIES)).then_some(entries)
    }

    /// Takes note that the first clusters were built, or cannot be built from the groups of the attachment.
    pub(crate) fn built(&mut self) {
        self.builds_all = false;
    }

    /// Adds the keys of the next group.
    pub(crate) fn push(&mut self, group: &KeyGroup<'_>) {
        self.keys.push(group);
    }

    /// Adds the vectors of the next group. The shape of this structure is that of the vectors.
    pub(crate) fn push_vectors(&mut self, group: &KeyGroup<'_>, space: &KeySpace) {
        space.push(group, &mut self.keys);
    }

    /// Forgets the groups from `groups` on.
    pub(crate) fn truncate(&mut self, groups: usize) {
        self.keys.truncate(groups);
    }

    /// Drops the groups whose tokens are all before `token`.
    pub(crate) fn forget_before(&mut self, token: usize) {
        self.keys.forget_before(token / self.group_tokens);
    }

    /// Drops all groups, because clusters have taken in everything.
    pub(crate) fn clear(&mut self) {
        self.keys.clear();
    }

    /// Returns the bytes that it takes in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.keys.bytes()
    }

    /// Returns the most bytes that it takes in memory after `groups` more groups.
    pub(crate) fn bytes_for(&self, groups: usize) -> usize {
        self.keys.bytes_for(groups)
    }
}
