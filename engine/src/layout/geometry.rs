//! The shapes of a model's keys and values per layer, and the block geometry that follows from them.
//!
//! [`KvLayoutBuilder`] collects the settings. [`KvLayoutBuilder::build`] makes a layout of them:
//! 1. Apply RoPE and codecs to the layers. A codec that would not save 5 % is dropped.
//! 2. Check every limit.
//! 3. Compute the geometry of stored and of decoded blocks, once.
//!
//! Invariant: sequences are compatible exactly if their layouts are equal.

use crate::error::{Error, ErrorKind, Result};
use std::sync::Arc;
use stratakv_format::layout::{BlockGeometry, GROUP_TOKENS_MAX, LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::page::round_up_to_page;
use stratakv_format::rope::Rope;
use stratakv_format::{DType, PlaneCodec};

/// The bytes of blocks in one part of a selection.
const PART_BYTES: usize = 256 << 10;
/// The maximum bytes of a part's buffer if every block of it is on pages of its own.
const BUFFER_BYTES_MAX: usize = 1 << 20;

/// The geometry of one layer, for models whose layers differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    geometry: LayerGeometry,
}

impl LayerSpec {
    /// Describes a layer that attends to every earlier token, with `kv_heads` KV heads of `head_dim` for keys and
    /// values.
    #[must_use]
    pub const fn full(kv_heads: u16, head_dim: u16) -> Self {
        let geometry = LayerGeometry {
            kv_heads,
            key_dim: head_dim,
            value_dim: head_dim,
            window: None,
            rope: None,
            codecs: RAW_PLANES,
        };
        Self { geometry }
    }

    /// Describes a layer that attends to the newest `window` tokens.
    #[must_use]
    pub const fn sliding(kv_heads: u16, head_dim: u16, window: u32) -> Self {
        let geometry = LayerGeometry {
            kv_heads,
            key_dim: head_dim,
            value_dim: head_dim,
            window: Some(window),
            rope: None,
            codecs: RAW_PLANES,
        };
        Self { geometry }
    }

    /// Describes a layer without keys and values.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            geometry: LayerGeometry {
                kv_heads: 0,
                key_dim: 0,
                value_dim: 0,
                window: None,
                rope: None,
                codecs: RAW_PLANES,
            },
        }
    }

    /// Sets another head dim for values. It is 0 if values are a prefix of the keys (MLA).
    #[must_use]
    pub const fn value_dim(mut self, value_dim: u16) -> Self {
        self.geometry.value_dim = value_dim;
        self
    }

    /// Sets the codecs of the K and V planes of the layer's groups. They override [`KvLayoutBuilder::codec`].
    ///
    /// A plane that its codec would not shrink by 5 % stays raw.
    #[must_use]
    pub const fn codecs(mut self, keys: PlaneCodec, values: PlaneCodec) -> Self {
        self.geometry.codecs = [keys, values];
        self
    }

    /// States how the layer's keys were rotated before they are appended.
    #[must_use]
    pub const fn rope(mut self, rope: Rope) -> Self {
        self.geometry.rope = Some(rope);
        self
    }
}

/// Builds a [`KvLayout`].
#[derive(Clone, Debug)]
pub struct KvLayoutBuilder {
    layers: u16,
    kv_heads: u16,
    head_dim: u16,
    value_dim: Option<u16>,
    specs: Option<Vec<LayerSpec>>,
    rope: Option<Rope>,
    codec: PlaneCodec,
    codec_share: f64,
    dtype: DType,
    group_tokens: u16,
    separate_planes: bool,
    fingerprint: [u8; 32],
}

impl KvLayoutBuilder {
    /// Sets the number of layers, which are all equal.
    #[must_use]
    pub fn layers(mut self, layers: u16) -> Self {
        self.layers = layers;
        self
    }

    /// Sets the KV heads of every layer.
    #[must_use]
    pub fn kv_heads(mut self, kv_heads: u16) -> Self {
        self.kv_heads = kv_heads;
        self
    }

