//! Keys at a low rank (ShadowKV): the keys of a layer before rotation, as a few numbers per token times a common basis.
//! They are kept in memory, so that selections need not read them.
//!
//! They are built in two passes over the stored keys:
//! 1. [`FirstPass`] turns the keys back to before rotation and adds up their second moment. It also finds how unlike
//!    its mean each group is.
//! 2. [`FirstPass::finish`] takes the strongest directions of the moment as the basis, and the groups least like their
//!    means as outliers.
//! 3. [`SecondPass`] projects each key to the basis and keeps the blocks of the outliers.
//! 4. [`ReconstructedKeys::rebuild`] multiplies rows by the basis and rotates the result to the tokens' positions.
//!
//! Invariants:
//! - [`ReconstructedKeys`] never change, so selections share them.
//! - Groups sealed after the passes are kept exact in [`KeptKeys`], without gaps and up to a limit.
//!
//! Source: ShadowKV. `Sequence::reconstruct_keys` runs the passes.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::{
    Angles, Rotation, f32_to_f16, largest_finite, multiply_add, multiply_add_upper, narrow, strongest_directions,
    widen_f16,
};
use crate::metrics::Reservation;
use crate::retrieval::shadowkv::summary::mean_and_cosine;
use crate::retrieval::summary::{KeyGroup, KeyShape};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Tokens that are added to the second moment, or projected, at once.
const BATCH: usize = 64;
/// Norm of the longest key after scaling. Small elements of other keys are then still normal numbers of f16.
const LONGEST: f32 = 4096.0;

/// Options of keys at a low rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReconstructOptions {
    /// Numbers per token and layer. `None`: 160 per 1024 elements of the joint keys of all KV heads, as in the paper.
    pub rank: Option<usize>,
    /// The share of groups whose keys and values are kept exact (outliers). They are the groups whose tokens are least
    /// like their mean. Default 0.003.
    pub outlier_share: f64,
    /// The most tokens per layer, appended after a rebuild, whose keys are kept exact in memory. Default 1024. Keys of
    /// tokens beyond them are read from devices until the next rebuild.
    pub exact_tokens: usize,
}

impl Default for ReconstructOptions {
    fn default() -> Self {
        Self { rank: None, outlier_share: 0.003, exact_tokens: 1024 }
    }
}

impl ReconstructOptions {
    /// Sets the rank.
    #[must_use]
    pub const fn rank(mut self, rank: usize) -> Self {
        self.rank = Some(rank);
        self
    }

    /// Sets the share of outliers, 0 to 1.
    #[must_use]
    pub const fn outlier_share(mut self, share: f64) -> Self {
        self.outlier_share = share;
        self
    }

    /// Sets the number of new tokens whose keys stay exact.
    #[must_use]
    pub const fn exact_tokens(mut self, tokens: usize) -> Self {
        self.exact_tokens = tokens;
        self
    }

    /// Returns the rank for joint keys of `width` elements.
    pub(crate) fn rank_of(&self, width: usize) -> usize {
        self.rank.unwrap_or_else(|| (width * 160).div_ceil(1024))
    }

    /// Returns the number of outliers among `groups` groups.
    pub(crate) fn outliers_of(&self, groups: usize) -> usize {
        ((groups as f64 * self.outlier_share.clamp(0.0, 1.0)).ceil() as usize).min(groups)
    }
}

/// The keys of the first groups of a layer, at a low rank.
pub(crate) struct ReconstructedKeys {
    shape: KeyShape,
    rotation: Rotation,
    rank: usize,
    groups: u64,
    /// `[tokens, rank]` in f16.
    rows: Vec<u16>,
    /// `[rank, width]`.
    basis: Vec<f32>,
    /// Whole blocks, exact.
    outliers: BTreeMap<u64, Arc<[u8]>>,
    _account: Reservation,
}

impl ReconstructedKeys {
    /// Returns the bytes of `groups` groups at a rank, with `outliers` blocks of `block_bytes`.
    pub(crate) fn bytes_of(shape: &KeyShape, groups: usize, rank: usize, outliers: usize, block_bytes: usize) -> usize {
        let (tokens, width) = (groups * shape.group_tokens, shape.width());
        tokens * rank * size_of::<u16>() + rank * width * size_of::<f32>() + outliers * (block_bytes + 64)
    }

    /// Returns the bytes that it holds.
    pub(crate) fn bytes(&self) -> usize {
        self._account.bytes()
    }

