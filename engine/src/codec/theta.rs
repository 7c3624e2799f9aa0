//! How much of a transfer to compress (LeoAM section 4.3): as much as makes reading as long as computing and decoding.

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
