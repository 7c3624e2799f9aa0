//! Adapters: every byte of each layer, compared with the checksum of the record and with the form of an adapter.
//!
//! 1. Collect the pieces of an adapter from all frames of its sequence. Per layer they must continue each other.
//! 2. Read the bytes in order, layer after layer, and parse them (SPEC.md chapter 11, "Adapters").
//! 3. Compare the checksum of all bytes with the record.
//!
//! A sequence with a frame that is damaged or on a missing device is skipped, because the frame or the device was
//! reported before.

use crate::devices::Devices;
use crate::finding::{Code, Finding, Sink};
use crate::frames::{AdapterPiece, FrameInfo};
use crate::io::{self, StoreFile, WINDOW_BYTES};
use crate::replay::{AdapterRecord, State};
use std::collections::HashMap;
use stratakv_format::layout::Layout;
use stratakv_format::{SegmentId, segment};

/// The largest number of elements of a matrix.
const ELEMENTS_MAX: u64 = 1 << 24;
/// The largest number of levels of a dimension.
const LEVELS_MAX: u32 = 256;
/// The number of bits in a code byte.
const BITS_MAX: u32 = 8;
/// The largest number of code bytes per token.
const CODE_BYTES_MAX: u32 = 256;
/// The kind of an adapter layer: low-rank keys.
const KIND_LOW_RANK: u32 = 1;
/// The kind of an adapter layer: transform-coded keys.
const KIND_CODES: u32 = 2;

/// Checks the adapter of each sequence that holds one. `frames` holds the frames whose header is valid.
pub(crate) fn check(devices: &Devices, state: &State, frames: &HashMap<u64, FrameInfo>, sink: &Sink) {
    for (&id, sequence) in state.sequences() {
        let needed = sequence.refs.keys().filter(|frame| !state.is_derived(**frame));
        let infos: Option<Vec<&FrameInfo>> = needed.map(|frame| frames.get(frame)).collect();
        let Some(infos) = infos else { continue };
        let mut pieces: Vec<AdapterPiece> = infos.iter().flat_map(|info| &info.adapter).copied().collect();
        pieces.sort_unstable();
        let places: Vec<_> = pieces.iter().map(|piece| (piece.layer, piece.first, piece.bytes)).collect();
        if let Some(text) = places_defect(sequence.adapter.map(|adapter| adapter.bytes), &places) {
            sink.push(Finding::damage(Code::Adapter, text).sequence(id));
        } else if let (Some(adapter), Some(layout)) = (sequence.adapter, state.layouts.get(&sequence.layout))
            && pieces.iter().all(|piece| piece.good)
        {
            let reader = AdapterReader::new(devices, &pieces, sink);
            check_bytes(reader, id, &adapter, layout, &pieces);
        }
    }
}

/// Reads a whole adapter and checks its bytes.
fn check_bytes(
    mut reader: AdapterReader<'_>,
    sequence: u64,
    adapter: &AdapterRecord,
    layout: &Layout,
    pieces: &[AdapterPiece],
) {
    for layer in pieces.chunk_by(|a, b| a.layer == b.layer) {
        let number = layer[0].layer;
        reader.left = layer.iter().map(|piece| piece.bytes).sum();
        let width = layout.layers.get(usize::from(number)).map_or(0, |layer| layer.key_elements() as u64);
        let defect = reader.layer(width).err();
        // The checksum covers every byte, so the rest of a malformed layer is read too.
        while reader.left > 0 {
            reader.byte();
        }
        if let Some(text) = defect.filter(|_| !reader.unreadable) {
            let text = format!("the adapter of this layer is malformed: {text}");
            let finding = Finding::damage(Code::Adapter, text).sequence(sequence);
            reader.sink.push(finding.layer(number).plane("adapter"));
        }
    }
    let found = reader.digest.finalize();
    if found != adapter.checksum && !reader.unreadable {
        let text = "the bytes of the adapter do not match the checksum of its record";
        let finding = Finding::damage(Code::Adapter, text).sequence(sequence);
        reader.sink.push(finding.values(adapter.checksum, found));
    }
}

