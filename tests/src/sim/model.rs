//! What must be there: the history of commits and deletions, and how much of it is known durable.

use super::case::End;
use super::content::Token;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::RangeInclusive;
use std::rc::Rc;

/// Ids from here on stand for sequences that an operation cut short may have made: nobody was told theirs, which is
/// above the last one told before.
const UNTOLD: u64 = 1 << 63;

/// What a sequence holds with a commit.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Version {
    /// Per layer what its tokens hold.
    pub(super) layers: Vec<Vec<Token>>,
    pub(super) ids: Vec<u32>,
    pub(super) state: Option<Vec<u8>>,
}

impl Version {
    /// Tokens that all layers have.
    pub(super) fn tokens(&self) -> usize {
        self.layers.iter().map(Vec::len).min().unwrap_or(0)
    }

    /// Keeps so many tokens of every layer, whose groups have `group` tokens.
    pub(super) fn cut(&mut self, tokens: usize, group: usize) {
        self.layers.iter_mut().for_each(|layer| Token::cut(layer, tokens, group));
    }
}

/// One sequence from creation to deletion, by its id.
#[derive(Clone, Debug, Default)]
pub(super) struct Life {
    pub(super) slot: usize,
    /// As its handle has it.
    pub(super) now: Version,
    /// Tokens and token ids of a commit at `None` that nothing has carried on yet.
    pub(super) owed: Option<(usize, usize)>,
    pub(super) end: End,
    /// When it was created, as far as that is known.
    pub(super) created: (u64, u64),
    /// The step of its last opening, commit or closing, at the earliest and at the latest.
    pub(super) used: (u64, u64),
}

impl Life {
    /// What a commit of it now holds, in groups of `group` tokens.
    pub(super) fn committed(&self, group: usize) -> Version {
        let mut version = self.now.clone();
        version.cut(version.tokens(), group);
        version
    }

    /// Back to a committed version.
    pub(super) fn back_to(&mut self, version: &Version) {
        self.now.clone_from(version);
        self.owed = None;
    }

    /// What is left of its time by then at the latest, or at the earliest, is nothing.
    fn may_be_over(&self, by: u64) -> bool {
        self.end.ttl > 0 && self.created.0 + self.end.ttl <= by
    }

    fn must_be_over(&self, by: u64) -> bool {
        self.end.ttl > 0 && self.created.1 + self.end.ttl <= by
    }
}

/// An entry of the history.
#[derive(Clone, Debug)]
enum Entry {
    Commit { id: u64, version: Rc<Version> },
    Delete { id: u64 },
}

/// Where a durable commit may have ended.
#[derive(Clone, Debug)]
struct Attempt {
    end: usize,
    /// Sequences that it may have evicted besides.
    evicted: Vec<u64>,
}

/// Committed sequences by id.
pub(super) type Committed = BTreeMap<u64, Rc<Version>>;

/// A sequence as a store was found to have it.
pub(super) struct Found {
    pub(super) id: u64,
    pub(super) slot: usize,
    pub(super) tokens: usize,
    pub(super) ids: Vec<u32>,
    pub(super) state: Option<Vec<u8>>,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, slot, tokens, ids, state } = self;
        let state = state.as_ref().map(Vec::len);
        write!(f, "{id} in slot {slot}: {tokens} tokens, {} ids, state {state:?}", ids.len())
    }
}

/// A state that the store may be in after a crash.
pub(super) struct Candidate {
    end: usize,
    /// What each sequence that was found must hold.
    pub(super) versions: Vec<Rc<Version>>,
    /// Its id in the model.
    ids: Vec<u64>,
}

#[derive(Default)]
pub(super) struct Model {
    /// At the start of the round.
    base: Committed,
    entries: Vec<Entry>,
    /// Entries below this are acknowledged durable.
    floor: usize,
    attempts: Vec<Attempt>,
    pub(super) lives: HashMap<u64, Life>,
    /// No id is given out twice.
    id_last: u64,
    /// Counts steps.
    pub(super) step: u64,
}

