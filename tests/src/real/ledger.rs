//! What a process that was cut short had been told: the commits and deletions it asked for, and those acknowledged.

use super::worker;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use stratakv::{ErrorKind, OpenSequence, Store};

/// One thing that a worker reports, before or after it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// A commit of this sequence at this length is asked for.
    Committing(u64, usize),
    /// It is durable.
    Committed(u64, usize),
    /// A deletion is asked for.
    Deleting(u64),
    /// It is durable.
    Deleted(u64),
    /// The store is open.
    Ready,
}

impl fmt::Display for Line {
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

impl FromStr for Line {
    type Err = ();

    /// The full stop tells a whole line from one that was cut short.
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

/// What is known of a sequence.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Tokens that were acknowledged durably.
    durable: usize,
    /// Lengths that some commit was asked for, since it was last seen.
    asked: Vec<usize>,
    delete_asked: bool,
    deleted: bool,
}

/// Takes a report in.
pub fn learn(known: &mut BTreeMap<u64, Known>, line: Line) {
    match line {
        Line::Committing(name, tokens) => known.entry(name).or_default().asked.push(tokens),
        Line::Committed(name, tokens) => known.entry(name).or_default().durable = tokens,
        Line::Deleting(name) => known.entry(name).or_default().delete_asked = true,
        Line::Deleted(name) => known.entry(name).or_default().deleted = true,
        Line::Ready => {}
    }
}

/// Holds a store against what is known, and learns what it holds.
///
/// # Panics
/// Something acknowledged is missing, or something is there that nobody asked for.
pub fn check_store(store: &Store, known: &mut BTreeMap<u64, Known>) {
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
                // What is gone once never comes back.
                known.deleted = true;
                continue;
            }
        };
        assert!(!known.deleted, "{name} was deleted and is back");
        let tokens = worker::verify(store, &sequence, *name);
        assert!(tokens >= known.durable, "{name} has {tokens} tokens of {}", known.durable);
        assert!(known.asked.contains(&tokens), "{name} has {tokens} tokens, which no commit asked for");
        // What was found once stays.
        *known = Known { durable: tokens, asked: vec![tokens], ..Known::default() };
    }
}
