//! The store that decode steps read, rewritten when another layout is to be measured.

use crate::decode::args::DecodeArgs;
use crate::support::directory::settle;
use crate::support::model::{KvSource, layout_with_codec};
use crate::support::store::open_store_with;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use stratakv::{ByteSize, CreateOptions, Durability, KvLayout, StoreOptions};

/// Memory beside the cache: reads of two layers, uncommitted tokens, frames in flight.
pub(crate) const WORKING_BYTES: u64 = 160 << 20;
/// Tokens of one append.
const CHUNK: usize = 512;

/// The store below a directory, and the layout it was written with.
pub(crate) struct PreparedStore<'a> {
    pub(crate) args: &'a DecodeArgs,
    /// Tokens of each sequence.
    pub(crate) tokens: u32,
    directory: &'a Path,
    layout: Option<KvLayout>,
}

impl<'a> PreparedStore<'a> {
    /// Returns a store below `directory` that is not yet written.
    pub(crate) fn new(args: &'a DecodeArgs, tokens: u32, directory: &'a Path) -> Self {
        Self { args, tokens, directory, layout: None }
    }

    /// Returns the store's own directory.
    pub(crate) fn path(&self) -> PathBuf {
        self.directory.join("store")
    }

    /// Writes the store with a share of the layers under the codec, in place of an earlier one. Returns its layout.
    ///
    /// # Errors
    /// The earlier store cannot be removed, or the new one cannot be written.
    pub(crate) fn write(&mut self, codec_share: f64) -> Result<KvLayout> {
        let layout = layout_with_codec(self.args.layers, self.args.group, self.args.codec.into(), codec_share)?;
        if self.layout.as_ref() == Some(&layout) {
            return Ok(layout);
        }
        let path = self.path();
        if self.layout.take().is_some() {
            std::fs::remove_dir_all(&path).with_context(|| format!("remove {}", path.display()))?;
            settle(self.directory)?;
        }
        self.fill(&path, &layout)?;
        settle(self.directory)?;
        self.layout = Some(layout.clone());
        Ok(layout)
    }

    fn fill(&self, path: &Path, layout: &KvLayout) -> Result<()> {
        let args = self.args;
        let options = StoreOptions::default().memory_limit(ByteSize(WORKING_BYTES * 2));
        let store = open_store_with(&args.common, None, path, options)?;
        let (batch, tokens, layers) = (args.batch, self.tokens, args.layers);
        eprintln!("kvbench: {}: writing {batch} sequences of {tokens} tokens in {layers} layers", path.display());
        let mut source = KvSource::new(CHUNK);
        for member in 0..batch {
            let mut sequence = store.create_sequence(layout, CreateOptions::new().key(key(member)))?;
            source.append(&mut sequence, tokens as usize)?;
            sequence.commit(Durability::Sync)?;
        }
        Ok(store.close()?)
    }
}

/// Returns the key of a sequence of the batch.
pub(crate) fn key(member: u32) -> String {
    format!("decode-{member}")
}