impl Model {
    /// Notes a new sequence.
    pub(super) fn born(&mut self, id: u64, life: Life) -> Result<(), String> {
        if id <= self.id_last || id >= UNTOLD {
            return Err(format!("sequence id {id} was given out after {}", self.id_last));
        }
        self.id_last = id;
        self.lives.insert(id, Life { used: (self.step, self.step), ..life });
        Ok(())
    }

    /// Notes a sequence that may have been made, with its only commit.
    pub(super) fn may_be_born(&mut self, life: Life, version: Version) {
        let id = UNTOLD + self.id_last;
        self.lives.insert(id, life);
        self.commit(id, version);
    }

    /// The id under which a sequence is known, once its own is: `id`.
    pub(super) fn told(&mut self, known: u64, id: u64) -> u64 {
        if known < UNTOLD || !self.is_later(id, known) {
            return known;
        }
        self.id_last = self.id_last.max(id);
        if let Some(life) = self.lives.remove(&known) {
            self.lives.insert(id, life);
        }
        for entry in &mut self.entries {
            match entry {
                Entry::Commit { id: own, .. } | Entry::Delete { id: own } if *own == known => *own = id,
                _ => {}
            }
        }
        id
    }

    /// Whether an id may be that of a sequence whose own was not told.
    fn is_later(&self, id: u64, untold: u64) -> bool {
        id > untold - UNTOLD && !self.lives.contains_key(&id)
    }

    /// Notes a commit that was handed over.
    pub(super) fn commit(&mut self, id: u64, version: Version) {
        if let Some(life) = self.lives.get_mut(&id) {
            life.used = (self.step, self.step);
            life.owed = None;
        }
        self.entries.push(Entry::Commit { id, version: Rc::new(version) });
    }

    /// Notes that the handle of a sequence went. One that only a queued commit names counts from that.
    pub(super) fn let_go(&mut self, id: u64) {
        let known = self.state_at(self.floor).contains_key(&id);
        if let Some(life) = self.lives.get_mut(&id) {
            life.used = (if known { self.step } else { life.used.0 }, self.step);
        }
    }

    /// Notes a deletion that was handed over.
    pub(super) fn delete(&mut self, id: u64) {
        self.entries.push(Entry::Delete { id });
    }

    /// A sync of all entries so far was tried.
    pub(super) fn attempted(&mut self, acknowledged: bool) {
        self.attempts.push(Attempt { end: self.entries.len(), evicted: Vec::new() });
        if acknowledged {
            self.floor = self.entries.len();
        }
    }

    /// An operation that may evict was cut short: any of what may go, and nobody has `open`, may be gone.
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

