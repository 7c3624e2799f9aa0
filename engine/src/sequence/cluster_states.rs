//! The state of a method, stored with its clusters: when it is written, and how an attachment takes it.
//!
//! 1. [`Sequence::store_clusters`] writes the state of every layer behind the clusters, if all tokens that the method
//!    has seen are committed.
//! 2. A durable commit writes it again when enough tokens were appended since ([`is_worth`]).
//! 3. An attachment restores each layer from its state. Groups behind the state are pushed as appended ones are.
//!
//! Nothing here fails an operation. A state that is missing, stale, damaged or of another version costs time: the
//! method builds its clusters from keys.
//!
//! Invariants:
//! - A state holds committed tokens alone.
//! - A reference to a frame with states ends with their tokens. A cut below the end takes the states.
//! - A sequence has at most one state. The commit that names its frames releases the frames of the former one.

use super::handle::Sequence;
use super::layer::LayerState;
use super::loaded_clusters::{LoadedClusters, StoredState};
use super::stored_clusters::DerivedPlace;
use crate::error::{Error, Result};
use crate::events::event;
use crate::io::{coverage, planted};
use crate::log::DerivedRelease;
use crate::metrics::{Reservation, lock};
use crate::pools::{
    FrontPieces, JoinedState, StateFrames, StatePlace, StatesFront, WrittenStates, commit_derived, join,
};
use crate::read::{BlockReader, SegmentRange};
use crate::retrieval::{LayerSummary, StateReader, StateWriter, SummarySpec};
use std::sync::Arc;
use stratakv_format::FrameId;
use stratakv_format::ids::NUMBER_MAX;
use stratakv_format::pool::{StateFields, StateHeader};

/// The bytes of keys and values that are appended per byte of a state that is written again.
const APPENDED_PER_BYTE: u64 = 20;

/// Returns whether writing a state of at most `bytes` bytes is worth it, once `appended` bytes of keys and values
/// follow the former one.
fn is_worth(bytes: u64, appended: u64) -> bool {
    bytes.saturating_mul(APPENDED_PER_BYTE) <= appended
}

/// Returns the number of the state that follows one with this number. The former one is released with the commit that
/// names the next, so that after the largest number the first one is free. A damaged header may hold any number.
fn next_number(former: Option<&StoredState>) -> u64 {
    former.map_or(0, |state| state.number) % NUMBER_MAX + 1
}

/// A state on devices: its frames, oldest first, and the pieces in each.
pub(super) struct FoundState {
    header: StateHeader,
    frames: Vec<(DerivedPlace, Vec<StatePlace>)>,
}

/// The frames of states that are not used, and their highest number.
#[derive(Default)]
struct OtherStates {
    number: u64,
    frames: Vec<FrameId>,
}

impl OtherStates {
    fn add(&mut self, number: u64, frame: FrameId) {
        self.number = self.number.max(number);
        self.frames.push(frame);
    }
}

/// The stored clusters of a kind of summary, and the state that goes with them.
#[derive(Default)]
pub(super) struct StoredKind {
    pub(super) loaded: Option<LoadedClusters>,
    found: Option<FoundState>,
}

/// A summary that took its stored state, and the memory that it needed for that.
pub(super) type RestoredLayer = (Box<dyn LayerSummary>, Reservation);

impl Sequence {
    /// Reads the directories of a kind of summary, and finds its state. Anything that fails counts as missing.
    pub(super) fn stored_kind(&self, method: &str) -> StoredKind {
        let fronts = self.derived_fronts().unwrap_or_default();
        let mut own = StoredKind { loaded: self.read_clusters_or_none(method, &fronts), found: None };
        let Some(loaded) = &mut own.loaded else { return own };
        let (found, others) = self.find_state(method, loaded.set.version, fronts);
        let used = found.iter().flat_map(|found| &found.frames).map(|(place, _)| place.frame);
        let frames: Vec<FrameId> = used.chain(others.frames).collect();
        let header = found.as_ref().map(|found| found.header);
        let (tokens, number) = header.map_or((0, others.number), |own| (own.tokens.get(), own.number.get()));
        let places = found.iter().flat_map(|found| &found.frames).flat_map(|(_, places)| places);
        let bytes = places.map(|place| place.bytes as u64).sum();
        let state = StoredState { tokens, number, bytes, frames, is_outdated: header.is_none() };
        loaded.state = (!state.frames.is_empty()).then_some(state);
        own.found = found;
        own
    }

