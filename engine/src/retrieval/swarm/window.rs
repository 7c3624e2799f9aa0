//! [`WindowGroups`]: the groups of SWARM's window, with their keys, or by number alone if codes are scored.

use crate::retrieval::cluster_choice::RecentTokens;
use crate::retrieval::key_group::KeyGroup;
use crate::retrieval::key_shape::KeyShape;
use crate::retrieval::sealed_keys::SealedKeys;
use std::ops::Range;

/// The groups that wait for clusters.
#[derive(Clone, Debug)]
pub(super) struct WindowGroups {
    group_tokens: usize,
    groups: Range<usize>,
    /// The keys of these groups. None if codes are scored.
    keys: Option<SealedKeys>,
}

impl WindowGroups {
    /// Returns no groups. The first one that is pushed has the index `first`.
    pub(super) fn new(shape: KeyShape, first: usize, with_keys: bool) -> Self {
        let keys = with_keys.then(|| SealedKeys::new(shape, first));
        Self { group_tokens: shape.group_tokens, groups: first..first, keys }
    }

    /// Returns the groups.
    pub(super) fn groups(&self) -> Range<usize> {
        self.groups.clone()
    }

    /// Returns the tokens of the groups.
    pub(super) fn tokens(&self) -> Range<usize> {
        self.groups.start * self.group_tokens..self.groups.end * self.group_tokens
    }

    /// Returns the tokens for a choice, with their keys if there are any and `with_keys` asks for them.
    pub(super) fn recent(&self, with_keys: bool) -> RecentTokens<'_> {
        match &self.keys {
            Some(keys) => RecentTokens::new(keys, 0, None, with_keys),
            None => RecentTokens::without_keys(self.tokens()),
        }
    }

    /// Adds the next group.
    pub(super) fn push(&mut self, group: &KeyGroup<'_>) {
        self.groups.end += 1;
        if let Some(keys) = &mut self.keys {
            keys.push(group);
        }
    }

    /// Passes over the next group. No group waits.
    pub(super) fn skip(&mut self) {
        self.groups = self.groups.end + 1..self.groups.end + 1;
        if let Some(keys) = &mut self.keys {
            keys.skip();
        }
    }

    /// Forgets the groups from `groups` on. Cut before its first group, it begins there.
    pub(super) fn truncate(&mut self, groups: usize) {
        self.groups = self.groups.start.min(groups)..self.groups.end.min(groups);
        if let Some(keys) = &mut self.keys {
            keys.truncate(groups);
        }
    }

    /// Drops the groups before `group`, which is one of them or follows them.
    pub(super) fn forget_before(&mut self, group: usize) {
        self.groups.start = group.clamp(self.groups.start, self.groups.end);
        if let Some(keys) = &mut self.keys {
            keys.forget_before(group);
        }
    }

    /// Appends the keys of a group, `[group_tokens, kv_heads * key_dim]`, if there are keys.
    pub(super) fn rows(&self, group: usize, out: &mut Vec<f32>) {
        if let Some(keys) = &self.keys {
            keys.rows(group * self.group_tokens..(group + 1) * self.group_tokens, None, out);
        }
    }

    /// Returns the bytes that it takes in memory.
    pub(super) fn bytes(&self) -> usize {
        self.keys.as_ref().map_or(0, SealedKeys::bytes)
    }

    /// Returns the most bytes that it takes in memory after `groups` more groups.
    pub(super) fn bytes_for(&self, groups: usize) -> usize {
        self.keys.as_ref().map_or(0, |keys| keys.bytes_for(groups))
    }
}
