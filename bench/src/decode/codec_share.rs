//! The share of layers to store under a codec: theta in LeoAM (its symbol for the share of a transfer that is
//! compressed).
//!
//! 1. Measure the reads of a step from the store without a codec and with every layer under it. The bandwidth then
//!    includes a layer's latency. The ratio includes what smaller blocks cost: unneeded bytes of each page, and more
//!    requests.
//! 2. Measure the codec's speed on one core.
//! 3. Solve the engine's transfer model for the fewest layers with which a step is as fast as with the best number.

use crate::decode::args::DecodeCodec;
use crate::support::interrupt::check_interrupt;
use crate::support::model::{HEAD_DIM, KV_HEADS, ROW};
use crate::support::report::rounded;
use anyhow::Result;
use serde::Serialize;
use std::hint::black_box;
use std::time::{Duration, Instant};
use stratakv::DType;
use stratakv::codec::{Codec, PlaneKind, PlaneShape, TransferModel, decode, encode, solve_layers};

/// The time for which decoding is measured.
const DECODE_TIME: Duration = Duration::from_millis(200);
/// Bytes of the planes that are decoded in rotation: more than a core's own caches hold.
const PLANES_BYTES: usize = 32 << 20;

/// A share of layers under the codec, and the values that it was solved from.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SolvedShare {
    pub(crate) share: f64,
    /// Bytes that a step reads from the device for one layer, uncompressed.
    share_layer_bytes: u64,
    /// Bytes per second of these reads.
    share_read_bps: u64,
    /// Time of reading a compressed layer over the time of reading an uncompressed one.
    share_ratio: f64,
    /// Decoded bytes per second of one core.
    share_decode_bps: u64,
}

/// Measured reads of one layer in steps that do not compute.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerReads {
    /// Bytes of a layer's selection, uncompressed.
    pub(crate) layer_bytes: f64,
    /// Seconds of reading them uncompressed.
    pub(crate) raw_s: f64,
    /// Seconds of reading them compressed.
    pub(crate) coded_s: f64,
    /// Decoded bytes per second of one core.
    pub(crate) decode_bps: f64,
}

impl LayerReads {
    /// Solves for the share of `layers` to compress if each computes for `compute_us`, attention and decoding included.
    pub(crate) fn solve(&self, layers: u16, compute_us: u64) -> SolvedShare {
        let over = |bytes: f64, seconds: f64| if seconds > 0.0 { bytes / seconds } else { 0.0 };
        let (bandwidth, ratio) = (over(self.layer_bytes, self.raw_s), over(self.coded_s, self.raw_s));
        let compute_s = compute_us as f64 / 1e6;
        let model = TransferModel {
            base_s: 0.0,
            bytes: self.layer_bytes,
            bandwidth,
            ratio,
            compute_s,
            // Decoding is part of the computing time. Only decoding that exceeds it counts.
            decode: self.layer_bytes / (self.layer_bytes / self.decode_bps - compute_s).max(0.0),
        };
        SolvedShare {
            share: rounded(f64::from(solve_layers(&model, layers)) / f64::from(layers)),
            share_layer_bytes: self.layer_bytes.round() as u64,
            share_read_bps: rounded(bandwidth) as u64,
            share_ratio: rounded(ratio),
            share_decode_bps: rounded(self.decode_bps) as u64,
        }
    }
}

/// Measures the decoded bytes per second of one core, on planes of groups of `group` tokens.
///
/// # Errors
/// The codec fails, or the run was interrupted.
pub(crate) fn decode_bps(codec: DecodeCodec, group: u16) -> Result<f64> {
    let codec = match codec {
        DecodeCodec::Raw => Codec::Raw,
        DecodeCodec::Int8 => Codec::Int8,
        DecodeCodec::Int4 => Codec::Int4,
    };
    let tokens = usize::from(group);
    let mut plane = vec![0; ROW * tokens * size_of::<u16>()];
    let mut random = fastrand::Rng::with_seed(7);
    let mut planes = Vec::new();
    for at in 0..(PLANES_BYTES / plane.len()).max(2) {
        // Values below 2, as in the store.
        plane.as_chunks_mut().0.iter_mut().for_each(|x| *x = (random.u16(..) & 0xbfff).to_le_bytes());
        let kind = if at % 2 == 0 { PlaneKind::Keys } else { PlaneKind::Values };
        let shape = PlaneShape { kind, heads: KV_HEADS, tokens, dims: HEAD_DIM, dtype: DType::F16 };
        let mut stored = Vec::new();
        planes.push((encode(codec, &shape, &plane, &mut stored)?, shape, stored));
    }
    let (start, mut decoded) = (Instant::now(), 0);
    while start.elapsed() < DECODE_TIME {
        check_interrupt()?;
        for (used, shape, stored) in &planes {
            decode(*used, shape, black_box(stored), &mut plane)?;
            black_box(&plane);
            decoded += plane.len();
        }
    }
    Ok(decoded as f64 / start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The disks of docs/performance.md: one without a limit, and one of 250 MB/s.
    #[test]
    fn solved_share_compresses_the_layers_that_a_step_would_wait_for() {
        let fast = LayerReads { layer_bytes: 6.6e6, raw_s: 5.82e-3, coded_s: 3.86e-3, decode_bps: 5e9 };
        assert_eq!([0, 2770, 3880, 5820].map(|compute| fast.solve(16, compute).share), [1.0, 1.0, 1.0, 0.0]);
        let slow = LayerReads { layer_bytes: 3.3e6, raw_s: 12.5e-3, coded_s: 5.1e-3, decode_bps: 5e9 };
        assert_eq!([8000, 12400, 20_000].map(|compute| slow.solve(16, compute).share), [1.0, 0.0, 0.0]);
        let same = LayerReads { coded_s: slow.raw_s, ..slow };
        assert_eq!(same.solve(16, 1000).share, 0.0, "compression saves no time");
        let nothing = LayerReads { layer_bytes: 0.0, raw_s: 0.0, coded_s: 0.0, decode_bps: 5e9 };
        assert_eq!(nothing.solve(16, 1000).share, 0.0);
    }
}
