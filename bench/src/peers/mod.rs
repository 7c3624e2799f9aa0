//! `kvbench peers` measures the engine against what a user would pick instead, on the same blocks.
//!
//! 1. Every peer stores all blocks, in `--ingest-rounds` rounds. Each store is removed again but for the last round's.
//! 2. In each round of reads, every peer has a turn: batches of random blocks, each block at most once, after the page
//!    cache was emptied. The order of the peers rotates from round to round.
//! 3. Each turn is a process of its own, bound to its cores. All peers consume every byte by the same code, which also
//!    proves that the bytes are right.
//! 4. Figures are medians over the rounds. Ratios are taken within a round.
//!
//! Peers with synchronous reads have `--threads` threads per caller. Caches have 64 MiB, and nothing is compressed.

mod args;
mod peer;
mod result;
mod source;
mod stores;
mod turn;
mod workers;

pub(crate) use args::PeersArgs;

use crate::support::directory::{drop_caches, make_private, settle, work_directory};
use crate::support::report::print;
use anyhow::Result;
use peer::PeerName;
use result::{Measured, PeerTurns, results, table};
use std::path::{Path, PathBuf};
use turn::TurnPlan;

/// Runs `kvbench peers`, or one turn of it.
///
/// # Errors
/// An argument is out of its range, the device has no room, or the engine's own turn failed.
pub(crate) fn run(args: &PeersArgs) -> Result<()> {
    if let Some(turn) = &args.turn {
        let plan: TurnPlan = serde_json::from_str(turn)?;
        return print(true, "", &plan.run()?);
    }
    args.check()?;
    let folders = args.peers.iter().map(|peer| peer.folder()).collect::<std::collections::BTreeSet<_>>().len() as u64;
    // Stores that copy on write or merge need room beside their blocks.
    let dir = work_directory(&args.device, folders * (args.size.0 + args.size.0 / 4 + (768 << 20)))?;
    let mut peers = PeersRun { args, dir: dir.path().to_path_buf(), failed: Vec::new() };
    peers.ingest()?;
    for &cores in &args.cores {
        peers.reads(cores as usize)?;
    }
    Ok(())
}

/// A run over all peers.
struct PeersRun<'a> {
    args: &'a PeersArgs,
    dir: PathBuf,
    /// Peers whose store could not be written, with the reason.
    failed: Vec<(PeerName, String)>,
}

impl PeersRun<'_> {
    /// Stores all blocks with every peer that has a store of its own.
    fn ingest(&mut self) -> Result<()> {
        let writers: Vec<PeerName> =
            self.args.peers.iter().copied().filter(|peer| self.writer(*peer) == *peer).collect();
        let mut turns: Vec<PeerTurns> = writers.iter().map(|peer| no_turns(*peer)).collect();
        for round in 0..self.args.ingest_rounds as usize {
            for at in 0..turns.len() {
                let own = &mut turns[(at + round) % writers.len()];
                if own.skipped.is_some() {
                    continue;
                }
                let dir = self.dir.join(own.peer.folder());
                if dir.exists() {
                    std::fs::remove_dir_all(&dir)?;
                }
                make_private(&dir)?;
                settle(&self.dir)?;
                eprintln!("kvbench: {} stores {}, round {}", own.peer.text(), self.args.size, round + 1);
                match self.plan(own.peer, &dir, true, 2.min(cores_here())).take() {
                    Ok(turn) => own.turns.push(turn),
                    Err(e) => {
                        eprintln!("kvbench: {e:#}");
                        own.skipped = Some(format!("{e:#}"));
                        self.failed.push((own.peer, format!("{e:#}")));
                    }
                }
            }
        }
        self.report(&turns, "ingest", 2.min(cores_here()))
    }

    /// Reads with every peer whose store was written.
    fn reads(&self, cores: usize) -> Result<()> {
        let mut turns: Vec<PeerTurns> = self.args.peers.iter().map(|peer| no_turns(*peer)).collect();
        for own in &mut turns {
            let writer = self.writer(own.peer);
            own.skipped = self.failed.iter().find(|(peer, _)| *peer == writer).map(|(_, why)| why.clone());
        }
        for round in 0..self.args.rounds as usize {
            eprintln!("kvbench: reads on {cores} cores, round {} of {}", round + 1, self.args.rounds);
            for at in 0..turns.len() {
                let count = turns.len();
                let own = &mut turns[(at + round) % count];
                if own.skipped.is_some() {
                    continue;
                }
                settle(&self.dir)?;
                let plan = self.plan(own.peer, &self.dir.join(own.peer.folder()), false, cores);
                drop_caches(&self.dir)?;
                match (TurnPlan { seed: round as u64, ..plan }).take() {
                    Ok(turn) => own.turns.push(turn),
                    Err(e) => {
                        eprintln!("kvbench: {e:#}");
                        own.skipped = Some(format!("{e:#}"));
                    }
                }
            }
        }
        self.report(&turns, "read", cores)
    }

    /// Returns the peer that writes the store which `peer` reads: itself, if the other one is not measured.
    fn writer(&self, peer: PeerName) -> PeerName {
        let shared = self.args.peers.iter().copied().find(|other| other.folder() == peer.folder() && other.writes());
        shared.unwrap_or(peer)
    }

    fn plan(&self, peer: PeerName, dir: &Path, write: bool, cores: usize) -> TurnPlan {
        TurnPlan {
            peer,
            dir: dir.to_path_buf(),
            write,
            block: self.args.block.0 as usize,
            blocks: self.args.blocks(),
            batch: self.args.batch as usize,
            threads: self.args.threads as usize,
            cores,
            seconds: self.args.seconds,
            seed: 0,
        }
    }

    /// Prints the results of all peers. The engine's own failure is the failure of the run.
    fn report(&self, turns: &[PeerTurns], what: &'static str, cores: usize) -> Result<()> {
        let measured = Measured { what, cores, block: self.args.block.0, batch: self.args.batch };
        let results = results(turns, measured);
        if self.args.json {
            for result in &results {
                print(true, "", result)?;
            }
        } else {
            println!("{what}, {cores} cores, blocks of {}, batches of {}", self.args.block, self.args.batch);
            print!("{}", table(&results));
        }
        let engine = turns.iter().find(|own| own.peer == PeerName::Stratakv);
        match engine.and_then(|own| own.skipped.as_ref()) {
            Some(why) => anyhow::bail!("the engine failed: {why}"),
            None => Ok(()),
        }
    }
}

fn no_turns(peer: PeerName) -> PeerTurns {
    PeerTurns { peer, turns: Vec::new(), skipped: None }
}

fn cores_here() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}
