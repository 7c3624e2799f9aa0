//! What must be there: the history of commits and deletions, and how much of it is known durable.

use std::collections::{BTreeMap, HashMap};

/// What one commit of a sequence holds.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Version {
    pub(super) tokens: usize,
    pub(super) ids: usize,
    pub(super) state: Option<Vec<u8>>,
}

/// One sequence from creation to deletion, by its id.
#[derive(Clone, Debug, Default)]
pub(super) struct Life {
    pub(super) slot: usize,
    /// Per layer what its tokens hold.
    pub(super) layers: Vec<Vec<u64>>,
    pub(super) ids: Vec<u32>,
    pub(super) state: Option<Vec<u8>>,
    /// A commit at `None` that nothing has carried on yet.
    pub(super) owed: Option<Version>,
}

impl Life {
    pub(super) fn now(&self) -> Version {
        let tokens = self.layers.iter().map(Vec::len).min().unwrap_or(0);
        Version { tokens, ids: self.ids.len(), state: self.state.clone() }
    }

    /// Back to a committed version.
    pub(super) fn back_to(&mut self, version: &Version) {
        for layer in &mut self.layers {
            layer.truncate(version.tokens);
        }
        self.ids.truncate(version.ids);
        self.state.clone_from(&version.state);
        self.owed = None;
    }
}

/// An entry of the history.
#[derive(Clone, Debug)]
pub(super) enum Entry {
    Commit { id: u64, version: Version },
    Delete { id: u64 },
}

/// Committed sequences by slot: id and version.
pub(super) type Committed = BTreeMap<usize, (u64, Version)>;

#[derive(Default)]
pub(super) struct Model {
    /// At the start of the round.
    base: Committed,
    entries: Vec<Entry>,
    /// Entries below this are acknowledged durable.
    floor: usize,
    /// Where a durable commit may have ended, besides the floor.
    attempts: Vec<usize>,
    pub(super) lives: HashMap<u64, Life>,
    /// No id is given out twice.
    id_last: u64,
}

impl Model {
    /// Notes a new sequence.
    pub(super) fn born(&mut self, id: u64, slot: usize, layers: usize) -> Result<(), String> {
        if id <= self.id_last {
            return Err(format!("sequence id {id} was given out after {}", self.id_last));
        }
        self.id_last = id;
        self.lives.insert(id, Life { slot, layers: vec![Vec::new(); layers], ..Life::default() });
        Ok(())
    }

    /// Notes an entry that was handed over.
    pub(super) fn push(&mut self, entry: Entry) {
        self.entries.push(entry);
    }

    /// A sync of all entries so far was tried.
    pub(super) fn attempted(&mut self, acknowledged: bool) {
        self.attempts.push(self.entries.len());
        if acknowledged {
            self.floor = self.entries.len();
        }
    }

    fn state_at(&self, end: usize) -> Committed {
        let mut state = self.base.clone();
        for entry in &self.entries[..end] {
            match entry {
                Entry::Commit { id, version } => {
                    if let Some(life) = self.lives.get(id) {
                        state.insert(life.slot, (*id, version.clone()));
                    }
                }
                Entry::Delete { id } => state.retain(|_, (other, _)| other != id),
            }
        }
        state
    }

    /// What a running store shows.
    pub(super) fn visible(&self) -> Committed {
        self.state_at(self.entries.len())
    }

    /// Whether a sequence has a commit, deleted or not.
    pub(super) fn is_committed(&self, id: u64) -> bool {
        let in_entries = |entry: &Entry| matches!(entry, Entry::Commit { id: other, .. } if *other == id);
        self.base.values().any(|(other, _)| *other == id) || self.entries.iter().any(in_entries)
    }

    /// After a crash: the history goes on from `found`, which must be what some whole commit left behind the last one
    /// acknowledged. Gives how many entries were kept, and of how many in doubt.
    pub(super) fn recovered(&mut self, found: &Committed) -> Result<(usize, usize), String> {
        let mut ends: Vec<usize> = self.attempts.iter().copied().filter(|end| *end > self.floor).collect();
        ends.push(self.floor);
        let Some(end) = ends.into_iter().rev().find(|end| self.state_at(*end) == *found) else {
            let (floor, attempts) = (self.floor, &self.attempts);
            let wanted = self.state_at(floor);
            let entries = &self.entries[floor.min(self.entries.len())..];
            return Err(format!(
                "recovered {found:?}\n  acknowledged {wanted:?}\n  {floor} entries acknowledged, tried {attempts:?}, later {entries:?}"
            ));
        };
        let counts = (end - self.floor, self.entries.len() - self.floor);
        self.start_from(found.clone());
        Ok(counts)
    }

    fn start_from(&mut self, state: Committed) {
        self.lives.retain(|id, life| state.get(&life.slot).is_some_and(|(other, _)| other == id));
        for (id, version) in state.values() {
            if let Some(life) = self.lives.get_mut(id) {
                life.back_to(version);
            }
        }
        self.base = state;
        self.entries.clear();
        self.attempts.clear();
        self.floor = 0;
    }
}