    /// Sets the head dim of keys, and of values unless [`Self::value_dim`] sets another.
    #[must_use]
    pub fn head_dim(mut self, head_dim: u16) -> Self {
        self.head_dim = head_dim;
        self
    }

    /// Sets the head dim of values. It is 0 if values are a prefix of the keys (MLA).
    #[must_use]
    pub fn value_dim(mut self, value_dim: u16) -> Self {
        self.value_dim = Some(value_dim);
        self
    }

    /// States how keys were rotated before they are appended, for every layer without [its own](LayerSpec::rope).
    ///
    /// Keys can then be kept [at a low rank](crate::Sequence::reconstruct_keys). The rotation is part of the layout, so
    /// sequences with and without it are not compatible.
    #[must_use]
    pub fn rope(mut self, rope: Rope) -> Self {
        self.rope = Some(rope);
        self
    }

    /// Sets the codec of groups, for every layer without [its own](LayerSpec::codecs). The default is
    /// [`PlaneCodec::Raw`].
    ///
    /// The quantised codecs change each element by at most [`error_bound`](crate::codec::error_bound). The steps divide
    /// the range of a channel over the group for keys, and of 32 channels of a token for values. Reads, cache and
    /// writes shrink accordingly. Attention, [`SelectionBlocks::group`](crate::read::SelectionBlocks::group), summaries
    /// and exports see the rounded numbers. The newest tokens, which do not fill a group yet, stay exact.
    ///
    /// A plane that would not shrink by 5 % stays raw. For f16 with int8 these are keys in groups of at most 4 tokens.
    /// The codec is part of the layout, so sequences with different codecs are not compatible.
    #[must_use]
    pub fn codec(mut self, codec: PlaneCodec) -> Self {
        self.codec = codec;
        self
    }

    /// Sets the share of the layers with keys and values that use [`Self::codec`], from 0 to 1. The default is 1.
    ///
    /// The layers are spread evenly. The share is rounded to the nearest number of layers, and half a layer is rounded
    /// up.
    /// [`solve_layers`](crate::codec::solve_layers) computes a suitable number.
    #[must_use]
    pub fn codec_share(mut self, share: f64) -> Self {
        self.codec_share = share;
        self
    }

    /// Sets each layer separately, instead of `layers`, `kv_heads` and `head_dim`.
    #[must_use]
    pub fn layer_specs(mut self, specs: impl IntoIterator<Item = LayerSpec>) -> Self {
        self.specs = Some(specs.into_iter().collect());
        self
    }

    /// Sets the element type on disk. The default is f16.
    #[must_use]
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Sets the tokens of a group, which is the unit of reading. The default is 8.
    #[must_use]
    pub fn group_tokens(mut self, tokens: u16) -> Self {
        self.group_tokens = tokens;
        self
    }

    /// Starts the values of each group on a page of their own. The default is off.
    ///
    /// Reading [only values](crate::PlaneSet) then never reads keys, on any device. Without it blocks are smaller, and
    /// a device that reads 512 bytes at a time reads values alone in most geometries too.
    #[must_use]
    pub fn separate_planes(mut self, separate: bool) -> Self {
        self.separate_planes = separate;
        self
    }

    /// Sets the fingerprint of model, weights and positional encoding. Layouts with different fingerprints are
    /// incompatible.
    #[must_use]
    pub fn fingerprint(mut self, fingerprint: [u8; 32]) -> Self {
        self.fingerprint = fingerprint;
        self
    }

