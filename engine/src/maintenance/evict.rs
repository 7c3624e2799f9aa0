//! Expiry and eviction: deletes sequences whose time to live is over, and evictable ones when space is short.
//!
//! Eviction order: the highest `evictable` priority first, then the least recently used, then the lowest id.
//!
//! Derived frames of closed sequences are released before any sequence is evicted, the least recently used first.
//!
//! Each batch is deleted in these steps:
//!
//! 1. Lock every sequence of the batch. A sequence that is open, or being opened, is skipped.
//! 2. Commit what handles queued before, so that their deletions are counted first.
//! 3. Commit the deletions durably.
//! 4. Count them and append the events. The caller notifies the observers after it released its locks.
//!
//! Invariants:
//! - A sequence is deleted whole or not at all, with one commit.
//! - An event is delivered only after its deletion is durable.
//! - `evicting` is held by the caller of [`evict_silently`]. The catalog lock is never held across a commit.

use crate::catalog::{Catalog, SequenceMeta, release_record, states_first};
use crate::error::Result;
use crate::events::event;
use crate::io::coverage;
use crate::io::planted;
use crate::log::{CommitRequest, DerivedRelease, SequenceLock, StoreInner};
use crate::metrics::{Evicted, EvictionReason, lock};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use stratakv_format::manifest::{Kind, SequenceDelete};
use stratakv_format::{FrameId, SequenceId};
use zerocopy::little_endian::U64;

/// The maximum number of sequences that one commit deletes.
const BATCH: usize = 64;

/// A tally of the bytes that become dead when sequences are deleted one after the other.
struct DeletionTally<'a> {
    catalog: &'a Catalog,
    /// The number of deleted references per frame that had several.
    gone: BTreeMap<FrameId, u32>,
}

impl<'a> DeletionTally<'a> {
    fn of(catalog: &'a Catalog) -> Self {
        Self { catalog, gone: BTreeMap::new() }
    }

    /// Deletes a sequence from the tally. Returns the bytes of all copies of the frames that lose their last reference.
    fn delete(&mut self, meta: &SequenceMeta) -> u64 {
        let mut bytes = 0;
        for (id, _) in &meta.refs {
            let Some(frame) = self.catalog.frames.get(id) else { continue };
            if frame.refs > 1 {
                let gone = self.gone.entry(*id).or_default();
                *gone += 1;
                if *gone < frame.refs {
                    continue;
                }
            }
            bytes += frame.locations().map(|location| location.bytes()).sum::<u64>();
        }
        bytes
    }
}

/// Chooses closed evictable sequences, in eviction order, until `bytes` would be dead or the batch is full.
fn choose(catalog: &Catalog, open: &HashSet<SequenceId>, bytes: u64) -> Vec<SequenceId> {
    let mut candidates: Vec<_> =
        catalog.sequences.iter().filter(|(id, meta)| meta.evictable > 0 && !open.contains(id)).collect();
    candidates.sort_by_key(|(id, meta)| (std::cmp::Reverse(meta.evictable), meta.used_unix_ms, **id));
    if planted!(EvictionOrderIgnored) {
        candidates.reverse();
    }
    let (mut sum, mut tally) = (0, DeletionTally::of(catalog));
    let needed = candidates.into_iter().take_while(|(_, meta)| {
        let wanted = sum < bytes;
        sum += if wanted { tally.delete(meta) } else { 0 };
        wanted
    });
    needed.map(|(id, _)| *id).take(BATCH).collect()
}

/// Returns when the next sequence expires, in milliseconds since 1970.
///
/// An open sequence past its time is left out: it is deleted after its last handle closes.
pub(crate) fn next_expiry_ms(inner: &StoreInner) -> Option<u64> {
    let now = inner.devices.environment.unix_ms();
    let catalog = lock(&inner.catalog);
    let open = inner.handles.sequences();
    let ends = catalog.sequences.iter().filter_map(|(id, meta)| meta.ends_ms().map(|end| (id, end)));
    ends.filter(|(id, end)| *end > now || !open.contains(id)).map(|(_, end)| end).min()
}

