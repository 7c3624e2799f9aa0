//! Frames: the header against the manifest, then every byte behind it: planes against their checksums, zeros between.

use crate::adapters::Piece;
use crate::finding::{Code, Finding, Sink};
use crate::io::{self, StoreFile, WINDOW_BYTES};
use crate::replay::{Frame, State};
use crate::report::{Counts, Progress};
use crate::segments::Job;
use std::ops::Range;
use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity};
use stratakv_format::codec::PlaneShape;
use stratakv_format::frame::{
    CALLER_STATE_BYTES_MAX, Descriptor, FramePlace, FrameView, KIND_ADAPTER, KIND_CALLER_STATE, KIND_GROUPS,
    KIND_SUMMARY, KIND_TAIL, KIND_TOKEN_IDS, SUMMARY_MIN_MAX, SummaryHeader, tail_plane_bytes,
};
use stratakv_format::{PAGE_BYTES, PlaneCodec, SequenceId};
use zerocopy::IntoBytes;

const PAGE: u64 = PAGE_BYTES as u64;

/// What the tokens of an extent are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holds {
    /// Whole groups of a layer.
    Groups(u16),
    /// Single tokens of a layer.
    Tail(u16),
    /// Minima and maxima of groups of a layer.
    MinMax(u16),
    /// Token ids.
    TokenIds,
}

/// What a frame holds, by its header.
#[derive(Debug)]
pub(crate) struct FrameInfo {
    pub(crate) layout: u32,
    /// What, first token, one past the last, in the order of the header.
    pub(crate) spans: Vec<(Holds, u64, u64)>,
    pub(crate) has_state: bool,
    /// Pieces of an adapter.
    pub(crate) adapter: Vec<Piece>,
}

/// What all frames are held against.
pub(crate) struct Checker<'a> {
    pub(crate) store_id: [u8; 16],
    pub(crate) checksum: PayloadChecksum,
    pub(crate) state: &'a State,
    pub(crate) counts: &'a Counts,
    pub(crate) sink: &'a Sink,
    pub(crate) progress: &'a dyn Progress,
}

