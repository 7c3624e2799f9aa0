//! [`KeySpace`]: the vectors that are clustered, which are keys or what a codebook makes of them.
//!
//! Clusters whose members are scored by their codes are made in the space of the codes. A key of 8 heads of 128
//! elements becomes at most 64 numbers there with `tck:64`. A distance in this space says how much attention scores
//! differ, because the transform of a codebook contains the second moment of the queries.
//!
//! Invariant: elements are finite and at most [`MAX_KEY_MAGNITUDE`].

use crate::kernels::{add_weighted_rows, multiply_add};
use crate::retrieval::cluster_choice::options::ClusterOptions;
use crate::retrieval::clusters::MAX_KEY_MAGNITUDE;
use crate::retrieval::key_group::KeyGroup;
use crate::retrieval::key_shape::KeyShape;
use crate::retrieval::sealed_keys::SealedKeys;
use crate::retrieval::transform_coded::codebook::Codebook;
use std::sync::Arc;
use stratakv_format::DType;

/// Keys that are transformed at once.
const BATCH: usize = 64;

/// The space in which the keys of each list are clustered.
#[derive(Clone, Debug)]
pub(crate) struct KeySpace {
    shape: KeyShape,
    options: ClusterOptions,
    book: Option<Arc<Codebook>>,
}

impl KeySpace {
    /// Returns the space of keys, or of their codes if there is a codebook.
    pub(crate) fn new(shape: KeyShape, options: ClusterOptions, book: Option<Arc<Codebook>>) -> Self {
        Self { shape, options, book }
    }

    /// Returns the options of the method.
    pub(crate) fn options(&self) -> &ClusterOptions {
        &self.options
    }

    /// Returns the KV head of each list; one list without a head if clusters are joint.
    pub(crate) fn heads(&self) -> Vec<Option<usize>> {
        self.options.heads(&self.shape)
    }

    /// Returns the elements of a vector.
    pub(crate) fn dim(&self) -> usize {
        self.book.as_ref().map_or(self.options.dim(&self.shape), |book| book.dims())
    }

    /// Returns the shape of the vectors, as keys of each list. Vectors of codes are kept in f32.
    pub(crate) fn vector_shape(&self) -> KeyShape {
        match &self.book {
            None => self.shape,
            Some(book) => KeyShape {
                kv_heads: self.heads().len(),
                key_dim: book.dims(),
                group_tokens: self.shape.group_tokens,
                dtype: DType::F32,
            },
        }
    }

    /// Returns the most bytes that transforming keys takes beside the vectors that are kept.
    pub(crate) fn scratch_bytes(&self) -> usize {
        let width = self.options.dim(&self.shape);
        // A block of the transform is copied.
        if self.book.is_some() { ((BATCH + 16) * width + BATCH * self.dim()) * size_of::<f32>() } else { 0 }
    }

    /// Adds the vectors of the next group to `vectors`, which have the shape of [`Self::vector_shape`].
    pub(crate) fn push(&self, group: &KeyGroup<'_>, vectors: &mut SealedKeys) {
        let Some(book) = &self.book else { return vectors.push(group) };
        let (width, tokens) = (self.options.dim(&self.shape), self.shape.group_tokens);
        let (mut keys, mut transformed) = (Vec::new(), Vec::new());
        keys.reserve_exact(tokens.min(BATCH) * width);
        transformed.reserve_exact(tokens.min(BATCH) * book.dims());
        let mut rest = vectors.add();
        for head in self.heads() {
            for first in (0..tokens).step_by(BATCH) {
                let batch = first..tokens.min(first + BATCH);
                keys.resize(batch.len() * width, 0.0);
                batch.clone().zip(keys.chunks_exact_mut(width)).for_each(|(token, key)| group.row(token, head, key));
                transformed.clear();
                transformed.resize(batch.len() * book.dims(), 0.0);
                self.transform(book, head, &mut keys, &mut transformed);
                let own;
                (own, rest) = rest.split_at_mut(transformed.len() * size_of::<f32>());
                own.as_chunks_mut().0.iter_mut().zip(&transformed).for_each(|(out, x)| *out = x.to_le_bytes());
            }
        }
    }

