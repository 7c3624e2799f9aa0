//! The ticket of a read: wait for it, poll it, await it, or attend to its parts as they arrive. Dropping it cancels.

use super::attend::{AttendOptions, Attending};
use super::batch::{PartBuffer, ReadBatch};
use super::hedge::Hedges;
use super::progress::Progress;
use super::{copy_fallback, decode_check, verify};
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::{Arena, Exhausted, Lease, PAGE_BYTES};
use crate::io::buffer::region::ReadRegion;
use crate::io::buffer::slab::SLAB_BYTES;
use crate::io::driver::interface::Op;
use crate::io::scheduler::{Batch, Priority, Request, Sink, ThreadRingBatch};
use crate::log::{CONTROL_BYTES, Devices, exhausted};
use crate::metrics::Category;
use crate::plan::{DeviceLoads, PlannedRead, ReadPart, ReadPriority, plan};
use crate::plan::{Selection, SelectionInner};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use stratakv_format::DeviceIndex;

/// So long a read that waits for memory sleeps at most before it looks again whether anybody holds what it waits for.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// A read under way. [`ReadTicket::wait`] for all of it, `.await` it, or [`ReadTicket::attend`] to its views as their blocks
/// arrive. A read that does not fit in the free memory now is submitted as soon as it does. Dropping the ticket cancels
/// what was not submitted yet. The poll that finds everything there also checks it, and waits for what has to be read again because
/// it failed or is damaged.
pub struct ReadTicket {
    pub(super) devices: Arc<Devices>,
    /// Where its buffers come from: the store's arena or a region of the embedder.
    pub(super) arena: Arena,
    pub(super) in_region: bool,
    pub(super) views: Vec<Arc<SelectionInner>>,
    pub(super) parts: Vec<ReadPart>,
    /// Shared only once they are checked: nothing is written into them then.
    pub(super) buffers: Vec<Option<Arc<Lease>>>,
    /// Of parts whose blocks were checked, whether all are good.
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
        views: Vec<Arc<SelectionInner>>,
        urgency: ReadPriority<'_>,
    ) -> Result<Self> {
        let arena = devices.arena.clone();
        let mut ticket = Self::prepare(devices, views, urgency, (arena, false))?;
        ticket.try_submit()?;
        Ok(ticket)
    }

    /// A demand read into a region.
    pub(crate) fn read_into(
        devices: Arc<Devices>,
        views: Vec<Arc<SelectionInner>>,
        region: &ReadRegion,
    ) -> Result<Self> {
        let mut ticket = Self::prepare(devices, views, ReadPriority::Demand(None), (region.arena.clone(), true))?;
        ticket.try_submit()?;
        Ok(ticket)
    }

    pub(super) fn prepare(
        devices: Arc<Devices>,
        views: Vec<Arc<SelectionInner>>,
        urgency: ReadPriority<'_>,
        place: (Arena, bool),
    ) -> Result<Self> {
        let parts = plan(&views, urgency, &DeviceLoads::of(&devices));
        Self::of_parts(devices, views, parts, urgency, place)
    }

    /// A read of these parts of views.
    pub(super) fn of_parts(
        devices: Arc<Devices>,
        views: Vec<Arc<SelectionInner>>,
        parts: Vec<ReadPart>,
        urgency: ReadPriority<'_>,
        (arena, in_region): (Arena, bool),
    ) -> Result<Self> {
        let bound = if in_region { "the region has" } else { "memory_limit allows" };
        let needed: usize = parts.iter().map(|part| part.buffer_bytes).sum();
        let limit = arena.slabs_max() * SLAB_BYTES;
        // They stay where they are until their sequences commit again, which may be waiting for this read.
        let gathered = if in_region { 0 } else { devices.gathering.used() };
        if needed + gathered.next_multiple_of(SLAB_BYTES) > limit {
            let beside = if gathered > 0 {
                format!(", beside {gathered} of groups that sequences gather")
            } else {
                String::new()
            };
            let text =
                format!("a read of {needed} bytes can never fit in the {limit} bytes of buffers that {bound}{beside}");
            return Err(Error::new(ErrorKind::MemoryLimit, text));
        }
        let progress = Progress::new(&devices, &parts);
        Ok(Self {
            buffers: parts.iter().map(|_| None).collect(),
            verified: vec![None; parts.len()],
            failures: views.iter().map(|_| None).collect(),
            arena,
            in_region,
            devices,
            views,
            parts,
            progress,
            hedges: Hedges::default(),
            cancel: Arc::default(),
            submitted: false,
            priority: if urgency.is_ahead() { Priority::Prefetch } else { Priority::Demand },
        })
    }

    /// Reads on the calling thread where it can drive the devices itself, else through the shards, and waits.
    pub(crate) fn read_now(devices: Arc<Devices>, views: Vec<Arc<SelectionInner>>) -> Result<ReadBatch> {
        let arena = devices.arena.clone();
        let mut ticket = Self::prepare(Arc::clone(&devices), views, ReadPriority::Demand(None), (arena, false))?;
        // Reads that other copies can take over when they are late go through the shards: they do not block this thread.
        let may_hedge = ticket.may_hedge();
        if may_hedge || !ticket.take_buffers()? {
            return ticket.wait();
        }
        let mut batches = Vec::new();
        for (device, requests) in ticket.requests_by_device() {
            let shard = &devices.get(device)?.shard;
            batches.push(ThreadRingBatch { device: usize::from(device.0), shard, requests });
        }
        let progress = Arc::clone(&ticket.progress);
        progress.times.begun();
        let mut waiting: Vec<usize> = (0..ticket.parts.len()).collect();
        // Each part is checked while the rest is in flight.
        let mut check = || {
            waiting.retain(|&part| {
                let done = ticket.progress.is_done(part);
                // Nothing can be late without a deadline.
                done.then(|| ticket.verify_part(part, None)).is_none()
            });
        };
        let left = devices.lanes.read(batches, &*progress, &mut check).err().unwrap_or_default();
        for ThreadRingBatch { shard, requests, .. } in left {
            let sink = Arc::clone(&progress) as Arc<dyn Sink>;
            shard.submit_wait(Batch { requests, priority: Priority::Demand, sink, cancel: None });
        }
        ticket.submitted = true;
        ticket.wait()
    }

    /// Bytes this read takes from devices, in the units they read: 512 bytes mostly, whole pages on some.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.buffer_bytes as u64).sum()
    }

    /// Bytes of the blocks that were selected and are on devices: what [`Self::device_bytes`] exceeds them by is read in vain,
    /// for whole read units and for gaps that cost less than another request.
    #[must_use]
    pub fn selected_bytes(&self) -> u64 {
        let of = |part: &ReadPart| -> u64 {
            let view = &self.views[part.view];
            let units = view.units[part.units.clone()].iter().zip(&part.blocks);
            let read = units.filter(|(_, at)| at.is_some());
            read.map(|(unit, _)| unit.bytes(view.layout.block(view.layer)) as u64).sum()
        };
        self.parts.iter().map(of).sum()
    }

    /// Requests this read consists of.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.parts.iter().map(|part| part.reads.len()).sum()
    }

    /// Whether everything has arrived; does not block.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.submitted && self.all_arrived()
    }

    /// Takes buffers for all parts and hands the whole read to the shards, one batch per device. `false` when the buffers
    /// do not fit in the free memory now.
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
        for (device, requests) in batches {
            let sink = Arc::clone(&self.progress) as Arc<dyn Sink>;
            let cancel = Some(Arc::clone(&self.cancel));
            let batch = Batch { requests, priority: self.priority, sink, cancel };
            self.devices.get(device)?.shard.submit_wait(batch);
        }
        Ok(true)
    }

    /// Buffers for all parts, or `false` and none: half of them must not be held while waiting for the other half.
    fn take_buffers(&mut self) -> Result<bool> {
        let lens: Vec<usize> = self.parts.iter().map(|part| part.buffer_bytes).filter(|bytes| *bytes > 0).collect();
        match self.arena.lease_all(&lens) {
            Ok(leases) => {
                let mut leases = leases.into_iter();
                let places = self.buffers.iter_mut().zip(&self.parts).filter(|(_, part)| part.buffer_bytes > 0);
                places.for_each(|(buffer, _)| *buffer = leases.next().map(Arc::new));
                Ok(true)
            }
            Err(Exhausted::Now) => Ok(false),
            Err(other) => Err(exhausted(other, lens.into_iter().max().unwrap_or_default())),
        }
    }

    /// The requests of all parts. What cannot even be requested has failed already.
    fn requests_by_device(&mut self) -> BTreeMap<DeviceIndex, Vec<Request>> {
        let total = self.requests();
        self.progress.submitted();
        self.progress.times.begun();
        let mut batches: BTreeMap<DeviceIndex, Vec<Request>> = BTreeMap::new();
        for (index, (part, buffer)) in self.parts.iter().zip(&mut self.buffers).enumerate() {
            let Some(buffer) = buffer.as_mut().and_then(Arc::get_mut) else { continue };
            let tags = self.progress.first_tag(index)..;
            for (read, tag) in part.reads.iter().zip(tags) {
                match request(&self.devices, read, buffer) {
                    Ok(op) => {
                        let batch = batches.entry(read.segment.key.0).or_insert_with(|| Vec::with_capacity(total));
                        batch.push(Request { op, tag });
                    }
                    Err(e) => self.progress.complete(tag, Err(e)),
                }
            }
        }
        batches
    }

    /// After a failed attempt: an error when waiting for buffers to come back is in vain, because nobody holds any or because it
    /// would not fit without them either. Whether it was submitted after all.
    fn can_ever_fit(&mut self) -> Result<bool> {
        if self.others_hold() && !self.is_crowded_out() {
            return Ok(false);
        }
        // A buffer that came back in between is found by one more attempt.
        if self.try_submit()? {
            return Ok(true);
        }
        if self.others_hold() && !self.is_crowded_out() {
            return Ok(false);
        }
        let (bytes, used) = (self.device_bytes(), self.devices.budget.used());
        let text = match self.in_region {
            true => format!("a read of {bytes} bytes does not fit in the region: no part of it may cross two slabs"),
            false => {
                format!("a read of {bytes} bytes does not fit beside the {used} bytes that memory_limit accounts for")
            }
        };
        Err(Error::new(ErrorKind::MemoryLimit, text))
    }

    /// Whether anybody holds buffers that will come back.
    fn others_hold(&self) -> bool {
        self.arena.usage().leased_bytes > if self.in_region { 0 } else { CONTROL_BYTES }
    }

    /// Whether it would not fit if every other read gave its buffers back: not beside what sequences, tables and caches have of the
    /// memory for as long as they are open.
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

    fn submit_by(&mut self, deadline: Option<Instant>) -> Result<()> {
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
                return Err(Error::new(ErrorKind::Deadline, "the deadline passed before buffers became free"));
            }
            let until = deadline.map_or(now + LOOK_AGAIN, |deadline| deadline.min(now + LOOK_AGAIN));
            self.arena.returned().wait_past(seen, Some(until));
        }
    }

    /// Waits for everything and checks it. A damaged view does not hide the others: see [`ReadBatch::get`].
    ///
    /// # Errors
    /// The store was closed. What is wrong with a single view is for `get` to say.
    pub fn wait(self) -> Result<ReadBatch> {
        self.wait_deadline(None)
    }

    /// [`Self::wait`] until `deadline` at the latest.
    ///
    /// # Errors
    /// [`ErrorKind::Deadline`] when it passes; the read is cancelled.
    pub fn wait_deadline(mut self, deadline: Option<Instant>) -> Result<ReadBatch> {
        self.submit_by(deadline)?;
        for part in 0..self.parts.len() {
            self.complete_part(part, deadline)?;
        }
        Ok(self.into_batch())
    }

    /// Waits for all parts and gives those that are good. Buffers for them must be there until then.
    pub(super) fn wait_parts(&mut self, buffers_by: Instant) -> Result<Vec<(ReadPart, Option<Arc<Lease>>)>> {
        self.submit_by(Some(buffers_by))?;
        for part in 0..self.parts.len() {
            self.complete_part(part, None)?;
        }
        let parts = std::mem::take(&mut self.parts).into_iter().zip(std::mem::take(&mut self.buffers));
        Ok(parts.zip(&self.verified).filter(|(_, good)| **good == Some(true)).map(|(part, _)| part).collect())
    }

    /// Whether a part needs no waiting for: it has ended, or another copy gave it, however long the late one takes.
    fn has_arrived(&self, part: usize) -> bool {
        self.verified[part].is_some() || self.hedges.won(part) || self.progress.is_done(part)
    }

    fn all_arrived(&self) -> bool {
        (0..self.parts.len()).all(|part| self.has_arrived(part))
    }

    pub(super) fn wait_part(&mut self, part: usize, deadline: Option<Instant>) -> Result<()> {
        if self.has_arrived(part) {
            return Ok(());
        }
        let progress = Arc::clone(&self.progress);
        let _waiting = progress.times.wait();
        let late = || Error::new(ErrorKind::Deadline, "the deadline passed before the read was complete");
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

    /// Whether a part arrives until then.
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

    /// Checks the blocks of a part that has arrived; what is wrong goes to the failures of its view.
    ///
    /// # Errors
    /// [`ErrorKind::Deadline`]: it passed while something was read again.
    pub(super) fn verify_part(&mut self, index: usize, deadline: Option<Instant>) -> Result<()> {
        if self.verified[index].is_some() {
            return Ok(());
        }
        self.verified[index] = Some(false);
        let won = self.hedges.won(index);
        let mut failed = if won { Vec::new() } else { self.progress.take_errors(index) };
        // What failed ended early, and what another copy gave was counted then.
        let took = self.progress.took(index).filter(|_| !won && failed.is_empty());
        if !failed.is_empty() && self.around(index, &failed, deadline) {
            failed = Vec::new();
        }
        let part = &self.parts[index];
        let view = &self.views[part.view];
        let outcome = match self.buffers[index].as_mut().and_then(Arc::get_mut) {
            None => Ok(()),
            Some(buffer) => {
                let recovered = match failed.is_empty() {
                    true => Ok(()),
                    false => copy_fallback::recover(&self.devices, part, failed, buffer, deadline),
                };
                let good = |buffer: &mut Lease| match &part.records {
                    None => verify::part(&self.devices, view, part, buffer, deadline),
                    Some(at) => verify::records(&self.devices, view, part, at, buffer, deadline),
                };
                recovered
                    .and_then(|()| good(buffer))
                    .and_then(|()| decode_check::part(&self.devices, view, part, buffer))
            }
        };
        if let Some(took) = took {
            self.devices.latencies.add(took);
        }
        match outcome {
            Err(e) if e.kind() == ErrorKind::Deadline => return Err(e),
            Err(e) => {
                self.failures[part.view].get_or_insert(e);
            }
            Ok(()) => self.verified[index] = Some(true),
        }
        Ok(())
    }

    /// A read into the first buffer that does not end while this is held.
    #[cfg(test)]
    pub(crate) fn never_ends(&mut self) -> Option<crate::io::buffer::arena::ReadTarget> {
        Arc::get_mut(self.buffers.iter_mut().flatten().next()?)?.read_target(0..PAGE_BYTES).ok()
    }

    fn into_batch(mut self) -> ReadBatch {
        let buffers = std::mem::take(&mut self.buffers);
        let parts = std::mem::take(&mut self.parts).into_iter().zip(buffers);
        ReadBatch::new(
            std::mem::take(&mut self.views),
            parts.map(|(part, buffer)| PartBuffer { part, buffer }).collect(),
            std::mem::take(&mut self.failures),
        )
    }

    /// Attention of `query` `[q_heads, key_dim]` over view `index` of the read, which must be `view`, part after part as
    /// the blocks arrive, to `out` `[q_heads, value_dim]`. Bit-identical to [`attend`](super::attend) over the whole batch.
    ///
    /// # Errors
    /// As [`attend`](super::attend); [`ErrorKind::Corruption`] or [`ErrorKind::Io`] when this view could not be read.
    pub fn attend(
        &mut self,
        index: usize,
        query: &[f32],
        view: &Selection,
        options: &AttendOptions,
        out: &mut [f32],
    ) -> Result<()> {
        match self.views.get(index) {
            Some(own) if Arc::ptr_eq(own, &view.inner) => {}
            _ => return Err(super::attend::wrong_view(index)),
        }
        self.submit_by(None)?;
        let mut attending = Attending::new(query, &view.inner, options)?;
        for at in 0..self.parts.len() {
            if self.parts[at].view != index {
                continue;
            }
            attending.rebuild(&self.parts[at]);
            self.complete_part(at, None)?;
            if let Some(e) = &self.failures[index] {
                return Err(e.duplicate());
            }
            attending.part(&self.parts[at], self.buffers[at].as_deref())?;
        }
        attending.finish(out)
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
            views: std::mem::take(&mut this.views),
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

/// The operation of a planned read into its place in the buffer of its part.
pub(super) fn request(devices: &Devices, read: &PlannedRead, buffer: &mut Lease) -> Result<Op> {
    devices.get(read.segment.key.0)?;
    let file = read.segment.file()?;
    Ok(Op::Read { file, offset: read.offset, into: buffer.read_target(read.to..read.to + read.bytes)? })
}