    /// Writes the K planes of groups, one behind the other, each `[kv_heads, G, key_dim]` in the layout's element type.
    ///
    /// The keys are the rows times the basis, rotated to their positions.
    pub(crate) fn rebuild(&self, groups: &[u64], out: &mut Vec<u8>) {
        let KeyShape { kv_heads, key_dim, group_tokens, dtype } = self.shape;
        let (width, rank) = (self.shape.width(), self.rank);
        let mut rows = vec![0.0_f32; groups.len() * group_tokens * rank];
        for (to, group) in rows.chunks_exact_mut(group_tokens * rank).zip(groups) {
            let from = &self.rows[*group as usize * group_tokens * rank..][..group_tokens * rank];
            widen_f16(from, to);
        }
        let mut keys = vec![0.0; groups.len() * group_tokens * width];
        multiply_add(&mut keys, &rows, &self.basis, rank, width);
        let row = key_dim * dtype.bytes();
        let largest = largest_finite(dtype);
        out.clear();
        out.resize(keys.len() * dtype.bytes(), 0);
        let mut angles = Angles::new();
        let planes = out.chunks_exact_mut(kv_heads * group_tokens * row);
        for ((plane, keys), group) in planes.zip(keys.chunks_exact_mut(group_tokens * width)).zip(groups) {
            for (token, key) in keys.chunks_exact_mut(width).enumerate() {
                self.rotation.angles(group * group_tokens as u64 + token as u64, &mut angles);
                for (head, key) in key.chunks_exact_mut(key_dim).enumerate() {
                    self.rotation.turn(&angles, key);
                    key.iter_mut().for_each(|x| *x = x.clamp(-largest, largest));
                    narrow(key, dtype, &mut plane[(head * group_tokens + token) * row..][..row]);
                }
            }
        }
    }
}

/// The first pass over the keys of a layer: their second moment before rotation, the longest key, and the outliers.
pub(crate) struct FirstPass {
    shape: KeyShape,
    rotation: Rotation,
    /// `[width, width]`. Only the diagonal and the elements above it count.
    moment: Vec<f32>,
    longest: f32,
    cosines: Vec<f32>,
    /// Keys that are not in the moment yet, `[tokens, width]`.
    batch: Vec<f32>,
    angles: Angles,
}

impl FirstPass {
    /// Returns the bytes that the passes take.
    pub(crate) fn bytes_of(shape: &KeyShape, groups: usize) -> usize {
        let (width, batch) = (shape.width(), BATCH.next_multiple_of(shape.group_tokens));
        // The moment, then the basis twice, and the keys of a batch three times.
        (3 * width * width + 4 * batch * width + groups) * size_of::<f32>()
    }

    pub(crate) fn new(shape: KeyShape, rotation: Rotation) -> Self {
        let width = shape.width();
        let (moment, batch) = (vec![0.0; width * width], Vec::new());
        Self { shape, rotation, moment, longest: 0.0, cosines: Vec::new(), batch, angles: Angles::new() }
    }

    pub(crate) fn add(&mut self, group: &KeyGroup<'_>) {
        let mut keys = group.tokens();
        self.cosines.push(mean_and_cosine(&keys, &self.shape).1);
        turn_back(&self.rotation, &self.shape, group.index(), &mut keys, &mut self.angles);
        for key in keys.chunks_exact(self.shape.width()) {
            self.longest = self.longest.max(key.iter().map(|x| x * x).sum::<f32>().sqrt());
        }
        self.batch.extend_from_slice(&keys);
        if self.batch.len() >= BATCH * self.shape.width() {
            self.flush();
        }
    }

    fn flush(&mut self) {
        let width = self.shape.width();
        let tokens = self.batch.len() / width;
        let mut turned = vec![0.0; self.batch.len()];
        for (token, key) in self.batch.chunks_exact(width).enumerate() {
            key.iter().enumerate().for_each(|(i, x)| turned[i * tokens + token] = *x);
        }
        multiply_add_upper(&mut self.moment, &turned, &self.batch, tokens, width);
        self.batch.clear();
    }

