//! Reads of selections: on demand or ahead of need, into memory of the store or of the embedder.

use super::Store;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::region::ReadRegion;
use crate::plan::{ReadPriority, Selection, SelectionInner};
use crate::read::{ReadBatch, ReadTicket};
use std::sync::Arc;

/// A read of selections, made by [`Store::read`]. It starts with [`Self::submit`] or [`Self::wait`].
#[derive(Clone, Copy)]
#[must_use = "a read starts with submit or wait"]
pub struct ReadRequest<'a> {
    store: &'a Store,
    selections: &'a [&'a Selection],
    region: Option<&'a ReadRegion>,
    prefetch: bool,
}

impl<'a> ReadRequest<'a> {
    /// Reads into memory of the embedder.
    ///
    /// Blocks from devices are in `region` until the batch is dropped, at [`ReadRegion::offset_of`]. Tails and cached
    /// blocks stay in the store's memory.
    pub fn into_region(mut self, region: &'a ReadRegion) -> Self {
        self.region = Some(region);
        self
    }

    /// Reads selections that may be needed soon. Devices serve prefetches after other reads and before writes. A cache
    /// does not count them as uses.
    pub fn prefetch(mut self) -> Self {
        self.prefetch = true;
        self
    }

    /// Submits the read and returns at once. Wait on the ticket, or compute while blocks arrive.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]: it can never fit in memory, or in the region. [`ErrorKind::InvalidArgument`]: a
    /// selection of another store, or of an earlier opening of this one.
    pub fn submit(self) -> Result<ReadTicket> {
        let priority = if self.prefetch { ReadPriority::Ahead } else { ReadPriority::Demand(None) };
        let views = self.store.own_views(self.selections)?;
        let devices = Arc::clone(&self.store.inner.devices);
        match self.region {
            None => ReadTicket::new(devices, views, priority),
            Some(region) => ReadTicket::into_region(devices, views, priority, region),
        }
    }

    /// Submits the read, waits for everything and verifies it. A damaged selection does not hide the others: see
    /// [`ReadBatch::get`].
    ///
    /// A read on demand into the store's memory runs on the calling thread. No other thread is woken, which makes small
    /// batches faster.
    ///
    /// # Errors
    /// The errors of [`Self::submit`] and [`ReadTicket::wait`].
    pub fn wait(self) -> Result<ReadBatch> {
        if self.prefetch || self.region.is_some() {
            return self.submit()?.wait();
        }
        ReadTicket::read_blocking(Arc::clone(&self.store.inner.devices), self.store.own_views(self.selections)?)
    }
}

impl std::fmt::Debug for ReadRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadRequest")
            .field("selections", &self.selections)
            .field("region", &self.region)
            .field("prefetch", &self.prefetch)
            .finish_non_exhaustive()
    }
}

impl Store {
    /// Requests the blocks of selections, of many layers and many sequences in one batch.
    ///
    /// ```
    /// use stratakv::{ByteSize, CreateOptions, Durability, KvLayout, SelectRequest, Store, TensorView, attend};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// let store = Store::options().device(dir.path()).segment_bytes(ByteSize::mib(1)).open()?;
    /// let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).group_tokens(16).build()?;
    /// let mut sequence = store.create_sequence(&layout, CreateOptions::new())?;
    /// let rows = vec![0.5_f32; 160 * 8];
    /// let tensor = TensorView::token_major(&rows, 160, 1, 8);
    /// sequence.append(0, tensor, tensor)?;
    /// sequence.commit(Durability::Sync)?;
    ///
    /// let selection = sequence.select(0, SelectRequest::groups(&[0, 7]))?;
    /// let ticket = store.read(&[&selection]).submit()?; // The device works while this thread computes.
    /// let batch = ticket.wait()?;
    /// let mut out = [0.0_f32; 8];
    /// attend(&[1.0; 8], &selection, batch.get(0)?, &mut out)?;
    /// assert_eq!(out, [0.5; 8]);
    /// # Ok(()) }
    /// ```
    pub fn read<'a>(&'a self, selections: &'a [&'a Selection]) -> ReadRequest<'a> {
        ReadRequest { store: self, selections, region: None, prefetch: false }
    }

    /// Reads selections with a priority.
    pub(crate) fn read_as(&self, views: &[&Selection], urgency: ReadPriority<'_>) -> Result<ReadTicket> {
        ReadTicket::new(Arc::clone(&self.inner.devices), self.own_views(views)?, urgency)
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
}
