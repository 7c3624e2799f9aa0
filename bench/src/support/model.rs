//! The geometry of LLaMA-3-8B, and random keys and values in its shape.

use crate::support::interrupt::check_interrupt;
use anyhow::Result;
use half::f16;
use stratakv::layout::PlaneCodec;
use stratakv::{KvLayout, Sequence, TensorView};

/// KV heads of LLaMA-3-8B.
pub(crate) const KV_HEADS: usize = 8;
/// Query heads of LLaMA-3-8B.
pub(crate) const QUERY_HEADS: usize = 32;
/// Elements of one head's key, and of its value.
pub(crate) const HEAD_DIM: usize = 128;
/// Elements of one token's keys in one layer, over all KV heads. Values have as many.
pub(crate) const ROW: usize = KV_HEADS * HEAD_DIM;
/// Bytes of one token's keys and values in one layer, in f16: 4 KiB.
pub(crate) const TOKEN_LAYER_BYTES: u64 = (2 * ROW * 2) as u64;

/// Returns a layout of LLaMA-3-8B's geometry with `layers` layers and groups of `group` tokens.
pub(crate) fn layout(layers: u16, group: u16) -> Result<KvLayout> {
    layout_with_codec(layers, group, PlaneCodec::Raw, 1.0)
}

/// Returns the same layout with a share of the layers under `codec`.
pub(crate) fn layout_with_codec(layers: u16, group: u16, codec: PlaneCodec, share: f64) -> Result<KvLayout> {
    let builder = KvLayout::builder().layers(layers).kv_heads(KV_HEADS as u16).head_dim(HEAD_DIM as u16);
    Ok(builder.group_tokens(group).codec(codec).codec_share(share).fingerprint([0x5b; 32]).build()?)
}

/// Returns a random query `[query_heads, head_dim]` with elements from -0.5 to 0.5.
pub(crate) fn random_query(random: &mut fastrand::Rng) -> Vec<f32> {
    (0..QUERY_HEADS * HEAD_DIM).map(|_| random.f32() - 0.5).collect()
}

/// A source of random finite keys and values in f16. Every call takes another stretch of one buffer.
pub(crate) struct KvSource {
    elements: Vec<f16>,
    chunk: usize,
    random: fastrand::Rng,
}

impl KvSource {
    /// Returns a source that gives up to `chunk` tokens of one layer at once.
    pub(crate) fn new(chunk: usize) -> Self {
        let mut random = fastrand::Rng::with_seed(7);
        // The highest bit of the exponent is never set, so that every value is finite and below 2.
        let elements = (0..(chunk + 64) * ROW).map(|_| f16::from_bits(random.u16(..) & 0xbfff)).collect();
        Self { elements, chunk, random }
    }

    /// Returns keys and values of `tokens` tokens, each `[tokens, kv_heads, head_dim]`.
    pub(crate) fn pair(&mut self, tokens: usize) -> (TensorView<'_>, TensorView<'_>) {
        let last = self.elements.len() - tokens * ROW;
        let (k, v) = (self.random.usize(..=last), self.random.usize(..=last));
        let view =
            |start| TensorView::token_major(&self.elements[start..start + tokens * ROW], tokens, KV_HEADS, HEAD_DIM);
        (view(k), view(v))
    }

    /// Appends `tokens` tokens chunk by chunk, each chunk to all layers, as a prefill does.
    ///
    /// # Errors
    /// The engine refuses an append, or the run was interrupted.
    pub(crate) fn append(&mut self, sequence: &mut Sequence, tokens: usize) -> Result<()> {
        let layers = sequence.layout().layers();
        for start in (0..tokens).step_by(self.chunk) {
            self.append_step(sequence, layers, self.chunk.min(tokens - start))?;
        }
        Ok(())
    }

    /// Appends `tokens` tokens, at most one chunk, to each of the first `layers` layers.
    ///
    /// # Errors
    /// As [`KvSource::append`].
    pub(crate) fn append_step(&mut self, sequence: &mut Sequence, layers: usize, tokens: usize) -> Result<()> {
        for layer in 0..layers {
            check_interrupt()?;
            let (keys, values) = self.pair(tokens);
            sequence.append(layer, keys, values)?;
        }
        Ok(())
    }

    /// Appends `tokens` tokens layer by layer, each layer whole before the next one.
    ///
    /// # Errors
    /// As [`KvSource::append`].
    pub(crate) fn append_by_layer(&mut self, sequence: &mut Sequence, tokens: usize) -> Result<()> {
        for layer in 0..sequence.layout().layers() {
            for start in (0..tokens).step_by(self.chunk) {
                check_interrupt()?;
                let (keys, values) = self.pair(self.chunk.min(tokens - start));
                sequence.append(layer, keys, values)?;
            }
        }
        Ok(())
    }
}
