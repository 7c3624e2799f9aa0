//! `kvbench codec`: ratios, speeds and errors of the codecs on keys and values of a real model, and the share of a transfer
//! to compress, solved and swept.

use crate::cli::CodecArgs;
use crate::report::{median, print, ratio, rounded};
use crate::work::check_interrupt;
use anyhow::{Context, Result, bail};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde::Serialize;
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};
use stratakv::DType;
use stratakv::codec::{Codec, PlaneKind, PlaneShape, TransferModel, decode, encode, solve_theta};

/// One codec on one kind of plane and dtype. Speeds count bytes of the plane as it is, on one core.
#[derive(Debug, Serialize)]
struct CodecResult {
    codec: Codec,
    plane: &'static str,
    dtype: &'static str,
    group: usize,
    planes: usize,
    /// Stored bytes over plane bytes, planes kept raw included.
    stored_share: f64,
    /// Planes that were kept raw.
    raw_share: f64,
    encode_gb_per_s: f64,
    decode_gb_per_s: f64,
    /// Root of the mean squared error over that of the elements; 0 for lossless codecs.
    relative_error: f64,
    /// The largest error, over the largest element.
    largest_error: f64,
}

/// Theta for one bandwidth: the solver's, and the best of a sweep by the clock.
#[derive(Debug, Serialize)]
struct ThetaResult {
    codec: Codec,
    bandwidth: f64,
    compute_us: u64,
    layer_bytes: usize,
    ratio: f64,
    decode_gb_per_s: f64,
    theta: f64,
    theta_ms: f64,
    best_theta: f64,
    best_ms: f64,
    /// The solver's time over the best.
    ratio_best: Option<f64>,
    /// Without compression, and with everything compressed, over the solver's time.
    gain_over_none: Option<f64>,
    gain_over_all: Option<f64>,
}

/// Keys and values `[heads, tokens, dims]` of a layer.
struct Tensor {
    kind: PlaneKind,
    heads: usize,
    tokens: usize,
    dims: usize,
    values: Vec<f32>,
}

pub(crate) fn run(args: &CodecArgs) -> Result<()> {
    let tensors = load(&args.kv)?;
    for dtype in [DType::F16, DType::Bf16] {
        for &group in &args.group {
            for kind in [PlaneKind::Keys, PlaneKind::Values] {
                let planes = planes(&tensors, kind, usize::from(group), dtype);
                let Some((shape, planes)) = planes else {
                    bail!("{}: no keys and values of {group} tokens", args.kv.display());
                };
                for &codec in Codec::available() {
                    check_interrupt()?;
                    let result = measure(args, codec, &shape, &planes)?;
                    let name = format!("codec {codec:?}, {}, {}, groups of {group}", result.plane, result.dtype);
                    print(args.common.json, &name, &result)?;
                }
            }
        }
    }
    for &bandwidth in &args.bandwidth {
        check_interrupt()?;
        let result = theta(args, &tensors, bandwidth.0 as f64)?;
        print(args.common.json, &format!("theta at {bandwidth}/s"), &result)?;
    }
    Ok(())
}

fn load(path: &Path) -> Result<Vec<Tensor>> {
    let bytes = std::fs::read(path).with_context(|| format!("--kv {}", path.display()))?;
    let file = SafeTensors::deserialize(&bytes).with_context(|| path.display().to_string())?;
    let mut found = Vec::new();
    for (name, tensor) in file.tensors() {
        let kind = match name.rsplit('.').next().unwrap_or_default() {
            name if name.starts_with("k_") => PlaneKind::Keys,
            name if name.starts_with("v_") => PlaneKind::Values,
            _ => continue,
        };
        let (&[heads, tokens, dims], Dtype::F32) = (tensor.shape(), tensor.dtype()) else {
            bail!("{}: {name} is not f32 [heads, tokens, dims]", path.display());
        };
        let values = tensor.data().as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
        found.push(Tensor { kind, heads, tokens, dims, values });
    }
    if found.is_empty() {
        bail!("{}: no tensors named k_* or v_*", path.display());
    }
    Ok(found)
}

