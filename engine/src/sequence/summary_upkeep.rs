//! Upkeep of summaries that need keys of earlier groups: clusters that are built, split, or made from a profile.
//!
//! How a summary takes in new groups:
//! 1. An append pushes each sealed group to it. That cannot fail, and an append that fails takes the groups back.
//! 2. Once the append has succeeded, the summary advances. It may ask for keys of earlier groups, to split a cluster.
//! 3. The sequence reads these keys and supplies them, until the summary asks for none.
//!
//! Invariant: an append never fails because of the upkeep. If keys cannot be read, the summary keeps the groups that it
//! has not taken in. They can still be chosen or are attended whole, and a later append tries again.

use super::errors::no_memory;
use super::handle::Sequence;
use super::layer::LayerState;
use super::select::check_query;
use crate::error::{Error, ErrorKind, Result};
use crate::events::event;
use crate::metrics::Category;
use crate::retrieval::{KeyGroup, LayerSummary, QueryProfile, SealedKeys, SelectorId};

/// The most rounds in which a summary may ask for keys after one append.
const ROUNDS_MAX: usize = 1 << 20;
/// Groups whose keys are in memory at once while they are supplied.
pub(super) const GROUPS_AT_ONCE: usize = 64;

impl Sequence {
    /// Builds the clusters of one layer from recorded queries, for a selector that needs them (`swarm`, `infllm`).
    ///
    /// Each query is `[q_heads, key_dim]`, from the oldest to the newest. Usually they are the last 128 queries of the
    /// prompt, whose keys are all appended. `scale` is the factor of `q . k`, `1 / sqrt(key_dim)` if there is none.
    /// The keys of the layer are read once and held in memory meanwhile. A second profile replaces the first one.
    ///
    /// ```
    /// use stratakv::retrieval::MethodSpec;
    /// use stratakv::{Budget, ByteSize, CreateOptions, KvLayout, SelectRequest, Store, TensorView};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// let store = Store::options().device(dir.path()).segment_bytes(ByteSize::mib(1)).open()?;
    /// let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).group_tokens(16).build()?;
    /// let mut sequence = store.create_sequence(&layout, CreateOptions::new())?;
    /// let rows: Vec<f32> = (0..160 * 8).map(|i| (i % 31) as f32 / 31.0).collect();
    /// let tensor = TensorView::token_major(&rows, 160, 1, 8);
    /// sequence.append(0, tensor, tensor)?;
    ///
    /// let swarm = sequence.attach("swarm:4".parse::<MethodSpec>()?.selector(None)?)?;
    /// let queries: Vec<&[f32]> = rows.chunks(8).skip(128).collect(); // as recorded during the prompt
    /// sequence.profile(swarm, 0, &queries, None)?;
    /// let request = SelectRequest::query(&rows[..8]).budget(Budget::tokens(32)).selector(swarm);
    /// let selection = sequence.select(0, request)?;
    /// assert!(selection.entries(0).count() <= 32);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a selector of another sequence, or one that takes no profile. Also no such
    /// layer, a query of another shape, none at all, or a scale that is not finite and above 0.
    /// [`ErrorKind::MemoryLimit`]: no memory for the keys or the clusters. Errors of reading the keys. After an error
    /// the clusters are as before.
    pub fn profile(
        &mut self,
        selector: SelectorId,
        layer: usize,
        queries: &[&[f32]],
        scale: Option<f32>,
    ) -> Result<()> {
        let slots = self.selectors.get(selector)?.slots().to_vec();
        let place = |e: Error| e.during(format!("profile of layer {layer}"));
        let state = self.layer(layer)?;
        queries.iter().try_for_each(|query| check_query(state, query)).map_err(place)?;
        let shape = state.shape();
        let scale = scale.unwrap_or(1.0 / (shape.key_dim as f32).sqrt());
        let wrong = |text: String| Err(place(Error::new(ErrorKind::InvalidArgument, text)));
        if queries.windows(2).any(|pair| pair[0].len() != pair[1].len()) || queries.is_empty() {
            return wrong("a profile needs at least one query, all with the same number of heads".to_owned());
        }
        if !(scale.is_finite() && scale > 0.0) {
            return wrong(format!("scale {scale} must be finite and above 0"));
        }
        let attached = state.summaries().attached();
        let takes = |slot: &usize| attached.get(*slot).and_then(|own| own.get().profile_bytes(queries.len()));
        let scratch: Vec<usize> = slots.iter().filter_map(takes).collect();
        if scratch.is_empty() {
            return wrong("the selector takes no profile".to_owned());
        }
        let groups = state.groups();
        let bytes = groups as usize * SealedKeys::group_bytes(&shape) + scratch.iter().sum::<usize>();
        let held = self
            .store
            .devices
            .reserve(bytes, Category::Summaries)
            .ok_or_else(|| place(no_memory(&format!("the keys of {groups} groups, for a profile"))))?;
        let mut keys = SealedKeys::new(shape, 0);
        self.each_keys(state, 0..groups, &mut |group, plane| {
            keys.push(&KeyGroup::new(shape, plane, group)?);
            Ok(())
        })
        .map_err(place)?;
        let profile = QueryProfile { keys: &keys, shape, queries, scale };
        slots.iter().for_each(|slot| self.selectors.outdate_state(*slot));
        let state = self.layer_mut(layer)?;
        for slot in slots {
            let Some(summary) = state.summaries_mut().attached_mut(slot) else { continue };
            if summary.get().profile_bytes(queries.len()).is_some() {
                summary.get_mut().profile(&profile).map_err(place)?;
            }
        }
        // The clusters take less than the keys and the scratch, whose memory they get.
        drop((keys, held));
        self.account_summaries();
        Ok(())
    }

