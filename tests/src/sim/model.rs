//! The model: which states a store may have, while it runs and after a crash.
//!
//! 1. The model logs commits and deletions in order, as [`ModelEntry`] values after the base state.
//! 2. `floor` counts the entries that the store acknowledged as durable. It never decreases within a round.
//! 3. Each sync is an [`Attempt`]: a crash may leave the state at its end. An attempt may also have evicted sequences.
//! 4. After a crash, [`Model::candidates`] lists the states that hold exactly the sequences found: an attempt at or
//!    after the floor, less expired and possibly evicted sequences.
//! 5. [`Model::continue_from`] makes the state that was found the base of the next round.
//!
//! A creation that was interrupted has no known id. The model gives it an id from [`UNKNOWN_ID`] on until the store
//! shows its own.

use super::case::Lifetime;
use super::content::Token;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::RangeInclusive;
use std::rc::Rc;

/// The first id for sequences that an interrupted operation may have made. Such an id is this constant plus the last id
/// known before; the store's own id is larger than that last id.
const UNKNOWN_ID: u64 = 1 << 63;

/// The content of a sequence at a commit.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Version {
    /// The tokens of each layer.
    pub(super) layers: Vec<Vec<Token>>,
    pub(super) ids: Vec<u32>,
    pub(super) state: Option<Vec<u8>>,
}

impl Version {
    /// Returns the number of tokens that all layers have.
    pub(super) fn tokens(&self) -> usize {
        self.layers.iter().map(Vec::len).min().unwrap_or(0)
    }

    /// Truncates every layer to `tokens` tokens. `group` is the number of tokens of a group.
    pub(super) fn cut(&mut self, tokens: usize, group: usize) {
        self.layers.iter_mut().for_each(|layer| Token::cut(layer, tokens, group));
    }
}

/// A sequence from its creation to its deletion.
#[derive(Clone, Debug, Default)]
pub(super) struct ModelSequence {
    pub(super) slot: usize,
    /// The content that its handle shows.
    pub(super) now: Version,
    /// The tokens and token ids of a commit at `Durability::None` that no later commit or close has written.
    pub(super) owed: Option<(usize, usize)>,
    pub(super) end: Lifetime,
    /// The earliest and the latest possible time of its creation.
    pub(super) created: (u64, u64),
    /// The earliest and the latest possible step of its last open, commit or close.
    pub(super) used: (u64, u64),
}

impl ModelSequence {
    /// Returns the content that a commit would hold now. `group` is the number of tokens of a group.
    pub(super) fn committed(&self, group: usize) -> Version {
        let mut version = self.now.clone();
        version.cut(version.tokens(), group);
        version
    }

    /// Resets the handle's content to a committed version.
    pub(super) fn back_to(&mut self, version: &Version) {
        self.now.clone_from(version);
        self.owed = None;
    }

    /// Returns whether the sequence may have expired at time `by`.
    fn may_be_over(&self, by: u64) -> bool {
        self.end.ttl > 0 && self.created.0 + self.end.ttl <= by
    }

    /// Returns whether the sequence has expired at time `by`, however late it was created.
    fn must_be_over(&self, by: u64) -> bool {
        self.end.ttl > 0 && self.created.1 + self.end.ttl <= by
    }
}

/// An entry of the history.
#[derive(Clone, Debug)]
enum ModelEntry {
    Commit { id: u64, version: Rc<Version> },
    Delete { id: u64 },
}

/// A sync that may have become durable.
#[derive(Clone, Debug)]
struct Attempt {
    end: usize,
    /// The sequences that it may have evicted.
    evicted: Vec<u64>,
}

/// CommittedVersions sequences by id.
pub(super) type CommittedVersions = BTreeMap<u64, Rc<Version>>;

/// A sequence that a store was found to hold.
pub(super) struct FoundSequence {
    pub(super) id: u64,
    pub(super) slot: usize,
    pub(super) tokens: usize,
    pub(super) ids: Vec<u32>,
    pub(super) state: Option<Vec<u8>>,
}