/// Deletes the closed sequences whose time to live is over. Returns their number.
///
/// # Errors
/// The commit failed.
pub(crate) fn expire(inner: &Arc<StoreInner>) -> Result<u64> {
    let now = inner.devices.environment.unix_ms();
    let over = || -> Vec<SequenceId> {
        let catalog = lock(&inner.catalog);
        let open = inner.handles.sequences();
        let over = catalog.sequences.iter().filter(|(_, meta)| meta.ends_ms().is_some_and(|end| end <= now));
        over.map(|(id, _)| *id).filter(|id| !open.contains(id)).take(BATCH).collect()
    };
    // The first round runs even without candidates: it delivers events that were kept back, and commits what was
    // queued.
    let (mut gone, mut batch) = (0, over());
    loop {
        let mut events = Vec::new();
        let deleted = delete(inner, &batch, EvictionReason::Expired, &mut events);
        notify_observers(inner, events);
        let count = deleted?.1;
        gone += count;
        let stuck = count == 0 && !batch.is_empty();
        batch = over();
        if batch.is_empty() || stuck {
            return Ok(gone);
        }
    }
}

/// Releases derived frames, then evicts sequences, until at least `bytes` more are dead or no candidate is left.
/// Returns the bytes.
///
/// # Errors
/// The commit failed.
pub(crate) fn evict(inner: &Arc<StoreInner>, bytes: u64) -> Result<u64> {
    let mut events = Vec::new();
    let freed = {
        let _one = lock(&inner.locks.evicting);
        evict_silently(inner, bytes, &mut events)
    };
    notify_observers(inner, events);
    freed
}

/// Releases derived frames of closed sequences until at least `bytes` more are dead or all are released. Returns the
/// bytes.
///
/// # Errors
/// The commit failed.
pub(super) fn release_closed(inner: &Arc<StoreInner>, bytes: u64) -> Result<u64> {
    let _one = lock(&inner.locks.evicting);
    release_derived(inner, bytes)
}

/// Evicts as [`evict`] does for a caller that holds `evicting`, and appends the events to `gone`.
///
/// The caller notifies the observers after it released the lock, because an observer may use the store.
///
/// # Errors
/// The commit failed.
pub(super) fn evict_silently(inner: &Arc<StoreInner>, bytes: u64, gone: &mut Vec<Evicted>) -> Result<u64> {
    let mut freed = if planted!(EvictedBeforeClusters) { 0 } else { release_derived(inner, bytes)? };
    while freed < bytes {
        let chosen = choose(&lock(&inner.catalog), &inner.handles.sequences(), bytes - freed);
        let (more, count) = delete(inner, &chosen, EvictionReason::Space, gone)?;
        freed += more;
        if count == 0 {
            break;
        }
    }
    Ok(freed)
}

/// Releases derived frames of closed sequences until `bytes` more are dead or all are released. Returns the bytes.
///
/// # Errors
/// The commit failed.
fn release_derived(inner: &Arc<StoreInner>, bytes: u64) -> Result<u64> {
    let (derived, freed) = choose_derived(&lock(&inner.catalog), &inner.handles.sequences(), bytes);
    if !derived.is_empty() {
        inner.commit(CommitRequest { derived, ..CommitRequest::default() })?;
        coverage!(ClustersReleased);
        event!(info, bytes = freed, "clusters were released for space");
    }
    Ok(freed)
}

/// Returns the bytes of stored clusters that a full store may give up.
#[cfg(feature = "sim")]
pub(crate) fn releasable_bytes(inner: &StoreInner) -> u64 {
    choose_derived(&lock(&inner.catalog), &inner.handles.sequences(), u64::MAX).1
}

/// Chooses derived frames that no open sequence refers to, until `bytes` would be dead. Returns all references to them,
/// and their bytes. The frames of the least recently used sequences come first, and of a sequence its states.
fn choose_derived(catalog: &Catalog, open: &HashSet<SequenceId>, bytes: u64) -> (Vec<DerivedRelease>, u64) {
    let frames = |id: &SequenceId| states_first(&catalog.derived_refs(*id).collect::<Vec<_>>());
    let held: HashSet<FrameId> = open.iter().flat_map(frames).collect();
    let mut closed: Vec<_> = catalog.sequences.iter().filter(|(id, _)| !open.contains(id)).collect();
    closed.sort_by_key(|(id, meta)| (meta.used_unix_ms, **id));
    let (mut chosen, mut sum) = (HashSet::new(), 0);
    for frame in closed.iter().flat_map(|(id, _)| frames(id)).filter(|frame| !held.contains(frame)) {
        if sum < bytes && chosen.insert(frame) {
            sum += catalog.frames.get(&frame).map_or(0, |frame| frame.location.bytes());
        }
    }
    let of = |(id, _): &(&SequenceId, &SequenceMeta)| {
        let id = **id;
        let own = frames(&id).into_iter().filter(|frame| chosen.contains(frame));
        own.map(move |frame| DerivedRelease::Reference(id, frame)).collect::<Vec<_>>()
    };
    (closed.iter().flat_map(of).collect(), sum)
}

