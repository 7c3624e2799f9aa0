//! The progress of a read: which of its requests have completed, with which errors, and how fast each device was.
//!
//! Device threads report completions here. A tag is the number of a request, counted over all parts.

use super::timing::{Times, nanoseconds};
use crate::error::{Error, ErrorKind, Result};
use crate::io::scheduler::Sink;
use crate::io::scheduler::profile::Profile;
use crate::log::Devices;
use crate::metrics::{EventCount, lock};
use crate::plan::ReadPart;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// One request.
struct TrackedRequest {
    part: u32,
    /// Its index in `shares`.
    device: u32,
    bytes: u32,
}

/// The requests of one device.
struct DeviceShare {
    profile: Arc<Profile>,
    left: AtomicUsize,
    failed: AtomicBool,
    requests: usize,
    bytes: u64,
}

/// The progress of one read, shared by its ticket and the device threads.
pub(super) struct Progress {
    reads: Box<[TrackedRequest]>,
    /// The first request of each part, and one past the last.
    first: Box<[u32]>,
    /// Requests of each part that have not completed.
    left: Box<[AtomicU32]>,
    /// Nanoseconds from submission to the end of each part, 0 before its end.
    ended_ns: Box<[AtomicU64]>,
    shares: Vec<DeviceShare>,
    submitted: OnceLock<Instant>,
    /// Errors by request.
    errors: Mutex<BTreeMap<usize, Error>>,
    pub(super) changed: EventCount,
    pub(super) times: Times,
}

impl Progress {
    pub(super) fn new(devices: &Devices, parts: &[ReadPart]) -> Arc<Self> {
        let count = parts.iter().map(|part| part.reads.len()).sum();
        let mut reads = Vec::with_capacity(count);
        let mut first = Vec::with_capacity(parts.len() + 1);
        let mut shares: Vec<(u16, DeviceShare)> = Vec::new();
        for (index, part) in parts.iter().enumerate() {
            first.push(reads.len() as u32);
            for read in &part.reads {
                let device = read.segment.key.0;
                let at = shares.iter().position(|(known, _)| *known == device.0).unwrap_or_else(|| {
                    let profile = devices.get(device).map(|device| Arc::clone(&device.profile)).unwrap_or_default();
                    let (left, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
                    shares.push((device.0, DeviceShare { profile, left, failed, requests: 0, bytes: 0 }));
                    shares.len() - 1
                });
                let share = &mut shares[at].1;
                *share.left.get_mut() += 1;
                share.requests += 1;
                share.bytes += read.bytes as u64;
                reads.push(TrackedRequest { part: index as u32, device: at as u32, bytes: read.bytes as u32 });
            }
        }
        first.push(reads.len() as u32);
        Arc::new(Self {
            reads: reads.into(),
            first: first.into(),
            left: parts.iter().map(|part| AtomicU32::new(part.reads.len() as u32)).collect(),
            ended_ns: parts.iter().map(|_| AtomicU64::new(0)).collect(),
            shares: shares.into_iter().map(|(_, share)| share).collect(),
            submitted: OnceLock::new(),
            errors: Mutex::default(),
            changed: EventCount::default(),
            times: Times::default(),
        })
    }

    /// Returns the tag of a part's first request. The others follow.
    pub(super) fn first_tag(&self, part: usize) -> u64 {
        u64::from(self.first[part])
    }

    /// Notes that everything is about to be submitted.
    pub(super) fn submitted(&self) {
        if self.submitted.set(Instant::now()).is_ok() {
            self.shares.iter().for_each(|share| share.profile.queue(share.requests, share.bytes));
        }
    }

    pub(super) fn since(&self) -> Option<Instant> {
        self.submitted.get().copied()
    }

    /// Returns how long the devices took for a part that has ended, or none for a part without requests.
    pub(super) fn took(&self, part: usize) -> Option<Duration> {
        let start = self.since()?;
        if self.first[part] == self.first[part + 1] {
            return None;
        }
        match self.ended_ns[part].load(Ordering::Relaxed) {
            // The part is ending at this moment.
            0 => Some(start.elapsed()),
            ended => Some(Duration::from_nanos(ended)),
        }
    }

    pub(super) fn is_done(&self, part: usize) -> bool {
        self.left.get(part).is_none_or(|left| left.load(Ordering::Acquire) == 0)
    }

    /// Returns whether the device of a part's request has requests that have not completed.
    pub(super) fn is_waited_for(&self, part: usize, read: usize) -> bool {
        let slot = self.first.get(part).and_then(|first| self.reads.get(*first as usize + read));
        slot.is_some_and(|slot| self.shares[slot.device as usize].left.load(Ordering::Acquire) > 0)
    }

    /// Takes the errors of a part, each with the index of its request within the part.
    pub(super) fn take_errors(&self, part: usize) -> Vec<(usize, Error)> {
        let (start, end) = (self.first[part] as usize, self.first[part + 1] as usize);
        let mut errors = lock(&self.errors);
        if errors.is_empty() {
            return Vec::new();
        }
        let failed: Vec<usize> = errors.range(start..end).map(|(read, _)| *read).collect();
        failed.into_iter().filter_map(|read| Some((read - start, errors.remove(&read)?))).collect()
    }
}

impl Sink for Progress {
    fn complete(&self, tag: u64, outcome: Result<()>) {
        let Some(slot) = self.reads.get(tag as usize) else { return };
        let share = &self.shares[slot.device as usize];
        share.profile.unqueue(1, u64::from(slot.bytes));
        if let Err(e) = outcome {
            share.failed.store(true, Ordering::Relaxed);
            if e.kind() == ErrorKind::Io {
                share.profile.failed();
            }
            lock(&self.errors).entry(tag as usize).or_insert(e);
        }
        if share.left.fetch_sub(1, Ordering::AcqRel) == 1
            && !share.failed.load(Ordering::Relaxed)
            && let Some(start) = self.submitted.get()
        {
            share.profile.ended(*start, share.requests, share.bytes);
        }
        if self.left.get(slot.part as usize).is_some_and(|left| left.fetch_sub(1, Ordering::AcqRel) == 1) {
            self.times.ended();
            if let (Some(start), Some(ended)) = (self.submitted.get(), self.ended_ns.get(slot.part as usize)) {
                ended.store(nanoseconds(*start), Ordering::Relaxed);
            }
            self.changed.notify();
        }
    }
}
