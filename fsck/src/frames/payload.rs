//! The payload of a frame, read once from front to back through a window.
//!
//! Invariant: every byte behind the header is part of a plane, whose checksum is compared, part of a pool, or zero.
//!
//! An extent starts at the offset of its descriptor. A groups extent holds blocks of one or two planes per group, with
//! zeros between them. Every other extent holds its planes without gaps.

use super::digest::Digest;
use super::info::{AdapterPiece, DirectoryExtent};
use crate::finding::{Code, Finding, Sink};
use crate::io::{self, StoreFile, WINDOW_BYTES};
use crate::options::Depth;
use crate::report::{Counts, Progress};
use std::ops::Range;
use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity};
use stratakv_format::codec::PlaneShape;
use stratakv_format::frame::{
    Descriptor, FrameView, KIND_ADAPTER, KIND_CALLER_STATE, KIND_CLUSTER_DELTA, KIND_CLUSTER_DIRECTORY, KIND_GROUPS,
    KIND_POOL, KIND_SUMMARY, KIND_TAIL, KIND_TOKEN_IDS, SUMMARY_MIN_MAX, SummaryHeader, tail_plane_bytes,
};
use stratakv_format::layout::{LayerGeometry, Layout};
use stratakv_format::pool::StatePiece;
use stratakv_format::{DType, Location, PlaneCodec, SequenceId};
use zerocopy::little_endian::U64;

/// The bytes of a piece up to the end of its part, which says whether it is one of a state.
const PART_END: usize = 4;

/// The settings, counters and sink that the reads of all frames share.
pub(crate) struct ReadContext<'a> {
    pub(crate) checksum: PayloadChecksum,
    pub(crate) depth: Depth,
    pub(crate) counts: &'a Counts,
    pub(crate) sink: &'a Sink,
    pub(crate) progress: &'a dyn Progress,
}

/// The place of one copy of a frame.
#[derive(Clone, Copy)]
pub(super) struct FrameBytes {
    pub(super) id: u64,
    /// The sequence that wrote the frame.
    pub(super) origin: u64,
    pub(super) location: Location,
    pub(super) header_bytes: u64,
    /// Bytes from the start of the frame that are read, at least those of the header.
    pub(super) read_bytes: u64,
}

/// One plane to check.
struct Plane {
    kind: u16,
    layer: u16,
    first: u64,
    tokens: u32,
    plane: u16,
    bytes: u64,
    checksum: u64,
}

/// The payload of one copy of a frame.
pub(super) struct Payload<'a> {
    context: &'a ReadContext<'a>,
    file: &'a StoreFile,
    frame: FrameBytes,
    /// The nonce of the frame, which seeds the checksums.
    nonce: u64,
    /// Offsets in the file: of the frame, of the next byte, and of the end of what is read.
    start: u64,
    at: u64,
    end: u64,
    window: Vec<u8>,
    window_at: u64,
    filled: u64,
    /// The ranges that could not be read. They were reported.
    bad: Vec<Range<u64>>,
    parts: PayloadParts,
}

/// The parts of a payload that later checks read again.
#[derive(Default)]
pub(super) struct PayloadParts {
    pub(super) adapter: Vec<AdapterPiece>,
    pub(super) directories: Vec<DirectoryExtent>,
}

impl<'a> Payload<'a> {
    pub(super) fn new(context: &'a ReadContext<'a>, file: &'a StoreFile, frame: FrameBytes) -> Self {
        let start = frame.location.offset();
        let (at, end) = (start + frame.header_bytes, start + frame.read_bytes);
        Self {
            context,
            file,
            frame,
            nonce: 0,
            start,
            at,
            end,
            window: vec![0; WINDOW_BYTES.min((end - at) as usize)],
            window_at: at,
            filled: 0,
            bad: Vec::new(),
            parts: PayloadParts::default(),
        }
    }

