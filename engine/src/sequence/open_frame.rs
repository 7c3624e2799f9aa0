//! Laying one frame over the frames before it, in an open.
//!
//! A frame is laid in the order of its descriptors, but tails last: if a tail and a group of one frame overlap, the
//! tail is newer. For every kind, what is laid replaces what earlier frames hold of the same tokens:
//!
//! | kind | goes to |
//! |---|---|
//! | groups | the layer's extent table; a group that the sequence uses in part is read as loose tokens |
//! | min/max records | the layer's summary, unless it is streamed |
//! | tail | loose tokens; groups from there on are forgotten |
//! | token ids | the token ids |
//! | caller's state | the caller state, if the last commit names this frame |
//! | adapter | the parts of the adapter |
//! | changes of clusters | nowhere: clusters are derived |

use super::blocks::{ScanPart, read_block};
use super::errors::no_memory;
use super::frame_metadata::{FrameReference, OpenedFrame, corrupt};
use super::handle::Sequence;
use super::layer::LayerState;
use super::referenced_frame::ReferencedFrame;
use super::token_ids::TokenIds;
use crate::catalog::{BlockPlace, Extent, FrameBody, FrameSlot, SequenceMeta, Source, SummaryPlace, min_max_records};
use crate::error::{Error, ErrorKind, Result};
use crate::io::planted;
use crate::log::{AdapterPart, CoveredEnds, Devices};
use crate::metrics::Category;
use crate::retrieval::MinMax;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::error::FormatErrorCode;
use stratakv_format::frame::{
    Descriptor, FrameView, KIND_ADAPTER, KIND_CALLER_STATE, KIND_CLUSTER_DELTA, KIND_CLUSTER_DIRECTORY, KIND_GROUPS,
    KIND_POOL, KIND_SUMMARY, KIND_TAIL, KIND_TOKEN_IDS, SUMMARY_MIN_MAX, SummaryHeader, SummaryRecords,
    min_max_record_bytes, tail_plane_bytes,
};
use stratakv_format::{FrameId, PAGE_BYTES};

/// Tokens of one layer that a frame holds outside of whole groups: planes with `stride` rows per head, of which the
/// first `tokens` count.
pub(super) struct LooseTokens {
    pub(super) first_token: u64,
    pub(super) tokens: usize,
    pub(super) stride: usize,
    pub(super) keys: Vec<u8>,
    pub(super) values: Vec<u8>,
}

impl LooseTokens {
    /// Reads the first `tokens` of a group from its device.
    fn group(devices: &Devices, layer: &LayerState, group: u64, place: &BlockPlace, tokens: usize) -> Result<Self> {
        let size = layer.shape().group_tokens as u64;
        let block = read_block(devices, layer, (group, ScanPart::Block), size, place)?;
        let block = layer.decoded(&block)?;
        let (start, len) = layer.plain().plane(1);
        Ok(Self {
            first_token: group * size,
            tokens,
            stride: size as usize,
            keys: block[..layer.plain().key_bytes].to_vec(),
            values: block[start..start + len].to_vec(),
        })
    }

    pub(super) fn end(&self) -> u64 {
        self.first_token + self.tokens as u64
    }
}

/// The content outside of groups of the frames laid so far.
pub(super) struct UncommittedTail {
    /// By layer, in the order of the frames.
    pub(super) loose: Vec<Vec<LooseTokens>>,
    /// The ranges of token ids that frames hold.
    pub(super) ids: Vec<Range<usize>>,
    /// Pieces of an adapter.
    pub(super) adapter: Vec<AdapterPart>,
    /// The bytes of the adapter that no frame has given yet.
    adapter_left: u64,
    /// The frame with the caller's state.
    state_frame: Option<FrameId>,
}

impl UncommittedTail {
    pub(super) fn new(layers: usize, meta: &SequenceMeta) -> Self {
        let adapter_left = meta.adapter.as_ref().map_or(0, |adapter| adapter.bytes);
        let loose = (0..layers).map(|_| Vec::new()).collect();
        Self { loose, ids: Vec::new(), adapter: Vec::new(), adapter_left, state_frame: meta.state_frame }
    }
}

/// Returns whether a piece of this kind belongs to tokens, so that a cut applies to it.
fn has_tokens(kind: u16) -> bool {
    !matches!(kind, KIND_CALLER_STATE | KIND_ADAPTER)
}

fn damaged(reference: &FrameReference, found: String) -> Error {
    corrupt(reference, "frame-header", 0, reference.meta.header_pages as usize * PAGE_BYTES, found)
}

