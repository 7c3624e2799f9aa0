//! The work that crash tests interrupt: sequences grow, are committed, cut, forked, carried to another key, closed and
//! deleted on a store with small segments.
//!
//! - Half of the sequences have groups under a codec. A third of the handles stream all summaries, and a third only
//!   min/max records.
//! - On several devices, sequences have one or two copies.
//! - In a store with a capacity, sequences that no handle holds may be evicted.

use super::clusters;
use super::content::{Content, is_encoded, layout};
use super::ledger::WorkerReport;
use crate::disk::small_options;
use crate::rng::Rng;
use std::path::PathBuf;
use std::time::Duration;
use stratakv::export::ImportOptions;
use stratakv::{
    ByteSize, CreateOptions, Durability, ErrorKind, OpenSequence, Result, Sequence, Store, StoredSummary,
    SummaryResidency,
};

const LIVE_MAX: usize = 4;
/// A sequence with more tokens than this is deleted when it is next chosen.
const TOKENS_MAX: usize = 1500;
/// The capacity of each device of a limited store. Manifests and reserves take half of it. [`LIVE_MAX`] long sequences
/// fit into the rest, and few more.
const CAPACITY: ByteSize = ByteSize::mib(24);
/// The sequences of a store without a capacity, open or not.
const SEQUENCES_MAX: usize = 12;

/// The settings of a worker.
#[derive(Clone, Debug)]
pub struct Job {
    /// The device directories.
    pub dirs: Vec<PathBuf>,
    /// The seed of everything the worker does.
    pub seed: u64,
    /// The first name for new sequences.
    pub next: u64,
    /// True if the store has a capacity, so that it evicts sequences.
    pub limited: bool,
}

pub(super) fn open(dirs: &[PathBuf], limited: bool) -> Result<Store> {
    let capacity = limited.then(|| ByteSize(CAPACITY.bytes() * dirs.len() as u64));
    small_options(dirs).lazy_delay(Duration::from_millis(7)).capacity(capacity).open()
}

pub(super) fn key(name: u64) -> String {
    format!("n{name}")
}

pub(super) fn name(key: &str) -> Option<u64> {
    key.strip_prefix('n').and_then(|name| name.parse().ok())
}

/// An open sequence of the worker.
struct Live {
    name: u64,
    sequence: Sequence,
    content: Content,
}

/// Works until `stop` returns true. Reports before and after every operation that is to be durable.
///
/// # Errors
/// An operation of the store fails.
pub fn work(job: &Job, mut stop: impl FnMut() -> bool, report: impl FnMut(WorkerReport)) -> Result<()> {
    let mut worker = Worker::start(job, report)?;
    while !stop() {
        match worker.step() {
            // A limited store has no space for what is open. Closed sequences can be evicted.
            Err(e) if job.limited && e.kind() == ErrorKind::NoSpace => worker.close_all(),
            done => done?,
        }
    }
    Ok(())
}

struct Worker<R> {
    store: Store,
    rng: Rng,
    next: u64,
    limited: bool,
    devices: usize,
    live: Vec<Live>,
    report: R,
}

impl<R: FnMut(WorkerReport)> Worker<R> {
    /// Opens the store, and sequences of it.
    fn start(job: &Job, report: R) -> Result<Self> {
        let store = open(&job.dirs, job.limited)?;
        let (next, limited, devices) = (job.next, job.limited, job.dirs.len());
        let mut worker = Self { store, rng: Rng(job.seed), next, limited, devices, live: Vec::new(), report };
        for _ in 0..LIVE_MAX {
            worker.open_one()?;
        }
        (worker.report)(WorkerReport::Ready);
        Ok(worker)
    }

