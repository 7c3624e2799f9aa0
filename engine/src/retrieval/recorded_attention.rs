//! The attention weights of recorded queries over the sealed keys of a layer.
//!
//! 1. Queries are taken [`QUERIES`] at a time, KV head by KV head.
//! 2. The rows of query heads are multiplied with the keys of the head, [`ROWS`] rows and [`TILE`] tokens at a time.
//! 3. The softmax of each row is added to the weights of its query.
//!
//! The weight of a token for a query is the sum over the query heads. Each query attends to every key, because the
//! position of a recorded query is unknown.
//!
//! Invariant: the scratch depends on the tokens and the width of a key, and not on the number of queries.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::{add_softmax, multiply_add};
use crate::retrieval::key_shape::KeyShape;
use crate::retrieval::sealed_keys::QueryProfile;

/// Queries whose weights are in memory at a time.
const QUERIES: usize = 16;
/// Rows of scores that are in memory at a time.
const ROWS: usize = 64;
/// Tokens that are multiplied at a time.
const TILE: usize = 512;

/// Returns the most bytes of scratch that [`each_weights`] takes for `tokens` tokens.
pub(crate) fn weight_bytes(tokens: usize, shape: &KeyShape) -> usize {
    let rows = QUERIES + ROWS + 1;
    let tile = TILE * (shape.key_dim + ROWS) + ROWS * shape.key_dim;
    (rows.saturating_mul(tokens)).saturating_add(tile).saturating_mul(size_of::<f32>())
}

/// Calls `visit` with the weights of the tokens for each query, from the oldest query on.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: a product of a query and a key is not finite. Errors of `visit`.
pub(crate) fn each_weights(profile: &QueryProfile<'_>, visit: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
    let tokens = profile.keys.tokens().len();
    let mut weights = vec![0.0; QUERIES.min(profile.queries.len()) * tokens];
    let mut scratch = Scratch { scores: vec![0.0; ROWS * tokens], powers: vec![0.0; tokens] };
    for queries in profile.queries.chunks(QUERIES) {
        weights.fill(0.0);
        for head in 0..profile.shape.kv_heads {
            scratch.add_head(profile, queries, head, &mut weights)?;
        }
        for own in weights.chunks(tokens.max(1)).take(queries.len()) {
            visit(own)?;
        }
    }
    Ok(())
}

struct Scratch {
    /// `[ROWS, tokens]`.
    scores: Vec<f32>,
    /// `[tokens]`.
    powers: Vec<f32>,
}

impl Scratch {
    /// Adds the weights of one KV head to `weights` `[queries, tokens]`.
    fn add_head(
        &mut self,
        profile: &QueryProfile<'_>,
        queries: &[&[f32]],
        head: usize,
        weights: &mut [f32],
    ) -> Result<()> {
        let (tokens, dim) = (self.powers.len(), profile.shape.key_dim);
        let own = |query: &'_ [f32]| query.len() / profile.shape.kv_heads;
        // Each query head of this KV head, with its query.
        let rows: Vec<(usize, &[f32])> = (0..)
            .zip(queries)
            .flat_map(|(at, query)| query[head * own(query)..][..own(query)].chunks(dim).map(move |row| (at, row)))
            .collect();
        for rows in rows.chunks(ROWS) {
            self.score_rows(profile, rows, head);
            for ((query, _), scores) in rows.iter().zip(self.scores.chunks(tokens.max(1))) {
                if scores.iter().any(|x| !(x * profile.scale).is_finite()) {
                    let text = "a product of a query and a key is not finite";
                    return Err(Error::new(ErrorKind::InvalidArgument, text));
                }
                add_softmax(scores, profile.scale, &mut self.powers, &mut weights[query * tokens..][..tokens]);
            }
        }
        Ok(())
    }

