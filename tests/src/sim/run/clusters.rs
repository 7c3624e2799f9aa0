//! Clusters on disk: a sequence stores the clusters of the case's method, and selections read their pages.
//!
//! Storing clusters changes no token, so the model knows nothing of it. The checks:
//!
//! - Every entry that a selection gives has the bytes of its group, and attention over the entries agrees.
//! - Clusters that were stored are there after a crash, unless a cut, space or a disk took them.
//! - A power failure alone neither damages a page nor a directory.
//! - Damage of pools alone changes no group and no tail.
//! - A store evicts no sequence as long as it can give up clusters, and none for clusters.

use super::write::is_doubtful;
use super::{Runner, StepResult, Stop, failed};
use crate::sim::case::Regime;
use crate::sim::content::{Contents, Token};
use crate::sim::coverage;
use std::collections::BTreeMap;
use std::mem::offset_of;
use std::sync::Arc;
use stratakv::options::StoreClusterOptions;
use stratakv::retrieval::{MethodSpec, SelectorId};
use stratakv::sim::{Event, events, releasable_cluster_bytes};
use stratakv::{Error, ErrorKind, SelectRequest, Selection, Sequence, Store, attend};
use stratakv_format::segment::{KIND_POOL, SegmentPage};

/// The stored clusters of a sequence, as far as the runner knows them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored {
    /// The end of the tokens that they cover.
    tokens: u64,
    /// The number of clusters in all layers.
    clusters: u64,
    /// True if they came with a fork. A fork names them with its next commit.
    forked: bool,
    /// The most tokens of clusters that may be stored instead, because it is not known whether a commit was durable.
    in_doubt: u64,
}

/// The stored clusters of a case.
#[derive(Debug, Default)]
pub(super) struct StoredSets {
    /// By sequence.
    sets: BTreeMap<u64, Stored>,
    /// The selectors that stay attached to the handles that stored clusters, by sequence.
    attached: BTreeMap<u64, SelectorId>,
    /// True after the runner damaged pools.
    spoiled: bool,
    /// The pages and directories that had failed when the store was opened. Some fail because the power does.
    failed: (u64, u64),
}

/// Returns how many pages and directories have failed.
fn failures() -> (u64, u64) {
    (events(Event::PageRebuilt), events(Event::ClustersDropped))
}

impl StoredSets {
    /// Returns whether a selector stays attached to the handle of a sequence.
    pub(super) fn is_kept(&self, id: u64) -> bool {
        self.attached.contains_key(&id)
    }

    /// Returns the selector that stays attached to the handle of a sequence.
    pub(super) fn selector(&self, id: u64) -> Option<SelectorId> {
        self.attached.get(&id).copied()
    }

    /// Records that the handle of a sequence is gone.
    pub(super) fn detached(&mut self, id: u64) {
        self.attached.remove(&id);
    }

    /// Records that all handles are gone.
    pub(super) fn all_detached(&mut self) {
        self.attached.clear();
    }

    /// Records that the store is being opened.
    pub(super) fn opening(&mut self) {
        self.failed = failures();
    }

    /// Records a fork.
    pub(super) fn forked(&mut self, from: u64, to: u64) {
        if let Some(own) = self.sets.get(&from).copied() {
            self.sets.insert(to, Stored { forked: true, ..own });
        }
    }

    /// Records a cut. Returns true if it took the clusters.
    pub(super) fn cut(&mut self, id: u64, tokens: u64) -> bool {
        let Some(own) = self.sets.get(&id).copied() else { return false };
        if own.tokens.max(own.in_doubt) > tokens {
            self.sets.remove(&id);
        }
        own.tokens > tokens
    }

    /// Records that clusters of up to this many tokens may be stored in place of the earlier ones.
    fn doubt(&mut self, id: u64, tokens: u64) {
        if let Some(own) = self.sets.get_mut(&id) {
            own.in_doubt = own.in_doubt.max(tokens);
        }
    }

    /// Records that a sequence is gone. Returns true if it had clusters.
    pub(super) fn gone(&mut self, id: u64) -> bool {
        self.attached.remove(&id);
        self.sets.remove(&id).is_some()
    }
}

