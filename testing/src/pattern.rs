//! Uniform layouts, and groups whose elements are the number of the group.

use half::f16;
use stratakv::{CreateOptions, Durability, KvLayout, ReadBatch, Sequence, Store, TensorView};

/// Builds a layout in f16 whose layers are equal.
///
/// # Panics
/// The layout is invalid.
#[must_use]
pub fn uniform_layout(layers: usize, kv_heads: usize, head_dim: usize, group_tokens: usize) -> KvLayout {
    let layout = KvLayout::builder().layers(layers as u16).kv_heads(kv_heads as u16).head_dim(head_dim as u16);
    layout.group_tokens(group_tokens as u16).build().expect("a layout")
}

/// A pattern for one layer in f16, which shows bytes of another group or plane. Every key element of a group is the
/// number of the group, and every value element is its negative. f16 represents numbers up to 2048 exactly.
#[derive(Clone, Copy, Debug)]
pub struct GroupPattern {
    /// The KV heads.
    pub heads: usize,
    /// The head dim of keys and values.
    pub dim: usize,
    /// The tokens of a group.
    pub group: usize,
}

impl GroupPattern {
    /// Returns the layout.
    #[must_use]
    pub fn layout(&self) -> KvLayout {
        uniform_layout(1, self.heads, self.dim, self.group)
    }

    /// Returns the bytes of a plane.
    #[must_use]
    pub const fn plane_bytes(&self) -> usize {
        self.heads * self.dim * self.group * 2
    }

    /// Appends the group of this number.
    ///
    /// # Panics
    /// The append fails.
    pub fn append(&self, sequence: &mut Sequence, group: u64) {
        let rows = |element: f32| vec![element; self.group * self.heads * self.dim];
        let (keys, values) = (rows(group as f32), rows(-(group as f32)));
        let view = |rows| TensorView::token_major(rows, self.group, self.heads, self.dim);
        sequence.append(0, view(&keys), view(&values)).expect("an append");
    }

    /// Creates a sequence with groups `0..groups` and commits it.
    ///
    /// # Panics
    /// The store refuses it.
    #[must_use]
    pub fn write(&self, store: &Store, options: CreateOptions, groups: u64) -> Sequence {
        let mut sequence = store.create_sequence(&self.layout(), options).expect("a sequence");
        (0..groups).for_each(|group| self.append(&mut sequence, group));
        sequence.commit(Durability::Sync).expect("a commit");
        sequence
    }

    /// Returns the K and V plane of a group, as they are stored.
    #[must_use]
    pub fn planes(&self, group: u64) -> [Vec<u8>; 2] {
        let element = group as f32;
        [element, -element].map(|x| f16::from_f32(x).to_le_bytes().repeat(self.plane_bytes() / 2))
    }

    /// Checks every byte of the blocks that a batch holds for its selection `index`. `groups` are the selected groups.
    ///
    /// # Panics
    /// A block is missing or has wrong bytes.
    pub fn check(&self, batch: &ReadBatch, index: usize, groups: &[u64]) {
        let blocks = batch.get(index).expect("blocks");
        for (nth, group) in groups.iter().enumerate() {
            let (keys, values) = blocks.group(nth).expect("a block");
            let [want_keys, want_values] = self.planes(*group);
            assert!(keys == want_keys && values == want_values, "group {group} of selection {index} has wrong bytes");
        }
    }
}
