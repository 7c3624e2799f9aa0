//! The bytes of two devices: what is durable, and what is in flight.

/// Devices of the store.
pub(super) const DEVICES: usize = 2;
/// Sequences of the store.
pub(super) const SEQUENCES: usize = 2;
/// The most batches of a manifest file: a checkpoint, two commits of two batches each, a lost device and a successor.
pub(super) const PAGES: usize = 7;
/// A place of a frame that was only partly written.
const TORN: u8 = u8::MAX;

/// The state that a manifest describes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Catalog {
    /// The last commit of each sequence, as each half of its records states it. 0 is none.
    pub(super) halves: [[u8; SEQUENCES]; 2],
    /// The epoch at which a device was given up. 0 is a member.
    pub(super) lost_at: [u8; DEVICES],
}

/// The records of one batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Record {
    Checkpoint(Catalog),
    /// One half of the records of a group commit: commits by sequence, and devices that it gives up at an epoch.
    Half {
        half: u8,
        commits: [u8; SEQUENCES],
        lost_at: [u8; DEVICES],
    },
    Lost([u8; DEVICES]),
    Superseded {
        generation: u8,
        life: u8,
    },
}

/// A batch of a manifest file. Its number is its place in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Batch {
    pub(super) record: Record,
    /// True if it takes effect with the next batch.
    pub(super) has_more: bool,
    /// Batches of the file that were known durable when it was written.
    pub(super) synced: u8,
}

/// One copy of a manifest generation. `life` stands for its nonce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct File {
    pub(super) generation: u8,
    pub(super) life: u8,
    pub(super) batches: [Option<Batch>; PAGES],
}

/// A superblock slot. Slot `round % 2` holds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Slot {
    pub(super) round: u8,
    pub(super) epoch: u8,
    pub(super) generation: u8,
    pub(super) life: u8,
    pub(super) synced: u8,
    pub(super) is_closed: bool,
}

/// What a device holds. `None` is torn, or was never written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct DeviceBytes {
    pub(super) slots: [Option<Slot>; 2],
    /// Generation `g` has the place `g % 2`, because a checkpoint takes the file of the generation before the last.
    pub(super) files: [Option<File>; 2],
    /// Frames: commit `n` of a sequence has the place `n % 2`.
    pub(super) frames: [[u8; 2]; SEQUENCES],
}

/// A write of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Write {
    Slot(u8, Slot),
    File(File),
    Batch { generation: u8, life: u8, page: u8, batch: Batch },
    Frame { sequence: u8, place: u8, commit: u8 },
}

/// What one sync covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Target {
    Superblock,
    Manifest(u8),
    Frames(u8),
}

impl Write {
    fn target(&self) -> Target {
        match self {
            Self::Slot(..) => Target::Superblock,
            Self::File(file) => Target::Manifest(file.generation % 2),
            Self::Batch { generation, .. } => Target::Manifest(generation % 2),
            Self::Frame { sequence, .. } => Target::Frames(*sequence),
        }
    }
}

impl DeviceBytes {
    fn land(&mut self, write: Write) {
        match write {
            Write::Slot(index, slot) => self.slots[usize::from(index)] = Some(slot),
            Write::File(file) => self.files[usize::from(file.generation % 2)] = Some(file),
            Write::Batch { generation, life, page, batch } => {
                // A batch for a file that never landed is lost with it.
                if let Some(file) = &mut self.files[usize::from(generation % 2)]
                    && (file.generation, file.life) == (generation, life)
                {
                    file.batches[usize::from(page)] = Some(batch);
                }
            }
            Write::Frame { sequence, place, commit } => {
                self.frames[usize::from(sequence)][usize::from(place)] = commit;
            }
        }
    }

    /// Leaves the bytes that a write destroys if it lands in part.
    fn tear(&mut self, write: Write) {
        match write {
            Write::Slot(index, _) => self.slots[usize::from(index)] = None,
            Write::File(file) => self.files[usize::from(file.generation % 2)] = None,
            Write::Batch { .. } => {}
            Write::Frame { sequence, place, .. } => self.frames[usize::from(sequence)][usize::from(place)] = TORN,
        }
    }
}

/// The devices, and writes that no sync has covered, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Disk {
    pub(super) durable: [DeviceBytes; DEVICES],
    in_flight: Vec<(u8, Write)>,
}

impl Disk {
    /// Returns the disk on which everything of `devices` is durable.
    pub(super) fn new(durable: [DeviceBytes; DEVICES]) -> Self {
        Self { durable, in_flight: Vec::new() }
    }

    /// Returns whether a sync covered everything.
    pub(super) fn is_durable(&self) -> bool {
        self.in_flight.is_empty()
    }

    pub(super) fn write(&mut self, device: u8, write: Write) {
        self.in_flight.push((device, write));
    }

    /// Makes durable what was written to the target.
    pub(super) fn sync(&mut self, device: u8, target: Target) {
        let Self { durable, in_flight } = self;
        in_flight.retain(|(on, write)| {
            let is_covered = *on == device && write.target() == target;
            if is_covered {
                durable[usize::from(device)].land(*write);
            }
            !is_covered
        });
    }

    /// Loses what was written to the target, as a kernel does after a failed sync.
    pub(super) fn lose(&mut self, device: u8, target: Target) {
        let Self { durable, in_flight } = self;
        in_flight.retain(|(on, write)| {
            let is_covered = *on == device && write.target() == target;
            if is_covered {
                durable[usize::from(device)].tear(*write);
            }
            !is_covered
        });
    }

    /// Returns what a reader finds while no power fails.
    pub(super) fn seen(&self) -> [DeviceBytes; DEVICES] {
        let mut devices = self.durable;
        for (device, write) in &self.in_flight {
            devices[usize::from(*device)].land(*write);
        }
        devices
    }

    /// Returns every disk that a power failure may leave.
    pub(super) fn after_crash(&self) -> Vec<Self> {
        let mut left = vec![self.durable];
        for (device, write) in &self.in_flight {
            let device = usize::from(*device);
            for index in 0..left.len() {
                let old = left[index];
                let (mut torn, mut landed) = (old, old);
                torn[device].tear(*write);
                landed[device].land(*write);
                left.push(landed);
                match write {
                    // The place of a frame that did not land holds nothing that is needed, so torn is the worse case.
                    Write::Frame { .. } => left[index] = torn,
                    _ if torn != old => left.push(torn),
                    _ => {}
                }
            }
        }
        left.into_iter().map(Self::new).collect()
    }
}
