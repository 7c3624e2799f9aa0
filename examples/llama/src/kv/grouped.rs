//! Keys and values of one layer in memory, in the groups of a store. The engine's kernels attend to them.

use anyhow::{Result, ensure};
use half::{bf16, f16};
use stratakv::attention::{AttentionShape, HeadMask, KvBlock, Partial, Query, TokenMask, Workspace};
use stratakv::layout::PlaneCodec;

use super::error::engine_error;
use super::geometry::{KvDType, KvGeometry, LayerGeometry};
use super::layout::{engine_dtype, kv_layout};

/// The K and V planes of all groups of a layer, the unfinished one included.
///
/// Attention uses the engine's kernels with the same groups in the same parts
/// ([`KvLayout::part_groups`](stratakv::KvLayout::part_groups)) as the engine does. If a store returns exactly the
/// bytes that were appended, both outputs are equal to the bit. One wrong byte makes them differ.
#[derive(Clone, Debug)]
pub struct GroupedLayer {
    shape: AttentionShape,
    geometry: LayerGeometry,
    dtype: KvDType,
    group_tokens: usize,
    part_groups: usize,
    /// `[groups, kv_heads, group_tokens, head_dim]`, little-endian. Places without a token are zero.
    keys: Vec<u8>,
    values: Vec<u8>,
    tokens: usize,
}

impl GroupedLayer {
    /// Makes every layer of a model, empty, in groups of `group_tokens`.
    ///
    /// # Errors
    /// Fails if the engine does not support one of the sizes.
    pub fn layers(geometry: &KvGeometry, group_tokens: usize) -> Result<Vec<Self>> {
        let layout = kv_layout(geometry, group_tokens, PlaneCodec::Raw, [0; 32])?;
        let layers = geometry.layers.iter().enumerate().map(|(index, &layer)| {
            let (heads, dim) = (layer.kv_heads, layer.head_dim);
            let shape = AttentionShape::new(geometry.query_heads, heads, dim, dim, engine_dtype(geometry.dtype));
            let shape = shape.and_then(|shape| shape.with_scale(geometry.scale)).map_err(engine_error)?;
            Ok(Self {
                shape,
                geometry: layer,
                dtype: geometry.dtype,
                group_tokens,
                part_groups: layout.part_groups(index).map_err(engine_error)?,
                keys: Vec::new(),
                values: Vec::new(),
                tokens: 0,
            })
        });
        layers.collect()
    }

    /// Adds whole tokens: `keys` and `values` are `[tokens, kv_heads, head_dim]`.
    pub(super) fn push(&mut self, keys: &[f32], values: &[f32]) {
        let width = self.geometry.width();
        for (keys, values) in keys.chunks_exact(width).zip(values.chunks_exact(width)) {
            let (group, slot) = (self.tokens / self.group_tokens, self.tokens % self.group_tokens);
            for (plane, row) in [(&mut self.keys, keys), (&mut self.values, values)] {
                let group_bytes = self.shape.k_plane_bytes(self.group_tokens);
                if slot == 0 {
                    plane.resize((group + 1) * group_bytes, 0);
                }
                let head_bytes = self.geometry.head_dim * self.dtype.bytes();
                for (head, row) in row.chunks_exact(self.geometry.head_dim).enumerate() {
                    let at = group * group_bytes + (head * self.group_tokens + slot) * head_bytes;
                    write_row(row, self.dtype, &mut plane[at..at + head_bytes]);
                }
            }
            self.tokens += 1;
        }
    }

    /// Attends from the newest token to all tokens from `oldest` on.
    ///
    /// # Errors
    /// Fails if there is no such token, or if the engine's kernels report an error.
    pub(super) fn attend(&self, oldest: usize, queries: &[f32], out: &mut [f32]) -> Result<()> {
        ensure!(oldest < self.tokens, "there is no token to attend to");
        let mut run = || -> stratakv::Result<()> {
            let query = Query::new(&self.shape, queries)?;
            let (mut total, mut part) = (Partial::new(&self.shape), Partial::new(&self.shape));
            let mut workspace = Workspace::new();
            let sealed = self.tokens / self.group_tokens;
            let groups: Vec<usize> = ((oldest / self.group_tokens).min(sealed)..sealed).collect();
            for groups in groups.chunks(self.part_groups) {
                let blocks: Vec<KvBlock<'_>> = groups.iter().map(|&group| self.block(group, oldest)).collect();
                part.reset();
                part.add_all(&query, &blocks, &mut workspace)?;
                total.merge(&part)?;
            }
            if self.tokens > sealed * self.group_tokens {
                part.reset();
                part.add(&query, &self.block(sealed, oldest), &mut workspace)?;
                total.merge(&part)?;
            }
            total.finish(out)
        };
        run().map_err(engine_error)
    }

