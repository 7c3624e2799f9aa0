//! Storing the clusters of an attached method, and releasing them. `pools` has the bytes.

use super::handle::Sequence;
use super::layer::LayerState;
use super::loaded_clusters::StoredState;
use crate::catalog::Catalog;
use crate::error::{Error, ErrorKind, Result};
use crate::events::event;
use crate::log::{CommitRequest, DerivedRelease};
use crate::metrics::{Reservation, lock};
use crate::options::StoreClusterOptions;
use crate::pools::{
    EarlierFrame, EarlierLayer, GroupPlanes, LayerClusters, PlaneVisitor, PoolWriter, StoredClusters, StoredSet,
};
use crate::retrieval::SelectorId;
use crate::retrieval::clusters::ClusterLists;
use stratakv_format::FrameId;

/// Groups whose V planes one visit may need, at most.
const VISIT_GROUPS: usize = 512;

impl Sequence {
    /// Stores the clusters of an attached method once more, in the order of clusters, and commits them durably.
    ///
    /// The clusters are those of this moment. They cover committed tokens that the method has put into clusters, in all
    /// layers without a window. Stored clusters are derived: the sequence does not need them, and the store releases
    /// them before it evicts a sequence. The next handle finds them when it attaches the same method.
    ///
    /// If all tokens that the method has seen are committed, its state is stored as well: the next handle attaches it
    /// without clustering the keys again. Otherwise the next durable commit stores it. The state is written again after
    /// appends of twenty times its bytes. Tokens behind it are given to the method when it is attached.
    ///
    /// A sequence has one stored set. If the sequence has grown since it stored clusters of this method, most pages
    /// stay, and the call writes those of new tokens and of clusters that changed. So call it again now and then, for
    /// example after each answer. [`StoredClusters::kept_pages`] counts the pages that stayed. A set of another method
    /// is released. A fork writes all pages of its first set.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no such selector, a method without clusters, no committed group that its
    /// clusters cover, or a layout of sliding layers alone. [`ErrorKind::ReadOnly`]. [`ErrorKind::NoSpace`]: the store
    /// is full; no sequence is evicted for clusters. [`ErrorKind::MemoryLimit`]; [`ErrorKind::Corruption`],
    /// [`ErrorKind::Io`]: groups that cannot be read. The sequence has its earlier clusters then, unless a full store
    /// gave them up.
    /// [`ErrorKind::Indeterminate`]: as [`Sequence::commit`].
    pub fn store_clusters(&mut self, selector: SelectorId) -> Result<StoredClusters> {
        self.store_clusters_with(selector, StoreClusterOptions::new())
    }

    /// Stores clusters as [`Self::store_clusters`] does, with options: how their pages are placed on devices. Pages of
    /// an earlier set that stay keep their place. After [`Self::drop_stored_clusters`] all of them are placed again.
    ///
    /// # Errors
    /// As [`Self::store_clusters`].
    pub fn store_clusters_with(
        &mut self,
        selector: SelectorId,
        options: StoreClusterOptions,
    ) -> Result<StoredClusters> {
        self.store_clusters_of(selector, options).map_err(|e| e.during(format!("sequence {}", self.identity.sequence)))
    }

    fn store_clusters_of(&mut self, selector: SelectorId, options: StoreClusterOptions) -> Result<StoredClusters> {
        self.store.committer.check()?;
        let (slot, method) = self.clustered_slot(selector)?;
        let layers = self.clustered_layers()?;
        self.land_all()?;
        let tokens = self.storable_tokens(slot, &layers)?;
        let mut writer = PoolWriter::new(&self.store, &self.identity, &method, (tokens, options))?;
        let earlier = self.earlier_set(selector, tokens);
        if let Some(next) = earlier.and_then(StoredSet::next_version) {
            writer = writer.growing(next);
        }
        for &layer in &layers {
            let state = self.layer(layer)?;
            let lists = clusters_of(state, slot);
            let dtype = self.identity.layout.dtype();
            let clusters = LayerClusters::covering(&lists, tokens, state.geometry(), dtype)?;
            drop(lists);
            let pages = earlier.and_then(|set| self.earlier_pages(set, layer));
            let source = LayerGroups { sequence: self, state };
            let written = writer.layer(layer, clusters, pages.as_ref().map(|(_, pages)| pages), &source);
            written.map_err(|e| e.during(format!("layer {layer}")))?;
        }
        // The clusters come first: a store that is nearly full keeps them without a state.
        writer.write_directories()?;
        let former = self.kept_state(&method).filter(|_| earlier.is_some());
        let written = self.write_states((slot, &method), writer.version(), (former.as_ref(), 0)).unwrap_or_else(|e| {
            event!(warn, cause = e, "the state of a method is not stored");
            None
        });
        let state = written.as_ref().map(StoredState::of).or_else(|| {
            let kept = former.filter(|state| !state.is_outdated)?;
            writer.keep(kept.frames.iter().copied());
            Some(kept)
        });
        let stored = writer.commit(self.stored_frames(), written);
        // A commit that stays queued releases the earlier set. A set of the same generation must not follow it.
        if stored.as_ref().err().is_none_or(Error::is_queued) {
            self.selectors.cut_loaded(0);
        }
        let stored = stored?;
        self.load_clusters(selector, &[]);
        if let Some(loaded) = self.selectors.loaded_of_mut(&method) {
            loaded.state = state;
        }
        Ok(stored)
    }