    /// Returns the newest state that belongs to the stored clusters and to the tokens of the sequence, and the frames
    /// of others.
    fn find_state(
        &self,
        method: &str,
        version: Option<(u64, u64)>,
        fronts: Vec<(DerivedPlace, FrontPieces)>,
    ) -> (Option<FoundState>, OtherStates) {
        let (set, generation) = version.unwrap_or_default();
        let (mut found, mut others) = (None::<FoundState>, OtherStates::default());
        for (place, front) in fronts {
            let StatesFront { header, method: of, places } = match front {
                FrontPieces::States(states) => states,
                FrontPieces::Unknown => {
                    others.frames.push(place.frame);
                    continue;
                }
                FrontPieces::Directories => continue,
            };
            let (tokens, number) = (header.tokens.get(), header.number.get());
            let matches = header.set.get() == set && header.generation.get() <= generation;
            let is_used = of == method && matches && tokens <= place.token_end || planted!(StaleStateKept);
            let newest = found.as_ref().map_or(0, |own| own.header.number.get());
            if !is_used || tokens > self.len() || number < newest {
                others.add(number, place.frame);
                continue;
            }
            match &mut found {
                Some(own) if newest == number => own.frames.push((place, places)),
                _ => {
                    let older = found.replace(FoundState { header, frames: vec![(place, places)] });
                    let older = older.into_iter().flat_map(|own| own.frames);
                    older.for_each(|(place, _)| others.add(newest, place.frame));
                }
            }
        }
        (found, others)
    }