    /// Returns a group without its tokens before `oldest`.
    fn block(&self, group: usize, oldest: usize) -> KvBlock<'_> {
        let first = group * self.group_tokens;
        let tokens = (self.tokens - first).min(self.group_tokens);
        let hidden = oldest.saturating_sub(first);
        let bytes = self.shape.k_plane_bytes(self.group_tokens);
        KvBlock {
            k: &self.keys[group * bytes..(group + 1) * bytes],
            v: &self.values[group * bytes..(group + 1) * bytes],
            group_tokens: self.group_tokens,
            tokens,
            heads: HeadMask::all(self.geometry.kv_heads),
            positions: (hidden > 0).then(|| TokenMask::all(tokens).difference(TokenMask::all(hidden))),
            one_head: false,
        }
    }
}

fn write_row(row: &[f32], dtype: KvDType, out: &mut [u8]) {
    match dtype {
        KvDType::F32 => out.chunks_exact_mut(4).zip(row).for_each(|(o, x)| o.copy_from_slice(&x.to_le_bytes())),
        KvDType::F16 => {
            out.chunks_exact_mut(2).zip(row).for_each(|(o, &x)| o.copy_from_slice(&f16::from_f32(x).to_le_bytes()));
        }
        KvDType::Bf16 => {
            out.chunks_exact_mut(2).zip(row).for_each(|(o, &x)| o.copy_from_slice(&bf16::from_f32(x).to_le_bytes()));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::kv::memory::MemoryPolicy;
    use crate::kv::{KvCache, KvDType, KvGeometry, LayerGeometry, MemoryKv};

    /// Values between -1 and 1, different at every index. Serial sums of 4000 larger values err by 1e-5 themselves.
    fn values(seed: u64, count: usize) -> Vec<f32> {
        let mix = |i: u64| (seed << 32 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0..count as u64).map(|i| ((mix(i) ^ mix(i) >> 29) >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    #[test]
    fn grouped_attention_agrees_with_this_crates_kernels() {
        let mut most = 0.0f32;
        let layer = |window| LayerGeometry { kv_heads: 2, head_dim: 24, window };
        for dtype in [KvDType::F32, KvDType::F16, KvDType::Bf16] {
            for group in [1, 4, 16] {
                let layers = vec![layer(None), layer(Some(1)), layer(Some(50)), layer(Some(2500))];
                let geometry = KvGeometry { layers, query_heads: 6, scale: 0.3, dtype, rope: None };
                let mut own = MemoryKv::new(geometry.clone(), MemoryPolicy::Full);
                let mut grouped = own.clone().with_groups(group).unwrap();
                // 4000 tokens make several parts with each of these groups.
                for (round, tokens) in [1, 2, 4000, 1, 3, 1].into_iter().enumerate() {
                    for layer in 0..4 {
                        let seed = (round * 8 + layer) as u64 * 3;
                        let (k, v) = (values(seed, tokens * 48), values(seed + 1, tokens * 48));
                        let queries = values(seed + 2, 6 * 24);
                        let (mut a, mut b) = ([0.0; 144], [0.0; 144]);
                        for (cache, out) in [(&mut own, &mut a), (&mut grouped, &mut b)] {
                            cache.append(layer, &k, &v, tokens).unwrap();
                            cache.attend(layer, &queries, out).unwrap();
                        }
                        let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                        assert!(worst < 1e-5, "{dtype:?}, groups of {group}, round {round}, layer {layer}: {worst}");
                        most = most.max(worst);
                        assert!(a.iter().any(|x| x.abs() > 1e-3), "the outputs must not be zero");
                    }
                }
                assert_eq!(own.stats(), grouped.stats());
            }
        }
        assert!(most > 0.0, "the two kernels must add in different orders");
        println!("largest difference {most}");
    }

    #[test]
    fn groups_need_an_empty_cache_of_full_attention() {
        let layers = vec![LayerGeometry { kv_heads: 1, head_dim: 2, window: None }];
        let geometry = KvGeometry { layers, query_heads: 1, scale: 1.0, dtype: KvDType::F32, rope: None };
        let new = |policy| MemoryKv::new(geometry.clone(), policy);
        assert!(new(MemoryPolicy::Full).with_groups(0).is_err());
        assert!(new(MemoryPolicy::Full).with_groups(1000).is_err());
        let window = MemoryPolicy::Window { sinks: 4, budget: "1/13".parse().unwrap() };
        assert!(new(window).with_groups(4).unwrap_err().to_string().contains("full attention"));
        let mut held = new(MemoryPolicy::Full);
        held.append(0, &[1.0; 2], &[1.0; 2], 1).unwrap();
        assert!(held.with_groups(4).unwrap_err().to_string().contains("empty"));
        let mut empty = new(MemoryPolicy::Full).with_groups(4).unwrap();
        assert!(empty.attend(0, &[1.0; 2], &mut [0.0; 2]).is_err());
    }
}
