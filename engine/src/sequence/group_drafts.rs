//! Drafts of frames with groups: runs, their min/max records, and the records of selectors.

use super::handle::Sequence;
use super::layer::LayerState;
use super::selector_set::SelectorSet;
use crate::catalog::GroupBuffer;
use crate::error::Result;
use crate::log::{FrameBuilder, RecordBytes};
use crate::retrieval::SummaryRecordId;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::DType;
use stratakv_format::frame::{SUMMARY_RECORD_BYTES_MAX, min_max_element};

/// Bytes kept free in a frame for padding between its parts.
const SLACK_BYTES: usize = 4096;

/// Min/max records of a run: element type, number of groups, bytes.
type RunRecords = (DType, usize, Vec<RecordBytes>);

impl Sequence {
    /// Returns drafts of all pending groups, each within the limit of a frame.
    ///
    /// # Errors
    /// As [`LayerState::freeze`] and [`LayerState::records_of`].
    pub(super) fn group_drafts(&mut self) -> Result<Vec<FrameBuilder>> {
        let group = self.identity.layout.group_tokens() as u64;
        let streamed = self.streams_min_max();
        let limit = self.frames.limit();
        let mut drafts = vec![FrameBuilder::default()];
        for layer in self.layers.iter_mut() {
            layer.freeze()?;
            let layer = &*layer;
            for run in layer.pending() {
                let records = run_records(layer, run, self.identity.layout.dtype(), streamed)?;
                let more = run.disk_bytes()
                    + records.as_ref().map_or(0, |(.., pieces)| pieces.iter().map(|piece| piece.bytes().len()).sum())
                    + run.groups * 16;
                if let Some(last) = drafts.last()
                    && !last.is_empty()
                    && last.bytes() + more + SLACK_BYTES > limit
                {
                    drafts.push(FrameBuilder::default());
                }
                let Some(last) = drafts.last_mut() else { continue };
                last.run(Arc::clone(run), group, layer.geometry().planes(), records);
                add_stored_summaries(last, &self.selectors, layer, run, limit);
            }
        }
        Ok(drafts)
    }
}

/// Returns the min/max records of a run. They are computed from the keys if the layer streams its records, and so keeps
/// none.
fn run_records(layer: &LayerState, run: &GroupBuffer, dtype: DType, streamed: bool) -> Result<Option<RunRecords>> {
    let element = min_max_element(dtype);
    if streamed {
        let records = layer.records_of(run)?;
        let bytes = RecordBytes::Made(bytemuck::cast_slice(&records).to_vec());
        return Ok(Some((element, run.groups, vec![bytes])));
    }
    Ok(layer.summaries().min_max().map(|summary| {
        let groups = groups_of(run, summary.groups());
        let shared = summary.shared(groups.clone()).map(|records| RecordBytes::Shared(Box::new(records)));
        (element, groups.len(), shared.collect())
    }))
}

/// Adds the records of selectors for the groups of a run. They are caches, so a frame or format without room for them
/// does without.
fn add_stored_summaries(
    draft: &mut FrameBuilder,
    selectors: &SelectorSet,
    layer: &LayerState,
    run: &GroupBuffer,
    limit: usize,
) {
    for (summary, adapter) in selectors.stored(layer) {
        let Some(SummaryRecordId(stored)) = summary.stored_as() else { continue };
        let groups = groups_of(run, summary.groups());
        let more = groups.len() * stored.record_bytes as usize + FrameBuilder::STORED_OVERHEAD;
        let fits = (1..=SUMMARY_RECORD_BYTES_MAX).contains(&stored.record_bytes);
        if fits && !groups.is_empty() && draft.bytes() + more + SLACK_BYTES <= limit {
            let mut encoded = Vec::with_capacity(more);
            summary.encode(groups.clone(), &mut encoded);
            // Readers find the record of a group by its position, so all records must be there.
            if encoded.len() == groups.len() * stored.record_bytes as usize {
                draft.stored_summary(stored, adapter, groups.len(), encoded);
            }
        }
    }
}

/// Returns the groups of a run that a summary of the first `known` groups covers.
fn groups_of(run: &GroupBuffer, known: usize) -> Range<usize> {
    let first = (run.first_group as usize).min(known);
    first..(first + run.groups).min(known)
}
