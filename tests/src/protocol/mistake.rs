//! Mistakes in the protocol that the search must find.

/// A step that is left out, repeated or moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// A commit is acknowledged before its batches are synced.
    ManifestSyncSkipped,
    /// A commit is acknowledged after one of two copies is synced.
    OneCopySynced,
    /// Frames are not synced.
    FrameSyncSkipped,
    /// Batches are written before the frames that they name are synced.
    BatchBeforeFrames,
    /// A failed sync is repeated, and its second result is believed.
    SyncRetried,
    /// Superblocks name a generation before its checkpoint is durable.
    SuperblockBeforeCheckpoint,
    /// A generation names its successor before that is durable.
    SupersededBeforeCheckpoint,
    /// A superblock always takes the same slot.
    OneSlotUsed,
    /// A checkpoint does not name its generation in superblocks.
    SuperblockSkipped,
    /// A device is given up and no record says so.
    LostDeviceNotRecorded,
    /// A change of members starts a generation that the superblocks of the other devices do not name.
    MembersWithoutSuperblock,
    /// An open accepts a device that the manifest has as lost.
    LostDeviceAccepted,
    /// The next commit takes the place of the frame that is in force.
    FrameReusedEarly,
    /// Replay applies each batch by itself.
    HalfRunApplied,
    /// A repair does not name the generation in force in all slots before it reuses the files of others.
    SettleSkipped,
    /// An open after a crash appends to the generation that it replayed.
    GenerationNotBumped,
    /// An open after a clean close leaves the slots marked as closed.
    OpenMarkSkipped,
    /// A repair does not write its generation to the superblocks.
    RepairNotNamed,
}

impl Mistake {
    /// Every mistake.
    pub const ALL: [Self; 18] = [
        Self::ManifestSyncSkipped,
        Self::OneCopySynced,
        Self::FrameSyncSkipped,
        Self::BatchBeforeFrames,
        Self::SyncRetried,
        Self::SuperblockBeforeCheckpoint,
        Self::SupersededBeforeCheckpoint,
        Self::OneSlotUsed,
        Self::SuperblockSkipped,
        Self::LostDeviceNotRecorded,
        Self::MembersWithoutSuperblock,
        Self::LostDeviceAccepted,
        Self::FrameReusedEarly,
        Self::HalfRunApplied,
        Self::SettleSkipped,
        Self::GenerationNotBumped,
        Self::OpenMarkSkipped,
        Self::RepairNotNamed,
    ];
}
