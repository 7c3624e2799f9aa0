//! The operations of a history.

use super::case::{SLOTS, pick};
use serde::{Deserialize, Serialize};
use stratakv::Durability;
use stratakv::sim::Rng;

/// Changes of the clock in milliseconds.
const CLOCK_MS: [i64; 6] = [-86_400_000, -20_000, -700, -2, 20_000, 3_600_000];

/// One operation of a history. A slot is a key. The runner first opens or creates the sequence of a slot if it has no
/// handle, and deletes a sequence whose slot a new one takes.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the comment of each variant names its fields")]
pub enum Operation {
    /// Appends tokens to the layers of the mask.
    Append { slot: usize, tokens: usize, layers: u8 },
    /// Appends tokens one by one to all layers, with their ids, and commits after each.
    Decode { slot: usize, tokens: usize, durability: Durability },
    /// Appends tokens to all layers, commits, and closes the handle, as a cache does with a prompt.
    Keep { slot: usize, tokens: usize, durability: Durability },
    /// Appends token ids.
    Ids { slot: usize, count: usize },
    /// Commits, with a state of this many bytes.
    Commit { slot: usize, durability: Durability, state: Option<usize> },
    /// Truncates by this many tokens, or to zero.
    Truncate { slot: usize, back: usize },
    /// Forks the sequence of one slot into another.
    Fork { slot: usize, to: usize },
    /// Deletes the sequence.
    Delete { slot: usize, durability: Durability },
    /// Reads the sequence and compares it.
    Check { slot: usize },
    /// Closes the handle.
    Close { slot: usize },
    /// Makes a reader of the sequence.
    Reader { slot: usize },
    /// Reads through all readers and compares.
    CheckReaders,
    /// Drops all readers.
    DropReaders,
    /// Exports the sequence of a slot and imports it into another. Imports only `part` thousandths of the file, if set.
    Carry { slot: usize, to: usize, part: Option<u16> },
    /// Stores or deletes the adapter of a version.
    Adapter { version: u32, put: bool },
    /// Attaches a selector with stored summaries.
    Attach { slot: usize, landmarks: bool },
    /// Stores the clusters of the case's method. With `keep`, the method stays attached to the handle.
    StoreClusters { slot: usize, keep: bool },
    /// Stores the clusters of the method that stays attached to the handle, if one does.
    StoreAttached { slot: usize },
    /// Releases the stored clusters.
    DropClusters { slot: usize },
    /// Damages all pools in one of four ways.
    SpoilPools { slot: usize, way: u8 },
    /// Exchanges tokens in the directories of stored clusters.
    SpoilDirectories { slot: usize },
    /// Opens the store a second time, which must fail at once.
    OpenTwice,
    /// Makes lazy commits durable.
    Flush,
    /// Closes the store and opens it again.
    Reopen,
    /// Cleans all dead bytes.
    Clean,
    /// Runs maintenance: removes expired sequences, evicts above the watermark, and cleans dead bytes.
    Tend,
    /// Sets the capacity, in segments.
    Capacity { segments: Option<u64> },
    /// Advances the clock.
    Wait { milliseconds: u64 },
    /// Sets the clock forward or back.
    Clock { milliseconds: i64 },
    /// Appends tokens to another store of the process, commits, and reads them.
    Neighbour { tokens: usize },
    /// Damages a disk. Reads use other copies and repair the damage.
    Heal { slot: usize },
    /// Declares a disk lost.
    Lose { disk: usize },
    /// Drains a disk and removes it.
    Remove { disk: usize },
    /// Adds a disk that was removed or lost, with its old content.
    Add { disk: usize },
}