    /// Builds the layout.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a value is out of range. The error names it.
    pub fn build(self) -> Result<KvLayout> {
        let mut layers: Vec<_> = match self.specs {
            Some(specs) => specs.iter().map(|s| s.geometry).collect(),
            None => {
                let geometry = LayerGeometry {
                    kv_heads: self.kv_heads,
                    key_dim: self.head_dim,
                    value_dim: self.value_dim.unwrap_or(self.head_dim),
                    window: None,
                    rope: None,
                    codecs: RAW_PLANES,
                };
                vec![geometry; usize::from(self.layers)]
            }
        };
        for layer in layers.iter_mut().filter(|layer| layer.has_kv()) {
            layer.rope = layer.rope.or(self.rope);
        }
        if !(0.0..=1.0).contains(&self.codec_share) {
            let text = format!("layout: codec_share is {} but must be from 0 to 1", self.codec_share);
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        // Too many layers are refused below, so saturating is enough here.
        let count = u16::try_from(layers.iter().filter(|layer| layer.has_kv()).count()).unwrap_or(u16::MAX);
        let encoded = (f64::from(count) * self.codec_share).round() as u16;
        for (at, layer) in (0..count).zip(layers.iter_mut().filter(|layer| layer.has_kv())) {
            if !layer.is_encoded() && is_encoded(at, count, encoded) {
                layer.codecs = [self.codec; 2];
            }
        }
        let mut layout = Layout {
            dtype: self.dtype,
            group_tokens: self.group_tokens,
            padded_planes: self.separate_planes,
            fingerprint: self.fingerprint,
            layers,
        };
        for at in 0..layout.layers.len() {
            for plane in 0..2 {
                let shape = layout.plane_shape(&layout.layers[at], plane);
                let codec = &mut layout.layers[at].codecs[plane];
                if !codec.suits(&shape) {
                    *codec = PlaneCodec::Raw;
                }
            }
        }
        KvLayout::new(layout).map_err(|e| e.during("layout"))
    }
}

/// The meaning of a sequence's bytes. Sequences are compatible if their layouts are equal. Clones are cheap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    inner: Arc<LayoutGeometry>,
}

/// A layout with the geometry of its blocks.
#[derive(Debug, PartialEq, Eq)]
struct LayoutGeometry {
    layout: Layout,
    /// The geometry of stored blocks, by layer.
    blocks: Vec<BlockGeometry>,
    /// The geometry of blocks without codecs, by layer.
    plain: Vec<BlockGeometry>,
}

impl KvLayout {
    /// Returns a builder with f16 elements and groups of 8 tokens.
    #[must_use]
    pub fn builder() -> KvLayoutBuilder {
        KvLayoutBuilder {
            layers: 0,
            kv_heads: 0,
            head_dim: 0,
            value_dim: None,
            specs: None,
            rope: None,
            codec: PlaneCodec::Raw,
            codec_share: 1.0,
            dtype: DType::F16,
            group_tokens: 8,
            separate_planes: false,
            fingerprint: [0; 32],
        }
    }

    pub(crate) fn new(layout: Layout) -> Result<Self> {
        layout.check().map_err(|e| Error::new(ErrorKind::InvalidArgument, e.to_string()))?;
        let blocks = layout.layers.iter().map(|layer| layout.block(layer)).collect();
        let plain = layout.layers.iter().map(|layer| layout.plain_block(layer)).collect();
        Ok(Self { inner: Arc::new(LayoutGeometry { layout, blocks, plain }) })
    }

    pub(crate) fn raw(&self) -> &Layout {
        &self.inner.layout
    }

