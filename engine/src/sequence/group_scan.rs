//! Scanning the blocks of a layer in order, in memory or on devices. Summaries and low-rank keys are built from them.

use super::blocks::{ScanPart, check_block, read_block};
use super::errors::lost_group;
use super::handle::Sequence;
use super::layer::LayerState;
use crate::catalog::Source;
use crate::error::{ErrorKind, Result};
use crate::read::{BlockReader, SegmentRange};

/// The most bytes of blocks that are read at once.
pub(super) const READ_BYTES: usize = 1 << 20;

/// A function that takes a group, its decoded K plane, and its stored block, which may end after the K plane.
pub(super) type Visitor<'a> = dyn FnMut(u64, &[u8], &[u8]) -> Result<()> + 'a;

impl Sequence {
    /// Passes checked blocks to `each`: the sealed groups from `group` on that are stored together, at most a megabyte.
    /// A block is whole for the groups in `whole`, and has at least its K plane for others. Returns the first group
    /// that is left.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`], [`ErrorKind::Io`]: a block that no copy has undamaged. Errors of `each`.
    pub(super) fn visit(&self, state: &LayerState, group: u64, whole: &[u64], each: &mut Visitor<'_>) -> Result<u64> {
        let tokens = self.identity.layout.group_tokens() as u64;
        let mut decoded = Vec::new();
        let mut each = |group: u64, block: &[u8]| {
            let keys = &block[..state.block().key_bytes];
            match state.coder() {
                Some(coder) if coder.encodes(0) => {
                    decoded.resize(coder.plain_bytes(0), 0);
                    coder.decode_plane(0, keys, &mut decoded)?;
                    each(group, &decoded, block)
                }
                _ => each(group, keys, block),
            }
        };
        let lost = || lost_group(group, state.index());
        if let Some(block) = state.building_block(group) {
            each(group, block)?;
            return Ok(group + 1);
        }
        let extent = state.table().find(group).ok_or_else(lost)?;
        if let Source::Memory(run) = &extent.source {
            each(group, run.block((group - extent.first_group) as usize + extent.skip)?)?;
            return Ok(group + 1);
        }
        let end = (extent.first_group + extent.groups as u64).min(state.groups());
        let most = if whole.is_empty() { ScanPart::Keys } else { ScanPart::Block };
        let end = end.min(group + (READ_BYTES / most.bytes(state)).max(1) as u64);
        let mut places = Vec::new();
        for group in group..end {
            let part = if whole.contains(&group) { ScanPart::Block } else { ScanPart::Keys };
            places.push((extent.place(group, state.block(), state.geometry().planes()).ok_or_else(lost)?, part));
        }
        let (ranges, skips): (Vec<_>, Vec<_>) = places
            .iter()
            .map(|(place, part)| SegmentRange::pages_around(&place.frame.segment, place.offset, part.bytes(state)))
            .unzip();
        let read = BlockReader::demand(&self.store.devices).read_each(&ranges)?;
        let read = places.iter().zip(skips.into_iter().zip(read));
        for (((place, part), (skip, pages)), group) in read.zip(group..end) {
            let block = match &pages {
                Ok(pages) => pages.get(skip..skip + part.bytes(state)).unwrap_or_default(),
                Err(_) => &[],
            };
            // A block that failed or is damaged is read by itself, again and from other copies.
            let checked = match pages.as_ref() {
                Ok(_) => check_block(&self.store.devices, state, (group, *part), tokens, (place, 0), block),
                Err(e) => Err(e.duplicate()),
            };
            let again = match checked.inspect_err(|e| self.store.devices.count_damage(place.frame.segment.key.0, e)) {
                Ok(()) => None,
                Err(e) if e.kind() == ErrorKind::Corruption || place.frame.copies() > 1 => {
                    Some(read_block(&self.store.devices, state, (group, *part), tokens, place)?)
                }
                Err(e) => return Err(e),
            };
            each(group, again.as_deref().unwrap_or(block))?;
        }
        Ok(end)
    }
}
