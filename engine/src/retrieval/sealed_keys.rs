//! The K planes of consecutive sealed groups in memory, and the profile that is made of them and recorded queries.

use crate::kernels::widen;
use crate::retrieval::clusters::MAX_KEY_MAGNITUDE;
use crate::retrieval::key_group::KeyGroup;
use crate::retrieval::key_shape::KeyShape;
use crate::retrieval::scaled_rows::ScaledRows;
use crate::retrieval::summary_records::Records;
use std::ops::Range;
use stratakv_format::DType;

/// The K planes of consecutive groups.
#[derive(Clone, Debug)]
pub struct SealedKeys {
    shape: KeyShape,
    /// The group of the first plane.
    first: usize,
    planes: Records<u8>,
}

impl SealedKeys {
    /// Returns no groups. The first one that is pushed has the index `first`.
    #[must_use]
    pub fn new(shape: KeyShape, first: usize) -> Self {
        Self { shape, first, planes: Records::new(Self::group_bytes(&shape)) }
    }

    /// Returns the bytes of the keys of a group.
    #[must_use]
    pub fn group_bytes(shape: &KeyShape) -> usize {
        shape.width() * shape.group_tokens * shape.dtype.bytes()
    }

    /// Adds the next group.
    pub fn push(&mut self, group: &KeyGroup<'_>) {
        self.planes.add().copy_from_slice(group.plane());
    }

    /// Adds the next group with a plane of zeros, which is returned to be written.
    pub(crate) fn add(&mut self) -> &mut [u8] {
        self.planes.add()
    }

    /// Passes over the next group, without its keys. There are no keys of earlier groups.
    pub fn skip(&mut self) {
        self.first += 1;
    }

    /// Returns the groups.
    #[must_use]
    pub fn groups(&self) -> Range<usize> {
        self.first..self.first + self.planes.count()
    }

    /// Returns the tokens of the groups.
    #[must_use]
    pub fn tokens(&self) -> Range<usize> {
        let groups = self.groups();
        groups.start * self.shape.group_tokens..groups.end * self.shape.group_tokens
    }

    /// Forgets the groups from `groups` on. Cut before its first group, it begins there.
    pub fn truncate(&mut self, groups: usize) {
        self.planes.truncate(groups.saturating_sub(self.first));
        self.first = self.first.min(groups);
    }

    /// Drops all groups. The next one that is pushed follows them.
    pub fn clear(&mut self) {
        self.forget_before(usize::MAX);
    }

    /// Drops the groups before `group`, or all if it comes after them.
    pub fn forget_before(&mut self, group: usize) {
        if group > self.first {
            *self = self.tail(group);
        }
    }

    /// Returns the groups from `group` on, or none if it comes after them.
    #[must_use]
    pub fn tail(&self, group: usize) -> Self {
        let groups = self.groups();
        let mut left = Self::new(self.shape, group.clamp(groups.start, groups.end));
        left.planes.reserve(groups.end - left.first);
        for at in left.first..groups.end {
            left.planes.add().copy_from_slice(self.planes.slice(at - groups.start..at + 1 - groups.start));
        }
        left
    }

    /// Returns the bytes that it takes in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.planes.bytes()
    }

    /// Returns the most bytes that it takes in memory after `groups` more groups.
    #[must_use]
    pub fn bytes_for(&self, groups: usize) -> usize {
        self.planes.bytes_for(groups)
    }

    /// Appends the keys of tokens to `out`, `[tokens, key_dim]`, of one KV head; or of all heads, `[tokens, kv_heads *
    /// key_dim]`. Elements whose magnitude is above the limit of clusters are lowered to it.
    pub fn rows(&self, tokens: Range<usize>, head: Option<usize>, out: &mut Vec<f32>) {
        let KeyShape { kv_heads, key_dim, group_tokens, dtype } = self.shape;
        let (row, heads) = (key_dim * dtype.bytes(), head.map_or(0..kv_heads, |head| head..head + 1));
        let start = out.len();
        for token in tokens.start.max(self.tokens().start)..tokens.end.min(self.tokens().end) {
            let group = token / group_tokens - self.first;
            let plane = self.planes.slice(group..group + 1);
            for head in heads.clone() {
                let at = (head * group_tokens + token % group_tokens) * row;
                let to = out.len();
                out.resize(to + key_dim, 0.0);
                widen(&plane[at..at + row], dtype, &mut out[to..]);
            }
        }
        let limit = |x: &mut f32| *x = x.clamp(-MAX_KEY_MAGNITUDE, MAX_KEY_MAGNITUDE);
        out[start..].iter_mut().for_each(limit);
    }
}

