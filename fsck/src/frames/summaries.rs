//! Summaries of a frame against the keys of the same frame (SPEC.md chapter 11).
//!
//! Min/max summaries, landmarks and signs follow from the decoded keys alone, so they are computed again. Low-rank
//! summaries and codes also depend on arithmetic that the format does not fix, so only `payload` checks them.
//!
//! Extents that do not match their checksum are passed over, because `payload` has reported them.

use super::payload::{FrameBytes, ReadContext};
use super::record_check::{is_landmark, is_signs};
use crate::elements::is_min_max;
use crate::finding::{Code, Finding, Sink};
use crate::io::StoreFile;
use crate::planes::decoded;
use stratakv_format::SequenceId;
use stratakv_format::checksum::PlaneIdentity;
use stratakv_format::frame::{
    Descriptor, FrameView, KIND_GROUPS, KIND_SUMMARY, SUMMARY_LANDMARKS, SUMMARY_MIN_MAX, SUMMARY_SIGNS, SummaryHeader,
    min_max_record_bytes,
};
use stratakv_format::layout::LayerGeometry;

/// The check of the summaries of one copy of a frame.
pub(super) struct SummaryChecker<'a> {
    pub(super) context: &'a ReadContext<'a>,
    pub(super) file: &'a StoreFile,
    pub(super) frame: FrameBytes,
    pub(super) view: &'a FrameView<'a>,
}

/// The summary records of consecutive groups of a layer.
struct Section<'a> {
    descriptor: &'a Descriptor,
    layer: &'a LayerGeometry,
    records: Vec<u8>,
    record_bytes: usize,
    /// The offset of the first record in the file.
    at: u64,
}

impl<'a> SummaryChecker<'a> {
    /// Compares every summary record that can be computed again.
    pub(super) fn check(&self) {
        let of_kind = |kind: u16| self.view.descriptors().iter().filter(move |own| own.kind.get() == kind);
        for section in of_kind(KIND_SUMMARY).filter_map(|descriptor| self.section(descriptor)) {
            for groups in of_kind(KIND_GROUPS).filter(|own| own.layer == section.descriptor.layer) {
                self.compare(&section, groups);
            }
        }
    }

    /// Reads a section whose records can be computed again.
    fn section(&self, descriptor: &'a Descriptor) -> Option<Section<'a>> {
        let layout = self.view.layout();
        let layer = layout.layers.get(usize::from(descriptor.layer.get()))?;
        let (header_bytes, record_bytes) = match descriptor.summary.get() {
            SUMMARY_MIN_MAX => (0, min_max_record_bytes(layer)),
            SUMMARY_LANDMARKS | SUMMARY_SIGNS => (size_of::<SummaryHeader>(), descriptor.record_bytes.get() as usize),
            _ => return None,
        };
        let offset = self.frame.location.offset() + descriptor.offset.get();
        let (first, tokens) = (descriptor.first_token.get(), descriptor.tokens.get());
        let identity = self.identity(descriptor, first, tokens);
        let checksum = self.view.checksums(descriptor).first()?.get();
        let mut records = self.read(offset, descriptor.bytes.get() as usize, &identity, checksum)?;
        if header_bytes > 0 {
            let (kind, group) = (descriptor.summary.get(), usize::from(layout.group_tokens));
            SummaryHeader::verify(&records, kind, layer, group, record_bytes as u32).ok()?;
            records.drain(..header_bytes);
        }
        Some(Section { descriptor, layer, records, record_bytes, at: offset + header_bytes as u64 })
    }

    fn identity(&self, descriptor: &Descriptor, first: u64, tokens: u32) -> PlaneIdentity {
        let (nonce, sequence) = (self.view.header().nonce.get(), SequenceId(self.frame.origin));
        PlaneIdentity::new(nonce, sequence, descriptor.kind.get(), descriptor.layer.get(), first, tokens)
    }

    /// Returns bytes that match their checksum.
    fn read(&self, offset: u64, bytes: usize, identity: &PlaneIdentity, checksum: u64) -> Option<Vec<u8>> {
        let mut out = vec![0; bytes];
        let readable = self.file.read(offset, &mut out, &Sink::new(0)).is_empty();
        (readable && self.context.checksum.compute(identity, &out) == checksum).then_some(out)
    }

    /// Compares the records of a section with the keys of the groups that it shares with an extent.
    fn compare(&self, section: &Section<'_>, groups: &Descriptor) {
        let (layout, layer) = (self.view.layout(), section.layer);
        let (block, group) = (layout.block(layer), u64::from(layout.group_tokens));
        let (offset, bytes) = block.plane(0);
        let (shape, codec) = (layout.plane_shape(layer, 0), layer.codecs[0]);
        let checksums = self.view.checksums(groups);
        let (section_first, groups_first) = (section.descriptor.first_token.get(), groups.first_token.get());
        let end = section.descriptor.end_token().min(groups.end_token());
        let mut first = section_first.max(groups_first);
        while first < end {
            let nth = ((first - groups_first) / group) as usize;
            let at = self.frame.location.offset() + groups.offset.get() + (block.block_offset(nth) + offset) as u64;
            let identity = self.identity(groups, first, u32::from(layout.group_tokens));
            let stored = checksums.get(nth * layer.planes());
            let stored = stored.and_then(|checksum| self.read(at, bytes, &identity, checksum.get()));
            let start = ((first - section_first) / group) as usize * section.record_bytes;
            let record = section.records.get(start..start + section.record_bytes);
            if let Some((stored, record)) = stored.filter(|own| codec.first_bad(&shape, own).is_none()).zip(record) {
                self.context.counts.summaries.add(1);
                if !self.is_of_keys(section, record, &decoded(codec, &shape, &stored)) {
                    self.report(section, first, section.at + start as u64);
                }
            }
            first += group;
        }
    }

    /// Returns whether a record is the summary of keys `[kv_heads, G, key_dim]`.
    fn is_of_keys(&self, section: &Section<'_>, record: &[u8], keys: &[u8]) -> bool {
        let layout = self.view.layout();
        match section.descriptor.summary.get() {
            SUMMARY_LANDMARKS => is_landmark(record, keys, section.layer, layout),
            SUMMARY_SIGNS => is_signs(record, keys, section.layer, layout),
            _ => is_min_max(record, keys, section.layer, layout),
        }
    }

    fn report(&self, section: &Section<'_>, first: u64, at: u64) {
        let text = match section.descriptor.summary.get() {
            SUMMARY_LANDMARKS => "the landmark of the group is not the mean of its keys and their lowest cosine",
            SUMMARY_SIGNS => "the signs of the group are not those of its rotated keys, or the lengths differ",
            _ => "the min/max summary of the group is not the minima and maxima of its keys",
        };
        let finding = Finding::damage(Code::Summary, text).frame(self.frame.id).sequence(self.frame.origin);
        let finding = finding.layer(section.descriptor.layer.get()).plane("summary");
        let finding = finding.tokens(first, first + u64::from(self.view.layout().group_tokens));
        self.context.sink.push(finding.at(&self.file.place, at, section.record_bytes as u64));
    }
}
