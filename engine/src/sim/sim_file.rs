//! Files of simulated disks: small blocking I/O, and the arrival and completion of queued operations.
//!
//! A write *arrives* when a driver queues it: from then on a crash may land any part of it. It *completes* later, when
//! the simulation chooses it, unless the power fails or a fault strikes first.

use super::pages::PAGE;
use super::system::SimSystem;
use super::world::{Fate, FilePlace, OperationKind, World, errno, lost_power};
use crate::error::Result;
use crate::io::coverage;
use crate::io::driver::interface::Op;
use crate::io::driver::progress::InFlight;
use crate::io::file::device_file::ReplacedFile;
use crate::metrics::lock;
use crate::sync::Guard;
use rustix::io::Errno;
use std::sync::{Arc, Mutex};

/// The milliseconds that pass whenever a hanging device passes over an operation.
const HANG_MS: i64 = 1000;

/// A file of a simulated disk.
#[derive(Clone)]
pub(super) struct SimFile {
    pub(super) world: Arc<Mutex<World>>,
    pub(super) disk: usize,
    pub(super) file: usize,
    /// The world's epoch when the file was opened. The file is dead in a later epoch.
    pub(super) epoch: u64,
    pub(super) in_segment: bool,
}

/// A queued operation at its disk.
pub(super) struct Arrival {
    file: Option<SimFile>,
    /// The moment of its arrival, as [`World::moment`] counts it.
    moment: u64,
    /// The number of the write. None for other operations, and for a write that arrived without power.
    write: Option<u64>,
}

impl ReplacedFile for SimFile {
    fn len(&self) -> Result<u64> {
        let world = lock(&self.world);
        if world.down || world.epoch != self.epoch {
            return Err(lost_power());
        }
        Ok(world.disks[self.disk].files.get(self.file).map_or(0, |file| file.len() as u64))
    }
}

impl SimFile {
    fn place(&self) -> FilePlace {
        (self.disk, self.file)
    }

    fn begin(&self, kind: OperationKind, offset: u64, len: usize) -> Result<(Guard<'_, World>, Fate)> {
        let mut world = lock(&self.world);
        let fate = world.begin(self.epoch, kind, self.place(), (offset, len as u64))?;
        Ok((world, fate))
    }

    fn is_aligned(offset: u64, len: usize) -> bool {
        offset.is_multiple_of(PAGE as u64) && len.is_multiple_of(PAGE)
    }

    /// Copies the bytes that reads see from `offset` on, up to the end of the file. Returns their number.
    fn copy(&self, world: &World, offset: u64, into: &mut [u8]) -> usize {
        let Some(file) = world.disks[self.disk].files.get(self.file) else { return 0 };
        let first = offset as usize / PAGE;
        let mut count = 0;
        for (index, to) in into.chunks_mut(PAGE).enumerate() {
            let Some(page) = file.page(first + index) else { break };
            to.copy_from_slice(&world.pages.get(page)[..to.len()]);
            count += to.len();
        }
        count
    }

    pub(super) fn read_small(&self, offset: u64, into: &mut [u8]) -> Result<usize> {
        let doing = || format!("simulated read of {} bytes at {offset}", into.len());
        let (world, fate) = self.begin(OperationKind::Read, offset, into.len())?;
        match fate {
            Fate::Caught => return Err(lost_power()),
            Fate::Failed(e) => return Err(errno(doing(), e)),
            _ if world.is_unreadable(self.place(), offset, offset + into.len() as u64) => {
                return Err(errno(doing(), Errno::IO));
            }
            _ => {}
        }
        let count = self.copy(&world, offset, into);
        flip(fate, &mut into[..count]);
        Ok(count)
    }

    pub(super) fn write_small(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let doing = || format!("simulated write of {} bytes at {offset}", bytes.len());
        if !Self::is_aligned(offset, bytes.len()) {
            return Err(errno(doing(), Errno::INVAL));
        }
        let write = lock(&self.world).arrive(self.epoch, self.place(), offset, bytes).ok_or_else(lost_power)?;
        let (mut world, fate) = self.begin(OperationKind::Write, offset, bytes.len())?;
        match fate {
            Fate::Caught => Err(lost_power()),
            Fate::Failed(e) => {
                world.fail(self.place(), write, e);
                Err(errno(doing(), e))
            }
            _ => {
                world.complete(self.place(), write, offset, bytes.len(), 0);
                Ok(())
            }
        }
    }