    /// Writes `q . k` of each row and token.
    fn score_rows(&mut self, profile: &QueryProfile<'_>, rows: &[(usize, &[f32])], head: usize) {
        let (tokens, dim, lanes) = (self.powers.len(), profile.shape.key_dim, rows.len());
        let mut transposed = vec![0.0; dim * lanes];
        for (lane, (_, row)) in rows.iter().enumerate() {
            row.iter().enumerate().for_each(|(at, q)| transposed[at * lanes + lane] = *q);
        }
        let mut keys = Vec::with_capacity(TILE.min(tokens) * dim);
        let mut products = Vec::with_capacity(TILE.min(tokens) * lanes);
        for first in (0..tokens).step_by(TILE) {
            let last = (first + TILE).min(tokens);
            keys.clear();
            profile.keys.rows(first..last, Some(head), &mut keys);
            products.clear();
            products.resize((last - first) * lanes, 0.0);
            multiply_add(&mut products, &keys, &transposed, dim, lanes);
            for (token, products) in (first..last).zip(products.chunks(lanes)) {
                for (lane, product) in products.iter().enumerate() {
                    self.scores[lane * tokens + token] = *product;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::key_group::KeyGroup;
    use crate::retrieval::sealed_keys::SealedKeys;
    use proptest::prelude::*;
    use stratakv_format::DType;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn weights_are_the_softmax_of_each_query_head_summed(
            groups in 1_usize..180, queries in 1_usize..40, heads in 1_usize..20, seed in any::<u32>(),
        ) {
            let shape = KeyShape { kv_heads: 2, key_dim: 3, group_tokens: 4, dtype: DType::F32 };
            let element = |at: usize| ((at as u32).wrapping_mul(2_654_435_761) ^ seed) as f32 / 2_f32.powi(31) - 1.0;
            let mut keys = SealedKeys::new(shape, 0);
            for group in 0..groups {
                let plane: Vec<u8> = (0..24).flat_map(|at| element(group * 24 + at).to_le_bytes()).collect();
                keys.push(&KeyGroup::new(shape, &plane, group as u64).unwrap());
            }
            let rows: Vec<f32> = (0..queries * heads * 6).map(|at| 4.0 * element(at + 99)).collect();
            let recorded: Vec<&[f32]> = rows.chunks(heads * 6).collect();
            let profile = QueryProfile { keys: &keys, shape, queries: &recorded, scale: 0.5 };
            let mut found = Vec::new();
            each_weights(&profile, &mut |weights| { found.push(weights.to_vec()); Ok(()) }).unwrap();
            prop_assert_eq!(found.len(), queries);
            for (query, found) in recorded.iter().zip(found) {
                let mut expected = vec![0.0_f64; groups * 4];
                for (at, row) in query.chunks(3).enumerate() {
                    let mut own = Vec::new();
                    keys.rows(0..groups * 4, Some(at / heads), &mut own);
                    let power = |key: &[f32]| -> f64 {
                        (0.5 * key.iter().zip(row).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum::<f64>()).exp()
                    };
                    let sum: f64 = own.chunks(3).map(power).sum();
                    own.chunks(3).zip(&mut expected).for_each(|(key, weight)| *weight += power(key) / sum);
                }
                for (found, expected) in found.iter().zip(&expected) {
                    prop_assert!((f64::from(*found) - expected).abs() < 1e-4, "{found} {expected}");
                }
            }
        }
    }

    #[test]
    fn products_that_are_not_finite_are_refused() {
        let shape = KeyShape { kv_heads: 1, key_dim: 1, group_tokens: 1, dtype: DType::F32 };
        let mut keys = SealedKeys::new(shape, 0);
        keys.push(&KeyGroup::new(shape, &1e14_f32.to_le_bytes(), 0).unwrap());
        let profile = QueryProfile { keys: &keys, shape, queries: &[&[f32::MAX]], scale: 1.0 };
        assert_eq!(each_weights(&profile, &mut |_| Ok(())).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}
