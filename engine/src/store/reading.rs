//! Reads of selections, in the three ways that the store offers.

use super::Store;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::region::ReadRegion;
use crate::plan::{ReadPriority, Selection, SelectionInner};
use crate::read::{ReadBatch, ReadTicket};
use std::sync::Arc;

impl Store {
    /// Reads the blocks of selections, of many layers and many sequences in one batch. Returns at once: wait on the
    /// ticket.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]: it can never fit in memory. [`ErrorKind::InvalidArgument`]: a selection of another
    /// store.
    pub fn read(&self, views: &[&Selection]) -> Result<ReadTicket> {
        self.read_as(views, ReadPriority::Demand(None))
    }

    /// Reads selections that may be needed soon.
    ///
    /// Devices serve these reads after [`Self::read`] and before writes. A cache does not count them as uses.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_ahead(&self, views: &[&Selection]) -> Result<ReadTicket> {
        self.read_as(views, ReadPriority::Ahead)
    }

    /// Reads selections with a priority.
    pub(crate) fn read_as(&self, views: &[&Selection], urgency: ReadPriority<'_>) -> Result<ReadTicket> {
        ReadTicket::new(Arc::clone(&self.inner.devices), self.own_views(views)?, urgency)
    }

    /// Reads as [`Self::read`] does, into memory of the embedder.
    ///
    /// Blocks from devices are in `region` until the batch is dropped, at [`ReadRegion::offset_of`]. Tails and cached
    /// blocks stay in the store's memory.
    ///
    /// # Errors
    /// The errors of [`Self::read`]. [`ErrorKind::MemoryLimit`]: it can never fit in the region.
    pub fn read_into(&self, views: &[&Selection], region: &ReadRegion) -> Result<ReadTicket> {
        ReadTicket::read_into(Arc::clone(&self.inner.devices), self.own_views(views)?, region)
    }

    /// Checks that selections are of this opening of the store.
    fn own_views(&self, views: &[&Selection]) -> Result<Vec<Arc<SelectionInner>>> {
        let own = self.inner.devices.identity.instance;
        if let Some(at) = views.iter().position(|view| view.inner.instance != own) {
            let text = format!("read: selection {at} is of another store, or of an earlier opening of this one");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(views.iter().map(|view| Arc::clone(&view.inner)).collect())
    }

    /// Reads selections as [`Self::read`] and [`ReadTicket::wait`] together do, on the calling thread.
    ///
    /// No other thread is woken, which makes small batches faster. Use [`Self::read`] to compute while blocks arrive.
    ///
    /// # Errors
    /// The errors of [`Self::read`] and [`ReadTicket::wait`].
    pub fn read_now(&self, views: &[&Selection]) -> Result<ReadBatch> {
        ReadTicket::read_now(Arc::clone(&self.inner.devices), self.own_views(views)?)
    }
}
