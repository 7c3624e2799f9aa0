//! The entries of a selected group: which of its tokens each KV head attends to.
//!
//! An entry is the key and the value of one token for one KV head. A selector of groups attends to whole groups with
//! all heads. A selector of clusters chooses other tokens for each head. The block of a group is read once in both
//! cases.

use crate::attention::{HeadMask, TokenMask};
use crate::error::{Error, ErrorKind, Result};
use std::ops::Range;

/// Tokens of one group, and the KV heads that attend to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupEntries {
    /// The group.
    pub group: u64,
    /// The KV heads that attend to the tokens.
    pub heads: HeadMask,
    /// Positions within the group, from 0.
    pub tokens: TokenMask,
}

/// The entries of a selected group that take part in attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AttendedEntries {
    /// All KV heads attend to these tokens, or to every token of the group.
    AllHeads(Option<TokenMask>),
    /// Each item has KV heads, and the tokens that they attend to. No head is in two items.
    PerHead(Box<[(HeadMask, TokenMask)]>),
}

impl AttendedEntries {
    /// Returns whether no head attends to any token.
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self, Self::PerHead(items) if items.is_empty())
    }

    /// Returns the tokens that at least one head attends to, of a group with `tokens`.
    pub(crate) fn tokens(&self, tokens: usize) -> TokenMask {
        match self {
            Self::AllHeads(positions) => positions.unwrap_or(TokenMask::all(tokens)),
            Self::PerHead(items) => items.iter().fold(TokenMask::EMPTY, |all, (_, some)| all.union(*some)),
        }
    }

    /// Returns the tokens that one head attends to, of a group with `tokens`.
    pub(crate) fn tokens_of(&self, head: usize, tokens: usize) -> TokenMask {
        match self {
            Self::AllHeads(positions) => positions.unwrap_or(TokenMask::all(tokens)),
            Self::PerHead(items) => {
                items.iter().find(|(heads, _)| heads.contains(head)).map_or(TokenMask::EMPTY, |(_, tokens)| *tokens)
            }
        }
    }
}

/// Returns the groups that hold chosen tokens, in rising order, with the entries of each.
///
/// `heads` has the tokens of each KV head, or one list that counts for all heads. All tokens are in `groups`, whose
/// groups have `group_tokens` tokens.
pub(crate) fn entries_of_tokens(
    heads: &[Vec<u32>],
    groups: Range<u64>,
    group_tokens: usize,
) -> Vec<(u64, AttendedEntries)> {
    let count = (groups.end - groups.start) as usize;
    let mut masks = vec![TokenMask::EMPTY; count * heads.len()];
    for (head, tokens) in heads.iter().enumerate() {
        for token in tokens {
            let group = (*token as usize / group_tokens) - groups.start as usize;
            masks[group * heads.len() + head].insert(*token as usize % group_tokens);
        }
    }
    let mut found = Vec::new();
    for (group, masks) in groups.zip(masks.chunks_exact(heads.len().max(1))) {
        if let [mask] = masks {
            if !mask.is_empty() {
                let part = (*mask != TokenMask::all(group_tokens)).then_some(*mask);
                found.push((group, AttendedEntries::AllHeads(part)));
            }
            continue;
        }
        let mut items: Vec<(HeadMask, TokenMask)> = Vec::new();
        for (head, mask) in masks.iter().enumerate().filter(|(_, mask)| !mask.is_empty()) {
            match items.iter_mut().find(|(_, tokens)| tokens == mask) {
                Some((heads, _)) => _ = heads.insert(head),
                None => items.push((HeadMask::one(head), *mask)),
            }
        }
        if !items.is_empty() {
            found.push((group, AttendedEntries::PerHead(items.into())));
        }
    }
    found
}

/// The groups, heads and tokens that entries of a layer may name.
pub(crate) struct EntryLimits {
    pub(crate) kv_heads: usize,
    pub(crate) group_tokens: usize,
    /// The groups that the layer can attend to.
    pub(crate) groups: Range<u64>,
    /// The first token in the layer's window.
    pub(crate) first_token: u64,
}

impl EntryLimits {
    /// Checks entries, and returns their groups in rising order with the entries of each.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the groups do not rise, or entries are empty. The layer does not have a group,
    /// head or token, or its window hides it. A head is named twice for a group.
    pub(crate) fn check(&self, entries: &[GroupEntries]) -> Result<(Vec<u64>, Vec<AttendedEntries>)> {
        let (mut groups, mut attended) = (Vec::new(), Vec::new());
        for (at, own) in entries.chunk_by(|a, b| a.group == b.group).enumerate() {
            let group = own[0].group;
            let wrong = |what: &str| {
                let text = format!("select: entries of group {group}: {what}");
                Err(Error::new(ErrorKind::InvalidArgument, text))
            };
            if at > 0 && groups.last().is_some_and(|last| *last > group) {
                return wrong("groups must rise");
            }
            if !self.groups.contains(&group) {
                return wrong(&format!("the layer attends to groups {:?}", self.groups));
            }
            let hidden = self.first_token.saturating_sub(group * self.group_tokens as u64) as usize;
            let mut named = HeadMask::EMPTY;
            for item in own {
                if item.heads.is_empty() || item.tokens.is_empty() {
                    return wrong("an item without heads or without tokens");
                }
                if !item.heads.difference(HeadMask::all(self.kv_heads)).is_empty() {
                    return wrong(&format!("the layer has {} KV heads", self.kv_heads));
                }
                if !item.tokens.difference(TokenMask::all(self.group_tokens)).is_empty() {
                    return wrong(&format!("a group has {} tokens", self.group_tokens));
                }
                if !item.tokens.intersection(TokenMask::all(hidden)).is_empty() {
                    return wrong(&format!("the window begins at token {}", self.first_token));
                }
                if !item.heads.intersection(named).is_empty() {
                    return wrong("a head is named twice, and attends to each token once");
                }
                named = named.union(item.heads);
            }
            groups.push(group);
            attended.push(AttendedEntries::PerHead(own.iter().map(|item| (item.heads, item.tokens)).collect()));
        }
        Ok((groups, attended))
    }
}
