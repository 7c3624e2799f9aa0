//! Options of a sequence, of its commits, and of its selections.

use crate::error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The promise of a commit when it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Durability {
    /// It survives power loss: the data and then the manifest record are on stable storage.
    Sync,
    /// It is queued, and durable within [`StoreOptions::lazy_delay`](crate::StoreOptions::lazy_delay) or at close. A
    /// crash before that loses it.
    Lazy,
    /// It never costs a sync, and a crash may lose it. It becomes durable with the next commit of another kind, or at
    /// close.
    None,
}

/// A summary that a sequence stores with its groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoredSummary {
    /// Element-wise minimum and maximum of the keys of each group (LeoAM section 4.1; Quest).
    MinMax,
}

/// Where a handle of a sequence keeps its summaries.
///
/// It applies to min/max records ([`StoredSummary::MinMax`]) and to stored summaries of selectors
/// ([`Sequence::attach_stored`](crate::Sequence::attach_stored)). Selections are equal to the bit. Forks and readers
/// inherit it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SummaryResidency {
    /// In memory. They are read when the sequence is opened.
    #[default]
    Resident,
    /// On the devices (LeoAM). A selection reads the records of its layer in one batch and frees them afterwards.
    ///
    /// Groups that are not on a device yet keep their summaries in memory.
    /// [`Pipeline::stream`](crate::pipeline::Pipeline::stream) reads records ahead.
    Streamed,
    /// Min/max records on the devices, and summaries of selectors in memory: for sequences that store bounds, but are
    /// selected by another method.
    BoundsStreamed,
}

/// How a sequence is created.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CreateOptions {
    pub(crate) key: String,
    pub(crate) summaries: Vec<StoredSummary>,
    pub(crate) residency: SummaryResidency,
    /// 0 stands for the default of 1.
    pub(crate) copies: u8,
    pub(crate) ttl_ms: u64,
    pub(crate) evictable: u8,
}

impl CreateOptions {
    /// Returns options without a key and without summaries.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the key to open it by, up to 512 bytes. A sequence without a key is opened by its id.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = key.into();
        self
    }

    /// Sets the copies of everything that the sequence writes, each on another device: 1 to 3. Default 1.
    ///
    /// Reads are balanced over the copies. No data is lost with a device as long as another device has a copy.
    #[must_use]
    pub fn copies(mut self, copies: u8) -> Self {
        self.copies = if copies == 0 { u8::MAX } else { copies };
        self
    }

    /// Sets its time to live from its creation, in whole milliseconds. After that it is deleted as soon as no handle is
    /// open.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX).max(1);
        self
    }

    /// Allows its deletion if space is short and no handle is open. 0, the default, forbids it.
    ///
    /// Sequences of the highest `priority` are evicted first, among them the least recently used.
    #[must_use]
    pub fn evictable(mut self, priority: u8) -> Self {
        self.evictable = priority;
        self
    }

    /// Adds a summary that is stored with the groups.
    #[must_use]
    pub fn store_summary(mut self, summary: StoredSummary) -> Self {
        if !self.summaries.contains(&summary) {
            self.summaries.push(summary);
        }
        self
    }

    /// Sets where this handle keeps its summaries. Later handles set it in [`OpenSequence`](crate::OpenSequence).
    #[must_use]
    pub fn summary_residency(mut self, summaries: SummaryResidency) -> Self {
        self.residency = summaries;
        self
    }
}

/// How many tokens of a layer a step attends to, with the tail and the newest groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// Every token.
    All,
    /// This many tokens.
    Tokens(usize),
    /// This share of the layer's tokens, above 0 and at most 1.
    Share(f64),
}

impl Budget {
    /// Returns a budget of this many tokens.
    #[must_use]
    pub const fn tokens(tokens: usize) -> Self {
        Self::Tokens(tokens)
    }

    /// Returns a budget of this share of the layer's tokens.
    #[must_use]
    pub const fn share(share: f64) -> Self {
        Self::Share(share)
    }

    /// Returns the tokens of a layer of `length` tokens.
    ///
    /// # Errors
    /// Zero tokens, or a share outside (0, 1].
    pub fn of(self, length: usize) -> Result<usize> {
        let wrong = |what: &str| Err(Error::new(ErrorKind::InvalidArgument, format!("budget: {what}")));
        match self {
            Self::All => Ok(length),
            Self::Tokens(0) => wrong("0 tokens are too few; give at least 1"),
            Self::Tokens(tokens) => Ok(tokens.min(length)),
            Self::Share(share) if share > 0.0 && share <= 1.0 => Ok((length as f64 * share) as usize),
            Self::Share(share) => wrong(&format!("share {share} is not in (0, 1]")),
        }
    }
}
