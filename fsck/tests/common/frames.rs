//! Frames with pseudo-random payload, encoded extent by extent.

use super::CHECKSUM;
use std::ops::Range;
use stratakv_format::checksum::PlaneIdentity;
use stratakv_format::frame::*;
use stratakv_format::layout::Layout;
use stratakv_format::manifest as m;
use stratakv_format::{FrameId, LayoutId, PAGE_BYTES, SequenceId};
use zerocopy::little_endian::{U16, U32, U64};

/// The tokens that a frame holds of all layers: full groups, and the rest as a tail.
pub struct FrameTokens<'a> {
    pub device: u16,
    pub sequence: u64,
    pub key: &'a [u8],
    pub tokens: Range<u64>,
    pub state: &'a [u8],
}

impl FrameTokens<'_> {
    pub fn extents(&self) -> Vec<Extent> {
        let Range { start: first, end } = self.tokens;
        let groups_end = first + (end - first) / 4 * 4;
        let mut extents = Vec::new();
        let layers = [0_u16, 2];
        let grouped = |kind| {
            let extent =
                move |layer| Extent { kind, layer, first, tokens: (groups_end - first) as u32, content: Vec::new() };
            layers.into_iter().filter(move |_| groups_end > first).map(extent)
        };
        extents.extend(grouped(KIND_SUMMARY));
        for layer in layers.into_iter().filter(|_| end > groups_end) {
            let (first, tokens) = (groups_end, (end - groups_end) as u32);
            extents.push(Extent { kind: KIND_TAIL, layer, first, tokens, content: Vec::new() });
        }
        let tokens = (end - first) as u32;
        extents.push(Extent { kind: KIND_TOKEN_IDS, layer: 0, first, tokens, content: Vec::new() });
        if !self.state.is_empty() {
            let tokens = self.state.len() as u32;
            extents.push(Extent { kind: KIND_CALLER_STATE, layer: 0, first: end, tokens, content: Vec::new() });
        }
        extents.extend(grouped(KIND_GROUPS));
        extents
    }
}

/// One extent of a frame.
pub struct Extent {
    pub kind: u16,
    pub layer: u16,
    pub first: u64,
    pub tokens: u32,
    /// The bytes of the extent. If it is empty, they are pseudo-random.
    pub content: Vec<u8>,
}

impl Extent {
    /// Returns the number of groups or summaries, or 1.
    fn pieces(&self) -> u32 {
        if matches!(self.kind, KIND_GROUPS | KIND_SUMMARY) { self.tokens / 4 } else { 1 }
    }

    fn checksums(&self) -> usize {
        match self.kind {
            KIND_GROUPS => self.pieces() as usize * 2,
            KIND_TAIL => 2,
            _ => 1,
        }
    }
}

/// A frame while it is encoded: [`lay_out`](Self::lay_out) fills the payload, [`finish`](Self::finish) the header.
pub struct FrameWriter<'a> {
    layout: &'a Layout,
    id: u64,
    sequence: u64,
    key: &'a [u8],
    nonce: u64,
    bytes: Vec<u8>,
    descriptors: Vec<Descriptor>,
    checksums: Vec<u64>,
    header_bytes: usize,
    /// The end of the pages before the groups.
    front_bytes: usize,
    seed: u8,
}

impl<'a> FrameWriter<'a> {
    pub fn new(layout: &'a Layout, id: u64, sequence: u64, key: &'a [u8]) -> Self {
        Self {
            layout,
            id,
            sequence,
            key,
            nonce: 0x55aa_0000 + id,
            bytes: Vec::new(),
            descriptors: Vec::new(),
            checksums: Vec::new(),
            header_bytes: 0,
            front_bytes: 0,
            seed: id as u8,
        }
    }

    /// Fills the payload. Returns the pages of the frame.
    pub fn lay_out(&mut self, extents: &[Extent]) -> u32 {
        let checksums = extents.iter().map(Extent::checksums).sum();
        self.header_bytes = header_bytes(self.layout, self.key.len(), extents.len(), checksums);
        self.front_bytes = self.header_bytes;
        self.bytes = vec![0; self.header_bytes];
        extents.iter().for_each(|extent| self.extent(extent));
        self.bytes.resize(self.bytes.len().next_multiple_of(PAGE_BYTES), 0);
        (self.bytes.len() / PAGE_BYTES) as u32
    }