/// The bytes of the pieces of an adapter, one piece after another, and the checksum of all bytes read.
struct AdapterReader<'a> {
    devices: &'a Devices,
    sink: &'a Sink,
    /// The pieces that were not read to their end.
    pieces: &'a [AdapterPiece],
    /// The bytes of the first piece that were read into a window.
    passed: u64,
    /// The bytes of the current layer that the parser has not taken.
    left: u64,
    window: Vec<u8>,
    at: usize,
    /// The file that was read last, with its device and segment.
    file: Option<(u16, u32, StoreFile)>,
    digest: crc_fast::Digest,
    /// True if a read failed. The failure was reported.
    unreadable: bool,
}

/// The result of parsing a part of an adapter. The error is the end of a finding's message.
type ParseResult<T> = Result<T, String>;

fn require(condition: bool, text: impl FnOnce() -> String) -> ParseResult<()> {
    if condition { Ok(()) } else { Err(text()) }
}

impl<'a> AdapterReader<'a> {
    fn new(devices: &'a Devices, pieces: &'a [AdapterPiece], sink: &'a Sink) -> Self {
        Self {
            devices,
            sink,
            pieces,
            passed: 0,
            left: 0,
            window: Vec::new(),
            at: 0,
            file: None,
            digest: crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme),
            unreadable: false,
        }
    }

    /// Reads the next window.
    fn fill(&mut self) {
        while self.pieces.first().is_some_and(|piece| piece.bytes == self.passed) {
            (self.pieces, self.passed) = (&self.pieces[1..], 0);
        }
        let Some(piece) = self.pieces.first() else { return };
        if self.file.as_ref().is_none_or(|(device, segment, _)| (*device, *segment) != (piece.device, piece.segment)) {
            let name = segment::file_name(SegmentId(piece.segment));
            let device = self.devices.get(piece.device);
            let file = device.and_then(|own| io::open(&own.directory, Some(own.index), &own.path, &name, self.sink));
            self.file = file.map(|file| (piece.device, piece.segment, file));
        }
        let len = (piece.bytes - self.passed).min(WINDOW_BYTES as u64);
        (self.window, self.at) = (vec![0; len as usize], 0);
        let read =
            self.file.as_ref().map(|(.., file)| file.read(piece.offset + self.passed, &mut self.window, self.sink));
        self.unreadable |= read.is_none_or(|bad| !bad.is_empty());
        self.digest.update(&self.window);
        self.passed += len;
    }

    fn byte(&mut self) -> u8 {
        self.left -= 1;
        if self.at == self.window.len() {
            self.fill();
        }
        self.at += 1;
        self.window.get(self.at - 1).copied().unwrap_or_default()
    }

    fn four(&mut self) -> ParseResult<[u8; 4]> {
        require(self.left >= 4, || "it ends too early".into())?;
        Ok([self.byte(), self.byte(), self.byte(), self.byte()])
    }

    fn number(&mut self) -> ParseResult<u32> {
        self.four().map(u32::from_le_bytes)
    }

    fn float(&mut self) -> ParseResult<f32> {
        let number = self.four().map(f32::from_le_bytes)?;
        require(number.is_finite(), || format!("the value {number} is not finite"))?;
        Ok(number)
    }

    fn matrix(&mut self, rows: u64, columns: u64) -> ParseResult<()> {
        let elements = rows.checked_mul(columns).filter(|elements| (1..=ELEMENTS_MAX).contains(elements));
        let Some(elements) = elements.filter(|elements| *elements <= self.left / 4) else {
            return Err(format!("a matrix of {rows} x {columns} elements does not fit in {} bytes", self.left));
        };
        (0..elements).try_for_each(|_| self.float().map(drop))
    }

    /// Parses the adapter of a layer with `width` joint key dimensions.
    fn layer(&mut self, width: u64) -> ParseResult<()> {
        let kind = self.number()?;
        let own = u64::from(self.number()?);
        require(own == width, || format!("it has {own} joint key dimensions, its layer {width}"))?;
        match kind {
            KIND_LOW_RANK => {
                let rank = u64::from(self.number()?);
                self.matrix(width, rank)?;
            }
            KIND_CODES => self.codes(width)?,
            _ => return Err(format!("its kind {kind} is unknown")),
        }
        require(self.left == 0, || format!("{} bytes follow its end", self.left))
    }

    /// Parses the tables of transform-coded keys.
    fn codes(&mut self, width: u64) -> ParseResult<()> {
        let (dims, code_bytes) = (self.number()?, self.number()?);
        require((1..=CODE_BYTES_MAX).contains(&code_bytes), || {
            format!("it has {code_bytes} code bytes, the limit is {CODE_BYTES_MAX}")
        })?;
        // A dimension takes at least 16 bytes: its number of levels, two levels, and its place in a code byte.
        require(u64::from(dims) <= self.left / 16, || format!("{dims} dimensions do not fit in {} bytes", self.left))?;
        let distortion = self.float()?;
        require(distortion >= 0.0, || format!("the distortion {distortion} is negative"))?;
        self.matrix(width, 1)?;
        (0..2).try_for_each(|_| self.matrix(width, u64::from(dims)))?;
        let bits = self.levels(dims)?;
        self.code_bytes(code_bytes, bits)
    }

    /// Parses the levels of each dimension. Returns the number of bits that a dimension takes in its code byte.
    fn levels(&mut self, dims: u32) -> ParseResult<Vec<Option<u32>>> {
        let mut bits = Vec::with_capacity(dims as usize);
        for dim in 0..dims {
            let levels = self.number()?;
            let good = levels.is_power_of_two() && (2..=LEVELS_MAX).contains(&levels);
            require(good, || format!("dimension {dim} has {levels} levels, not a power of two up to {LEVELS_MAX}"))?;
            bits.push(Some(levels.ilog2()));
            let mut before = f32::NEG_INFINITY;
            for _ in 0..levels {
                let level = self.float()?;
                require(level >= before, || format!("the levels of dimension {dim} decrease"))?;
                before = level;
            }
        }
        Ok(bits)
    }

    /// Parses which dimensions each code byte holds. Every dimension is in exactly one byte.
    fn code_bytes(&mut self, code_bytes: u32, mut bits: Vec<Option<u32>>) -> ParseResult<()> {
        for byte in 0..code_bytes {
            let count = self.number()?;
            let mut own = 0;
            for _ in 0..count.min(BITS_MAX + 1) {
                let dim = self.number()?;
                let place = bits.get_mut(dim as usize).and_then(Option::take);
                own += place.ok_or_else(|| format!("dimension {dim} does not exist or is in two code bytes"))?;
            }
            require((1..=BITS_MAX).contains(&own) && count <= BITS_MAX, || {
                format!("code byte {byte} has {count} dimensions of {own} bits")
            })?;
        }
        let without = bits.iter().position(Option::is_some);
        require(without.is_none(), || format!("dimension {} is in no code byte", without.unwrap_or_default()))
    }
}

