//! Reading and attending in one call: each part is verified and attended while it is in the processor's cache, and
//! while the rest is in flight.
//!
//! 1. The calling thread submits all reads on rings of its own, and waits for a quarter of what is in flight at a time.
//! 2. It verifies and attends to each part that has arrived.
//! 3. If calls with the helper were faster, the helper does the same with the second half of the parts.
//! 4. Partials are merged in part order. A partial before its turn is kept.
//!
//! Invariants:
//! - The bits equal the result of [`attend`](super::attend) over the whole batch, in whatever order parts arrive, and
//!   whichever thread attends to them.
//! - At most [`KEPT_MAX`] partials of a selection are kept by a thread. A part beyond that is neither verified nor
//!   attended before its turn.

use super::attend::{AttendOptions, SelectionAttention};
use super::prefetch::ReadTimes;
use super::ticket::ReadTicket;
use crate::attention::Partial;
use crate::error::{Error, ErrorKind, Result};
use crate::events::span;
use crate::io::buffer::lease::Lease;
use crate::io::scheduler::{HelperJob, Waves};
use crate::log::Devices;
use crate::plan::{ReadPart, ReadPriority, SelectionInner};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Instant;

/// The most partials of a selection that a thread keeps before their turn.
const KEPT_MAX: usize = 32;
/// The least bytes to wait for at a time: about one part.
const WAVE_BYTES: usize = 256 << 10;

impl ReadTicket {
    /// Reads selections and attends to each with its query `[q_heads, key_dim]`. Writes `outs`, each `[q_heads,
    /// value_dim]`. All selections are attended, also after an error of one. Returns the bytes read from devices.
    ///
    /// # Errors
    /// The first error in the order of the selections.
    pub(crate) fn attend_blocking(
        devices: &Arc<Devices>,
        selections: Vec<Arc<SelectionInner>>,
        queries: &[&[f32]],
        options: &AttendOptions,
        outs: &mut [&mut [f32]],
    ) -> Result<u64> {
        let ticket = Self::demand(Arc::clone(devices), selections)?;
        let bytes = ticket.device_bytes();
        ticket.attend_here(queries, options, outs, &mut Vec::new())?;
        Ok(bytes)
    }

    /// Submits a demand read on rings of the calling thread, and attends as [`Self::attend_blocking`] does. `times`
    /// gets the times of its reads.
    ///
    /// # Errors
    /// The first error in the order of the selections.
    pub(crate) fn attend_here(
        self,
        queries: &[&[f32]],
        options: &AttendOptions,
        outs: &mut [&mut [f32]],
        times: &mut Vec<ReadTimes>,
    ) -> Result<()> {
        let _span = span!("read");
        let begun = Instant::now();
        let devices = &Arc::clone(&self.devices);
        let (bytes, pace) = (self.device_bytes() as usize, &devices.lanes.helper_pace);
        let (ticket, rest) = match self.may_split() && pace.wants_helper(bytes) {
            true => self.split()?,
            false => (self, None),
        };
        times.extend(std::iter::once(&ticket).chain(&rest).map(Self::times));
        let last = ticket.parts.last().map(|part| part.selection);
        let mut own = ReadShare::new(ticket, None, queries, options)?;
        let rest = rest.map(|rest| ReadShare::new(rest, last, queries, options)).transpose()?;
        let with_helper = rest.is_some();
        let handed = rest.map(|rest| HandedShare::new(devices, rest));
        own.run();
        let rest = handed.map(|handed| handed.finish(devices)).transpose()?;
        let mut shares: Vec<ReadShare> = std::iter::once(own).chain(rest).collect();
        shares.iter_mut().try_for_each(ReadShare::submitted)?;
        let mut first = Ok(());
        for (index, out) in outs.iter_mut().enumerate() {
            first = first.and(finish(&mut shares, index, out));
        }
        pace.took(with_helper, bytes, begun.elapsed());
        first
    }

    /// Returns whether its parts can be read by two threads.
    fn may_split(&self) -> bool {
        let is_own = |part: &ReadPart| part.shared.is_empty() && part.records.is_none();
        self.parts.len() > 1
            && self.parts.iter().all(is_own)
            && !self.may_hedge()
            && self.devices.list.iter().all(|device| device.shard.drives_uring())
    }

