//! The ticket of a read: wait for it, poll it, await it, or attend to its parts as they arrive.
//!
//! 1. [`plan`] cuts selections into parts and chooses copies.
//! 2. Buffers for all parts are taken at once. A read never holds half of its buffers while it waits for the other
//!    half.
//! 3. One batch per device is submitted.
//! 4. Each part is verified when it has arrived: failed reads and wrong checksums fall back to other copies, late parts
//!    are hedged.
//!
//! Invariants:
//! - A buffer is shared only after its part is verified, because no read writes into it then.
//! - Dropping the ticket cancels requests that were not submitted. A buffer in flight returns to the arena with its
//!   last request.

use super::attend::{AttendOptions, SelectionAttention};
use super::batch::{PartBuffer, ReadBatch};
use super::block_reader::{DeviceBatches, submit_batches};
use super::errors::wrong_selection;
use super::progress::Progress;
use super::state::{Hedges, request};
use super::{copy_fallback, decode_check, verify};
use crate::error::{Error, ErrorKind, Result};
use crate::events::span;
use crate::io::buffer::PAGE_BYTES;
use crate::io::buffer::SLAB_BYTES;
use crate::io::buffer::arena::{Arena, LeaseError};
use crate::io::buffer::lease::Lease;
use crate::io::buffer::region::ReadRegion;
use crate::io::scheduler::{Batch, Priority, Request, Sink, ThreadRingBatch, Waves};
use crate::log::{CONTROL_BYTES, Devices, exhausted};
use crate::metrics::Category;
use crate::plan::{DeviceLoads, ReadPart, ReadPriority, plan};
use crate::plan::{Selection, SelectionInner};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// How long a read that waits for memory sleeps, at most, before it checks again whether memory can come back.
const RECHECK: Duration = Duration::from_millis(5);

/// A read in flight. [`ReadTicket::wait`] for all of it, `.await` it, or [`ReadTicket::attend`] to its selections as
/// their blocks arrive.
///
/// A read that does not fit in free memory is submitted as soon as it does. Dropping the ticket cancels what was not
/// submitted. The last poll verifies everything, and waits for blocks that must be read again.
pub struct ReadTicket {
    pub(super) devices: Arc<Devices>,
    /// The source of its buffers: the store's arena or a region of the embedder.
    pub(super) arena: Arena,
    pub(super) in_region: bool,
    pub(super) selections: Vec<Arc<SelectionInner>>,
    pub(super) parts: Vec<ReadPart>,
    /// The buffer of each part.
    pub(super) buffers: Vec<Option<Arc<Lease>>>,
    /// For each verified part: true if all its blocks are good.
    pub(super) verified: Vec<Option<bool>>,
    pub(super) failures: Vec<Option<Error>>,
    pub(super) progress: Arc<Progress>,
    pub(super) hedges: Hedges,
    cancel: Arc<AtomicBool>,
    pub(super) submitted: bool,
    priority: Priority,
}

impl ReadTicket {
    pub(crate) fn new(
        devices: Arc<Devices>,
        selections: Vec<Arc<SelectionInner>>,
        priority: ReadPriority<'_>,
    ) -> Result<Self> {
        let _span = span!("read");
        let arena = devices.arena.clone();
        let mut ticket = Self::prepare(devices, selections, priority, (arena, false))?;
        ticket.try_submit()?;
        Ok(ticket)
    }

    /// Starts a read into a region.
    pub(crate) fn into_region(
        devices: Arc<Devices>,
        selections: Vec<Arc<SelectionInner>>,
        priority: ReadPriority<'_>,
        region: &ReadRegion,
    ) -> Result<Self> {
        let _span = span!("read");
        let mut ticket = Self::prepare(devices, selections, priority, (region.arena.clone(), true))?;
        ticket.try_submit()?;
        Ok(ticket)
    }

    /// Plans a demand read into the store's memory, without submitting it.
    pub(crate) fn demand(devices: Arc<Devices>, selections: Vec<Arc<SelectionInner>>) -> Result<Self> {
        let arena = devices.arena.clone();
        Self::prepare(devices, selections, ReadPriority::Demand(None), (arena, false))
    }

