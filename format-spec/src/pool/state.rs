//! Pieces of the state of a method: what it needs to go on with its clusters without building them from keys.
//!
//! A piece is checked before its bytes are used. The bytes of the state itself are opaque here, because each method has
//! an encoding of its own.

use super::directory::{CLUSTER_PIECE_BYTES_MAX, METHOD_BYTES_MAX, SET_TOKENS_MAX};
use crate::error::FormatError;
use crate::ids::NUMBER_MAX;
use crate::layout::Layout;
use crate::verify::check_zeros;
use alloc::vec::Vec;
use core::mem::offset_of;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of the pieces of states that this code reads and writes. Directories have another one.
pub const STATE_VERSION: u16 = 2;
/// Part: a piece of the state of a method.
pub const PART_STATE: u16 = 3;
/// The most bytes of the state of a layer.
pub const STATE_BYTES_MAX: u64 = 1 << 32;

/// The header of a piece of a state. The method and the bytes follow, each padded with zeros to a multiple of 8.
///
/// A piece repeats the fields of its state, and the fields from `first_byte` on are its own, `encoding` aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct StateHeader {
    /// [`STATE_VERSION`].
    pub version: U16,
    /// [`PART_STATE`].
    pub part: U16,
    /// Zero.
    pub reserved: U16,
    /// Bytes of the description of the method.
    pub method_bytes: U16,
    /// The set of clusters that the state belongs to.
    pub set: U64,
    /// The generation of the directories of the set when the state was written.
    pub generation: U64,
    /// The number of the state in its set. A greater one replaces a smaller one.
    pub number: U64,
    /// The state is that after the tokens from 0 up to this one.
    pub tokens: U64,
    /// The bytes of the state of the layer.
    pub state_bytes: U64,
    /// The first byte of the piece.
    pub first_byte: U64,
    /// The bytes of the piece.
    pub count: U32,
    /// The version of the method's encoding.
    pub encoding: U32,
}

const _: () = assert!(size_of::<StateHeader>() == 64);

/// The fields of a state that each of its pieces repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateFields<'a> {
    /// As in [`StateHeader::set`].
    pub set: u64,
    /// As in [`StateHeader::generation`].
    pub generation: u64,
    /// As in [`StateHeader::number`].
    pub number: u64,
    /// The method with its parameters, in the text by which it is chosen.
    pub method: &'a str,
    /// As in [`StateHeader::encoding`].
    pub encoding: u32,
    /// As in [`StateHeader::tokens`].
    pub tokens: u64,
}

impl StateFields<'_> {
    /// Returns the pieces of the state of a layer, each of at most `most` bytes, and of at most
    /// [`CLUSTER_PIECE_BYTES_MAX`].
    ///
    /// # Errors
    /// The description of the method is too long, or the state is empty or too long. No byte fits beside the header.
    pub fn encode(&self, state: &[u8], most: usize) -> Result<Vec<Vec<u8>>, FormatError> {
        let method = self.method.as_bytes();
        if method.is_empty() || method.len() > METHOD_BYTES_MAX {
            let offset = offset_of!(StateHeader, method_bytes);
            return Err(FormatError::range("method bytes", offset, METHOD_BYTES_MAX as u64, method.len() as u64));
        }
        if state.is_empty() || state.len() as u64 > STATE_BYTES_MAX {
            let offset = offset_of!(StateHeader, state_bytes);
            return Err(FormatError::range("state bytes", offset, STATE_BYTES_MAX, state.len() as u64));
        }
        let fixed = size_of::<StateHeader>() + method.len().next_multiple_of(8);
        let each = most.min(CLUSTER_PIECE_BYTES_MAX as usize).saturating_sub(fixed) / 8 * 8;
        if each == 0 {
            return Err(FormatError::range("state piece bytes", 0, most as u64, fixed as u64 + 8));
        }
        let piece = |(nth, bytes): (usize, &[u8])| {
            let header = StateHeader {
                version: U16::new(STATE_VERSION),
                part: U16::new(PART_STATE),
                reserved: U16::new(0),
                method_bytes: U16::new(method.len() as u16),
                set: U64::new(self.set),
                generation: U64::new(self.generation),
                number: U64::new(self.number),
                tokens: U64::new(self.tokens),
                state_bytes: U64::new(state.len() as u64),
                first_byte: U64::new((nth * each) as u64),
                count: U32::new(bytes.len() as u32),
                encoding: U32::new(self.encoding),
            };
            let mut out = Vec::with_capacity(fixed + bytes.len().next_multiple_of(8));
            out.extend_from_slice(header.as_bytes());
            out.extend_from_slice(method);
            out.resize(fixed, 0);
            out.extend_from_slice(bytes);
            out.resize(out.len().next_multiple_of(8), 0);
            out
        };
        Ok(state.chunks(each).enumerate().map(piece).collect())
    }
}