    /// Moves the second half of the parts, by bytes, to another ticket. Both have their buffers then. Returns one
    /// ticket if the buffers do not fit into free memory now.
    fn split(mut self) -> Result<(Self, Option<Self>)> {
        let of = |parts| {
            let (devices, selections) = (Arc::clone(&self.devices), self.selections.clone());
            Self::of_parts(devices, selections, parts, ReadPriority::Demand(None), (self.arena.clone(), false))
        };
        let mut parts = std::mem::take(&mut self.parts);
        let half = parts.iter().map(|part| part.buffer_bytes).sum::<usize>() / 2;
        let mut before = 0;
        let is_first = |part: &&ReadPart| {
            before += part.buffer_bytes;
            before <= half
        };
        let cut = parts.iter().take_while(is_first).count().clamp(1, parts.len() - 1);
        let rest = parts.split_off(cut);
        let (mut own, mut rest) = (of(parts)?, of(rest)?);
        // The ticket may have taken its buffers.
        rest.buffers = self.buffers.split_off(cut);
        own.buffers = std::mem::take(&mut self.buffers);
        if own.take_buffers()? && rest.take_buffers()? {
            return Ok((own, Some(rest)));
        }
        let mut parts = std::mem::take(&mut own.parts);
        parts.append(&mut rest.parts);
        Ok((of(parts)?, None))
    }

    /// Returns whether a part has arrived, and the parts that read blocks for it.
    fn has_arrived_with_shared(&self, part: usize) -> bool {
        let mut origins = self.parts[part].shared.iter().map(|(_, origin)| origin.part);
        self.progress.is_done(part) && origins.all(|origin| self.progress.is_done(origin))
    }
}

/// Parts that one thread reads, and attention to them.
struct ReadShare {
    ticket: ReadTicket,
    /// By selection of the ticket.
    selections: Vec<OrderedAttention>,
    outcome: Result<()>,
}

impl ReadShare {
    /// Returns a share. Another share has the first parts of the selection `begun`.
    fn new(ticket: ReadTicket, begun: Option<usize>, queries: &[&[f32]], options: &AttendOptions) -> Result<Self> {
        let mut start = 0;
        let of = |(index, (of, query)): (usize, (&Arc<SelectionInner>, &&[f32]))| {
            // The parts of a selection follow each other.
            let count = ticket.parts[start..].iter().take_while(|part| part.selection == index).count();
            let left = start..start + count;
            start += count;
            let merges = count > 0 && begun != Some(index);
            let attending = SelectionAttention::new(query, of, options)?;
            Ok(OrderedAttention { attending, left, kept: Vec::new(), merges, stopped: false })
        };
        let selections = ticket.selections.iter().zip(queries).enumerate().map(of).collect::<Result<Vec<_>>>()?;
        Ok(Self { ticket, selections, outcome: Ok(()) })
    }

    /// Reads on rings of the calling thread, and attends to what arrives.
    fn run(&mut self) {
        let selections = &mut self.selections;
        let begins = selections.iter().any(|own| own.attending.rebuilds());
        let waves = Waves::Quarters { least: WAVE_BYTES, begins };
        self.outcome = self.ticket.read_on_rings(waves, &mut |ticket| attend_arrived(ticket, selections));
    }

    /// Submits the read if it had no rings or no memory.
    fn submitted(&mut self) -> Result<()> {
        std::mem::replace(&mut self.outcome, Ok(()))?;
        self.ticket.submit_by(None)
    }

    /// Waits for a part of a selection if that is needed, and returns its partial.
    fn partial(&mut self, index: usize, at: usize) -> Result<Partial> {
        let (ticket, own) = (&mut self.ticket, &mut self.selections[index]);
        if let Some(partial) = own.take_kept(at) {
            return Ok(partial);
        }
        own.attending.rebuild(&ticket.parts[at]);
        ticket.complete_part(at, None)?;
        match &ticket.failures[index] {
            Some(e) => Err(e.duplicate()),
            None => own.attending.partial(&ticket.parts[at], ticket.buffers[at].as_deref()),
        }
    }
}

