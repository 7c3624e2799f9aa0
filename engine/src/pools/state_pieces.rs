//! The states of a method on devices: writing them as frames, and putting the pieces of a layer together.
//!
//! 1. [`StateFrames`] cuts the state of each layer in pieces, and writes frames of pieces.
//! 2. [`FrontPieces`] says what the front of a derived frame holds. Its first page after the header is enough for that.
//! 3. [`join`] checks the pieces of a layer and returns the bytes of its state.
//!
//! Invariant: frames with states hold nothing else, so that a store without them has all of its clusters.

use super::frame_write::write_once;
use crate::catalog::FrameMeta;
use crate::error::{Error, ErrorKind, Result};
use crate::io::planted::covered;
use crate::layout::{KvLayout, PlacedBytes};
use crate::log::{DerivedDraft, DerivedFrame, DirectoryBytes, SequenceIdentity, StoreInner, front_limit};
use crate::metrics::{Category, Reservation};
use std::sync::Arc;
use stratakv_format::checksum::PayloadChecksum;
use stratakv_format::frame::{Descriptor, FramePlace, FrameView, KIND_CLUSTER_DIRECTORY};
use stratakv_format::pool::{StateFields, StateHeader, StatePiece};
use stratakv_format::{FrameId, PAGE_BYTES, PlaneIdentity};

/// The most bytes of a frame with states.
const STATE_FRAME_BYTES: usize = 4 << 20;

/// The states of all layers, as they are written.
pub(crate) struct StateFrames<'a> {
    store: &'a Arc<StoreInner>,
    identity: &'a SequenceIdentity,
    fields: StateFields<'a>,
    placed: PlacedBytes,
    limit: usize,
    pieces: Vec<DirectoryBytes>,
    /// The pieces, and the frame that they are written with.
    memory: Reservation,
    written: WrittenStates,
}

/// States that were written. They are not durable before they are synced and named.
#[derive(Default)]
pub(crate) struct WrittenStates {
    pub(crate) frames: Vec<DerivedFrame>,
    /// The end of their tokens.
    pub(crate) tokens: u64,
    /// Their number.
    pub(crate) number: u64,
    /// Bytes of the frames.
    pub(crate) bytes: u64,
}

impl<'a> StateFrames<'a> {
    /// Returns a writer of states of a method. `fields` are the same in all layers, `encoding` aside.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`]: segments too small for the layout. [`ErrorKind::MemoryLimit`].
    pub(crate) fn new(
        store: &'a Arc<StoreInner>,
        identity: &'a SequenceIdentity,
        fields: StateFields<'a>,
    ) -> Result<Self> {
        // As many pages as the header may need more for descriptors.
        let limit = front_limit(&store.devices, identity)?.saturating_sub(2 * PAGE_BYTES);
        Ok(Self {
            store,
            identity,
            fields,
            placed: PlacedBytes::new(identity.layout.layers(), store.devices.list.slots()),
            limit: limit.min(STATE_FRAME_BYTES),
            pieces: Vec::new(),
            memory: store.devices.reserve(0, Category::Other).ok_or_else(|| no_memory(0))?,
            written: WrittenStates { tokens: fields.tokens, number: fields.number, ..WrittenStates::default() },
        })
    }

    /// Adds the state of a layer. Pieces that fill a frame are written.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: no space is freed for states. [`ErrorKind::MemoryLimit`]: no memory for the pieces of a
    /// frame. [`ErrorKind::Configuration`]: a piece needs larger segments. Errors of writes.
    pub(crate) fn layer(&mut self, layer: usize, encoding: u32, state: &[u8]) -> Result<()> {
        let refused = |e| Error::new(ErrorKind::InvalidArgument, format!("store states: {e}"));
        let fields = StateFields { encoding, ..self.fields };
        let largest = self.limit.saturating_sub(piece_bytes(0));
        for bytes in fields.encode(state, largest).map_err(refused)? {
            let mut held: usize = self.pieces.iter().map(|piece| piece_bytes(piece.bytes.len())).sum();
            if held + piece_bytes(bytes.len()) > self.limit {
                self.write()?;
                held = 0;
            }
            // They stay until the frame is full, longer than the memory of their layer.
            let needed = 2 * (held + piece_bytes(bytes.len()));
            if !self.store.devices.resize(&mut self.memory, needed) {
                return Err(no_memory(needed));
            }
            self.pieces.push(DirectoryBytes { layer, bytes });
        }
        Ok(())
    }