/// Deletes these sequences with one durable commit. Returns the bytes that became dead and the number of sequences.
///
/// The caller notifies the observers of the events in `gone`, even if this fails.
fn delete(
    inner: &Arc<StoreInner>,
    ids: &[SequenceId],
    reason: EvictionReason,
    gone: &mut Vec<Evicted>,
) -> Result<(u64, u64)> {
    // No handle can open them while these locks are held.
    let locks: Vec<(SequenceId, SequenceLock)> =
        ids.iter().filter_map(|id| SequenceLock::new(inner, *id, "").map(|lock| (*id, lock))).collect();
    // Commits of their last handles precede the deletion. This also makes earlier deletions durable that found no
    // space.
    let kept = inner.activity.observers.take_kept();
    if let Err(e) = inner.flush_commits() {
        inner.activity.observers.keep(kept);
        return Err(e);
    }
    record_deleted(inner, gone, kept);
    let mut request = CommitRequest::default();
    let mut events = Vec::new();
    {
        let catalog = lock(&inner.catalog);
        let mut tally = DeletionTally::of(&catalog);
        for (id, _) in &locks {
            let Some(meta) = catalog.sequences.get(id) else { continue };
            request.records.push(Kind::SequenceDelete, &SequenceDelete { sequence: U64::new(id.0) }, &[]);
            let (key, tokens, bytes) = (meta.key.clone(), meta.tokens, tally.delete(meta));
            events.push(Evicted { id: id.0, key, tokens, bytes, reason });
        }
    }
    if events.is_empty() {
        return Ok((0, 0));
    }
    if planted!(EvictedByHalves) {
        release_halves(inner, &events)?;
    }
    if planted!(EvictionNotDurable) {
        inner.committer.enqueue(request, None);
    } else if let Err(e) = inner.commit(request) {
        if e.is_queued() {
            inner.activity.observers.keep(events);
        }
        return Err(e);
    }
    drop(locks);
    let done = (events.iter().map(|event| event.bytes).sum(), events.len() as u64);
    record_deleted(inner, gone, events);
    Ok(done)
}

/// Counts deleted sequences and appends their events to `gone`.
fn record_deleted(inner: &StoreInner, gone: &mut Vec<Evicted>, events: Vec<Evicted>) {
    for event in &events {
        match event.reason {
            EvictionReason::Expired => {
                inner.activity.counters.expirations.add(1);
                event!(info, sequence = event.id, bytes = event.bytes, "a sequence expired");
                coverage!(Expired);
            }
            EvictionReason::Space => {
                inner.activity.counters.evictions.add(1);
                event!(info, sequence = event.id, bytes = event.bytes, "a sequence was evicted for space");
                coverage!(Evicted);
            }
        }
    }
    gone.extend(events);
}

/// Notifies the observers of deleted sequences.
pub(super) fn notify_observers(inner: &StoreInner, events: Vec<Evicted>) {
    events.into_iter().for_each(|event| inner.activity.observers.tell(event));
}

