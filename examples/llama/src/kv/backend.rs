//! Where the command line's caches come from: one store per run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::ValueEnum;
use stratakv::retrieval::{Adapter, HeadAggregation, Selector};
use stratakv::{
    ByteSize, CacheOptions, CachePolicy, CreateOptions, Durability, ErrorKind, KvLayout, OpenSequence, PlaneCodec,
    Store, StoreOptions, StoreStatus, StoredSummary, SummaryResidency,
};
use tempfile::TempDir;

use super::KvGeometry;
use super::memory::{MemoryKv, MemoryPolicy};
use super::method::Method;
use super::store::{StoreKv, StorePolicy, engine_error, kv_layout};
use crate::budget::Budget;
use crate::process;

/// Tokens a decode step attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// All.
    Full,
    /// The first four and the newest ones, within the budget.
    Window,
    /// The groups whose key bounds promise the highest scores, within the budget.
    Minmax,
    /// Low-rank keys of all heads together (needs --adapters).
    Kvswap,
    /// A tree of key bounds, looked into where it matters.
    Leoam,
    /// Mean keys of groups, and the groups unlike their mean.
    Shadowkv,
    /// Transform-coded keys (needs --adapters).
    TransformCoded,
    /// Sign bits of rotated keys.
    Signs,
    /// Ranks per KV head by low-rank keys (needs --adapters).
    Infinigen,
    /// Exact scores; for evaluation, keeps all keys in memory.
    Oracle,
}

impl Policy {
    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Window => "window",
            Self::Minmax => "minmax",
            Self::Kvswap => "kvswap",
            Self::Leoam => "leoam",
            Self::Shadowkv => "shadowkv",
            Self::TransformCoded => "tck",
            Self::Signs => "signs",
            Self::Infinigen => "infinigen",
            Self::Oracle => "oracle",
        }
    }
}

/// Tokens the `window` policy keeps from the beginning (StreamingLLM's attention sinks).
pub const SINKS: usize = 4;

/// Segment files in a temporary directory, which holds one prompt at a time.
const TEMPORARY_SEGMENT_BYTES: u64 = 16 << 20;

/// What the command line says about the cache.
#[derive(Clone, Debug)]
pub struct KvOptions {
    /// Tokens to attend.
    pub policy: Policy,
    /// The method behind the policy, where it is one of a selector.
    pub method: Option<Method>,
    /// Directory of adapters.
    pub adapters: Option<PathBuf>,
    /// First layers that attend to everything.
    pub dense_layers: usize,
    /// MiB of blocks that stay in memory; 0 for none.
    pub cache_mib: u64,
    /// Where sequences have their min/max records.
    pub summaries: SummaryResidency,
    /// How many of them.
    pub budget: Budget,
    /// Tokens per group.
    pub group_tokens: usize,
    /// How groups are stored.
    pub codec: PlaneCodec,
    /// Device directories; empty: a temporary one, removed at the end.
    pub devices: Vec<PathBuf>,
    /// Bound on the store's memory in bytes; `None`: the engine's default.
    pub memory_limit: Option<u64>,
    /// Whether decode steps read ahead what predicted queries select.
    pub read_ahead: bool,
    /// What a commit promises: [`Durability::Sync`] where sequences outlive the run.
    pub durability: Durability,
}

/// The store of one run.
pub struct Backend {
    store: Store,
    geometry: KvGeometry,
    layout: KvLayout,
    policy: StorePolicy,
    selector: Option<(Arc<dyn Selector>, HeadAggregation)>,
    rank: Option<usize>,
    dense_layers: usize,
    summaries: SummaryResidency,
    budget: Budget,
    read_ahead: bool,
    durability: Durability,
    /// `read_bytes` of `/proc/self/io` when the store was open.
    io_begin: Option<u64>,
    temporary: Option<Temporary>,
}

struct Temporary {
    directory: TempDir,
    in_memory: bool,
}

