//! How much of a decode step's reads to compress (LeoAM): the codec, measured on one core, and the share it follows.
//!
//! A layer's latency is in its bandwidth: what its reads bring over the time that they take. Whole pages that devices may read
//! around a small block are not in the ratio.

use crate::cli::DecodeCodec;
use crate::report::rounded;
use crate::work::{HEAD_DIM, KV_HEADS, ROW, check_interrupt, layout_under};
use anyhow::Result;
use serde::Serialize;
use std::hint::black_box;
use std::time::{Duration, Instant};
use stratakv::DType;
use stratakv::codec::{Codec, PlaneKind, PlaneShape, TransferModel, decode, encode, solve_theta};

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
    /// Compressed bytes over bytes.
    theta_ratio: f64,
    /// Bytes per second that one core decodes to.
    theta_decode_bps: u64,
}

/// Reads of the layers of a step, which nothing else kept waiting.
pub(crate) struct Probe {
    pub(crate) layer_bytes: f64,
    pub(crate) layer_s: f64,
}

/// What a codec does to the planes of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planes {
    ratio: f64,
    decode_bps: f64,
}

impl Planes {
    /// For groups of `group` tokens, by one core.
    pub(crate) fn measure(codec: DecodeCodec, group: u16) -> Result<Self> {
        let layout = layout_under(1, group, (codec.into(), 1.0))?;
        let ratio = layout.stored_token_bytes() / layout.token_bytes() as f64;
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
        Ok(Self { ratio, decode_bps: decoded as f64 / start.elapsed().as_secs_f64() })
    }

    /// The share of the layers to compress where each computes that long.
    pub(crate) fn solve(&self, probe: &Probe, compute_us: u64) -> Theta {
        let bandwidth = if probe.layer_s > 0.0 { probe.layer_bytes / probe.layer_s } else { 0.0 };
        let theta = solve_theta(&TransferModel {
            base_s: 0.0,
            bytes: probe.layer_bytes,
            bandwidth,
            ratio: self.ratio,
            compute_s: compute_us as f64 / 1e6,
            decode: self.decode_bps,
        });
        Theta {
            theta: rounded(theta),
            theta_layer_bytes: probe.layer_bytes.round() as u64,
            theta_read_bps: rounded(bandwidth) as u64,
            theta_ratio: rounded(self.ratio),
            theta_decode_bps: rounded(self.decode_bps) as u64,
        }
    }
}