    /// Names the first property in which another layout differs.
    pub(crate) fn difference(&self, other: &Layout) -> &'static str {
        let own = self.raw();
        let mut recoded = other.clone();
        recoded.layers.iter_mut().zip(&own.layers).for_each(|(layer, own)| layer.codecs = own.codecs);
        match () {
            () if own.fingerprint != other.fingerprint => "fingerprint",
            () if *own == recoded => "codec",
            () => "geometry",
        }
    }

    /// Returns the geometry of decoded blocks of `layer`, which must exist.
    pub(crate) fn plain_block(&self, layer: usize) -> &BlockGeometry {
        &self.inner.plain[layer]
    }

    /// Returns the geometry of stored blocks of `layer`, which must exist.
    pub(crate) fn block(&self, layer: usize) -> &BlockGeometry {
        &self.inner.blocks[layer]
    }

    /// Returns the geometry of `layer`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the layer does not exist or has no keys and values.
    pub(crate) fn kv_layer(&self, layer: usize) -> Result<&LayerGeometry> {
        match self.inner.layout.layers.get(layer) {
            Some(geometry) if geometry.has_kv() => Ok(geometry),
            Some(_) => Err(Error::new(ErrorKind::InvalidArgument, format!("layer {layer} has no keys and values"))),
            None => {
                let layers = self.layers();
                Err(Error::new(ErrorKind::InvalidArgument, format!("layer {layer} of a layout with {layers} layers")))
            }
        }
    }

    /// Returns the number of layers, those without KV included.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.inner.layout.layers.len()
    }

    /// Returns the tokens of a group.
    #[must_use]
    pub fn group_tokens(&self) -> usize {
        usize::from(self.inner.layout.group_tokens)
    }

    /// Returns the element type on disk.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.inner.layout.dtype
    }

    /// Returns the codecs of the K and V planes of a layer's groups.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the layer does not exist or has no keys and values.
    pub fn codecs(&self, layer: usize) -> Result<[PlaneCodec; 2]> {
        Ok(self.kv_layer(layer)?.codecs)
    }

    /// Returns the bytes of one token's keys and values over all layers, as stored in groups on disk.
    ///
    /// With a codec this is less than [`Self::token_bytes`].
    #[must_use]
    pub fn stored_token_bytes(&self) -> f64 {
        let blocks = self.inner.blocks.iter().map(|block| block.key_bytes + block.value_bytes).sum::<usize>();
        blocks as f64 / self.group_tokens() as f64
    }

    /// Returns the bytes of one token's keys and values over all layers, in memory.
    #[must_use]
    pub fn token_bytes(&self) -> usize {
        let layers = self.inner.layout.layers.iter();
        layers.map(|l| (l.key_elements() + l.value_elements()) * self.dtype().bytes()).sum()
    }

    /// Returns the bytes read for one group of `layer` selected alone, divided by the bytes of its stored planes.
    ///
    /// The value is for a device that reads whole pages. It is 1.0 if blocks are whole pages. Devices that read 512
    /// bytes at a time read less of small blocks.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the layer does not exist or has no keys and values.
    pub fn read_amplification(&self, layer: usize) -> Result<f64> {
        self.kv_layer(layer)?;
        let block = self.block(layer);
        Ok(round_up_to_page(block.block_bytes) as f64 / (block.key_bytes + block.value_bytes) as f64)
    }

    /// Returns how many groups of `layer` form one part of a selection.
    ///
    /// Attention computes one [`Partial`](crate::attention::Partial) per part, in rising order of groups, merges them
    /// in that order, and adds the tail last. A caller that does the same with [`attention`](crate::attention) gets the
    /// same bits. The number depends on the layer's geometry alone, and may change between versions of the engine.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the layer does not exist or has no keys and values.
    pub fn part_groups(&self, layer: usize) -> Result<usize> {
        self.kv_layer(layer)?;
        Ok(part_groups(self.block(layer)))
    }
}

/// Returns [`KvLayout::part_groups`] for a block geometry.
pub(crate) fn part_groups(block: &BlockGeometry) -> usize {
    let bytes = block.block_bytes.max(1);
    (PART_BYTES / bytes).min(BUFFER_BYTES_MAX / round_up_to_page(bytes)).max(1)
}

const _: () = assert!(GROUP_TOKENS_MAX <= 128, "token masks have 128 bits");