fn to_bytes(dtype: DType, values: impl Iterator<Item = f32>) -> Vec<u8> {
    match dtype {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::F16 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        DType::Bf16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

fn to_values(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect(),
        DType::F16 => bytes.as_chunks().0.iter().map(|word| f16::from_le_bytes(*word).to_f32()).collect(),
        DType::Bf16 => bytes.as_chunks().0.iter().map(|word| bf16::from_le_bytes(*word).to_f32()).collect(),
    }
}

/// The planes of whole groups, as the engine stores them.
fn planes(tensors: &[Tensor], kind: PlaneKind, group: usize, dtype: DType) -> Option<(PlaneShape, Vec<Vec<u8>>)> {
    let mut found = Vec::new();
    let mut shape = None;
    for tensor in tensors.iter().filter(|tensor| tensor.kind == kind) {
        let own = PlaneShape { kind, heads: tensor.heads, tokens: group, dims: tensor.dims, dtype };
        if *shape.get_or_insert(own) != own {
            continue;
        }
        for first in (0..tensor.tokens / group).map(|nth| nth * group) {
            let rows = (0..tensor.heads).flat_map(|head| (0..group).map(move |t| head * tensor.tokens + first + t));
            let values = rows.flat_map(|row| tensor.values[row * tensor.dims..(row + 1) * tensor.dims].iter().copied());
            found.push(to_bytes(dtype, values));
        }
    }
    shape.filter(|_| !found.is_empty()).map(|shape| (shape, found))
}

/// Runs over all planes until enough time has passed; bytes per second.
fn rate(seconds: f64, bytes: usize, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    let mut rounds = 0_u32;
    while rounds == 0 || start.elapsed().as_secs_f64() < seconds {
        run()?;
        rounds += 1;
    }
    Ok(bytes as f64 * f64::from(rounds) / start.elapsed().as_secs_f64())
}

fn measure(args: &CodecArgs, codec: Codec, shape: &PlaneShape, planes: &[Vec<u8>]) -> Result<CodecResult> {
    let bytes: usize = planes.iter().map(Vec::len).sum();
    let mut stored = Vec::new();
    for plane in planes {
        let mut out = Vec::new();
        stored.push((encode(codec, shape, plane, &mut out)?, out));
    }
    let (mut square, mut error, mut largest, mut greatest) = (0.0_f64, 0.0_f64, 0.0_f64, 0.0_f64);
    let mut back = vec![0; planes[0].len()];
    for (plane, (used, stored)) in planes.iter().zip(&stored) {
        decode(*used, shape, stored, &mut back)?;
        for (x, found) in to_values(shape.dtype, plane).iter().zip(to_values(shape.dtype, &back)) {
            let (x, off) = (f64::from(*x), f64::from(*x) - f64::from(found));
            (square, error) = (square + x * x, error + off * off);
            (largest, greatest) = (largest.max(off.abs()), greatest.max(x.abs()));
        }
    }
    let (mut encode_rates, mut decode_rates) = (Vec::new(), Vec::new());
    let mut out = Vec::with_capacity(planes[0].len() * 2);
    for _ in 0..args.common.rounds {
        check_interrupt()?;
        encode_rates.push(rate(args.seconds, bytes, || {
            for plane in planes {
                out.clear();
                black_box(encode(codec, shape, black_box(plane), &mut out)?);
            }
            Ok(())
        })?);
        decode_rates.push(rate(args.seconds, bytes, || {
            for (used, stored) in &stored {
                decode(*used, shape, black_box(stored), &mut back)?;
                black_box(&back);
            }
            Ok(())
        })?);
    }
    let raw = stored.iter().filter(|(used, _)| *used == Codec::Raw).count();
    let share = |part: f64, whole: f64| if whole > 0.0 { rounded(part / whole) } else { 0.0 };
    Ok(CodecResult {
        codec,
        plane: if shape.kind == PlaneKind::Keys { "keys" } else { "values" },
        dtype: shape.dtype.name(),
        group: shape.tokens,
        planes: planes.len(),
        stored_share: share(stored.iter().map(|(_, s)| s.len()).sum::<usize>() as f64, bytes as f64),
        raw_share: share(raw as f64, planes.len() as f64),
        encode_gb_per_s: rounded(median(&encode_rates) / 1e9),
        decode_gb_per_s: rounded(median(&decode_rates) / 1e9),
        relative_error: share(error.sqrt(), square.sqrt()),
        largest_error: share(largest, greatest),
    })
}

/// Reads, which are emulated by the clock at `bandwidth`, beside computing, emulated too, and decoding, which is real: one
/// layer after the other, the next one's reads under way while this one decodes and computes.
fn theta(args: &CodecArgs, tensors: &[Tensor], bandwidth: f64) -> Result<ThetaResult> {
    let codec = Codec::Int4;
    let group = usize::from(args.group[0]);
    let Some((shape, planes)) = planes(tensors, PlaneKind::Values, group, DType::F16) else {
        bail!("{}: no values of {group} tokens", args.kv.display());
    };
    let mut stored = Vec::new();
    for plane in &planes {
        let mut out = Vec::new();
        stored.push((encode(codec, &shape, plane, &mut out)?, out));
    }
    let bytes: usize = planes.iter().map(Vec::len).sum();
    let small: usize = stored.iter().map(|(_, s)| s.len()).sum();
    let compression = small as f64 / bytes as f64;
    let mut back = vec![0; planes[0].len()];
    let decode_some = |share: f64, back: &mut [u8]| -> Result<()> {
        let mut left = args.layer_bytes.0 as f64 * share;
        for (used, stored) in stored.iter().cycle() {
            if left < back.len() as f64 / 2.0 {
                return Ok(());
            }
            decode(*used, &shape, black_box(stored), back)?;
            black_box(&*back);
            left -= back.len() as f64;
        }
        Ok(())
    };
    let decode_rate = rate(args.seconds, args.layer_bytes.0 as usize, || decode_some(1.0, &mut back))?;
    let compute = Duration::from_micros(args.compute_us);
    let model = TransferModel {
        base_s: 0.0,
        bytes: args.layer_bytes.0 as f64,
        bandwidth,
        ratio: compression,
        compute_s: compute.as_secs_f64(),
        decode: decode_rate,
    };
    let mut layer_ms = |theta: f64, times: &mut Vec<f64>| -> Result<()> {
        let transfer = Duration::from_secs_f64(model.transfer_s(theta));
        let mut arrives = Instant::now() + transfer;
        for layer in 0..args.layers {
            check_interrupt()?;
            let start = Instant::now();
            crate::decode::sleep_until(arrives);
            arrives = Instant::now() + transfer;
            decode_some(theta, &mut back)?;
            crate::decode::sleep_until(Instant::now() + compute);
            if layer > 0 {
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
        Ok(())
    };
    // What was solved for, then the sweep, taking turns: a machine that is disturbed disturbs all of them.
    let solved = solve_theta(&model);
    let mut points = vec![(solved, Vec::new())];
    points.extend((0..=10).map(|step| (f64::from(step) / 10.0, Vec::new())));
    for _ in 0..args.common.rounds {
        for (theta, times) in &mut points {
            layer_ms(*theta, times)?;
        }
    }
    let theta_ms = median(&points[0].1);
    let sweep: Vec<(f64, f64)> = points[1..].iter().map(|(theta, times)| (*theta, median(times))).collect();
    let best = sweep.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0.0, 0.0));
    Ok(ThetaResult {
        codec,
        bandwidth,
        compute_us: args.compute_us,
        layer_bytes: args.layer_bytes.0 as usize,
        ratio: rounded(compression),
        decode_gb_per_s: rounded(decode_rate / 1e9),
        theta: rounded(solved),
        theta_ms: rounded(theta_ms),
        best_theta: best.0,
        best_ms: rounded(best.1),
        ratio_best: ratio(theta_ms, best.1),
        gain_over_none: ratio(sweep[0].1, theta_ms),
        gain_over_all: ratio(sweep[10].1, theta_ms),
    })
}
