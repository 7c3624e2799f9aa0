//! The tables of a frame that is being built: descriptors, checksums, and the small pieces behind the header.
//!
//! The writer fills them in this order:
//! 1. [`FrameTables::put_front`] adds the small pieces: summaries, token ids, caller state, adapters, tails.
//! 2. [`FrameTables::put_groups`] adds the groups. Runs of a layer that continue each other become one extent.
//! 3. [`FrameTables::place`] adds the lengths of header and front to the offsets, once the header's length is known.
//! 4. [`fill_front`] copies the small pieces into the buffers that are written.
//!
//! Invariants:
//! - A piece has one descriptor, and its checksums are adjacent in the table.
//! - The checksum of a plane covers the identity of the plane and its bytes.
//! - The descriptors of summaries are the first ones.
//! - Small pieces begin at multiples of 8 bytes, and the bytes between them are zero.
//!
//! Source: SPEC.md, the chapter about frames. The caller is `write_frame`.

use super::written::PlacedRun;
use crate::catalog::{GroupBuffer, SummaryPlace, min_max_records};
use crate::error::Result;
use crate::io::planted::covered_bytes;
use crate::log::devices::Devices;
use crate::log::frame_builder::{FrameBuilder, RecordBytes, SummaryPart, SummaryRecordKind, TailRows};
use crate::log::sequence_identity::SequenceIdentity;
use std::sync::Arc;
use stratakv_format::frame::{self, Descriptor, HeaderBuilder};
use stratakv_format::layout::LayerGeometry;
use stratakv_format::{FrameId, PAGE_BYTES, PlaneIdentity};
use zerocopy::little_endian::{U16, U32, U64};

/// The descriptors and checksums of a frame that is being built, and the small pieces behind its header.
pub(super) struct FrameTables<'a> {
    pub(super) devices: &'a Devices,
    pub(super) identity: &'a SequenceIdentity,
    pub(super) nonce: u64,
    pub(super) descriptors: Vec<Descriptor>,
    pub(super) checksums: Vec<u64>,
    pub(super) front: Front<'a>,
}

/// The small pieces in front of the groups: bytes at their offsets, zeros between them.
///
/// They are copied once, into the buffers that are written.
#[derive(Default)]
pub(super) struct Front<'a> {
    pub(super) pieces: Vec<(usize, &'a [u8])>,
    pub(super) len: usize,
}

impl<'a> Front<'a> {
    fn push(&mut self, bytes: &'a [u8]) {
        self.pieces.push((self.len, bytes));
        self.len += bytes.len();
    }
}

/// Fills `out`, the bytes from offset `base` on, with the bytes of `pieces` and zeros between them.
///
/// The pieces are sorted by offset and do not overlap.
pub(super) fn fill_front(pieces: &[(usize, &[u8])], base: usize, out: &mut [u8]) {
    let mut at = 0;
    for (offset, bytes) in pieces {
        let (start, end) = (offset.saturating_sub(base), (offset + bytes.len()).saturating_sub(base).min(out.len()));
        if end <= start {
            continue;
        }
        let skip = base.saturating_sub(*offset);
        out[at..start].fill(0);
        out[start..end].copy_from_slice(&bytes[skip..skip + end - start]);
        at = end;
    }
    out[at..].fill(0);
}

/// A piece of a frame, which one descriptor describes.
pub(super) struct FramePiece {
    pub(super) kind: u16,
    pub(super) layer: usize,
    pub(super) first_token: u64,
    pub(super) tokens: u32,
    pub(super) pieces: u32,
    pub(super) summary: Option<SummaryRecordKind>,
}

/// An extent of groups that later runs may continue.
struct OpenExtent {
    piece: FramePiece,
    /// Its first page, counted from the first run.
    page: u32,
    /// Index of its first checksum.
    checksum: usize,
}

impl FramePiece {
    /// Returns a piece without layer and summary.
    pub(super) fn small(kind: u16, first_token: u64, tokens: u32) -> Self {
        Self { kind, layer: 0, first_token, tokens, pieces: 1, summary: None }
    }
}

impl<'a> FrameTables<'a> {
    pub(super) fn new(devices: &'a Devices, identity: &'a SequenceIdentity, nonce: u64) -> Self {
        Self { devices, identity, nonce, descriptors: Vec::new(), checksums: Vec::new(), front: Front::default() }
    }