impl Sequence {
    /// Lays one frame over what the frames before it left.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`], [`ErrorKind::Unsupported`], [`ErrorKind::MemoryLimit`].
    pub(super) fn lay_frame(
        &mut self,
        reference: &FrameReference,
        front: &[u8],
        rest: &mut UncommittedTail,
    ) -> Result<()> {
        let place = self.place_of(reference);
        let view = FrameView::verify(front, &place).map_err(|e| match e.code {
            FormatErrorCode::Unsupported => {
                let text = format!("open: frame {} is of another version: {e}", reference.id);
                Error::new(ErrorKind::Unsupported, text)
            }
            _ => damaged(reference, e.to_string()),
        })?;
        self.check_header(reference, &view)?;
        let body = self.add_frame(reference, &view, front)?;
        let frame = OpenedFrame { reference, view: &view, front };
        let mut checksum = 0;
        let mut descriptors: Vec<&Descriptor> = view.descriptors().iter().collect();
        // Tails are last. Sections of a layer are in the order of their groups, wherever they are in the frame.
        descriptors.sort_by_key(|d| match d.kind.get() {
            KIND_TAIL => (2, 0),
            KIND_SUMMARY => (1, d.first_token.get()),
            _ => (0, 0),
        });
        for descriptor in descriptors {
            let kind = descriptor.kind.get();
            let first_checksum = checksum;
            checksum += if kind == KIND_GROUPS { descriptor.checksum_count.get() as usize } else { 0 };
            let cut = if kind == KIND_TAIL { reference.tail_clip } else { reference.token_end };
            if has_tokens(kind) && descriptor.first_token.get() >= cut {
                continue;
            }
            match kind {
                KIND_GROUPS => {
                    let page = (descriptor.offset.get() / PAGE_BYTES as u64) as u32;
                    let source = Source::Disk { frame: Arc::clone(&body), page, checksum: first_checksum };
                    self.lay_groups(reference, descriptor, source, &mut rest.loose)?;
                }
                KIND_SUMMARY if descriptor.summary.get() != SUMMARY_MIN_MAX => {}
                KIND_CLUSTER_DELTA => {}
                KIND_POOL | KIND_CLUSTER_DIRECTORY if planted!(DerivedFrameCounted) => {}
                KIND_SUMMARY => self.lay_summary(&frame, descriptor)?,
                KIND_TAIL => self.lay_tail(&frame, descriptor, &mut rest.loose)?,
                KIND_TOKEN_IDS => self.lay_token_ids(&frame, descriptor, rest)?,
                KIND_CALLER_STATE => self.lay_caller_state(&frame, descriptor, rest)?,
                KIND_ADAPTER => self.lay_adapter(&frame, descriptor, rest)?,
                _ => return Err(damaged(reference, format!("a descriptor of kind {kind}"))),
            }
        }
        Ok(())
    }

    /// Checks that a header is that of the frame that the manifest names.
    fn check_header(&self, reference: &FrameReference, view: &FrameView<'_>) -> Result<()> {
        let header = view.header();
        let same = header.crc.get() == reference.meta.header_crc
            && header.frame.get() == reference.id.0
            && header.nonce.get() == reference.meta.nonce
            && header.sequence.get() == reference.meta.origin.0;
        if !same {
            return Err(damaged(reference, "the header of another frame".into()));
        }
        if view.layout() != self.identity.layout.raw() {
            return Err(damaged(reference, "the header of a sequence of another layout".into()));
        }
        Ok(())
    }

    /// Adds a frame to the tables of the store and of the sequence.
    fn add_frame(&mut self, reference: &FrameReference, view: &FrameView<'_>, front: &[u8]) -> Result<Arc<FrameSlot>> {
        let groups = view.descriptors().iter().filter(|d| d.kind.get() == KIND_GROUPS);
        let checksums = groups.clone().flat_map(|d| view.checksums(d)).map(|c| c.get()).collect();
        let body = FrameBody {
            id: reference.id,
            origin: reference.meta.origin,
            nonce: reference.meta.nonce,
            segment: Arc::clone(reference.segment()),
            page: reference.meta.location.page,
            header_crc: reference.meta.header_crc,
            other_copies: reference.copies[1..].iter().map(|copy| copy.at.clone()).collect(),
            checksums,
            summaries: summary_places(view, front),
        };
        let body = self.store.place_frame(reference.id, body)?;
        let tokens = view.descriptors().iter().filter(|d| has_tokens(d.kind.get()));
        let first_token = tokens.map(|d| d.first_token.get()).min().filter(|first| *first < reference.token_end);
        let end = |of: u16| view.descriptors().iter().filter(|d| d.kind.get() == of).map(Descriptor::end_token).max();
        let small = groups
            .clone()
            .next()
            .is_none()
            .then(|| CoveredEnds { tokens: end(KIND_TAIL).unwrap_or(0), ids: end(KIND_TOKEN_IDS).unwrap_or(0) });
        self.frames.add_named(ReferencedFrame {
            frame: reference.id,
            meta: reference.meta.clone(),
            slot: Arc::clone(&body),
            first_token,
            token_end: reference.token_end,
            small,
            shared: None,
        });
        self.account()?;
        Ok(body)
    }