/// Merges the partials of a selection's parts that are left, in order, and writes the output.
fn finish(shares: &mut [ReadShare], index: usize, out: &mut [f32]) -> Result<()> {
    let first = shares.iter().position(|share| share.selections[index].merges).unwrap_or(0);
    let Some((merging, later)) = shares[first..].split_first_mut() else { return Ok(()) };
    for at in merging.selections[index].left.clone() {
        let partial = merging.partial(index, at)?;
        merging.selections[index].attending.merge(partial)?;
    }
    for share in later {
        for at in share.selections[index].left.clone() {
            let partial = share.partial(index, at)?;
            merging.selections[index].attending.merge(partial)?;
        }
    }
    merging.selections[index].attending.finish(out)
}

/// Verifies and attends to the parts that have arrived and may be attended now.
fn attend_arrived(ticket: &mut ReadTicket, selections: &mut [OrderedAttention]) {
    for own in selections {
        for at in own.left.clone() {
            if !own.takes(at) || !ticket.has_arrived_with_shared(at) {
                continue;
            }
            // An error stays until the part's turn, when the call returns it.
            let good = ticket.complete_part(at, None).is_ok() && ticket.failures[ticket.parts[at].selection].is_none();
            if !good || own.add(at, &ticket.parts[at], ticket.buffers[at].as_deref()).is_err() {
                own.stopped = true;
            }
        }
        if let Some(next) = ticket.parts.get(own.left.start).filter(|_| !own.left.is_empty()) {
            own.attending.rebuild(next);
        }
    }
}

/// A share that the helper was asked to read.
struct HandedShare {
    /// The share's job, if the helper does not take it.
    refused: Option<HelperJob>,
    result: Receiver<ReadShare>,
}

impl HandedShare {
    fn new(devices: &Devices, mut share: ReadShare) -> Self {
        let (give, result) = sync_channel(1);
        let job = move || {
            share.run();
            let _ = give.send(share);
        };
        Self { refused: devices.lanes.helper.offer(Box::new(job)).err(), result }
    }

    /// Waits for the share. If the helper has not begun it, the calling thread reads it.
    fn finish(self, devices: &Devices) -> Result<ReadShare> {
        let job = match self.refused {
            Some(job) => Some(job),
            None => devices.lanes.helper.take_back(),
        };
        if let Some(job) = job {
            job();
        }
        self.result.recv().map_err(|_| Error::new(ErrorKind::Io, "attend: the helper thread has panicked"))
    }
}

/// Attention to the parts of one selection, which arrive in any order.
struct OrderedAttention {
    attending: SelectionAttention,
    /// The parts that are not merged.
    left: Range<usize>,
    /// Partials of parts that are not merged.
    kept: Vec<(usize, Partial)>,
    /// True if its first part is the selection's first. Otherwise another share merges, and all partials are kept.
    merges: bool,
    /// True after an error. Nothing is attended before its turn then.
    stopped: bool,
}

impl OrderedAttention {
    fn is_kept(&self, part: usize) -> bool {
        self.kept.iter().any(|(at, _)| *at == part)
    }

    fn take_kept(&mut self, part: usize) -> Option<Partial> {
        let at = self.kept.iter().position(|(at, _)| *at == part)?;
        Some(self.kept.swap_remove(at).1)
    }

    /// Returns whether a part that has arrived may be attended now. Parts with reconstructed keys wait for their turn,
    /// because keys are reconstructed ahead, in part order.
    fn takes(&self, part: usize) -> bool {
        let has_turn = self.merges && part == self.left.start;
        let may_keep = self.kept.len() < KEPT_MAX && !(self.merges && self.attending.rebuilds());
        !self.stopped && self.left.contains(&part) && !self.is_kept(part) && (has_turn || may_keep)
    }

    /// Attends to a part, and merges what has its turn.
    fn add(&mut self, at: usize, part: &ReadPart, buffer: Option<&Lease>) -> Result<()> {
        let partial = self.attending.partial(part, buffer)?;
        self.kept.push((at, partial));
        while self.merges
            && let Some(partial) = self.take_kept(self.left.start)
        {
            self.attending.merge(partial)?;
            self.left.start += 1;
        }
        Ok(())
    }
}
