//! One side of a comparison: the selections of all steps by one method, read from groups or from pages.
//!
//! A side has the selections of every sequence of the largest batch. A smaller batch takes those of the first
//! sequences. Sequence `n` has the query of step `s + n` in step `s`, so the sequences of a step ask for different
//! pages.

use crate::cluster::decode::args::DecodePlace;
use crate::cluster::decode::workload::DecodeWorkload;
use crate::support::interrupt::check_interrupt;
use crate::support::measure::cpu_seconds;
use crate::support::report::{median, percentile, rounded};
use anyhow::Result;
use serde::Serialize;
use std::time::{Duration, Instant};
use stratakv::retrieval::SelectorId;
use stratakv::{SelectOptions, SelectRequest, Selection, Sequence, Store, attend};

/// The longest wait for a step that stalls: two slices of the kernel's limit.
const STALL_WAIT: Duration = Duration::from_millis(200);

/// The selections of all steps by one method at one budget.
pub(super) struct DecodeSide {
    pub(super) method: String,
    /// Tokens of a group.
    pub(super) group: u16,
    pub(super) place: DecodePlace,
    /// The index of the budget.
    pub(super) budget: usize,
    /// By sequence.
    members: Vec<MemberSelections>,
}

/// The selections of one sequence of a batch.
struct MemberSelections {
    /// Step after step, layer after layer.
    selections: Vec<Selection>,
    /// The time of selecting in all layers, by step.
    select_us: Vec<f64>,
}

/// What is read: the workload from a store, by this many sequences at once.
#[derive(Clone, Copy)]
pub(super) struct SideBatch<'a> {
    pub(super) store: &'a Store,
    pub(super) workload: &'a DecodeWorkload,
    pub(super) batch: usize,
}

/// The times and counts of the reads of one side.
#[derive(Default)]
pub(super) struct SideReads {
    /// The time until all blocks of all layers were in memory and checked, as a mean over the steps of a turn.
    read_us: Vec<f64>,
    /// The time of reading and attending in all layers, as a mean over the steps of a turn.
    attended_us: Vec<f64>,
    /// The time of reading and attending in all layers, of each step.
    each_us: Vec<f64>,
    cpu_s: f64,
    requests: usize,
    bytes: u64,
}

/// How long a side reads at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct TurnTimes {
    /// The time of steps that are not measured.
    pub(super) warm: Duration,
    /// The least time of measured steps. Every step is measured at least once.
    pub(super) least: Duration,
    /// The time of a step that waited for the kernel to grant more. Both parts of a turn end behind such a step, so
    /// that a turn has whole slices of the limit. Zero without a limit.
    pub(super) stall: Duration,
}

/// Returns whether a part of a turn that began at `start` is over. `stalled` tells whether its last step stalled. A
/// device that is faster than its limit never stalls, so the wait for a stall ends.
fn is_over(start: Instant, least: Duration, stall: Duration, stalled: bool) -> bool {
    let passed = start.elapsed();
    passed >= least && (stall.is_zero() || stalled || passed >= least + STALL_WAIT)
}

/// Figures of one side, each per step and layer, for all sequences of the batch together.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct SideFigures {
    /// Tokens that at least one head attends to.
    pub(super) entries: f64,
    /// The share of full attention that is kept, as a mean over query heads.
    pub(super) weight_kept: f64,
    pub(super) requests: f64,
    pub(super) bytes: f64,
    /// Bytes of attended keys and values over bytes read.
    pub(super) useful: f64,
    /// Pages of stored clusters.
    pub(super) pages: f64,
    pub(super) select_us: f64,
    pub(super) read_us: f64,
    /// Selecting, reading and attending.
    pub(super) step_us: f64,
    /// Median and 99th percentile of reading and attending in single steps.
    pub(super) each_p50_us: f64,
    pub(super) each_p99_us: f64,
    /// CPU time of reading and attending, of all threads.
    pub(super) cpu_us: f64,
    /// Bytes read per second of reading, in MB.
    pub(super) read_mb_s: f64,
    /// Bytes of attended keys and values per second of reading, in MB.
    pub(super) useful_mb_s: f64,
    /// Steps of all layers per second, one for each sequence.
    pub(super) tokens_per_s: f64,
}

