//! Block devices in memory that log their requests: each is a FUSE file system of two files, each used by a loop
//! device.
//!
//! - `disk` logs every write, discard and flush at its completion. It refuses requests that are not aligned to sectors,
//!   and fails one request on demand.
//! - `image` is a state that a power failure may have left on `disk`. [`Devices::cut`] replaces it
//!   and discards what was written to it.
//!
//! The requests of all devices of a recording are numbered in the order in which they complete.
//!
//! How [`Devices::cut`] makes the images of the first `cut` requests, for each device:
//! 1. Everything up to the device's last flush among them is durable and is applied in order.
//! 2. Its requests after that are applied not at all, all, as a prefix, as a random subset, or torn.

use crate::rng::Rng;
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags,
    ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, WriteFlags,
};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

const PAGE: usize = 4096;
/// The unit that a torn write keeps or loses as a whole.
const SECTOR: usize = 512;
const DISK: u64 = 2;
const IMAGE: u64 = 3;
const TTL: Duration = Duration::from_secs(3600);
const FALLOC_KEEP_SIZE: i32 = 1;
const FALLOC_PUNCH_HOLE: i32 = 2;
const FALLOC_ZERO_RANGE: i32 = 16;

/// The bytes by page. An absent page is zero.
#[derive(Clone, Default)]
struct Pages(HashMap<u64, Arc<[u8; PAGE]>>);

impl Pages {
    fn read(&self, below: Option<&Self>, offset: u64, out: &mut [u8]) {
        let mut at = 0;
        while at < out.len() {
            let (page, skip) = ((offset as usize + at) / PAGE, (offset as usize + at) % PAGE);
            let len = (PAGE - skip).min(out.len() - at);
            let found = self.0.get(&(page as u64)).or_else(|| below?.0.get(&(page as u64)));
            match found {
                Some(bytes) => out[at..at + len].copy_from_slice(&bytes[skip..skip + len]),
                None => out[at..at + len].fill(0),
            }
            at += len;
        }
    }

    fn write(&mut self, below: Option<&Self>, offset: u64, bytes: &[u8]) {
        let mut at = 0;
        while at < bytes.len() {
            let (page, skip) = ((offset as usize + at) / PAGE, (offset as usize + at) % PAGE);
            let len = (PAGE - skip).min(bytes.len() - at);
            let mut whole = [0; PAGE];
            if len < PAGE {
                self.read(below, (page * PAGE) as u64, &mut whole);
            }
            whole[skip..skip + len].copy_from_slice(&bytes[at..at + len]);
            self.0.insert(page as u64, Arc::new(whole));
            at += len;
        }
    }
}

/// A request that the device completed.
enum DeviceRequest {
    Write {
        offset: u64,
        bytes: Vec<u8>,
    },
    /// A discarded or zeroed range.
    Zero {
        offset: u64,
        bytes: u64,
    },
    /// A flush: every request before it is durable.
    Flush,
}

impl DeviceRequest {
    fn apply(&self, on: &mut Pages, below: Option<&Pages>) {
        match self {
            Self::Write { offset, bytes } => on.write(below, *offset, bytes),
            Self::Zero { offset, bytes } => {
                for start in (*offset..offset + bytes).step_by(PAGE) {
                    let len = (offset + bytes - start).min(PAGE as u64) as usize;
                    on.write(below, start, &[0; PAGE][..len]);
                }
            }
            Self::Flush => {}
        }
    }

    fn apply_torn(&self, on: &mut Pages, below: &Pages, rng: &mut Rng) {
        let Self::Write { offset, bytes } = self else { return self.apply(on, Some(below)) };
        let sectors = bytes.len() / SECTOR;
        let (cut, shape) = (rng.below(sectors + 1), rng.below(3));
        for (index, sector) in bytes.chunks(SECTOR).enumerate() {
            let lands = match shape {
                0 => index < cut,
                1 => index >= cut,
                _ => rng.below(2) == 0,
            };
            if lands {
                on.write(Some(below), offset + (index * SECTOR) as u64, sector);
            }
        }
    }
}

