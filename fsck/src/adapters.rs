//! Adapters against their records: every byte of each layer, in order, against the checksum of the record, and what the bytes say.

use crate::devices::Devices;
use crate::finding::{Code, Finding, Sink};
use crate::frames::FrameInfo;
use crate::io::{self, StoreFile, WINDOW_BYTES};
use crate::replay::{Adapter, State};
use std::collections::HashMap;
use stratakv_format::layout::Layout;
use stratakv_format::{SegmentId, segment};

/// Most numbers of a matrix.
const ELEMENTS_MAX: u64 = 1 << 24;
/// Most levels of a dimension, and bits of a code byte.
const LEVELS_MAX: u32 = 256;
const BITS_MAX: u32 = 8;
/// Most code bytes of a token.
const CODE_BYTES_MAX: u32 = 256;

/// A piece of an adapter, and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Piece {
    pub(crate) layer: u16,
    /// First byte of the layer that it has.
    pub(crate) first: u64,
    pub(crate) bytes: u64,
    pub(crate) device: u16,
    pub(crate) segment: u32,
    /// Offset in the file of the segment.
    pub(crate) offset: u64,
    /// It matched its own checksum.
    pub(crate) good: bool,
}

/// Checks the adapter of each sequence that holds one. `frames` has the frames whose header was good.
pub(crate) fn check(devices: &Devices, state: &State, frames: &HashMap<u64, FrameInfo>, sink: &Sink) {
    for (&id, sequence) in &state.sequences {
        let infos: Option<Vec<&FrameInfo>> = sequence.refs.keys().map(|frame| frames.get(frame)).collect();
        // One is damaged or on a missing device, and was reported: what it held is not known.
        let Some(infos) = infos else { continue };
        let mut pieces: Vec<Piece> = infos.iter().flat_map(|info| &info.adapter).copied().collect();
        pieces.sort_unstable();
        let places: Vec<_> = pieces.iter().map(|piece| (piece.layer, piece.first, piece.bytes)).collect();
        if let Some(text) = wrong_places(sequence.adapter.map(|adapter| adapter.bytes), &places) {
            sink.push(Finding::damage(Code::Adapter, text).sequence(id));
        } else if let (Some(adapter), Some(layout)) = (sequence.adapter, state.layouts.get(&sequence.layout))
            && pieces.iter().all(|piece| piece.good)
        {
            check_bytes(devices, id, &adapter, layout, &pieces, sink);
        }
    }
}

/// Reads a whole adapter.
fn check_bytes(devices: &Devices, sequence: u64, adapter: &Adapter, layout: &Layout, pieces: &[Piece], sink: &Sink) {
    let mut bytes = Bytes {
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
    };
    for layer in pieces.chunk_by(|a, b| a.layer == b.layer) {
        let number = layer[0].layer;
        bytes.left = layer.iter().map(|piece| piece.bytes).sum();
        let width = layout.layers.get(usize::from(number)).map_or(0, |layer| layer.key_elements() as u64);
        let wrong = bytes.layer(width).err();
        while bytes.left > 0 {
            bytes.byte();
        }
        if let Some(text) = wrong.filter(|_| !bytes.unreadable) {
            let text = format!("what the adapter has for this layer is none: {text}");
            sink.push(Finding::damage(Code::Adapter, text).sequence(sequence).layer(number).plane("adapter"));
        }
    }
    let found = bytes.digest.finalize();
    if found != adapter.checksum && !bytes.unreadable {
        let text = "the bytes of the adapter do not match the checksum of its record";
        sink.push(Finding::damage(Code::Adapter, text).sequence(sequence).values(adapter.checksum, found));
    }
}

/// The bytes of pieces, one after the other, and the checksum of all that were read.
struct Bytes<'a> {
    devices: &'a Devices,
    sink: &'a Sink,
    pieces: &'a [Piece],
    /// Bytes of the first piece that are in the window or were.
    passed: u64,
    /// Bytes of the layer that were not taken yet.
    left: u64,
    window: Vec<u8>,
    at: usize,
    /// The file that was read last.
    file: Option<(u16, u32, StoreFile)>,
    digest: crc_fast::Digest,
    /// Some of it could not be read, which was reported.
    unreadable: bool,
}

type Parsed<T> = Result<T, String>;

fn require(condition: bool, text: impl FnOnce() -> String) -> Parsed<()> {
    if condition { Ok(()) } else { Err(text()) }
}

