//! The buffer in which a layer collects sealed groups.
//!
//! Invariants:
//! - Groups `0..groups` of the buffer are complete. The bytes of later groups are zero wherever blocks have padding, so
//!   that no group of a failed append reaches a device on the page of another group.
//! - `groups <= capacity`.

use crate::catalog::GroupBuffer;
use crate::io::buffer::PAGE_BYTES;
use crate::io::buffer::lease::Lease;
use std::sync::Arc;
use stratakv_format::layout::BlockGeometry;

/// The bytes of a run's buffer if groups arrive one at a time.
const RUN_BYTES_MIN: usize = 16 << 10;

/// Groups that are being collected in a buffer.
pub(super) struct GroupBuilder {
    first_group: u64,
    groups: usize,
    capacity: usize,
    block: BlockGeometry,
    buffer: Lease,
}

/// Returns the number of groups that fit into `bytes`.
fn groups_in(block: &BlockGeometry, bytes: usize) -> usize {
    match block.blocks_per_page {
        0 => bytes / block.extent_bytes(1),
        per_page => bytes / PAGE_BYTES * per_page,
    }
}

impl GroupBuilder {
    /// Returns the bytes of a buffer for `groups` groups, of which a run holds at most `run_bytes`.
    pub(super) fn buffer_bytes(block: &BlockGeometry, groups: usize, run_bytes: usize) -> usize {
        let least = groups_in(block, RUN_BYTES_MIN.min(run_bytes)).max(1);
        block.extent_bytes(groups.clamp(least, groups_in(block, run_bytes).max(1)))
    }

    /// Returns an empty builder.
    pub(super) fn new(first_group: u64, block: BlockGeometry, buffer: Lease) -> Self {
        Self { first_group, groups: 0, capacity: groups_in(&block, buffer.len()), block, buffer }
    }

    pub(super) fn first_group(&self) -> u64 {
        self.first_group
    }

    pub(super) fn has_room(&self) -> bool {
        self.groups < self.capacity
    }

    /// Returns the bytes of the complete groups on a device.
    pub(super) fn disk_bytes(&self) -> usize {
        self.block.extent_bytes(self.groups)
    }

    /// Returns the block of the next group, to be written; none if the builder is full.
    pub(super) fn slot(&mut self) -> Option<&mut [u8]> {
        let start = self.block.block_offset(self.groups);
        let slot = start..start + self.block.block_bytes;
        self.buffer.bytes_mut().filter(|_| self.groups < self.capacity)?.get_mut(slot)
    }

    /// Returns the index of the next group, and its K plane in the bytes of the slot.
    pub(super) fn slot_keys(&self) -> Option<(u64, &[u8])> {
        let start = self.block.block_offset(self.groups);
        let keys = self.buffer.bytes()?.get(start..start + self.block.key_bytes)?;
        Some((self.first_group + self.groups as u64, keys))
    }

    /// Counts the group in the slot as complete.
    pub(super) fn seal(&mut self) {
        self.groups += 1;
    }

    /// Returns the block of a complete group.
    pub(super) fn block(&self, group: u64) -> Option<&[u8]> {
        let index = group.checked_sub(self.first_group)? as usize;
        if index >= self.groups {
            return None;
        }
        let start = self.block.block_offset(index);
        self.buffer.bytes()?.get(start..start + self.block.block_bytes)
    }

    /// Keeps the groups before `end`. Returns whether any are left.
    pub(super) fn truncate(&mut self, end: u64) -> bool {
        let left = self.groups.min(end.saturating_sub(self.first_group) as usize);
        if let Some(bytes) = self.buffer.bytes_mut() {
            for group in left..self.groups {
                let start = self.block.block_offset(group);
                bytes[start..start + self.block.block_bytes].fill(0);
            }
        }
        self.groups = left;
        left > 0
    }

    /// Returns the complete groups as a run of `layer`; none if there are none.
    pub(super) fn into_run(self, layer: usize) -> Option<Arc<GroupBuffer>> {
        (self.groups > 0).then(|| {
            Arc::new(GroupBuffer {
                layer,
                first_group: self.first_group,
                groups: self.groups,
                geometry: self.block,
                buffer: Arc::new(self.buffer),
                cut: false,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::KvLayout;

    #[test]
    fn group_builder_asks_for_at_least_a_small_run() {
        let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(128).group_tokens(16).build().unwrap();
        let block = layout.block(0);
        let bytes = |groups| GroupBuilder::buffer_bytes(block, groups, 256 << 10);
        assert_eq!(bytes(1), 16 << 10);
        assert_eq!(bytes(1 << 20), 256 << 10);
        assert_eq!(groups_in(block, bytes(8)), 8);
    }
}
