//! Pages of a pool: how entries are stored in them, and the identity of their checksums.

use super::directory::HEADS_ALL;
use crate::checksum::PlaneIdentity;
use crate::dtype::DType;
use crate::frame::KIND_POOL;
use crate::ids::SequenceId;
use crate::layout::LayerGeometry;
use crate::page::{PAGE_BYTES, round_up_to_page};
use core::ops::Range;

/// The most entries of a page.
pub const PAGE_ENTRIES_MAX: usize = 128;

/// The KV heads of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EntryHeads {
    /// One head. Each head of the layer has clusters of its own.
    One(u16),
    /// All heads of the layer.
    All,
}

impl EntryHeads {
    /// Returns the heads with this code on disk, or `None` if the layer lacks the head.
    #[must_use]
    pub const fn from_code(code: u16, layer: &LayerGeometry) -> Option<Self> {
        match code {
            HEADS_ALL => Some(Self::All),
            head if head < layer.kv_heads => Some(Self::One(head)),
            _ => None,
        }
    }

    /// Returns the code on disk.
    #[must_use]
    pub const fn code(self) -> u16 {
        match self {
            Self::One(head) => head,
            Self::All => HEADS_ALL,
        }
    }

    /// Returns the number of heads.
    #[must_use]
    pub const fn count(self, layer: &LayerGeometry) -> usize {
        match self {
            Self::One(_) => 1,
            Self::All => layer.kv_heads as usize,
        }
    }
}

/// The geometry of a page of entries: K rows `[heads, entries, key_dim]`, then V rows `[heads, entries, value_dim]`.
///
/// An entry that is larger than a page takes whole pages, which count as one page here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageGeometry {
    /// The entries of a full page, 1 to [`PAGE_ENTRIES_MAX`].
    pub entries: usize,
    /// Bytes of the page, a multiple of [`PAGE_BYTES`].
    pub page_bytes: usize,
    /// The heads of an entry.
    pub heads: usize,
    /// Bytes of a K row.
    pub key_row: usize,
    /// Bytes of a V row, 0 if values are a prefix of the keys.
    pub value_row: usize,
}

impl PageGeometry {
    /// Returns the geometry of the pages of a layer with KV.
    #[must_use]
    pub const fn new(layer: &LayerGeometry, dtype: DType, heads: EntryHeads) -> Self {
        let heads = heads.count(layer);
        let (key_row, value_row) = (layer.key_dim as usize * dtype.bytes(), layer.value_dim as usize * dtype.bytes());
        let entry_bytes = heads * (key_row + value_row);
        let fitting = PAGE_BYTES / entry_bytes;
        let entries = if fitting == 0 {
            1
        } else if fitting > PAGE_ENTRIES_MAX {
            PAGE_ENTRIES_MAX
        } else {
            fitting
        };
        Self { entries, page_bytes: round_up_to_page(entries * entry_bytes), heads, key_row, value_row }
    }

    /// Returns how many pages of [`PAGE_BYTES`] the page takes.
    #[must_use]
    pub const fn disk_pages(&self) -> u32 {
        (self.page_bytes / PAGE_BYTES) as u32
    }

    /// Returns the bytes of a row in the page: plane 0 = K, 1 = V.
    #[must_use]
    pub const fn row(&self, plane: usize, head: usize, slot: usize) -> Range<usize> {
        let row = if plane == 0 { self.key_row } else { self.value_row };
        let start = plane * self.heads * self.entries * self.key_row + (head * self.entries + slot) * row;
        start..start + row
    }

    /// Returns the offset of the first byte of a page that is not zero and belongs to none of its `valid` entries.
    #[must_use]
    pub fn first_stray(&self, page: &[u8], valid: usize) -> Option<usize> {
        let end = self.heads * self.entries * (self.key_row + self.value_row);
        let unused = (0..2).flat_map(|plane| (0..self.heads).map(move |head| (plane, head))).map(|(plane, head)| {
            let rows = self.row(plane, head, valid);
            rows.start..self.row(plane, head, self.entries).start
        });
        let is_stray = |range: Range<usize>| {
            let at = page.get(range.clone())?.iter().position(|byte| *byte != 0)?;
            Some(range.start + at)
        };
        unused.chain(core::iter::once(end..page.len())).find_map(is_stray)
    }
}

impl PlaneIdentity {
    /// Returns the identity of a page of a pool, whose checksum is stored in a directory.
    ///
    /// `nonce` and `origin` belong to the frame that holds the page. `page` counts pages of [`PAGE_BYTES`] from the
    /// start of that frame.
    #[must_use]
    pub fn of_page(nonce: u64, origin: SequenceId, layer: u16, heads: EntryHeads, page: u32, valid: u32) -> Self {
        Self::new(nonce, origin, KIND_POOL, layer, u64::from(page), valid).with_plane(heads.code())
    }
}