/// Returns what is wrong with the places of an adapter's pieces, or `None`.
///
/// `pieces` are sorted: layer, first byte, bytes. The pieces of a layer must continue each other from byte 0 on, and
/// all pieces must add up to `bytes`. A sequence without an adapter (`None`) must not have pieces.
fn places_defect(bytes: Option<u64>, pieces: &[(u16, u64, u64)]) -> Option<String> {
    let Some(bytes) = bytes else {
        return (!pieces.is_empty())
            .then(|| "a frame holds an adapter, but its sequence has no adapter record".to_owned());
    };
    let mut end = (None, 0);
    for &(layer, first, len) in pieces {
        let expected = if end.0 == Some(layer) { end.1 } else { 0 };
        if first != expected {
            return Some(format!("layer {layer} of the adapter continues at byte {first}, not at byte {expected}"));
        }
        end = (Some(layer), first + len);
    }
    let found: u64 = pieces.iter().map(|(.., len)| len).sum();
    (found != bytes).then(|| format!("the frames hold {found} bytes of the adapter, its record names {bytes}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_defect_accepts_only_complete_layers() {
        assert_eq!(places_defect(None, &[]), None);
        assert!(places_defect(None, &[(0, 0, 1)]).is_some());
        assert_eq!(places_defect(Some(7), &[(1, 0, 2), (1, 2, 2), (3, 0, 2), (4, 0, 1)]), None);
        assert!(places_defect(Some(6), &[(1, 0, 2), (1, 3, 2), (3, 0, 2)]).is_some());
        assert!(places_defect(Some(4), &[(1, 2, 4)]).is_some());
        assert!(places_defect(Some(8), &[(1, 0, 4)]).is_some());
        assert!(places_defect(Some(8), &[(1, 0, 4), (1, 2, 4)]).is_some());
    }
}
