//! The ticket of a read: wait for it, poll it, await it, or attend to its parts as they arrive. Dropping it cancels.

use super::attend::{AttendOptions, Attending};
use super::batch::{PartBuffer, ReadBatch};
use super::verify;
use crate::device::arena::{Exhausted, Lease};
use crate::device::driver::Op;
use crate::device::slab::SLAB_BYTES;
use crate::error::{Error, ErrorKind, Result};
use crate::index::SegmentHandle;
use crate::log::{CONTROL_BYTES, Devices, exhausted};
use crate::metrics::{EventCount, lock};
use crate::plan::{Part, Urgency, plan};
use crate::select::{View, ViewInner};
use crate::shard::{Batch, LaneBatch, Priority, Request, Sink};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Instant;
use stratakv_format::DeviceIndex;

/// What the shards report to.
struct Progress {
    /// Requests of each part that have not ended.
    left: Vec<AtomicU32>,
    errors: Mutex<BTreeMap<usize, Error>>,
    changed: EventCount,
}

impl Sink for Progress {
    fn complete(&self, tag: u64, outcome: Result<()>) {
        let part = tag as usize;
        if let Err(e) = outcome {
            lock(&self.errors).entry(part).or_insert(e);
        }
        if self.left.get(part).is_some_and(|left| left.fetch_sub(1, Ordering::AcqRel) == 1) {
            self.changed.notify();
        }
    }
}

impl Progress {
    fn is_done(&self, part: usize) -> bool {
        self.left.get(part).is_none_or(|left| left.load(Ordering::Acquire) == 0)
    }

    fn all_done(&self) -> bool {
        self.left.iter().all(|left| left.load(Ordering::Acquire) == 0)
    }
}

/// A read under way. [`ReadTicket::wait`] for all of it, `.await` it, or [`ReadTicket::attend`] to its views as their blocks
/// arrive. A read that does not fit in the free memory now is submitted as soon as it does. Dropping the ticket cancels
/// what was not submitted yet.
pub struct ReadTicket {
    devices: Arc<Devices>,
    views: Vec<Arc<ViewInner>>,
    parts: Vec<Part>,
    buffers: Vec<Option<Lease>>,
    /// Parts whose blocks were checked.
    verified: Vec<bool>,
    failures: Vec<Option<Error>>,
    progress: Arc<Progress>,
    cancel: Arc<AtomicBool>,
    submitted: bool,
}

impl ReadTicket {
    pub(crate) fn new(devices: Arc<Devices>, views: Vec<Arc<ViewInner>>) -> Result<Self> {
        let mut ticket = Self::prepare(devices, views)?;
        ticket.try_submit()?;
        Ok(ticket)
    }

    fn prepare(devices: Arc<Devices>, views: Vec<Arc<ViewInner>>) -> Result<Self> {
        let parts = plan(&views, Urgency::Demand(None));
        let needed: usize = parts.iter().map(|part| part.buffer_bytes).sum();
        let limit = devices.arena.slabs_max() * SLAB_BYTES;
        if needed > limit {
            let text = format!(
                "a read of {needed} bytes can never fit in the {limit} bytes of buffers that memory_limit allows"
            );
            return Err(Error::new(ErrorKind::MemoryLimit, text));
        }
        let progress = Progress {
            left: parts.iter().map(|part| AtomicU32::new(part.reads.len() as u32)).collect(),
            errors: Mutex::default(),
            changed: EventCount::default(),
        };
        Ok(Self {
            buffers: parts.iter().map(|_| None).collect(),
            verified: vec![false; parts.len()],
            failures: views.iter().map(|_| None).collect(),
            devices,
            views,
            parts,
            progress: Arc::new(progress),
            cancel: Arc::default(),
            submitted: false,
        })
    }

