//! The share to compress, by the clock: the solver's share of a transfer to compress, against a sweep over all shares.
//!
//! A point of the sweep runs layer after layer. The reads of the next layer run while the current one decodes and
//! computes. Decoding is real. The clock emulates the reads, at the given bandwidth, and the computation.

use crate::codec::args::CodecArgs;
use crate::codec::coding::{StoredPlane, encode_all, rate};
use crate::codec::planes::{ModelTensor, group_planes};
use crate::support::interrupt::check_interrupt;
use crate::support::measure::sleep_until;
use crate::support::report::{median, ratio, rounded};
use anyhow::{Result, bail};
use serde::Serialize;
use std::hint::black_box;
use std::time::{Duration, Instant};
use stratakv::DType;
use stratakv::codec::{Codec, PlaneKind, PlaneShape, TransferModel, decode, solve_share};

/// The codec that is measured.
const CODEC: Codec = Codec::Int4;

/// The share for one bandwidth: the solver's, and the best of a sweep by the clock.
#[derive(Debug, Serialize)]
pub(super) struct ShareResult {
    codec: Codec,
    bandwidth: f64,
    compute_us: u64,
    layer_bytes: usize,
    ratio: f64,
    decode_gb_per_s: f64,
    #[serde(flatten)]
    times: ShareTimes,
}

/// Layer times of the solver's share and of the best one.
#[derive(Debug, Serialize)]
struct ShareTimes {
    share: f64,
    share_ms: f64,
    best_share: f64,
    best_ms: f64,
    /// The time of the solver's share over the best time.
    ratio_best: Option<f64>,
    /// The time without compression over the time of the solver's share.
    gain_over_none: Option<f64>,
    /// The time with everything compressed over the time of the solver's share.
    gain_over_all: Option<f64>,
}

/// Solves for the share at `bandwidth` bytes per second, and measures it beside the sweep.
///
/// # Errors
/// The tensors have no whole group of values, decoding fails, or the run was interrupted.
pub(super) fn measure(args: &CodecArgs, tensors: &[ModelTensor], bandwidth: f64) -> Result<ShareResult> {
    let group = usize::from(args.group[0]);
    let Some(planes) = group_planes(tensors, PlaneKind::Values, group, DType::F16) else {
        bail!("--kv {}: the file has no values of {group} tokens", args.kv.display());
    };
    let stored = encode_all(CODEC, &planes)?;
    let bytes: usize = planes.bytes.iter().map(Vec::len).sum();
    let stored_bytes: usize = stored.iter().map(|(_, bytes)| bytes.len()).sum();
    let compression = stored_bytes as f64 / bytes as f64;
    let decoded = vec![0; planes.bytes[0].len()];
    let layer_bytes = args.layer_bytes.0 as usize;
    let mut decoder = LayerDecoder { stored: &stored, shape: planes.shape, layer_bytes, decoded };
    let decode_rate = rate(args.seconds, layer_bytes, || decoder.decode(1.0))?;
    let compute = Duration::from_micros(args.compute_us);
    let model = TransferModel {
        base_s: 0.0,
        bytes: layer_bytes as f64,
        bandwidth,
        ratio: compression,
        compute_s: compute.as_secs_f64(),
        decode: decode_rate,
    };
    let times = sweep(args, &model, compute, &mut decoder)?;
    Ok(ShareResult {
        codec: CODEC,
        bandwidth,
        compute_us: args.compute_us,
        layer_bytes,
        ratio: rounded(compression),
        decode_gb_per_s: rounded(decode_rate / 1e9),
        times,
    })
}

/// Decodes as many planes as a layer reads.
struct LayerDecoder<'a> {
    stored: &'a [StoredPlane],
    shape: PlaneShape,
    /// Bytes of the decoded planes of a layer.
    layer_bytes: usize,
    /// The buffer that planes are decoded into, one after another.
    decoded: Vec<u8>,
}

impl LayerDecoder<'_> {
    /// Decodes a share of a layer's bytes, rounded to whole planes.
    fn decode(&mut self, share: f64) -> Result<()> {
        let mut left = self.layer_bytes as f64 * share;
        for (used, stored) in self.stored.iter().cycle() {
            if left < self.decoded.len() as f64 / 2.0 {
                return Ok(());
            }
            decode(*used, &self.shape, black_box(stored), &mut self.decoded)?;
            black_box(&*self.decoded);
            left -= self.decoded.len() as f64;
        }
        Ok(())
    }
}

/// Measures the solver's share and eleven others in rotation, so that noise of the machine affects all of them.
fn sweep(
    args: &CodecArgs,
    model: &TransferModel,
    compute: Duration,
    decoder: &mut LayerDecoder<'_>,
) -> Result<ShareTimes> {
    let solved = solve_share(model);
    let mut points = vec![(solved, Vec::new())];
    points.extend((0..=10).map(|step| (f64::from(step) / 10.0, Vec::new())));
    for _ in 0..args.common.rounds {
        for (share, times) in &mut points {
            let transfer = Duration::from_secs_f64(model.transfer_s(*share));
            let mut arrives = Instant::now() + transfer;
            for layer in 0..args.layers {
                check_interrupt()?;
                let start = Instant::now();
                sleep_until(arrives);
                arrives = Instant::now() + transfer;
                decoder.decode(*share)?;
                sleep_until(Instant::now() + compute);
                if layer > 0 {
                    times.push(start.elapsed().as_secs_f64() * 1e3);
                }
            }
        }
    }
    let share_ms = median(&points[0].1);
    let sweep: Vec<(f64, f64)> = points[1..].iter().map(|(share, times)| (*share, median(times))).collect();
    let best = sweep.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0.0, 0.0));
    Ok(ShareTimes {
        share: rounded(solved),
        share_ms: rounded(share_ms),
        best_share: best.0,
        best_ms: rounded(best.1),
        ratio_best: ratio(share_ms, best.1),
        gain_over_none: ratio(sweep[0].1, share_ms),
        gain_over_all: ratio(sweep[10].1, share_ms),
    })
}