    /// Has the summaries of a layer take in the groups that an append has sealed.
    pub(super) fn advance_summaries(&mut self, layer: usize) {
        let slots = self.layer(layer).map_or(0, |state| state.summaries().attached().len());
        let mut any = false;
        for slot in 0..slots {
            match self.advance_slot(layer, slot) {
                Ok(advanced) => any |= advanced,
                Err(e) => event!(warn, layer = layer, error = e, "clusters did not take in new groups"),
            }
        }
        if any {
            self.account_summaries();
        }
    }

    /// Has one summary of a layer take in new groups. Returns whether it keeps clusters.
    pub(super) fn advance_slot(&mut self, layer: usize, slot: usize) -> Result<bool> {
        for round in 0..ROUNDS_MAX {
            let Some(own) = self.layer_mut(layer)?.summaries_mut().attached_mut(slot) else { return Ok(false) };
            let summary = own.get_mut();
            if round == 0 && !summary.has_clusters() {
                return Ok(false);
            }
            let wanted = summary.advance()?;
            if wanted.is_empty() {
                return Ok(true);
            }
            for wanted in wanted.chunks(GROUPS_AT_ONCE) {
                let state = self.layer(layer)?;
                let (shape, keys) = (state.shape(), self.keys_of(state, wanted)?);
                let Some(own) = self.layer_mut(layer)?.summaries_mut().attached_mut(slot) else { return Ok(true) };
                for (group, plane) in keys {
                    own.get_mut().supply(&KeyGroup::new(shape, &plane, group)?);
                }
            }
        }
        Err(endless())
    }

    /// Has a summary that is being attached take in the groups that were pushed to it.
    ///
    /// # Errors
    /// Errors of reading the keys that it asks for.
    pub(super) fn advance_new(&self, state: &LayerState, summary: &mut dyn LayerSummary) -> Result<()> {
        for _ in 0..ROUNDS_MAX {
            let wanted = summary.advance()?;
            if wanted.is_empty() {
                return Ok(());
            }
            for wanted in wanted.chunks(GROUPS_AT_ONCE) {
                for (group, plane) in self.keys_of(state, wanted)? {
                    summary.supply(&KeyGroup::new(state.shape(), &plane, group)?);
                }
            }
        }
        Err(endless())
    }

    /// Returns the K planes of groups, which rise.
    fn keys_of(&self, state: &LayerState, groups: &[u64]) -> Result<Vec<(u64, Vec<u8>)>> {
        let mut keys = Vec::with_capacity(groups.len());
        for run in groups.chunk_by(|a, b| a + 1 == *b) {
            self.each_keys(state, run[0]..run[0] + run.len() as u64, &mut |group, plane| {
                keys.push((group, plane.to_vec()));
                Ok(())
            })?;
        }
        Ok(keys)
    }
}

fn endless() -> Error {
    Error::new(ErrorKind::Busy, "clusters: a summary still asks for keys after all rounds of upkeep")
}
