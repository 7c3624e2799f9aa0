//! The result of a read: its buffers, and the blocks of each selection in them.

use super::errors::not_there;
use super::planes::{page_bytes, planes};
use crate::codec::BlockCoder;
use crate::error::{Error, Result};
use crate::io::buffer::lease::Lease;
use crate::plan::ReadPart;
use crate::plan::SelectionInner;
use crate::pools::take_entry;
use std::borrow::Cow;
use std::sync::Arc;

/// A part with its buffer.
pub(super) struct PartBuffer {
    pub(super) part: ReadPart,
    pub(super) buffer: Option<Arc<Lease>>,
}

/// The blocks of one or more selections, in memory and checked. Its buffers return to the arena when it is dropped.
pub struct ReadBatch {
    pub(super) selections: Vec<Arc<SelectionInner>>,
    pub(super) parts: Vec<PartBuffer>,
    pub(super) failures: Vec<Option<Error>>,
}

impl ReadBatch {
    pub(super) fn new(
        selections: Vec<Arc<SelectionInner>>,
        parts: Vec<PartBuffer>,
        failures: Vec<Option<Error>>,
    ) -> Self {
        Self { selections, parts, failures }
    }

    /// Returns how many selections it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.selections.len()
    }

    /// Returns whether it holds no selection.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.selections.is_empty()
    }

    /// Returns the blocks of selection `index`, in the order given to the read.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`](crate::ErrorKind::Corruption) when a block of this selection is damaged,
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) when one could not be read,
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) when there is no such selection.
    pub fn get(&self, index: usize) -> Result<SelectionBlocks<'_>> {
        let Some(selection) = self.selections.get(index) else {
            return Err(not_there(&format!("selection {index}; the read has {}", self.selections.len())));
        };
        match &self.failures[index] {
            Some(e) => Err(e.duplicate()),
            None => Ok(SelectionBlocks { batch: self, selection, index }),
        }
    }
}

/// A plane of a group: borrowed if it is stored raw, owned if it was decoded.
pub type PlaneBytes<'a> = Cow<'a, [u8]>;

/// The blocks of one selection of a [`ReadBatch`].
#[derive(Clone, Copy)]
pub struct SelectionBlocks<'a> {
    batch: &'a ReadBatch,
    pub(super) selection: &'a Arc<SelectionInner>,
    index: usize,
}

impl<'a> SelectionBlocks<'a> {
    pub(super) fn parts(&self) -> impl Iterator<Item = &'a PartBuffer> + use<'a> {
        let index = self.index;
        self.batch.parts.iter().filter(move |p| p.part.selection == index)
    }

    /// Returns the planes of the `nth` selected group: K `[kv_heads, G, key_dim]` and V `[kv_heads, G, value_dim]`, as
    /// little-endian elements of the layout's dtype.
    ///
    /// If pages of [stored clusters](crate::Sequence::store_clusters) give all entries of the group, its other rows are
    /// zero.
    ///
    /// Planes with a [codec](crate::layout::KvLayoutBuilder::codec) are decoded. The K plane is empty if
    /// [values only](crate::PlaneSet) were read, because attention reconstructs the keys itself.
    ///
    /// # Errors
    /// The selection has fewer groups.
    pub fn group(&self, nth: usize) -> Result<(PlaneBytes<'a>, PlaneBytes<'a>)> {
        if self.selection.groups.get(nth).is_some_and(|group| !group.is_needed()) {
            return self.planes_of_pages(nth);
        }
        let (keys, values) = self.stored(nth)?;
        let coder = BlockCoder::of(&self.selection.layout, self.selection.layer);
        let decoded = |plane: usize, stored: &'a [u8]| -> Result<PlaneBytes<'a>> {
            match &coder {
                Some(coder) if coder.encodes(plane) && !stored.is_empty() => {
                    let mut plain = vec![0; coder.plain_bytes(plane)];
                    coder.decode_plane(plane, stored, &mut plain)?;
                    Ok(Cow::Owned(plain))
                }
                _ => Ok(Cow::Borrowed(stored)),
            }
        };
        Ok((decoded(0, keys)?, decoded(1, values)?))
    }

    /// Returns the planes of a group whose block is not read. Rows of entries that no page gives are zero.
    fn planes_of_pages(&self, nth: usize) -> Result<(PlaneBytes<'a>, PlaneBytes<'a>)> {
        let (index, tokens) = (self.selection.groups[nth].index, self.selection.group_tokens());
        let block = self.selection.layout.plain_block(self.selection.layer);
        let mut planes = [vec![0; block.plane(0).1], vec![0; block.plane(1).1]];
        for PartBuffer { part, buffer } in self.parts() {
            for (at, page) in self.selection.pages[part.pages.clone()].iter().enumerate() {
                let own = &page.chosen;
                let bytes = page_bytes(self.selection, part, buffer.as_deref(), at)?;
                for (slot, token) in own.rows.iter().filter(|row| u64::from(row.1) / tokens as u64 == index) {
                    let row = (*token as usize % tokens, tokens);
                    take_entry(&own.geometry, own.heads, bytes, usize::from(*slot), &mut planes, row);
                }
            }
        }
        let [keys, values] = planes;
        Ok((Cow::Owned(keys), Cow::Owned(values)))
    }

    /// Returns the planes of the `nth` selected group as they are stored.
    pub(crate) fn stored(&self, nth: usize) -> Result<(&'a [u8], &'a [u8])> {
        let part = self.parts().find(|p| p.part.groups.contains(&nth));
        let Some(PartBuffer { part, buffer }) = part else {
            return Err(not_there(&format!("group {nth}; the selection has {}", self.selection.groups.len())));
        };
        planes(self.batch.selections[self.index].as_ref(), part, buffer.as_deref(), nth)
    }
}
