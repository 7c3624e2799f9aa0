//! Opens the store of one run and makes its caches.
//!
//! 1. [`open`] opens or creates the store of [`KvOptions`]. Without `--device` it uses a temporary directory, which it
//!    prefers to place on a disk.
//! 2. [`Backend::create`] makes an empty sequence. [`Backend::session`] opens a sequence that an earlier run committed.
//!    [`Backend::fork`] makes a second sequence with the same tokens.
//! 3. Each cache gets the run's policy, and its selector if the method has one.
//! 4. [`Backend::notes`] tells what was read and written, and [`Backend::close`] closes the store.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use stratakv::layout::PlaneCodec;
use stratakv::options::{CacheOptions, CachePolicy};
use stratakv::retrieval::{Adapter, HeadAggregation, MethodSpec, Selector};
use stratakv::store::StoreStatus;
use stratakv::{
    ByteSize, CreateOptions, Durability, ErrorKind, KvLayout, OpenSequence, Sequence, Store, StoreOptions,
    StoredSummary, SummaryResidency,
};
use tempfile::TempDir;

use super::cache::KvCache;
use super::error::engine_error;
use super::geometry::KvGeometry;
use super::layout::kv_layout;
use super::memory::{MemoryKv, MemoryPolicy};
use super::method::Policy;
use super::rayon_threads::RayonThreads;
use super::recorded::RecordedQueries;
use super::store::{StoreKv, StorePolicy};
use crate::budget::Budget;
use crate::process;

/// Tokens that the `window` policy keeps from the beginning (StreamingLLM's attention sinks).
pub const SINKS: usize = 4;

/// The size of segment files in a temporary directory, which holds one prompt at a time.
const TEMPORARY_SEGMENT_BYTES: u64 = 16 << 20;

/// The options of a run's store and caches.
#[derive(Clone, Debug)]
pub struct KvOptions {
    /// The rule that chooses which tokens a step attends to.
    pub policy: Policy,
    /// The directory of adapters. `None` takes adapters from the store.
    pub adapters: Option<PathBuf>,
    /// How many of the first layers attend to everything.
    pub dense_layers: usize,
    /// MiB of memory for the cache of blocks. 0 means no cache.
    pub cache_mib: u64,
    /// The policy that replaces blocks of the cache.
    pub cache_policy: CachePolicy,
    /// Where sequences keep the bounds of their keys.
    pub summaries: SummaryResidency,
    /// How many tokens a step attends to.
    pub budget: Budget,
    /// Tokens per group.
    pub group_tokens: usize,
    /// The codec of stored groups.
    pub codec: PlaneCodec,
    /// The device directories. If there are none, a temporary directory is used and removed at the end.
    pub devices: Vec<PathBuf>,
    /// The limit of the store's memory in bytes. `None` means the engine's default.
    pub memory_limit: Option<u64>,
    /// True if decode steps prefetch what predicted queries select.
    pub read_ahead: bool,
    /// The durability of commits: [`Durability::Sync`] if sequences outlive the run.
    pub durability: Durability,
    /// The newest queries before a question that methods with a profile make their clusters of.
    pub profile_queries: usize,
    /// True if the store is opened without writing to it.
    pub read_only: bool,
    /// True if an adapter that the store lacks is fitted to the prompt.
    pub calibrate: bool,
    /// True if the clusters that the policy chooses are stored too.
    pub store_clusters: bool,
}

impl KvOptions {
    /// Returns the budget for reports. Full attention has the whole context.
    #[must_use]
    pub fn budget_name(&self) -> String {
        if self.policy == Policy::Full { "1".to_owned() } else { self.budget.to_string() }
    }
}

/// A function that decodes token ids through a cache.
pub type Replay<'a> = dyn Fn(&[u32], &mut StoreKv) -> Result<()> + 'a;

/// The store of one run, and the settings of its caches.
pub struct Backend {
    store: Store,
    geometry: KvGeometry,
    layout: KvLayout,
    policy: StorePolicy,
    selector: Option<(Arc<dyn Selector>, HeadAggregation)>,
    /// The method whose adapter is fitted to the prompt.
    calibrated: Option<MethodSpec>,
    aggregation: HeadAggregation,
    rank: Option<usize>,
    dense_layers: usize,
    summaries: SummaryResidency,
    budget: Budget,
    read_ahead: bool,
    durability: Durability,
    profile_queries: usize,
    store_clusters: bool,
    /// Bytes that the devices had read when the store was open.
    device_begin: u64,
    /// `read_bytes` of `/proc/self/io` when the store was open.
    process_begin: Option<u64>,
    temporary: Option<Temporary>,
    /// A directory on a disk for the rows of long prompts.
    spill_dir: Option<PathBuf>,
}

