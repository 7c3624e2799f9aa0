//! Sequences that go by themselves: those whose time is over, and evictable ones when space is short.

use crate::catalog::{Catalog, SequenceMeta, release_record};
use crate::error::Result;
use crate::io::coverage;
use crate::io::planted;
use crate::log::{CommitRequest, SequenceLock, StoreInner, unix_ms};
use crate::metrics::{Evicted, EvictionReason, lock};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use stratakv_format::manifest::{Kind, SequenceDelete};
use stratakv_format::{FrameId, SequenceId};
use zerocopy::little_endian::U64;

/// Sequences that go with one commit, at most.
const BATCH: usize = 64;

/// What deleting sequences, one after the other, makes dead.
struct Deaths<'a> {
    catalog: &'a Catalog,
    /// References that are gone, of frames that had several.
    gone: BTreeMap<FrameId, u32>,
}

impl<'a> Deaths<'a> {
    fn of(catalog: &'a Catalog) -> Self {
        Self { catalog, gone: BTreeMap::new() }
    }

    /// Bytes of all copies of the frames that nobody refers to any more once this sequence is deleted as well.
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

/// Evictable sequences that nobody has open, in the order they go, as many as it takes to make `bytes` dead; at most a batch.
fn choose(catalog: &Catalog, open: &HashSet<SequenceId>, bytes: u64) -> Vec<SequenceId> {
    let mut candidates: Vec<_> =
        catalog.sequences.iter().filter(|(id, meta)| meta.evictable > 0 && !open.contains(id)).collect();
    candidates.sort_by_key(|(id, meta)| (std::cmp::Reverse(meta.evictable), meta.used_unix_ms, **id));
    if planted!(EvictionOrderIgnored) {
        candidates.reverse();
    }
    let (mut sum, mut deaths) = (0, Deaths::of(catalog));
    let needed = candidates.into_iter().take_while(|(_, meta)| {
        let wanted = sum < bytes;
        sum += if wanted { deaths.delete(meta) } else { 0 };
        wanted
    });
    needed.map(|(id, _)| *id).take(BATCH).collect()
}

/// When the next sequence expires, in milliseconds since 1970. One that is over already and still open does when it is let go.
pub(crate) fn next_expiry_ms(inner: &StoreInner) -> Option<u64> {
    let now = unix_ms();
    let catalog = lock(&inner.catalog);
    let open = inner.handles.sequences();
    let ends = catalog.sequences.iter().filter_map(|(id, meta)| meta.ends_ms().map(|end| (id, end)));
    ends.filter(|(id, end)| *end > now || !open.contains(id)).map(|(_, end)| end).min()
}

/// Deletes sequences whose time is over and that nobody has open. Says how many.
///
/// # Errors
/// The commit failed.
pub(crate) fn expire(inner: &Arc<StoreInner>) -> Result<u64> {
    let now = unix_ms();
    let over = || -> Vec<SequenceId> {
        let catalog = lock(&inner.catalog);
        let open = inner.handles.sequences();
        let over = catalog.sequences.iter().filter(|(_, meta)| meta.ends_ms().is_some_and(|end| end <= now));
        over.map(|(id, _)| *id).filter(|id| !open.contains(id)).take(BATCH).collect()
    };
    // Without any as well: those that were kept are told, and those that only a queued commit names become known.
    let (mut gone, mut batch) = (0, over());
    loop {
        let mut events = Vec::new();
        let deleted = delete(inner, &batch, EvictionReason::Expired, &mut events);
        tell(inner, events);
        let went = deleted?.1;
        gone += went;
        let stuck = went == 0 && !batch.is_empty();
        batch = over();
        if batch.is_empty() || stuck {
            return Ok(gone);
        }
    }
}

/// Evicts sequences until at least `bytes` more are dead, or none is left that may go: those of the highest priority first,
/// of those the least recently used. Gives the bytes.
///
/// # Errors
/// The commit failed.
pub(crate) fn evict(inner: &Arc<StoreInner>, bytes: u64) -> Result<u64> {
    let mut events = Vec::new();
    let freed = {
        let _one = lock(&inner.locks.evicting);
        evict_silently(inner, bytes, &mut events)
    };
    tell(inner, events);
    freed
}

/// The same for who is the one that evicts; the caller tells what went, and is that no more: who is told may use the store.
///
/// # Errors
/// The commit failed.
pub(super) fn evict_silently(inner: &Arc<StoreInner>, bytes: u64, gone: &mut Vec<Evicted>) -> Result<u64> {
    let mut freed = 0;
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

/// Deletes these with one durable commit. Gives the bytes that are dead now, and how many went; `gone` is to be told, also where it
/// fails.
fn delete(
    inner: &Arc<StoreInner>,
    ids: &[SequenceId],
    reason: EvictionReason,
    gone: &mut Vec<Evicted>,
) -> Result<(u64, u64)> {
    // Nobody opens them from here on.
    let claims: Vec<(SequenceId, SequenceLock)> =
        ids.iter().filter_map(|id| SequenceLock::new(inner, *id, "").map(|claim| (*id, claim))).collect();
    // What their last handle queued comes first; and deletions of before that were kept for want of space are durable with it.
    let kept = inner.activity.observers.take_kept();
    if let Err(e) = inner.flush_commits() {
        inner.activity.observers.keep(kept);
        return Err(e);
    }
    went(inner, gone, kept);
    let mut request = CommitRequest::default();
    let mut events = Vec::new();
    {
        let catalog = lock(&inner.catalog);
        let mut deaths = Deaths::of(&catalog);
        for (id, _) in &claims {
            let Some(meta) = catalog.sequences.get(id) else { continue };
            request.records.push(Kind::SequenceDelete, &SequenceDelete { sequence: U64::new(id.0) }, &[]);
            let (key, tokens, bytes) = (meta.key.clone(), meta.tokens, deaths.delete(meta));
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
    drop(claims);
    let done = (events.iter().map(|event| event.bytes).sum(), events.len() as u64);
    went(inner, gone, events);
    Ok(done)
}

/// Counts sequences that went, which are yet to be told.
fn went(inner: &StoreInner, gone: &mut Vec<Evicted>, events: Vec<Evicted>) {
    for event in &events {
        match event.reason {
            EvictionReason::Expired => {
                inner.activity.counters.expirations.add(1);
                coverage!(Expired);
            }
            EvictionReason::Space => {
                inner.activity.counters.evictions.add(1);
                coverage!(Evicted);
            }
        }
    }
    gone.extend(events);
}

/// Tells the observer of sequences that went.
pub(super) fn tell(inner: &StoreInner, events: Vec<Evicted>) {
    events.into_iter().for_each(|event| inner.activity.observers.tell(event));
}

/// The fault of a store that first lets go of half the frames.
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
    use crate::catalog::{FrameMeta, ReplicaMeta};
    use stratakv_format::{DeviceIndex, LayoutId, Location, SegmentId};

    const PAGE: u64 = stratakv_format::PAGE_BYTES as u64;

    fn at(device: u16, frame: u64) -> Location {
        Location { device: DeviceIndex(device), segment: SegmentId(0), page: frame as u32 * 8 + 1, pages: 8 }
    }

    /// Sequences by id with their frames, of 8 pages and two copies each.
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
                    refs: 0,
                    replicas: vec![ReplicaMeta { generation: 1, location: at(1, *frame), header_crc: 1 }],
                };
                catalog.frames.entry(FrameId(*frame)).or_insert_with(fresh).refs += 1;
            }
            let meta = SequenceMeta {
                key: String::new(),
                layout: LayoutId(1),
                summaries: 0,
                created_unix_ms: 0,
                ttl_ms: 0,
                replicas: 2,
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
    fn no_more_go_than_it_takes() {
        // The bytes of all copies count.
        let alone = catalog(&[(1, &[1, 2]), (2, &[3, 4]), (3, &[5, 6])]);
        assert_eq!(chosen(&alone, &[], 32 * PAGE), [1]);
        assert_eq!(chosen(&alone, &[], 32 * PAGE + 1), [1, 2]);
        assert_eq!(chosen(&alone, &[1], 1), [2]);
        // So do those that two share, once both go; but not while somebody stays who needs them.
        let shared = catalog(&[(1, &[1, 2]), (2, &[1, 2]), (3, &[3]), (4, &[3, 5])]);
        assert_eq!(chosen(&shared, &[], 1), [1, 2]);
        assert_eq!(chosen(&shared, &[], 33 * PAGE), [1, 2, 3, 4]);
        assert_eq!(chosen(&shared, &[2], 16 * PAGE), [1, 3, 4]);
        let mut deaths = Deaths::of(&shared);
        let bytes: Vec<u64> = shared.sequences.values().map(|meta| deaths.delete(meta) / PAGE).collect();
        assert_eq!(bytes, [0, 32, 0, 32]);
    }
}
