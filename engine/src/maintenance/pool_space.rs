//! Space of pools: releases the derived frames of segments for pools that are mostly dead.
//!
//! Derived frames are never moved. A segment for pools with a few live frames would keep all of its space, so these
//! frames are released when free segments are few. Groups give their entries until the owner stores its clusters again.
//!
//! 1. Choose the sealed segment for pools with the fewest live pages, at most half of it live, that has references.
//! 2. Release every reference to its frames with one commit.
//! 3. Commit once more, which frees the segment unless a reader holds it.

use crate::catalog::{Catalog, SegmentKey, SegmentMeta, SegmentState};
use crate::error::Result;
use crate::events::event;
use crate::log::{CommitRequest, DerivedRelease, SegmentAllocator, StoreInner};
use crate::metrics::lock;
use std::collections::HashSet;
use stratakv_format::segment::KIND_POOL;
use stratakv_format::{FrameId, PAGE_BYTES};

/// The largest live share of a segment whose derived frames are released.
const LIVE_SHARE_POOLS: f64 = 0.5;

/// Releases the derived frames of one mostly dead segment for pools. Returns whether there was one.
///
/// # Errors
/// A commit failed.
pub(super) fn release_wasted_pool(inner: &StoreInner) -> Result<bool> {
    let _one = lock(&inner.locks.evicting);
    let found = {
        let catalog = lock(&inner.catalog);
        let wasted = wasted(&catalog, &lock(&inner.space));
        // A frame that no sequence refers to has nothing to release: its segment is freed with its last reader.
        wasted.into_iter().map(|(live, key)| (references(&catalog, key), live)).find(|(derived, _)| !derived.is_empty())
    };
    let Some((derived, live_pages)) = found else { return Ok(false) };
    inner.commit(CommitRequest { derived, ..CommitRequest::default() })?;
    inner.commit(CommitRequest::default())?;
    event!(info, bytes = live_pages * PAGE_BYTES as u64, "clusters of a mostly dead segment were released");
    Ok(true)
}

/// Returns the live pages and keys of sealed segments for pools that are mostly dead, fewest live pages first.
fn wasted(catalog: &Catalog, space: &SegmentAllocator) -> Vec<(u64, SegmentKey)> {
    let is_wasted = |key: SegmentKey, meta: &SegmentMeta| {
        let is_pool = meta.kind == KIND_POOL && meta.state == SegmentState::Sealed && meta.live_pages > 0;
        let is_still = is_pool && space.is_sealed(key) && space.in_flight(key) == 0;
        is_still && meta.live_pages as f64 <= f64::from(meta.pages.saturating_sub(2)) * LIVE_SHARE_POOLS
    };
    let all = catalog.segments.iter().filter(|(key, meta)| is_wasted(**key, meta));
    let mut all: Vec<_> = all.map(|(key, meta)| (meta.live_pages, *key)).collect();
    all.sort_unstable();
    all
}

/// Returns the releases of all references to the frames of a segment.
fn references(catalog: &Catalog, key: SegmentKey) -> Vec<DerivedRelease> {
    let frames: HashSet<FrameId> = catalog.frames_in(key).into_keys().collect();
    let of = |id| catalog.derived_of(id).filter(|(frame, _)| frames.contains(frame)).map(move |(frame, _)| (id, frame));
    let all = catalog.sequences.keys().flat_map(|id| of(*id));
    all.map(|(id, frame)| DerivedRelease::Reference(id, frame)).collect()
}