impl fmt::Display for FoundSequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, slot, tokens, ids, state } = self;
        let state = state.as_ref().map(Vec::len);
        write!(f, "{id} in slot {slot}: {tokens} tokens, {} ids, state {state:?}", ids.len())
    }
}

/// A state that the store may be in after a crash.
pub(super) struct Candidate {
    end: usize,
    /// The content that each found sequence must have.
    pub(super) versions: Vec<Rc<Version>>,
    /// The id of each found sequence in the model.
    ids: Vec<u64>,
}

#[derive(Default)]
pub(super) struct Model {
    /// The state at the start of the round.
    base: CommittedVersions,
    entries: Vec<ModelEntry>,
    /// The number of entries that are acknowledged as durable.
    floor: usize,
    attempts: Vec<Attempt>,
    pub(super) lives: HashMap<u64, ModelSequence>,
    /// The last id that the store assigned. Later ids must be larger.
    id_last: u64,
    /// The number of operations so far.
    pub(super) step: u64,
}

impl Model {
    /// Records a new sequence.
    pub(super) fn created(&mut self, id: u64, life: ModelSequence) -> Result<(), String> {
        if id <= self.id_last || id >= UNKNOWN_ID {
            return Err(format!("sequence id {id} was assigned after {}", self.id_last));
        }
        self.id_last = id;
        self.lives.insert(id, ModelSequence { used: (self.step, self.step), ..life });
        Ok(())
    }

    /// Records a sequence that may have been created, with its only commit.
    pub(super) fn maybe_created(&mut self, life: ModelSequence, version: Version) {
        let id = UNKNOWN_ID + self.id_last;
        self.lives.insert(id, life);
        self.commit(id, version);
    }

    /// Returns the id of a sequence in the model, once the store shows it as `id`. Replaces an unknown id by `id`.
    pub(super) fn resolve_id(&mut self, known: u64, id: u64) -> u64 {
        if known < UNKNOWN_ID || !self.is_later(id, known) {
            return known;
        }
        self.id_last = self.id_last.max(id);
        if let Some(life) = self.lives.remove(&known) {
            self.lives.insert(id, life);
        }
        for entry in &mut self.entries {
            match entry {
                ModelEntry::Commit { id: own, .. } | ModelEntry::Delete { id: own } if *own == known => *own = id,
                _ => {}
            }
        }
        id
    }

    /// Returns whether `id` may be the store's id of the sequence that the model knows as `unknown_id`.
    fn is_later(&self, id: u64, unknown_id: u64) -> bool {
        id > unknown_id - UNKNOWN_ID && !self.lives.contains_key(&id)
    }

    /// Records a commit that the store accepted.
    pub(super) fn commit(&mut self, id: u64, version: Version) {
        if let Some(life) = self.lives.get_mut(&id) {
            life.used = (self.step, self.step);
            life.owed = None;
        }
        self.entries.push(ModelEntry::Commit { id, version: Rc::new(version) });
    }

    /// Records that the handle of a sequence was dropped. If only a queued commit names the sequence, its last use may
    /// be that commit or now.
    pub(super) fn handle_dropped(&mut self, id: u64) {
        let known = self.state_at(self.floor).contains_key(&id);
        if let Some(life) = self.lives.get_mut(&id) {
            life.used = (if known { self.step } else { life.used.0 }, self.step);
        }
    }

    /// Records a deletion that the store accepted.
    pub(super) fn delete(&mut self, id: u64) {
        self.entries.push(ModelEntry::Delete { id });
    }

    /// Records a sync of all entries so far, and whether the store acknowledged it.
    pub(super) fn sync_attempted(&mut self, acknowledged: bool) {
        self.attempts.push(Attempt { end: self.entries.len(), evicted: Vec::new() });
        if acknowledged {
            self.floor = self.entries.len();
        }
    }