    pub(super) fn prepare(
        devices: Arc<Devices>,
        selections: Vec<Arc<SelectionInner>>,
        priority: ReadPriority<'_>,
        place: (Arena, bool),
    ) -> Result<Self> {
        let parts = plan(&selections, priority, &DeviceLoads::of(&devices));
        Self::of_parts(devices, selections, parts, priority, place)
    }

    /// Prepares a read of these parts.
    pub(super) fn of_parts(
        devices: Arc<Devices>,
        selections: Vec<Arc<SelectionInner>>,
        parts: Vec<ReadPart>,
        priority: ReadPriority<'_>,
        (arena, in_region): (Arena, bool),
    ) -> Result<Self> {
        let bound = if in_region { "the region has" } else { "memory_limit allows" };
        let needed: usize = parts.iter().map(|part| part.buffer_bytes).sum();
        let limit = arena.slabs_max() * SLAB_BYTES;
        // Gathered groups stay in memory until their sequences commit, which may wait for this read.
        let gathered = if in_region { 0 } else { devices.gathering.used() };
        if needed + gathered.next_multiple_of(SLAB_BYTES) > limit {
            let beside = if gathered > 0 {
                format!(", next to {gathered} bytes of groups that sequences gather")
            } else {
                String::new()
            };
            let text =
                format!("read: {needed} bytes can never fit in the {limit} bytes of buffers that {bound}{beside}");
            return Err(Error::new(ErrorKind::MemoryLimit, text));
        }
        let progress = Progress::new(&devices, &parts);
        Ok(Self {
            buffers: parts.iter().map(|_| None).collect(),
            verified: vec![None; parts.len()],
            failures: selections.iter().map(|_| None).collect(),
            arena,
            in_region,
            devices,
            selections,
            parts,
            progress,
            hedges: Hedges::default(),
            cancel: Arc::default(),
            submitted: false,
            priority: if priority.is_ahead() { Priority::Prefetch } else { Priority::Demand },
        })
    }

    /// Reads on the calling thread if it can drive the devices itself, otherwise through their threads, and waits.
    pub(crate) fn read_blocking(devices: Arc<Devices>, selections: Vec<Arc<SelectionInner>>) -> Result<ReadBatch> {
        let _span = span!("read");
        let mut ticket = Self::demand(devices, selections)?;
        let mut waiting: Vec<usize> = (0..ticket.parts.len()).collect();
        // Each part is verified while the rest is in flight.
        ticket.read_on_rings(Waves::Halves, &mut |ticket| {
            waiting.retain(|&part| {
                let done = ticket.progress.is_done(part);
                // Without a deadline the call cannot fail.
                done.then(|| ticket.verify_part(part, None)).is_none()
            });
        })?;
        ticket.wait()
    }

    /// Reads on rings of the calling thread, if it can drive the devices itself. `step` runs after each wave of
    /// completions. Without rings, or without free memory, nothing has arrived when this returns.
    pub(super) fn read_on_rings(&mut self, waves: Waves, step: &mut dyn FnMut(&mut Self)) -> Result<()> {
        // Reads that may be hedged go through the device threads, so that this thread can react to late parts.
        if self.may_hedge() || !self.take_buffers()? {
            return Ok(());
        }
        let devices = Arc::clone(&self.devices);
        let mut batches = Vec::new();
        for (device, requests) in self.requests_by_device() {
            let shard = &devices.get(device)?.shard;
            batches.push(ThreadRingBatch { device: usize::from(device.0), shard, requests });
        }
        let progress = Arc::clone(&self.progress);
        progress.times.begun();
        self.submitted = true;
        let (begun, mut stepped) = (Instant::now(), Duration::ZERO);
        let mut timed_step = || {
            let begun = Instant::now();
            step(self);
            stepped += begun.elapsed();
        };
        let left = devices.lanes.read(batches, waves, &*progress, &mut timed_step).err().unwrap_or_default();
        progress.times.waited_for(begun.elapsed().saturating_sub(stepped));
        for ThreadRingBatch { shard, requests, .. } in left {
            let sink = Arc::clone(&progress) as Arc<dyn Sink>;
            shard.submit_wait(Batch { requests, priority: Priority::Demand, sink, cancel: None });
        }
        Ok(())
    }