    /// Makes durable the writes that had completed by `moment`.
    pub(super) fn sync(&self, moment: u64) -> Result<()> {
        let (mut world, fate) = self.begin(OperationKind::Sync, 0, 0)?;
        let file = world.disks[self.disk].files.get_mut(self.file).ok_or_else(lost_power)?;
        match fate {
            Fate::Caught => Err(lost_power()),
            Fate::Failed(e) => {
                file.doom();
                Err(errno("simulated sync".into(), e))
            }
            _ => {
                file.sync(moment);
                Ok(())
            }
        }
    }

    /// Completes a queued read. Returns the bytes moved, or a negative error number.
    fn complete_read(&self, world: &World, fate: Fate, offset: u64, flight: &mut InFlight, len: usize) -> i32 {
        if let Fate::Failed(e) = fate {
            return negative(e);
        }
        if world.is_unreadable(self.place(), offset, offset + len as u64) {
            return negative(Errno::IO);
        }
        let moved = if let Fate::Short(sectors) = fate { sectors * 512 } else { len };
        let mut bytes = vec![0; moved];
        let count = self.copy(world, offset, &mut bytes);
        flip(fate, &mut bytes[..count]);
        flight.fill(&bytes[..count]);
        count as i32
    }

    /// Completes a queued write. Returns the bytes moved, or a negative error number.
    fn complete_write(&self, world: &mut World, fate: Fate, write: u64, offset: u64, len: usize) -> i32 {
        let (moved, shift) = match fate {
            Fate::Failed(e) => {
                world.fail(self.place(), write, e);
                return negative(e);
            }
            Fate::Phantom => {
                world.forget(self.place(), write);
                return len as i32;
            }
            Fate::Short(sectors) => (sectors * 512, 0),
            Fate::Misdirected(pages) => (len, pages),
            _ => (len, 0),
        };
        world.complete(self.place(), write, offset, moved, shift);
        moved as i32
    }
}

/// Flips the bit that a faulty read gets wrong.
fn flip(fate: Fate, bytes: &mut [u8]) {
    if let Fate::Flipped(bit) = fate
        && let Some(byte) = bytes.get_mut(bit as usize / 8)
    {
        *byte ^= 1 << (bit % 8);
    }
}

/// Returns what a driver of the operating system would get for an error of the simulation.
fn negative(e: Errno) -> i32 {
    -e.raw_os_error()
}

impl Arrival {
    /// Lets the rest of an operation arrive at its disk.
    pub(super) fn of(flight: &InFlight) -> Self {
        let Some(file) = flight.op().file().as_replaced::<SimFile>() else {
            return Self { file: None, moment: 0, write: None };
        };
        let mut world = lock(&file.world);
        let write =
            flight.unwritten().and_then(|(offset, bytes)| world.arrive(file.epoch, file.place(), offset, bytes));
        Self { moment: world.moment, write, file: Some(file.clone()) }
    }

    /// Returns whether the device is slow or hangs, and other operations complete first this time.
    pub(super) fn is_held_back(&self, system: &SimSystem) -> bool {
        let Some(file) = &self.file else { return false };
        let mut world = lock(&file.world);
        if world.hangs(file.disk) {
            drop(world);
            system.advance(HANG_MS);
            return true;
        }
        let (slow, passes_ms) = (world.faults.slow == Some(file.disk), world.faults.slow_ms);
        drop(world);
        let waits = slow && system.choose(8) > 0;
        if waits && passes_ms > 0 {
            coverage!(TimePassed);
            system.advance(passes_ms as i64);
        }
        waits
    }

    /// Returns whether the power failed.
    pub(super) fn was_cut(&self) -> bool {
        self.file.as_ref().is_some_and(|file| lock(&file.world).down)
    }

    /// Completes the operation. Returns the bytes moved, or a negative error number.
    pub(super) fn complete(&self, flight: &mut InFlight) -> i32 {
        let Some(file) = &self.file else { return negative(Errno::BADF) };
        let Some((offset, len)) = flight.rest_range() else {
            return match file.sync(self.moment) {
                Ok(()) => 0,
                Err(_) => negative(Errno::IO),
            };
        };
        let read = matches!(flight.op(), Op::Read { .. });
        let kind = if read { OperationKind::Read } else { OperationKind::Write };
        if !SimFile::is_aligned(offset, len) {
            return negative(Errno::INVAL);
        }
        let Ok((mut world, mut fate)) = file.begin(kind, offset, len) else { return negative(Errno::IO) };
        if fate == Fate::Done {
            fate = world.disturb(kind, file.place(), offset, len, file.in_segment);
        }
        match (fate, self.write) {
            (Fate::Caught, _) => negative(Errno::IO),
            _ if read => file.complete_read(&world, fate, offset, flight, len),
            (_, Some(write)) => file.complete_write(&mut world, fate, write, offset, len),
            (_, None) => negative(Errno::IO),
        }
    }
}