/// A planned failure of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The number of writes that succeed first, and the errno of the next one.
    Write(u64, i32),
    /// The number of flushes that succeed first, and the errno of the next one.
    Flush(u64, i32),
}

#[derive(Default)]
struct DeviceState {
    bytes: u64,
    disk: Pages,
    /// The content of `disk` after the first `durable_at` entries of the log.
    durable: Pages,
    durable_at: usize,
    /// The requests, each with its number.
    log: Option<Vec<(usize, DeviceRequest)>>,
    fault: Option<Fault>,
    fault_hit: bool,
    misaligned: u64,
    image: Pages,
}

/// The devices of a recording.
pub(super) struct Devices(Vec<Device>);

impl Devices {
    /// Returns `count` devices of `bytes` bytes.
    pub(super) fn new(count: usize, bytes: u64) -> Self {
        let next = Arc::new(AtomicUsize::new(0));
        let state = || Arc::new(Mutex::new(DeviceState { bytes, ..DeviceState::default() }));
        Self((0..count).map(|_| Device { state: state(), next: Arc::clone(&next) }).collect())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Device> {
        self.0.iter()
    }

    /// Begins the logs. Everything written before is durable. The fault is of the device with this index.
    pub(super) fn record(&self, fault: Option<(usize, Fault)>) {
        for (index, device) in self.0.iter().enumerate() {
            device.record(fault.filter(|(own, _)| *own == index).map(|(_, fault)| fault));
        }
    }

    /// Cancels a fault that has not struck. Returns whether it struck.
    pub(super) fn stop(&self) -> bool {
        self.0.iter().fold(false, |struck, device| struck | device.stop())
    }

    /// Returns the number of logged requests.
    pub(super) fn position(&self) -> usize {
        self.0.first().map_or(0, |device| device.next.load(Ordering::Acquire))
    }

    /// Returns the number of requests that were not whole sectors.
    pub(super) fn misaligned(&self) -> u64 {
        self.0.iter().map(|device| device.state().misaligned).sum()
    }

    /// Makes each `image` a state that a power failure after `cut` requests may leave. It holds everything that a flush
    /// covered, and any part of the rest. `cut` must not decrease from one call to the next. Returns whether writes
    /// are torn.
    pub(super) fn cut(&self, cut: usize, rng: &mut Rng) -> bool {
        self.0.iter().fold(false, |torn, device| torn | device.cut(cut, rng))
    }
}

/// A handle to a device. Clones share its state.
#[derive(Clone)]
pub(super) struct Device {
    state: Arc<Mutex<DeviceState>>,
    /// The number of the next request of any device of the recording.
    next: Arc<AtomicUsize>,
}

impl Device {
    fn state(&self) -> MutexGuard<'_, DeviceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, fault: Option<Fault>) {
        let mut state = self.state();
        state.durable = state.disk.clone();
        (state.durable_at, state.log, state.fault, state.fault_hit) = (0, Some(Vec::new()), fault, false);
    }

    fn stop(&self) -> bool {
        let mut state = self.state();
        state.fault = None;
        state.fault_hit
    }

    fn cut(&self, cut: usize, rng: &mut Rng) -> bool {
        let mut state = self.state();
        let DeviceState { durable, durable_at, log, image, .. } = &mut *state;
        let Some(log) = log else { return false };
        let cut = log.partition_point(|(number, _)| *number < cut);
        let is_flush = |(_, entry): &(usize, DeviceRequest)| matches!(entry, DeviceRequest::Flush);
        while let Some(next) = log[*durable_at..cut].iter().position(is_flush) {
            let end = *durable_at + next + 1;
            log[*durable_at..end].iter().for_each(|(_, entry)| entry.apply(durable, None));
            *durable_at = end;
        }
        image.0.clear();
        let rest = &log[*durable_at..cut];
        let shape = rng.below(5);
        let front = rng.below(rest.len() + 1);
        for (index, (_, entry)) in rest.iter().enumerate() {
            match shape {
                0 => {}
                1 => entry.apply(image, Some(durable)),
                2 if index < front => entry.apply(image, Some(durable)),
                3 if rng.below(2) == 0 => entry.apply(image, Some(durable)),
                4 => entry.apply_torn(image, durable, rng),
                _ => {}
            }
        }
        shape == 4 && !rest.is_empty()
    }
}

