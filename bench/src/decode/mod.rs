//! `kvbench decode` measures decode steps of LLaMA-3-8B's geometry, on a device of any speed: the gain of resident
//! blocks and of prefetching.
//!
//! There is no model:
//! - A layer computes by taking the time that it is told to.
//! - Selections follow a synthetic trace. With `--select` a method scores the whole context as well, for its cost.
//! - Keys and values are random. They are written once, and then read, checked and attended to as usual.
//! - Every sequence of the batch has its own bytes on the device, up to `--stored` in all. A longer context selects
//!   from the stored part.
//!
//! For each context:
//! 1. Write the store, on a new device with limits if the arguments ask for them.
//! 2. With `--codec-share auto`, measure the reads that the share is solved from.
//! 3. For each method, compute time and policy, run the steps with every setting of the pipeline (`case`).

mod args;
mod case;
mod codec_share;
mod prepared_store;
mod result;
mod scorer;
mod trace;

pub(crate) use args::DecodeArgs;

use crate::devices::{DeviceLimits, DeviceSet, in_directory};
use crate::support::interrupt::check_interrupt;
use crate::support::model::TOKEN_LAYER_BYTES;
use crate::support::report::{print, ratio, rounded};
use anyhow::{Context, Result, bail};
use args::{Ahead, CodecShare, DecodeCodec, DecodePolicy};
use case::{CaseFigures, DecodeCase};
use codec_share::{LayerReads, SolvedShare, decode_bps};
use prepared_store::PreparedStore;
use result::{CodecSetup, DecodeResult, DecodeSetup, PrefetchFigures, SelectionFigures};
use scorer::Scorer;
use std::path::Path;
use stratakv::KvLayout;
use stratakv::layout::PlaneCodec;

/// Measured steps of a case whose reads the share of layers under the codec is solved from.
const PROBE_STEPS: u32 = 8;

/// Runs `kvbench decode`.
pub(crate) fn run(args: &DecodeArgs) -> Result<()> {
    if args.budget < u32::from(args.group) {
        bail!("--budget {}: less than one group of {} tokens", args.budget, args.group);
    }
    if args.codec_share == CodecShare::Auto {
        if args.codec == DecodeCodec::Raw {
            bail!("--codec-share auto: there is no codec to share; give --codec int8 or --codec int4");
        }
        if args.pipeline.iter().any(|ahead| *ahead != Ahead::On) {
            bail!("--codec-share auto: it is solved for predicted reads that hide behind computing; use --pipeline on");
        }
    }
    for &context in &args.context {
        let stored = stored_tokens(args, context);
        let bytes = u64::from(args.batch) * u64::from(stored) * TOKEN_LAYER_BYTES * u64::from(args.layers);
        // Frames have headers, and every case appends a few tokens.
        let needed = bytes + bytes / 32 + (512 << 20);
        let limits = args.limits.limits();
        in_directory(&args.common.device, needed, &limits, args.common.json, &mut |dir, limited| {
            measure(args, context, stored, dir, limited.map(|devices| (devices, limits)))
        })?;
    }
    Ok(())
}

/// Returns the tokens that each sequence stores: whole groups, within `--stored` for the batch.
fn stored_tokens(args: &DecodeArgs, context: u32) -> u32 {
    let token = TOKEN_LAYER_BYTES * u64::from(args.layers) * u64::from(args.batch);
    let most = u32::try_from(args.stored.0 / token).unwrap_or(u32::MAX);
    let group = u32::from(args.group);
    (context.min(most) / group).max(1) * group
}

/// Measures every combination of settings for one context. `limited` names the device to slow down and its
/// limits.
fn measure(
    args: &DecodeArgs,
    context: u32,
    stored: u32,
    dir: &Path,
    limited: Option<(&DeviceSet, DeviceLimits)>,
) -> Result<()> {
    let mut prepared = PreparedStore::new(args, stored, dir);
    let share = match args.codec_share {
        CodecShare::Given(share) => share,
        CodecShare::Auto => 0.0,
    };
    prepared.write(share)?;
    let limits = limited.map_or(DeviceLimits::NONE, |(_, limits)| limits);
    if let Some((devices, limits)) = limited {
        devices.limit(0, &limits)?;
    }
    let reads = match args.codec_share {
        CodecShare::Given(_) => Vec::new(),
        CodecShare::Auto => probe(&mut prepared)?,
    };
    for method in &args.select {
        let scorer = Scorer::new(args, method, context)?;
        let contest = Contest { args, context, method, scorer: scorer.as_ref(), limits };
        for &compute_us in &args.layer_compute_us {
            let mut first_ms = None;
            for (at, policy) in args.policy.iter().enumerate() {
                let solved = reads.get(at).map(|reads| reads.solve(args.layers, compute_us));
                let share = solved.as_ref().map_or(share, |solved| solved.share);
                let coding = Coding { layout: prepared.write(share)?, share, solved };
                contest.policy(&prepared, &coding, compute_us, *policy, &mut first_ms)?;
            }
        }
        scorer.map_or(Ok(()), Scorer::close)?;
    }
    Ok(())
}

