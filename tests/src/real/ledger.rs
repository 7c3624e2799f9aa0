//! The ledger of a worker: the commits and deletions that it asked for, and those that the store acknowledged.

use super::worker;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use stratakv::{ErrorKind, OpenSequence, Store};

/// A report of a worker, written before or after an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerReport {
    /// The worker is about to commit this sequence at this length.
    Committing(u64, usize),
    /// The commit is durable.
    Committed(u64, usize),
    /// The worker is about to delete this sequence.
    Deleting(u64),
    /// The deletion is durable.
    Deleted(u64),
    /// The store is open.
    Ready,
}

impl fmt::Display for WorkerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Committing(name, tokens) => write!(f, "!committing {name} {tokens}."),
            Self::Committed(name, tokens) => write!(f, "!committed {name} {tokens}."),
            Self::Deleting(name) => write!(f, "!deleting {name}."),
            Self::Deleted(name) => write!(f, "!deleted {name}."),
            Self::Ready => write!(f, "!ready."),
        }
    }
}

impl FromStr for WorkerReport {
    type Err = ();

    /// Parses a line of the worker's output. The full stop at its end distinguishes a whole line from a torn one.
    fn from_str(line: &str) -> Result<Self, ()> {
        let line = line.strip_prefix('!').and_then(|line| line.strip_suffix('.')).ok_or(())?;
        let mut words = line.split(' ');
        let what = words.next().ok_or(())?;
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok()).ok_or(());
        Ok(match what {
            "committing" => Self::Committing(number()?, number()? as usize),
            "committed" => Self::Committed(number()?, number()? as usize),
            "deleting" => Self::Deleting(number()?),
            "deleted" => Self::Deleted(number()?),
            "ready" => Self::Ready,
            _ => return Err(()),
        })
    }
}

/// The reports about one sequence.
#[derive(Clone, Debug, Default)]
pub struct LedgerEntry {
    /// The tokens of the last acknowledged durable commit.
    durable: usize,
    /// The lengths that commits asked for since the last check.
    asked: Vec<usize>,
    delete_asked: bool,
    deleted: bool,
}

/// Adds a report to the ledger.
pub fn apply_report(known: &mut BTreeMap<u64, LedgerEntry>, line: WorkerReport) {
    match line {
        WorkerReport::Committing(name, tokens) => known.entry(name).or_default().asked.push(tokens),
        WorkerReport::Committed(name, tokens) => known.entry(name).or_default().durable = tokens,
        WorkerReport::Deleting(name) => known.entry(name).or_default().delete_asked = true,
        WorkerReport::Deleted(name) => known.entry(name).or_default().deleted = true,
        WorkerReport::Ready => {}
    }
}

/// Compares a store with the ledger, then replaces the ledger by what the store holds.
///
/// # Panics
/// Something acknowledged is missing, or the store holds something that the worker did not ask for.
pub fn check_store(store: &Store, known: &mut BTreeMap<u64, LedgerEntry>) {
    for info in &store.sequences() {
        let name = worker::name(&info.key).expect("a key of the worker");
        assert!(known.contains_key(&name), "{name} was never committed");
    }
    for (name, known) in known.iter_mut() {
        let sequence = match store.open_sequence(&worker::key(*name), OpenSequence::new()) {
            Ok(sequence) => sequence,
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::NotFound, "{name}: {e:?}");
                assert!(known.durable == 0 || known.delete_asked || known.deleted, "{name} is lost, {known:?}");
                // A sequence that is missing once must not reappear.
                known.deleted = true;
                continue;
            }
        };
        assert!(!known.deleted, "{name} was deleted and is back");
        let tokens = worker::verify(store, &sequence, *name);
        assert!(tokens >= known.durable, "{name} has {tokens} tokens of {}", known.durable);
        assert!(known.asked.contains(&tokens), "{name} has {tokens} tokens, which no commit asked for");
        // Later checks must find at least this length.
        *known = LedgerEntry { durable: tokens, asked: vec![tokens], ..LedgerEntry::default() };
    }
}
