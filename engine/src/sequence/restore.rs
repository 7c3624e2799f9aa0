//! Restoring summaries of selectors from the records that are stored with the groups, instead of from the keys.

use super::handle::Sequence;
use crate::error::{Error, ErrorKind, Result};
use crate::io::coverage;
use crate::io::planted::covered;
use crate::log::Devices;
use crate::plan::Section;
use crate::read::{BlockReader, SegmentRange};
use crate::retrieval::LayerSummary;
use stratakv_format::frame::KIND_SUMMARY;
use stratakv_format::{PAGE_BYTES, PlaneIdentity};

/// The bytes of records after which a batch of reads is full.
const RESTORE_BYTES: u64 = 1 << 20;

impl Sequence {
    /// Adds the groups from `group` on to a summary, as far as their records are stored. Returns the first group that
    /// is left.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`], [`ErrorKind::Busy`]: no buffers. Damaged records are not an error: the scan stops
    /// there.
    pub(super) fn restore(&self, layer: usize, summary: &mut dyn LayerSummary, group: u64) -> Result<u64> {
        let state = self.layer(layer)?;
        let Some(stored) = summary.stored_as() else { return Ok(group) };
        let mut group = group;
        if stored.is_min_max() {
            // The layer keeps these records in memory, unless they are streamed.
            let Some(own) = state.summaries().min_max() else { return Ok(group) };
            let end = own.groups().min(state.groups() as usize);
            let whole = own.encoded(group as usize..end.max(group as usize));
            let restored = whole.take_while(|records| summary.restore(records)).map(<[u8]>::len).sum::<usize>();
            return Ok(group + (restored / (stored.0.record_bytes as usize).max(1)) as u64);
        }
        loop {
            let (mut sections, mut groups, mut bytes, mut next) = (Vec::new(), Vec::new(), 0, group);
            while next < state.groups() && bytes < RESTORE_BYTES {
                let there = self.section_at(state, &stored.0, next..state.groups());
                let Some(section) = there.section else { break };
                next = there.groups.end;
                bytes += section.place.bytes;
                sections.push(section);
                groups.push(there.groups);
            }
            if sections.is_empty() {
                return Ok(group);
            }
            let read = read_records(&self.store.devices, state.shape().group_tokens as u64, &sections)?;
            for ((section, groups), records) in sections.iter().zip(groups).zip(read) {
                // The caller computes records that failed or are damaged from the keys.
                let Some(records) = records else { return Ok(group) };
                let record = section.place.stored.record_bytes as usize;
                let first = (groups.start - section.place.first_group) as usize * record;
                let own = records.get(first..first + (groups.end - groups.start) as usize * record);
                if !own.is_some_and(|own| summary.restore(own)) {
                    return Ok(group);
                }
                coverage!(SummaryRestored);
                group = groups.end;
            }
        }
    }
}

/// Reads the records of each section, without the header; none if no copy has them undamaged.
///
/// # Errors
/// [`ErrorKind::MemoryLimit`], [`ErrorKind::Busy`]: no buffers.
pub(super) fn read_records(devices: &Devices, group_tokens: u64, sections: &[Section]) -> Result<Vec<Option<Vec<u8>>>> {
    let mut out: Vec<Option<Vec<u8>>> = sections.iter().map(|_| None).collect();
    let copies = sections.iter().map(|section| section.frame.copies()).max().unwrap_or(1);
    for copy in 0..copies {
        let missing: Vec<usize> =
            (0..sections.len()).filter(|at| out[*at].is_none() && copy < sections[*at].frame.copies()).collect();
        let (ranges, skips): (Vec<_>, Vec<_>) = missing
            .iter()
            .map(|at| {
                let Section { frame, place } = &sections[*at];
                let (segment, page, _) = frame.copy(copy);
                let start = u64::from(page) * PAGE_BYTES as u64 + place.offset;
                SegmentRange::pages_around(segment, start, place.bytes as usize)
            })
            .unzip();
        if ranges.is_empty() {
            break;
        }
        let outcomes = match BlockReader::demand(devices).read_each(&ranges) {
            Ok(outcomes) => outcomes,
            // Without memory for records there is none for the keys either.
            Err(e) if matches!(e.kind(), ErrorKind::MemoryLimit | ErrorKind::Busy) => return Err(e),
            Err(_) => continue,
        };
        for ((at, skip), outcome) in missing.iter().zip(&skips).zip(outcomes) {
            let read = outcome.is_ok();
            out[*at] = checked(devices, group_tokens, &sections[*at], *skip, outcome);
            if read && out[*at].is_none() {
                devices.count_checksum_failures(sections[*at].frame.copy(copy).0.key.0, 1);
            }
        }
    }
    Ok(out)
}

/// Returns the records of a section without the header, if they match their checksum.
fn checked(
    devices: &Devices,
    group_tokens: u64,
    Section { frame, place }: &Section,
    skip: usize,
    pages: std::result::Result<Vec<u8>, Error>,
) -> Option<Vec<u8>> {
    let pages = pages.ok()?;
    let bytes = pages.get(skip..skip + place.bytes as usize)?;
    let first_token = place.first_group * group_tokens;
    let tokens = u64::from(place.groups) * group_tokens;
    let identity = PlaneIdentity::new(frame.nonce, frame.origin, KIND_SUMMARY, place.layer, first_token, tokens as u32);
    let good = devices.identity.checksum.compute(&identity, covered(bytes)) == place.checksum;
    good.then(|| bytes.get(place.header_bytes()..).map(<[u8]>::to_vec)).flatten()
}