/// Returns whether a layer is one of `encoded` layers spread evenly over `layers`.
pub(crate) fn is_encoded(layer: u16, layers: u16, encoded: u16) -> bool {
    let before = |layer: u64| (layer * u64::from(encoded)).checked_div(u64::from(layers));
    before(u64::from(layer) + 1) > before(u64::from(layer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_3_8b_blocks_are_whole_pages() {
        let layout = KvLayout::builder().layers(32).kv_heads(8).head_dim(128).build().unwrap();
        assert_eq!(layout.token_bytes(), 32 * 4096);
        assert_eq!(layout.block(0).block_bytes, 32 << 10);
        assert!((layout.read_amplification(0).unwrap() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn amplification_of_small_blocks_is_visible() {
        let layout = KvLayout::builder().layers(4).kv_heads(2).head_dim(64).group_tokens(4).build().unwrap();
        assert!((layout.read_amplification(3).unwrap() - 2.0).abs() < 1e-9);
    }

    #[test]
    fn parts_are_bounded_in_blocks_and_in_scattered_pages() {
        let parts = |heads, dim, group| {
            let layout = KvLayout::builder().layers(1).kv_heads(heads).head_dim(dim).group_tokens(group).build();
            layout.unwrap().part_groups(0).unwrap()
        };
        assert_eq!(parts(8, 128, 8), 8);
        assert_eq!(parts(2, 64, 4), 128);
        assert_eq!(parts(1, 8, 1), 256, "a page each");
        assert_eq!(parts(8, 128, 128), 1, "blocks larger than a part");
        let layout = KvLayout::builder().layer_specs([LayerSpec::none(), LayerSpec::full(1, 8)]).build().unwrap();
        for layer in [0, 2] {
            assert_eq!(layout.part_groups(layer).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
    }

    #[test]
    fn a_share_of_layers_is_the_nearest_whole_number_of_them() {
        let encoded = |layers: u16, share: f64| -> Vec<usize> {
            let builder = KvLayout::builder().layers(layers).kv_heads(8).head_dim(128).codec(PlaneCodec::Int4);
            let layout = builder.codec_share(share).build().unwrap();
            (0..usize::from(layers)).filter(|at| layout.codecs(*at).unwrap() == [PlaneCodec::Int4; 2]).collect()
        };
        assert_eq!(encoded(4, 0.5), [1, 3]);
        assert_eq!(encoded(3, 0.5), [1, 2], "half a layer is one more");
        for (layers, share, expected) in [(16, 0.57, 9), (16, 0.6, 10), (16, 0.03, 0), (16, 0.97, 16), (100, 0.29, 29)]
        {
            assert_eq!(encoded(layers, share).len(), expected, "{share} of {layers}");
        }
        for layers in 1..=128 {
            for share in 0..=layers {
                let found = encoded(layers, f64::from(share) / f64::from(layers)).len();
                assert_eq!(found, usize::from(share), "of {layers}");
            }
        }
        let specs = [LayerSpec::none(), LayerSpec::full(8, 128), LayerSpec::none(), LayerSpec::full(8, 128)];
        let builder = KvLayout::builder().layer_specs(specs).codec(PlaneCodec::Int8).codec_share(0.7);
        let layout = builder.build().unwrap();
        assert_eq!([1, 3].map(|at| layout.codecs(at).unwrap()[0]), [PlaneCodec::Raw, PlaneCodec::Int8]);
        assert!(
            KvLayout::builder().layer_specs([LayerSpec::none()]).codec_share(0.5).build().is_err(),
            "no layer at all"
        );
    }

    #[test]
    fn layers_may_differ() {
        let specs = [LayerSpec::full(8, 128), LayerSpec::sliding(4, 64, 1024), LayerSpec::none()];
        let layout = KvLayout::builder().layer_specs(specs).build().unwrap();
        assert_eq!(layout.layers(), 3);
        assert_eq!(layout.kv_layer(2).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(layout.kv_layer(3).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(layout.kv_layer(1).unwrap().window, Some(1024));
    }

    #[test]
    fn values_out_of_range_are_named() {
        let error = |b: KvLayoutBuilder| b.build().unwrap_err().to_string();
        let base = KvLayout::builder().layers(2).kv_heads(2).head_dim(64);
        assert!(error(base.clone().layers(0)).contains("layers"));
        assert!(error(base.clone().group_tokens(0)).contains("group tokens"));
        assert!(error(base.clone().group_tokens(129)).contains("group tokens"));
        assert!(error(base.clone().kv_heads(129)).contains("KV heads"));
        assert!(error(base.clone().head_dim(2000)).contains("key dim"));
        assert!(error(base.kv_heads(128).head_dim(1024).group_tokens(128)).contains("block bytes"));
    }
}