    /// Writes the vector of a token of a group.
    pub(crate) fn row(&self, group: &KeyGroup<'_>, token: usize, head: Option<usize>, out: &mut [f32]) {
        let Some(book) = &self.book else { return group.row(token, head, out) };
        let mut own = vec![0.0; self.options.dim(&self.shape)];
        group.row(token, head, &mut own);
        out.fill(0.0);
        self.transform(book, head, &mut own, out);
    }

    /// Adds the transform of keys to `out`, which is zero. The keys are overwritten.
    fn transform(&self, book: &Codebook, head: Option<usize>, keys: &mut [f32], out: &mut [f32]) {
        let (width, dims) = (self.options.dim(&self.shape), book.dims());
        let first = head.map_or(0, |head| head * width);
        let mean = &book.mean()[first..first + width];
        for key in keys.chunks_exact_mut(width) {
            key.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
        }
        let matrix = &book.forward()[first * dims..(first + width) * dims];
        // The product of many rows copies the matrix first.
        match keys.len() == width {
            true => add_weighted_rows(keys, matrix, out),
            false => multiply_add(out, keys, matrix, width, dims),
        }
        // Products of the largest keys may overflow, and their sums may be NaN.
        let limited = |x: f32| if x.is_nan() { 0.0 } else { x.clamp(-MAX_KEY_MAGNITUDE, MAX_KEY_MAGNITUDE) };
        out.iter_mut().for_each(|x| *x = limited(*x));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::cluster_choice::{ChosenBy, HeadSharing};

    #[test]
    fn vectors_are_the_transformed_keys_of_a_list() {
        let shape = KeyShape { kv_heads: 2, key_dim: 2, group_tokens: 3, dtype: DType::F32 };
        let forward = vec![1.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 3e38];
        let (packing, levels) = (vec![vec![0, 1]], vec![vec![0.0, 1.0]; 2]);
        let book = Codebook::new(vec![1.0, 0.0, 0.0, 0.0], forward.clone(), forward, packing, levels, 0.0).unwrap();
        let elements: Vec<f32> = (0..12).map(|at| at as f32).collect();
        let plane: Vec<u8> = elements.iter().flat_map(|x| x.to_le_bytes()).collect();
        let group = KeyGroup::new(shape, &plane, 0).unwrap();
        let options = |sharing| ClusterOptions {
            mean_size: 4,
            chosen_by: ChosenBy::Members,
            sharing,
            whole_window: false,
            single: false,
        };
        // The keys of token 1 are (2, 3) of head 0 and (8, 9) of head 1.
        let (joint, per_head) = (HeadSharing::Joint, HeadSharing::PerHead);
        for (sharing, head, expected) in [
            (joint, None, [1.0 + 16.0, MAX_KEY_MAGNITUDE]),
            (per_head, Some(0), [1.0, 3.0]),
            (per_head, Some(1), [16.0, MAX_KEY_MAGNITUDE]),
        ] {
            let space = KeySpace::new(shape, options(sharing), Some(Arc::new(book.clone())));
            let (mut rows, mut row) = (vec![7.0], [9.0; 2]);
            let mut vectors = SealedKeys::new(space.vector_shape(), 0);
            space.push(&group, &mut vectors);
            vectors.rows(1..9, head, &mut rows);
            space.row(&group, 1, head, &mut row);
            assert_eq!((&rows[1..3], row, rows.len(), space.dim()), (&expected[..], expected, 5, 2));
            let plain = KeySpace::new(shape, options(sharing), None);
            let mut keys = SealedKeys::new(plain.vector_shape(), 0);
            plain.push(&group, &mut keys);
            rows.clear();
            keys.rows(1..2, head, &mut rows);
            let mut row = vec![0.0; plain.dim()];
            plain.row(&group, 1, head, &mut row);
            assert_eq!((rows.len(), rows), (plain.dim(), row));
        }
    }
}