impl SealedKeys {
    /// Returns the keys of these tokens as rows of f16. `None` if they are kept in another type, or if no head is named
    /// and there are several.
    pub(crate) fn half_rows(&self, tokens: Range<usize>, head: Option<usize>) -> Option<HalfRows<'_>> {
        let head = head.or((self.shape.kv_heads == 1).then_some(0))?;
        (self.shape.dtype == DType::F16).then_some(HalfRows { keys: self, tokens, head })
    }

    /// Returns the keys of tokens as [`Self::rows`] does, in 16 bits per element.
    pub(crate) fn scaled_rows(&self, tokens: Range<usize>, head: Option<usize>) -> ScaledRows {
        let dim = if head.is_some() { self.shape.key_dim } else { self.shape.width() };
        let (mut rows, mut row) = (ScaledRows::with_capacity(dim, tokens.len()), Vec::with_capacity(dim));
        for token in tokens {
            if self.shape.dtype == DType::F16 {
                rows.push_halves(self.row_bytes(token, head));
                continue;
            }
            row.clear();
            self.rows(token..token + 1, head, &mut row);
            rows.push(&row);
        }
        rows
    }

    /// Returns the bytes of the key of a token that it has, KV head by KV head.
    fn row_bytes(&self, token: usize, head: Option<usize>) -> impl Iterator<Item = &[u8]> {
        let KeyShape { kv_heads, key_dim, group_tokens, dtype } = self.shape;
        let (row, group) = (key_dim * dtype.bytes(), token / group_tokens - self.first);
        let plane = self.planes.slice(group..group + 1);
        let heads = head.map_or(0..kv_heads, |head| head..head + 1);
        heads.map(move |head| &plane[(head * group_tokens + token % group_tokens) * row..][..row])
    }
}

/// The keys of consecutive tokens of one KV head as they are kept, in f16.
#[derive(Clone, Debug)]
pub(crate) struct HalfRows<'a> {
    keys: &'a SealedKeys,
    tokens: Range<usize>,
    head: usize,
}

impl HalfRows<'_> {
    /// Returns the number of rows.
    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the bytes of the rows, one slice per group.
    pub(crate) fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let KeyShape { key_dim, group_tokens, dtype, .. } = self.keys.shape;
        let (row, groups) = (key_dim * dtype.bytes(), self.keys.groups());
        let own = self.tokens.start / group_tokens..self.tokens.end.div_ceil(group_tokens);
        own.map(move |group| {
            let (first, last) = (self.tokens.start.max(group * group_tokens), (group + 1) * group_tokens);
            let plane = self.keys.planes.slice(group - groups.start..group + 1 - groups.start);
            let at = self.head * group_tokens + first % group_tokens;
            &plane[at * row..][..(self.tokens.end.min(last) - first) * row]
        })
    }
}

/// Recorded queries over the sealed keys of a layer.
#[derive(Clone, Copy, Debug)]
pub struct QueryProfile<'a> {
    /// The keys of all sealed groups, from group 0 on.
    pub keys: &'a SealedKeys,
    /// The shape of the keys.
    pub shape: KeyShape,
    /// The queries, each `[q_heads, key_dim]` and finite, from the oldest to the newest. There is at least one.
    pub queries: &'a [&'a [f32]],
    /// The factor of `q . k` in the softmax.
    pub scale: f32,
}