    /// Reads on the calling thread where it can drive the devices itself, else through the shards, and waits.
    pub(crate) fn read_now(devices: Arc<Devices>, views: Vec<Arc<ViewInner>>) -> Result<ReadBatch> {
        let mut ticket = Self::prepare(Arc::clone(&devices), views)?;
        if !ticket.take_buffers()? {
            return ticket.wait();
        }
        let mut batches = Vec::new();
        for (device, requests) in ticket.requests_by_device()? {
            let shard = &devices.get(device)?.shard;
            batches.push(LaneBatch { device: usize::from(device.0), shard, requests });
        }
        let progress = Arc::clone(&ticket.progress);
        let mut waiting: Vec<usize> = (0..ticket.parts.len()).collect();
        // Each part is checked while the rest is in flight.
        let mut check = || {
            waiting.retain(|&part| {
                let done = ticket.progress.is_done(part);
                if done {
                    ticket.verify_part(part);
                }
                !done
            });
        };
        let left = devices.lanes.read(batches, &*progress, &mut check).err().unwrap_or_default();
        for LaneBatch { shard, requests, .. } in left {
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

    /// Requests this read consists of.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.parts.iter().map(|part| part.reads.len()).sum()
    }

    /// Whether everything has arrived; does not block.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.submitted && self.progress.all_done()
    }

    /// Takes buffers for all parts and hands the whole read to the shards, one batch per device. `false` when the buffers
    /// do not fit in the free memory now.
    fn try_submit(&mut self) -> Result<bool> {
        if self.submitted {
            return Ok(true);
        }
        if !self.take_buffers()? {
            return Ok(false);
        }
        let batches = self.requests_by_device()?;
        self.submitted = true;
        for (device, requests) in batches {
            let sink = Arc::clone(&self.progress) as Arc<dyn Sink>;
            let cancel = Some(Arc::clone(&self.cancel));
            let batch = Batch { requests, priority: Priority::Demand, sink, cancel };
            self.devices.get(device)?.shard.submit_wait(batch);
        }
        Ok(true)
    }

    /// Buffers for all parts, or `false` and none.
    fn take_buffers(&mut self) -> Result<bool> {
        for (buffer, part) in self.buffers.iter_mut().zip(&self.parts) {
            if part.buffer_bytes > 0 && buffer.is_none() {
                match self.devices.arena.lease(part.buffer_bytes) {
                    Ok(lease) => *buffer = Some(lease),
                    Err(Exhausted::Now) => {
                        // Half of the buffers must not be held while waiting for the other half.
                        self.buffers.fill_with(|| None);
                        return Ok(false);
                    }
                    Err(other) => return Err(exhausted(other, part.buffer_bytes)),
                }
            }
        }
        Ok(true)
    }

    /// The requests of all parts.
    fn requests_by_device(&mut self) -> Result<BTreeMap<DeviceIndex, Vec<Request>>> {
        let total = self.requests();
        let mut batches: BTreeMap<DeviceIndex, Vec<Request>> = BTreeMap::new();
        for (index, (part, buffer)) in self.parts.iter().zip(&mut self.buffers).enumerate() {
            let Some(buffer) = buffer else { continue };
            for read in &part.reads {
                let into = buffer.read_target(read.to..read.to + read.bytes)?;
                let op = Op::Read { file: read.segment.file()?, offset: read.offset, into };
                let batch = batches.entry(read.segment.key.0).or_insert_with(|| Vec::with_capacity(total));
                batch.push(Request { op, tag: index as u64 });
            }
        }
        Ok(batches)
    }

    /// After a failed attempt: an error when no buffer at all is in use, so that waiting for one to come back is in vain.
    /// Whether it was submitted after all.
    fn can_ever_fit(&mut self) -> Result<bool> {
        if self.devices.arena.usage().leased_bytes > CONTROL_BYTES {
            return Ok(false);
        }
        // A buffer that came back in between is found by one more attempt.
        if self.try_submit()? {
            return Ok(true);
        }
        if self.devices.arena.usage().leased_bytes > CONTROL_BYTES {
            return Ok(false);
        }
        let text = format!(
            "a read of {} bytes does not fit beside the {} bytes that memory_limit accounts for",
            self.device_bytes(),
            self.devices.budget.used()
        );
        Err(Error::new(ErrorKind::MemoryLimit, text))
    }

