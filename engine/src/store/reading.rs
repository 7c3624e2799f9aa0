//! Reads of selections: on demand or ahead of need, into memory of the store or of the embedder.

use super::Store;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::region::ReadRegion;
use crate::plan::{ReadPriority, Selection, SelectionInner};
use crate::read::{AttendOptions, ReadBatch, ReadTicket};
use std::sync::Arc;

/// A read of selections, made by [`Store::read`]. It starts with [`Self::submit`],
/// [`Self::wait`] or [`Self::attend`].
#[derive(Clone, Copy)]
#[must_use = "a read starts with submit, wait or attend"]
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
    /// selection of another store, or of an earlier opening of this one. [`ErrorKind::InUse`]: a parent of this process
    /// opened the store.
    pub fn submit(self) -> Result<ReadTicket> {
        let priority = if self.prefetch { ReadPriority::Ahead } else { ReadPriority::Demand(None) };
        let selections = self.store.own_selections(self.selections)?;
        let devices = Arc::clone(&self.store.inner.devices);
        match self.region {
            None => ReadTicket::new(devices, selections, priority),
            Some(region) => ReadTicket::into_region(devices, selections, priority, region),
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
        ReadTicket::read_blocking(Arc::clone(&self.store.inner.devices), self.store.own_selections(self.selections)?)
    }

    /// Reads, verifies and attends in one call: each stretch of blocks as it arrives, while it is in the processor's
    /// cache. `queries` has one query `[q_heads, key_dim]` per selection. Writes `outs`, each `[q_heads, value_dim]`.
    ///
    /// Returns the bytes that it read from devices. The bits of the outputs equal those of [`attend`](crate::attend)
    /// over the whole batch. Use [`Self::wait`] if blocks are needed after the call. Large reads may use
    /// [a second thread](crate::StoreOptions::attend_helper).
    ///
    /// A selection that cannot be read does not keep the others of a demand read from being attended.
    ///
    /// # Errors
    /// The errors of [`Self::submit`] and [`ReadTicket::attend`], of the first selection that has one.
    /// [`ErrorKind::InvalidArgument`]: the numbers of queries, outputs and selections differ.
    pub fn attend(self, queries: &[&[f32]], options: &AttendOptions, outs: &mut [&mut [f32]]) -> Result<u64> {
        let count = self.selections.len();
        if queries.len() != count || outs.len() != count {
            let (queries, outs) = (queries.len(), outs.len());
            let text = format!("attend: {queries} queries and {outs} outputs for {count} selections");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let selections = self.store.own_selections(self.selections)?;
        if self.prefetch || self.region.is_some() {
            let mut ticket = self.submit()?;
            for (index, (query, out)) in queries.iter().zip(outs).enumerate() {
                ticket.attend(index, query, self.selections[index], options, out)?;
            }
            return Ok(ticket.device_bytes());
        }
        ReadTicket::attend_blocking(&self.store.inner.devices, selections, queries, options, outs)
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

    /// Plans a demand read without submitting it.
    pub(crate) fn read_later(&self, selections: &[&Selection]) -> Result<ReadTicket> {
        ReadTicket::demand(Arc::clone(&self.inner.devices), self.own_selections(selections)?)
    }

    /// Reads selections with a priority.
    pub(crate) fn read_as(&self, selections: &[&Selection], priority: ReadPriority<'_>) -> Result<ReadTicket> {
        ReadTicket::new(Arc::clone(&self.inner.devices), self.own_selections(selections)?, priority)
    }

    /// Checks that selections are of this opening of the store.
    fn own_selections(&self, selections: &[&Selection]) -> Result<Vec<Arc<SelectionInner>>> {
        let own = self.inner.devices.identity.instance;
        if let Some(at) = selections.iter().position(|selection| selection.inner.instance != own) {
            let text = format!("read: selection {at} is of another store, or of an earlier opening of this one");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(selections.iter().map(|selection| Arc::clone(&selection.inner)).collect())
    }
}