/// A piece of a state that was checked.
#[derive(Clone, Copy, Debug)]
pub struct StatePiece<'a> {
    header: &'a StateHeader,
    method: &'a str,
    bytes: &'a [u8],
}

fn within(field: &'static str, offset: usize, value: u64, low: u64, high: u64) -> Result<(), FormatError> {
    let bound = if value < low { low } else { high };
    if value < low || value > high { Err(FormatError::range(field, offset, bound, value)) } else { Ok(()) }
}

impl<'a> StatePiece<'a> {
    /// Returns whether the bytes of an extent say that they are a piece of a state, of any version.
    #[must_use]
    pub fn is_meant(bytes: &[u8]) -> bool {
        bytes.get(2..4) == Some(&PART_STATE.to_le_bytes()[..])
    }

    /// Returns the header and the method of the piece that begins with these bytes. They are not checked otherwise.
    /// Returns none if the version is unknown, or the method does not follow the header.
    #[must_use]
    pub fn fields(bytes: &[u8]) -> Option<(&StateHeader, &str)> {
        let (header, rest) = StateHeader::ref_from_prefix(bytes).ok()?;
        let method = rest.get(..usize::from(header.method_bytes.get()))?;
        let is_known = header.version.get() == STATE_VERSION && header.part.get() == PART_STATE;
        is_known.then_some((header, core::str::from_utf8(method).ok()?))
    }

    /// Checks a piece of the state of a layer. `bytes` are all bytes of its extent.
    ///
    /// # Errors
    /// The version is unknown, or a field contradicts the layer or the other fields.
    pub fn verify(bytes: &'a [u8], layout: &Layout, layer: u16) -> Result<Self, FormatError> {
        let Ok((header, rest)) = StateHeader::ref_from_prefix(bytes) else {
            return Err(FormatError::truncated("state piece", size_of::<StateHeader>(), bytes.len()));
        };
        let version = u64::from(header.version.get());
        if version != u64::from(STATE_VERSION) {
            return Err(FormatError::unsupported("state version", 0, u64::from(STATE_VERSION), version));
        }
        let part = u64::from(PART_STATE);
        within("part", 2, u64::from(header.part.get()), part, part)?;
        within("state piece bytes", 0, bytes.len() as u64, 0, u64::from(CLUSTER_PIECE_BYTES_MAX))?;
        if !layout.layers.get(usize::from(layer)).is_some_and(|layer| layer.has_kv()) {
            return Err(FormatError::range("state layer", 0, layout.layers.len() as u64, u64::from(layer)));
        }
        header.check(u64::from(layout.group_tokens))?;
        let method_bytes = usize::from(header.method_bytes.get());
        let count = header.count.get() as usize;
        let [method_end, end] = [method_bytes, count].map(|bytes| bytes.next_multiple_of(8));
        if rest.len() != method_end + end {
            let expected = (size_of::<StateHeader>() + method_end + end) as u64;
            return Err(FormatError::range("bytes of the piece", 0, expected, bytes.len() as u64));
        }
        let (method, state) = rest.split_at(method_end);
        let (method, padding) = method.split_at(method_bytes);
        check_zeros(padding, "method", size_of::<StateHeader>() + method_bytes)?;
        let (state, padding) = state.split_at(count);
        check_zeros(padding, "state", size_of::<StateHeader>() + method_end + count)?;
        let method = core::str::from_utf8(method)
            .map_err(|_| FormatError::range("method", size_of::<StateHeader>(), 0, method_bytes as u64))?;
        Ok(Self { header, method, bytes: state })
    }

    /// Returns the header.
    #[must_use]
    pub fn header(&self) -> &'a StateHeader {
        self.header
    }

    /// Returns the description of the method.
    #[must_use]
    pub fn method(&self) -> &'a str {
        self.method
    }

    /// Returns the bytes of the state that the piece holds.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns whether two pieces of the same frame and layer belong to the same state.
    #[must_use]
    pub fn is_of_same_state(&self, other: &StatePiece<'_>) -> bool {
        let shared = |header: &StateHeader| StateHeader { first_byte: U64::new(0), count: U32::new(0), ..*header };
        shared(self.header) == shared(other.header) && self.method == other.method
    }
}