    fn submit_by(&mut self, deadline: Option<Instant>) -> Result<()> {
        loop {
            let seen = self.devices.arena.returned().epoch();
            if self.try_submit()? {
                return Ok(());
            }
            if self.can_ever_fit()? {
                return Ok(());
            }
            if !self.devices.arena.returned().wait_past(seen, deadline) {
                return Err(Error::new(ErrorKind::Deadline, "the deadline passed before buffers became free"));
            }
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
            self.wait_part(part, deadline)?;
            self.verify_part(part);
        }
        Ok(self.into_batch())
    }

    fn wait_part(&self, part: usize, deadline: Option<Instant>) -> Result<()> {
        loop {
            let seen = self.progress.changed.epoch();
            if self.progress.is_done(part) {
                return Ok(());
            }
            if !self.progress.changed.wait_past(seen, deadline) {
                return Err(Error::new(ErrorKind::Deadline, "the deadline passed before the read was complete"));
            }
        }
    }

    /// Checks the blocks of a part that has arrived; what is wrong goes to the failures of its view.
    fn verify_part(&mut self, index: usize) {
        if std::mem::replace(&mut self.verified[index], true) {
            return;
        }
        let part = &self.parts[index];
        let view = &self.views[part.view];
        let failed = lock(&self.progress.errors).remove(&index);
        let outcome = match (failed, &mut self.buffers[index]) {
            (Some(e), _) => Err(e),
            (None, None) => Ok(()),
            (None, Some(buffer)) => verify::part(&self.devices, view, part, buffer),
        };
        if let Err(e) = outcome {
            self.failures[part.view].get_or_insert(e);
        }
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
        view: &View,
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
            self.wait_part(at, None)?;
            self.verify_part(at);
            if let Some(e) = &self.failures[index] {
                return Err(e.duplicate());
            }
            attending.part(&self.parts[at], self.buffers[at].as_ref())?;
        }
        attending.finish(out)
    }
}

impl Future for ReadTicket {
    type Output = Result<ReadBatch>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        loop {
            let seen = this.devices.arena.returned().epoch();
            match this.try_submit() {
                Err(e) => return Poll::Ready(Err(e)),
                Ok(true) => break,
                Ok(false) => {
                    match this.can_ever_fit() {
                        Err(e) => return Poll::Ready(Err(e)),
                        Ok(true) => break,
                        Ok(false) => {}
                    }
                    if this.devices.arena.returned().wake_past(seen, context.waker()) {
                        return Poll::Pending;
                    }
                }
            }
        }
        loop {
            let seen = this.progress.changed.epoch();
            if this.progress.all_done() {
                break;
            }
            if this.progress.changed.wake_past(seen, context.waker()) {
                return Poll::Pending;
            }
        }
        for part in 0..this.parts.len() {
            this.verify_part(part);
        }
        let taken = Self {
            devices: Arc::clone(&this.devices),
            views: std::mem::take(&mut this.views),
            parts: std::mem::take(&mut this.parts),
            buffers: std::mem::take(&mut this.buffers),
            verified: Vec::new(),
            failures: std::mem::take(&mut this.failures),
            progress: Arc::clone(&this.progress),
            cancel: Arc::default(),
            submitted: true,
        };
        Poll::Ready(Ok(taken.into_batch()))
    }
}

impl Drop for ReadTicket {
    fn drop(&mut self) {
        self.cancel.store(true, Ordering::Relaxed);
    }
}

/// Reads a piece of a segment again, by itself.
pub(super) fn read_again(
    devices: &Devices,
    segment: &SegmentHandle,
    offset: u64,
    buffer: &mut Lease,
    range: std::ops::Range<usize>,
) -> Result<()> {
    let into = buffer.read_target(range)?;
    let op = Op::Read { file: segment.file()?, offset, into };
    devices.get(segment.key.0)?.shard.run(vec![Request { op, tag: 0 }], Priority::Demand)
}
