//! The layers of a sequence.

use super::layer::LayerState;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::KvLayout;
use crate::log::{Devices, Tail, TailRows};
use crate::metrics::{Category, Reservation};

/// All layers of a sequence, and the memory of their tails.
pub(super) struct LayerSet {
    /// By layer index; none for layers without keys and values.
    layers: Vec<Option<LayerState>>,
    /// The memory of the tails.
    _tails: Reservation,
}

impl LayerSet {
    /// Returns empty layers. Layers keep min/max records in memory if `has_summary`.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]: no memory for the tails.
    pub(super) fn new(devices: &Devices, layout: &KvLayout, has_summary: bool, frame_limit: usize) -> Result<Self> {
        let mut layers = Vec::with_capacity(layout.layers());
        let mut tail_bytes = 0;
        for index in 0..layout.layers() {
            layers.push(match layout.raw().layers[index].has_kv() {
                true => {
                    // The tail, and the copy that a selection may hold while it changes.
                    tail_bytes += 2 * layout.plain_block(index).block_bytes;
                    Some(LayerState::new(layout, index, has_summary, frame_limit)?)
                }
                false => None,
            });
        }
        Ok(Self { layers, _tails: reserve(devices, tail_bytes, Category::Tails)? })
    }

    /// Returns the layers as they are now. `cut` has, by layer, what [`LayerState::cut`] needs to cut each layer that
    /// is longer to `tokens`.
    ///
    /// # Errors
    /// As [`LayerState::snapshot`].
    pub(super) fn snapshot(&mut self, tails: Reservation, tokens: u64, cut: &[Option<Vec<u8>>]) -> Result<Self> {
        let mut layers = self.copies()?;
        for (layer, block) in layers.iter_mut().zip(cut) {
            if let Some(longer) = layer.as_mut().filter(|layer| layer.tokens() > tokens) {
                longer.cut(tokens, block.as_deref());
            }
        }
        Ok(Self { layers, _tails: tails })
    }

    /// Replaces the layers by copies of `other`'s, for a fork.
    ///
    /// # Errors
    /// As [`LayerState::snapshot`].
    pub(super) fn copy_from(&mut self, other: &mut Self) -> Result<()> {
        self.layers = other.copies()?;
        Ok(())
    }

    fn copies(&mut self) -> Result<Vec<Option<LayerState>>> {
        self.layers.iter_mut().map(|layer| layer.as_mut().map(LayerState::snapshot).transpose()).collect()
    }

    /// Returns the number of layers, including those without keys and values.
    pub(super) fn slots(&self) -> usize {
        self.layers.len()
    }

    pub(super) fn get(&self, layer: usize) -> Option<&LayerState> {
        self.layers.get(layer).and_then(Option::as_ref)
    }

    pub(super) fn get_mut(&mut self, layer: usize) -> Option<&mut LayerState> {
        self.layers.get_mut(layer).and_then(Option::as_mut)
    }

    /// Returns the layers with keys and values.
    pub(super) fn iter(&self) -> impl Iterator<Item = &LayerState> + Clone {
        self.layers.iter().flatten()
    }

    /// Returns the layers with keys and values.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut LayerState> {
        self.layers.iter_mut().flatten()
    }

    /// Returns the tokens that every layer has.
    pub(super) fn tokens(&self) -> u64 {
        self.iter().map(LayerState::tokens).min().unwrap_or(0)
    }

    /// Returns the tokens whose groups are in frames, in every layer.
    pub(super) fn grouped_tokens(&self) -> u64 {
        self.iter().map(LayerState::grouped_tokens).min().unwrap_or(0)
    }

    /// Returns the bytes of groups that no frame holds yet.
    pub(super) fn pending_bytes(&self) -> usize {
        self.iter().map(LayerState::pending_bytes).sum()
    }

    /// Returns the bytes of memory that the tables take.
    pub(super) fn table_bytes(&self) -> usize {
        self.iter().map(|layer| layer.table().memory_bytes()).sum()
    }

    /// Drops all layers.
    pub(super) fn clear(&mut self) {
        self.layers.clear();
    }
}

impl TailRows for LayerSet {
    fn rows<'a>(&'a self, tail: &Tail, plane: usize, out: &mut Vec<&'a [u8]>) -> Result<()> {
        let layer = self.get(tail.layer).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, format!("layer {} has no keys and values", tail.layer))
        })?;
        layer.rows(tail, plane, out)
    }
}

/// Takes memory that a sequence needs from its start.
///
/// # Errors
/// [`ErrorKind::MemoryLimit`].
pub(super) fn reserve(devices: &Devices, bytes: usize, category: Category) -> Result<Reservation> {
    devices.reserve(bytes, category).ok_or_else(|| {
        let text = format!("a sequence of this layout needs {bytes} bytes, more than memory_limit leaves; raise it");
        Error::new(ErrorKind::MemoryLimit, text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::TensorView;
    use crate::metrics::MemoryBudget;

    fn layer(layout: &KvLayout, index: usize, tokens: usize) -> Option<LayerState> {
        let mut layer = LayerState::new(layout, index, false, 64 << 10).unwrap();
        let rows = vec![1.0; tokens * 4];
        let view = TensorView::token_major(&rows, tokens, 1, 4);
        layer.take(&view, &view, 0..tokens).unwrap();
        Some(layer)
    }

    fn set(tokens: [usize; 2]) -> LayerSet {
        let layout = KvLayout::builder().layers(3).kv_heads(1).head_dim(4).group_tokens(8).build().unwrap();
        let layers = vec![layer(&layout, 0, tokens[0]), None, layer(&layout, 2, tokens[1])];
        LayerSet { layers, _tails: reservation() }
    }

    fn reservation() -> Reservation {
        MemoryBudget::new(0).try_reserve(0, Category::Tails).unwrap()
    }

    #[test]
    fn layer_set_has_the_tokens_that_every_layer_has() {
        let set = set([5, 3]);
        assert_eq!((set.tokens(), set.slots(), set.iter().count()), (3, 3, 2));
        assert!(set.get(1).is_none() && set.get(3).is_none());
    }

    #[test]
    fn layer_set_cuts_longer_layers_of_a_snapshot() {
        let mut set = set([5, 3]);
        let snapshot = set.snapshot(reservation(), 3, &[None, None, None]).unwrap();
        assert_eq!(snapshot.iter().map(LayerState::tokens).collect::<Vec<_>>(), [3, 3]);
        assert_eq!(set.iter().map(LayerState::tokens).collect::<Vec<_>>(), [5, 3]);
    }
}