    /// Returns the bytes that it reads from devices, in their read units: mostly 512 bytes, on some devices whole
    /// pages.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.buffer_bytes as u64).sum()
    }

    /// Returns the bytes of the selected blocks on devices. [`Self::device_bytes`] exceeds them by read units and by
    /// gaps that cost less than another request.
    #[must_use]
    pub fn selected_bytes(&self) -> u64 {
        let of = |part: &ReadPart| -> u64 {
            let selection = &self.selections[part.selection];
            let groups = selection.groups[part.groups.clone()].iter().zip(&part.blocks);
            let read = groups.filter(|(_, at)| at.is_some());
            let groups: u64 = read.map(|(group, _)| group.bytes(selection.layout.block(selection.layer)) as u64).sum();
            let pages = selection.pages[part.pages.clone()].iter().zip(&part.blocks).filter(|(_, at)| at.is_some());
            groups + pages.map(|(page, _)| page.bytes() as u64).sum::<u64>()
        };
        self.parts.iter().map(of).sum()
    }

    /// Returns how many requests it has.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.parts.iter().map(|part| part.reads.len()).sum()
    }

    /// Returns whether everything has arrived, without waiting.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.submitted && self.all_arrived()
    }

    /// Takes buffers for all parts and submits one batch per device. Returns false if the buffers do not fit in free
    /// memory now.
    pub(crate) fn try_submit(&mut self) -> Result<bool> {
        if self.submitted {
            return Ok(true);
        }
        if !self.take_buffers()? {
            return Ok(false);
        }
        let batches = self.requests_by_device();
        self.submitted = true;
        self.progress.times.begun();
        let sink = Arc::clone(&self.progress) as Arc<dyn Sink>;
        submit_batches(&self.devices, batches, self.priority, &sink, Some(&self.cancel))?;
        Ok(true)
    }

    /// Takes buffers for all parts, or none of them and returns false.
    ///
    /// # Errors
    /// [`ErrorKind::InUse`]: another process opened the store. [`ErrorKind::MemoryLimit`]: they can never fit.
    pub(crate) fn take_buffers(&mut self) -> Result<bool> {
        self.devices.check_process()?;
        if self.buffers.iter().any(Option::is_some) {
            return Ok(true);
        }
        let lens: Vec<usize> = self.parts.iter().map(|part| part.buffer_bytes).filter(|bytes| *bytes > 0).collect();
        match self.arena.lease_all(&lens) {
            Ok(leases) => {
                let mut leases = leases.into_iter();
                let places = self.buffers.iter_mut().zip(&self.parts).filter(|(_, part)| part.buffer_bytes > 0);
                places.for_each(|(buffer, _)| *buffer = leases.next().map(Arc::new));
                Ok(true)
            }
            Err(LeaseError::Now) => Ok(false),
            Err(other) => Err(exhausted(other, lens.into_iter().max().unwrap_or_default())),
        }
    }

    /// Returns the requests of all parts by device. A read that cannot be requested counts as failed.
    fn requests_by_device(&mut self) -> DeviceBatches {
        let total = self.requests();
        self.progress.submitted();
        self.progress.times.begun();
        let mut batches = DeviceBatches::new();
        for (index, (part, buffer)) in self.parts.iter().zip(&mut self.buffers).enumerate() {
            let Some(buffer) = buffer.as_mut().and_then(Arc::get_mut) else { continue };
            let tags = self.progress.first_tag(index)..;
            for (read, tag) in part.reads.iter().zip(tags) {
                match request(&self.devices, read, buffer) {
                    Ok((device, op)) => {
                        let batch = batches.entry(device).or_insert_with(|| Vec::with_capacity(total));
                        batch.push(Request { op, tag });
                    }
                    Err(e) => self.progress.complete(tag, Err(e)),
                }
            }
        }
        batches
    }

    /// Checks, after a failed attempt, whether waiting for buffers can help. Returns whether the read was submitted
    /// after all.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]: no other read holds buffers, or it would not fit without them either.
    fn can_ever_fit(&mut self) -> Result<bool> {
        if self.others_hold() && !self.is_crowded_out() {
            return Ok(false);
        }
        // A buffer may have come back in between.
        if self.try_submit()? {
            return Ok(true);
        }
        if self.others_hold() && !self.is_crowded_out() {
            return Ok(false);
        }
        let (bytes, used) = (self.device_bytes(), self.devices.budget.used());
        let text = match self.in_region {
            true => format!(
                "read: {bytes} bytes do not fit in the region; no part may cross two slabs, so make the region larger"
            ),
            false => {
                format!("read: {bytes} bytes do not fit next to {used} bytes in use; raise memory_limit or select less")
            }
        };
        Err(Error::new(ErrorKind::MemoryLimit, text))
    }

    /// Returns whether other reads hold buffers that will come back.
    fn others_hold(&self) -> bool {
        self.arena.usage().leased_bytes > if self.in_region { 0 } else { CONTROL_BYTES }
    }

    /// Returns whether it would not fit even if every other read returned its buffers, because of sequences, tables and
    /// caches.
    fn is_crowded_out(&self) -> bool {
        if self.in_region {
            return false;
        }
        let usage = self.devices.budget.usage();
        let beside = usage.categories.iter().filter(|of| of.category != Category::Arena);
        let free = usage.limit_bytes.saturating_sub(beside.map(|of| of.used_bytes).sum());
        let slabs = (free / SLAB_BYTES).min(self.arena.slabs_max());
        let needed: usize = self.parts.iter().map(|part| part.buffer_bytes.next_multiple_of(PAGE_BYTES)).sum();
        needed + CONTROL_BYTES + self.devices.gathering.used() > slabs * SLAB_BYTES
    }

    /// Submits the read, waiting for memory until the deadline.
    pub(super) fn submit_by(&mut self, deadline: Option<Instant>) -> Result<()> {
        if self.try_submit()? {
            return Ok(());
        }
        let progress = Arc::clone(&self.progress);
        let _waiting = progress.times.wait();
        loop {
            let seen = self.arena.returned().epoch();
            if self.try_submit()? || self.can_ever_fit()? {
                return Ok(());
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Err(Error::new(ErrorKind::Deadline, "read: the deadline passed before buffers became free"));
            }
            let until = deadline.map_or(now + RECHECK, |deadline| deadline.min(now + RECHECK));
            self.arena.returned().wait_past(seen, Some(until));
        }
    }

    /// Waits for everything and verifies it. A damaged selection does not hide the others: see [`ReadBatch::get`].
    ///
    /// # Errors
    /// The store was closed, or the read can never fit in memory. [`ErrorKind::InUse`]: the read is of a parent of this
    /// process. [`ReadBatch::get`] returns the error of a single selection.
    pub fn wait(self) -> Result<ReadBatch> {
        self.wait_deadline(None)
    }

    /// Waits as [`Self::wait`] does, until `deadline` at the latest.
    ///
    /// # Errors
    /// The errors of [`Self::wait`]. [`ErrorKind::Deadline`]: the deadline passed, and the read is cancelled.
    pub fn wait_deadline(mut self, deadline: Option<Instant>) -> Result<ReadBatch> {
        self.submit_by(deadline)?;
        for part in 0..self.parts.len() {
            self.complete_part(part, deadline)?;
        }
        Ok(self.into_batch())
    }

    /// Waits for all parts and returns the good ones. Buffers must become free by `buffers_by`.
    pub(super) fn wait_parts(&mut self, buffers_by: Instant) -> Result<Vec<(ReadPart, Option<Arc<Lease>>)>> {
        self.submit_by(Some(buffers_by))?;
        for part in 0..self.parts.len() {
            self.complete_part(part, None)?;
        }
        let parts = std::mem::take(&mut self.parts).into_iter().zip(std::mem::take(&mut self.buffers));
        Ok(parts.zip(&self.verified).filter(|(_, good)| **good == Some(true)).map(|(part, _)| part).collect())
    }

    /// Returns whether a part has arrived, from its own copy or from another one.
    fn has_arrived(&self, part: usize) -> bool {
        self.verified[part].is_some() || self.hedges.won(part) || self.progress.is_done(part)
    }

    fn all_arrived(&self) -> bool {
        (0..self.parts.len()).all(|part| self.has_arrived(part))
    }

    /// Waits for a part. A late part is hedged.
    ///
    /// # Errors
    /// [`ErrorKind::Deadline`]: the deadline passed. [`ErrorKind::InUse`]: the read is of a parent of this process.
    pub(super) fn wait_part(&mut self, part: usize, deadline: Option<Instant>) -> Result<()> {
        if self.has_arrived(part) {
            return Ok(());
        }
        self.devices.check_process()?;
        let progress = Arc::clone(&self.progress);
        let _waiting = progress.times.wait();
        let late = || Error::new(ErrorKind::Deadline, "read: the deadline passed before it was complete");
        if let Some(hedge) = self.hedge_at(part)
            && !self.arrives(part, Some(deadline.map_or(hedge, |deadline| deadline.min(hedge))))
        {
            if deadline.is_some_and(|deadline| deadline <= hedge) {
                return Err(late());
            }
            self.hedge(part, deadline);
        }
        if self.hedges.won(part) || self.arrives(part, deadline) { Ok(()) } else { Err(late()) }
    }

    /// Returns whether a part arrives by the deadline.
    pub(super) fn arrives(&self, part: usize, deadline: Option<Instant>) -> bool {
        loop {
            let seen = self.progress.changed.epoch();
            if self.progress.is_done(part) {
                return true;
            }
            if !self.progress.changed.wait_past(seen, deadline) {
                return self.progress.is_done(part);
            }
        }
    }

    /// Verifies a part that has arrived. Failures are kept with its selection.
    ///
    /// # Errors
    /// [`ErrorKind::Deadline`]: the deadline passed while a block was read again.
    pub(super) fn verify_part(&mut self, index: usize, deadline: Option<Instant>) -> Result<()> {
        if self.verified[index].is_some() {
            return Ok(());
        }
        self.verified[index] = Some(false);
        let won = self.hedges.won(index);
        let mut failed = if won { Vec::new() } else { self.progress.take_errors(index) };
        // Failed parts ended early, and hedged parts are counted when they are won. Neither is a latency.
        let took = self.progress.took(index).filter(|_| !won && failed.is_empty());
        if !failed.is_empty() && self.around(index, &failed, deadline) {
            failed = Vec::new();
        }
        if !self.parts[index].pages.is_empty() {
            took.into_iter().for_each(|took| self.devices.latencies.add(took));
            return self.verify_pages(index, &failed, deadline);
        }
        let part = &self.parts[index];
        let selection = &self.selections[part.selection];
        let outcome = match self.buffers[index].as_mut().and_then(Arc::get_mut) {
            None => Ok(()),
            Some(buffer) => {
                let recovered = match failed.is_empty() {
                    true => Ok(()),
                    false => copy_fallback::recover(&self.devices, part, failed, buffer, deadline),
                };
                let good = |buffer: &mut Lease| match &part.records {
                    None => verify::part(&self.devices, selection, part, buffer, deadline),
                    Some(at) => verify::records(&self.devices, selection, part, at, buffer, deadline),
                };
                recovered
                    .and_then(|()| good(buffer))
                    .and_then(|()| decode_check::part(&self.devices, selection, part, buffer))
            }
        };
        if let Some(took) = took {
            self.devices.latencies.add(took);
        }
        match outcome {
            Err(e) if e.kind() == ErrorKind::Deadline => return Err(e),
            Err(e) => {
                self.failures[part.selection].get_or_insert(e);
            }
            Ok(()) => self.verified[index] = Some(true),
        }
        Ok(())
    }

    /// Returns a read into the first buffer that does not end while this is held.
    #[cfg(test)]
    pub(crate) fn never_ends(&mut self) -> Option<crate::io::buffer::lease::ReadTarget> {
        Arc::get_mut(self.buffers.iter_mut().flatten().next()?)?.read_target(0..PAGE_BYTES).ok()
    }

    fn into_batch(mut self) -> ReadBatch {
        let buffers = std::mem::take(&mut self.buffers);
        let parts = std::mem::take(&mut self.parts).into_iter().zip(buffers);
        ReadBatch::new(
            std::mem::take(&mut self.selections),
            parts.map(|(part, buffer)| PartBuffer { part, buffer }).collect(),
            std::mem::take(&mut self.failures),
        )
    }

    /// Attends with `query` `[q_heads, key_dim]` to selection `index` of the read, which must be `selection`, part by
    /// part as blocks arrive. Writes `out` `[q_heads, value_dim]`. The bits equal the result of
    /// [`attend`](crate::attend) over the whole batch.
    ///
    /// # Errors
    /// The errors of [`attend`](crate::attend). [`ErrorKind::Corruption`], [`ErrorKind::Io`]: the selection could not
    /// be read.
    pub fn attend(
        &mut self,
        index: usize,
        query: &[f32],
        selection: &Selection,
        options: &AttendOptions,
        out: &mut [f32],
    ) -> Result<()> {
        match self.selections.get(index) {
            Some(own) if Arc::ptr_eq(own, &selection.inner) => {}
            _ => return Err(wrong_selection(index)),
        }
        self.submit_by(None)?;
        self.attend_parts((index, query), options, out, &mut |_, _| Ok(true)).map(drop)
    }

    /// Attends to the parts of a selection in order. `before` runs before each part. If it returns false, attention
    /// ends without an output, and so does this.
    pub(super) fn attend_parts(
        &mut self,
        (index, query): (usize, &[f32]),
        options: &AttendOptions,
        out: &mut [f32],
        before: &mut dyn FnMut(&mut Self, usize) -> Result<bool>,
    ) -> Result<bool> {
        let mut attending = SelectionAttention::new(query, &self.selections[index], options)?;
        for at in 0..self.parts.len() {
            if self.parts[at].selection != index {
                continue;
            }
            attending.rebuild(&self.parts[at]);
            self.complete_part(at, None)?;
            if let Some(e) = &self.failures[index] {
                return Err(e.duplicate());
            }
            if !before(self, at)? {
                return Ok(false);
            }
            attending.part(&self.parts[at], self.buffers[at].as_deref())?;
        }
        attending.finish(out)?;
        Ok(true)
    }
}

