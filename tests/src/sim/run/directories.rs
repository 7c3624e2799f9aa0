//! Damage of the directories of stored clusters.
//!
//! A directory says which token each slot of a page holds. Only its checksum shows that two tokens were exchanged.
//! Selections then read the entries from groups.

use super::{Runner, StepResult};
use crate::sim::coverage;
use std::mem::offset_of;
use stratakv_format::pool::{DIRECTORY_VERSION, DirectoryHeader, METHOD_BYTES_MAX, PART_POSITIONS};
use stratakv_format::segment::{KIND_POOL, SegmentPage};
use zerocopy::FromBytes;

/// Tables of a piece start at a multiple of these bytes.
const ALIGNMENT: usize = 8;

impl Runner<'_> {
    /// Exchanges tokens `2 n` and `2 n + 1` in every directory on the devices. Selections must give the same bits, so
    /// the sequence of the slot is read as before.
    pub(super) fn spoil_directories(&mut self, slot: usize) -> StepResult {
        if self.case.entries.is_none() {
            return Ok(());
        }
        // The damage must hit the medium, so everything is written first.
        let flushed = self.store()?.flush();
        self.model.sync_attempted(flushed.is_ok());
        flushed.or_else(|e| self.fault("flush", &e))?;
        for disk in 0..self.case.geometry.devices {
            for path in self.simulation.files(disk).into_iter().filter(|path| path.starts_with("segments/")) {
                let Some(mut bytes) = self.simulation.contents(disk, &path) else { continue };
                if bytes.get(offset_of!(SegmentPage, kind)) == Some(&KIND_POOL) && exchange_tokens(&mut bytes) > 0 {
                    self.flipped = true;
                    self.coverage.add(coverage::DIRECTORY_CHANGED);
                    self.simulation.replace(disk, &path, &bytes);
                }
            }
        }
        self.check(slot)
    }
}

/// Exchanges neighbouring tokens in all pieces with positions. Returns the number of tokens.
fn exchange_tokens(bytes: &mut [u8]) -> usize {
    let mut changed = 0;
    for at in (0..bytes.len()).step_by(ALIGNMENT) {
        let Some(tokens) = tokens_at(&bytes[at..]) else { continue };
        for token in bytes[at..][tokens].chunks_exact_mut(size_of::<u32>()) {
            // The number of covered tokens is even, so the result is in its range.
            token[0] ^= 1;
            changed += 1;
        }
    }
    changed
}

/// Returns the place of the tokens of the piece that starts with these bytes, if there is one.
fn tokens_at(bytes: &[u8]) -> Option<std::ops::Range<usize>> {
    let (header, _) = DirectoryHeader::read_from_prefix(bytes).ok()?;
    let is_piece = header.version.get() == DIRECTORY_VERSION && header.part.get() == PART_POSITIONS;
    let has_no_pages = (header.frames.get(), header.runs.get(), header.pages.get()) == (0, 0, 0);
    let (method, tokens) = (usize::from(header.method_bytes.get()), u64::from(header.piece_entries.get()));
    if !is_piece || !has_no_pages || method > METHOD_BYTES_MAX || tokens == 0 || tokens > header.entries.get() {
        return None;
    }
    let sizes = size_of::<DirectoryHeader>() + method.next_multiple_of(ALIGNMENT);
    let start = sizes + (header.count.get() as usize * size_of::<u32>()).next_multiple_of(ALIGNMENT);
    let end = start + tokens as usize * size_of::<u32>();
    (end <= bytes.len()).then_some(start..end)
}
