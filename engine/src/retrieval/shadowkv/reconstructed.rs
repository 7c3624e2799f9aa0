//! Keys at a low rank (ShadowKV): those of a sequence's layer before rotation, as few numbers per token times a common
//! basis. Kept in memory in place of being read; built in two passes over the stored keys.

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

/// Tokens that are added to the second moment, or brought to low rank, at once.
const BATCH: usize = 64;
/// Norm of the longest key after scaling, so that small parts of others are still normal numbers of f16.
const LONGEST: f32 = 4096.0;

/// How keys are kept at a low rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReconstructOptions {
    /// Numbers per token and layer. `None`: 160 per 1024 elements of the joint keys of all KV heads, as in the paper.
    pub rank: Option<usize>,
    /// Share of the groups whose keys and values are kept as they are: those with tokens least like their mean
    /// (outliers). Default 0.003.
    pub outlier_share: f64,
    /// The newest tokens, appended since, whose keys are kept as they are until the next rebuild: so many per layer at
    /// most. Default 1024. Keys of what is appended beyond them are read from devices.
    pub exact_tokens: usize,
}

impl Default for ReconstructOptions {
    fn default() -> Self {
        Self { rank: None, outlier_share: 0.003, exact_tokens: 1024 }
    }
}

impl ReconstructOptions {
    /// This rank.
    #[must_use]
    pub const fn rank(mut self, rank: usize) -> Self {
        self.rank = Some(rank);
        self
    }

    /// This share of outliers, 0 to 1.
    #[must_use]
    pub const fn outlier_share(mut self, share: f64) -> Self {
        self.outlier_share = share;
        self
    }

    /// So many new tokens whose keys stay exact.
    #[must_use]
    pub const fn exact_tokens(mut self, tokens: usize) -> Self {
        self.exact_tokens = tokens;
        self
    }

    /// The rank for joint keys of `width` elements.
    pub(crate) fn rank_of(&self, width: usize) -> usize {
        self.rank.unwrap_or_else(|| (width * 160).div_ceil(1024))
    }

    /// Outliers of so many groups.
    pub(crate) fn outliers_of(&self, groups: usize) -> usize {
        ((groups as f64 * self.outlier_share.clamp(0.0, 1.0)).ceil() as usize).min(groups)
    }
}

/// Keys of the first groups of a layer. Never changed: views share it.
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
    /// Bytes of `groups` at a rank with so many outliers of `block_bytes`.
    pub(crate) fn bytes_of(shape: &KeyShape, groups: usize, rank: usize, outliers: usize, block_bytes: usize) -> usize {
        let (tokens, width) = (groups * shape.group_tokens, shape.width());
        tokens * rank * size_of::<u16>() + rank * width * size_of::<f32>() + outliers * (block_bytes + 64)
    }

    /// Bytes that it holds.
    pub(crate) fn bytes(&self) -> usize {
        self._account.bytes()
    }

    /// The K plane of groups, one behind the other, each `[kv_heads, G, key_dim]` in the layout's element type: their
    /// rows times the basis, turned to their positions.
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

/// The first pass over the keys of a layer: their second moment before rotation, the longest, and which groups are
/// outliers.
pub(crate) struct FirstPass {
    shape: KeyShape,
    rotation: Rotation,
    /// `[width, width]`, of which only what is on and above the diagonal counts.
    moment: Vec<f32>,
    longest: f32,
    cosines: Vec<f32>,
    /// Keys that are not in the moment yet, `[tokens, width]`.
    batch: Vec<f32>,
    angles: Angles,
}

impl FirstPass {
    /// Bytes that it takes.
    pub(crate) fn bytes_of(shape: &KeyShape, groups: usize) -> usize {
        let (width, batch) = (shape.width(), BATCH.next_multiple_of(shape.group_tokens));
        // The moment, later the basis twice over; keys of a batch three times over.
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

    /// The second pass at this rank, which is the width at most; `account` holds what it will keep.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: keys so long that their squares have no sum in f32.
    pub(crate) fn finish(mut self, rank: usize, outliers: usize, account: Reservation) -> Result<SecondPass> {
        self.flush();
        let width = self.shape.width();
        // What the iteration adds up is not above the trace but for rounding and the order of the terms.
        let trace = self.moment.iter().step_by(width + 1).sum::<f32>();
        if !self.longest.is_finite() || !(trace * width as f32).is_finite() {
            let text = format!("keys as long as {:e} have no directions in f32", self.longest);
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

/// The second pass: each key as its part of the basis; outliers as they are.
pub(crate) struct SecondPass {
    keys: ReconstructedKeys,
    /// `[width, rank]`: the basis transposed.
    onto: Vec<f32>,
    outliers: Vec<u64>,
    batch: Vec<f32>,
    angles: Angles,
}

impl SecondPass {
    /// Groups that are kept as they are.
    pub(crate) fn outliers(&self) -> &[u64] {
        &self.outliers
    }

    /// The next group, with its whole block where it is an outlier.
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

/// Keys of a group `[G, kv_heads, key_dim]` as they were before rotation.
fn turn_back(rotation: &Rotation, shape: &KeyShape, group: u64, keys: &mut [f32], angles: &mut Angles) {
    for (token, key) in keys.chunks_exact_mut(shape.width()).enumerate() {
        rotation.angles(group * shape.group_tokens as u64 + token as u64, angles);
        key.chunks_exact_mut(shape.key_dim).for_each(|key| rotation.turn_back(angles, key));
    }
}

/// What a layer has of its keys in memory: at a low rank up to the last rebuild, exact from there on as far as there is
/// room.
pub(crate) struct KeptKeys {
    rebuilt: Arc<ReconstructedKeys>,
    /// Of the rebuilt groups, those that were not cut off since.
    groups: u64,
    /// K planes of the groups behind them.
    fresh: Vec<Arc<[u8]>>,
    fresh_max: usize,
    plane_bytes: usize,
}

/// The keys of a group that is not read, or not all of it.
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

    /// What there is of a group.
    pub(crate) fn find(&self, group: u64) -> Option<KeptOutliers> {
        if group >= self.groups {
            return self.fresh.get((group - self.groups) as usize).map(|plane| KeptOutliers::Plane(Arc::clone(plane)));
        }
        let outlier = self.rebuilt.outliers.get(&group);
        Some(outlier.map_or(KeptOutliers::Reconstructed, |block| KeptOutliers::Block(Arc::clone(block))))
    }

    /// A group was sealed.
    pub(crate) fn push(&mut self, group: u64, plane: &[u8]) {
        // A gap stays one: what lies behind it would have another place.
        if group == self.groups + self.fresh.len() as u64 && self.fresh.len() < self.fresh_max {
            self.fresh.push(plane.into());
        }
    }

    pub(crate) fn truncate(&mut self, groups: u64) {
        self.fresh.truncate(groups.saturating_sub(self.groups) as usize);
        self.groups = self.groups.min(groups);
    }

    /// Bytes beside those of the rebuilt keys, which have an account of their own, once `more` groups were added.
    pub(crate) fn bytes_for(&self, more: usize) -> usize {
        (self.fresh.len() + more).min(self.fresh_max.max(self.fresh.len())) * (self.plane_bytes + 64)
    }
}