    /// Checks every byte of the payload that is read. Returns the parts that later checks read again.
    pub(super) fn check(mut self, view: &FrameView<'_>) -> PayloadParts {
        self.nonce = view.header().nonce.get();
        let is_read = |own: &&Descriptor| own.offset.get() + own.bytes.get() <= self.frame.read_bytes;
        let extents: Vec<&Descriptor> = view.descriptors().iter().filter(is_read).collect();
        for descriptor in extents {
            self.extent(view, descriptor);
        }
        self.zeros(self.end);
        self.parts
    }

    fn extent(&mut self, view: &FrameView<'_>, descriptor: &Descriptor) {
        let (layout, layer_index) = (view.layout(), descriptor.layer.get());
        let start = self.start + descriptor.offset.get();
        let checksums = view.checksums(descriptor);
        self.zeros(start);
        let whole = Plane {
            kind: descriptor.kind.get(),
            layer: layer_index,
            first: descriptor.first_token.get(),
            tokens: descriptor.tokens.get(),
            plane: 0,
            bytes: descriptor.bytes.get(),
            checksum: checksums.first().map_or(0, |checksum| checksum.get()),
        };
        match (whole.kind, layout.layers.get(usize::from(layer_index))) {
            (KIND_GROUPS, Some(layer)) => self.groups(&whole, start, checksums, (layout, layer)),
            (KIND_TAIL, Some(layer)) => {
                let (key, value) = tail_plane_bytes(layer, layout.dtype, whole.tokens as usize);
                for (plane, (bytes, checksum)) in [key, value].into_iter().zip(checksums).enumerate() {
                    let (plane, bytes, checksum) = (plane as u16, bytes as u64, checksum.get());
                    let own = Plane { plane, bytes, checksum, ..whole };
                    if layer.is_encoded() {
                        self.encodable_plane(&own, layout.dtype);
                    } else {
                        self.plane(&own);
                    }
                }
            }
            (KIND_SUMMARY, Some(layer)) if descriptor.summary.get() != SUMMARY_MIN_MAX => {
                self.summary(&whole, start, descriptor, (layout, layer));
            }
            (KIND_ADAPTER, _) => {
                let good = self.plane(&whole);
                let Location { device, segment, .. } = self.frame.location;
                let (layer, first, bytes) = (layer_index, whole.first, whole.bytes);
                let (device, segment) = (device.0, segment.0);
                self.parts.adapter.push(AdapterPiece { layer, first, bytes, device, segment, offset: start, good });
            }
            (KIND_CLUSTER_DIRECTORY, _) => {
                let mut first = Vec::new();
                let good = self.plane_with(&whole, |bytes| {
                    first.extend_from_slice(&bytes[..bytes.len().min(PART_END.saturating_sub(first.len()))]);
                });
                self.parts.directories.push(DirectoryExtent {
                    layer: layer_index,
                    offset: start,
                    bytes: whole.bytes,
                    good,
                    is_state: StatePiece::is_meant(&first),
                });
            }
            // The checksums of its pages are stored in directories.
            (KIND_POOL, _) => {
                self.feed(whole.bytes, |_, _| {});
            }
            _ => {
                self.plane(&whole);
            }
        }
        self.zeros(start + descriptor.bytes.get());
    }

    /// Checks the planes of each group, and the zeros between blocks.
    fn groups(&mut self, whole: &Plane, start: u64, checksums: &[U64], (layout, layer): (&Layout, &LayerGeometry)) {
        let block = layout.block(layer);
        let group = u32::from(layout.group_tokens);
        for (nth, checksums) in checksums.chunks(layer.planes()).enumerate() {
            let at = start + block.block_offset(nth) as u64;
            for (plane, checksum) in checksums.iter().enumerate() {
                let (offset, bytes) = block.plane(plane);
                self.zeros(at + offset as u64);
                let own = Plane {
                    first: whole.first + nth as u64 * u64::from(group),
                    tokens: group,
                    plane: plane as u16,
                    bytes: bytes as u64,
                    checksum: checksum.get(),
                    ..*whole
                };
                if layer.codecs[plane] == PlaneCodec::Raw {
                    self.plane(&own);
                } else {
                    self.encoded_plane(&own, layer.codecs[plane], &layout.plane_shape(layer, plane));
                }
            }
        }
    }