    fn lay_token_ids(
        &mut self,
        frame: &OpenedFrame<'_>,
        descriptor: &Descriptor,
        rest: &mut UncommittedTail,
    ) -> Result<()> {
        let bytes = self.piece(frame, descriptor, 0, None)?;
        let first = descriptor.first_token.get() as usize;
        let kept = (frame.reference.ids_clip.saturating_sub(first)).min(bytes.len() / 4);
        if kept == 0 {
            return Ok(());
        }
        let more = (first + kept).saturating_sub(self.token_ids.len());
        TokenIds::reserve(&self.store.devices, &mut self.index, more)?;
        self.token_ids.lay(first, &bytes[..kept * 4], frame.is_small());
        rest.ids.push(first..first + kept);
        Ok(())
    }

    fn lay_caller_state(
        &mut self,
        frame: &OpenedFrame<'_>,
        descriptor: &Descriptor,
        rest: &UncommittedTail,
    ) -> Result<()> {
        let bytes = self.piece(frame, descriptor, 0, None)?;
        if rest.state_frame == Some(frame.reference.id) {
            self.caller_state.load(bytes, frame.reference.id);
        }
        Ok(())
    }

    fn lay_adapter(&self, frame: &OpenedFrame<'_>, descriptor: &Descriptor, rest: &mut UncommittedTail) -> Result<()> {
        let left = rest.adapter_left.checked_sub(descriptor.bytes.get());
        let more = || damaged(frame.reference, "more bytes of an adapter than the manifest names".into());
        rest.adapter_left = left.ok_or_else(more)?;
        let bytes = self.piece(frame, descriptor, 0, None)?.to_vec();
        let (layer, first) = (usize::from(descriptor.layer.get()), descriptor.first_token.get());
        rest.adapter.push(AdapterPart { layer, first, bytes });
        Ok(())
    }

    fn lay_groups(
        &mut self,
        reference: &FrameReference,
        descriptor: &Descriptor,
        source: Source,
        loose: &mut [Vec<LooseTokens>],
    ) -> Result<()> {
        let group = self.identity.layout.group_tokens() as u64;
        let first = descriptor.first_token.get() / group;
        let whole = (reference.clip / group).saturating_sub(first).min(u64::from(descriptor.pieces.get()));
        let index = usize::from(descriptor.layer.get());
        let devices = Arc::clone(&self.store.devices);
        let layer = self.layer_mut(index)?;
        let extent = Extent { first_group: first, groups: whole as usize, skip: 0, source };
        let clipped = reference.clip % group;
        // The sequence has only the first tokens of the group that the clip cuts.
        if clipped > 0 && first + whole == reference.clip / group && whole < u64::from(descriptor.pieces.get()) {
            let cut = first + whole;
            let planes = layer.geometry().planes();
            let probe = Extent { groups: extent.groups + 1, ..extent.clone() };
            if let Some(place) = probe.place(cut, layer.block(), planes) {
                loose[index].push(LooseTokens::group(&devices, layer, cut, &place, clipped as usize)?);
            }
        }
        if whole == 0 {
            return Ok(());
        }
        // These groups replace what small frames before this one hold of them.
        let tokens = first * group..(first + whole) * group;
        loose[index].retain(|piece| piece.first_token < tokens.start || piece.end() > tokens.end);
        layer.lay_groups(extent).map_err(|e| e.during(format!("layer {index}")))
    }