/// Releases half of the frames first: the planted fault of an eviction that is not atomic.
fn release_halves(inner: &Arc<StoreInner>, events: &[Evicted]) -> Result<()> {
    let mut request = CommitRequest::default();
    {
        let catalog = lock(&inner.catalog);
        let metas = events.iter().filter_map(|event| catalog.sequences.get_key_value(&SequenceId(event.id)));
        for (id, meta) in metas {
            for (frame, _) in meta.refs.iter().skip(meta.refs.len() / 2) {
                request.records.push(Kind::FrameRelease, &release_record(*id, *frame), &[]);
            }
        }
    }
    inner.commit(request)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{CopyMeta, FrameMeta};
    use stratakv_format::{DeviceIndex, LayoutId, Location, SegmentId};

    const PAGE: u64 = stratakv_format::PAGE_BYTES as u64;

    fn at(device: u16, frame: u64) -> Location {
        Location { device: DeviceIndex(device), segment: SegmentId(0), page: frame as u32 * 8 + 1, pages: 8 }
    }

    /// Builds a catalog of sequences, by id, with frames of 8 pages and two copies each.
    fn catalog(sequences: &[(u64, &[u64])]) -> Catalog {
        let mut catalog = Catalog::default();
        for (id, frames) in sequences {
            for frame in *frames {
                let fresh = || FrameMeta {
                    origin: SequenceId(*id),
                    lsn: *frame,
                    nonce: 1,
                    location: at(0, *frame),
                    header_crc: 1,
                    header_pages: 1,
                    front_pages: 1,
                    derived: false,
                    refs: 0,
                    other_copies: vec![CopyMeta { generation: 1, location: at(1, *frame), header_crc: 1 }],
                };
                catalog.frames.entry(FrameId(*frame)).or_insert_with(fresh).refs += 1;
            }
            let meta = SequenceMeta {
                key: String::new(),
                layout: LayoutId(1),
                summaries: 0,
                created_unix_ms: 0,
                ttl_ms: 0,
                copies: 2,
                evictable: 1,
                parent: None,
                tokens: 1,
                token_ids: 0,
                state_frame: None,
                committed_unix_ms: 0,
                used_unix_ms: *id,
                adapter: None,
                refs: frames.iter().map(|frame| (FrameId(*frame), u64::MAX)).collect(),
            };
            catalog.sequences.insert(SequenceId(*id), meta);
        }
        catalog
    }

    fn chosen(catalog: &Catalog, open: &[u64], bytes: u64) -> Vec<u64> {
        let open = open.iter().map(|id| SequenceId(*id)).collect();
        choose(catalog, &open, bytes).into_iter().map(|id| id.0).collect()
    }

    #[test]
    fn eviction_chooses_no_more_sequences_than_needed() {
        // The bytes of all copies count.
        let alone = catalog(&[(1, &[1, 2]), (2, &[3, 4]), (3, &[5, 6])]);
        assert_eq!(chosen(&alone, &[], 32 * PAGE), [1]);
        assert_eq!(chosen(&alone, &[], 32 * PAGE + 1), [1, 2]);
        assert_eq!(chosen(&alone, &[1], 1), [2]);
        // Shared frames count once both sequences are chosen, and not while a remaining sequence refers to them.
        let shared = catalog(&[(1, &[1, 2]), (2, &[1, 2]), (3, &[3]), (4, &[3, 5])]);
        assert_eq!(chosen(&shared, &[], 1), [1, 2]);
        assert_eq!(chosen(&shared, &[], 33 * PAGE), [1, 2, 3, 4]);
        assert_eq!(chosen(&shared, &[2], 16 * PAGE), [1, 3, 4]);
        let mut tally = DeletionTally::of(&shared);
        let bytes: Vec<u64> = shared.sequences.values().map(|meta| tally.delete(meta) / PAGE).collect();
        assert_eq!(bytes, [0, 32, 0, 32]);
    }

    /// Makes some frames of a catalog derived, with one copy.
    fn derive(catalog: &mut Catalog, frames: &[u64]) {
        for frame in frames {
            let frame = catalog.frames.get_mut(&FrameId(*frame)).unwrap();
            (frame.derived, frame.other_copies) = (true, Vec::new());
        }
    }

    #[test]
    fn derived_frames_of_closed_sequences_are_chosen_with_all_their_references() {
        let mut catalog = catalog(&[(1, &[1, 5]), (2, &[2, 5, 6]), (3, &[3, 6, 7])]);
        derive(&mut catalog, &[5, 6, 7]);
        let chosen = |open: &[u64], bytes: u64| {
            let open = open.iter().map(|id| SequenceId(*id)).collect();
            let (derived, bytes) = choose_derived(&catalog, &open, bytes);
            let pair = |release: &DerivedRelease| match release {
                DerivedRelease::Reference(sequence, frame) => (sequence.0, frame.0),
                DerivedRelease::Cut(..) => (0, 0),
            };
            (derived.iter().map(pair).collect::<Vec<_>>(), bytes / PAGE)
        };
        assert_eq!(chosen(&[], 1), (vec![(1, 5), (2, 5)], 8));
        assert_eq!(chosen(&[], 9 * PAGE), (vec![(1, 5), (2, 5), (2, 6), (3, 6)], 16));
        assert_eq!(chosen(&[], 99 * PAGE), (vec![(1, 5), (2, 5), (2, 6), (3, 6), (3, 7)], 24));
        // Frames that an open sequence refers to stay.
        assert_eq!(chosen(&[2], 99 * PAGE), (vec![(3, 7)], 8));
        assert_eq!(chosen(&[], 0), (Vec::new(), 0));
    }
}
