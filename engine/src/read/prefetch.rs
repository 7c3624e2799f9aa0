//! What a read ahead brings to the read that turns out to be needed.

use super::batch::ReadBatch;
use super::progress::Progress;
use super::ticket::ReadTicket;
use crate::cache::{BlockKey, Resident};
use crate::plan::ReadPart;
use crate::plan::{GroupSource, SelectionInner};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A block on a device that a part stands for.
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

    /// Blocks on devices that it selects, those in a cache included.
    pub(crate) fn selected(&self) -> HashSet<BlockKey> {
        self.blocks().map(|block| block.key).collect()
    }

    /// Blocks that it reads, each with its bytes in the view.
    pub(crate) fn reads(&self) -> HashMap<BlockKey, usize> {
        self.blocks().filter(|block| block.is_read).map(|block| (block.key, block.bytes)).collect()
    }

    /// Blocks that a cache held when it was planned.
    pub(crate) fn resident(&self) -> HashSet<BlockKey> {
        self.blocks().filter(|block| block.is_resident).map(|block| block.key).collect()
    }

    /// Whether it was handed to the devices.
    pub(crate) fn is_submitted(&self) -> bool {
        self.submitted
    }

    /// Takes the blocks that it was told would be brought by a read ahead. Whether it has all of them now.
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

    /// Its times, also when it is gone.
    pub(crate) fn times(&self) -> ReadTimes {
        ReadTimes(Arc::clone(&self.progress))
    }
}

/// How long a read took and held somebody up.
pub(crate) struct ReadTimes(Arc<Progress>);

impl ReadTimes {
    /// From submission to the end of the last part that ended.
    pub(crate) fn at_devices(&self) -> Option<(Instant, Instant)> {
        self.0.times.at_devices()
    }

    /// How long callers have waited for its buffers and its blocks.
    pub(crate) fn waited(&self) -> Duration {
        self.0.times.waited()
    }
}

impl ReadBatch {
    /// Every block from a device that it holds, of views without damage.
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