/// The layout that the store was written with, and the share of its layers under the codec.
struct Coding {
    layout: KvLayout,
    share: f64,
    /// Present if the share was solved for.
    solved: Option<SolvedShare>,
}

/// The settings that all cases of one context and method share.
struct Contest<'a> {
    args: &'a DecodeArgs,
    context: u32,
    method: &'a str,
    scorer: Option<&'a Scorer>,
    limits: DeviceLimits,
}

impl Contest<'_> {
    /// Measures one policy with every setting of the pipeline, and prints the results.
    fn policy(
        &self,
        prepared: &PreparedStore<'_>,
        coding: &Coding,
        compute_us: u64,
        policy: DecodePolicy,
        first_ms: &mut Option<f64>,
    ) -> Result<()> {
        let args = self.args;
        for &ahead in &args.pipeline {
            check_interrupt()?;
            let (stored, layout, steps, scorer) = (prepared.tokens, &coding.layout, args.steps, self.scorer);
            let case = DecodeCase { args, stored, layout, steps, compute_us, policy, ahead, scorer };
            let figures = case.run(&prepared.path()).with_context(|| format!("{}, {compute_us} us", policy.name()))?;
            let step_ms = figures.steps.step_ms;
            let codec = CodecSetup {
                codec: format!("{:?}", args.codec).to_lowercase(),
                codec_share: rounded(coding.share),
                codec_layers: codec_layers(layout),
                solved: coding.solved.clone(),
            };
            let speedup = first_ms.and_then(|first| ratio(first, step_ms));
            first_ms.get_or_insert(step_ms);
            let result = self.result(&case, figures, codec, speedup)?;
            let with = match ahead {
                Ahead::Off => "without pipeline",
                Ahead::On => "with pipeline",
                Ahead::Last => "prefetching the last selection",
            };
            let (tokens, policy) = (self.context, policy.name());
            let name = format!("decode {tokens} tokens, {policy}, {with}, {compute_us} us a layer");
            print(args.common.json, &format!("{name}, selection {}", self.method), &result)?;
        }
        Ok(())
    }

    fn result(
        &self,
        case: &DecodeCase<'_>,
        figures: CaseFigures,
        codec: CodecSetup,
        speedup: Option<f64>,
    ) -> Result<DecodeResult> {
        let args = self.args;
        Ok(DecodeResult {
            steps: figures.steps,
            selection: SelectionFigures {
                select: self.method.to_owned(),
                select_ms: figures.select_ms,
                select_waited_ms: figures.select_waited_ms,
                summary_bytes: self.scorer.map_or(Ok(0), |scorer| scorer.summary_bytes(args.layers))?,
            },
            setup: DecodeSetup {
                context: self.context,
                stored_tokens: case.stored,
                batch: args.batch,
                layers: args.layers,
                group: args.group,
                budget: args.budget,
                overlap: args.overlap,
                policy: case.policy.name(),
            },
            codec,
            prefetch: PrefetchFigures {
                pipeline: case.ahead != Ahead::Off,
                ahead: case.ahead,
                layer_compute_us: case.compute_us,
                cache_mib: case.cache_mib(),
                read_bps: self.limits.read_bps,
                read_iops: self.limits.read_iops,
                recall: figures.recall,
                wasted_share: figures.wasted_share,
            },
            speedup,
        })
    }
}

/// Measures, by policy, the reads of steps that do not compute: without a codec, then with every layer under it.
fn probe(prepared: &mut PreparedStore<'_>) -> Result<Vec<LayerReads>> {
    let args = prepared.args;
    let decode_bps = decode_bps(args.codec, args.group)?;
    let mut reads = |codec_share: f64| -> Result<Vec<(f64, f64)>> {
        let layout = prepared.write(codec_share)?;
        let read = |&policy: &DecodePolicy| {
            let name = policy.name();
            eprintln!("kvbench: reading to solve for the share: {name}, a share of {codec_share} under the codec");
            let (compute_us, steps, ahead, scorer) = (0, PROBE_STEPS, Ahead::On, None);
            let (layout, stored) = (&layout, prepared.tokens);
            let case = DecodeCase { args, stored, layout, steps, compute_us, policy, ahead, scorer };
            let figures = case.run(&prepared.path())?.steps;
            let layers = f64::from(args.layers);
            Ok((figures.bytes_read_per_step as f64 / layers, figures.io_ms / 1e3 / layers))
        };
        args.policy.iter().map(read).collect()
    };
    let (raw, coded) = (reads(0.0)?, reads(1.0)?);
    let both = raw.into_iter().zip(coded);
    let reads = both.map(|((layer_bytes, raw_s), (_, coded_s))| LayerReads { layer_bytes, raw_s, coded_s, decode_bps });
    Ok(reads.collect())
}

fn codec_layers(layout: &KvLayout) -> usize {
    (0..layout.layers()).filter(|at| layout.codecs(*at).is_ok_and(|codecs| codecs != [PlaneCodec::Raw; 2])).count()
}
