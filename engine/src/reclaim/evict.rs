//! Sequences that go by themselves: those whose time is over, and evictable ones when space is short.

use crate::device::environment::{Event, Mutant, mutated, note};
use crate::error::Result;
use crate::index::{Catalog, SequenceMeta, release_record};
use crate::log::{Claim, CommitRequest, StoreInner, unix_ms};
use crate::metrics::{Evicted, EvictionReason, lock};
use std::sync::Arc;
use stratakv_format::SequenceId;
use stratakv_format::manifest::{Kind, SequenceDelete};
use zerocopy::little_endian::U64;

/// Sequences that go with one commit, at most.
const BATCH: usize = 64;

/// When the time of a sequence is over, in milliseconds since 1970.
fn ends_ms(meta: &SequenceMeta) -> Option<u64> {
    let ttl = if mutated(Mutant::ExpiredEarly) { meta.ttl_ms / 2 } else { meta.ttl_ms };
    (meta.ttl_ms > 0).then(|| meta.created_unix_ms.saturating_add(ttl))
}

/// Bytes that deleting the sequence makes dead: frames that nobody else refers to.
fn own_bytes(catalog: &Catalog, meta: &SequenceMeta) -> u64 {
    let frames = meta.refs.iter().filter_map(|(id, _)| catalog.frames.get(id));
    frames.filter(|frame| frame.refs == 1).map(|frame| frame.location.bytes()).sum()
}

/// When the next sequence expires, in milliseconds since 1970.
pub(crate) fn next_expiry_ms(inner: &StoreInner) -> Option<u64> {
    lock(&inner.catalog).sequences.values().filter_map(ends_ms).min()
}

/// Deletes sequences whose time is over and that nobody has open. Says how many.
///
/// # Errors
/// The commit failed.
pub(crate) fn expire(inner: &Arc<StoreInner>) -> Result<u64> {
    let now = unix_ms();
    let mut gone = 0;
    loop {
        let over: Vec<SequenceId> = {
            let catalog = lock(&inner.catalog);
            let open = lock(&inner.open_sequences);
            let over = catalog.sequences.iter().filter(|(_, meta)| ends_ms(meta).is_some_and(|end| end <= now));
            over.map(|(id, _)| *id).filter(|id| !open.contains(id)).take(BATCH).collect()
        };
        let deleted = delete(inner, &over, EvictionReason::Expired)?;
        gone += deleted.1;
        if deleted.1 == 0 {
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
    let mut freed = 0;
    while freed < bytes {
        let chosen: Vec<SequenceId> = {
            let catalog = lock(&inner.catalog);
            let open = lock(&inner.open_sequences);
            let mut candidates: Vec<_> =
                catalog.sequences.iter().filter(|(id, meta)| meta.evictable > 0 && !open.contains(id)).collect();
            candidates.sort_by_key(|(id, meta)| (std::cmp::Reverse(meta.evictable), meta.used_unix_ms, **id));
            if mutated(Mutant::EvictionOrderIgnored) {
                candidates.reverse();
            }
            let mut sum = freed;
            let needed = candidates.into_iter().take_while(|(_, meta)| {
                let wanted = sum < bytes;
                sum += own_bytes(&catalog, meta);
                wanted
            });
            needed.map(|(id, _)| *id).take(BATCH).collect()
        };
        let (more, count) = delete(inner, &chosen, EvictionReason::Space)?;
        freed += more;
        if count == 0 {
            break;
        }
    }
    Ok(freed)
}

/// Deletes these with one durable commit and tells the observer. Gives the bytes that are dead now, and how many went.
fn delete(inner: &Arc<StoreInner>, ids: &[SequenceId], reason: EvictionReason) -> Result<(u64, u64)> {
    // Nobody opens them from here on.
    let claims: Vec<(SequenceId, Claim)> =
        ids.iter().filter_map(|id| Claim::new(inner, *id, "").map(|claim| (*id, claim))).collect();
    // What their last handle queued comes first.
    inner.flush_commits()?;
    let mut request = CommitRequest::default();
    let mut events = Vec::new();
    {
        let catalog = lock(&inner.catalog);
        for (id, _) in &claims {
            let Some(meta) = catalog.sequences.get(id) else { continue };
            request.records.push(Kind::SequenceDelete, &SequenceDelete { sequence: U64::new(id.0) }, &[]);
            let (key, tokens, bytes) = (meta.key.clone(), meta.tokens, own_bytes(&catalog, meta));
            events.push(Evicted { id: id.0, key, tokens, bytes, reason });
        }
    }
    if events.is_empty() {
        return Ok((0, 0));
    }
    if mutated(Mutant::EvictedByHalves) {
        release_halves(inner, &events)?;
    }
    match mutated(Mutant::EvictionNotDurable) {
        true => inner.committer.enqueue(request, None),
        false => inner.commit(request)?,
    }
    drop(claims);
    let freed = events.iter().map(|event| event.bytes).sum();
    let count = events.len() as u64;
    let (counter, seen) = match reason {
        EvictionReason::Expired => (&inner.health.expirations, Event::Expired),
        EvictionReason::Space => (&inner.health.evictions, Event::Evicted),
    };
    counter.add(count);
    for event in events {
        note(seen);
        inner.observers.tell(event);
    }
    Ok((freed, count))
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
