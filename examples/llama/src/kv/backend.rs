//! Where the command line's caches come from.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::ValueEnum;

use super::memory::MemoryPolicy;
use super::{KvCache, KvGeometry, MemoryKv};
use crate::budget::Budget;

/// Tokens a decode step attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// All.
    Full,
    /// The first four and the newest ones, within the budget.
    Window,
    /// The groups whose key bounds promise the highest scores, within the budget.
    Minmax,
}

impl Policy {
    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Window => "window",
            Self::Minmax => "minmax",
        }
    }
}

/// Tokens the `window` policy keeps from the beginning (StreamingLLM's attention sinks).
pub const SINKS: usize = 4;

/// What the command line says about the cache.
#[derive(Clone, Debug)]
pub struct KvOptions {
    /// Tokens to attend.
    pub policy: Policy,
    /// How many of them.
    pub budget: Budget,
    /// Tokens per group.
    pub group_tokens: usize,
    /// Device directories; empty: none given.
    pub devices: Vec<PathBuf>,
    /// Bound on resident keys, values and summaries in bytes.
    pub memory_limit: Option<u64>,
    /// Whether sequences without a name outlive the run.
    pub keep: bool,
}

/// Makes caches and takes them back.
pub trait Backend {
    /// The cache of a named sequence, with what its last commit left; an empty one for a new name.
    ///
    /// # Errors
    /// A stored sequence of another geometry or model, and what the medium reports.
    fn open(&mut self, name: &str) -> Result<Box<dyn KvCache>>;

    /// Takes a cache back: keeps the sequence, or deletes it.
    ///
    /// # Errors
    /// What the medium reports.
    fn close(&mut self, name: &str, cache: Box<dyn KvCache>, keep: bool) -> Result<()>;

    /// Lines for the end of a report: where the bytes went, how they were read.
    fn notes(&self) -> Vec<String>;
}

/// Caches in memory; nothing outlives the process.
pub struct MemoryBackend {
    geometry: KvGeometry,
    policy: MemoryPolicy,
}

/// The backend that the options ask for.
///
/// # Errors
/// Options that no backend of this build can serve.
pub fn open(options: &KvOptions, geometry: KvGeometry) -> Result<Box<dyn Backend>> {
    if !options.devices.is_empty() {
        bail!("--device: this build keeps keys and values in memory only");
    }
    let policy = match options.policy {
        Policy::Full => MemoryPolicy::Full,
        Policy::Window => MemoryPolicy::Window { sinks: SINKS, budget: options.budget },
        Policy::Minmax => bail!("--policy minmax: this build keeps keys and values in memory only, without summaries"),
    };
    Ok(Box::new(MemoryBackend { geometry, policy }))
}

impl Backend for MemoryBackend {
    fn open(&mut self, _name: &str) -> Result<Box<dyn KvCache>> {
        Ok(Box::new(MemoryKv::new(self.geometry.clone(), self.policy)))
    }

    fn close(&mut self, _name: &str, _cache: Box<dyn KvCache>, _keep: bool) -> Result<()> {
        Ok(())
    }

    fn notes(&self) -> Vec<String> {
        vec!["keys and values in memory".to_owned()]
    }
}
