//! `kvbench codec` measures the codecs on keys and values of a real model: ratios, speeds and errors. It also solves
//! for the share of a transfer to compress (theta in LeoAM) and compares it with a sweep.

mod args;
mod coding;
mod planes;
mod sweep;

pub(crate) use args::CodecArgs;

use crate::support::interrupt::check_interrupt;
use crate::support::report::{median, print, rounded};
use anyhow::{Result, bail};
use coding::{StoredPlane, encode_all, rate};
use planes::{GroupPlanes, ModelTensor, group_planes, load, to_values};
use serde::Serialize;
use std::hint::black_box;
use stratakv::DType;
use stratakv::codec::{Codec, PlaneKind, decode, encode};

/// Figures of one codec on one kind of plane and dtype. Speeds count bytes of the uncompressed plane, on one core.
#[derive(Debug, Serialize)]
struct CodecResult {
    codec: Codec,
    plane: &'static str,
    dtype: &'static str,
    group: usize,
    planes: usize,
    /// Stored bytes over plane bytes, planes kept raw included.
    stored_share: f64,
    /// The share of the planes that were kept raw.
    raw_share: f64,
    encode_gb_per_s: f64,
    decode_gb_per_s: f64,
    #[serde(flatten)]
    error: CodecError,
}

/// Errors of the decoded elements; 0 for lossless codecs.
#[derive(Debug, Serialize)]
struct CodecError {
    /// The root of the mean squared error over the root of the mean square of the elements.
    relative_error: f64,
    /// The largest error over the largest element.
    largest_error: f64,
}

/// Runs `kvbench codec`.
pub(crate) fn run(args: &CodecArgs) -> Result<()> {
    let tensors = load(&args.kv)?;
    for dtype in [DType::F16, DType::Bf16] {
        for &group in &args.group {
            for kind in [PlaneKind::Keys, PlaneKind::Values] {
                measure_plane(args, &tensors, kind, group, dtype)?;
            }
        }
    }
    for &bandwidth in &args.bandwidth {
        check_interrupt()?;
        let result = sweep::measure(args, &tensors, bandwidth.0 as f64)?;
        print(args.common.json, &format!("share to compress at {bandwidth}/s"), &result)?;
    }
    Ok(())
}

/// Measures every codec on one kind of plane, and prints the results.
fn measure_plane(args: &CodecArgs, tensors: &[ModelTensor], kind: PlaneKind, group: u16, dtype: DType) -> Result<()> {
    let Some(planes) = group_planes(tensors, kind, usize::from(group), dtype) else {
        bail!("--kv {}: the file has no keys and values of {group} tokens", args.kv.display());
    };
    for &codec in Codec::available() {
        check_interrupt()?;
        let result = measure(args, codec, &planes)?;
        let name = format!("codec {codec:?}, {}, {}, groups of {group}", result.plane, result.dtype);
        print(args.common.json, &name, &result)?;
    }
    Ok(())
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { rounded(part / whole) } else { 0.0 }
}

fn measure(args: &CodecArgs, codec: Codec, planes: &GroupPlanes) -> Result<CodecResult> {
    let shape = &planes.shape;
    let bytes: usize = planes.bytes.iter().map(Vec::len).sum();
    let stored = encode_all(codec, planes)?;
    let error = error(planes, &stored)?;
    let (mut encode_rates, mut decode_rates) = (Vec::new(), Vec::new());
    let mut decoded = vec![0; planes.bytes[0].len()];
    let mut out = Vec::with_capacity(planes.bytes[0].len() * 2);
    for _ in 0..args.common.rounds {
        check_interrupt()?;
        encode_rates.push(rate(args.seconds, bytes, || {
            for plane in &planes.bytes {
                out.clear();
                black_box(encode(codec, shape, black_box(plane), &mut out)?);
            }
            Ok(())
        })?);
        decode_rates.push(rate(args.seconds, bytes, || {
            for (used, stored) in &stored {
                decode(*used, shape, black_box(stored), &mut decoded)?;
                black_box(&decoded);
            }
            Ok(())
        })?);
    }
    let raw = stored.iter().filter(|(used, _)| *used == Codec::Raw).count();
    Ok(CodecResult {
        codec,
        plane: if shape.kind == PlaneKind::Keys { "keys" } else { "values" },
        dtype: shape.dtype.name(),
        group: shape.tokens,
        planes: planes.bytes.len(),
        stored_share: share(stored.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() as f64, bytes as f64),
        raw_share: share(raw as f64, planes.bytes.len() as f64),
        encode_gb_per_s: rounded(median(&encode_rates) / 1e9),
        decode_gb_per_s: rounded(median(&decode_rates) / 1e9),
        error,
    })
}

/// Compares the decoded planes with the original ones.
fn error(planes: &GroupPlanes, stored: &[StoredPlane]) -> Result<CodecError> {
    let (mut square, mut error, mut largest, mut greatest) = (0.0_f64, 0.0_f64, 0.0_f64, 0.0_f64);
    let mut decoded = vec![0; planes.bytes[0].len()];
    for (plane, (used, stored)) in planes.bytes.iter().zip(stored) {
        decode(*used, &planes.shape, stored, &mut decoded)?;
        let dtype = planes.shape.dtype;
        for (x, found) in to_values(dtype, plane).iter().zip(to_values(dtype, &decoded)) {
            let (x, off) = (f64::from(*x), f64::from(*x) - f64::from(found));
            (square, error) = (square + x * x, error + off * off);
            (largest, greatest) = (largest.max(off.abs()), greatest.max(x.abs()));
        }
    }
    Ok(CodecError { relative_error: share(error.sqrt(), square.sqrt()), largest_error: share(largest, greatest) })
}