impl Bytes<'_> {
    /// Reads on. There is more.
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

    fn four(&mut self) -> Parsed<[u8; 4]> {
        require(self.left >= 4, || "it ends early".into())?;
        Ok([self.byte(), self.byte(), self.byte(), self.byte()])
    }

    fn number(&mut self) -> Parsed<u32> {
        self.four().map(u32::from_le_bytes)
    }

    fn float(&mut self) -> Parsed<f32> {
        let number = self.four().map(f32::from_le_bytes)?;
        require(number.is_finite(), || format!("{number} is no number"))?;
        Ok(number)
    }

    fn matrix(&mut self, rows: u64, columns: u64) -> Parsed<()> {
        let elements = rows.checked_mul(columns).filter(|elements| (1..=ELEMENTS_MAX).contains(elements));
        let Some(elements) = elements.filter(|elements| *elements <= self.left / 4) else {
            return Err(format!("a matrix of {rows} x {columns} in {} bytes", self.left));
        };
        (0..elements).try_for_each(|_| self.float().map(drop))
    }

    /// What an adapter has for a layer of this width.
    fn layer(&mut self, width: u64) -> Parsed<()> {
        let kind = self.number()?;
        let own = u64::from(self.number()?);
        require(own == width, || format!("{own} joint key dimensions, the layer has {width}"))?;
        match kind {
            1 => {
                let rank = u64::from(self.number()?);
                self.matrix(width, rank)?;
            }
            2 => self.codes(width)?,
            _ => return Err(format!("numbers of kind {kind}")),
        }
        require(self.left == 0, || format!("{} bytes behind its end", self.left))
    }

    fn codes(&mut self, width: u64) -> Parsed<()> {
        let (dims, code_bytes) = (self.number()?, self.number()?);
        require((1..=CODE_BYTES_MAX).contains(&code_bytes), || format!("{code_bytes} code bytes"))?;
        // A dimension has two levels at least, and a place in a byte.
        require(u64::from(dims) <= self.left / 16, || format!("{dims} dimensions in {} bytes", self.left))?;
        let distortion = self.float()?;
        require(distortion >= 0.0, || format!("a distortion of {distortion}"))?;
        self.matrix(width, 1)?;
        (0..2).try_for_each(|_| self.matrix(width, u64::from(dims)))?;
        let mut bits = Vec::with_capacity(dims as usize);
        for dim in 0..dims {
            let levels = self.number()?;
            let good = levels.is_power_of_two() && (2..=LEVELS_MAX).contains(&levels);
            require(good, || format!("{levels} levels of dimension {dim}"))?;
            bits.push(Some(levels.ilog2()));
            let mut before = f32::NEG_INFINITY;
            for _ in 0..levels {
                let level = self.float()?;
                require(level >= before, || format!("levels of dimension {dim} fall"))?;
                before = level;
            }
        }
        for byte in 0..code_bytes {
            let count = self.number()?;
            let mut own = 0;
            for _ in 0..count.min(BITS_MAX + 1) {
                let dim = self.number()?;
                let place = bits.get_mut(dim as usize).and_then(Option::take);
                own += place.ok_or_else(|| format!("dimension {dim} is not there, or in two places"))?;
            }
            require((1..=BITS_MAX).contains(&own) && count <= BITS_MAX, || format!("{own} bits in code byte {byte}"))?;
        }
        let without = bits.iter().position(Option::is_some);
        require(without.is_none(), || format!("dimension {} is in no code byte", without.unwrap_or_default()))
    }
}

/// What is wrong with the pieces of an adapter (layer, first byte, bytes), sorted, where a sequence holds one of `bytes` bytes: each
/// layer from its first byte on without gap or overlap, and all of them together.
fn wrong_places(bytes: Option<u64>, pieces: &[(u16, u64, u64)]) -> Option<String> {
    let Some(bytes) = bytes else {
        return (!pieces.is_empty()).then(|| "a frame holds an adapter, and its sequence none".to_owned());
    };
    let mut end = (None, 0);
    for &(layer, first, len) in pieces {
        let expected = if end.0 == Some(layer) { end.1 } else { 0 };
        if first != expected {
            return Some(format!("layer {layer} of the adapter goes on at byte {first}, not at {expected}"));
        }
        end = (Some(layer), first + len);
    }
    let found: u64 = pieces.iter().map(|(.., len)| len).sum();
    (found != bytes).then(|| format!("an adapter of {bytes} bytes has {found} in its frames"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_whole_or_not() {
        assert_eq!(wrong_places(None, &[]), None);
        assert!(wrong_places(None, &[(0, 0, 1)]).is_some());
        assert_eq!(wrong_places(Some(7), &[(1, 0, 2), (1, 2, 2), (3, 0, 2), (4, 0, 1)]), None);
        assert!(wrong_places(Some(6), &[(1, 0, 2), (1, 3, 2), (3, 0, 2)]).is_some());
        assert!(wrong_places(Some(4), &[(1, 2, 4)]).is_some());
        assert!(wrong_places(Some(8), &[(1, 0, 4)]).is_some());
        assert!(wrong_places(Some(8), &[(1, 0, 4), (1, 2, 4)]).is_some());
    }
}
