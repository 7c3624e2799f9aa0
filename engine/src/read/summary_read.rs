//! Reads of the records of the summaries of a layer: as blocks are read, on the same devices, copies and buffers.

use super::copy_fallback;
use super::ticket::ReadTicket;
use crate::error::Result;
use crate::io::buffer::arena::Lease;
use crate::io::buffer::slab::SLAB_BYTES;
use crate::io::planted::covered;
use crate::log::Devices;
use crate::plan::SelectionInner;
use crate::plan::{DeviceLoads, ReadPart, ReadPriority, Section, SectionAt, plan_records};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stratakv_format::PlaneIdentity;
use stratakv_format::frame::KIND_SUMMARY;

/// How long records wait for buffers that views and other reads hold.
const BUFFER_WAIT: Duration = Duration::from_secs(10);

/// Records on their way. Dropped, what was not submitted yet is cancelled.
pub(crate) struct RecordsTicket {
    ticket: ReadTicket,
}

/// A section that was read and checked, and where it stands in its buffer.
#[derive(Clone)]
pub(crate) struct ReadSection {
    pub(crate) section: Section,
    pub(crate) buffer: Arc<Lease>,
    pub(crate) at: usize,
}

impl RecordsTicket {
    /// Reads sections for `view`, which has no units, as soon as there are buffers for all of them.
    ///
    /// # Errors
    /// They can never fit in memory.
    pub(crate) fn new(
        devices: &Arc<Devices>,
        view: Arc<SelectionInner>,
        sections: &[Section],
        urgency: ReadPriority<'_>,
    ) -> Result<Self> {
        let parts = plan_records(sections, &DeviceLoads::of(devices));
        let arena = devices.arena.clone();
        let mut ticket = ReadTicket::of_parts(Arc::clone(devices), vec![view], parts, urgency, (arena, false))?;
        ticket.try_submit()?;
        Ok(Self { ticket })
    }

    /// Whether a section can be read so: into one buffer.
    pub(crate) fn fits(section: &Section) -> bool {
        section.read_bytes() <= SLAB_BYTES
    }

    /// Whether it was handed to the devices.
    pub(crate) fn is_submitted(&self) -> bool {
        self.ticket.is_submitted()
    }

    /// What it reads.
    pub(crate) fn sections(&self) -> impl Iterator<Item = &Section> {
        self.ticket.parts.iter().filter_map(|part| part.records.as_ref()).map(|at| &at.section)
    }

    /// Bytes that it takes from devices.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.ticket.device_bytes()
    }

    /// Waits for all of it. What no copy gives as it was written is left out.
    ///
    /// # Errors
    /// The store was closed, or nobody gives buffers back that it needs ([`ErrorKind::Deadline`](crate::ErrorKind::Deadline)).
    pub(crate) fn wait(mut self) -> Result<Vec<ReadSection>> {
        let parts = self.ticket.wait_parts(Instant::now() + BUFFER_WAIT)?;
        let read = |(part, buffer): (ReadPart, Option<Arc<Lease>>)| {
            let SectionAt { section, at } = part.records?;
            Some(ReadSection { section, buffer: buffer?, at })
        };
        Ok(parts.into_iter().filter_map(read).collect())
    }
}

/// Whether the records of a part are what was written, after asking every copy for them.
pub(super) fn check(
    devices: &Devices,
    part: &ReadPart,
    SectionAt { section, at }: &SectionAt,
    group_tokens: usize,
    buffer: &mut Lease,
    deadline: Option<Instant>,
) -> Result<bool> {
    let (frame, place, bytes) = (&section.frame, &section.place, section.bytes());
    let (first, tokens) = (place.first_group * group_tokens as u64, u64::from(place.groups) * group_tokens as u64);
    let identity = PlaneIdentity::new(frame.nonce, frame.origin, KIND_SUMMARY, place.layer, first, tokens as u32);
    let is_bad = |buffer: &Lease| {
        let records = buffer.bytes().and_then(|all| all.get(*at..at + bytes));
        records.is_none_or(|records| devices.identity.checksum.compute(&identity, covered(records)) != place.checksum)
    };
    if !is_bad(buffer) {
        return Ok(true);
    }
    let Some(read) = part.reads.first() else { return Ok(false) };
    if let Ok(device) = devices.get(read.segment.key.0) {
        device.counters.checksum_failures.add(1);
    }
    let wanted = (section.offset(), bytes);
    let target = (buffer, &(0..read.bytes), &(*at..at + bytes));
    copy_fallback::until_good(devices, read, frame, wanted, target, deadline, &is_bad)
}
