//! What a read brought.

use super::verify::not_there;
use crate::codec::BlockCoder;
use crate::error::{Error, Result};
use crate::io::buffer::arena::Lease;
use crate::plan::ReadPart;
use crate::plan::SelectionInner;
use std::borrow::Cow;
use std::sync::Arc;

pub(super) struct PartBuffer {
    pub(super) part: ReadPart,
    pub(super) buffer: Option<Arc<Lease>>,
}

/// The blocks of one or more views, in memory and checked. Owns its buffers; they return when it is dropped.
pub struct ReadBatch {
    pub(super) views: Vec<Arc<SelectionInner>>,
    pub(super) parts: Vec<PartBuffer>,
    pub(super) failures: Vec<Option<Error>>,
}

impl ReadBatch {
    pub(super) fn new(views: Vec<Arc<SelectionInner>>, parts: Vec<PartBuffer>, failures: Vec<Option<Error>>) -> Self {
        Self { views, parts, failures }
    }

    /// Views in it, in the order they were given.
    #[must_use]
    pub fn len(&self) -> usize {
        self.views.len()
    }

    /// Whether it holds no view.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.views.is_empty()
    }

    /// The blocks of view `index`.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`](crate::ErrorKind::Corruption) when a block of this view is damaged,
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) when one could not be read,
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) when there is no such view.
    pub fn get(&self, index: usize) -> Result<SelectionBlocks<'_>> {
        let Some(view) = self.views.get(index) else {
            return Err(not_there(&format!("view {index} of a read of {}", self.views.len())));
        };
        match &self.failures[index] {
            Some(e) => Err(e.duplicate()),
            None => Ok(SelectionBlocks { batch: self, view, index }),
        }
    }
}

/// A plane of a group: borrowed where it is stored so, owned where it was decoded.
pub type PlaneBytes<'a> = Cow<'a, [u8]>;

/// The blocks of one view of a [`ReadBatch`].
#[derive(Clone, Copy)]
pub struct SelectionBlocks<'a> {
    batch: &'a ReadBatch,
    pub(super) view: &'a Arc<SelectionInner>,
    index: usize,
}

impl<'a> SelectionBlocks<'a> {
    pub(super) fn parts(&self) -> impl Iterator<Item = &'a PartBuffer> + use<'a> {
        let index = self.index;
        self.batch.parts.iter().filter(move |p| p.part.view == index)
    }

    /// Keys and values of the `nth` selected group: the K plane `[kv_heads, G, key_dim]` and the V plane
    /// `[kv_heads, G, value_dim]`, little-endian elements of the layout's dtype. They are borrowed where they are stored so, and decoded
    /// where the layout has [a codec](crate::KvLayoutBuilder::codec). The K plane is empty where
    /// [values alone](crate::Planes) were read: attention rebuilds keys for itself.
    ///
    /// # Errors
    /// The view selected fewer groups.
    pub fn group(&self, nth: usize) -> Result<(PlaneBytes<'a>, PlaneBytes<'a>)> {
        let (keys, values) = self.stored(nth)?;
        let coder = BlockCoder::of(&self.view.layout, self.view.layer);
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

    /// The planes of the `nth` selected group as they are stored.
    pub(crate) fn stored(&self, nth: usize) -> Result<(&'a [u8], &'a [u8])> {
        let part = self.parts().find(|p| p.part.units.contains(&nth));
        let Some(PartBuffer { part, buffer }) = part else {
            return Err(not_there(&format!("group {nth} of a view of {}", self.view.units.len())));
        };
        super::attend::planes(self.batch.views[self.index].as_ref(), part, buffer.as_deref(), nth)
    }
}