    fn lay_summary(&mut self, frame: &OpenedFrame<'_>, descriptor: &Descriptor) -> Result<()> {
        let index = usize::from(descriptor.layer.get());
        let first = descriptor.first_group(self.identity.layout.raw()) as usize;
        // As with groups, the clip excludes records. The group that it cuts has none.
        let whole = frame.reference.clip / self.identity.layout.group_tokens() as u64;
        let records = (whole as usize).saturating_sub(first).min(descriptor.pieces.get() as usize);
        if records == 0 {
            return Ok(());
        }
        // Records that are streamed were not read.
        let Some(known) = self.layer(index)?.summaries().min_max().map(MinMax::groups) else { return Ok(()) };
        let bytes = self.piece(frame, descriptor, 0, None)?;
        let bytes = &bytes[..records * min_max_record_bytes(self.layer(index)?.geometry())];
        if first > known {
            let found = format!("summaries of layer {index} from group {first} on, but only {known} before");
            return Err(corrupt(frame.reference, "coverage", 0, 0, found));
        }
        let devices = Arc::clone(&self.store.devices);
        let mut reserve = |bytes| devices.reserve(bytes, Category::Summaries);
        match self.layer_mut(index)?.summaries_mut().lay_min_max(first, bytes, &mut reserve) {
            true => Ok(()),
            false => Err(no_memory("open: the summaries of the sequence")),
        }
    }

    fn lay_tail(
        &mut self,
        frame: &OpenedFrame<'_>,
        descriptor: &Descriptor,
        loose: &mut [Vec<LooseTokens>],
    ) -> Result<()> {
        let index = usize::from(descriptor.layer.get());
        let first_token = descriptor.first_token.get();
        let stored = descriptor.tokens.get() as usize;
        let tokens = frame.reference.tail_clip.saturating_sub(first_token).min(stored as u64) as usize;
        if tokens == 0 {
            return Ok(());
        }
        let layer = self.layer(index)?;
        let (key, value) = tail_plane_bytes(layer.geometry(), self.identity.layout.dtype(), stored);
        let planes = Some([key, value]);
        let plane = |plane| self.piece(frame, descriptor, plane, planes);
        let keys = plane(0)?.to_vec();
        let values = if value == 0 { Vec::new() } else { plane(1)?.to_vec() };
        // The writer had cut off the groups of earlier frames from the tail's first group on.
        let size = self.identity.layout.group_tokens() as u64;
        let group = first_token / size;
        let devices = Arc::clone(&self.store.devices);
        let layer = self.layer_mut(index)?;
        if layer.table().groups() > group {
            let kept = (first_token % size) as usize;
            let extent = layer.table().find(group);
            let place = extent.and_then(|e| e.place(group, layer.block(), layer.geometry().planes()));
            if let Some(place) = place.filter(|_| kept > 0) {
                loose[index].push(LooseTokens::group(&devices, layer, group, &place, kept)?);
            }
            layer.forget_groups(group);
        }
        // This tail replaces what earlier ones hold of its tokens.
        let end = first_token + tokens as u64;
        loose[index].retain(|piece| piece.first_token < first_token || piece.end() > end);
        loose[index].push(LooseTokens { first_token, tokens, stride: stored, keys, values });
        Ok(())
    }
}

/// Returns the places of summary records in a frame. Records of selectors with a damaged header are left out.
fn summary_places(view: &FrameView<'_>, front: &[u8]) -> Arc<[SummaryPlace]> {
    let layout = view.layout();
    let is_summary = |d: &&Descriptor| d.kind.get() == KIND_SUMMARY;
    let stored = |d: &Descriptor| {
        let (kind, record_bytes) = (d.summary.get(), d.record_bytes.get());
        if kind == SUMMARY_MIN_MAX {
            return Some(min_max_records((d.bytes.get() / u64::from(d.pieces.get().max(1))) as u32));
        }
        let bytes = front.get(usize::try_from(d.offset.get()).ok()?..)?;
        let layer = layout.layers.get(usize::from(d.layer.get()))?;
        let group = usize::from(layout.group_tokens);
        let header = SummaryHeader::verify(bytes, kind, layer, group, record_bytes).ok()?;
        let (parameter, adapter_checksum) = (header.parameter.get(), header.adapter_checksum.get());
        Some(SummaryRecords { kind, parameter, adapter_checksum, record_bytes })
    };
    let place = |d: &Descriptor| {
        Some(SummaryPlace {
            layer: d.layer.get(),
            stored: stored(d)?,
            first_group: d.first_group(layout),
            groups: d.pieces.get(),
            offset: d.offset.get(),
            bytes: d.bytes.get(),
            checksum: view.checksums(d).first()?.get(),
        })
    };
    view.descriptors().iter().filter(is_summary).filter_map(place).collect()
}
