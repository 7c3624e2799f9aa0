//! Handing blocks of a prefetch to the read that needs them.

use super::batch::ReadBatch;
use super::progress::Progress;
use super::ticket::ReadTicket;
use crate::cache::{BlockKey, Resident};
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

fn blocks<'a>(view: &'a SelectionInner, part: &'a ReadPart) -> impl Iterator<Item = PrefetchedBlock> + 'a {
    let block = view.layout.block(view.layer);
    let units = view.units[part.units.clone()].iter().zip(part.blocks.iter().zip(&part.resident));
    units.filter_map(|(unit, (at, resident))| {
        let (key, bytes) = (unit.source.key(view.layer)?, unit.bytes(block));
        Some(PrefetchedBlock { key, bytes, is_read: at.is_some(), is_resident: resident.is_some() })
    })
}

impl ReadTicket {
    fn blocks(&self) -> impl Iterator<Item = PrefetchedBlock> + '_ {
        self.parts.iter().flat_map(|part| blocks(&self.views[part.view], part))
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

    /// Takes the blocks that a prefetch has brought. Returns whether it has all of them now.
    pub(crate) fn fill(&mut self, ahead: &ReadBatch) -> bool {
        let brought = ahead.residents();
        let mut complete = true;
        for part in &mut self.parts {
            let view = &self.views[part.view];
            for (nth, unit) in view.units[part.units.clone()].iter().enumerate() {
                if !matches!(unit.source, GroupSource::Disk { .. })
                    || part.blocks[nth].is_some()
                    || part.resident[nth].is_some()
                    || part.shares(nth)
                {
                    continue;
                }
                part.resident[nth] = unit.source.key(view.layer).and_then(|key| brought.get(&key).cloned());
                complete &= part.resident[nth].is_some();
            }
        }
        complete
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

impl ReadBatch {
    /// Returns every block from a device that it holds, of selections without damage.
    fn residents(&self) -> HashMap<BlockKey, Resident> {
        let mut found = HashMap::new();
        for held in &self.parts {
            let (part, view) = (&held.part, &self.views[held.part.view]);
            if self.failures[part.view].is_some() {
                continue;
            }
            let block = view.layout.block(view.layer);
            for (unit, (at, resident)) in
                view.units[part.units.clone()].iter().zip(part.blocks.iter().zip(&part.resident))
            {
                let Some(key) = unit.source.key(view.layer) else { continue };
                let read = at.zip(held.buffer.as_ref());
                let read = read.map(|(at, buffer)| Resident::new(Arc::clone(buffer), at, unit.bytes(block)));
                if let Some(resident) = resident.clone().or(read) {
                    found.insert(key, resident);
                }
            }
        }
        found
    }
}
