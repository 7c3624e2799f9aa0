//! The ledger of a worker: the commits and deletions that it asked for, and those that the store acknowledged.

use super::content::Content;
use super::{clusters, summaries, worker};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use stratakv::{ErrorKind, OpenSequence, Store};

/// A report of a worker, written before or after an operation on the sequence of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerReport {
    /// The worker is about to commit this version.
    Committing(u64, u64),
    /// The commit of this version is durable.
    Committed(u64, u64),
    /// The worker is about to delete the sequence.
    Deleting(u64),
    /// The deletion is durable.
    Deleted(u64),
    /// The sequence is open, so it cannot be evicted.
    Opened(u64),
    /// The worker is about to close the sequence, so that it can be evicted.
    Closing(u64),
    /// The store is open.
    Ready,
}

impl fmt::Display for WorkerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Committing(name, version) => write!(f, "!committing {name} {version}."),
            Self::Committed(name, version) => write!(f, "!committed {name} {version}."),
            Self::Deleting(name) => write!(f, "!deleting {name}."),
            Self::Deleted(name) => write!(f, "!deleted {name}."),
            Self::Opened(name) => write!(f, "!opened {name}."),
            Self::Closing(name) => write!(f, "!closing {name}."),
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
            "committing" => Self::Committing(number()?, number()?),
            "committed" => Self::Committed(number()?, number()?),
            "deleting" => Self::Deleting(number()?),
            "deleted" => Self::Deleted(number()?),
            "opened" => Self::Opened(number()?),
            "closing" => Self::Closing(number()?),
            "ready" => Self::Ready,
            _ => return Err(()),
        })
    }
}

/// The reports about one sequence.
#[derive(Clone, Debug, Default)]
pub struct LedgerEntry {
    /// The versions that commits asked for since the last check, in order. The first is what the last check found.
    asked: Vec<u64>,
    /// The last acknowledged durable commit, as an index of `asked`.
    durable: Option<usize>,
    delete_asked: bool,
    deleted: bool,
    /// True if a handle holds it. A store with a capacity may evict the others.
    open: bool,
}

/// Adds a report to the ledger.
pub fn apply_report(known: &mut BTreeMap<u64, LedgerEntry>, line: WorkerReport) {
    match line {
        WorkerReport::Committing(name, version) => {
            let entry = known.entry(name).or_default();
            entry.open = true;
            entry.asked.push(version);
        }
        WorkerReport::Committed(name, version) => {
            let entry = known.entry(name).or_default();
            entry.durable = entry.asked.iter().rposition(|asked| *asked == version);
        }
        WorkerReport::Deleting(name) => known.entry(name).or_default().delete_asked = true,
        WorkerReport::Deleted(name) => known.entry(name).or_default().deleted = true,
        WorkerReport::Opened(name) => known.entry(name).or_default().open = true,
        WorkerReport::Closing(name) => known.entry(name).or_default().open = false,
        WorkerReport::Ready => {}
    }
}

/// Compares a store with the ledger, then replaces the ledger by what the store holds. A `limited` store may have
/// evicted sequences that were not open.
///
/// # Panics
/// Something acknowledged is missing, or the store holds something that the worker did not ask for.
pub fn check_store(store: &Store, known: &mut BTreeMap<u64, LedgerEntry>, limited: bool) {
    for info in &store.sequences() {
        let name = worker::name(&info.key).expect("a key of the worker");
        assert!(known.contains_key(&name), "{name} was never committed");
    }
    for (name, known) in known.iter_mut() {
        let mut sequence = match store.open_sequence(&worker::key(*name), OpenSequence::new()) {
            Ok(sequence) => sequence,
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::NotFound, "{name}: {e:?}");
                let evicted = limited && !known.open;
                let may_miss = known.durable.is_none() || known.delete_asked || known.deleted || evicted;
                assert!(may_miss, "{name} is lost, {known:?}");
                // A sequence that is missing once must not reappear.
                known.deleted = true;
                continue;
            }
        };
        assert!(!known.deleted, "{name} was deleted and is back");
        let state = sequence.caller_state().expect("every commit carries a state");
        let content = Content::decode(state).expect("the state of a worker");
        let found = known.asked.iter().rposition(|asked| *asked == content.version);
        let found =
            found.unwrap_or_else(|| panic!("{name} has version {}, which no commit asked for", content.version));
        assert!(Some(found) >= known.durable, "{name} has an older version than its last durable commit, {known:?}");
        content.check(*name, store, &sequence);
        clusters::check(store, &mut sequence);
        let chosen = summaries::chosen(&mut sequence);
        drop(sequence);
        summaries::check_streamed(store, *name, &chosen);
        // Later checks must find at least this version.
        *known = LedgerEntry { asked: vec![content.version], durable: Some(0), ..LedgerEntry::default() };
    }
}