    fn extent(&mut self, e: &Extent) {
        let align = if e.kind == KIND_GROUPS { PAGE_BYTES } else { 8 };
        let start = self.bytes.len().next_multiple_of(align);
        self.bytes.resize(start, 0);
        let first_checksum = self.checksums.len() as u32;
        match e.kind {
            KIND_GROUPS => self.groups(e, start),
            KIND_TAIL => self.tail(e, start),
            _ => self.single_plane(e, start),
        }
        if e.kind != KIND_GROUPS {
            self.front_bytes = self.bytes.len().next_multiple_of(PAGE_BYTES);
        }
        let summary = e.kind == KIND_SUMMARY;
        self.descriptors.push(Descriptor {
            kind: U16::new(e.kind),
            layer: U16::new(e.layer),
            codec: U16::new(CODEC_RAW),
            summary: U16::new(if summary { SUMMARY_MIN_MAX } else { 0 }),
            first_token: U64::new(e.first),
            tokens: U32::new(e.tokens),
            pieces: U32::new(e.pieces()),
            offset: U64::new(start as u64),
            bytes: U64::new((self.bytes.len() - start) as u64),
            checksum_first: U32::new(first_checksum),
            checksum_count: U32::new(self.checksums.len() as u32 - first_checksum),
            element: if summary { min_max_element(self.layout.dtype).code() } else { 0 },
            cipher: 0,
            key: U16::new(0),
            record_bytes: U32::new(0),
        });
    }

    fn groups(&mut self, e: &Extent, start: usize) {
        let block = self.layout.block(&self.layout.layers[e.layer as usize]);
        self.bytes.resize(start + block.extent_bytes(e.pieces() as usize), 0);
        for group in 0..e.pieces() {
            for plane in 0..2 {
                let (offset, bytes) = block.plane(plane);
                let at = start + block.block_offset(group as usize) + offset;
                self.fill(at..at + bytes);
                self.add_checksum(e, (e.first + u64::from(group) * 4, 4, plane as u16), at..at + bytes);
            }
        }
    }

    fn tail(&mut self, e: &Extent, start: usize) {
        let geometry = &self.layout.layers[e.layer as usize];
        let (k, v) = tail_plane_bytes(geometry, self.layout.dtype, e.tokens as usize);
        self.bytes.resize(start + k + v, 0);
        self.fill(start..start + k + v);
        self.add_checksum(e, (e.first, e.tokens, 0), start..start + k);
        self.add_checksum(e, (e.first, e.tokens, 1), start + k..start + k + v);
    }

    fn single_plane(&mut self, e: &Extent, start: usize) {
        let geometry = &self.layout.layers[e.layer as usize];
        let bytes = match e.kind {
            KIND_SUMMARY => e.pieces() as usize * min_max_record_bytes(geometry),
            KIND_TOKEN_IDS => e.tokens as usize * 4,
            _ => e.tokens as usize,
        };
        self.bytes.resize(start + bytes, 0);
        self.fill(start..start + bytes);
        if !e.content.is_empty() {
            self.bytes[start..].copy_from_slice(&e.content);
        }
        self.add_checksum(e, (e.first, e.tokens, 0), start..start + bytes);
    }

    /// Fills a range with pseudo-random bytes.
    fn fill(&mut self, range: Range<usize>) {
        for byte in &mut self.bytes[range] {
            self.seed = self.seed.wrapping_mul(31).wrapping_add(7);
            *byte = self.seed;
        }
    }

    fn add_checksum(&mut self, e: &Extent, (first, tokens, plane): (u64, u32, u16), range: Range<usize>) {
        let sequence = SequenceId(self.sequence);
        let identity = PlaneIdentity::new(self.nonce, sequence, e.kind, e.layer, first, tokens).with_plane(plane);
        self.checksums.push(CHECKSUM.compute(&identity, &self.bytes[range]));
    }

    /// Writes the header. Returns the bytes of the frame and its manifest record.
    pub fn finish(mut self, place: &FramePlace) -> (Vec<u8>, m::Frame) {
        let front_pages = (self.front_bytes / PAGE_BYTES) as u32;
        let builder = HeaderBuilder {
            frame: FrameId(self.id),
            lsn: self.id,
            nonce: self.nonce,
            sequence: SequenceId(self.sequence),
            parent: None,
            created_unix_ms: 0,
            layout_id: LayoutId(1),
            layout: self.layout,
            key: self.key,
            summaries: 1,
            descriptors: &self.descriptors,
            checksums: &self.checksums,
            front_pages,
        };
        let crc = builder.write(place, &mut self.bytes).unwrap();
        let record = m::Frame {
            frame: U64::new(self.id),
            origin: U64::new(self.sequence),
            lsn: U64::new(self.id),
            nonce: U64::new(self.nonce),
            location: place.location.to_raw(),
            header_crc: U32::new(crc),
            header_pages: U32::new((self.header_bytes / PAGE_BYTES) as u32),
            front_pages: U32::new(front_pages),
            flags: U32::new(0),
        };
        (self.bytes, record)
    }
}
