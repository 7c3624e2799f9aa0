//! How much of a transfer to compress (LeoAM section 4.3): as much as makes reading as long as computing and decoding; and how
//! many layers, where a layer is compressed as a whole and reads go one layer ahead.

use crate::layout::is_encoded;

/// How much longer than the shortest a step may be for the sake of layers that stay exact.
const NEAR: f64 = 1.02;

/// What reading and computing of one layer take. Bytes are bytes of keys and values as they are in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransferModel {
    /// Seconds before the first byte comes.
    pub base_s: f64,
    /// Bytes to bring.
    pub bytes: f64,
    /// Bytes per second of the devices.
    pub bandwidth: f64,
    /// Compressed size over size, above 0.
    pub ratio: f64,
    /// Seconds of computing that reads can hide behind.
    pub compute_s: f64,
    /// Bytes per second that decoding gives.
    pub decode: f64,
}

impl TransferModel {
    /// Seconds until the bytes are there, when a share `theta` of them is compressed:
    /// `T0 + (D (1 - theta) + D theta delta) / B`.
    #[must_use]
    pub fn transfer_s(&self, theta: f64) -> f64 {
        self.base_s + self.bytes * (1.0 - theta * (1.0 - self.ratio)) / self.bandwidth
    }

    /// Seconds of computing and of decoding that share: `Tc + t(D theta)`.
    #[must_use]
    pub fn busy_s(&self, theta: f64) -> f64 {
        self.compute_s + self.bytes * theta / self.decode
    }

    /// Seconds of the layer: the longer of the two, which overlap.
    #[must_use]
    pub fn layer_s(&self, theta: f64) -> f64 {
        self.transfer_s(theta).max(self.busy_s(theta))
    }

    /// Seconds of a decode step of `layers` such layers of which `encoded` are compressed, spread evenly as by
    /// `KvLayoutBuilder::codec_share`, in steps that follow each other. A layer is read while the one before it computes, not
    /// earlier, and computed when it is there. What the devices do not give while a compressed layer computes they cannot give
    /// later: the step takes no less than `layers` times [`TransferModel::layer_s`] of the same share, mostly more.
    #[must_use]
    pub fn step_s(&self, layers: u16, encoded: u16) -> f64 {
        let (mut read, mut began, mut computed, mut first) = (0.0_f64, 0.0_f64, 0.0_f64, 0.0);
        // The second step begins with what the first one leaves.
        for step in 0..2 {
            for layer in 0..layers {
                let theta = f64::from(u8::from(is_encoded(layer, layers, encoded)));
                read = read.max(began) + self.transfer_s(theta);
                began = read.max(computed);
                computed = began + self.busy_s(theta);
            }
            if step == 0 {
                first = computed;
            }
        }
        computed - first
    }
}

/// How many of `layers` to compress, each as a whole: the fewest with which a step takes at most 2 % more than with the number that is
/// best ([`TransferModel::step_s`]); 0 where nothing is known of the bandwidth. Takes time by the square of the layers.
#[must_use]
pub fn solve_layers(model: &TransferModel, layers: u16) -> u16 {
    let seconds = |encoded: u16| Some(model.step_s(layers, encoded)).filter(|seconds| seconds.is_finite());
    let best = (0..=layers).filter_map(seconds).fold(f64::INFINITY, f64::min);
    (0..=layers).find(|encoded| seconds(*encoded).is_some_and(|own| own <= best * NEAR)).unwrap_or(0)
}

/// The share of the transfer to compress, from 0 to 1: where reading, which falls with it, meets computing and decoding, which
/// rise with it; 0 where reading hides without, 1 where it never does, 0 where compression saves nothing.
#[must_use]
pub fn solve_theta(model: &TransferModel) -> f64 {
    if !(model.ratio < 1.0 && model.bandwidth > 0.0 && model.decode > 0.0 && model.bytes > 0.0) {
        return 0.0;
    }
    let excess = model.transfer_s(0.0) - model.compute_s;
    let gain = model.bytes * (1.0 - model.ratio) / model.bandwidth + model.bytes / model.decode;
    let theta = excess / gain;
    if theta.is_finite() { theta.clamp(0.0, 1.0) } else { 0.0 }
}
