//! Turns of what the engine's reads are compared with: a bare io_uring loop, and checksums without reads.

use crate::support::bare::BareReader;
use crate::support::interrupt::check_interrupt;
use crate::support::measure::thread_cpu_seconds;
use crate::support::report::percentile;
use anyhow::Result;
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};
use stratakv::SequenceId;
use stratakv_format::{PayloadChecksum, PlaneIdentity};

/// Figures of one turn of the bare loop.
pub(crate) struct BareTurn {
    pub(crate) gb_per_s: f64,
    pub(crate) cpu_s_per_gb: f64,
    /// Latency of each batch.
    pub(crate) latencies_us: Vec<f64>,
}

/// The file that the bare loop reads, and its batches.
#[derive(Clone, Copy)]
pub(crate) struct BareBatches<'a> {
    pub(crate) file: &'a Path,
    pub(crate) block: u64,
    pub(crate) batch: u32,
}

/// Repeats `read`, which reads one batch, for `length`.
///
/// # Errors
/// The ring cannot be made, `read` fails, or the run was interrupted.
pub(crate) fn bare_turn(
    of: BareBatches<'_>,
    length: Duration,
    mut read: impl FnMut(&mut BareReader) -> Result<()>,
) -> Result<BareTurn> {
    let mut reader = BareReader::new(of.file, of.block as usize, of.batch as usize)?;
    let mut latencies_us = Vec::new();
    let (cpu, start) = (thread_cpu_seconds(), Instant::now());
    while start.elapsed() < length {
        check_interrupt()?;
        let begun = Instant::now();
        read(&mut reader)?;
        latencies_us.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), thread_cpu_seconds() - cpu);
    let gb = (latencies_us.len() as u64 * u64::from(of.batch) * of.block) as f64 / 1e9;
    Ok(BareTurn { gb_per_s: gb / seconds, cpu_s_per_gb: cpu / gb, latencies_us })
}

/// Reads every byte once and returns the sum of the bytes' words, the least that a consumer does.
pub(crate) fn touch(bytes: &[u8]) -> u64 {
    let words = bytes.as_chunks::<8>().0;
    words.iter().fold(0, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)))
}

/// Returns p99 over p50.
pub(crate) fn tail(latencies_us: &[f64]) -> f64 {
    percentile(latencies_us, 0.99) / percentile(latencies_us, 0.5)
}

/// Returns the CPU seconds per GB of checksums alone, computed over `bytes` repeatedly for `length`.
///
/// # Errors
/// The run was interrupted.
pub(crate) fn checksum_turn(kind: PayloadChecksum, block: u64, bytes: &[u8], length: Duration) -> Result<f64> {
    let mut passes = 0_u64;
    let (cpu, start) = (thread_cpu_seconds(), Instant::now());
    while passes == 0 || start.elapsed() < length {
        check_interrupt()?;
        compute(kind, block, bytes);
        passes += 1;
    }
    Ok((thread_cpu_seconds() - cpu) / ((passes * bytes.len() as u64) as f64 / 1e9))
}

/// Computes the checksums of both planes of every block in `bytes`.
pub(crate) fn compute(kind: PayloadChecksum, block: u64, bytes: &[u8]) {
    for (group, planes) in bytes.chunks_exact(block as usize).enumerate() {
        for (plane, data) in planes.chunks_exact(block as usize / 2).enumerate() {
            let identity = PlaneIdentity::new(1, SequenceId(1), 1, 0, group as u64, 8).with_plane(plane as u16);
            black_box(kind.compute(&identity, data));
        }
    }
}
