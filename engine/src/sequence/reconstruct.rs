//! Keys at a low rank in memory. Selections with [`PlaneSet::ReconstructedKeys`](crate::PlaneSet) attend with them.

use super::handle::Sequence;
use super::layer::LayerState;
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::Rotation;
use crate::metrics::Category;
use crate::retrieval::{FirstPass, KeptKeys, KeyGroup, ReconstructOptions, ReconstructedKeys};
use std::sync::Arc;

impl Sequence {
    /// Keeps the keys of all sealed groups in memory at a low rank (ShadowKV, section 4). From then on, selections with
    /// [`PlaneSet::ReconstructedKeys`](crate::PlaneSet) read values alone.
    ///
    /// It keeps, per layer, the strongest directions of the keys before rotation. It keeps the coefficients of each
    /// token in f16, and outlier groups with exact keys and values. Groups that are sealed later keep exact keys in
    /// memory, up to [`ReconstructOptions::exact_tokens`]. Call it at the end of a prompt, and again from time to time
    /// while decoding. Nothing is stored, so an opened sequence, a fork or a reader needs its own call.
    ///
    /// It reads each layer's keys twice, in pieces of a megabyte, and reverses the rotation that the layout names.
    /// Meanwhile it needs `3 * 4 * (kv_heads * key_dim)^2` bytes for three matrices of one layer.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the layout does not name a layer's rotation
    /// ([`KvLayoutBuilder::rope`](crate::layout::KvLayoutBuilder::rope)). Or a layer has no V plane. Or the rank is 0
    /// or above the width of the joint keys. Or the sum of the squares of a key is infinite.
    /// [`ErrorKind::MemoryLimit`]: the keys do not fit. [`ErrorKind::Corruption`], [`ErrorKind::Io`]: keys that cannot
    /// be read. Layers before the failed one have new keys.
    pub fn reconstruct_keys(&mut self, options: &ReconstructOptions) -> Result<()> {
        for layer in self.layers.iter() {
            check(layer, options).map_err(|e| e.during(format!("keys of layer {}", layer.index())))?;
        }
        let outcome = self.rebuild_layers(options);
        // Exact keys are at a low rank now and take less memory.
        self.account_summaries();
        outcome
    }

    fn rebuild_layers(&mut self, options: &ReconstructOptions) -> Result<()> {
        for at in 0..self.layers.slots() {
            let Some(layer) = self.layers.get(at) else { continue };
            let rebuilt = self.rebuilt(layer, options).map_err(|e| e.during(format!("keys of layer {at}")))?;
            let fresh = options.exact_tokens / self.identity.layout.group_tokens();
            let keys = KeptKeys::new(rebuilt, fresh, layer.plain().key_bytes);
            if let Some(layer) = self.layers.get_mut(at) {
                layer.summaries_mut().set_exact_keys(Some(keys));
            }
        }
        Ok(())
    }

    /// Drops what [`Self::reconstruct_keys`] keeps.
    pub fn forget_keys(&mut self) {
        self.layers.iter_mut().for_each(|layer| layer.summaries_mut().set_exact_keys(None));
        self.account_summaries();
    }

    /// Returns the bytes in memory of what [`Self::reconstruct_keys`] keeps, including exact keys of new tokens.
    #[must_use]
    pub fn rebuilt_bytes(&self) -> u64 {
        let kept = self.layers.iter().filter_map(|layer| layer.summaries().exact_keys());
        kept.map(|kept| (kept.rebuilt().bytes() + kept.bytes_for(0)) as u64).sum()
    }

    fn rebuilt(&self, layer: &LayerState, options: &ReconstructOptions) -> Result<Arc<ReconstructedKeys>> {
        let shape = layer.shape();
        let (groups, rank) = (layer.groups() as usize, options.rank_of(shape.width()));
        let outliers = options.outliers_of(groups);
        let reserve = |bytes: usize| {
            let text =
                || format!("keys at rank {rank} need {bytes} bytes, more than memory_limit leaves; lower the rank");
            let held = self.store.devices.reserve(bytes, Category::Summaries);
            held.ok_or_else(|| Error::new(ErrorKind::MemoryLimit, text()))
        };
        let account = reserve(ReconstructedKeys::bytes_of(&shape, groups, rank, outliers, layer.block().block_bytes))?;
        let _scratch = reserve(FirstPass::bytes_of(&shape, groups))?;
        let rope = layer.geometry().rope.as_ref().ok_or_else(unknown_rotation)?;
        let mut first = FirstPass::new(shape, Rotation::new(rope));
        let mut group = 0;
        while group < layer.groups() {
            group = self.visit(layer, group, &[], &mut |group, keys, _| {
                first.add(&KeyGroup::new(shape, keys, group)?);
                Ok(())
            })?;
        }
        let mut second = first.finish(rank, outliers, account)?;
        let outliers = second.outliers().to_vec();
        let mut group = 0;
        while group < layer.groups() {
            group = self.visit(layer, group, &outliers, &mut |group, keys, block| {
                second.add(&KeyGroup::new(shape, keys, group)?, block);
                Ok(())
            })?;
        }
        Ok(second.finish())
    }
}

fn unknown_rotation() -> Error {
    let text = "the layout does not name the rotation of its keys; set KvLayoutBuilder::rope or LayerSpec::rope";
    Error::new(ErrorKind::InvalidArgument, text)
}

fn check(layer: &LayerState, options: &ReconstructOptions) -> Result<()> {
    if layer.geometry().value_dim == 0 {
        let text = "the layer has no V plane: its values are a part of the keys";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    if layer.geometry().rope.is_none() {
        return Err(unknown_rotation());
    }
    let width = layer.shape().width();
    let rank = options.rank_of(width);
    if rank == 0 || rank > width {
        let text = format!("rank {rank} is out of range: joint keys of {width} elements allow 1 to {width}");
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(())
}