    /// Releases the stored clusters of the sequence. Nothing changes if it has none.
    ///
    /// # Errors
    /// As [`Sequence::commit`].
    pub fn drop_stored_clusters(&mut self) -> Result<()> {
        self.store.committer.check()?;
        let sequence = self.identity.sequence;
        let release = |frame| DerivedRelease::Reference(sequence, frame);
        let derived: Vec<DerivedRelease> = self.stored_frames().into_iter().map(release).collect();
        if derived.is_empty() {
            return Ok(());
        }
        self.selectors.cut_loaded(0);
        self.store.commit(CommitRequest { derived, ..CommitRequest::default() })
    }

    /// Returns the derived frames that the sequence refers to.
    fn stored_frames(&self) -> Vec<FrameId> {
        let catalog = lock(&self.store.catalog);
        catalog.derived_of(self.identity.sequence).map(|(frame, _)| frame).collect()
    }

    /// Returns the stored set of the selector's method, if pages of it may stay in a set of the first `tokens` tokens:
    /// the sequence wrote it itself, it covers no other tokens, and another generation can follow it.
    fn earlier_set(&self, selector: SelectorId, tokens: u64) -> Option<&StoredSet> {
        let set = &self.selectors.loaded(selector)?.set;
        let catalog = lock(&self.store.catalog);
        let is_own = |frame: &FrameId| self.earlier_frame(&catalog, *frame).is_some();
        (set.tokens <= tokens && set.next_version().is_some() && set.frames().any(is_own)).then_some(set)
    }

    /// Returns the pages of a layer that may stay, with their memory. Without memory for them, none stays.
    fn earlier_pages(&self, set: &StoredSet, layer: usize) -> Option<(Reservation, EarlierLayer)> {
        let own = set.layer(layer)?;
        let memory = self.reserve_scratch(EarlierLayer::bytes_for(own)).ok()?;
        let catalog = lock(&self.store.catalog);
        Some((memory, EarlierLayer::new(own, &|frame| self.earlier_frame(&catalog, frame))))
    }

    /// Returns a frame with pages that this sequence wrote, if it exists on a device that is present.
    fn earlier_frame(&self, catalog: &Catalog, id: FrameId) -> Option<EarlierFrame> {
        let frame = catalog.frames.get(&id).filter(|frame| frame.derived && frame.origin == self.identity.sequence)?;
        self.store.devices.get(frame.location.device).ok().filter(|device| !device.is_lost())?;
        Some(EarlierFrame { id, pool_pages: frame.location.pages - frame.front_pages })
    }

    /// Returns the slot of a selector's summary with clusters, and the id of its kind.
    fn clustered_slot(&self, selector: SelectorId) -> Result<(usize, String)> {
        self.selectors.clustered(selector, &self.layers)?.ok_or_else(|| {
            let text = "store clusters: the method has no clusters yet; it may need a profile, or more tokens";
            Error::new(ErrorKind::InvalidArgument, text)
        })
    }

    /// Returns the layers whose clusters may be stored.
    fn clustered_layers(&self) -> Result<Vec<usize>> {
        let is_whole = |layer: &&LayerState| layer.geometry().window.is_none();
        let layers: Vec<usize> = self.layers.iter().filter(is_whole).map(LayerState::index).collect();
        if layers.is_empty() {
            let text = "store clusters: every layer has a window, and such layers keep groups";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(layers)
    }

    /// Returns the end of the tokens whose clusters are stored, in every layer. A token that a crash could take, or
    /// that a cut has replaced since the last commit, is not covered.
    fn storable_tokens(&self, slot: usize, layers: &[usize]) -> Result<u64> {
        let durable = if self.commits.is_stored() { self.commits.committed() } else { 0 };
        let mut tokens = durable.min(self.commits.cut_to().unwrap_or(u64::MAX)).min(self.len());
        for &layer in layers {
            let lists = clusters_of(self.layer(layer)?, slot);
            tokens = LayerClusters::end(&lists, self.identity.layout.group_tokens(), tokens);
        }
        if tokens == 0 {
            let text = format!("store clusters: of {durable} committed tokens, no group is in clusters in every layer");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(tokens)
    }
}

fn clusters_of(layer: &LayerState, slot: usize) -> Vec<ClusterLists> {
    layer.summaries().attached().get(slot).map(|summary| summary.get().cluster_lists()).unwrap_or_default()
}

/// The groups of a layer, for the pages of its clusters.
struct LayerGroups<'a> {
    sequence: &'a Sequence,
    state: &'a LayerState,
}

impl GroupPlanes for LayerGroups<'_> {
    fn each(&self, groups: &[u64], each: &mut PlaneVisitor<'_>) -> Result<()> {
        let mut decoded = Vec::new();
        let mut left = groups;
        while let Some(&first) = left.first() {
            let (wanted, _) = left.split_at(left.len().min(VISIT_GROUPS));
            let next = self.sequence.visit(self.state, first, wanted, &mut |group, keys, block| {
                if wanted.binary_search(&group).is_err() {
                    return Ok(());
                }
                let (start, len) = self.state.block().plane(1);
                let stored = &block[start..start + len];
                match self.state.coder() {
                    Some(coder) if coder.encodes(1) => {
                        decoded.resize(coder.plain_bytes(1), 0);
                        coder.decode_plane(1, stored, &mut decoded)?;
                        each(group, keys, &decoded)
                    }
                    _ => each(group, keys, stored),
                }
            })?;
            left = &left[wanted.partition_point(|group| *group < next)..];
        }
        Ok(())
    }
}
