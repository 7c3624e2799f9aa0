//! Frames: every byte of every live frame and of its copies (SPEC.md sections 10 to 12).
//!
//! 1. Verify the header under the nonce of its segment, and compare it with the manifest.
//! 2. Read the payload from front to back. Each byte is part of a plane or zero (`payload`).
//! 3. Compare summaries with the keys of the frame, if that is asked for (`summaries`).
//! 4. Return what the frame holds, for the checks of sequences and adapters (`info`).
//! 5. Compare the headers of the copies of a frame with each other (`copies`).
//!
//! A frame whose header is invalid is reported and not read further, because nothing says what its bytes are.
//!
//! [`Depth::Headers`] leaves out step 3, and all of step 2 except the front of derived frames.

mod copies;
mod digest;
mod info;
mod payload;
mod record_check;
mod summaries;

pub(crate) use copies::merge;
pub(crate) use info::{AdapterPiece, DirectoryExtent, ExtentBytes, ExtentContent, FrameInfo, PoolExtent, RowExtent};
pub(crate) use payload::ReadContext;

use crate::finding::{Code, Finding};
use crate::io::StoreFile;
use crate::options::Depth;
use crate::replay::{Frame, State};
use crate::segments::SegmentJob;
use payload::{FrameBytes, Payload};
use stratakv_format::frame::{
    CALLER_STATE_BYTES_MAX, Descriptor, FramePlace, FrameView, KIND_CALLER_STATE, KIND_GROUPS, KIND_POOL, KIND_SUMMARY,
    KIND_TAIL, KIND_TOKEN_IDS, SUMMARY_MIN_MAX,
};
use stratakv_format::{Location, PAGE_BYTES};
use summaries::SummaryChecker;

const PAGE: u64 = PAGE_BYTES as u64;

/// The checker of frames, shared by all threads.
pub(crate) struct Checker<'a> {
    pub(crate) store_id: [u8; 16],
    pub(crate) state: &'a State,
    pub(crate) context: ReadContext<'a>,
}

impl Checker<'_> {
    /// Checks one copy of a frame. Returns `None` if its header is invalid or cannot be read.
    pub(crate) fn check(&self, job: &SegmentJob<'_>, id: u64, frame: &Frame, file: &StoreFile) -> Option<FrameInfo> {
        let sink = self.context.sink;
        let location = frame.location;
        let start = location.offset();
        let about = |finding: Finding| finding.frame(id).sequence(frame.record.origin.get());
        self.context.counts.frames.add(1);
        if start + location.bytes() > file.bytes {
            let finding = about(Finding::damage(Code::FrameLocation, "the frame extends past the end of its file"));
            sink.push(finding.at(&file.place, start, location.bytes()));
            return None;
        }
        // Replay has reported a header that is longer than its frame.
        let header_bytes = u64::from(frame.record.header_pages.get()) * PAGE;
        let header_bytes = header_bytes.clamp(PAGE, location.bytes().max(PAGE));
        let mut header = vec![0; header_bytes as usize];
        let bad = file.read(start, &mut header, sink);
        self.context.progress.advance(header_bytes);
        self.context.counts.bytes.add(header_bytes);
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
                sink.push(finding.at(&file.place, start, header_bytes));
                return None;
            }
        };
        for finding in self.header_defects(&view, id, frame) {
            sink.push(about(finding).at(&file.place, start, header_bytes));
        }
        if view.header().header_pages.get() != frame.record.header_pages.get() {
            return None;
        }
        let read_bytes = self.read_bytes(frame);
        let bytes = FrameBytes { id, origin: frame.record.origin.get(), location, header_bytes, read_bytes };
        let parts = Payload::new(&self.context, file, bytes).check(&view);
        if self.context.depth == Depth::Full {
            SummaryChecker { context: &self.context, file, frame: bytes, view: &view }.check();
        }
        let (mut info, defects) = content(&view, location, copies::digest(&header));
        (info.adapter, info.directories) = (parts.adapter, parts.directories);
        for text in defects {
            let finding = about(Finding::damage(Code::FrameHeader, text));
            sink.push(finding.at(&file.place, start, header_bytes));
        }
        Some(info)
    }

    /// Returns how many bytes of a frame are read, from its start. The front of a derived frame holds directories.
    pub(crate) fn read_bytes(&self, frame: &Frame) -> u64 {
        let whole = frame.location.bytes();
        if self.context.depth > Depth::Headers {
            return whole;
        }
        let header_pages = frame.record.header_pages.get();
        let front_pages = if frame.is_derived() { frame.record.front_pages.get() } else { 0 };
        (u64::from(header_pages.max(front_pages)) * PAGE).clamp(PAGE, whole.max(PAGE))
    }

    /// Returns a finding for each field of a valid header that contradicts the manifest.
    fn header_defects(&self, view: &FrameView<'_>, id: u64, frame: &Frame) -> Vec<Finding> {
        let (header, record) = (view.header(), &frame.record);
        let fields = [
            ("header CRC", u64::from(frame.header_crc), u64::from(header.crc.get())),
            ("frame id", id, header.frame.get()),
            ("LSN", record.lsn.get(), header.lsn.get()),
            ("nonce", record.nonce.get(), header.nonce.get()),
            ("origin", record.origin.get(), header.sequence.get()),
            ("header pages", u64::from(record.header_pages.get()), u64::from(header.header_pages.get())),
            ("front pages", u64::from(record.front_pages.get()), u64::from(header.front_pages.get())),
            ("derived extents", u64::from(frame.is_derived()), u64::from(view.is_derived())),
        ];
        let damage = |text: String, expected, found| Finding::damage(Code::FrameHeader, text).values(expected, found);
        let mut defects: Vec<_> = fields
            .into_iter()
            .filter(|(_, expected, found)| expected != found)
            .map(|(field, expected, found)| {
                let text = format!("{field} is {found:#x}, but the manifest says {expected:#x}");
                damage(text, expected, found)
            })
            .collect();
        let layout = header.layout.get();
        if self.state.layouts.get(&layout) != Some(view.layout()) {
            let text = format!("layout {layout} differs from the layout of that number in the manifest");
            defects.push(damage(text, u64::from(layout), u64::from(layout)));
        }
        if let Some(sequence) = self.state.sequences().get(&record.origin.get()) {
            if sequence.key != view.key() {
                defects.push(damage("the key differs from the key of the sequence".into(), 0, 1));
            }
            let (expected, found) = (u64::from(sequence.summaries), u64::from(header.summaries.get()));
            if expected != found {
                let text = "the stored summary kinds differ from those of the sequence";
                defects.push(damage(text.into(), expected, found));
            }
        }
        defects
    }
}

