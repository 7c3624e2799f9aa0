//! Reads of summary records, through the path of blocks: the same devices, copies and buffers.

use super::ticket::ReadTicket;
use crate::error::Result;
use crate::io::buffer::SLAB_BYTES;
use crate::io::buffer::lease::Lease;
use crate::log::Devices;
use crate::plan::SelectionInner;
use crate::plan::{DeviceLoads, ReadPart, ReadPriority, Section, SectionAt, plan_records};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long records wait for buffers that selections and other reads hold.
const BUFFER_WAIT: Duration = Duration::from_secs(10);

/// A read of records. Dropping it cancels what was not submitted yet.
pub(crate) struct RecordsTicket {
    ticket: ReadTicket,
}

/// A verified section and its place in its buffer.
#[derive(Clone)]
pub(crate) struct ReadSection {
    pub(crate) section: Section,
    pub(crate) buffer: Arc<Lease>,
    pub(crate) at: usize,
}

impl RecordsTicket {
    /// Reads sections for `selection`, which has no groups, as soon as there are buffers for all of them.
    ///
    /// # Errors
    /// They can never fit in memory.
    pub(crate) fn new(
        devices: &Arc<Devices>,
        selection: Arc<SelectionInner>,
        sections: &[Section],
        priority: ReadPriority<'_>,
    ) -> Result<Self> {
        let parts = plan_records(sections, &DeviceLoads::of(devices));
        let arena = devices.arena.clone();
        let mut ticket = ReadTicket::of_parts(Arc::clone(devices), vec![selection], parts, priority, (arena, false))?;
        ticket.try_submit()?;
        Ok(Self { ticket })
    }

    /// Returns whether a section fits in one buffer.
    pub(crate) fn fits(section: &Section) -> bool {
        section.read_bytes() <= SLAB_BYTES
    }

    /// Returns whether it was submitted.
    pub(crate) fn is_submitted(&self) -> bool {
        self.ticket.is_submitted()
    }

    /// Returns the sections that it reads.
    pub(crate) fn sections(&self) -> impl Iterator<Item = &Section> {
        self.ticket.parts.iter().filter_map(|part| part.records.as_ref()).map(|at| &at.section)
    }

    /// Returns the bytes that it reads from devices.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.ticket.device_bytes()
    }

    /// Waits for all sections. Sections without a good copy are left out.
    ///
    /// # Errors
    /// The store was closed, or no buffers became free in time ([`ErrorKind::Deadline`](crate::ErrorKind::Deadline)).
    pub(crate) fn wait(mut self) -> Result<Vec<ReadSection>> {
        let parts = self.ticket.wait_parts(Instant::now() + BUFFER_WAIT)?;
        let read = |(part, buffer): (ReadPart, Option<Arc<Lease>>)| {
            let SectionAt { section, at } = part.records?;
            Some(ReadSection { section, buffer: buffer?, at })
        };
        Ok(parts.into_iter().filter_map(read).collect())
    }
}