/// Counts a request down. Returns the errno if the fault strikes it.
fn strikes(fault: &mut Option<Fault>, write: bool) -> Option<Errno> {
    match fault {
        Some(Fault::Write(left, errno)) if write => {
            if *left > 0 {
                *left -= 1;
                return None;
            }
            Some(Errno::from_i32(*errno))
        }
        Some(Fault::Flush(left, errno)) if !write => {
            if *left > 0 {
                *left -= 1;
                return None;
            }
            Some(Errno::from_i32(*errno))
        }
        _ => None,
    }
}

impl Device {
    fn attributes(&self, ino: u64) -> FileAttr {
        let directory = ino == 1;
        let size = if directory { 0 } else { self.state().bytes };
        FileAttr {
            ino: INodeNo(ino),
            size,
            blocks: size / SECTOR as u64,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if directory { FileType::Directory } else { FileType::RegularFile },
            perm: if directory { 0o700 } else { 0o600 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: PAGE as u32,
            flags: 0,
        }
    }

    fn put(&self, ino: u64, entry: DeviceRequest) -> Result<(), Errno> {
        let mut state = self.state();
        let (offset, bytes) = match &entry {
            DeviceRequest::Write { offset, bytes } => (*offset, bytes.len() as u64),
            DeviceRequest::Zero { offset, bytes } => (*offset, *bytes),
            DeviceRequest::Flush => (0, 0),
        };
        if !offset.is_multiple_of(SECTOR as u64) || !bytes.is_multiple_of(SECTOR as u64) {
            state.misaligned += 1;
            return Err(Errno::EINVAL);
        }
        let DeviceState { disk, durable, image, log, fault, fault_hit, .. } = &mut *state;
        if ino == IMAGE {
            entry.apply(image, Some(durable));
            return Ok(());
        }
        if let Some(errno) = strikes(fault, !matches!(entry, DeviceRequest::Flush)) {
            *fault = None;
            *fault_hit = true;
            return Err(errno);
        }
        entry.apply(disk, None);
        if let Some(log) = log {
            log.push((self.next.fetch_add(1, Ordering::AcqRel), entry));
        }
        Ok(())
    }
}

impl Filesystem for Device {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match (u64::from(parent), name.to_str()) {
            (1, Some("disk")) => reply.entry(&TTL, &self.attributes(DISK), Generation(0)),
            (1, Some("image")) => reply.entry(&TTL, &self.attributes(IMAGE), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes(ino.into()));
    }

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(ino.into()), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let state = self.state();
        let mut bytes = vec![0; (size as u64).min(state.bytes.saturating_sub(offset)) as usize];
        match u64::from(ino) {
            IMAGE => state.image.read(Some(&state.durable), offset, &mut bytes),
            _ => state.disk.read(None, offset, &mut bytes),
        }
        drop(state);
        reply.data(&bytes);
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.put(ino.into(), DeviceRequest::Write { offset, bytes: data.to_vec() }) {
            Ok(()) => reply.written(data.len() as u32),
            Err(e) => reply.error(e),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.put(ino.into(), DeviceRequest::Flush) {
            Ok(()) => reply.ok(),
            Err(e) => reply.error(e),
        }
    }

    fn fallocate(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        if mode & (FALLOC_PUNCH_HOLE | FALLOC_ZERO_RANGE) == 0 || mode & FALLOC_KEEP_SIZE == 0 {
            return reply.error(Errno::EOPNOTSUPP);
        }
        match self.put(ino.into(), DeviceRequest::Zero { offset, bytes: length }) {
            Ok(()) => reply.ok(),
            Err(e) => reply.error(e),
        }
    }
}