/// Returns what the descriptors of a frame say it holds, and what is wrong with them.
fn content(view: &FrameView<'_>, location: Location, digest: u64) -> (FrameInfo, Vec<&'static str>) {
    let layout = view.header().layout.get();
    let (spans, adapter, directories) = (Vec::new(), Vec::new(), Vec::new());
    let (pools, rows) = (Vec::new(), Vec::new());
    let bytes = ExtentBytes::default();
    let has_state = false;
    let mut info = FrameInfo { location, digest, layout, bytes, spans, has_state, adapter, directories, pools, rows };
    let mut defects = Vec::new();
    let front = u64::from(view.header().front_pages.get()) * PAGE;
    for descriptor in view.descriptors() {
        let is_front = descriptor.offset.get() + descriptor.bytes.get() <= front;
        info.bytes.add(descriptor.kind.get(), descriptor.bytes.get());
        match extent_content(descriptor, is_front) {
            Some(content) => {
                let (first, end) = (descriptor.first_token.get(), descriptor.end_token());
                info.rows.extend(row_extent(descriptor, content));
                match info.spans.last_mut() {
                    Some(last) if last.0 == content && last.2 == first => last.2 = end,
                    _ => info.spans.push((content, first, end)),
                }
            }
            None => match descriptor.kind.get() {
                KIND_SUMMARY if !is_front => defects.push("a summary is stored past the front pages"),
                KIND_CALLER_STATE if descriptor.bytes.get() > CALLER_STATE_BYTES_MAX as u64 => {
                    defects.push("the caller state is larger than its limit");
                }
                KIND_CALLER_STATE => info.has_state = true,
                KIND_POOL => info.pools.push(PoolExtent {
                    layer: descriptor.layer.get(),
                    first: (descriptor.offset.get() / PAGE) as u32,
                    pages: descriptor.pieces.get(),
                    written: descriptor.tokens.get().min(descriptor.pieces.get()),
                    page_bytes: descriptor.record_bytes.get(),
                }),
                _ => {}
            },
        }
    }
    (info, defects)
}

/// Returns where the rows of an extent are, if it holds keys and values.
fn row_extent(descriptor: &Descriptor, content: ExtentContent) -> Option<RowExtent> {
    let (layer, is_groups) = match content {
        ExtentContent::Groups(layer) => (layer, true),
        ExtentContent::Tail(layer) => (layer, false),
        _ => return None,
    };
    let (first, tokens) = (descriptor.first_token.get(), descriptor.tokens.get());
    Some(RowExtent { layer, is_groups, first, tokens, offset: descriptor.offset.get() })
}

/// Returns what the tokens of an extent are, or `None` for an extent whose tokens are not counted.
fn extent_content(descriptor: &Descriptor, is_front: bool) -> Option<ExtentContent> {
    let layer = descriptor.layer.get();
    match descriptor.kind.get() {
        KIND_GROUPS => Some(ExtentContent::Groups(layer)),
        KIND_TAIL => Some(ExtentContent::Tail(layer)),
        KIND_SUMMARY if is_front && descriptor.summary.get() == SUMMARY_MIN_MAX => Some(ExtentContent::MinMax(layer)),
        KIND_TOKEN_IDS => Some(ExtentContent::TokenIds),
        _ => None,
    }
}