    /// Returns the summary of a layer from its state, if there is a state that the summary accepts. Its memory is held
    /// until the summary has memory of its own.
    ///
    /// # Errors
    /// [`MemoryLimit`](crate::ErrorKind::MemoryLimit): the state does not fit.
    pub(super) fn restored_layer(
        &self,
        (at, layer): (usize, &LayerState),
        kind: &Arc<dyn SummarySpec>,
        stored: &mut StoredKind,
    ) -> Result<Option<RestoredLayer>> {
        let Some(found) = &stored.found else { return Ok(None) };
        let own = |(frame, places): &(DerivedPlace, Vec<StatePlace>)| {
            let of_layer = places.iter().filter(|place| usize::from(place.layer) == at).copied();
            of_layer.map(|place| (Arc::clone(&frame.segment), frame.meta.location.offset(), place)).collect::<Vec<_>>()
        };
        let pieces: Vec<_> = found.frames.iter().flat_map(own).collect();
        if pieces.is_empty() {
            return Ok(None);
        }
        let (ranges, skips): (Vec<_>, Vec<_>) = pieces
            .iter()
            .map(|(segment, start, place)| SegmentRange::pages_around(segment, start + place.offset, place.bytes))
            .unzip();
        // Small pieces take whole pages, too. The state is joined from them.
        let pages: usize = ranges.iter().map(|range| range.bytes).sum();
        let bytes: usize = pieces.iter().map(|(_, _, place)| place.bytes).sum();
        let _memory = self.reserve_scratch(pages.saturating_add(bytes))?;
        let read = BlockReader::demand(&self.store.devices).read_each(&ranges)?;
        let read: Vec<Vec<u8>> = read.into_iter().map(Result::unwrap_or_default).collect();
        let bytes_of = |((pages, skip), (_, _, place)): ((&'_ Vec<u8>, &usize), &_)| -> std::ops::Range<usize> {
            let place: &StatePlace = place;
            let end = skip + place.bytes;
            if end <= pages.len() { *skip..end } else { 0..0 }
        };
        let parts: Vec<_> = read.iter().zip(&skips).zip(&pieces).map(bytes_of).collect();
        let parts = read.iter().zip(parts).zip(&pieces).map(|((pages, range), (_, _, place))| (place, &pages[range]));
        let context = (&self.identity.layout, self.store.devices.identity.checksum);
        let (encoding, state) = match join((&found.header, &kind.id()), parts, context) {
            JoinedState::Whole { encoding, bytes } => (encoding, bytes),
            JoinedState::Incomplete => {
                event!(debug, layer = at, "pieces of the stored state of a method are gone with a device");
                stored.drop_state();
                return Ok(None);
            }
            JoinedState::Damaged => {
                self.store.activity.counters.dropped_clusters.add(1);
                coverage!(ClustersDropped);
                event!(warn, layer = at, "the stored state of a method does not verify and is not used");
                stored.drop_state();
                return Ok(None);
            }
        };
        let groups = found.header.tokens.get() / self.identity.layout.group_tokens() as u64;
        let mut summary = kind.layer(at, layer.shape())?;
        if summary.state_encoding() != Some(encoding) {
            stored.drop_state();
            return Ok(None);
        }
        let mut state = StateReader::new(&state);
        let tables = self.reserve_scratch(summary.take_state_bytes(&state))?;
        match summary.take_state(&mut state, groups.min(layer.groups()) as usize) {
            Ok(()) => {
                coverage!(ClusterStateTaken);
                self.store.activity.counters.restored_layers.add(1);
                Ok(Some((summary, tables)))
            }
            Err(e) => {
                event!(warn, cause = e, layer = at, "the stored state of a method is not used");
                stored.drop_state();
                Ok(None)
            }
        }
    }

    /// Writes the state of the summaries of a slot, if there is one and it is worth it. Returns none if the former one
    /// stays.
    ///
    /// `version` has the number and the generation of the set that the state belongs to. No state is written before
    /// enough tokens follow the former one and `tried`, the end of one that could not be written.
    ///
    /// # Errors
    /// The state does not fit, or a write failed.
    pub(super) fn write_states(
        &self,
        (slot, method): (usize, &str),
        (set, generation): (u64, u64),
        (former, tried): (Option<&StoredState>, u64),
    ) -> Result<Option<WrittenStates>> {
        let Some(tokens) = self.state_tokens(slot) else { return Ok(None) };
        let layers = || self.layers.iter().filter_map(|layer| Some((layer, layer.summaries().attached().get(slot)?)));
        let current = former.filter(|state| !state.is_outdated);
        let since = current.map_or(0, |state| state.tokens).max(tried);
        let token_bytes: u64 = self.layers.iter().map(|layer| layer.token_bytes() as u64).sum();
        let appended = tokens.saturating_sub(since).saturating_mul(token_bytes);
        let bytes = || layers().map(|(_, summary)| summary.get().state_bytes() as u64).sum();
        // States grow, so the bytes of the former one decide most commits.
        let is_early =
            || current.is_some_and(|state| !is_worth(state.bytes / 2, appended)) || !is_worth(bytes(), appended);
        if since > 0 && is_early() {
            return Ok(None);
        }
        let number = next_number(former);
        let fields = StateFields { set, generation, number, method, encoding: 0, tokens };
        let mut frames = StateFrames::new(&self.store, &self.identity, fields)?;
        for (layer, summary) in layers() {
            let summary = summary.get();
            let Some(encoding) = summary.state_encoding() else { continue };
            let most = summary.state_bytes();
            // The state and its pieces.
            let _memory = self.reserve_scratch(most.saturating_mul(2))?;
            let mut state = StateWriter::new();
            state.reserve(most);
            if summary.put_state(&mut state) {
                frames.layer(layer.index(), encoding, &state.into_bytes())?;
            }
        }
        let written = frames.finish()?;
        if written.frames.is_empty() {
            return Ok(None);
        }
        coverage!(ClusterStateWritten);
        Ok(Some(written))
    }

    /// Returns the end of the tokens that the summaries of a slot have seen, if all of them are committed and in
    /// sealed groups.
    fn state_tokens(&self, slot: usize) -> Option<u64> {
        let size = self.identity.layout.group_tokens() as u64;
        let durable = if self.commits.is_stored() { self.commits.committed() } else { 0 };
        let committed = durable.min(self.commits.cut_to().unwrap_or(u64::MAX));
        let mut summaries = self.layers.iter().filter_map(|layer| layer.summaries().attached().get(slot));
        let groups = summaries.next()?.get().groups();
        let tokens = groups as u64 * size;
        let is_same = summaries.all(|summary| summary.get().groups() == groups);
        let is_committed = tokens <= committed || planted!(UncommittedStateStored);
        (is_same && tokens > 0 && is_committed).then_some(tokens)
    }

    /// Writes states again that are behind, after a durable commit. The commit has succeeded, so nothing here fails it.
    pub(super) fn refresh_states(&mut self) {
        let loaded: Vec<(usize, String)> = self.selectors.loaded_slots().collect();
        for (slot, method) in loaded {
            if let Err(e) = self.refresh_state(slot, &method) {
                event!(warn, cause = e, "the state of a method is not stored");
                let tokens = self.state_tokens(slot);
                if let Some((loaded, tokens)) = self.selectors.loaded_of_mut(&method).zip(tokens) {
                    loaded.state_tried = tokens;
                }
            }
        }
    }

    fn refresh_state(&mut self, slot: usize, method: &str) -> Result<()> {
        let Some(loaded) = self.selectors.loaded_of(method) else { return Ok(()) };
        let Some(version) = loaded.set.version else { return Ok(()) };
        let (former, tried) = (loaded.state.clone(), loaded.state_tried);
        let Some(written) = self.write_states((slot, method), version, (former.as_ref(), tried))? else {
            return Ok(());
        };
        let (state, sequence) = (StoredState::of(&written), self.identity.sequence);
        let gone = former.into_iter().flat_map(|state| state.frames);
        let released = gone.map(|frame| DerivedRelease::Reference(sequence, frame)).collect();
        let frames = written.frames.into_iter().map(|frame| (frame, written.tokens)).collect();
        let outcome = commit_derived(&self.store, &self.identity, frames, released);
        // A commit that stays queued names the state. The next one has another number, and releases it.
        if outcome.as_ref().err().is_none_or(Error::is_queued)
            && let Some(loaded) = self.selectors.loaded_of_mut(method)
        {
            loaded.state = Some(state);
        }
        outcome
    }

    /// Returns the state of the stored clusters of a kind that the next store may keep: its frames are still there.
    pub(super) fn kept_state(&self, method: &str) -> Option<StoredState> {
        let state = self.selectors.loaded_of(method)?.state.clone()?;
        let catalog = lock(&self.store.catalog);
        let own: Vec<_> = catalog.derived_of(self.identity.sequence).map(|(frame, _)| frame).collect();
        state.frames.iter().all(|frame| own.contains(frame)).then_some(state)
    }
}

impl StoredKind {
    /// Goes on without the state.
    fn drop_state(&mut self) {
        self.found = None;
        let state = self.loaded.as_mut().and_then(|loaded| loaded.state.as_mut());
        state.into_iter().for_each(|state| state.is_outdated = true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_written_again_after_twenty_times_its_bytes() {
        assert!(is_worth(5, 100) && !is_worth(5, 99) && is_worth(0, 0));
        assert!(!is_worth(u64::MAX, u64::MAX - 1));
    }

    #[test]
    fn the_number_after_any_number_on_a_device_is_valid() {
        let state = |number| StoredState { tokens: 0, number, bytes: 0, frames: Vec::new(), is_outdated: true };
        assert_eq!((next_number(None), next_number(Some(&state(6)))), (1, 7));
        assert_eq!(next_number(Some(&state(NUMBER_MAX))), 1);
        assert!((1..=NUMBER_MAX).contains(&next_number(Some(&state(u64::MAX)))));
    }
}
