//! `kvbench read` measures batches of random groups through selections and reads, with checksums verified.
//!
//! For each block size:
//! 1. Write one sequence whose groups have exactly that size, and a plain file of the same length for the other sides.
//! 2. In each round, give every side a turn: the engine, the bare io_uring loop, the same loop when it reads every byte
//!    in memory, the same loop with checksums, fio, and fio with its queue kept full. The order rotates from round to
//!    round, because a disk's rate depends on its recent load.
//! 3. In each round, measure checksums without reads.
//! 4. Report medians over the rounds.
//!
//! fio and the plain bare loop never look at the bytes that the device has written. Every user of a read does.
//!
//! `attend` measures reads with attention. `drivers` repeats the engine's turns with every driver.

mod args;
mod attend;
mod attend_loops;
mod baseline;
mod batches;
pub(crate) mod drivers;
mod result;
mod samples;

pub(crate) use args::{DriversArgs, ReadArgs};
pub(crate) use batches::append_random;

use crate::support::args::ChecksumArg;
use crate::support::bare::{Pages, write_file};
use crate::support::directory::{settle, work_directory};
use crate::support::fio::{self, Refill};
use crate::support::report::print;
use crate::support::store::{driver_name, open_store, page_kind};
use anyhow::Result;
use baseline::{BareBatches, bare_turn, checksum_turn, compute, touch};
use batches::{BatchPattern, engine_turn, fill};
use result::{ReadResult, StoreFacts};
use samples::ReadSamples;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Duration;
use stratakv::{ByteSize, Sequence, Store};
use stratakv_format::PayloadChecksum;

/// The number of sides that have a turn in each round.
const SIDES: usize = 6;
/// Memory that no processor cache holds.
const COLD_BYTES: u64 = 256 << 20;

/// Runs `kvbench read`.
pub(crate) fn run(args: &ReadArgs) -> Result<()> {
    args.reads.check()?;
    if args.attend {
        return attend::run(args);
    }
    for block in &args.reads.block {
        let result = measure(args, *block)?;
        print(args.common.json, &format!("read {block}"), &result)?;
    }
    Ok(())
}

fn measure(args: &ReadArgs, block: ByteSize) -> Result<ReadResult> {
    let reads = &args.reads;
    let with_fio = args.fio && fio::is_installed();
    let raw_bytes = if args.bare || with_fio { reads.size.0 } else { 0 };
    let dir = work_directory(&args.common.device, reads.size.0 + raw_bytes + (256 << 20))?;
    let buffers = reads.buffer_bytes(block);
    let store = open_store(&args.common, &dir.path().join("store"), ByteSize((4 * buffers).max(256 << 20)))?;
    eprintln!("kvbench: {}: writing {} in blocks of {block}", dir.path().display(), reads.size);
    let sequence = fill(&store, block.0, reads.size.0)?;
    let raw = dir.path().join("raw");
    if raw_bytes > 0 {
        write_file(&raw, reads.size.0)?;
    }
    settle(dir.path())?;

    let mut memory = Pages::new(COLD_BYTES.max(buffers) as usize)?;
    fastrand::Rng::with_seed(9).fill(memory.bytes_mut());
    let pattern = BatchPattern { batch: reads.batch, in_flight: reads.in_flight, tickets: args.tickets };
    let random = fastrand::Rng::with_seed(5);
    let length = Duration::from_secs_f64(reads.seconds);
    let mut run =
        ReadRun { args, block: block.0, pattern, length, with_fio, store: &store, sequence: &sequence, raw, random };
    run.engine(length / 4)?;
    let mut samples = ReadSamples::default();
    for round in 1..=args.common.rounds {
        eprintln!("kvbench: {block}: round {round} of {}", args.common.rounds);
        run.round(round as usize, &mut samples)?;
        let (kind, length) = (checksum_kind(args.common.checksum), length / 8);
        samples.checksum.push(checksum_turn(kind, block.0, &memory.bytes_mut()[..buffers as usize], length)?);
        samples.checksum_cold.push(checksum_turn(kind, block.0, memory.bytes_mut(), length)?);
    }
    if args.fio && !with_fio {
        eprintln!("kvbench: fio {}", fio::MISSING);
    }
    let result = samples.result(args, block.0, pattern, facts(&store));
    drop(sequence);
    store.close()?;
    Ok(result)
}

fn facts(store: &Store) -> StoreFacts {
    let status = store.status();
    StoreFacts {
        huge_pages: page_kind(&status),
        driver: driver_name(&status),
        direct: status.devices.first().is_some_and(|device| device.direct),
    }
}

fn checksum_kind(checksum: ChecksumArg) -> PayloadChecksum {
    match checksum {
        ChecksumArg::Crc64 => PayloadChecksum::Crc64Nvme,
        ChecksumArg::Crc32 => PayloadChecksum::Crc32,
    }
}

/// One block size under measurement.
struct ReadRun<'a> {
    args: &'a ReadArgs,
    block: u64,
    pattern: BatchPattern,
    /// The time of one turn.
    length: Duration,
    with_fio: bool,
    store: &'a Store,
    sequence: &'a Sequence,
    /// The file that the bare loop and fio read.
    raw: PathBuf,
    random: fastrand::Rng,
}

impl ReadRun<'_> {
    fn engine(&mut self, length: Duration) -> Result<batches::EngineTurn> {
        engine_turn(self.pattern, self.store, self.sequence, length, &mut self.random)
    }

    /// Gives every requested side one turn, starting with another side than the round before.
    fn round(&mut self, round: usize, samples: &mut ReadSamples) -> Result<()> {
        let (block, batch, length, seconds) = (self.block, self.pattern.batch, self.length, self.args.reads.seconds);
        let kind = checksum_kind(self.args.common.checksum);
        for at in 0..SIDES {
            let raw: &Path = &self.raw;
            let of = BareBatches { file: raw, block, batch };
            match (round + at) % SIDES {
                1 => samples.engine.push(self.engine(length)?),
                2 if self.args.bare => samples.bare.push(bare_turn(of, length, |reader| reader.batch().map(drop))?),
                3 if self.with_fio => samples.fio.push(fio::read(raw, block, batch, seconds, Refill::Batches)?),
                4 if self.args.bare => {
                    let checked = bare_turn(of, length, |reader| {
                        compute(kind, block, reader.batch()?);
                        Ok(())
                    });
                    samples.bare_checked.push(checked?);
                }
                5 if self.args.bare => {
                    let touched = bare_turn(of, length, |reader| {
                        black_box(touch(reader.batch()?));
                        Ok(())
                    });
                    samples.bare_touched.push(touched?);
                }
                0 if self.with_fio => samples.fio_full.push(fio::read(raw, block, batch, seconds, Refill::Always)?),
                _ => {}
            }
        }
        Ok(())
    }
}
