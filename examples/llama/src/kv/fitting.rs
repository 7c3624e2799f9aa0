//! Fits an adapter of one method to the keys and queries that a calibrator has seen.

use anyhow::{Result, bail};
use stratakv::retrieval::{Adapter, AdapterFit, Calibrator, CodeOptions};

use super::error::engine_error;
use super::geometry::LayerGeometry;

/// The most bits of a code that one dimension gets.
const DIMENSION_BITS_MAX: u32 = 4;

/// Fits an adapter with this name. `number` is the method's parameter: bits of a token's code, or the rank ratio. A
/// rank is the joint key dimensions of `layer` divided by the rank ratio.
///
/// # Errors
/// Fails if the number does not suit the layer, if the calibrator has seen too little, or if `fit` is
/// [`AdapterFit::None`].
pub fn fit_adapter(
    calibrator: &Calibrator,
    name: &str,
    (fit, number): (AdapterFit, usize),
    layer: LayerGeometry,
) -> Result<Adapter> {
    let rank = (layer.width() / number.max(1)).max(1);
    let options = CodeOptions { bits: number, dimension_bits_max: DIMENSION_BITS_MAX, decode_only: false };
    let adapter = match fit {
        AdapterFit::None => bail!("{name}: the method needs no adapter"),
        AdapterFit::LowRank => calibrator.low_rank(name, 1, rank),
        AdapterFit::PerHead => calibrator.per_head(name, 1, rank.next_multiple_of(layer.kv_heads)),
        AdapterFit::Codes => calibrator.codes(name, 1, options),
    };
    adapter.map_err(engine_error)
}
