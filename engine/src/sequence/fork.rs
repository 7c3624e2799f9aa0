//! Forking: a second sequence that starts with the same tokens. Frames are shared; what is in memory is copied.
//!
//! A fork leaves no trace until its first commit. That commit announces every frame it took over, with its references.
//! A frame that the manifest knows already is not written again. Until then its segments are held as for a reader.
//!
//! Derived frames are shared too, but their segments are not held. The first commit leaves out those that are gone.

use super::errors::no_memory;
use super::handle::Sequence;
use crate::catalog::DerivedRef;
use crate::error::Result;
use crate::log::SequenceIdentity;
use crate::metrics::lock;

impl Sequence {
    /// Returns a sequence without a key that starts with all tokens of this one, its token ids and its caller's state.
    ///
    /// From then on the two are independent: each is appended to, truncated, committed and deleted by itself. Frames
    /// are shared. Groups in memory are shared too, and each sequence writes them with its own frames. No data is
    /// written.
    ///
    /// The first commit of the fork stores it and also commits what it took over, whether this sequence commits that or
    /// not. A fork that is dropped before its first commit leaves nothing behind.
    ///
    /// ```
    /// use stratakv::{ByteSize, CreateOptions, Durability, KvLayout, Store, TensorView};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// let store = Store::options().device(dir.path()).segment_bytes(ByteSize::mib(1)).open()?;
    /// let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).build()?;
    /// let mut prompt = store.create_sequence(&layout, CreateOptions::new())?;
    /// let rows = vec![0.5_f32; 20 * 8];
    /// let tensor = TensorView::token_major(&rows, 20, 1, 8);
    /// prompt.append(0, tensor, tensor)?;
    /// prompt.commit(Durability::Sync)?;
    ///
    /// // Two answers to one prompt.
    /// let mut answer = prompt.fork()?;
    /// answer.append(0, tensor, tensor)?;
    /// answer.commit(Durability::Lazy)?;
    /// assert_eq!((prompt.len(), answer.len()), (20, 40));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`crate::ErrorKind::MemoryLimit`]: no memory for its tails or tables. [`crate::ErrorKind::NoSpace`],
    /// [`crate::ErrorKind::Io`]: frames in flight could not be written. After an error nothing has changed.
    pub fn fork(&mut self) -> Result<Self> {
        self.fork_as("")
    }

    /// Returns a fork, as [`Sequence::fork`], with a key.
    ///
    /// # Errors
    /// As [`Sequence::fork`]; [`crate::ErrorKind::AlreadyExists`]: the key is taken.
    pub fn fork_as(&mut self, key: &str) -> Result<Self> {
        self.fork_with(key).map_err(|e| e.during(format!("fork of sequence {}", self.identity.sequence)))
    }

    /// Returns the derived frames that a fork shares.
    pub(super) fn shared_derived(&self) -> Vec<DerivedRef> {
        self.frames.share_derived(&lock(&self.store.catalog), self.identity.sequence, &self.commits)
    }

    fn fork_with(&mut self, key: &str) -> Result<Self> {
        self.store.committer.check()?;
        self.store.committer.check_memory()?;
        self.land_all()?;
        let (id, lock) = self.store.claim(key)?;
        let parent = Some((self.identity.sequence, self.len()));
        // The fork may live as long, and be evicted as early, as this sequence.
        let identity = SequenceIdentity { sequence: id, parent, key: key.to_owned(), ..self.identity.clone() };
        let records = identity.create_records(self.store.devices.environment.unix_ms());
        let mut child = Self::new(lock, identity, records, self.summary_residency())?;
        child.layers.copy_from(&mut self.layers)?;
        child.token_ids = self.token_ids.fork();
        child.commits.settle_fork(self.commits.settled());
        child.caller_state = self.caller_state.fork();
        child.frames.adopt(self.frames.share(), self.shared_derived());
        child.account().map_err(|_| no_memory("the index of a fork"))?;
        Ok(child)
    }
}
