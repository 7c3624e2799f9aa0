//! States of methods in derived frames (SPEC.md chapter 11): their pieces, and the tokens that they belong to.
//!
//! 1. Check each piece that matched its checksum. A piece of another version is a note, because a reader passes over
//!    it.
//! 2. Compare the pieces of a layer in one frame: they agree, and follow each other.
//! 3. Compare the tokens of a state with the committed lengths of the sequences that refer to it.
//! 4. Count the states whose bytes are all there. Frames of a state may be gone, because no sequence needs them.
//!
//! The bytes of a state are opaque here.

use crate::finding::{Code, Finding};
use crate::frames::DirectoryExtent;
use crate::replay::{Frame, State};
use std::collections::{BTreeMap, BTreeSet};
use stratakv_format::FormatError;
use stratakv_format::error::FormatErrorCode;
use stratakv_format::layout::Layout;
use stratakv_format::pool::{StateHeader, StatePiece};

/// The identity of the state of a layer: origin, set, number and layer.
type StateKey = (u64, u64, u64, u16);

/// The states of a store.
#[derive(Debug, Default)]
pub(crate) struct FoundStates {
    /// The bytes of each state, and its pieces: the first byte and the end.
    states: BTreeMap<StateKey, (u64, BTreeSet<(u64, u64)>)>,
}

/// Returns the finding of a piece that does not verify.
fn refused(error: &FormatError) -> Finding {
    match error.code {
        FormatErrorCode::Unsupported => Finding::note(Code::ClusterState, error.to_string()),
        _ => Finding::format(Code::ClusterState, error),
    }
}

impl FoundStates {
    /// Checks the pieces of a frame: the place and the bytes of each one that matched its checksum. Returns what is
    /// wrong with it, each with the offset and the bytes of the piece.
    pub(crate) fn add<'b>(
        &mut self,
        state: &State,
        (id, frame): (u64, &Frame),
        pieces: impl Iterator<Item = (&'b DirectoryExtent, &'b [u8])>,
        layout: &Layout,
    ) -> Vec<(Finding, (u64, u64))> {
        let mut findings = Vec::new();
        let mut before: Option<(u16, StatePiece<'b>)> = None;
        for (extent, bytes) in pieces {
            let piece = match StatePiece::verify(bytes, layout, extent.layer) {
                Ok(piece) => piece,
                Err(error) => {
                    findings.push((refused(&error).layer(extent.layer), (extent.offset, extent.bytes)));
                    before = None;
                    continue;
                }
            };
            let header = piece.header();
            let neighbour = before.filter(|(layer, _)| *layer == extent.layer).map(|(_, other)| other);
            let uncommitted = || uncommitted(state, id, header);
            if let Some(text) = neighbour.and_then(|other| contradiction(&other, &piece)).or_else(uncommitted) {
                let finding = Finding::damage(Code::ClusterState, text).layer(extent.layer);
                findings.push((finding, (extent.offset, extent.bytes)));
            }
            let first = header.first_byte.get();
            let key = (frame.record.origin.get(), header.set.get(), header.number.get(), extent.layer);
            let (_, found) = self.states.entry(key).or_insert((header.state_bytes.get(), BTreeSet::new()));
            found.insert((first, first + u64::from(header.count.get())));
            before = Some((extent.layer, piece));
        }
        findings
    }

    /// Returns the number of states whose bytes are all there, and their bytes.
    pub(crate) fn whole(&self) -> (u64, u64) {
        let end = |pieces: &BTreeSet<(u64, u64)>| {
            pieces.iter().fold(0, |end, (first, next)| if *first == end { *next } else { end })
        };
        let whole = self.states.values().filter(|(bytes, pieces)| end(pieces) == *bytes).map(|(bytes, _)| bytes);
        whole.fold((0, 0), |(count, sum), bytes| (count + 1, sum + bytes))
    }
}

/// Returns how two neighbouring pieces of a layer contradict each other.
fn contradiction(before: &StatePiece<'_>, piece: &StatePiece<'_>) -> Option<String> {
    let header = before.header();
    let (end, first) = (header.first_byte.get() + u64::from(header.count.get()), piece.header().first_byte.get());
    if !before.is_of_same_state(piece) {
        return Some("it belongs to another state than the piece in front of it".to_owned());
    }
    (first != end).then(|| format!("it begins with byte {first} of the state, not {end}"))
}

/// Returns whether a sequence would use the state of tokens that it has not committed.
fn uncommitted(state: &State, frame: u64, header: &StateHeader) -> Option<String> {
    let tokens = header.tokens.get();
    let is_used = |end: Option<&u64>| end.is_some_and(|end| *end >= tokens);
    let found = state.sequences().iter().find(|(_, own)| is_used(own.refs.get(&frame)) && own.committed < tokens);
    found.map(|(id, own)| format!("the state is that of {tokens} tokens, but sequence {id} has {}", own.committed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratakv_format::DType;
    use stratakv_format::layout::{LayerGeometry, RAW_PLANES};
    use stratakv_format::pool::StateFields;

    fn layout() -> Layout {
        let layer =
            LayerGeometry { kv_heads: 1, key_dim: 8, value_dim: 8, window: None, rope: None, codecs: RAW_PLANES };
        Layout { dtype: DType::F16, group_tokens: 4, padded_planes: false, fingerprint: [0; 32], layers: vec![layer] }
    }

    #[test]
    fn pieces_of_a_state_follow_each_other_and_are_whole_together() {
        let fields = StateFields { set: 1, generation: 1, number: 1, method: "test", encoding: 1, tokens: 8 };
        let pieces = fields.encode(&[7; 20], 80).expect("pieces");
        let others = StateFields { number: 2, ..fields }.encode(&[7; 20], 80).expect("pieces");
        let layout = layout();
        fn piece<'a>(bytes: &'a [u8], layout: &Layout) -> StatePiece<'a> {
            StatePiece::verify(bytes, layout, 0).expect("a valid piece")
        }
        let text = |one: &[u8], other: &[u8]| contradiction(&piece(one, &layout), &piece(other, &layout));
        assert_eq!(text(&pieces[0], &pieces[1]), None);
        let gap = text(&pieces[0], &pieces[2]).expect("a contradiction");
        assert!(gap.contains("begins with byte 16 of the state, not 8"), "{gap}");
        assert!(text(&pieces[0], &others[1]).is_some_and(|text| text.contains("another state")));
        let mut found = FoundStates::default();
        let mut add = |pieces: &[&Vec<u8>]| {
            let spans = pieces.iter().map(|bytes| {
                let header = piece(bytes, &layout).header();
                (header.first_byte.get(), header.first_byte.get() + u64::from(header.count.get()))
            });
            let (_, all) = found.states.entry((1, 1, 1, 0)).or_insert((20, BTreeSet::new()));
            all.extend(spans);
            found.whole()
        };
        assert_eq!(add(&[&pieces[2], &pieces[0]]), (0, 0));
        assert_eq!(add(&[&pieces[1]]), (1, 20));
    }
}