impl Checker<'_> {
    /// Checks one frame. `None`: its header is not good, or out of reach.
    pub(crate) fn check(&self, job: &Job<'_>, id: u64, frame: &Frame, file: &StoreFile) -> Option<FrameInfo> {
        let location = frame.location;
        let start = location.offset();
        let header_bytes = u64::from(frame.record.header_pages.get()) * PAGE;
        let about = |finding: Finding| finding.frame(id).sequence(frame.record.origin.get());
        self.counts.frames.add(1);
        if start + location.bytes() > file.bytes {
            let finding = about(Finding::damage(Code::FrameLocation, "this frame lies behind the end of its file"));
            self.sink.push(finding.at(&file.place, start, location.bytes()));
            return None;
        }
        // Within the frame: replay reported it otherwise.
        let header_bytes = header_bytes.clamp(PAGE, location.bytes().max(PAGE));
        let mut header = vec![0; header_bytes as usize];
        let bad = file.read(start, &mut header, self.sink);
        self.progress.advance(header_bytes);
        self.counts.bytes.add(header_bytes);
        if !bad.is_empty() {
            return None;
        }
        let place = FramePlace {
            store_id: self.store_id,
            location,
            segment_generation: job.segment.generation,
            segment_nonce: job.segment.nonce,
        };
        let view = match FrameView::verify(&header, &place) {
            Ok(view) => view,
            Err(error) => {
                let finding = about(Finding::format(Code::FrameHeader, &error));
                self.sink.push(finding.at(&file.place, start, header_bytes));
                return None;
            }
        };
        let wrong = self.compare(&view, id, frame);
        for (text, expected, found) in &wrong {
            let finding = about(Finding::damage(Code::FrameHeader, text.clone()).values(*expected, *found));
            self.sink.push(finding.at(&file.place, start, header_bytes));
        }
        if view.header().header_pages.get() != frame.record.header_pages.get() {
            return None;
        }
        let mut payload = Payload {
            file,
            checker: self,
            frame: id,
            origin: frame.record.origin.get(),
            start,
            at: start + header_bytes,
            end: start + location.bytes(),
            window: vec![0; WINDOW_BYTES.min((location.bytes() - header_bytes) as usize)],
            window_at: start + header_bytes,
            filled: 0,
            bad: Vec::new(),
            adapter: Vec::new(),
        };
        for descriptor in view.descriptors() {
            payload.extent(&view, descriptor);
        }
        payload.zeros(payload.end);
        let mut info = self.info(&view, id, frame, file, header_bytes);
        let here = |piece: Piece| Piece { device: location.device.0, segment: location.segment.0, ..piece };
        info.adapter = payload.adapter.into_iter().map(here).collect();
        Some(info)
    }

    /// The fields of a valid header that are not what the manifest says.
    fn compare(&self, view: &FrameView<'_>, id: u64, frame: &Frame) -> Vec<(String, u64, u64)> {
        let (header, record) = (view.header(), &frame.record);
        let fields = [
            ("header CRC", u64::from(frame.header_crc), u64::from(header.crc.get())),
            ("frame id", id, header.frame.get()),
            ("LSN", record.lsn.get(), header.lsn.get()),
            ("nonce", record.nonce.get(), header.nonce.get()),
            ("origin", record.origin.get(), header.sequence.get()),
            ("header pages", u64::from(record.header_pages.get()), u64::from(header.header_pages.get())),
            ("front pages", u64::from(record.front_pages.get()), u64::from(header.front_pages.get())),
        ];
        let mut wrong: Vec<_> = fields
            .into_iter()
            .filter(|(_, expected, found)| expected != found)
            .map(|(field, expected, found)| {
                (format!("{field} is {found:#x}, the manifest says {expected:#x}"), expected, found)
            })
            .collect();
        let layout = header.layout.get();
        if self.state.layouts.get(&layout) != Some(view.layout()) {
            wrong.push((format!("layout {layout} is not that of the manifest"), u64::from(layout), u64::from(layout)));
        }
        if let Some(sequence) = self.state.sequences.get(&record.origin.get()) {
            if sequence.key != view.key() {
                wrong.push(("the key is not that of its sequence".into(), 0, 1));
            }
            let (expected, found) = (u64::from(sequence.summaries), u64::from(header.summaries.get()));
            if expected != found {
                wrong.push(("the summaries are not those of its sequence".into(), expected, found));
            }
        }
        wrong
    }

    fn info(&self, view: &FrameView<'_>, id: u64, frame: &Frame, file: &StoreFile, header_bytes: u64) -> FrameInfo {
        let mut info =
            FrameInfo { layout: view.header().layout.get(), spans: Vec::new(), has_state: false, adapter: Vec::new() };
        let front = u64::from(view.header().front_pages.get()) * PAGE;
        for descriptor in view.descriptors() {
            let (kind, layer) = (descriptor.kind.get(), descriptor.layer.get());
            let is_front = descriptor.offset.get() + descriptor.bytes.get() <= front;
            let holds = match kind {
                KIND_GROUPS => Holds::Groups(layer),
                KIND_TAIL => Holds::Tail(layer),
                KIND_SUMMARY if is_front && descriptor.summary.get() == SUMMARY_MIN_MAX => Holds::MinMax(layer),
                KIND_TOKEN_IDS => Holds::TokenIds,
                KIND_ADAPTER => continue,
                _ => {
                    let text = if kind == KIND_SUMMARY && !is_front {
                        "a summary lies behind the front pages"
                    } else if kind == KIND_CALLER_STATE && descriptor.bytes.get() > CALLER_STATE_BYTES_MAX as u64 {
                        "the caller's state is too long"
                    } else {
                        info.has_state |= kind == KIND_CALLER_STATE;
                        continue;
                    };
                    let finding =
                        Finding::damage(Code::FrameHeader, text).frame(id).sequence(frame.record.origin.get());
                    self.sink.push(finding.at(&file.place, frame.location.offset(), header_bytes));
                    continue;
                }
            };
            let (first, end) = (descriptor.first_token.get(), descriptor.end_token());
            match info.spans.last_mut() {
                Some(last) if last.0 == holds && last.2 == first => last.2 = end,
                _ => info.spans.push((holds, first, end)),
            }
        }
        info
    }
}

/// A checksum that takes its bytes in pieces. It lives on the stack for one plane: a box would cost an allocation each.
#[allow(clippy::large_enum_variant)]
enum Digest {
    Crc32(crc32fast::Hasher),
    Crc64(crc_fast::Digest),
}

impl Digest {
    fn new(kind: PayloadChecksum, identity: &PlaneIdentity) -> Self {
        let mut digest = match kind {
            PayloadChecksum::Crc32 => Self::Crc32(crc32fast::Hasher::new()),
            PayloadChecksum::Crc64Nvme => Self::Crc64(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme)),
        };
        digest.update(identity.as_bytes());
        digest
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Crc32(crc) => crc.update(bytes),
            Self::Crc64(crc) => crc.update(bytes),
        }
    }

    fn finish(self) -> u64 {
        match self {
            Self::Crc32(crc) => u64::from(crc.finalize()),
            Self::Crc64(crc) => crc.finalize(),
        }
    }
}