    /// Records that an interrupted operation may have evicted any evictable sequences without a handle. `open` are the
    /// sequences with a handle.
    pub(super) fn may_have_evicted(&mut self, open: &[u64]) {
        let all: Vec<u64> =
            self.visible().into_keys().filter(|id| !open.contains(id) && self.evictable(*id) > 0).collect();
        for some in 1..1_usize << all.len() {
            let evicted = all.iter().enumerate().filter(|(nth, _)| some >> nth & 1 == 1).map(|(_, id)| *id).collect();
            self.attempts.push(Attempt { end: self.entries.len(), evicted });
        }
    }

    fn evictable(&self, id: u64) -> u8 {
        self.lives.get(&id).map_or(0, |life| life.end.evictable)
    }

    /// Records the sequences that the store reported as gone, and checks that each was allowed to go. An element of
    /// `gone` is the id, whether it expired, and its tokens. `open` are the sequences with a handle.
    pub(super) fn evicted(&mut self, gone: &[(u64, bool, u64)], open: &[u64], now: u64) -> Result<(), String> {
        let visible = self.visible();
        let settled = self.state_at(self.floor);
        for (id, over, tokens) in gone {
            let (Some(life), Some(version)) = (self.lives.get(id), visible.get(id)) else {
                return Err(format!("sequence {id} was reported as evicted but does not exist"));
            };
            if open.contains(id) {
                return Err(format!("sequence {id} was evicted although it has a handle"));
            }
            if version.tokens() as u64 != *tokens {
                return Err(format!("sequence {id} was evicted with {tokens} tokens, not {}", version.tokens()));
            }
            if *over {
                if !life.may_be_over(now) {
                    return Err(format!("sequence {id} expired before its time"));
                }
                continue;
            }
            if life.end.evictable == 0 {
                return Err(format!("sequence {id} was evicted although it is not evictable"));
            }
            // A queued commit may take effect before or after the choice, so only settled sequences are compared.
            let stays = |other: &u64| {
                let same = settled.get(other).is_some_and(|version| visible.get(other) == Some(version));
                same && !open.contains(other) && !gone.iter().any(|(gone, ..)| gone == other)
            };
            let sooner = |other: &ModelSequence| {
                let (own, theirs) = (life.end.evictable, other.end.evictable);
                theirs > own || (theirs == own && other.used.1 < life.used.0 && settled.get(id) == Some(version))
            };
            if let Some(other) = visible.keys().filter(|id| stays(id)).find(|id| self.lives.get(id).is_some_and(sooner))
            {
                return Err(format!("sequence {id} was evicted before sequence {other}"));
            }
        }
        gone.iter().for_each(|(id, ..)| self.delete(*id));
        if !gone.is_empty() {
            self.sync_attempted(true);
        }
        Ok(())
    }

    /// Returns a sequence that should have expired by `now` but is still there after a maintenance run.
    pub(super) fn overdue(&self, open: &[u64], now: u64) -> Option<u64> {
        let visible = self.visible();
        let settled = self.state_at(self.floor);
        let over = |id: &u64| !open.contains(id) && self.lives.get(id).is_some_and(|life| life.must_be_over(now));
        settled.into_keys().find(|id| visible.contains_key(id) && over(id))
    }

    fn state_at(&self, end: usize) -> CommittedVersions {
        let mut state = self.base.clone();
        for entry in &self.entries[..end] {
            match entry {
                ModelEntry::Commit { id, version } => {
                    state.insert(*id, Rc::clone(version));
                }
                ModelEntry::Delete { id } => {
                    state.remove(id);
                }
            }
        }
        state
    }

    /// Returns the state that a running store shows.
    pub(super) fn visible(&self) -> CommittedVersions {
        self.state_at(self.entries.len())
    }

    /// Returns the sequence that a running store has in a slot.
    pub(super) fn in_slot(&self, slot: usize) -> Option<(u64, Rc<Version>)> {
        let here = |(id, _): &(u64, Rc<Version>)| self.lives.get(id).is_some_and(|life| life.slot == slot);
        self.visible().into_iter().find(here)
    }

    /// Returns whether a sequence was ever committed, even if it was deleted since.
    pub(super) fn is_committed(&self, id: u64) -> bool {
        let in_entries = |entry: &ModelEntry| matches!(entry, ModelEntry::Commit { id: other, .. } if *other == id);
        self.base.contains_key(&id) || self.entries.iter().any(in_entries)
    }

