//! One side of a comparison: the selections of all steps by one method, read from groups or from pages.

use crate::cluster::decode::workload::DecodeWorkload;
use crate::support::interrupt::check_interrupt;
use crate::support::report::{median, rounded};
use anyhow::Result;
use serde::Serialize;
use std::time::Instant;
use stratakv::retrieval::SelectorId;
use stratakv::{SelectOptions, SelectRequest, Selection, Sequence, Store, attend};

/// The selections of all steps, and the times of their reads.
pub(super) struct DecodeSide {
    /// Step after step, layer after layer.
    selections: Vec<Selection>,
    /// The time of selecting in all layers, by step.
    select_us: Vec<f64>,
    /// The time until all blocks of all layers were in memory and checked, by step and round.
    read_us: Vec<f64>,
    /// The time of reading and attending in all layers, by step and round.
    attended_us: Vec<f64>,
    requests: usize,
    bytes: u64,
}

/// Figures of one side, each per step and layer.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct SideFigures {
    /// Tokens that at least one head attends to.
    pub(super) entries: f64,
    /// The share of full attention that is kept, as a mean over query heads.
    pub(super) weight_kept: f64,
    pub(super) requests: f64,
    pub(super) bytes: f64,
    /// Pages of stored clusters.
    pub(super) pages: f64,
    pub(super) select_us: f64,
    pub(super) read_us: f64,
    /// Selecting, reading and attending.
    pub(super) step_us: f64,
}

impl DecodeSide {
    /// Selects in every layer of every step.
    ///
    /// # Errors
    /// A selection fails.
    pub(super) fn select(
        sequence: &Sequence,
        workload: &DecodeWorkload,
        id: SelectorId,
        options: SelectOptions,
    ) -> Result<Self> {
        let steps = workload.layers[0].steps.len();
        let (mut selections, mut select_us) = (Vec::new(), Vec::new());
        for step in 0..steps {
            check_interrupt()?;
            let start = Instant::now();
            for (at, layer) in workload.layers.iter().enumerate() {
                let request = SelectRequest::query(&layer.steps[step]).options(options).selector(id);
                selections.push(sequence.select(at, request)?);
            }
            select_us.push(start.elapsed().as_secs_f64() * 1e6);
        }
        let (read_us, attended_us) = (Vec::new(), Vec::new());
        Ok(Self { selections, select_us, read_us, attended_us, requests: 0, bytes: 0 })
    }

    /// Reads and attends to one step, layer after layer.
    ///
    /// # Errors
    /// A read fails.
    pub(super) fn step(
        &mut self,
        store: &Store,
        workload: &DecodeWorkload,
        step: usize,
        out: &mut [f32],
    ) -> Result<()> {
        let layers = workload.layers.len();
        let (start, mut read_us) = (Instant::now(), 0.0);
        for (layer, selection) in workload.layers.iter().zip(&self.selections[step * layers..]) {
            let begun = Instant::now();
            let ticket = store.read(&[selection]).submit()?;
            self.requests += ticket.requests();
            self.bytes += ticket.device_bytes();
            let batch = ticket.wait()?;
            read_us += begun.elapsed().as_secs_f64() * 1e6;
            attend(&layer.steps[step], selection, batch.get(0)?, out)?;
        }
        self.attended_us.push(start.elapsed().as_secs_f64() * 1e6);
        self.read_us.push(read_us);
        Ok(())
    }

    /// Returns the figures of all steps so far. `weights` are those of each selection, `[query_heads, tokens]`.
    pub(super) fn figures(&self, workload: &DecodeWorkload, weights: &[Vec<f32>]) -> SideFigures {
        let layers = workload.layers.len() as f64;
        let reads = (self.read_us.len() as f64 * layers).max(1.0);
        let count = self.selections.len().max(1) as f64;
        let sum = |of: &dyn Fn(&Selection) -> usize| self.selections.iter().map(of).sum::<usize>() as f64 / count;
        let kept: f64 = self.selections.iter().zip(weights).map(|(own, weights)| kept(workload, own, weights)).sum();
        let (select, attended) = (median(&self.select_us), median(&self.attended_us));
        SideFigures {
            entries: rounded(sum(&|own| own.tokens())),
            weight_kept: rounded(kept / count),
            requests: rounded(self.requests as f64 / reads),
            bytes: rounded(self.bytes as f64 / reads),
            pages: rounded(sum(&|own| own.stored_pages())),
            select_us: rounded(select / layers),
            read_us: rounded(median(&self.read_us) / layers),
            step_us: rounded((select + attended) / layers),
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