/// A temporary directory, and whether its file system is memory.
struct Temporary {
    directory: TempDir,
    in_memory: bool,
}

/// Opens or creates the store of `options`. `fingerprint` identifies the model's weights.
///
/// # Errors
/// Fails if the engine does not support the geometry, if no temporary directory can be made, or if the store cannot be
/// opened.
pub fn open(options: &KvOptions, geometry: KvGeometry, fingerprint: [u8; 32]) -> Result<Backend> {
    let layout = kv_layout(&geometry, options.group_tokens, options.codec, fingerprint)?;
    // The rotation is part of the layout. Caches must equal the model's geometry, which never holds it.
    let geometry = KvGeometry { rope: None, ..geometry };
    let policy = match options.policy {
        Policy::Full => StorePolicy::Full,
        Policy::Window => StorePolicy::Window { sinks: SINKS, budget: options.budget },
        // A cache with a selector replaces this policy when the selector is attached.
        Policy::Method(_) => StorePolicy::MinMax { budget: options.budget },
    };
    let temporary = if options.devices.is_empty() { Some(temporary_directory()?) } else { None };
    let on_disk = temporary.as_ref().filter(|place| !place.in_memory).map(|place| place.directory.path());
    let spill_dir = options.devices.first().map(PathBuf::as_path).or(on_disk).map(Path::to_path_buf);
    let settings = settings(options, temporary.as_ref());
    let store = settings.open().map_err(|e| engine_error(e.during("cannot open the store")))?;
    store.set_compute_threads(Some(Arc::new(RayonThreads)));
    let (device_begin, process_begin) = (device_bytes(&store.status()), process::read_bytes());
    let calibrated = match options.policy.fitted_to_groups() {
        Some(spec) if options.calibrate && options.adapters.is_none() => {
            spec.adapter_name().filter(|name| is_missing(&store, &layout, name)).map(|_| spec)
        }
        _ => None,
    };
    let selector = if options.policy.uses_stored_bounds() || calibrated.is_some() {
        None
    } else {
        options.policy.selector(options.adapters.as_deref(), Some((&store, &layout)))?
    };
    Ok(Backend {
        store,
        geometry,
        layout,
        policy,
        selector: selector.map(|selector| (selector, options.policy.aggregation())),
        calibrated,
        aggregation: options.policy.aggregation(),
        rank: options.policy.rank(),
        dense_layers: options.dense_layers,
        summaries: options.summaries,
        budget: options.budget,
        read_ahead: options.read_ahead,
        durability: options.durability,
        profile_queries: options.profile_queries,
        store_clusters: options.store_clusters,
        device_begin,
        process_begin,
        temporary,
        spill_dir,
    })
}

/// Returns whether the store has no adapter of this name for the layout. A damaged one is not missing.
fn is_missing(store: &Store, layout: &KvLayout, name: &str) -> bool {
    store.adapter(layout, name, None).is_err_and(|e| e.kind() == ErrorKind::NotFound)
}

/// Returns the engine's options for a run.
fn settings(options: &KvOptions, temporary: Option<&Temporary>) -> StoreOptions {
    // Reports count the bytes of selected blocks, so reads must not span the gap between two blocks.
    let mut settings = StoreOptions::default().gap_limit(ByteSize(0)).read_only(options.read_only);
    if let Some(limit) = options.memory_limit {
        settings = settings.memory_limit(ByteSize(limit));
    }
    if options.cache_mib > 0 {
        settings = settings.cache(CacheOptions::new(ByteSize::mib(options.cache_mib)).policy(options.cache_policy));
    }
    if let Some(place) = temporary {
        settings = settings.device(place.directory.path()).segment_bytes(ByteSize(TEMPORARY_SEGMENT_BYTES));
    }
    for device in &options.devices {
        settings = settings.device(device);
    }
    settings
}

impl Backend {
    /// Returns the selector of a policy. Its adapter comes from the directory `adapters`, or from the store.
    ///
    /// # Errors
    /// Fails as [`Policy::selector`] does.
    pub fn selector(&self, policy: &Policy, adapters: Option<&Path>) -> Result<Option<Arc<dyn Selector>>> {
        policy.selector(adapters, Some((&self.store, &self.layout)))
    }