    /// Returns the states that a whole sync left, at or after the last acknowledged one, and that hold exactly the
    /// sequences `found`. The latest state is first. `expires` is the time of a writable open, which removes expired
    /// sequences.
    pub(super) fn candidates(
        &self,
        found: &[FoundSequence],
        expires: Option<RangeInclusive<u64>>,
        now: u64,
    ) -> Vec<Candidate> {
        let at_all =
            |attempt: &&Attempt| attempt.end > self.floor || (attempt.end == self.floor && !attempt.evicted.is_empty());
        let floor = Attempt { end: self.floor, evicted: Vec::new() };
        let attempts = self.attempts.iter().filter(at_all).rev().chain([&floor]);
        attempts.filter_map(|attempt| self.candidate(attempt, found, expires.as_ref(), now)).collect()
    }

    fn candidate(
        &self,
        attempt: &Attempt,
        found: &[FoundSequence],
        expires: Option<&RangeInclusive<u64>>,
        now: u64,
    ) -> Option<Candidate> {
        let mut state = self.state_at(attempt.end);
        state.retain(|id, _| !attempt.evicted.contains(id));
        let (mut ids, mut versions) = (Vec::new(), Vec::new());
        for found in found {
            let here = |id: &u64| self.lives.get(id).is_some_and(|life| life.slot == found.slot);
            let unknown =
                || state.keys().copied().find(|id| *id >= UNKNOWN_ID && self.is_later(found.id, *id) && here(id));
            let id = state.contains_key(&found.id).then_some(found.id).or_else(unknown).filter(here)?;
            if expires.is_some_and(|at| self.lives.get(&id).is_some_and(|life| life.must_be_over(*at.start()))) {
                return None;
            }
            let version = state.remove(&id)?;
            let same = (version.tokens(), &version.ids, &version.state) == (found.tokens, &found.ids, &found.state);
            if !same {
                return None;
            }
            ids.push(id);
            versions.push(version);
        }
        let over = |id: &u64| self.lives.get(id).is_some_and(|life| life.may_be_over(now));
        state.keys().all(over).then_some(Candidate { end: attempt.end, versions, ids })
    }

    /// Describes the history for a failure message.
    pub(super) fn describe(&self) -> String {
        let short = |version: &Version| {
            format!(
                "{} tokens, {} ids, state {:?}",
                version.tokens(),
                version.ids.len(),
                version.state.as_ref().map(Vec::len)
            )
        };
        let entry = |entry: &ModelEntry| match entry {
            ModelEntry::Commit { id, version } => format!("commit of {id}: {}", short(version)),
            ModelEntry::Delete { id } => format!("deletion of {id}"),
        };
        let floor: Vec<String> =
            self.state_at(self.floor).iter().map(|(id, version)| format!("{id}: {}", short(version))).collect();
        let later: Vec<String> = self.entries[self.floor..].iter().map(entry).collect();
        format!("acknowledged {floor:?}\n  {} entries, later {later:?}\n  tried {:?}", self.floor, self.attempts)
    }

    /// Makes the state found after a crash the base of the next round. Returns how many unacknowledged entries were
    /// kept and how many there were.
    pub(super) fn continue_from(&mut self, found: &[FoundSequence], candidate: &Candidate) -> (usize, usize) {
        let counts = (candidate.end - self.floor.min(candidate.end), self.entries.len() - self.floor);
        self.base.clear();
        let mut lives = HashMap::new();
        for ((found, id), version) in found.iter().zip(&candidate.ids).zip(&candidate.versions) {
            let mut life = self.lives.remove(id).unwrap_or_default();
            life.back_to(version);
            life.used = (self.step, self.step);
            self.id_last = self.id_last.max(found.id);
            lives.insert(found.id, life);
            self.base.insert(found.id, Rc::clone(version));
        }
        self.lives = lives;
        self.entries.clear();
        self.attempts.clear();
        self.floor = 0;
        counts
    }
}