/// Opens or creates the store that the options ask for. `fingerprint` is that of model, weights and rope.
///
/// # Errors
/// A geometry the engine does not take, no place for a temporary directory, and what the engine reports.
pub fn open(options: &KvOptions, geometry: KvGeometry, fingerprint: [u8; 32]) -> Result<Backend> {
    let layout = kv_layout(&geometry, options.group_tokens, options.codec, fingerprint)?;
    // Said by the layout; caches are those of the model whether it is said or not.
    let geometry = KvGeometry { rope: None, ..geometry };
    let policy = match options.policy {
        Policy::Full => StorePolicy::Full,
        Policy::Window => StorePolicy::Window { sinks: SINKS, budget: options.budget },
        // Until its selector is attached, a cache of another method would choose by bounds.
        _ => StorePolicy::MinMax { budget: options.budget },
    };
    // Bytes are what is measured: none between two blocks.
    let mut settings = StoreOptions::default().gap_limit(ByteSize(0));
    if let Some(limit) = options.memory_limit {
        settings.memory_limit = ByteSize(limit);
    }
    if options.cache_mib > 0 {
        // What every step asks for goes last: LeoAM's table of access frequencies.
        let policy = CachePolicy::CostEffective { base_us: 80, mib_per_s: 1000 };
        settings.cache = Some(CacheOptions::new(ByteSize::mib(options.cache_mib)).policy(policy));
    }
    let mut temporary = None;
    if options.devices.is_empty() {
        let place = temporary_directory()?;
        settings = settings.device(place.directory.path());
        settings.segment_bytes = Some(ByteSize(TEMPORARY_SEGMENT_BYTES));
        temporary = Some(place);
    }
    for device in &options.devices {
        settings = settings.device(device);
    }
    let store = settings.open().map_err(|e| engine_error(e.during("cannot open the store")))?;
    let io_begin = process::read_bytes();
    let selector = match &options.method {
        Some(method) => {
            method.selector(options.adapters.as_deref(), Some((&store, &layout)))?.map(|s| (s, method.form))
        }
        None => None,
    };
    let (durability, dense_layers, budget) = (options.durability, options.dense_layers, options.budget);
    let read_ahead = options.read_ahead;
    Ok(Backend {
        store,
        geometry,
        layout,
        policy,
        selector,
        rank: options.method.as_ref().and_then(Method::rank),
        dense_layers,
        summaries: options.summaries,
        budget,
        read_ahead,
        durability,
        io_begin,
        temporary,
    })
}

impl Backend {
    /// The selector of a method, with an adapter from the files in `adapters`, or from the store.
    ///
    /// # Errors
    /// As [`Method::selector`].
    pub fn selector(&self, method: &Method, adapters: Option<&Path>) -> Result<Option<Arc<dyn Selector>>> {
        method.selector(adapters, Some((&self.store, &self.layout)))
    }

