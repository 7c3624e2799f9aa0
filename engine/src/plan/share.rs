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
    Shared { selection: usize, group: usize },
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

/// Returns the blocks that need no request, by selection: for each group, then for each page.
pub(super) fn held(
    selections: &[Arc<SelectionInner>],
    priority: ReadPriority<'_>,
    loads: &DeviceLoads,
) -> Vec<Vec<Option<BlockHit>>> {
    let mut seen = may_share(selections).then(HashMap::new);
    selections
        .iter()
        .enumerate()
        .map(|(index, selection)| of_selection(index, selection, priority, loads, seen.as_mut()))
        .collect()
}

/// Returns whether two selections refer to one frame. Otherwise no block is shared.
fn may_share(selections: &[Arc<SelectionInner>]) -> bool {
    if selections.len() < 2 {
        return false;
    }
    let mut frames = HashMap::new();
    for (index, selection) in selections.iter().enumerate() {
        let mut last = None;
        for group in &selection.groups {
            let GroupSource::Disk { frame, .. } = &group.source else { continue };
            if last.is_some_and(|last| Arc::ptr_eq(last, frame)) {
                continue;
            }
            last = Some(frame);
            if frames.insert((frame.nonce, selection.layer), index).is_some_and(|other| other != index) {
                return true;
            }
        }
    }
    false
}

fn of_selection(
    index: usize,
    selection: &SelectionInner,
    priority: ReadPriority<'_>,
    loads: &DeviceLoads,
    seen: Option<&mut HashMap<CacheRequest, BlockHit>>,
) -> Vec<Option<BlockHit>> {
    let block = selection.layout.block(selection.layer);
    let cache = selection.cache.as_ref().map_or(0, |cache| Arc::as_ptr(cache).addr());
    let asked: Vec<Option<CacheRequest>> = match (&seen, cache) {
        (None, 0) => Vec::new(),
        _ => {
            let asked = |group: &SelectedGroup| {
                let key = group.source.key(selection.layer).filter(|_| group.is_needed())?;
                Some(CacheRequest { key, bytes: group.bytes(block), cache })
            };
            selection.groups.iter().map(asked).collect()
        }
    };
    let mut held: Vec<Option<BlockHit>> = match &seen {
        Some(seen) => asked.iter().map(|asked| seen.get(asked.as_ref()?).cloned()).collect(),
        None => Vec::new(),
    };
    held.resize_with(selection.groups.len(), || None);
    if let Some(cache) = &selection.cache {
        let reader = CacheReader {
            handle: selection.handle,
            layer: selection.layer as u32,
            tokens: selection.length,
            clusters: selection.clusters.as_ref(),
            is_ahead: priority.is_ahead(),
        };
        // A block that an earlier selection requests was counted there.
        let new = asked.iter().zip(&held).map(|(asked, held)| match (asked, held) {
            (Some(asked), None) => Some((asked.key, asked.bytes)),
            _ => None,
        });
        let pages = selection.pages.iter().map(|page| Some((page.key(selection.layer), page.bytes())));
        let found = cache.find(reader, new.chain(pages), loads.read_price());
        held.resize_with(selection.groups.len() + selection.pages.len(), || None);
        for (held, found) in held.iter_mut().zip(found) {
            *held = held.take().or(found.map(BlockHit::Resident));
        }
    }
    if let Some(seen) = seen {
        for (group, (asked, held)) in asked.into_iter().zip(&held).enumerate() {
            let Some(asked) = asked.filter(|asked| held.is_some() || !priority.awaited(&asked.key)) else { continue };
            let from = held.clone().unwrap_or(BlockHit::Shared { selection: index, group });
            seen.entry(asked).or_insert(from);
        }
    }
    held.resize_with(selection.groups.len() + selection.pages.len(), || None);
    held
}