    /// Checks the summaries of a method other than min/max: their bytes and their header.
    fn summary(
        &mut self,
        whole: &Plane,
        start: u64,
        descriptor: &Descriptor,
        (layout, layer): (&Layout, &LayerGeometry),
    ) {
        let mut header = Vec::new();
        self.plane_with(whole, |bytes| {
            let more = size_of::<SummaryHeader>().saturating_sub(header.len()).min(bytes.len());
            header.extend_from_slice(&bytes[..more]);
        });
        let (kind, record, group) =
            (descriptor.summary.get(), descriptor.record_bytes.get(), usize::from(layout.group_tokens));
        // The header is shorter if its page could not be read, which was reported.
        let complete = header.len() == size_of::<SummaryHeader>();
        let defect = complete.then(|| SummaryHeader::verify(&header, kind, layer, group, record).err()).flatten();
        if let Some(error) = defect {
            let (first, end) = (descriptor.first_token.get(), descriptor.end_token());
            let finding = self.about(Finding::format(Code::Summary, &error)).layer(whole.layer);
            let finding = finding.tokens(first, end).plane("summary");
            self.context.sink.push(finding.at(&self.file.place, start, descriptor.bytes.get()));
        }
    }

    fn about(&self, finding: Finding) -> Finding {
        finding.frame(self.frame.id).sequence(self.frame.origin)
    }

    /// Passes the next `bytes` bytes to `each`, with their offsets. Returns whether all of them could be read.
    fn feed(&mut self, bytes: u64, mut each: impl FnMut(u64, &[u8])) -> bool {
        let (from, end) = (self.at, self.at.saturating_add(bytes).min(self.end));
        while self.at < end {
            let window_end = self.window_at + self.filled;
            if self.at == window_end {
                self.filled = (self.end - self.at).min(WINDOW_BYTES as u64);
                self.window_at = self.at;
                let window = &mut self.window[..self.filled as usize];
                self.bad.extend(self.file.read(self.at, window, self.context.sink));
                self.context.progress.advance(self.filled);
                self.context.counts.bytes.add(self.filled);
                continue;
            }
            let stop = end.min(window_end);
            each(self.at, &self.window[(self.at - self.window_at) as usize..(stop - self.window_at) as usize]);
            self.at = stop;
        }
        !self.bad.iter().any(|bad| bad.start < end && from < bad.end)
    }

    /// Checks that every byte up to the offset `until` is zero.
    fn zeros(&mut self, until: u64) {
        let mut range: Option<(u64, u64, u8)> = None;
        let readable = self.feed(until.saturating_sub(self.at), |offset, bytes| {
            if io::is_zero(bytes) {
                return;
            }
            for (index, &byte) in bytes.iter().enumerate().filter(|(_, byte)| **byte != 0) {
                let at = offset + index as u64;
                let (first, _, value) = range.unwrap_or((at, at, byte));
                range = Some((first, at + 1, value));
            }
        });
        if let Some((first, end, value)) = range.filter(|_| readable) {
            let text = "bytes outside the extents of the frame are not zero";
            let finding = self.about(Finding::damage(Code::Padding, text).values(0, u64::from(value)));
            self.context.sink.push(finding.at(&self.file.place, first, end - first));
        }
    }

    /// Checks a plane under a codec: its checksum, and that the minimum and step of each range are finite.
    fn encoded_plane(&mut self, plane: &Plane, codec: PlaneCodec, shape: &PlaneShape) {
        let text = "the minimum or step of a range is not a finite number, so the plane cannot be decoded";
        self.plane_of_numbers(plane, shape.dtype, text, |stored| codec.first_bad(shape, stored));
    }

