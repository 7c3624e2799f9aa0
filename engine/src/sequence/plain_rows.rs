//! Rows of tokens in a plain block: planes `[kv_heads, group_tokens, dim]`, keys then values.

use crate::layout::TensorView;
use std::ops::Range;
use stratakv_format::DType;
use stratakv_format::layout::{BlockGeometry, LayerGeometry};

/// The shape of a layer's plain blocks.
pub(super) struct PlainRows {
    pub(super) geometry: LayerGeometry,
    pub(super) block: BlockGeometry,
    pub(super) dtype: DType,
    pub(super) group_tokens: usize,
}

impl PlainRows {
    /// Writes `tokens` of checked views to the block `out`, from token `slot` on.
    pub(super) fn write(
        &self,
        out: &mut [u8],
        slot: usize,
        keys: &TensorView<'_>,
        values: &TensorView<'_>,
        tokens: Range<usize>,
    ) {
        for (plane, dim, view) in [(0, self.geometry.key_dim, keys), (1, self.geometry.value_dim, values)] {
            let row = usize::from(dim) * self.dtype.bytes();
            let (start, _) = self.block.plane(plane);
            if row == 0 {
                continue;
            }
            for head in 0..usize::from(self.geometry.kv_heads) {
                for (index, token) in tokens.clone().enumerate() {
                    let at = start + (head * self.group_tokens + slot + index) * row;
                    view.write_row(token, head, self.dtype, &mut out[at..at + row]);
                }
            }
        }
    }

    /// Copies rows `from` of planes `[kv_heads, stride, dim]` to the block `out`, from token `slot` on.
    pub(super) fn copy(&self, out: &mut [u8], slot: usize, planes: [&[u8]; 2], stride: usize, from: Range<usize>) {
        let dims = [self.geometry.key_dim, self.geometry.value_dim];
        for (index, (source, dim)) in planes.into_iter().zip(dims).enumerate() {
            let row = usize::from(dim) * self.dtype.bytes();
            let (start, _) = self.block.plane(index);
            if row == 0 {
                continue;
            }
            for head in 0..usize::from(self.geometry.kv_heads) {
                let source = &source[(head * stride + from.start) * row..][..from.len() * row];
                out[start + (head * self.group_tokens + slot) * row..][..source.len()].copy_from_slice(source);
            }
        }
    }

    /// Adds the rows of tokens `first..end` of a plane to `out`, in the order `[kv_heads, tokens, dim]`. `planes` are
    /// that plane of the consecutive blocks with these tokens.
    pub(super) fn slices<'a>(&self, planes: &[&'a [u8]], first: u64, end: u64, out: &mut Vec<&'a [u8]>) {
        let size = self.group_tokens as u64;
        let Some(len) = planes.first().map(|plane| plane.len()) else { return };
        let head_bytes = len / usize::from(self.geometry.kv_heads);
        let row = head_bytes / self.group_tokens;
        for head in 0..usize::from(self.geometry.kv_heads) {
            let mut token = first;
            for plane in planes {
                let rows = (token % size) as usize..(end - token / size * size).min(size) as usize;
                out.push(&plane[head * head_bytes..][rows.start * row..rows.end * row]);
                token += rows.len() as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::KvLayout;

    #[test]
    fn plain_rows_come_back_as_they_were_written() {
        let layout =
            KvLayout::builder().layers(1).kv_heads(2).head_dim(2).group_tokens(4).dtype(DType::F32).build().unwrap();
        let geometry = *layout.kv_layer(0).unwrap();
        let block = *layout.plain_block(0);
        let rows = PlainRows { geometry, block, dtype: DType::F32, group_tokens: 4 };
        let numbers: Vec<f32> = (0..4 * 2 * 2).map(|i| i as f32).collect();
        let view = TensorView::token_major(&numbers, 4, 2, 2);
        let (mut one, mut two) = (vec![0; block.block_bytes], vec![0; block.block_bytes]);
        rows.write(&mut one, 0, &view, &view, 0..4);
        let (start, len) = block.plane(1);
        rows.copy(&mut two, 1, [&one[..block.key_bytes], &one[start..start + len]], 4, 2..4);
        // Tokens 2 and 3 are at positions 1 and 2 now.
        let mut out = Vec::new();
        rows.slices(&[&two[..block.key_bytes]], 1, 3, &mut out);
        let copied: Vec<f32> = out.concat().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        assert_eq!(copied, [8.0, 9.0, 12.0, 13.0, 10.0, 11.0, 14.0, 15.0]);
    }
}
