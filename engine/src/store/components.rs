//! The assembly of an open store from its devices, its catalog and its manifest.

use crate::catalog::Catalog;
use crate::error::{Error, Result};
use crate::log::{
    Background, Committer, Devices, FRAMES_IN_FLIGHT, IdAllocator, MaintenanceLocks, ManifestLog, NextIds, OpenHandles,
    SegmentAllocator, StoreActivity, StoreInner, Watermarks, WriteLimits, keep_spare,
};
use crate::maintenance;
use crate::options::StoreOptions;
use std::sync::{Arc, Mutex};

/// Puts the store together and starts its threads.
///
/// # Errors
/// There is no memory for the catalog or the cache, or a thread cannot be started.
pub(super) fn start(
    options: &StoreOptions,
    devices: Devices,
    catalog: Catalog,
    mut manifest: ManifestLog,
) -> Result<Arc<StoreInner>> {
    let space = SegmentAllocator::new(&devices, &catalog, options.capacity.map(|c| c.bytes()))?;
    let limit = devices.budget.limit();
    let frame_bytes = usize::try_from(options.frame_bytes.bytes()).unwrap_or(usize::MAX).min(limit / 12).max(64 << 10);
    let counters = catalog.counters;
    let (devices, catalog, space) = (Arc::new(devices), Arc::new(Mutex::new(catalog)), Arc::new(Mutex::new(space)));
    if !options.read_only {
        keep_spare(&devices, &space, &mut manifest)?;
    }
    let committer = Committer::new(Arc::clone(&devices), Arc::clone(&space), Arc::clone(&catalog), manifest)?;
    let committer = Arc::new(committer);
    let cache = options.cache.map(|cache| devices.block_cache(&cache)).transpose()?;
    // Without threads, the next flush makes lazy commits durable.
    let has_threads = devices.environment.has_threads();
    let lazy = (has_threads && !options.read_only).then(|| lazy_thread(&committer)).transpose()?;
    let inner = StoreInner {
        committer,
        catalog,
        space,
        devices,
        cache,
        ids: IdAllocator::new(NextIds { frame: counters.frame, lsn: counters.lsn, sequence: counters.sequence }),
        handles: OpenHandles::default(),
        limits: WriteLimits {
            // Frames in flight, of which there are at least two, and gathered groups leave most of the memory to reads
            // and summaries.
            frame_bytes,
            flight_bytes: (frame_bytes.saturating_mul(FRAMES_IN_FLIGHT)).min(limit / 6),
            lazy_delay: options.lazy_delay,
            watermarks: Watermarks { high: options.high_watermark, low: options.low_watermark },
            make_space: maintenance::make_room,
            release_clusters: maintenance::release_clusters,
        },
        background: Background::new(options.cleaning_rate.map(|rate| rate.bytes()), lazy),
        locks: MaintenanceLocks::default(),
        held_adapters: Mutex::default(),
        activity: StoreActivity::default(),
    };
    let inner = Arc::new(inner);
    if options.read_only {
        // A store that is open for reading runs no maintenance.
    } else if !has_threads {
        maintenance::expire(&inner)?;
    } else {
        start_maintenance(&inner)?;
    }
    Ok(inner)
}

/// Starts the thread that makes lazy commits durable when they are due.
fn lazy_thread(committer: &Arc<Committer>) -> Result<std::thread::JoinHandle<()>> {
    let committer = Arc::clone(committer);
    let commit_when_due = move || {
        while committer.wait_due() {
            // The committer keeps a failure. The next call returns it.
            let _ = committer.flush();
        }
    };
    let thread = std::thread::Builder::new().name("stratakv-lazy".into()).spawn(commit_when_due);
    thread.map_err(|e| Error::io("open: start the thread of lazy commits", e))
}

/// Starts the maintenance thread. The thread holds the store only while it works.
pub(super) fn start_maintenance(inner: &Arc<StoreInner>) -> Result<()> {
    if !inner.devices.environment.has_threads() {
        return Ok(());
    }
    let (store, wake) = (Arc::downgrade(inner), Arc::clone(&inner.devices.maintenance_wake));
    let owners = store.clone();
    inner.background.watch_owners(move || owners.strong_count() == 1);
    inner.background.start(|| {
        let builder = std::thread::Builder::new().name("stratakv-tend".into());
        let thread = builder.spawn(move || maintenance::run(&store, &wake));
        thread.map_err(|e| Error::io("open: start the maintenance thread", e))
    })
}