    /// Returns the header of the frame, complete except for its place. All tables are filled.
    pub(super) fn header(&self, (frame, lsn): (FrameId, u64), front_pages: u32) -> HeaderBuilder<'_> {
        let identity = self.identity;
        HeaderBuilder {
            frame,
            lsn,
            nonce: self.nonce,
            sequence: identity.sequence,
            parent: identity.parent,
            created_unix_ms: self.devices.environment.unix_ms(),
            layout_id: identity.layout_id,
            layout: identity.layout.raw(),
            key: identity.key.as_bytes(),
            summaries: identity.summaries,
            descriptors: &self.descriptors,
            checksums: &self.checksums,
            front_pages,
        }
    }

    /// Adds everything of the builder that precedes the groups: summaries, token ids, caller state, adapters, tails.
    ///
    /// # Errors
    /// The errors of [`TailRows::rows`].
    pub(super) fn put_front(&mut self, builder: &'a FrameBuilder, tails: &'a dyn TailRows) -> Result<()> {
        let group = u64::from(self.identity.layout.raw().group_tokens);
        for part in &builder.summaries {
            let piece = FramePiece {
                kind: frame::KIND_SUMMARY,
                layer: part.layer,
                first_token: part.first_group * group,
                tokens: (part.groups as u64 * group) as u32,
                pieces: part.groups as u32,
                summary: Some(part.what),
            };
            let parts: Vec<&[u8]> = part.pieces.iter().map(RecordBytes::bytes).collect();
            self.front_piece(&piece, &[&parts]);
        }
        if let Some((first, bytes, count)) = &builder.token_ids {
            self.front_piece(&FramePiece::small(frame::KIND_TOKEN_IDS, *first, *count), &[&[bytes]]);
        }
        if let Some((tokens, state)) = &builder.state {
            self.front_piece(&FramePiece::small(frame::KIND_CALLER_STATE, *tokens, state.len() as u32), &[&[state]]);
        }
        for part in &builder.adapters {
            let piece = FramePiece::small(frame::KIND_ADAPTER, part.first, part.bytes.len() as u32);
            self.front_piece(&FramePiece { layer: part.layer, ..piece }, &[&[&part.bytes]]);
        }
        let mut parts = [Vec::new(), Vec::new()];
        for tail in &builder.tails {
            let piece = FramePiece::small(frame::KIND_TAIL, tail.first_token, tail.tokens);
            parts.iter_mut().for_each(Vec::clear);
            for (plane, out) in parts.iter_mut().enumerate() {
                tails.rows(tail, plane, out)?;
            }
            let planes: [&[&[u8]]; 2] = [&parts[0], &parts[1]];
            let planes = if parts[1].is_empty() { &planes[..1] } else { &planes };
            self.front_piece(&FramePiece { layer: tail.layer, ..piece }, planes);
        }
        Ok(())
    }

    /// Adds a piece of a directory of clusters, which is piece `number` of the frame.
    pub(super) fn put_directory(&mut self, number: u64, layer: usize, piece: &'a [u8]) {
        let own = FramePiece::small(frame::KIND_CLUSTER_DIRECTORY, number, piece.len() as u32);
        self.front_piece(&FramePiece { layer, ..own }, &[&[piece]]);
    }

    /// Adds a pool of a layer, all of whose pages are written with the frame. It follows the front.
    pub(super) fn put_pool(&mut self, layer: usize, page_bytes: usize, bytes: usize) {
        let pages = (bytes / page_bytes) as u32;
        let own = FramePiece::small(frame::KIND_POOL, 0, pages);
        self.describe(&FramePiece { layer, pieces: pages, ..own }, 0, bytes as u64, self.checksums.len());
        if let Some(descriptor) = self.descriptors.last_mut() {
            descriptor.record_bytes = U32::new(page_bytes as u32);
        }
    }

    /// Adds the groups. Runs of one layer that continue each other become one extent.
    ///
    /// Returns the runs with their pages, counted from the first run, and the pages of all runs.
    ///
    /// # Errors
    /// The buffer of a run is gone, or a layer has no KV.
    pub(super) fn put_groups(&mut self, runs: &[Arc<GroupBuffer>]) -> Result<(Vec<PlacedRun>, u32)> {
        let group = u64::from(self.identity.layout.raw().group_tokens);
        let group_checksums = self.checksums.len();
        let mut page = 0_u32;
        let mut placed = Vec::with_capacity(runs.len());
        let mut open: Option<OpenExtent> = None;
        for (index, run) in runs.iter().enumerate() {
            let planes = self.identity.layout.kv_layer(run.layer)?.planes();
            let (layer, first_token) = (run.layer, run.first_group * group);
            let continues = open.as_ref().is_some_and(|OpenExtent { piece, .. }| {
                piece.layer == layer
                    && piece.first_token + u64::from(piece.tokens) == first_token
                    && runs[index - 1].ends_on_page()
            });
            if !continues {
                self.close_extent(open.take(), page);
                let piece = FramePiece::small(frame::KIND_GROUPS, first_token, 0);
                let piece = FramePiece { pieces: 0, layer, ..piece };
                open = Some(OpenExtent { piece, page, checksum: self.checksums.len() });
            }
            placed.push(PlacedRun { run: Arc::clone(run), page, checksum: self.checksums.len() - group_checksums });
            if let Some(OpenExtent { piece, .. }) = &mut open {
                for at in 0..run.groups {
                    let bytes = run.block(at)?;
                    for plane in 0..planes {
                        let (start, len) = run.geometry.plane(plane);
                        let token = first_token + at as u64 * group;
                        let data = &bytes[start..start + len];
                        let checksum = self.checksum(piece, token, group as u32, plane as u16, &[data]);
                        self.checksums.push(checksum);
                    }
                }
                piece.pieces += run.groups as u32;
                piece.tokens += (run.groups as u64 * group) as u32;
            }
            page += (run.disk_bytes() / PAGE_BYTES) as u32;
        }
        self.close_extent(open.take(), page);
        Ok((placed, page))
    }

    /// Describes an extent of groups that ends before page `end`. Offsets count from the first run.
    fn close_extent(&mut self, extent: Option<OpenExtent>, end: u32) {
        if let Some(OpenExtent { piece, page, checksum }) = extent {
            let bytes = u64::from(end - page) * PAGE_BYTES as u64;
            self.describe(&piece, u64::from(page) * PAGE_BYTES as u64, bytes, checksum);
        }
    }

    /// Makes all offsets count from the frame's start, now that the header's length is known.
    pub(super) fn place(&mut self, front_descriptors: usize, header_bytes: usize, front_bytes: usize) {
        for (index, descriptor) in self.descriptors.iter_mut().enumerate() {
            let base = if index < front_descriptors { header_bytes } else { front_bytes };
            descriptor.offset = U64::new(descriptor.offset.get() + base as u64);
        }
    }

    /// Returns where the summary records of the builder are. They are the first pieces of the frame.
    pub(super) fn summary_places(&self, builder: &FrameBuilder) -> Vec<SummaryPlace> {
        let stored = self.descriptors.iter().zip(&self.checksums).zip(&builder.summaries);
        let place = |((descriptor, checksum), part): ((&Descriptor, &u64), &SummaryPart)| SummaryPlace {
            layer: part.layer as u16,
            stored: match part.what {
                SummaryRecordKind::MinMax(_) => min_max_records((part.bytes() / part.groups.max(1)) as u32),
                SummaryRecordKind::Stored(stored) => stored,
            },
            first_group: part.first_group,
            groups: part.groups as u32,
            offset: descriptor.offset.get(),
            bytes: descriptor.bytes.get(),
            checksum: *checksum,
        };
        stored.map(place).collect()
    }

    /// Returns the checksum of a plane, given in parts, over its identity and its bytes.
    fn checksum(&self, piece: &FramePiece, first_token: u64, tokens: u32, plane: u16, parts: &[&[u8]]) -> u64 {
        let layer = piece.layer as u16;
        let sequence = self.identity.sequence;
        let identity =
            PlaneIdentity::new(self.nonce, sequence, piece.kind, layer, first_token, tokens).with_plane(plane);
        let mut left = covered_bytes(parts.iter().map(|part| part.len()).sum());
        let covered = parts.iter().map(|part| {
            let bytes = part.len().min(left);
            left -= bytes;
            &part[..bytes]
        });
        self.devices.identity.checksum.compute_parts(&identity, covered)
    }

    fn describe(&mut self, piece: &FramePiece, offset: u64, bytes: u64, checksum_first: usize) {
        let (summary, element, record_bytes) = match piece.summary {
            None => (0, 0, 0),
            Some(SummaryRecordKind::MinMax(element)) => (frame::SUMMARY_MIN_MAX, element.code(), 0),
            Some(SummaryRecordKind::Stored(stored)) => (stored.kind, 0, stored.record_bytes),
        };
        self.descriptors.push(Descriptor {
            kind: U16::new(piece.kind),
            layer: U16::new(piece.layer as u16),
            codec: U16::new(self.codec(piece)),
            summary: U16::new(summary),
            first_token: U64::new(piece.first_token),
            tokens: U32::new(piece.tokens),
            pieces: U32::new(piece.pieces),
            offset: U64::new(offset),
            bytes: U64::new(bytes),
            checksum_first: U32::new(checksum_first as u32),
            checksum_count: U32::new((self.checksums.len() - checksum_first) as u32),
            element,
            cipher: 0,
            key: U16::new(0),
            record_bytes: U32::new(record_bytes),
        });
    }

    fn codec(&self, piece: &FramePiece) -> u16 {
        let layer = self.identity.layout.raw().layers.get(piece.layer).filter(|_| piece.kind == frame::KIND_GROUPS);
        layer.map_or(frame::CODEC_RAW, LayerGeometry::codec_code)
    }

    /// Adds a small piece: its planes, each given in parts, with one checksum each.
    fn front_piece(&mut self, piece: &FramePiece, planes: &[&[&'a [u8]]]) {
        let (offset, first) = (self.front.len, self.checksums.len());
        for (index, parts) in planes.iter().enumerate() {
            let checksum = self.checksum(piece, piece.first_token, piece.tokens, index as u16, parts);
            self.checksums.push(checksum);
            parts.iter().for_each(|part| self.front.push(part));
        }
        let bytes = self.front.len - offset;
        self.describe(piece, offset as u64, bytes as u64, first);
        self.front.len = self.front.len.next_multiple_of(8);
    }
}
