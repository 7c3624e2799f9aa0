//! The summary of transform-coded keys: a few bytes per token, scored by table look-ups.

use crate::error::Result;
use crate::kernels::{CodeSums, HalfPrecisionTables, QuantisedTables, code_sums, look_up};
use crate::retrieval::adapter::{Adapter, LayerAdapter};
use crate::retrieval::query_batch::QueryBatch;
use crate::retrieval::score_tiles::FillScores;
use crate::retrieval::stored_summary::SummaryRecordId;
use crate::retrieval::summary::{KeyGroup, KeyShape, LayerSummary, Records, SummarySpec};
use crate::retrieval::transform_coded::codebook::Codebook;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::frame::{SUMMARY_CODES, SummaryRecords};

/// The specification of codes: an adapter with codebooks.
#[derive(Clone, Debug)]
pub struct CodeSpec {
    adapter: Arc<Adapter>,
}

impl CodeSpec {
    /// Returns the specification of an adapter, which must have codebooks for the layers it is used with.
    #[must_use]
    pub fn new(adapter: Arc<Adapter>) -> Self {
        Self { adapter }
    }

    /// Returns the codebook of a layer.
    ///
    /// # Errors
    /// The adapter has none for this layer, or one for keys of another width.
    pub(crate) fn book(&self, layer: usize, shape: &KeyShape) -> Result<&Arc<Codebook>> {
        match self.adapter.layer(layer, shape)? {
            LayerAdapter::Codes(book) => Ok(book),
            _ => Err(self.adapter.wrong(layer, "codebook")),
        }
    }
}

impl SummarySpec for CodeSpec {
    fn id(&self) -> String {
        format!("codes/{}/{:016x}", self.adapter.id(), self.adapter.checksum())
    }

    fn adapter(&self) -> Option<&Arc<Adapter>> {
        Some(&self.adapter)
    }

    fn layer(&self, layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        let book = Arc::clone(self.book(layer, &shape)?);
        let codes = Records::new(book.code_bytes() * shape.group_tokens);
        Ok(Box::new(Codes { shape, codes, book, checksum: self.adapter.checksum(), error: 0.0, seen: 0 }))
    }
}

/// The codes of a layer: `[groups][group_tokens, code_bytes]`.
pub struct Codes {
    shape: KeyShape,
    book: Arc<Codebook>,
    codes: Records<u8>,
    /// The checksum of the adapter.
    checksum: u64,
    error: f64,
    seen: u64,
}

impl Codes {
    /// Returns how far the keys are from the calibrated keys: their mean squared error over the calibrated one. About 1
    /// means alike.
    ///
    /// Returns none before the first key. Keys whose codes were read from a device do not count.
    #[must_use]
    pub fn drift(&self) -> Option<f64> {
        let calibrated = f64::from(self.book.distortion());
        (self.seen > 0 && calibrated > 0.0).then(|| self.error / self.seen as f64 / calibrated)
    }

    /// Returns the columns, and a function that fills the scores of all tokens of groups, `[tokens, columns]`. A
    /// constant that all tokens share is left out.
    pub(crate) fn scorer<'a>(&'a self, batch: &QueryBatch) -> (usize, impl FillScores + use<'a>) {
        let padded = batch.padded();
        let weights = batch.project(self.book.query(), self.book.dims());
        let bytes = self.book.code_bytes();
        let (columns, weights) = match batch.count() {
            1 => (1, weights.into_iter().step_by(padded).collect()),
            _ => (padded, weights),
        };
        let tables = if columns > 1 {
            CodeTables::Quantised(self.book.quantised_tables(&weights, columns))
        } else {
            let tables = self.book.tables(&weights);
            match self.halves(&tables) {
                Some((sums, halves)) => CodeTables::Halves(sums, halves),
                None => CodeTables::Bytes(tables),
            }
        };
        let tables = Arc::new(tables);
        let score = move |groups: Range<usize>, out: &mut [f32]| {
            let codes = self.codes.slice(groups);
            match &*tables {
                CodeTables::Quantised(tables) => tables.look_up(codes, out),
                CodeTables::Halves(sums, halves) => sums(codes, halves, out),
                CodeTables::Bytes(tables) => look_up(codes, tables, bytes, 1, out),
            }
        };
        (columns, score)
    }

    /// Returns the most bytes that [`Self::scorer`] allocates for this many lanes.
    pub(crate) fn scorer_bytes(&self, lanes: usize) -> usize {
        let bytes = self.book.code_bytes();
        let weights = 2 * self.book.dims() * lanes.max(16) * size_of::<f32>();
        let one = bytes * (256 * size_of::<f32>() + size_of::<HalfPrecisionTables>());
        weights + if lanes > 1 { QuantisedTables::bytes_for(bytes, lanes) } else { one }
    }

    /// Returns the function for one column, which scores sixteen tokens at a time if that is faster.
    fn halves(&self, tables: &[f32]) -> Option<(CodeSums, Vec<HalfPrecisionTables>)> {
        let sums = code_sums().filter(|_| matches!(self.book.code_bytes(), 4 | 8))?;
        Some((sums, self.book.halves(tables)?))
    }
}

/// The tables in which code bytes are looked up.
enum CodeTables {
    /// Tables of 16-bit numbers, for several columns.
    Quantised(QuantisedTables),
    /// Tables for one column, in vector registers.
    Halves(CodeSums, Vec<HalfPrecisionTables>),
    /// Tables for one column.
    Bytes(Vec<f32>),
}

impl LayerSummary for Codes {
    fn groups(&self) -> usize {
        self.codes.count()
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        self.error += self.book.encode(&group.tokens(), self.codes.add());
        self.seen += self.shape.group_tokens as u64;
    }

    fn truncate(&mut self, groups: usize) {
        self.codes.truncate(groups);
    }

    fn bytes(&self) -> usize {
        self.codes.bytes()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        self.codes.bytes_for(groups)
    }

    fn stored_as(&self) -> Option<SummaryRecordId> {
        let record_bytes = u32::try_from(self.codes.record_bytes()).unwrap_or(u32::MAX);
        Some(SummaryRecordId(SummaryRecords {
            kind: SUMMARY_CODES,
            parameter: self.book.code_bytes() as u32,
            adapter_checksum: self.checksum,
            record_bytes,
        }))
    }

    fn encode(&self, groups: Range<usize>, out: &mut Vec<u8>) {
        self.codes.encode(groups, out);
    }

    fn restore(&mut self, records: &[u8]) -> bool {
        let whole = records.chunks_exact(self.codes.record_bytes());
        if !whole.remainder().is_empty() {
            return false;
        }
        whole.for_each(|record| self.codes.restore(record));
        true
    }
}
