//! Offsets and lengths of blocks in a groups extent.

use super::{LayerGeometry, Layout};
use crate::page::{PAGE_BYTES, round_up_to_page};

/// The geometry of the blocks of one layer in an extent.
///
/// A block of a page or more starts on a page. Smaller blocks share pages and never cross a page boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockGeometry {
    /// Bytes of the K plane.
    pub key_bytes: usize,
    /// Bytes of the V plane.
    pub value_bytes: usize,
    /// Offset of the V plane in the block.
    pub value_offset: usize,
    /// Bytes of a block: both planes and the padding between them.
    pub block_bytes: usize,
    /// The number of blocks that share a page, 0 if a block takes a page or more.
    pub blocks_per_page: usize,
}

impl BlockGeometry {
    /// Returns the byte offset of block `index` from the start of its extent.
    #[must_use]
    pub const fn block_offset(&self, index: usize) -> usize {
        match index.checked_div(self.blocks_per_page) {
            None => index * round_up_to_page(self.block_bytes),
            Some(page) => page * PAGE_BYTES + index % self.blocks_per_page * self.block_bytes,
        }
    }

    /// Returns the bytes of an extent of `blocks` blocks, whole pages.
    #[must_use]
    pub const fn extent_bytes(&self, blocks: usize) -> usize {
        if self.blocks_per_page == 0 {
            blocks * round_up_to_page(self.block_bytes)
        } else {
            blocks.div_ceil(self.blocks_per_page) * PAGE_BYTES
        }
    }

    /// Returns offset in the block and bytes of a plane: 0 = K, 1 = V.
    #[must_use]
    pub const fn plane(&self, plane: usize) -> (usize, usize) {
        if plane == 0 { (0, self.key_bytes) } else { (self.value_offset, self.value_bytes) }
    }
}

impl Layout {
    /// Returns the geometry of the stored blocks of a layer with KV.
    #[must_use]
    pub fn block(&self, layer: &LayerGeometry) -> BlockGeometry {
        let [key_bytes, value_bytes] = [0, 1].map(|plane| layer.codecs[plane].bytes(&self.plane_shape(layer, plane)));
        self.geometry(key_bytes, value_bytes)
    }

    /// Returns the geometry of the blocks of a layer with KV with all planes raw, whatever its codecs are.
    #[must_use]
    pub fn plain_block(&self, layer: &LayerGeometry) -> BlockGeometry {
        let [key_bytes, value_bytes] = [0, 1].map(|plane| self.plane_shape(layer, plane).bytes());
        self.geometry(key_bytes, value_bytes)
    }

    fn geometry(&self, key_bytes: usize, value_bytes: usize) -> BlockGeometry {
        let value_offset = if self.padded_planes && value_bytes > 0 { round_up_to_page(key_bytes) } else { key_bytes };
        let block_bytes = value_offset + value_bytes;
        let blocks_per_page = if block_bytes < PAGE_BYTES && block_bytes > 0 { PAGE_BYTES / block_bytes } else { 0 };
        BlockGeometry { key_bytes, value_bytes, value_offset, block_bytes, blocks_per_page }
    }
}