impl DecodeSide {
    /// Selects in every layer of every step, in a sequence that is the `member`-th of a batch. `named` is the method
    /// with the tokens of its groups, and the place.
    ///
    /// # Errors
    /// A selection fails.
    pub(super) fn select(
        (sequence, member): (&Sequence, usize),
        workload: &DecodeWorkload,
        (method, group, place): (String, u16, DecodePlace),
        (id, budget, options): (SelectorId, usize, SelectOptions),
    ) -> Result<Self> {
        let steps = workload.layers[0].steps.len();
        let (mut selections, mut select_us) = (Vec::new(), Vec::new());
        for step in 0..steps {
            check_interrupt()?;
            let start = Instant::now();
            for (at, layer) in workload.layers.iter().enumerate() {
                let query = &layer.steps[(step + member) % steps];
                let request = SelectRequest::query(query).options(options).selector(id);
                selections.push(sequence.select(at, request)?);
            }
            select_us.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(Self { method, group, place, budget, members: vec![MemberSelections { selections, select_us }] })
    }

    /// Adds the selections of the same method, place and budget in the next sequence of the batch.
    pub(super) fn join(&mut self, next: Self) {
        self.members.extend(next.members);
    }

    /// Reads and attends to the steps, one after the other and from the first one again, for the times of a turn.
    ///
    /// # Errors
    /// A read fails, or the run was interrupted.
    pub(super) fn turn(
        &self,
        of: SideBatch<'_>,
        times: TurnTimes,
        out: &mut [f32],
        reads: &mut SideReads,
    ) -> Result<()> {
        let steps = of.workload.layers[0].steps.len();
        let (mut step, warm) = (0, Instant::now());
        let mut stalled = false;
        while !is_over(warm, times.warm, times.stall, stalled) {
            let begun = Instant::now();
            self.step(of, step % steps, out, &mut SideReads::default())?;
            stalled = begun.elapsed() >= times.stall;
            step += 1;
        }
        let (start, cpu, mut measured, mut read_us) = (Instant::now(), cpu_seconds(), 0, 0.0);
        while measured < steps || !is_over(start, times.least, times.stall, stalled) {
            check_interrupt()?;
            let begun = Instant::now();
            read_us += self.step(of, (step + measured) % steps, out, reads)?;
            stalled = begun.elapsed() >= times.stall;
            reads.each_us.push(begun.elapsed().as_secs_f64() * 1e6);
            measured += 1;
        }
        reads.attended_us.push(start.elapsed().as_secs_f64() * 1e6 / measured as f64);
        reads.read_us.push(read_us / measured as f64);
        reads.cpu_s += cpu_seconds() - cpu;
        Ok(())
    }

    /// Reads and attends to one step, layer after layer. Returns the microseconds of the reads.
    fn step(&self, of: SideBatch<'_>, step: usize, out: &mut [f32], reads: &mut SideReads) -> Result<f64> {
        let SideBatch { store, workload, batch } = of;
        let mut read_us = 0.0;
        let layers = workload.layers.len();
        for (at, layer) in workload.layers.iter().enumerate() {
            let own = self.members.iter().take(batch);
            let selections: Vec<&Selection> = own.map(|member| &member.selections[step * layers + at]).collect();
            let begun = Instant::now();
            let ticket = store.read(&selections).submit()?;
            reads.requests += ticket.requests();
            reads.bytes += ticket.device_bytes();
            let blocks = ticket.wait()?;
            read_us += begun.elapsed().as_secs_f64() * 1e6;
            for (member, selection) in selections.into_iter().enumerate() {
                let query = &layer.steps[(step + member) % layer.steps.len()];
                attend(query, selection, blocks.get(member)?, out)?;
            }
        }
        Ok(read_us)
    }

    /// Returns the figures of reads. `weights` are those of each selection of the first sequence,
    /// `[query_heads, tokens]`.
    pub(super) fn figures(&self, of: SideBatch<'_>, weights: &[Vec<f32>], reads: &SideReads) -> SideFigures {
        let SideBatch { workload, batch, .. } = of;
        let members = &self.members[..batch.min(self.members.len())];
        let layers = workload.layers.len() as f64;
        let count = (reads.each_us.len() as f64 * layers).max(1.0);
        // Each sequence has every query once.
        let first = &members[0].selections;
        let each = first.len().max(1) as f64;
        let all = || members.iter().flat_map(|member| &member.selections);
        let mean = |of: &dyn Fn(&Selection) -> usize| all().map(of).sum::<usize>() as f64 / each;
        let kept: f64 = first.iter().zip(weights).map(|(own, weights)| kept(workload, own, weights)).sum();
        let select: f64 = members.iter().map(|member| median(&member.select_us)).sum::<f64>() / layers;
        let attended = median(&reads.attended_us) / layers;
        let (bytes, read_us) = (reads.bytes as f64 / count, median(&reads.read_us) / layers);
        // Keys and values in f16.
        let useful = mean(&|own| (0..workload.kv_heads).map(|head| own.entries(head).count()).sum());
        let useful = useful * (workload.dim * 4) as f64;
        let per_us = |bytes: f64| if read_us > 0.0 { rounded(bytes / read_us) } else { 0.0 };
        SideFigures {
            entries: rounded(mean(&|own| own.tokens())),
            weight_kept: rounded(kept / each),
            requests: rounded(reads.requests as f64 / count),
            bytes: rounded(bytes),
            useful: rounded(useful / bytes.max(1.0)),
            pages: rounded(mean(&|own| own.stored_pages())),
            select_us: rounded(select),
            read_us: rounded(read_us),
            step_us: rounded(select + attended),
            each_p50_us: rounded(median(&reads.each_us) / layers),
            each_p99_us: rounded(percentile(&reads.each_us, 0.99) / layers),
            cpu_us: rounded(reads.cpu_s * 1e6 / count),
            read_mb_s: per_us(bytes),
            useful_mb_s: per_us(useful),
            tokens_per_s: rounded(1e6 * members.len() as f64 / ((select + attended) * layers).max(1e-3)),
        }
    }
}

/// Returns the share of full attention that a selection keeps, as a mean over query heads.
fn kept(workload: &DecodeWorkload, selection: &Selection, weights: &[f32]) -> f64 {
    let ratio = workload.query_heads / workload.kv_heads;
    let of_head = |(head, weights): (usize, &[f32])| -> f64 {
        selection.entries(head / ratio).map(|token| f64::from(weights[token as usize])).sum()
    };
    weights.chunks_exact(workload.tokens).enumerate().map(of_head).sum::<f64>() / workload.query_heads as f64
}