    /// Notes that the store said it let these go, `over` because their time was over, while the handles of `open` were
    /// there.
    pub(super) fn went(&mut self, gone: &[(u64, bool, u64)], open: &[u64], now: u64) -> Result<(), String> {
        let visible = self.visible();
        let settled = self.state_at(self.floor);
        for (id, over, tokens) in gone {
            let (Some(life), Some(version)) = (self.lives.get(id), visible.get(id)) else {
                return Err(format!("sequence {id} is said to be evicted, and there is none"));
            };
            if open.contains(id) {
                return Err(format!("sequence {id} was evicted under its handle"));
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
                return Err(format!("sequence {id} was evicted and is not evictable"));
            }
            // What a queued commit changes may come before or after the choice.
            let stays = |other: &u64| {
                let same = settled.get(other).is_some_and(|version| visible.get(other) == Some(version));
                same && !open.contains(other) && !gone.iter().any(|(gone, ..)| gone == other)
            };
            let sooner = |other: &Life| {
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
            self.attempted(true);
        }
        Ok(())
    }

    /// A sequence that must be gone by `now`, once the store has looked after it.
    pub(super) fn overdue(&self, open: &[u64], now: u64) -> Option<u64> {
        let visible = self.visible();
        let settled = self.state_at(self.floor);
        let over = |id: &u64| !open.contains(id) && self.lives.get(id).is_some_and(|life| life.must_be_over(now));
        settled.into_keys().find(|id| visible.contains_key(id) && over(id))
    }

    fn state_at(&self, end: usize) -> Committed {
        let mut state = self.base.clone();
        for entry in &self.entries[..end] {
            match entry {
                Entry::Commit { id, version } => {
                    state.insert(*id, Rc::clone(version));
                }
                Entry::Delete { id } => {
                    state.remove(id);
                }
            }
        }
        state
    }

    /// What a running store shows.
    pub(super) fn visible(&self) -> Committed {
        self.state_at(self.entries.len())
    }

    /// The sequence that a running store has in a slot.
    pub(super) fn in_slot(&self, slot: usize) -> Option<(u64, Rc<Version>)> {
        let here = |(id, _): &(u64, Rc<Version>)| self.lives.get(id).is_some_and(|life| life.slot == slot);
        self.visible().into_iter().find(here)
    }

    /// Whether a sequence has a commit, deleted or not.
    pub(super) fn is_committed(&self, id: u64) -> bool {
        let in_entries = |entry: &Entry| matches!(entry, Entry::Commit { id: other, .. } if *other == id);
        self.base.contains_key(&id) || self.entries.iter().any(in_entries)
    }

    /// States that some whole commit left, the last one acknowledged or a later one, and that have the sequences
    /// `found`, the latest first. `expires`: a store that was opened at this time, and has let go of what was over by
    /// then.
    pub(super) fn candidates(&self, found: &[Found], expires: Option<RangeInclusive<u64>>, now: u64) -> Vec<Candidate> {
        let at_all =
            |attempt: &&Attempt| attempt.end > self.floor || (attempt.end == self.floor && !attempt.evicted.is_empty());
        let floor = Attempt { end: self.floor, evicted: Vec::new() };
        let attempts = self.attempts.iter().filter(at_all).rev().chain([&floor]);
        attempts.filter_map(|attempt| self.candidate(attempt, found, expires.as_ref(), now)).collect()
    }

    fn candidate(
        &self,
        attempt: &Attempt,
        found: &[Found],
        expires: Option<&RangeInclusive<u64>>,
        now: u64,
    ) -> Option<Candidate> {
        let mut state = self.state_at(attempt.end);
        state.retain(|id, _| !attempt.evicted.contains(id));
        let (mut ids, mut versions) = (Vec::new(), Vec::new());
        for found in found {
            let here = |id: &u64| self.lives.get(id).is_some_and(|life| life.slot == found.slot);
            let untold = || state.keys().copied().find(|id| *id >= UNTOLD && self.is_later(found.id, *id) && here(id));
            let id = state.contains_key(&found.id).then_some(found.id).or_else(untold).filter(here)?;
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

    /// What is known of the history, for people.
    pub(super) fn describe(&self) -> String {
        let short = |version: &Version| {
            format!(
                "{} tokens, {} ids, state {:?}",
                version.tokens(),
                version.ids.len(),
                version.state.as_ref().map(Vec::len)
            )
        };
        let entry = |entry: &Entry| match entry {
            Entry::Commit { id, version } => format!("commit of {id}: {}", short(version)),
            Entry::Delete { id } => format!("deletion of {id}"),
        };
        let floor: Vec<String> =
            self.state_at(self.floor).iter().map(|(id, version)| format!("{id}: {}", short(version))).collect();
        let later: Vec<String> = self.entries[self.floor..].iter().map(entry).collect();
        format!("acknowledged {floor:?}\n  {} entries, later {later:?}\n  tried {:?}", self.floor, self.attempts)
    }

    /// After a crash: the history goes on from what was found. Gives how many entries were kept, and of how many in
    /// doubt.
    pub(super) fn go_on(&mut self, found: &[Found], candidate: &Candidate) -> (usize, usize) {
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
