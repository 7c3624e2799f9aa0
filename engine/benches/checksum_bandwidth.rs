//! Measures checksums of planes by the engine's kernel and by the format crate, against plain reads of the same memory.
//!
//! `cargo bench -p stratakv --bench checksum_bandwidth -- [MiB of memory, default 512] [rounds, default 61]`
//!
//! `cached` repeats 256 KiB, which the L2 cache holds. `memory` moves through all the memory, 16 MiB per round, so that
//! no cache holds what is read. All sides take turns within a round. Noise of the machine then affects all of them.
//! Figures are medians.

use std::hint::black_box;
use std::time::Instant;
use stratakv_format::{PayloadChecksum, PlaneIdentity, SequenceId};

const PLANE_BYTES: [usize; 5] = [2 << 10, 4 << 10, 8 << 10, 32 << 10, 64 << 10];
const CACHED_BYTES: usize = 256 << 10;
const ROUND_BYTES: usize = 16 << 20;
/// The sides in the order of the columns.
const SIDES: [fn(&PlaneIdentity, &[u8]) -> u64; 3] = [
    |_, plane| add_up(plane),
    |identity, plane| PayloadChecksum::Crc64Nvme.compute(identity, plane),
    |identity, plane| stratakv::plane_checksum(PayloadChecksum::Crc64Nvme, identity, plane),
];

fn main() {
    // Cargo passes `--bench`.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let number = |i: usize, default| args.get(i).and_then(|a| a.parse().ok()).filter(|n| *n > 0).unwrap_or(default);
    let (mib, rounds): (usize, usize) = (number(0, 512).max(32), number(1, 61));
    let mut memory = vec![0; mib << 20];
    fastrand::Rng::with_seed(1).fill(&mut memory);
    println!("{mib} MiB of memory, medians of {rounds}, GB/s");
    println!("plane   where    plain reads  format crate  kernel  kernel/format");
    for plane in PLANE_BYTES {
        report(plane, "cached", &memory[..CACHED_BYTES], rounds);
        report(plane, "memory", &memory, rounds);
    }
}

/// Measures planes of one length and prints a row.
fn report(plane: usize, place: &str, memory: &[u8], rounds: usize) {
    let identity = PlaneIdentity::new(1, SequenceId(2), 3, 4, 5, 6);
    let mut seconds: [Vec<f64>; SIDES.len()] = Default::default();
    let mut parts = memory.chunks_exact(ROUND_BYTES.min(memory.len())).cycle();
    for round in 0..rounds {
        for nth in 0..SIDES.len() {
            let side = (round + nth) % SIDES.len();
            let part = parts.next().expect("the memory has a part");
            let passes = ROUND_BYTES / part.len();
            let start = Instant::now();
            for _ in 0..passes {
                let sum = black_box(part).chunks_exact(plane).fold(0, |sum, plane| sum ^ SIDES[side](&identity, plane));
                black_box(sum);
            }
            seconds[side].push(start.elapsed().as_secs_f64());
        }
    }
    let [reads, format, kernel] = seconds.map(|times| ROUND_BYTES as f64 / 1e9 / median(times));
    let ratio = kernel / format;
    println!("{plane:6}  {place}  {reads:13.1}  {format:12.1}  {kernel:6.1}  {ratio:13.2}");
}

/// Adds up all words in 32 independent sums, so that loads are the limit.
fn add_up(bytes: &[u8]) -> u64 {
    let mut sums = [0_u64; 32];
    for words in bytes.as_chunks::<256>().0 {
        for (sum, word) in sums.iter_mut().zip(words.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