    fn write(&mut self) -> Result<()> {
        let pieces = std::mem::take(&mut self.pieces);
        if pieces.is_empty() {
            return Ok(());
        }
        let parts: Vec<(usize, u64)> = pieces.iter().map(|piece| (piece.layer, piece.bytes.len() as u64)).collect();
        let draft = DerivedDraft::Directories(&pieces);
        let frame = write_once((self.store, self.identity), &mut self.placed, (&draft, &parts), None)?;
        self.written.bytes += frame.meta.location.bytes();
        self.written.frames.push(frame);
        Ok(())
    }

    /// Writes what is left.
    ///
    /// # Errors
    /// As [`Self::layer`].
    pub(crate) fn finish(mut self) -> Result<WrittenStates> {
        self.write()?;
        Ok(self.written)
    }
}

fn no_memory(bytes: usize) -> Error {
    let text = format!("store states: {bytes} bytes do not fit into memory_limit; raise it");
    Error::new(ErrorKind::MemoryLimit, text)
}

/// Returns the bytes that a piece takes in a frame.
fn piece_bytes(bytes: usize) -> usize {
    bytes.next_multiple_of(8) + size_of::<Descriptor>() + size_of::<u64>()
}

/// A piece of a state on a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StatePlace {
    pub(crate) layer: u16,
    /// Bytes from the start of the frame.
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
    checksum: u64,
    identity: PlaneIdentity,
}

/// The pieces of states in the front of a derived frame.
pub(crate) struct StatesFront {
    /// The header of the first piece. Its checksum was not compared.
    pub(crate) header: StateHeader,
    pub(crate) method: String,
    pub(crate) places: Vec<StatePlace>,
}

/// The content of the front of a derived frame.
pub(crate) enum FrontPieces {
    /// Directories, or bytes that do not verify.
    Directories,
    States(StatesFront),
    /// States of another version, or states beside a pool.
    Unknown,
}

impl FrontPieces {
    /// Returns what a derived frame holds. `bytes` are its header and one page more.
    pub(crate) fn of((frame, meta): (FrameId, &FrameMeta), bytes: &[u8], place: &FramePlace) -> Self {
        let Ok(view) = FrameView::verify(bytes, place) else { return Self::Directories };
        let header = view.header();
        let is_meant = header.crc.get() == meta.header_crc
            && header.frame.get() == frame.0
            && header.nonce.get() == meta.nonce
            && header.sequence.get() == meta.origin.0;
        let first = view.descriptors().first().filter(|own| is_meant && own.kind.get() == KIND_CLUSTER_DIRECTORY);
        let start = first.and_then(|own| bytes.get(own.offset.get() as usize..));
        let Some(start) = start.filter(|start| StatePiece::is_meant(start)) else { return Self::Directories };
        let Some((header, method)) = StatePiece::fields(start) else { return Self::Unknown };
        // Frames with states hold nothing else.
        if view.descriptors().iter().any(|own| own.kind.get() != KIND_CLUSTER_DIRECTORY) {
            return Self::Unknown;
        }
        let place_of = |own: &Descriptor| {
            let (layer, number, tokens) = (own.layer.get(), own.first_token.get(), own.tokens.get());
            let identity = PlaneIdentity::new(meta.nonce, meta.origin, KIND_CLUSTER_DIRECTORY, layer, number, tokens);
            let checksum = view.checksums(own).first()?.get();
            Some(StatePlace { layer, offset: own.offset.get(), bytes: own.bytes.get() as usize, checksum, identity })
        };
        let places = view.descriptors().iter().filter_map(place_of).collect();
        Self::States(StatesFront { header: *header, method: method.to_owned(), places })
    }
}

/// The state of a layer, put together from its pieces.
pub(crate) enum JoinedState {
    Whole {
        /// The version of its encoding.
        encoding: u32,
        bytes: Vec<u8>,
    },
    /// A piece is missing. That is no damage: a frame may go with its device.
    Incomplete,
    /// A piece does not verify.
    Damaged,
}

