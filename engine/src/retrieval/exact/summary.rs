//! All keys, unchanged, for the exact oracle. They take as much memory as the keys, so this is for evaluation only.

use crate::error::Result;
use crate::kernels::{multiply_by_lanes, widen};
use crate::retrieval::query_batch::QueryBatch;
use crate::retrieval::score_tiles::FillScores;
use crate::retrieval::summary::{KeyGroup, KeyShape, LayerSummary, Records, SummarySpec};
use std::ops::Range;
use std::sync::Arc;

/// The specification of a summary that keeps every key.
#[derive(Clone, Copy, Debug)]
pub struct ExactSpec;

impl SummarySpec for ExactSpec {
    fn id(&self) -> String {
        "exact".into()
    }

    fn layer(&self, _layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        Ok(Box::new(Exact { shape, planes: Records::new(shape.width() * shape.group_tokens * shape.dtype.bytes()) }))
    }
}

/// The K planes of the groups of a layer.
pub(crate) struct Exact {
    shape: KeyShape,
    planes: Records<u8>,
}

impl Exact {
    /// Returns the number of columns, and a function that writes the raw scores of all tokens of groups, `[tokens,
    /// columns]`.
    pub(crate) fn scorer<'a>(&'a self, batch: &QueryBatch) -> (usize, impl FillScores + use<'a>) {
        let KeyShape { kv_heads, key_dim, group_tokens, dtype } = self.shape;
        let (padded, width) = (batch.padded(), self.shape.width());
        let mut weights = vec![0.0; width * padded];
        for (lane, head, row) in batch.rows() {
            for (i, q) in row.iter().enumerate() {
                weights[(head * key_dim + i) * padded + lane] += q;
            }
        }
        let weights = Arc::new(weights);
        let mut keys = vec![0.0; width * group_tokens];
        let row = key_dim * dtype.bytes();
        let score = move |groups: Range<usize>, out: &mut [f32]| {
            for (index, out) in groups.zip(out.chunks_exact_mut(padded * group_tokens)) {
                let plane = self.planes.slice(index..index + 1);
                for head in 0..kv_heads {
                    for token in 0..group_tokens {
                        let to = &mut keys[token * width + head * key_dim..][..key_dim];
                        widen(&plane[(head * group_tokens + token) * row..][..row], dtype, to);
                    }
                }
                multiply_by_lanes(&keys, &weights, width, padded, out);
            }
        };
        (padded, score)
    }

    /// Writes the raw scores `[tokens, lanes]` of tokens of one KV head. The weights are `[key_dim, lanes]`, with a
    /// multiple of 8 lanes.
    pub(crate) fn score_head(
        &self,
        tokens: &Range<usize>,
        head: usize,
        (weights, lanes): (&[f32], usize),
        out: &mut [f32],
    ) {
        let KeyShape { key_dim, group_tokens, dtype, .. } = self.shape;
        let row = key_dim * dtype.bytes();
        let mut keys = vec![0.0; key_dim * group_tokens];
        let mut token = tokens.start;
        while token < tokens.end {
            let count = (group_tokens - token % group_tokens).min(tokens.end - token);
            let plane = self.planes.slice(token / group_tokens..token / group_tokens + 1);
            let rows = &plane[(head * group_tokens + token % group_tokens) * row..][..count * row];
            let keys = &mut keys[..count * key_dim];
            widen(rows, dtype, keys);
            let out = &mut out[(token - tokens.start) * lanes..][..count * lanes];
            multiply_by_lanes(keys, weights, key_dim, lanes, out);
            token += count;
        }
    }
}

impl LayerSummary for Exact {
    fn groups(&self) -> usize {
        self.planes.count()
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        self.planes.add().copy_from_slice(group.plane());
    }

    fn truncate(&mut self, groups: usize) {
        self.planes.truncate(groups);
    }

    fn bytes(&self) -> usize {
        self.planes.bytes()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        self.planes.bytes_for(groups)
    }
}
