//! Keys at a low rank, kept in memory: what selections with [`PlaneSet::ReconstructedKeys`](crate::Planes) attend with.

use super::{Layer, Sequence};
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::Rotation;
use crate::metrics::Category;
use crate::retrieval::{FirstPass, KeptKeys, KeyGroup, ReconstructOptions, ReconstructedKeys};
use std::sync::Arc;

impl Sequence {
    /// Keeps the keys of all sealed groups in memory at a low rank (ShadowKV): per layer the strongest directions of the keys
    /// before rotation, and of each token its part of them in f16; keys and values of the outliers as they are. From then on
    /// selections with [`PlaneSet::ReconstructedKeys`](crate::Planes) read values alone. Groups sealed later keep exact keys in memory, as
    /// [`ReconstructOptions::exact_tokens`] says, until this is called again: at the end of a prompt, and now and then while
    /// decoding. Nothing is stored: after the sequence is opened, in forks and in readers it is to be called anew.
    ///
    /// Each layer's keys are read twice, in pieces of a megabyte, and turned back by the rotation that the layout names. Memory
    /// beside what is kept: three matrices of all KV heads' keys, `3 * 4 * (kv_heads * key_dim)^2` bytes, one layer at a time.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a layer whose rotation the layout does not name
    /// ([`KvLayoutBuilder::rope`](crate::KvLayoutBuilder::rope)) or that has no V plane, a rank of 0 or above its joint keys;
    /// keys of f32 or bf16 so long that the sum of their squares is infinite.
    /// [`ErrorKind::MemoryLimit`]; keys that cannot be read. Layers before the one that failed have new ones.
    pub fn reconstruct_keys(&mut self, options: &ReconstructOptions) -> Result<()> {
        for layer in self.layers.iter().flatten() {
            check(layer, options).map_err(|e| e.during(format!("keys of layer {}", layer.index)))?;
        }
        let outcome = self.rebuild_layers(options);
        // Exact keys that are now at a low rank.
        self.account_methods();
        outcome
    }

    fn rebuild_layers(&mut self, options: &ReconstructOptions) -> Result<()> {
        for at in 0..self.layers.len() {
            let Some(layer) = &self.layers[at] else { continue };
            let rebuilt = self.rebuilt(layer, options).map_err(|e| e.during(format!("keys of layer {at}")))?;
            let fresh = options.exact_tokens / self.who.layout.group_tokens();
            let kept = KeptKeys::new(rebuilt, fresh, layer.plain.key_bytes);
            if let Some(layer) = &mut self.layers[at] {
                layer.kept = Some(kept);
            }
        }
        Ok(())
    }

    /// Gives up what [`Self::reconstruct_keys`] keeps.
    pub fn forget_keys(&mut self) {
        self.layers.iter_mut().flatten().for_each(|layer| layer.kept = None);
        self.account_methods();
    }

    /// Bytes in memory of what [`Self::reconstruct_keys`] keeps, exact keys of new tokens included.
    #[must_use]
    pub fn rebuilt_bytes(&self) -> u64 {
        let kept = self.layers.iter().flatten().filter_map(|layer| layer.kept.as_ref());
        kept.map(|kept| (kept.rebuilt().bytes() + kept.bytes_for(0)) as u64).sum()
    }

    fn rebuilt(&self, layer: &Layer, options: &ReconstructOptions) -> Result<Arc<ReconstructedKeys>> {
        let shape = layer.shape();
        let (groups, rank) = (layer.groups() as usize, options.rank_of(shape.width()));
        let outliers = options.outliers_of(groups);
        let reserve = |bytes: usize| {
            let text = || format!("keys at rank {rank} take {bytes} bytes, more than memory_limit has left");
            let held = self.store.devices.reserve(bytes, Category::Summaries);
            held.ok_or_else(|| Error::new(ErrorKind::MemoryLimit, text()))
        };
        let account = reserve(ReconstructedKeys::bytes_of(&shape, groups, rank, outliers, layer.block.block_bytes))?;
        let _scratch = reserve(FirstPass::bytes_of(&shape, groups))?;
        let rope = layer.geometry.rope.as_ref().ok_or_else(unknown_rotation)?;
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
    let text = "the layout does not say how its keys were rotated: KvLayoutBuilder::rope, LayerSpec::rope";
    Error::new(ErrorKind::InvalidArgument, text)
}

fn check(layer: &Layer, options: &ReconstructOptions) -> Result<()> {
    if layer.geometry.value_dim == 0 {
        let text = "the layer has no V plane: its values are a part of the keys";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    if layer.geometry.rope.is_none() {
        return Err(unknown_rotation());
    }
    let width = layer.shape().width();
    let rank = options.rank_of(width);
    if rank == 0 || rank > width {
        let text = format!("a rank of {rank}; joint keys of {width} elements have 1 to {width}");
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(())
}
