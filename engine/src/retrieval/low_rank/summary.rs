//! Low-rank keys (KVSwap, section 3.2): the joint keys of all KV heads times an adapter, in f16.

use crate::error::Result;
use crate::kernels::{RowQuery, f32_to_finite_f16, is_finite_f16};
use crate::retrieval::adapter::{Adapter, LayerAdapter, LowRankAdapter};
use crate::retrieval::query_batch::QueryBatch;
use crate::retrieval::score_tiles::FillScores;
use crate::retrieval::selector::ScoreRequest;
use crate::retrieval::stored_summary::SummaryRecordId;
use crate::retrieval::summary::{KeyGroup, KeyShape, LayerSummary, Records, SummarySpec};
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::DType;
use stratakv_format::frame::{SUMMARY_LOW_RANK, SummaryRecords};

/// The specification of low-rank keys: an adapter, which gives `rank` numbers per token.
#[derive(Clone, Debug)]
pub struct LowRankSpec {
    adapter: Arc<Adapter>,
}

impl LowRankSpec {
    /// Returns the specification of an adapter, which must have low-rank matrices for the layers it is used with.
    #[must_use]
    pub fn new(adapter: Arc<Adapter>) -> Self {
        Self { adapter }
    }
}

impl SummarySpec for LowRankSpec {
    fn id(&self) -> String {
        format!("low-rank/{}/{:016x}", self.adapter.id(), self.adapter.checksum())
    }

    fn adapter(&self) -> Option<&Arc<Adapter>> {
        Some(&self.adapter)
    }

    fn layer(&self, layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        let matrix = match self.adapter.layer(layer, &shape)? {
            LayerAdapter::LowRank(matrix) => Arc::clone(matrix),
            _ => return Err(self.adapter.wrong(layer, "low-rank matrix")),
        };
        Ok(Box::new(LowRank {
            shape,
            rows: Records::new(matrix.rank() * shape.group_tokens),
            matrix,
            checksum: self.adapter.checksum(),
        }))
    }
}

/// The low-rank keys of a layer, `[groups][group_tokens, rank]`.
pub(crate) struct LowRank {
    shape: KeyShape,
    matrix: Arc<LowRankAdapter>,
    /// The checksum of the adapter.
    checksum: u64,
    rows: Records<u16>,
}

impl LowRank {
    /// Returns the numbers per token.
    pub(crate) fn rank(&self) -> usize {
        self.matrix.rank()
    }

    /// Returns the rows of all tokens of `groups`, `[tokens, rank]` in f16.
    pub(crate) fn rows(&self, groups: Range<usize>) -> &[u16] {
        self.rows.slice(groups)
    }

    /// Returns the queries of the lanes in the space of the rows, `[lanes, rank]`.
    pub(crate) fn queries(&self, batch: &QueryBatch) -> Vec<f32> {
        let (rank, padded) = (self.rank(), batch.padded());
        let projected = batch.project(self.matrix.matrix(), rank);
        (0..batch.count()).flat_map(|lane| projected.chunks_exact(padded).map(move |row| row[lane])).collect()
    }
}

impl LayerSummary for LowRank {
    fn groups(&self) -> usize {
        self.rows.count()
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        let (rank, width) = (self.matrix.rank(), self.shape.width());
        let keys = group.tokens();
        let mut sums = vec![0.0_f32; rank];
        for (key, out) in keys.chunks_exact(width).zip(self.rows.add().chunks_exact_mut(rank)) {
            sums.fill(0.0);
            for (k, weights) in key.iter().zip(self.matrix.matrix().chunks_exact(rank)) {
                sums.iter_mut().zip(weights).for_each(|(sum, w)| *sum += k * w);
            }
            // Keys of a model are in the range of f16. The clamp keeps scores finite for other keys. A sum of
            // infinities of both signs is NaN.
            let narrow = |x: f32| if x.is_nan() { 0 } else { f32_to_finite_f16(x) };
            out.iter_mut().zip(&sums).for_each(|(out, x)| *out = narrow(*x));
        }
    }

    fn truncate(&mut self, groups: usize) {
        self.rows.truncate(groups);
    }

    fn bytes(&self) -> usize {
        self.rows.bytes()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        self.rows.bytes_for(groups)
    }

    fn stored_as(&self) -> Option<SummaryRecordId> {
        let record_bytes = u32::try_from(self.rows.record_bytes()).unwrap_or(u32::MAX);
        Some(SummaryRecordId(SummaryRecords {
            kind: SUMMARY_LOW_RANK,
            parameter: self.matrix.rank() as u32,
            adapter_checksum: self.checksum,
            record_bytes,
        }))
    }

    fn encode(&self, groups: Range<usize>, out: &mut Vec<u8>) {
        self.rows.encode(groups, out);
    }

    fn restore(&mut self, records: &[u8]) -> bool {
        let whole = records.chunks_exact(self.rows.record_bytes());
        // Records that no key can give would make all scores useless, so they are refused.
        let wrong = |b: &[u8; 2]| !is_finite_f16(*b);
        if !whole.remainder().is_empty() || records.as_chunks::<2>().0.iter().any(wrong) {
            return false;
        }
        whole.for_each(|record| self.rows.restore(record));
        true
    }
}

/// Returns a function that fills the scores of groups from low-rank keys.
pub(crate) fn low_rank<'a>(
    keys: &'a LowRank,
    ask: &ScoreRequest<'_>,
    batch: &QueryBatch,
) -> (usize, impl FillScores + use<'a>) {
    let (rank, queries) = (keys.rank(), keys.queries(batch));
    let columns = if batch.count() == 1 { 1 } else { batch.padded() };
    let (heads, own) = (ask.shape.kv_heads, rank / ask.shape.kv_heads);
    // If each head has columns of its own, a query vector is multiplied with these columns only.
    let per_head = batch.count() / heads;
    let others = |(lane, row): (usize, &[f32])| {
        let first = lane / per_head.max(1) * own;
        row.iter().enumerate().any(|(j, q)| *q != 0.0 && !(first..first + own).contains(&j))
    };
    let apart = per_head > 0 && own > 0 && !queries.chunks_exact(rank).enumerate().any(others);
    let mut query = if apart {
        let row = |(lane, row): (usize, &'_ [f32])| row[lane / per_head * own..][..own].to_vec();
        let queries: Vec<f32> = queries.chunks_exact(rank).enumerate().flat_map(row).collect();
        RowQuery::new(&queries, heads, own)
    } else {
        RowQuery::new(&queries, 1, rank)
    };
    let fill = move |groups: Range<usize>, out: &mut [f32]| {
        query.put(keys.rows(groups), (rank, 0), DType::F16, out, columns);
    };
    (columns, fill)
}