    /// Returns the second pass at this rank, which is at most the width. `account` holds the bytes that the keys will
    /// take.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a key is so long that the sum of its squares is infinite in f32.
    pub(crate) fn finish(mut self, rank: usize, outliers: usize, account: Reservation) -> Result<SecondPass> {
        self.flush();
        let width = self.shape.width();
        // The sums of the iteration exceed the trace by rounding only.
        let trace = self.moment.iter().step_by(width + 1).sum::<f32>();
        if !self.longest.is_finite() || !(trace * width as f32).is_finite() {
            let text = format!(
                "reconstruct keys: the longest key has norm {:e}, whose square does not fit in f32",
                self.longest
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        for i in 0..width {
            for j in 0..i {
                self.moment[i * width + j] = self.moment[j * width + i];
            }
        }
        let basis = strongest_directions(&self.moment, width, rank);
        let mut order: Vec<usize> = (0..self.cosines.len()).collect();
        order.sort_by(|a, b| self.cosines[*a].total_cmp(&self.cosines[*b]).then(a.cmp(b)));
        let outliers = order[..outliers.min(order.len())].iter().map(|group| *group as u64).collect();
        let scale = if self.longest > 0.0 { LONGEST / self.longest } else { 1.0 };
        let mut onto = vec![0.0; width * rank];
        for (l, row) in basis.chunks_exact(width).enumerate() {
            row.iter().enumerate().for_each(|(j, x)| onto[j * rank + l] = x * scale);
        }
        let rows = Vec::with_capacity(self.cosines.len() * self.shape.group_tokens * rank);
        let keys = ReconstructedKeys {
            shape: self.shape,
            rotation: self.rotation,
            rank,
            groups: 0,
            rows,
            basis: basis.into_iter().map(|x| x / scale).collect(),
            outliers: BTreeMap::new(),
            _account: account,
        };
        Ok(SecondPass { keys, onto, outliers, batch: self.batch, angles: self.angles })
    }
}

/// The second pass: it projects each key to the basis and keeps the blocks of outliers.
pub(crate) struct SecondPass {
    keys: ReconstructedKeys,
    /// `[width, rank]`: the basis transposed.
    onto: Vec<f32>,
    outliers: Vec<u64>,
    batch: Vec<f32>,
    angles: Angles,
}

impl SecondPass {
    /// Returns the groups whose blocks are kept exact.
    pub(crate) fn outliers(&self) -> &[u64] {
        &self.outliers
    }

    /// Adds the next group. `block` is its whole block, which is kept if the group is an outlier.
    pub(crate) fn add(&mut self, group: &KeyGroup<'_>, block: &[u8]) {
        let (shape, width) = (self.keys.shape, self.keys.shape.width());
        let mut keys = group.tokens();
        turn_back(&self.keys.rotation, &shape, group.index(), &mut keys, &mut self.angles);
        self.batch.extend_from_slice(&keys);
        if self.outliers.contains(&group.index()) {
            self.keys.outliers.insert(group.index(), block.into());
        }
        self.keys.groups += 1;
        if self.batch.len() >= BATCH * width {
            self.flush();
        }
    }

    fn flush(&mut self) {
        let (width, rank) = (self.keys.shape.width(), self.keys.rank);
        let mut rows = vec![0.0; self.batch.len() / width * rank];
        multiply_add(&mut rows, &self.batch, &self.onto, width, rank);
        self.keys.rows.extend(rows.iter().map(|x| f32_to_f16(*x)));
        self.batch.clear();
    }

    pub(crate) fn finish(mut self) -> Arc<ReconstructedKeys> {
        self.flush();
        Arc::new(self.keys)
    }
}

/// Turns the keys of a group, `[G, kv_heads, key_dim]`, back to before rotation.
fn turn_back(rotation: &Rotation, shape: &KeyShape, group: u64, keys: &mut [f32], angles: &mut Angles) {
    for (token, key) in keys.chunks_exact_mut(shape.width()).enumerate() {
        rotation.angles(group * shape.group_tokens as u64 + token as u64, angles);
        key.chunks_exact_mut(shape.key_dim).for_each(|key| rotation.turn_back(angles, key));
    }
}

/// The keys of a layer in memory: at a low rank up to the last rebuild, and exact for the groups behind it, up to a
/// limit.
pub(crate) struct KeptKeys {
    rebuilt: Arc<ReconstructedKeys>,
    /// The rebuilt groups that were not cut off since.
    groups: u64,
    /// K planes of the groups behind them.
    fresh: Vec<Arc<[u8]>>,
    fresh_max: usize,
    plane_bytes: usize,
}

/// The part of a group that is in memory, so that a read skips it.
pub(crate) enum KeptOutliers {
    /// Its whole block.
    Block(Arc<[u8]>),
    /// Its K plane.
    Plane(Arc<[u8]>),
    /// At a low rank.
    Reconstructed,
}

impl KeptKeys {
    pub(crate) fn new(rebuilt: Arc<ReconstructedKeys>, fresh_max: usize, plane_bytes: usize) -> Self {
        Self { groups: rebuilt.groups, rebuilt, fresh: Vec::new(), fresh_max, plane_bytes }
    }

    pub(crate) fn rebuilt(&self) -> &Arc<ReconstructedKeys> {
        &self.rebuilt
    }

    /// Returns the part of a group that is in memory, or none.
    pub(crate) fn find(&self, group: u64) -> Option<KeptOutliers> {
        if group >= self.groups {
            return self.fresh.get((group - self.groups) as usize).map(|plane| KeptOutliers::Plane(Arc::clone(plane)));
        }
        let outlier = self.rebuilt.outliers.get(&group);
        Some(outlier.map_or(KeptOutliers::Reconstructed, |block| KeptOutliers::Block(Arc::clone(block))))
    }

    /// Keeps the K plane of a group that was sealed, if there is space and no gap before it.
    pub(crate) fn push(&mut self, group: u64, plane: &[u8]) {
        // A group behind a gap is not kept, because its index would not match its position.
        if group == self.groups + self.fresh.len() as u64 && self.fresh.len() < self.fresh_max {
            self.fresh.push(plane.into());
        }
    }

    pub(crate) fn truncate(&mut self, groups: u64) {
        self.fresh.truncate(groups.saturating_sub(self.groups) as usize);
        self.groups = self.groups.min(groups);
    }

    /// Returns the bytes of exact keys after `more` groups. The rebuilt keys have an account of their own.
    pub(crate) fn bytes_for(&self, more: usize) -> usize {
        (self.fresh.len() + more).min(self.fresh_max.max(self.fresh.len())) * (self.plane_bytes + 64)
    }
}
