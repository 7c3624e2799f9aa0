//! Encoding of planes, and rates of repeated work.

use crate::codec::planes::GroupPlanes;
use anyhow::Result;
use std::time::Instant;
use stratakv::codec::{Codec, encode};

/// A plane as a codec stored it. The codec is raw if the plane could not be made small enough.
pub(super) type StoredPlane = (Codec, Vec<u8>);

/// Encodes every plane.
pub(super) fn encode_all(codec: Codec, planes: &GroupPlanes) -> Result<Vec<StoredPlane>> {
    let encode_one = |plane: &Vec<u8>| {
        let mut out = Vec::new();
        Ok((encode(codec, &planes.shape, plane, &mut out)?, out))
    };
    planes.bytes.iter().map(encode_one).collect()
}

/// Repeats `run`, which handles `bytes`, until `seconds` have passed. Returns bytes per second.
pub(super) fn rate(seconds: f64, bytes: usize, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    let mut rounds = 0_u32;
    while rounds == 0 || start.elapsed().as_secs_f64() < seconds {
        run()?;
        rounds += 1;
    }
    Ok(bytes as f64 * f64::from(rounds) / start.elapsed().as_secs_f64())
}