/// Puts the state of a layer together. `pieces` are in order. They belong to the state of `header` and of `method`.
pub(crate) fn join<'a>(
    (header, method): (&StateHeader, &str),
    pieces: impl Iterator<Item = (&'a StatePlace, &'a [u8])> + Clone,
    (layout, checksum): (&KvLayout, PayloadChecksum),
) -> JoinedState {
    let most: usize = pieces.clone().map(|(_, bytes)| bytes.len()).sum();
    let mut joined: Option<(StateHeader, Vec<u8>)> = None;
    let mut is_complete = true;
    for (place, bytes) in pieces {
        if checksum.compute(&place.identity, covered(bytes)) != place.checksum {
            return JoinedState::Damaged;
        }
        let Ok(piece) = StatePiece::verify(bytes, layout.raw(), place.layer) else { return JoinedState::Damaged };
        let own = piece.header();
        let is_of_state = (own.set, own.generation, own.number, own.tokens, piece.method())
            == (header.set, header.generation, header.number, header.tokens, method);
        let (first, state) = joined.get_or_insert_with(|| (*own, Vec::with_capacity(most)));
        is_complete &= own.first_byte.get() == state.len() as u64;
        let is_same = (own.state_bytes, own.encoding) == (first.state_bytes, first.encoding);
        if !(is_of_state && is_same) {
            return JoinedState::Damaged;
        }
        state.extend_from_slice(piece.bytes());
    }
    match joined {
        Some((first, bytes)) if is_complete && first.state_bytes.get() == bytes.len() as u64 => {
            JoinedState::Whole { encoding: first.encoding.get(), bytes }
        }
        _ => JoinedState::Incomplete,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratakv_format::SequenceId;

    /// Returns the outcome of pieces, each changed and then given the checksum that it needs.
    fn joined(pieces: &[Vec<u8>], (header, method): (&StateHeader, &str)) -> JoinedState {
        let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).build().unwrap();
        let checksum = PayloadChecksum::default();
        let place = |(number, bytes): (usize, &Vec<u8>)| {
            let identity =
                PlaneIdentity::new(1, SequenceId(1), KIND_CLUSTER_DIRECTORY, 0, number as u64, bytes.len() as u32);
            let checksum = checksum.compute(&identity, covered(bytes));
            StatePlace { layer: 0, offset: 0, bytes: bytes.len(), checksum, identity }
        };
        let places: Vec<StatePlace> = pieces.iter().enumerate().map(place).collect();
        join((header, method), places.iter().zip(pieces.iter().map(Vec::as_slice)), (&layout, checksum))
    }

    #[test]
    fn pieces_of_another_method_or_state_are_not_joined() {
        let group = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).build().unwrap().group_tokens() as u64;
        let fields = StateFields { set: 1, generation: 2, number: 3, method: "dynakv/8", encoding: 1, tokens: group };
        let pieces = fields.encode(&[7; 20], 88).unwrap();
        let header = *StatePiece::fields(&pieces[0]).unwrap().0;
        let joined = |pieces: &[Vec<u8>]| joined(pieces, (&header, "dynakv/8"));
        assert!(matches!(joined(&pieces), JoinedState::Whole { encoding: 1, bytes } if bytes == [7; 20]));
        assert!(matches!(joined(&pieces[1..]), JoinedState::Incomplete));
        let others = [
            StateFields { method: "dynakv/4", ..fields },
            StateFields { tokens: 2 * group, ..fields },
            StateFields { number: 4, ..fields },
            StateFields { encoding: 2, ..fields },
        ];
        for other in others {
            let other = other.encode(&[7; 20], 88).unwrap();
            let mixed = [&pieces[..1], &other[1..]].concat();
            assert!(matches!(joined(&mixed), JoinedState::Damaged), "{:?}", StatePiece::fields(&other[0]));
        }
        let other = StateFields { method: "dynakv/4", ..fields }.encode(&[7; 20], 88).unwrap();
        assert!(matches!(joined(&other), JoinedState::Damaged), "all pieces are of the other method");
    }
}
