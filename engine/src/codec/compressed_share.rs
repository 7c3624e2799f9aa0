//! The share of a transfer to compress, so that reading takes as long as computing and decoding.
//!
//! [`solve_share`] gives the share for one layer. Source: LeoAM section 4.3, which calls the share theta and the ratio
//! delta.
//! [`solve_layers`] gives the number of layers if a layer is compressed as a whole and reads run one layer ahead.

use crate::layout::is_encoded;

/// A step may take this factor of the shortest time, so that more layers stay exact.
const NEAR: f64 = 1.02;

/// The costs of reading and computing one layer. All bytes count uncompressed keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransferModel {
    /// The latency until the first byte, in seconds.
    pub base_s: f64,
    /// The bytes to read.
    pub bytes: f64,
    /// The bandwidth of the devices, in bytes per second.
    pub bandwidth: f64,
    /// The compressed size divided by the original size, above 0.
    pub ratio: f64,
    /// The computation that overlaps with reads, in seconds.
    pub compute_s: f64,
    /// The output of decoding, in bytes per second.
    pub decode: f64,
}

impl TransferModel {
    /// Returns the seconds until the bytes are read if `share` of them is compressed:
    /// `T0 + (D (1 - share) + D share delta) / B`.
    #[must_use]
    pub fn transfer_s(&self, share: f64) -> f64 {
        self.base_s + self.bytes * (1.0 - share * (1.0 - self.ratio)) / self.bandwidth
    }

    /// Returns the seconds of computing and of decoding that share: `Tc + t(D share)`.
    #[must_use]
    pub fn busy_s(&self, share: f64) -> f64 {
        self.compute_s + self.bytes * share / self.decode
    }

    /// Returns the seconds of the layer: the longer of the two, because they overlap.
    #[must_use]
    pub fn layer_s(&self, share: f64) -> f64 {
        self.transfer_s(share).max(self.busy_s(share))
    }

    /// Returns the seconds of a decode step of `layers` such layers of which `encoded` are compressed.
    ///
    /// The compressed layers are spread evenly, as by `KvLayoutBuilder::codec_share`, and steps follow each other. A
    /// layer is read while the layer before it computes, and not earlier. Bandwidth that is idle meanwhile is lost.
    /// Therefore the step takes at least `layers` times [`TransferModel::layer_s`] of the same share, and usually more.
    #[must_use]
    pub fn step_s(&self, layers: u16, encoded: u16) -> f64 {
        let (mut read, mut began, mut computed, mut first) = (0.0_f64, 0.0_f64, 0.0_f64, 0.0);
        // The second step is measured, because it starts in the steady state.
        for step in 0..2 {
            for layer in 0..layers {
                let share = f64::from(u8::from(is_encoded(layer, layers, encoded)));
                read = read.max(began) + self.transfer_s(share);
                began = read.max(computed);
                computed = began + self.busy_s(share);
            }
            if step == 0 {
                first = computed;
            }
        }
        computed - first
    }
}

/// Returns how many of `layers` to compress: the fewest for which a step takes at most 2 % more than the shortest.
///
/// The time of a step is [`TransferModel::step_s`]. Returns 0 if the bandwidth is unknown. The run time is quadratic in
/// `layers`.
#[must_use]
pub fn solve_layers(model: &TransferModel, layers: u16) -> u16 {
    let seconds = |encoded: u16| Some(model.step_s(layers, encoded)).filter(|seconds| seconds.is_finite());
    let best = (0..=layers).filter_map(seconds).fold(f64::INFINITY, f64::min);
    (0..=layers).find(|encoded| seconds(*encoded).is_some_and(|own| own <= best * NEAR)).unwrap_or(0)
}

/// Returns the share of the transfer to compress, from 0 to 1.
///
/// Reading gets shorter with the share; computing and decoding get longer. The result is the share where both are
/// equal. It is 0 if reading is hidden without compression, or if compression saves nothing, and 1 if reading is never
/// hidden.
#[must_use]
pub fn solve_share(model: &TransferModel) -> f64 {
    if !(model.ratio < 1.0 && model.bandwidth > 0.0 && model.decode > 0.0 && model.bytes > 0.0) {
        return 0.0;
    }
    let excess = model.transfer_s(0.0) - model.compute_s;
    let gain = model.bytes * (1.0 - model.ratio) / model.bandwidth + model.bytes / model.decode;
    let share = excess / gain;
    if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 }
}
