//! Handing blocks of a prefetch to the read that needs them.

use super::attend::AttendOptions;
use super::progress::Progress;
use super::ticket::ReadTicket;
use crate::cache::{BlockKey, Resident};
use crate::error::Result;
use crate::plan::ReadPart;
use crate::plan::{GroupSource, SelectionInner};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A block on a device that a part covers.
struct PrefetchedBlock {
    key: BlockKey,
    bytes: usize,
    is_read: bool,
    is_resident: bool,
}

fn blocks<'a>(selection: &'a SelectionInner, part: &'a ReadPart) -> impl Iterator<Item = PrefetchedBlock> + 'a {
    let block = selection.layout.block(selection.layer);
    let groups = selection.groups[part.groups.clone()].iter().zip(part.blocks.iter().zip(&part.resident));
    groups.filter_map(|(group, (at, resident))| {
        let key = group.source.key(selection.layer).filter(|_| group.is_needed())?;
        let bytes = group.bytes(block);
        Some(PrefetchedBlock { key, bytes, is_read: at.is_some(), is_resident: resident.is_some() })
    })
}

impl ReadTicket {
    fn blocks(&self) -> impl Iterator<Item = PrefetchedBlock> + '_ {
        self.parts.iter().flat_map(|part| blocks(&self.selections[part.selection], part))
    }

    /// Returns the selected blocks on devices, also those in a cache.
    pub(crate) fn selected(&self) -> HashSet<BlockKey> {
        self.blocks().map(|block| block.key).collect()
    }

    /// Returns the blocks that it reads, each with its bytes.
    pub(crate) fn reads(&self) -> HashMap<BlockKey, usize> {
        self.blocks().filter(|block| block.is_read).map(|block| (block.key, block.bytes)).collect()
    }

    /// Returns the blocks that a cache held when it was planned.
    pub(crate) fn resident(&self) -> HashSet<BlockKey> {
        self.blocks().filter(|block| block.is_resident).map(|block| block.key).collect()
    }

    /// Returns whether it was submitted.
    pub(crate) fn is_submitted(&self) -> bool {
        self.submitted
    }

    /// Takes what a prefetch brings of a part's blocks. It waits for these blocks and verifies them. Returns whether
    /// the part has all of its blocks then.
    fn take_prefetched(&mut self, part: usize, prefetched: &mut PrefetchedBlocks) -> Result<bool> {
        let part = &mut self.parts[part];
        let selection = &self.selections[part.selection];
        for (nth, group) in selection.groups[part.groups.clone()].iter().enumerate() {
            if !group.is_needed()
                || !matches!(group.source, GroupSource::Disk { .. })
                || part.blocks[nth].is_some()
                || part.resident[nth].is_some()
                || part.shares(nth)
            {
                continue;
            }
            let Some(key) = group.source.key(selection.layer) else { return Ok(false) };
            part.resident[nth] = prefetched.take(&key)?;
            if part.resident[nth].is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Attends as [`Self::attend`] does. Before each part it takes the part's prefetched blocks, so that they are
    /// verified and attended while they are in the processor's cache. Returns false, and leaves `out` as it is, if the
    /// prefetch did not bring a block that is needed.
    pub(crate) fn attend_prefetched(
        &mut self,
        prefetched: &mut PrefetchedBlocks,
        (index, query): (usize, &[f32]),
        options: &AttendOptions,
        out: &mut [f32],
    ) -> Result<bool> {
        self.submit_by(None)?;
        self.attend_parts((index, query), options, out, &mut |ticket, part| ticket.take_prefetched(part, prefetched))
    }

    /// Returns its times, which outlive it.
    pub(crate) fn times(&self) -> ReadTimes {
        ReadTimes(Arc::clone(&self.progress))
    }
}

/// How long a read took, and how long callers waited for it.
pub(crate) struct ReadTimes(Arc<Progress>);

impl ReadTimes {
    /// Returns the submission and the end of the last part that has ended.
    pub(crate) fn at_devices(&self) -> Option<(Instant, Instant)> {
        self.0.times.at_devices()
    }

    /// Returns how long callers have waited for its buffers and blocks.
    pub(crate) fn waited(&self) -> Duration {
        self.0.times.waited()
    }
}

/// The blocks of a prefetch. Each part of it is verified when its first block is taken.
pub(crate) struct PrefetchedBlocks {
    ticket: ReadTicket,
    /// The part of each block, and the group's index within it.
    places: HashMap<BlockKey, (usize, usize)>,
}

impl PrefetchedBlocks {
    pub(crate) fn new(ticket: ReadTicket) -> Self {
        let mut places = HashMap::new();
        for (at, part) in ticket.parts.iter().enumerate() {
            let selection = &ticket.selections[part.selection];
            let groups = selection.groups[part.groups.clone()].iter().enumerate();
            let keys = groups.filter_map(|(nth, group)| Some((group.source.key(selection.layer)?, (at, nth))));
            places.extend(keys);
        }
        Self { ticket, places }
    }

    /// Returns a verified block, or `None` if it was not read or is damaged.
    fn take(&mut self, key: &BlockKey) -> Result<Option<Resident>> {
        let Some(&(at, nth)) = self.places.get(key) else { return Ok(None) };
        self.ticket.complete_part(at, None)?;
        let (part, buffer) = (&self.ticket.parts[at], &self.ticket.buffers[at]);
        if self.ticket.failures[part.selection].is_some() {
            return Ok(None);
        }
        let selection = &self.ticket.selections[part.selection];
        let bytes = selection.groups[part.groups.start + nth].bytes(selection.layout.block(selection.layer));
        let read = part.blocks[nth].zip(buffer.as_ref());
        let read = read.map(|(at, buffer)| Resident::new(Arc::clone(buffer), at, bytes));
        Ok(part.resident[nth].clone().or(read))
    }

    /// Verifies the parts that no block was taken of if a cache takes their blocks. Returns the read's times.
    pub(crate) fn finish(mut self) -> ReadTimes {
        for part in 0..self.ticket.parts.len() {
            let is_cached = self.ticket.selections[self.ticket.parts[part].selection].cache.is_some();
            // A prefetch that fails is not an error of the step.
            let _ = is_cached.then(|| self.ticket.complete_part(part, None));
        }
        self.ticket.times()
    }
}