impl Runner<'_> {
    /// Stores the clusters of the sequence of a slot. With `keep`, the method stays attached to the handle.
    pub(super) fn store_clusters(&mut self, slot: usize, keep: bool) -> StepResult {
        let Some(method) = self.case.entries.clone() else { return Ok(()) };
        let Some(id) = self.handle(slot)? else { return Ok(()) };
        let Some(layers) = self.model.lives.get(&id).map(|life| life.now.layers.clone()) else { return Ok(()) };
        let Some((_, mut sequence)) = self.handles[slot].take() else { return Ok(()) };
        let before = self.stored.attached.remove(&id);
        let detached = before.map_or(Ok(()), |selector| sequence.detach(selector));
        let attached = detached.and_then(|()| self.attach_profiled(&mut sequence, &method, &layers));
        self.store_by(slot, (id, sequence), attached, &layers, keep)
    }

    /// Stores the clusters of the method that stays attached to the handle of a slot, if one does.
    pub(super) fn store_attached(&mut self, slot: usize) -> StepResult {
        let Some(id) = self.handle(slot)? else { return Ok(()) };
        let Some(layers) = self.model.lives.get(&id).map(|life| life.now.layers.clone()) else { return Ok(()) };
        let Some(selector) = self.stored.attached.remove(&id) else { return Ok(()) };
        let Some((_, sequence)) = self.handles[slot].take() else { return Ok(()) };
        self.store_by(slot, (id, sequence), Ok(selector), &layers, true)
    }

    /// Stores the clusters of an attached method, and puts the handle back. With `keep`, the method stays attached.
    fn store_by(
        &mut self,
        slot: usize,
        (id, mut sequence): (u64, Sequence),
        attached: stratakv::Result<SelectorId>,
        layers: &[Vec<Token>],
        keep: bool,
    ) -> StepResult {
        self.mark_commits();
        let options = StoreClusterOptions::new().stripe(self.case.stripe());
        let states = super::states::written();
        let stored = attached.and_then(|selector| match sequence.store_clusters_with(selector, options) {
            Ok(stored) => Ok((selector, stored)),
            Err(e) => sequence.detach(selector).and(Err(e)),
        });
        // A commit that failed may be durable.
        let noted = self.note_state(states, &sequence, stored.as_ref().ok().map(|(selector, _)| *selector), layers);
        let lengths: Vec<_> = (0..layers.len()).map(|layer| sequence.layer_len(layer).ok()).collect();
        self.handles[slot] = Some((id, sequence));
        noted?;
        // No sequence is evicted for clusters, so a failure does not count as one that may have evicted.
        self.by_itself(0, true)?;
        if stored.as_ref().err().is_none_or(|e| self.simulation.is_down() || is_doubtful(e)) {
            self.model.sync_attempted(stored.is_ok());
            self.stored.doubt(id, layers.iter().map(Vec::len).max().unwrap_or(0) as u64);
        }
        if lengths.iter().zip(layers).any(|(len, own)| *len != Some(own.len() as u64)) {
            return failed(format!("after clusters were stored, the layers have {lengths:?} tokens"));
        }
        match stored {
            Ok((selector, stored)) => {
                self.coverage.add(coverage::STORED);
                let set = Stored { tokens: stored.tokens, clusters: stored.clusters, forked: false, in_doubt: 0 };
                let before = self.stored.sets.insert(id, set).map_or(u64::MAX, |own| own.clusters);
                // DynaKV adds tokens to clusters that exist, so more clusters come from splits.
                if stored.kept_pages > 0 && stored.clusters > before && self.is_dynakv() {
                    self.coverage.add(coverage::SPLIT);
                }
                self.stored.attached.insert(id, selector);
                self.check_attached(slot)?;
                match self.stored.attached.remove(&id) {
                    Some(selector) if keep => _ = self.stored.attached.insert(id, selector),
                    Some(selector) => self.detach(slot, selector)?,
                    None => {}
                }
                Ok(())
            }
            Err(e) if has_none(&e) => Ok(()),
            Err(e) => self.fault("store clusters", &e),
        }
    }

    fn is_dynakv(&self) -> bool {
        self.case.entries.as_ref().is_some_and(|method| method.starts_with("dynakv"))
    }

    fn detach(&mut self, slot: usize, selector: SelectorId) -> StepResult {
        let Some((_, sequence)) = &mut self.handles[slot] else { return Ok(()) };
        sequence.detach(selector).map_err(|e| Stop::Failed(format!("detach: {e}")))
    }

    /// Releases the stored clusters of the sequence of a slot.
    pub(super) fn drop_clusters(&mut self, slot: usize) -> StepResult {
        let Some(id) = self.handle(slot)? else { return Ok(()) };
        self.mark_commits();
        let Some((_, sequence)) = &mut self.handles[slot] else { return Ok(()) };
        self.stored.sets.remove(&id);
        let dropped = sequence.drop_stored_clusters();
        self.by_itself(0, true)?;
        match &dropped {
            Ok(()) if events(Event::GroupCommit) > self.commits => self.model.sync_attempted(true),
            Err(e) if self.simulation.is_down() || is_doubtful(e) => self.model.sync_attempted(false),
            _ => {}
        }
        dropped.or_else(|e| self.fault("drop stored clusters", &e))
    }

    /// Attaches a method, and profiles every layer that has a sealed group.
    fn attach_profiled(
        &self,
        sequence: &mut Sequence,
        method: &str,
        layers: &[Vec<Token>],
    ) -> stratakv::Result<SelectorId> {
        let spec: MethodSpec = method.parse()?;
        let selector = spec.selector(None)?;
        let id = sequence.attach(Arc::clone(&selector))?;
        for layer in (0..self.shape.layers).filter(|layer| layers[*layer].len() >= self.shape.group) {
            if let Err(e) = self.profile_layer(sequence, (id, selector.as_ref()), layer) {
                sequence.detach(id)?;
                return Err(e);
            }
        }
        Ok(id)
    }

    /// Selects by the method that stays attached to the handle of a slot, if any, and compares what is read.
    pub(super) fn check_attached(&mut self, slot: usize) -> StepResult {
        let Some((id, sequence)) = self.handles[slot].take() else { return Ok(()) };
        let checked = match (self.stored.attached.get(&id).copied(), self.model.lives.get(&id)) {
            (Some(selector), Some(life)) => {
                let layers = life.now.layers.clone();
                self.check_selected(&sequence, selector, &layers)
            }
            _ => Ok(()),
        };
        self.handles[slot] = Some((id, sequence));
        checked
    }

    fn check_selected(&mut self, sequence: &Sequence, selector: SelectorId, layers: &[Vec<Token>]) -> StepResult {
        let store = self.store()?.clone();
        let group = self.shape.group;
        for (layer, tokens) in layers.iter().enumerate().filter(|(_, tokens)| tokens.len() >= group) {
            let (query, options) = (super::entries::query(&self.shape, layer), super::entries::options(tokens.len()));
            let selected = sequence.select(layer, SelectRequest::query(&query).options(options).selector(selector));
            let selection = match selected {
                Ok(selection) => selection,
                // A cut may take the profile with all groups.
                Err(e) if has_none(&e) || e.to_string().contains("Sequence::profile") => continue,
                Err(e) => return self.fault("choose entries", &e),
            };
            match self.check_pages((&store, sequence), &selection, (layer, tokens), None)? {
                Ok(()) => {}
                Err(e) => self.fault("read pages of clusters", &e)?,
            }
        }
        Ok(())
    }

    /// Reads a selection, if it has pages, and compares its entries with the contents of the layer. `Ok(Err)` is an
    /// error of the store.
    pub(super) fn check_pages(
        &mut self,
        (store, sequence): (&Store, &Sequence),
        selection: &Selection,
        (layer, tokens): (usize, &[Token]),
        contents: Option<&Contents>,
    ) -> StepResult<stratakv::Result<()>> {
        let id = sequence.id().0;
        self.must_have_pages(id, selection, tokens.len())?;
        if selection.stored_pages() == 0 {
            return Ok(Ok(()));
        }
        let whole = match contents {
            Some(_) => None,
            None => match self.shape.read(store, |layer| sequence.select(layer, SelectRequest::all()), layer, tokens) {
                Ok(Ok(whole)) => Some(whole),
                Ok(Err(e)) => return Ok(Err(e)),
                Err(e) => return failed(format!("sequence {id}: {e}")),
            },
        };
        let Some(contents) = contents.or(whole.as_ref()) else { return Ok(Ok(())) };
        let query = super::entries::query(&self.shape, layer);
        let mut out = vec![0.0; query.len()];
        let read = store.read(&[selection]).submit().and_then(stratakv::read::ReadTicket::wait);
        let compared = read.and_then(|batch| {
            let blocks = batch.get(0)?;
            attend(&query, selection, blocks, &mut out)?;
            Ok(self.shape.compare_entries(layer, (selection, blocks), contents, (&query, &out)))
        });
        match compared {
            Ok(Ok(())) => {
                if self.stored.sets.get(&id).is_some_and(|own| own.forked) {
                    self.coverage.add(coverage::FORK_PAGED);
                }
                self.nothing_rebuilt().map(Ok)
            }
            Ok(Err(e)) => failed(format!("sequence {id}, {} pages: {e}", selection.stored_pages())),
            Err(e) => Ok(Err(e)),
        }
    }

    /// Checks that a selection reads pages if its sequence has stored clusters of entries that it chose.
    fn must_have_pages(&self, id: u64, selection: &Selection, tokens: usize) -> StepResult {
        let sound = matches!(self.case.regime, Regime::Plain) && !self.limited && !self.changed && !self.flipped;
        let sound = sound && !self.simulation.is_down();
        let Some(own) = self.stored.sets.get(&id).filter(|own| sound && !self.stored.spoiled && !own.forked) else {
            return Ok(());
        };
        // Whole groups may be attended without a choice: the newest one, and those that the method does not know.
        let group = self.shape.group as u64;
        let was_chosen = |head: usize| {
            let covered: Vec<u64> = selection.entries(head).take_while(|token| *token < own.tokens).collect();
            covered.chunk_by(|a, b| a / group == b / group).any(|entries| entries.len() < group as usize)
        };
        let has_chosen = (0..self.shape.keys().kv_heads).any(was_chosen);
        let whole = own.tokens > tokens as u64 / group * group;
        match has_chosen && !whole && selection.stored_pages() == 0 && self.simulation.faults_hit() == 0 {
            true => failed(format!("sequence {id} has stored clusters of {} tokens, and none is read", own.tokens)),
            false => Ok(()),
        }
    }

    /// Checks that no page and no directory failed. Only damage explains that, and a power failure is none.
    pub(super) fn nothing_rebuilt(&self) -> StepResult {
        let unharmed = matches!(self.case.regime, Regime::Plain | Regime::Tight) && !self.flipped && !self.rotten;
        let (before, now) = (self.stored.failed, failures());
        let sound = unharmed && !self.stored.spoiled && !self.simulation.is_down();
        match sound && self.simulation.faults_hit() == 0 && now != before {
            true => {
                failed(format!("without damage, pages and directories of clusters failed: {before:?}, now {now:?}"))
            }
            false => Ok(()),
        }
    }

    /// Checks that the store gave up all clusters that it could before it evicted a sequence.
    pub(super) fn clusters_went_first(&self) -> StepResult {
        let left = releasable_cluster_bytes(self.store()?);
        match self.closing.is_none() && left > 0 {
            true => failed(format!("a sequence was evicted although clusters take {left} bytes")),
            false => Ok(()),
        }
    }

    /// Returns whether a file is a segment for pools.
    fn is_pool(&self, disk: usize, path: &str) -> bool {
        let kind = |bytes: Vec<u8>| bytes.get(offset_of!(SegmentPage, kind)) == Some(&KIND_POOL);
        path.starts_with("segments/") && self.simulation.contents(disk, path).is_some_and(kind)
    }

    /// Returns whether the damage of pools explains a finding of kvfsck.
    pub(super) fn explains(&self, finding: &kvfsck::Finding) -> bool {
        use kvfsck::Code::{ClusterCoverage, ClusterDirectory, ClusterPage, ClusterState};
        let of_pool = || {
            let disk = finding.path.as_ref()?.file_name()?.to_str()?.parse().ok()?;
            Some(self.is_pool(disk, finding.file.as_deref()?))
        };
        let of_clusters = matches!(finding.code, ClusterCoverage | ClusterDirectory | ClusterPage | ClusterState);
        self.stored.spoiled && (of_clusters || of_pool() == Some(true))
    }

    /// Damages all pools. Groups and tails must not change, so the sequence of the slot is read as before.
    ///
    /// `way` says how: 0 flips a bit of each page, 1 of every third page. 2 moves each page to the next place. 3 clears
    /// all pages.
    pub(super) fn spoil_pools(&mut self, slot: usize, way: u8) -> StepResult {
        // The damage must hit the medium, so everything is written first.
        let flushed = self.store()?.flush();
        self.model.sync_attempted(flushed.is_ok());
        flushed.or_else(|e| self.fault("flush", &e))?;
        for disk in 0..self.case.geometry.devices {
            for path in self.simulation.files(disk).into_iter().filter(|path| path.starts_with("segments/")) {
                let Some(mut bytes) = self.simulation.contents(disk, &path) else { continue };
                if bytes.get(offset_of!(SegmentPage, kind)) != Some(&KIND_POOL) {
                    continue;
                }
                self.stored.spoiled = true;
                // The header and trailer of a segment stay, because they belong to the log.
                let last = bytes.len().saturating_sub(PAGE).max(PAGE);
                let pages = &mut bytes[PAGE..last];
                match way % 4 {
                    2 => pages.rotate_right(PAGE.min(pages.len())),
                    3 => pages.fill(0),
                    other => {
                        let seed = self.case.seed as usize;
                        let is_hit = |nth: usize| other == 0 || (nth + seed).is_multiple_of(3);
                        for (nth, page) in pages.chunks_mut(PAGE).enumerate().filter(|(nth, _)| is_hit(*nth)) {
                            page[(nth * 331 + seed / 3) % 400] ^= 1 << ((nth + seed / 7) % 8);
                        }
                    }
                }
                self.simulation.replace(disk, &path, &bytes);
            }
        }
        self.check(slot)
    }
}

const PAGE: usize = stratakv_format::PAGE_BYTES;

/// Returns whether the error says that there are no clusters to store, no memory for them, or no page that fits.
fn has_none(e: &Error) -> bool {
    let text = e.to_string();
    match e.kind() {
        ErrorKind::InvalidArgument => text.contains("no clusters") || text.contains("no group is in clusters"),
        ErrorKind::Configuration => text.contains("larger segments"),
        kind => kind == ErrorKind::MemoryLimit,
    }
}
