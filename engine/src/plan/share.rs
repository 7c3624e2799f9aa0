//! Blocks that need no request: cached blocks, and blocks that an earlier selection of the same read brings.
//!
//! Forks share blocks with their origin. A read of both requests each block once.

use super::parts::{DeviceLoads, ReadPriority};
use super::selection::{GroupSource, SelectedGroup, SelectionInner};
use crate::cache::{BlockKey, CacheReader, Resident};
use std::collections::HashMap;
use std::sync::Arc;

/// The source of a block that is not requested.
#[derive(Clone)]
pub(super) enum BlockHit {
    /// A cache.
    Resident(Resident),
    /// A group of an earlier selection, whose block is requested.
    Shared { view: usize, unit: usize },
}

impl BlockHit {
    /// Returns the cached block, if it is one.
    pub(super) fn resident(held: &Option<Self>) -> Option<Resident> {
        match held {
            Some(Self::Resident(resident)) => Some(resident.clone()),
            _ => None,
        }
    }
}

/// A block as a selection requests it. Selections with different caches do not share, because each cache counts and
/// fills itself.
#[derive(PartialEq, Eq, Hash)]
struct CacheRequest {
    key: BlockKey,
    bytes: usize,
    cache: usize,
}

/// Returns the blocks that need no request, by selection and group.
pub(super) fn held(
    views: &[Arc<SelectionInner>],
    urgency: ReadPriority<'_>,
    spread: &DeviceLoads,
) -> Vec<Vec<Option<BlockHit>>> {
    let mut seen = may_share(views).then(HashMap::new);
    views.iter().enumerate().map(|(index, view)| of_view(index, view, urgency, spread, seen.as_mut())).collect()
}

/// Returns whether two selections refer to one frame. Otherwise no block is shared.
fn may_share(views: &[Arc<SelectionInner>]) -> bool {
    if views.len() < 2 {
        return false;
    }
    let mut frames = HashMap::new();
    for (index, view) in views.iter().enumerate() {
        let mut last = None;
        for unit in &view.units {
            let GroupSource::Disk { frame, .. } = &unit.source else { continue };
            if last.is_some_and(|last| Arc::ptr_eq(last, frame)) {
                continue;
            }
            last = Some(frame);
            if frames.insert((frame.nonce, view.layer), index).is_some_and(|other| other != index) {
                return true;
            }
        }
    }
    false
}

fn of_view(
    index: usize,
    view: &SelectionInner,
    urgency: ReadPriority<'_>,
    spread: &DeviceLoads,
    seen: Option<&mut HashMap<CacheRequest, BlockHit>>,
) -> Vec<Option<BlockHit>> {
    let block = view.layout.block(view.layer);
    let cache = view.cache.as_ref().map_or(0, |cache| Arc::as_ptr(cache).addr());
    let asked: Vec<Option<CacheRequest>> = match (&seen, cache) {
        (None, 0) => Vec::new(),
        _ => {
            let asked = |unit: &SelectedGroup| {
                Some(CacheRequest { key: unit.source.key(view.layer)?, bytes: unit.bytes(block), cache })
            };
            view.units.iter().map(asked).collect()
        }
    };
    let mut held: Vec<Option<BlockHit>> = match &seen {
        Some(seen) => asked.iter().map(|asked| seen.get(asked.as_ref()?).cloned()).collect(),
        None => Vec::new(),
    };
    held.resize_with(view.units.len(), || None);
    if let Some(cache) = &view.cache {
        let reader = CacheReader {
            handle: view.handle,
            layer: view.layer as u32,
            tokens: view.length,
            clusters: view.clusters.as_ref(),
            is_ahead: urgency.is_ahead(),
        };
        // A block that an earlier selection requests was counted there.
        let new = asked.iter().zip(&held).map(|(asked, held)| match (asked, held) {
            (Some(asked), None) => Some((asked.key, asked.bytes)),
            _ => None,
        });
        let found = cache.find(reader, new, spread.read_price());
        for (held, found) in held.iter_mut().zip(found) {
            *held = held.take().or(found.map(BlockHit::Resident));
        }
    }
    if let Some(seen) = seen {
        for (unit, (asked, held)) in asked.into_iter().zip(&held).enumerate() {
            let Some(asked) = asked.filter(|asked| held.is_some() || !urgency.awaited(&asked.key)) else { continue };
            let from = held.clone().unwrap_or(BlockHit::Shared { view: index, unit });
            seen.entry(asked).or_insert(from);
        }
    }
    held
}