impl StateHeader {
    /// Checks the fields against each other.
    fn check(&self, group_tokens: u64) -> Result<(), FormatError> {
        check_zeros(self.reserved.as_bytes(), "state header", offset_of!(Self, reserved))?;
        let method_bytes = u64::from(self.method_bytes.get());
        within("method bytes", offset_of!(Self, method_bytes), method_bytes, 1, METHOD_BYTES_MAX as u64)?;
        within("set", offset_of!(Self, set), self.set.get(), 1, NUMBER_MAX)?;
        within("generation", offset_of!(Self, generation), self.generation.get(), 1, NUMBER_MAX)?;
        within("number of the state", offset_of!(Self, number), self.number.get(), 1, NUMBER_MAX)?;
        let tokens = self.tokens.get();
        within("tokens", offset_of!(Self, tokens), tokens, 1, SET_TOKENS_MAX)?;
        if !tokens.is_multiple_of(group_tokens) {
            return Err(FormatError::range("tokens", offset_of!(Self, tokens), group_tokens, tokens));
        }
        let state_bytes = self.state_bytes.get();
        within("state bytes", offset_of!(Self, state_bytes), state_bytes, 1, STATE_BYTES_MAX)?;
        within("first byte", offset_of!(Self, first_byte), self.first_byte.get(), 0, state_bytes - 1)?;
        let left = state_bytes - self.first_byte.get();
        within("bytes of the piece", offset_of!(Self, count), u64::from(self.count.get()), 1, left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::layout::{LayerGeometry, RAW_PLANES};
    use alloc::vec;

    fn layout() -> Layout {
        let layer =
            LayerGeometry { kv_heads: 1, key_dim: 8, value_dim: 8, window: None, rope: None, codecs: RAW_PLANES };
        Layout { dtype: DType::F16, group_tokens: 8, padded_planes: false, fingerprint: [0; 32], layers: vec![layer] }
    }

    const FIELDS: StateFields<'_> =
        StateFields { set: 7, generation: 2, number: 3, method: "method/8", encoding: 5, tokens: 64 };

    #[test]
    fn a_state_is_cut_in_pieces_of_at_most_a_megabyte() {
        let state: Vec<u8> = (0..(5 << 19) + 3).map(|at: u32| (at % 251) as u8).collect();
        let pieces = FIELDS.encode(&state, usize::MAX).unwrap();
        assert_eq!(pieces.len(), 3);
        let mut joined = Vec::new();
        let first = StatePiece::verify(&pieces[0], &layout(), 0).unwrap();
        for bytes in &pieces {
            assert!(
                bytes.len() <= CLUSTER_PIECE_BYTES_MAX as usize && bytes.len() % 8 == 0 && StatePiece::is_meant(bytes)
            );
            let piece = StatePiece::verify(bytes, &layout(), 0).unwrap();
            assert!(piece.is_of_same_state(&first) && piece.method() == "method/8");
            assert_eq!(piece.header().first_byte.get(), joined.len() as u64);
            joined.extend_from_slice(piece.bytes());
        }
        assert_eq!(joined, state);
        let refused = |fields: StateFields<'_>, state: &[u8], most| assert!(fields.encode(state, most).is_err());
        refused(FIELDS, &[], 1 << 20);
        refused(StateFields { method: "", ..FIELDS }, &[1], 1 << 20);
        refused(FIELDS, &[1], 79);
        assert_eq!(FIELDS.encode(&[1; 20], 80).unwrap().len(), 3);
    }

    #[test]
    fn a_wrong_field_is_refused_by_its_name() {
        let good = FIELDS.encode(&[1, 2, 3], usize::MAX).unwrap().remove(0);
        let field = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = good.clone();
            change(&mut bytes);
            StatePiece::verify(&bytes, &layout(), 0).map(|_| ()).unwrap_err().field
        };
        let set = |at: usize, value: u8| move |bytes: &mut Vec<u8>| bytes[at] = value;
        let cases: [(usize, u8, &str); 16] = [
            (0, 1, "state version"),
            (2, 1, "part"),
            (4, 1, "state header"),
            (6, 0, "method bytes"),
            (6, 9, "bytes of the piece"),
            (8, 0, "set"),
            (16, 0, "generation"),
            (24, 0, "number of the state"),
            (32, 0, "tokens"),
            (32, 65, "tokens"),
            (40, 0, "state bytes"),
            (48, 3, "first byte"),
            (56, 0, "bytes of the piece"),
            (56, 4, "bytes of the piece"),
            (64, 0xff, "method"),
            (75, 1, "state"),
        ];
        for (at, value, name) in cases {
            assert_eq!(field(&set(at, value)), name, "byte {at}");
        }
        assert_eq!(field(&|bytes| bytes.truncate(63)), "state piece");
        assert_eq!(field(&|bytes| bytes.extend_from_slice(&[0; 8])), "bytes of the piece");
        assert_eq!(StatePiece::verify(&good, &layout(), 1).unwrap_err().field, "state layer");
    }
}