    fn step(&mut self) -> Result<()> {
        if self.live.is_empty() || (self.live.len() < LIVE_MAX && self.rng.below(12) == 0) {
            match self.rng.below(2) {
                0 => self.open_one()?,
                _ => self.create()?,
            }
        }
        if self.live.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.live.len());
        if self.live[at].content.tokens > TOKENS_MAX || self.live.len() > 1 && self.rng.below(15) == 0 {
            return self.delete(at);
        }
        match self.rng.below(24) {
            0 => self.fork(at),
            1 => self.carry(at),
            2 => self.close(at),
            3 | 4 => self.cut(at),
            _ => self.grow(at),
        }
    }

    fn is_full(&self) -> bool {
        self.live.len() >= LIVE_MAX || !self.limited && self.store.sequences().len() >= SEQUENCES_MAX
    }

    /// Returns a name for a new sequence, of the same kind as `like`.
    fn new_name(&mut self, like: Option<u64>) -> u64 {
        while like.is_some_and(|like| is_encoded(like) != is_encoded(self.next)) {
            self.next += 1;
        }
        self.next += 1;
        self.next - 1
    }

    fn residency(&mut self) -> SummaryResidency {
        match self.rng.below(3) {
            0 => SummaryResidency::Resident,
            1 => SummaryResidency::Streamed,
            _ => SummaryResidency::BoundsStreamed,
        }
    }

    fn copies(&mut self) -> u8 {
        1 + self.rng.below(self.devices.min(2)) as u8
    }

    /// Opens a sequence that no handle holds, if there is one.
    fn open_one(&mut self) -> Result<()> {
        let names: Vec<u64> = self.store.sequences().iter().filter_map(|info| name(&info.key)).collect();
        let closed: Vec<u64> =
            names.into_iter().filter(|name| self.live.iter().all(|live| live.name != *name)).collect();
        if closed.is_empty() {
            return Ok(());
        }
        let name = closed[self.rng.below(closed.len())];
        let options = OpenSequence::new().summary_residency(self.residency());
        let sequence = match self.store.open_sequence(&key(name), options) {
            // It was evicted, or a lazy deletion is on its way.
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            opened => opened?,
        };
        (self.report)(WorkerReport::Opened(name));
        let content = sequence.caller_state().and_then(Content::decode);
        let content = content.expect("every commit carries a content");
        self.live.push(Live { name, sequence, content });
        Ok(())
    }

    fn create(&mut self) -> Result<()> {
        if self.is_full() {
            return self.open_one();
        }
        let name = self.new_name(None);
        let (residency, copies) = (self.residency(), self.copies());
        let options = CreateOptions::new().key(key(name)).store_summary(StoredSummary::MinMax);
        let options = options.summary_residency(residency).copies(copies).evictable(u8::from(self.limited));
        let sequence = self.store.create_sequence(&layout(name)?, options)?;
        self.live.push(Live { name, sequence, content: Content::new(name) });
        Ok(())
    }

    fn grow(&mut self, at: usize) -> Result<()> {
        let Live { name, sequence, content } = &mut self.live[at];
        for step in 0..1 + self.rng.below(3) {
            let long = self.rng.below(4) == 0;
            let count = if long { 30 + self.rng.below(300) } else { 1 + self.rng.below(8) };
            content.append(*name, sequence, count, step)?;
        }
        self.commit(at, None)?;
        match self.rng.below(9) {
            0 | 1 => clusters::store(&mut self.live[at].sequence),
            2 => self.live[at].sequence.drop_stored_clusters(),
            _ => Ok(()),
        }
    }

    fn commit(&mut self, at: usize, level: Option<Durability>) -> Result<()> {
        let levels = [Durability::Sync, Durability::Sync, Durability::Lazy, Durability::None];
        let level = level.unwrap_or_else(|| levels[self.rng.below(4)]);
        let Live { name, sequence, content } = &mut self.live[at];
        content.version = self.rng.next_u64();
        (self.report)(WorkerReport::Committing(*name, content.version));
        sequence.commit_with(&content.encode(), level)?;
        if level == Durability::Sync {
            (self.report)(WorkerReport::Committed(*name, content.version));
        }
        Ok(())
    }

    /// Cuts a sequence, often below its last commit, and commits the cut at once or after tokens that replace others.
    fn cut(&mut self, at: usize) -> Result<()> {
        let Live { sequence, content, .. } = &mut self.live[at];
        if content.tokens == 0 || !content.may_be_cut() {
            return self.grow(at);
        }
        let most = if self.rng.below(4) == 0 { content.tokens } else { content.tokens.min(40) };
        let tokens = content.tokens - self.rng.below(most + 1);
        sequence.truncate(tokens as u64)?;
        content.cut(tokens, self.rng.next_u64());
        if self.rng.below(3) == 0 { self.commit(at, None) } else { self.grow(at) }
    }

    /// Forks a sequence with what it has not committed yet. The fork is durable with its first commit.
    fn fork(&mut self, at: usize) -> Result<()> {
        if self.is_full() {
            return self.grow(at);
        }
        let name = self.new_name(Some(self.live[at].name));
        let Live { sequence, content, .. } = &mut self.live[at];
        let child = Live { name, sequence: sequence.fork_as(&key(name))?, content: content.clone() };
        self.live.push(child);
        self.grow(self.live.len() - 1)
    }

    /// Exports a sequence and imports it under another key.
    fn carry(&mut self, at: usize) -> Result<()> {
        self.commit(at, Some(Durability::Sync))?;
        if self.is_full() {
            return Ok(());
        }
        let name = self.new_name(Some(self.live[at].name));
        let copies = self.copies();
        let Live { sequence, content, .. } = &mut self.live[at];
        let content = content.clone();
        let mut file = Vec::new();
        sequence.export(&mut file)?;
        (self.report)(WorkerReport::Committing(name, content.version));
        let options = ImportOptions::new().key(key(name)).copies(copies).evictable(u8::from(self.limited));
        let sequence = self.store.import(&file[..], &layout(name)?, options)?;
        (self.report)(WorkerReport::Committed(name, content.version));
        self.live.push(Live { name, sequence, content });
        Ok(())
    }

    /// Closes a sequence after a durable commit, so that it can be evicted.
    fn close(&mut self, at: usize) -> Result<()> {
        self.commit(at, Some(Durability::Sync))?;
        let name = self.live[at].name;
        (self.report)(WorkerReport::Closing(name));
        drop(self.live.swap_remove(at));
        Ok(())
    }

    fn close_all(&mut self) {
        for Live { name, .. } in self.live.drain(..) {
            (self.report)(WorkerReport::Closing(name));
        }
    }

    fn delete(&mut self, at: usize) -> Result<()> {
        let Live { name, sequence, .. } = self.live.swap_remove(at);
        (self.report)(WorkerReport::Deleting(name));
        let level = [Durability::Sync, Durability::Lazy][self.rng.below(2)];
        sequence.delete(level)?;
        if level == Durability::Sync {
            (self.report)(WorkerReport::Deleted(name));
        }
        Ok(())
    }
}