impl Operation {
    /// Derives an operation from any bytes.
    pub(super) fn from_bytes([what, place, size, more]: [u8; 4]) -> Self {
        let slot = usize::from(place) % SLOTS;
        let to = usize::from(more) % SLOTS;
        let durability = [Durability::Sync, Durability::Lazy, Durability::None][usize::from(place / 16) % 3];
        match what % 16 {
            0..=2 => Self::Append { slot, tokens: 1 + usize::from(size) % 40, layers: 1 + more % 3 },
            3 if more % 8 == 7 => Self::Adapter { version: u32::from(size % 4), put: place % 4 > 0 },
            3 if more % 2 == 0 => Self::Ids { slot, count: 1 + usize::from(size) % 8 },
            3 if more % 4 == 1 => Self::Keep { slot, tokens: 1 + usize::from(size) % 64, durability },
            3 => Self::Decode { slot, tokens: 1 + usize::from(size) % 16, durability },
            4..=6 => Self::Commit { slot, durability, state: (more & 1 == 1).then(|| usize::from(size) << (more % 6)) },
            7 => Self::Delete { slot, durability },
            8 if more % 4 == 3 => Self::Attach { slot, landmarks: size % 2 == 0 },
            8 => Self::Check { slot },
            9 => Self::Truncate { slot, back: usize::from(size) },
            10 => Self::Fork { slot, to },
            11 => Self::Reader { slot },
            12 => match more % 4 {
                0 => Self::DropReaders,
                1 => Self::Carry { slot, to: usize::from(size) % SLOTS, part: None },
                2 => Self::Carry { slot, to: usize::from(size) % SLOTS, part: Some(u16::from(size) * 4) },
                _ => Self::CheckReaders,
            },
            13 => match more % 8 {
                1 | 5 => Self::StoreClusters { slot, keep: size % 2 == 0 },
                3 if size % 4 == 0 => Self::SpoilPools { slot, way: size / 4 },
                3 if size % 4 == 1 => Self::OpenTwice,
                3 if size % 4 == 2 => Self::SpoilDirectories { slot },
                3 => Self::DropClusters { slot },
                _ => Self::Close { slot },
            },
            14 => match more % 3 {
                0 => Self::Capacity { segments: (size > 0).then_some(u64::from(size % 24)) },
                1 => Self::Tend,
                _ if place % 4 == 3 => Self::Clock { milliseconds: (i64::from(size) - 128) * 400 },
                _ => Self::Wait { milliseconds: u64::from(size) * 200 },
            },
            _ => match more % 8 {
                0 | 1 => Self::Flush,
                2 => Self::Reopen,
                3 => Self::Clean,
                4 => Self::Heal { slot },
                5 => Self::Lose { disk: slot },
                6 => Self::Remove { disk: slot },
                _ => Self::Add { disk: slot },
            },
        }
    }

    /// Generates an operation. With `cache`, most sequences are committed and closed, so that they can be evicted.
    pub(super) fn generate(rng: &mut Rng, slots: usize, devices: usize, cache: bool) -> Self {
        let slot = rng.below(slots as u64) as usize;
        let to = |rng: &mut Rng| rng.below(slots as u64) as usize;
        if devices > 1 && rng.one_in(12) {
            let disk = rng.below(devices as u64) as usize;
            return match rng.below(5) {
                0 | 1 => Self::Heal { slot },
                2 => Self::Lose { disk },
                3 => Self::Remove { disk },
                _ => Self::Add { disk },
            };
        }
        let durability =
            pick(rng, &[Durability::Sync, Durability::Sync, Durability::Sync, Durability::Lazy, Durability::None]);
        match rng.below(128) {
            4..=31 if cache => Self::Keep { slot, tokens: 8 + rng.below(56) as usize, durability },
            0..=3 => Self::Decode { slot, tokens: 1 + rng.below(12) as usize, durability },
            4..=39 => Self::Append {
                slot,
                tokens: 1 + (rng.below(5) * rng.below(8)) as usize,
                layers: if rng.one_in(8) { 1 + rng.below(2) as u8 } else { 3 },
            },
            40..=44 => Self::Ids { slot, count: 1 + rng.below(6) as usize },
            45..=74 => {
                let state = rng.one_in(3).then(|| if rng.one_in(8) { 5000 } else { rng.below(60) as usize });
                Self::Commit { slot, durability, state }
            }
            75..=81 => Self::Delete { slot, durability },
            82 | 83 => Self::Attach { slot, landmarks: rng.one_in(2) },
            84..=88 if cache => Self::Close { slot },
            84..=88 => Self::Check { slot },
            89..=94 => Self::Close { slot },
            95..=102 => {
                let back = if rng.one_in(4) { rng.below(60) } else { 1 + rng.below(6) };
                Self::Truncate { slot, back: back as usize }
            }
            103 => Self::Adapter { version: rng.below(4) as u32, put: !rng.one_in(4) },
            104..=109 => Self::Fork { slot, to: to(rng) },
            110..=113 => Self::Reader { slot },
            114 | 115 => Self::CheckReaders,
            116 => Self::DropReaders,
            117 => Self::Carry { slot, to: to(rng), part: rng.one_in(4).then(|| rng.below(1000) as u16) },
            118 => Self::Capacity { segments: (!rng.one_in(4)).then(|| devices as u64 * (2 + rng.below(7))) },
            119 | 120 => Self::Tend,
            121 if rng.one_in(2) => Self::Clock { milliseconds: pick(rng, &CLOCK_MS) },
            121 | 122 => Self::Wait { milliseconds: 1 + rng.below(20_000) },
            123 | 124 => Self::Flush,
            125 | 126 => Self::Clean,
            _ => Self::Reopen,
        }
    }
}