/// One plane of a piece.
struct Plane {
    kind: u16,
    layer: u16,
    first: u64,
    tokens: u32,
    plane: u16,
    bytes: u64,
    checksum: u64,
}

/// The payload of a frame, read once from front to back through a window. Each byte is part of a plane or zero.
struct Payload<'a> {
    file: &'a StoreFile,
    checker: &'a Checker<'a>,
    frame: u64,
    origin: u64,
    /// Offset of the frame in its file.
    start: u64,
    at: u64,
    end: u64,
    window: Vec<u8>,
    window_at: u64,
    filled: u64,
    /// What could not be read.
    bad: Vec<Range<u64>>,
    /// Pieces of an adapter.
    adapter: Vec<Piece>,
}

impl Payload<'_> {
    fn extent(&mut self, view: &FrameView<'_>, descriptor: &Descriptor) {
        let (layout, kind, layer_index) = (view.layout(), descriptor.kind.get(), descriptor.layer.get());
        let nonce = view.header().nonce.get();
        let start = self.start + descriptor.offset.get();
        let checksums = view.checksums(descriptor);
        self.zeros(start);
        let whole = Plane {
            kind,
            layer: layer_index,
            first: descriptor.first_token.get(),
            tokens: descriptor.tokens.get(),
            plane: 0,
            bytes: descriptor.bytes.get(),
            checksum: checksums.first().map_or(0, |checksum| checksum.get()),
        };
        let geometry = layout.layers.get(usize::from(layer_index));
        match (kind, geometry) {
            (KIND_GROUPS, Some(layer)) => {
                let block = layout.block(layer);
                let group = u32::from(layout.group_tokens);
                for (piece, checksums) in checksums.chunks(layer.planes()).enumerate() {
                    let at = start + block.block_offset(piece) as u64;
                    for (plane, checksum) in checksums.iter().enumerate() {
                        let (offset, bytes) = block.plane(plane);
                        self.zeros(at + offset as u64);
                        let first = whole.first + piece as u64 * u64::from(group);
                        let own = Plane {
                            first,
                            tokens: group,
                            plane: plane as u16,
                            bytes: bytes as u64,
                            checksum: checksum.get(),
                            ..whole
                        };
                        if layer.codecs[plane] == PlaneCodec::Raw {
                            self.plane(nonce, &own);
                        } else {
                            self.encoded(nonce, &own, layer.codecs[plane], &layout.plane_shape(layer, plane));
                        }
                    }
                }
            }
            (KIND_TAIL, Some(layer)) => {
                let (key, value) = tail_plane_bytes(layer, layout.dtype, whole.tokens as usize);
                for (plane, (bytes, checksum)) in [key, value].into_iter().zip(checksums).enumerate() {
                    let (plane, bytes, checksum) = (plane as u16, bytes as u64, checksum.get());
                    self.plane(nonce, &Plane { plane, bytes, checksum, ..whole });
                }
            }
            (KIND_SUMMARY, Some(layer)) if descriptor.summary.get() != SUMMARY_MIN_MAX => {
                let mut header = Vec::new();
                self.plane_with(nonce, &whole, |bytes| {
                    let more = size_of::<SummaryHeader>().saturating_sub(header.len()).min(bytes.len());
                    header.extend_from_slice(&bytes[..more]);
                });
                let (kind, record, group) =
                    (descriptor.summary.get(), descriptor.record_bytes.get(), usize::from(layout.group_tokens));
                // Short where it could not be read, which was reported.
                let whole = header.len() == size_of::<SummaryHeader>();
                if let Some(error) =
                    whole.then(|| SummaryHeader::verify(&header, kind, layer, group, record).err()).flatten()
                {
                    let finding = Finding::format(Code::Summary, &error).frame(self.frame).sequence(self.origin);
                    let (first, end) = (descriptor.first_token.get(), descriptor.end_token());
                    let finding = finding.layer(layer_index).tokens(first, end).plane("summary");
                    self.checker.sink.push(finding.at(&self.file.place, start, descriptor.bytes.get()));
                }
            }
            (KIND_ADAPTER, _) => {
                let good = self.plane(nonce, &whole);
                let (first, bytes) = (whole.first, whole.bytes);
                // Its device and segment are filled in by whoever knows them.
                self.adapter.push(Piece {
                    layer: layer_index,
                    first,
                    bytes,
                    device: 0,
                    segment: 0,
                    offset: start,
                    good,
                });
            }
            _ => {
                self.plane(nonce, &whole);
            }
        }
        self.zeros(start + descriptor.bytes.get());
    }

    /// Passes over `bytes` bytes; `false` when some of them could not be read.
    fn feed(&mut self, bytes: u64, mut each: impl FnMut(u64, &[u8])) -> bool {
        let (from, end) = (self.at, self.at.saturating_add(bytes).min(self.end));
        while self.at < end {
            let window_end = self.window_at + self.filled;
            if self.at == window_end {
                self.filled = (self.end - self.at).min(WINDOW_BYTES as u64);
                self.window_at = self.at;
                let window = &mut self.window[..self.filled as usize];
                self.bad.extend(self.file.read(self.at, window, self.checker.sink));
                self.checker.progress.advance(self.filled);
                self.checker.counts.bytes.add(self.filled);
                continue;
            }
            let stop = end.min(window_end);
            each(self.at, &self.window[(self.at - self.window_at) as usize..(stop - self.window_at) as usize]);
            self.at = stop;
        }
        !self.bad.iter().any(|bad| bad.start < end && from < bad.end)
    }

    /// Everything up to `until` is zero.
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
            let finding = Finding::damage(Code::Padding, "padding is not zero").values(0, u64::from(value));
            let finding = finding.frame(self.frame).sequence(self.origin);
            self.checker.sink.push(finding.at(&self.file.place, first, end - first));
        }
    }

    /// Checks a plane under a codec: also that its ranges are numbers.
    fn encoded(&mut self, nonce: u64, plane: &Plane, codec: PlaneCodec, shape: &PlaneShape) {
        let start = self.at;
        let mut stored = Vec::with_capacity(plane.bytes as usize);
        if !self.plane_with(nonce, plane, |bytes| stored.extend_from_slice(bytes)) {
            return;
        }
        if let Some(at) = codec.first_bad(shape, &stored) {
            let finding = Finding::damage(Code::PayloadCodec, "a range of an encoded plane is not a finite number");
            let finding = finding.frame(self.frame).sequence(self.origin).layer(plane.layer);
            let finding = finding.tokens(plane.first, plane.first.saturating_add(u64::from(plane.tokens)));
            let finding = finding.plane(["k", "v"][shape.plane.min(1)]);
            let (at, bytes) = (start + at as u64, shape.dtype.bytes() as u64);
            self.checker.sink.push(finding.at(&self.file.place, at, bytes));
        }
    }

    fn plane(&mut self, nonce: u64, plane: &Plane) -> bool {
        self.plane_with(nonce, plane, |_| {})
    }

    /// Checks a plane, and shows its bytes in order. Whether it is what was written.
    fn plane_with(&mut self, nonce: u64, plane: &Plane, mut show: impl FnMut(&[u8])) -> bool {
        let &Plane { kind, layer, first, tokens, plane: index, bytes, checksum: expected } = plane;
        let identity = PlaneIdentity::new(nonce, SequenceId(self.origin), kind, layer, first, tokens, index);
        let mut digest = Digest::new(self.checker.checksum, &identity);
        let start = self.at;
        let readable = self.feed(bytes, |_, bytes| {
            digest.update(bytes);
            show(bytes);
        });
        self.checker.counts.planes.add(1);
        self.checker.counts.payload_bytes.add(bytes);
        let found = digest.finish();
        if found == expected || !readable {
            return readable;
        }
        let name = match (kind, index) {
            (KIND_SUMMARY, _) => "summary",
            (KIND_TOKEN_IDS, _) => "token-ids",
            (KIND_CALLER_STATE, _) => "caller-state",
            (KIND_ADAPTER, _) => "adapter",
            (_, 0) => "k",
            _ => "v",
        };
        let mut finding = Finding::damage(Code::PayloadChecksum, "the bytes do not match their checksum")
            .values(expected, found)
            .frame(self.frame)
            .sequence(self.origin)
            .plane(name);
        if !matches!(kind, KIND_CALLER_STATE | KIND_ADAPTER) {
            finding = finding.tokens(first, first.saturating_add(u64::from(tokens)));
        }
        if matches!(kind, KIND_GROUPS | KIND_SUMMARY | KIND_TAIL | KIND_ADAPTER) {
            finding = finding.layer(layer);
        }
        // Without bytes, the header has a wrong checksum: the place is where they would be.
        self.checker.sink.push(finding.at(&self.file.place, start, bytes));
        false
    }
}
