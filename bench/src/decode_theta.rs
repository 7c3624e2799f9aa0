//! How much of a decode step's reads to compress (LeoAM): the codec, measured on one core, and the share it follows.
//!
//! Reads are measured of the store under no codec and under the codec: a layer's latency is in its bandwidth, and what smaller
//! blocks cost (more of each page that nobody asked for, more requests for the bytes) is in the ratio.

use crate::cli::DecodeCodec;
use crate::report::rounded;
use crate::work::{HEAD_DIM, KV_HEADS, ROW, check_interrupt};
use anyhow::Result;
use serde::Serialize;
use std::hint::black_box;
use std::time::{Duration, Instant};
use stratakv::DType;
use stratakv::codec::{Codec, PlaneKind, PlaneShape, TransferModel, decode, encode, solve_layers};

/// How long decoding is measured.
const DECODE_TIME: Duration = Duration::from_millis(200);
/// Bytes of the planes that it takes in turn: more than a core's own caches hold.
const PLANES_BYTES: usize = 32 << 20;

/// A theta and what it was solved from.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Theta {
    pub(crate) theta: f64,
    /// Bytes that a layer brings from the device in a step, uncompressed.
    theta_layer_bytes: u64,
    /// Bytes per second that they come at.
    theta_read_bps: u64,
    /// Seconds of reading a compressed layer, over those of one that is not.
    theta_ratio: f64,
    /// Bytes per second that one core decodes to.
    theta_decode_bps: u64,
}

/// Reads of the layers of a step, which nothing else kept waiting.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Probe {
    /// Bytes of a layer, uncompressed.
    pub(crate) layer_bytes: f64,
    /// Seconds that they take.
    pub(crate) raw_s: f64,
    /// Seconds that they take compressed.
    pub(crate) coded_s: f64,
    /// Bytes per second that one core decodes to.
    pub(crate) decode_bps: f64,
}

impl Probe {
    /// The share of `layers` to compress where each computes that long, attention and decoding included.
    pub(crate) fn solve(&self, layers: u16, compute_us: u64) -> Theta {
        let over = |bytes: f64, seconds: f64| if seconds > 0.0 { bytes / seconds } else { 0.0 };
        let (bandwidth, ratio) = (over(self.layer_bytes, self.raw_s), over(self.coded_s, self.raw_s));
        let compute_s = compute_us as f64 / 1e6;
        let model = TransferModel {
            base_s: 0.0,
            bytes: self.layer_bytes,
            bandwidth,
            ratio,
            compute_s,
            // What computing has no room for.
            decode: self.layer_bytes / (self.layer_bytes / self.decode_bps - compute_s).max(0.0),
        };
        Theta {
            theta: rounded(f64::from(solve_layers(&model, layers)) / f64::from(layers)),
            theta_layer_bytes: self.layer_bytes.round() as u64,
            theta_read_bps: rounded(bandwidth) as u64,
            theta_ratio: rounded(ratio),
            theta_decode_bps: rounded(self.decode_bps) as u64,
        }
    }
}

/// Bytes per second that one core decodes to, in planes of groups of `group` tokens.
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
        // Values below 2, as those of the store.
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
    fn layers_are_compressed_that_would_be_waited_for() {
        let fast = Probe { layer_bytes: 6.6e6, raw_s: 5.82e-3, coded_s: 3.86e-3, decode_bps: 5e9 };
        assert_eq!([0, 2770, 3880, 5820].map(|compute| fast.solve(16, compute).theta), [1.0, 1.0, 1.0, 0.0]);
        let slow = Probe { layer_bytes: 3.3e6, raw_s: 12.5e-3, coded_s: 5.1e-3, decode_bps: 5e9 };
        assert_eq!([8000, 12400, 20_000].map(|compute| slow.solve(16, compute).theta), [1.0, 0.0, 0.0]);
        let same = Probe { coded_s: slow.raw_s, ..slow };
        assert_eq!(same.solve(16, 1000).theta, 0.0, "nothing is saved");
        let nothing = Probe { layer_bytes: 0.0, raw_s: 0.0, coded_s: 0.0, decode_bps: 5e9 };
        assert_eq!(nothing.solve(16, 1000).theta, 0.0);
    }
}