    /// Checks a plane of a tail in a layer with a codec: its checksum, and that the codec can encode each element.
    fn encodable_plane(&mut self, plane: &Plane, dtype: DType) {
        let text = "an element of the tail is not a finite number up to 2^126, so its group cannot be encoded";
        self.plane_of_numbers(plane, dtype, text, |elements| dtype.first_not_encodable(elements));
    }

    /// Checks a plane against its checksum, and reports the number at the offset that `first_bad` returns.
    fn plane_of_numbers(
        &mut self,
        plane: &Plane,
        dtype: DType,
        text: &str,
        first_bad: impl FnOnce(&[u8]) -> Option<usize>,
    ) {
        let start = self.at;
        let mut stored = Vec::with_capacity(plane.bytes as usize);
        if !self.plane_with(plane, |bytes| stored.extend_from_slice(bytes)) {
            return;
        }
        if let Some(at) = first_bad(&stored) {
            let finding = self.about(Finding::damage(Code::PayloadCodec, text)).layer(plane.layer);
            let finding = finding.tokens(plane.first, plane.first.saturating_add(u64::from(plane.tokens)));
            let finding = finding.plane(plane_name(plane.kind, plane.plane));
            let (at, bytes) = (start + at as u64, dtype.bytes() as u64);
            self.context.sink.push(finding.at(&self.file.place, at, bytes));
        }
    }

    fn plane(&mut self, plane: &Plane) -> bool {
        self.plane_with(plane, |_| {})
    }

    /// Checks a plane against its checksum, and passes its bytes to `show` in order. Returns whether they match.
    fn plane_with(&mut self, plane: &Plane, mut show: impl FnMut(&[u8])) -> bool {
        let &Plane { kind, layer, first, tokens, plane: index, bytes, checksum: expected } = plane;
        let sequence = SequenceId(self.frame.origin);
        let identity = PlaneIdentity::new(self.nonce, sequence, kind, layer, first, tokens).with_plane(index);
        let mut digest = Digest::new(self.context.checksum, &identity);
        let start = self.at;
        let readable = self.feed(bytes, |_, bytes| {
            digest.update(bytes);
            show(bytes);
        });
        self.context.counts.planes.add(1);
        self.context.counts.payload_bytes.add(bytes);
        let found = digest.finish();
        if found == expected || !readable {
            return readable;
        }
        let text = format!("the checksum of the plane is {found:#x}, but the frame header says {expected:#x}");
        let code = if kind == KIND_CLUSTER_DIRECTORY { Code::ClusterDirectory } else { Code::PayloadChecksum };
        let mut finding = self.about(Finding::damage(code, text).values(expected, found));
        finding = finding.plane(plane_name(kind, index));
        if !matches!(kind, KIND_CALLER_STATE | KIND_ADAPTER | KIND_CLUSTER_DIRECTORY) {
            finding = finding.tokens(first, first.saturating_add(u64::from(tokens)));
        }
        if !matches!(kind, KIND_TOKEN_IDS | KIND_CALLER_STATE) {
            finding = finding.layer(layer);
        }
        self.context.sink.push(finding.at(&self.file.place, start, bytes));
        false
    }
}

fn plane_name(kind: u16, index: u16) -> &'static str {
    match (kind, index) {
        (KIND_SUMMARY, _) => "summary",
        (KIND_TOKEN_IDS, _) => "token-ids",
        (KIND_CALLER_STATE, _) => "caller-state",
        (KIND_ADAPTER, _) => "adapter",
        (KIND_CLUSTER_DIRECTORY, _) => "directory",
        (KIND_CLUSTER_DELTA, _) => "delta",
        (_, 0) => "k",
        _ => "v",
    }
}