    /// Stores an adapter for this model and group size, in the version after those that are there under its name, and then
    /// removes these: whenever it is interrupted there is one. Numbers that are there already stay. Gives name and version.
    ///
    /// # Errors
    /// What the engine reports.
    pub fn put_adapter(&self, adapter: &Adapter) -> Result<String> {
        let name = adapter.name();
        // Those of other layouts are among them: their versions only make the next one higher.
        let known = self.store.adapters().into_iter().filter(|a| a.name == name);
        let known: Vec<u32> = known.map(|a| a.version).collect();
        let newest = self.store.adapter(&self.layout, name, None).ok();
        let kept = match newest.filter(|newest| newest.layers() == adapter.layers()) {
            Some(same) => same,
            None => {
                let version = known.iter().max().map_or(1, |version| version.saturating_add(1));
                let next = Adapter::new(name, version, adapter.layers().to_vec()).map_err(engine_error)?;
                self.store.put_adapter(&self.layout, &next, 1).map_err(engine_error)?;
                next
            }
        };
        for version in known.into_iter().filter(|version| *version != kept.version()) {
            match self.store.delete_adapter(&self.layout, name, version) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(engine_error(e)),
                _ => {}
            }
        }
        Ok(kept.id())
    }

    /// The cache of a session, with what its last commit left; an empty one for a new name.
    ///
    /// # Errors
    /// A stored sequence of another geometry or model, and what the engine reports.
    pub fn session(&self, name: &str) -> Result<StoreKv> {
        let key = format!("session/{name}");
        let options = OpenSequence::new().layout(&self.layout).summary_residency(self.summaries);
        match self.store.open_sequence_with(&key, options) {
            Ok(sequence) => self.cache(sequence),
            Err(e) if e.kind() == ErrorKind::NotFound => self.create(&key),
            Err(e) => Err(engine_error(e)).with_context(|| format!("session {name:?}")),
        }
    }

    /// An empty cache. One that an earlier run left under this key is replaced; an empty key is none.
    ///
    /// # Errors
    /// What the engine reports.
    pub fn create(&self, key: &str) -> Result<StoreKv> {
        if !key.is_empty() {
            match self.store.open_sequence(key) {
                Ok(old) => old.delete(Durability::Lazy).map_err(engine_error)?,
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                Err(e) => return Err(engine_error(e)),
            }
        }
        // Whatever policy made it, a later run may choose by bounds.
        let options =
            CreateOptions::new().key(key).store_summary(StoredSummary::MinMax).summary_residency(self.summaries);
        let sequence = self.store.create_sequence(&self.layout, options).map_err(engine_error)?;
        self.cache(sequence)
    }

    fn cache(&self, sequence: stratakv::Sequence) -> Result<StoreKv> {
        let mut cache = StoreKv::new(&self.store, sequence, self.geometry.clone(), self.policy, self.durability);
        cache.set_dense_layers(self.dense_layers);
        cache.read_ahead(self.read_ahead);
        if let Some((selector, form)) = &self.selector {
            let selector = cache.attach_stored(Arc::clone(selector)).map_err(engine_error)?;
            cache.set_policy(StorePolicy::Selected { selector, form: *form, budget: self.budget });
            cache.reconstruct_keys(self.rank)?;
        }
        Ok(cache)
    }

    /// An empty cache in memory with full attention: what `full` in the store must give, bit by bit.
    ///
    /// # Errors
    /// None that opening the store would not have reported.
    pub fn in_memory(&self) -> Result<MemoryKv> {
        MemoryKv::new(self.geometry.clone(), MemoryPolicy::Full).with_groups(self.layout.group_tokens())
    }

    /// How the store runs.
    #[must_use]
    pub fn status(&self) -> StoreStatus {
        self.store.status()
    }

    /// Lines for the end of a report: where the bytes went, how they were read.
    #[must_use]
    pub fn notes(&self, steps: u64) -> Vec<String> {
        let status = self.status();
        let mut lines = Vec::new();
        for device in &status.devices {
            let direct = if device.direct { "direct I/O" } else { "no direct I/O: this file system does not take it" };
            let (reads, writes) = (device.counters.reads, device.counters.writes);
            lines.push(format!(
                "device {}: driver {}, {direct}, {reads} reads, {writes} writes, {} syncs",
                device.path, device.driver, device.counters.syncs
            ));
            lines.extend(device.notes.iter().map(|note| format!("  {note}")));
        }
        if let Some(temporary) = &self.temporary {
            let memory = if temporary.in_memory { ", which is memory (tmpfs), not a disk: give --device" } else { "" };
            lines.push(format!("  a temporary directory{memory}"));
        }
        let read: u64 = status.devices.iter().map(|d| d.counters.read_bytes).sum();
        let per_step = |bytes: u64| bytes.checked_div(steps).unwrap_or(0);
        let told = match (self.io_begin, process::read_bytes()) {
            (Some(begin), Some(now)) => format!("{} bytes per step as /proc/self/io has it", per_step(now - begin)),
            _ => "/proc/self/io tells nothing".to_owned(),
        };
        lines.push(format!(
            "read by {steps} decode steps: {} bytes per step at device completions, {told}",
            per_step(read)
        ));
        lines.push(format!(
            "store: {} bytes written, {} bytes of files; memory {} of {} bytes at most; I/O buffers on {} pages",
            status.written_bytes,
            status.file_bytes,
            status.memory.peak_bytes,
            status.memory.limit_bytes,
            status.pages.as_deref().unwrap_or("no")
        ));
        lines
    }

    /// Closes the store. All caches must be finished.
    ///
    /// # Errors
    /// What the engine reports.
    pub fn close(self) -> Result<()> {
        self.store.close().map_err(engine_error)?;
        match self.temporary {
            Some(place) => place.directory.close().context("cannot remove the temporary directory"),
            None => Ok(()),
        }
    }
}

/// A directory of mode 0700, on a disk where there is one: under the system's temporary directory or the current one.
fn temporary_directory() -> Result<Temporary> {
    let places = [std::env::temp_dir(), std::env::current_dir().unwrap_or_default()];
    let make = |place: &PathBuf| tempfile::Builder::new().prefix("kvrun-").tempdir_in(place);
    for place in &places {
        if let (false, Ok(directory)) = (in_memory(place), make(place)) {
            return Ok(Temporary { directory, in_memory: false });
        }
    }
    let directory = make(&places[0])
        .with_context(|| format!("cannot make a directory in {}; give --device", places[0].display()))?;
    Ok(Temporary { directory, in_memory: true })
}

fn in_memory(place: &std::path::Path) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58f6;
    // The field's type differs between architectures.
    #[allow(clippy::unnecessary_cast, clippy::cast_sign_loss)]
    rustix::fs::statfs(place).is_ok_and(|s| [TMPFS, RAMFS].contains(&(s.f_type as u64 & 0xffff_ffff)))
}