impl Future for ReadTicket {
    type Output = Result<ReadBatch>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        loop {
            let seen = this.arena.returned().epoch();
            match this.try_submit() {
                Err(e) => return Poll::Ready(Err(e)),
                Ok(true) => break,
                Ok(false) => {
                    match this.can_ever_fit() {
                        Err(e) => return Poll::Ready(Err(e)),
                        Ok(true) => break,
                        Ok(false) => {}
                    }
                    if this.arena.returned().wake_past(seen, context.waker()) {
                        return Poll::Pending;
                    }
                }
            }
        }
        loop {
            let seen = this.progress.changed.epoch();
            if this.all_arrived() {
                break;
            }
            if let Err(e) = this.devices.check_process() {
                return Poll::Ready(Err(e));
            }
            if this.progress.changed.wake_past(seen, context.waker()) {
                return Poll::Pending;
            }
        }
        for part in 0..this.parts.len() {
            if let Err(e) = this.complete_part(part, None) {
                return Poll::Ready(Err(e));
            }
        }
        let taken = Self {
            arena: this.arena.clone(),
            in_region: this.in_region,
            devices: Arc::clone(&this.devices),
            selections: std::mem::take(&mut this.selections),
            parts: std::mem::take(&mut this.parts),
            buffers: std::mem::take(&mut this.buffers),
            verified: Vec::new(),
            failures: std::mem::take(&mut this.failures),
            progress: Arc::clone(&this.progress),
            hedges: Hedges::default(),
            cancel: Arc::default(),
            submitted: true,
            priority: this.priority,
        };
        Poll::Ready(Ok(taken.into_batch()))
    }
}

impl Drop for ReadTicket {
    fn drop(&mut self) {
        self.cancel.store(true, Ordering::Relaxed);
    }
}
