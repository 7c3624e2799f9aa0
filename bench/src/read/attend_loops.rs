//! Turns of `kvbench read --attend`: bare loops that verify and attend by the public executor, and the engine.

use super::baseline::{BareTurn, compute};
use super::batches::{SELECTIONS, choose};
use crate::support::bare::BareReader;
use crate::support::interrupt::check_interrupt;
use crate::support::measure::cpu_seconds;
use crate::support::model::{HEAD_DIM, KV_HEADS, QUERY_HEADS, TOKEN_LAYER_BYTES, random_query};
use anyhow::Result;
use std::hint::black_box;
use std::time::{Duration, Instant};
use stratakv::attention::{AttentionShape, HeadMask, KvBlock, Partial, Query, Workspace};
use stratakv::read::AttendOptions;
use stratakv::{DType, SelectRequest, Sequence, Store, attend};
use stratakv_format::PayloadChecksum;

/// Bytes that the loop by parts waits for at a time. They fit into a core's L2 cache.
const WAVE_BYTES: u64 = 256 << 10;

/// A bare loop that verifies and attends to what it reads. Blocks are added in the order of their arrival.
pub(super) struct AttendLoop {
    checksum: PayloadChecksum,
    block: usize,
    query: Query,
    state: Partial,
    workspace: Workspace,
    out: Vec<f32>,
}

impl AttendLoop {
    /// Returns a loop over blocks of `block` bytes.
    pub(super) fn new(checksum: PayloadChecksum, block: u64) -> Result<Self> {
        let shape = AttentionShape::new(QUERY_HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, DType::F16)?;
        let query = Query::new(&shape, &random_query(&mut fastrand::Rng::with_seed(17)))?;
        let (state, workspace) = (Partial::new(&shape), Workspace::new());
        let out = vec![0.0; shape.output_len()];
        Ok(Self { checksum, block: block as usize, query, state, workspace, out })
    }

    /// Reads a batch, then verifies all of it, then attends to all of it.
    pub(super) fn steps(&mut self, reader: &mut BareReader) -> Result<()> {
        let bytes = reader.batch()?;
        compute(self.checksum, self.block as u64, bytes);
        self.state.reset();
        self.attend(bytes.chunks_exact(self.block))?;
        Ok(self.state.finish(&mut self.out)?)
    }

    /// Reads a batch, and verifies and attends to each stretch of it as it arrives.
    pub(super) fn parts(&mut self, reader: &mut BareReader) -> Result<()> {
        self.state.reset();
        let wave = (WAVE_BYTES as usize / self.block).max(1);
        reader.batch_in_waves(wave, |blocks| {
            for stretch in blocks.chunks(wave) {
                stretch.iter().for_each(|block| compute(self.checksum, self.block as u64, block));
                self.attend(stretch.iter().copied())?;
            }
            Ok(())
        })?;
        Ok(self.state.finish(&mut self.out)?)
    }

    fn attend<'a>(&mut self, blocks: impl Iterator<Item = &'a [u8]>) -> Result<()> {
        let tokens = self.block / TOKEN_LAYER_BYTES as usize;
        let block = |bytes: &'a [u8]| {
            let (k, v) = bytes.split_at(bytes.len() / 2);
            KvBlock {
                k,
                v,
                group_tokens: tokens,
                tokens,
                heads: HeadMask::all(KV_HEADS),
                positions: None,
                one_head: false,
            }
        };
        let blocks: Vec<KvBlock<'_>> = blocks.map(block).collect();
        Ok(self.state.add_all(&self.query, &blocks, &mut self.workspace)?)
    }
}

/// The way in which the engine reads and attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineCall {
    /// One call reads, verifies and attends.
    Joined,
    /// A read, then attention over the batch.
    Apart,
}

/// Reads and attends to random selections of `batch` groups for `length`.
///
/// # Errors
/// A read fails or a block is damaged, or the run was interrupted.
pub(super) fn engine_attends(
    store: &Store,
    sequence: &Sequence,
    batch: u32,
    call: EngineCall,
    length: Duration,
    random: &mut fastrand::Rng,
) -> Result<BareTurn> {
    let group_tokens = sequence.layout().group_tokens() as u64;
    let groups = sequence.len() / group_tokens;
    let selections: Vec<Vec<u64>> = (0..SELECTIONS).map(|_| choose(random, groups, batch as usize)).collect();
    let query = random_query(&mut fastrand::Rng::with_seed(17));
    let (options, mut out) = (AttendOptions::default(), vec![0.0; query.len()]);
    let mut latencies_us = Vec::new();
    let (cpu, start) = (cpu_seconds(), Instant::now());
    for chosen in selections.iter().cycle() {
        if start.elapsed() >= length {
            break;
        }
        check_interrupt()?;
        let begun = Instant::now();
        let selection = sequence.select(0, SelectRequest::groups(chosen))?;
        match call {
            EngineCall::Joined => {
                store.read(&[&selection]).attend(&[&query], &options, &mut [&mut out])?;
            }
            EngineCall::Apart => {
                let batch = store.read(&[&selection]).wait()?;
                attend(&query, &selection, batch.get(0)?, &mut out)?;
            }
        }
        black_box(&out);
        latencies_us.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let gb = (latencies_us.len() as u64 * u64::from(batch) * group_tokens * TOKEN_LAYER_BYTES) as f64 / 1e9;
    Ok(BareTurn { gb_per_s: gb / seconds, cpu_s_per_gb: cpu / gb, latencies_us })
}