    /// Stores an adapter for this model and group size, and returns its name and version.
    ///
    /// The adapter gets the version after the newest one of its name. Older versions are deleted afterwards, so that
    /// an interrupted call leaves at least one. If the newest version has the same numbers, it stays and nothing is
    /// written.
    ///
    /// # Errors
    /// Fails if the store reports an error.
    pub fn put_adapter(&self, adapter: &Adapter) -> Result<String> {
        let name = adapter.name();
        // This list also holds adapters for other layouts. Their versions only make the next version higher.
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

    /// Returns the cache of a session at its last commit, or an empty cache for a new name.
    ///
    /// Clusters of a session need queries, which the store does not hold. `replay` computes them again: it gets the
    /// newest token ids of the session, and a cache of the tokens before them, and decodes these ids.
    ///
    /// # Errors
    /// Fails if the stored sequence has another geometry or model, if the store reports an error, or if `replay` fails.
    pub fn session(&self, name: &str, replay: &Replay<'_>) -> Result<StoreKv> {
        match self.open_session(name) {
            Ok(mut sequence) => {
                let queries =
                    if self.needs_queries() { Some(self.newest_queries(&mut sequence, replay)?) } else { None };
                self.cache(sequence, queries)
            }
            Err(e) if e.kind() == ErrorKind::NotFound => self.create(&session_key(name)),
            Err(e) => Err(engine_error(e)).with_context(|| format!("session {name:?}")),
        }
    }

    /// Returns the sequence of a session at its last commit, without a cache.
    ///
    /// # Errors
    /// Fails if there is no such session, and as [`Self::session`] does.
    pub fn stored_session(&self, name: &str) -> Result<Sequence> {
        self.open_session(name).map_err(engine_error).with_context(|| format!("session {name:?}"))
    }

    /// Computes the newest queries of a sequence again. Its keys and values stay as they are.
    fn newest_queries(&self, sequence: &mut Sequence, replay: &Replay<'_>) -> Result<RecordedQueries> {
        let ids = sequence.token_ids().to_vec();
        let kept = ids.len().saturating_sub(self.profile_queries).max(1).min(ids.len());
        let fork = sequence.fork().map_err(engine_error)?;
        let policy = StorePolicy::MinMax { budget: self.budget };
        let mut cache = StoreKv::new(&self.store, fork, self.geometry.clone(), policy, Durability::Lazy);
        cache.record_queries(self.profile_queries);
        cache.truncate(kept)?;
        replay(&ids[kept..], &mut cache)?;
        Ok(cache.profile_queries().cloned().unwrap_or_default())
    }

    fn open_session(&self, name: &str) -> stratakv::Result<Sequence> {
        let options = OpenSequence::new().layout(&self.layout).summary_residency(self.summaries);
        self.store.open_sequence(&session_key(name), options)
    }

    /// Makes an empty cache. A sequence that an earlier run left under this key is deleted first. With an empty key the
    /// sequence has no name.
    ///
    /// # Errors
    /// Fails if the store reports an error.
    pub fn create(&self, key: &str) -> Result<StoreKv> {
        if !key.is_empty() {
            match self.store.open_sequence(key, OpenSequence::new()) {
                Ok(old) => old.delete(Durability::Lazy).map_err(engine_error)?,
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                Err(e) => return Err(engine_error(e)),
            }
        }
        // Bounds are stored under every policy, because a later run may resume the session with `minmax`.
        let options =
            CreateOptions::new().key(key).store_summary(StoredSummary::MinMax).summary_residency(self.summaries);
        let sequence = self.store.create_sequence(&self.layout, options).map_err(engine_error)?;
        self.cache(sequence, None)
    }

    /// Makes a cache with the same tokens, which has no name. If it is dropped without a commit, it leaves nothing. Its
    /// clusters are made of the queries of `cache`.
    ///
    /// # Errors
    /// Fails if the store reports an error.
    pub fn fork(&self, cache: &mut StoreKv) -> Result<StoreKv> {
        let queries = cache.profile_queries().cloned();
        self.cache(cache.fork_sequence().map_err(engine_error)?, queries)
    }

    /// Makes a cache of a sequence, with the policy and the selector of this run. Clusters are made of `queries`, or of
    /// those that the cache will record.
    fn cache(&self, sequence: Sequence, queries: Option<RecordedQueries>) -> Result<StoreKv> {
        let mut cache = StoreKv::new(&self.store, sequence, self.geometry.clone(), self.policy, self.durability);
        if let Some(queries) = queries {
            cache.set_profile(queries);
        }
        cache.set_dense_layers(self.dense_layers);
        cache.read_ahead(self.read_ahead);
        cache.store_clusters(self.store_clusters);
        if let Some(dir) = &self.spill_dir {
            cache.set_spill_dir(dir.clone());
        }
        if let Some(spec) = self.calibrated {
            cache.calibrate_later(spec, (self.aggregation, self.budget))?;
            return Ok(cache);
        }
        if let Some((selector, aggregation)) = &self.selector {
            if selector.entries().is_some() {
                let (selector, queries) = (Arc::clone(selector), self.profile_queries);
                cache.attach_entries_later(selector, (*aggregation, self.budget), queries)?;
                return Ok(cache);
            }
            let selector = cache.attach_stored(Arc::clone(selector)).map_err(engine_error)?;
            cache.set_policy(StorePolicy::Selected { selector, aggregation: *aggregation, budget: self.budget });
            cache.reconstruct_keys(self.rank)?;
        }
        Ok(cache)
    }

    /// Makes an empty cache in memory with full attention. The policy `full` in the store gives the same outputs to
    /// the bit.
    ///
    /// # Errors
    /// Fails if the engine does not support the geometry. Opening the store has already checked that.
    pub fn in_memory(&self) -> Result<MemoryKv> {
        MemoryKv::new(self.geometry.clone(), MemoryPolicy::Full).with_groups(self.layout.group_tokens())
    }

    /// Returns whether caches make clusters from the prompt's queries, which prefill has to compute.
    #[must_use]
    pub fn needs_queries(&self) -> bool {
        self.selector.as_ref().is_some_and(|(selector, _)| selector.entries().is_some())
    }

    /// Returns the status of the store.
    #[must_use]
    pub fn status(&self) -> StoreStatus {
        self.store.status()
    }

    /// Returns lines for the end of a report: devices, drivers, and bytes per decode step.
    #[must_use]
    pub fn notes(&self, steps: u64) -> Vec<String> {
        let status = self.status();
        let mut lines = Vec::new();
        for device in &status.devices {
            let direct =
                if device.direct { "direct I/O" } else { "no direct I/O, because the file system does not support it" };
            let (reads, writes) = (device.counters.reads, device.counters.writes);
            lines.push(format!(
                "device {}: driver {}, {direct}, {reads} reads, {writes} writes, {} syncs",
                device.path, device.driver, device.counters.syncs
            ));
            lines.extend(device.notes.iter().map(|note| format!("  {note}")));
        }
        if let Some(temporary) = &self.temporary {
            let memory = if temporary.in_memory { " in memory (tmpfs); give --device to use a disk" } else { "" };
            lines.push(format!("  a temporary directory{memory}"));
        }
        let read = device_bytes(&status) - self.device_begin;
        let per_step = |bytes: u64| bytes.checked_div(steps).unwrap_or(0);
        let counted = match (self.process_begin, process::read_bytes()) {
            (Some(begin), Some(now)) => per_step(now - begin).to_string(),
            _ => "an unknown number".to_owned(),
        };
        lines.push(format!(
            "{steps} decode steps read {} bytes per step by completed device reads and {counted} in /proc/self/io",
            per_step(read)
        ));
        lines.push(format!(
            "store: {} bytes written, {} bytes of files; peak memory {} of {} bytes; I/O buffers on {} pages",
            status.written_bytes,
            status.file_bytes,
            status.memory.peak_bytes,
            status.memory.limit_bytes,
            status.pages.as_deref().unwrap_or("no")
        ));
        lines
    }

    /// Closes the store. All caches must be finished before.
    ///
    /// # Errors
    /// Fails if the store reports an error, or if the temporary directory cannot be removed.
    pub fn close(self) -> Result<()> {
        self.store.close().map_err(engine_error)?;
        match self.temporary {
            Some(place) => place.directory.close().context("cannot remove the temporary directory"),
            None => Ok(()),
        }
    }
}

/// Returns the key of a session's sequence.
fn session_key(name: &str) -> String {
    format!("session/{name}")
}

/// Returns the bytes that all devices of a store read.
fn device_bytes(status: &StoreStatus) -> u64 {
    status.devices.iter().map(|d| d.counters.read_bytes).sum()
}

/// Makes a directory of mode 0700, in the system's temporary directory or in the current directory. A directory on a
/// disk is preferred to one in memory.
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

/// Returns whether a file system keeps its files in memory.
fn in_memory(place: &Path) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58f6;
    // The field's type differs between architectures.
    #[allow(clippy::unnecessary_cast, clippy::cast_sign_loss)]
    rustix::fs::statfs(place).is_ok_and(|s| [TMPFS, RAMFS].contains(&(s.f_type as u64 & 0xffff_ffff)))
}
