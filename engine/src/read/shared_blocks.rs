//! Blocks that several selections of a read have in common. They are read once, for the first selection.

use super::ticket::ReadTicket;
use crate::cache::Resident;
use crate::error::Result;
use crate::plan::ReadPriority;
use std::sync::Arc;
use std::time::Instant;

impl ReadTicket {
    /// Waits for a part and for the parts that read blocks for it, and verifies them. Failures are kept with the
    /// selection.
    ///
    /// # Errors
    /// [`ErrorKind::Deadline`](crate::ErrorKind::Deadline): it passed.
    pub(super) fn complete_part(&mut self, index: usize, deadline: Option<Instant>) -> Result<()> {
        for at in 0..self.parts[index].shared.len() {
            let origin = self.parts[index].shared[at].1.part;
            self.wait_part(origin, deadline)?;
            self.verify_part(origin, deadline)?;
        }
        self.wait_part(index, deadline)?;
        self.verify_part(index, deadline)?;
        self.take_shared(index, deadline)
    }

    /// Takes the verified blocks that other parts have read for a part.
    fn take_shared(&mut self, index: usize, deadline: Option<Instant>) -> Result<()> {
        let shared = std::mem::take(&mut self.parts[index].shared);
        let selection = self.parts[index].selection;
        if shared.is_empty() || self.failures[selection].is_some() {
            return Ok(());
        }
        if let Some((_, origin)) = shared.iter().find(|(_, origin)| !self.is_good(origin.part)) {
            // The bad block there may not be one of this selection.
            return self.read_by_itself(selection, self.parts[origin.part].selection, deadline);
        }
        let bytes = |nth: usize| {
            let own = &self.selections[selection];
            own.groups[self.parts[index].groups.start + nth].bytes(own.layout.block(own.layer))
        };
        let taken: Vec<(usize, Option<Resident>)> = shared
            .iter()
            .map(|(nth, origin)| {
                let at = self.parts[origin.part].blocks.get(origin.nth).copied().flatten();
                let buffer = at.zip(self.buffers[origin.part].as_ref());
                (*nth, buffer.map(|(at, buffer)| Resident::new(Arc::clone(buffer), at, bytes(*nth))))
            })
            .collect();
        let part = &mut self.parts[index];
        taken.into_iter().for_each(|(nth, resident)| part.resident[nth] = resident);
        Ok(())
    }

    /// Reads a selection by itself. Without buffers for that it gets the error of the selection that read for it.
    fn read_by_itself(&mut self, selection: usize, other: usize, deadline: Option<Instant>) -> Result<()> {
        let selections = vec![Arc::clone(&self.selections[selection])];
        let place = (self.arena.clone(), self.in_region);
        let own = Self::prepare(Arc::clone(&self.devices), selections, ReadPriority::Demand(None), place);
        let submitted = own.and_then(|mut own| Ok(own.try_submit()?.then_some(own)));
        let Ok(Some(mut own)) = submitted else {
            self.failures[selection] = self.failures[other].as_ref().map(crate::error::Error::duplicate);
            return Ok(());
        };
        for part in 0..own.parts.len() {
            own.complete_part(part, deadline)?;
        }
        self.failures[selection] = own.failures[0].take();
        // A selection is always cut into the same parts.
        let parts = std::mem::take(&mut own.parts).into_iter().zip(std::mem::take(&mut own.buffers));
        let places: Vec<usize> = (0..self.parts.len()).filter(|at| self.parts[*at].selection == selection).collect();
        for (at, (part, buffer)) in places.into_iter().zip(parts) {
            self.parts[at] = crate::plan::ReadPart { selection, ..part };
            self.buffers[at] = buffer;
            self.verified[at] = Some(true);
        }
        Ok(())
    }

    fn is_good(&self, part: usize) -> bool {
        self.verified[part] == Some(true)
    }
}
