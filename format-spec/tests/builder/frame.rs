//! Frames of golden stores and their extents.

use super::{ADAPTER_SEQUENCE, KEY, SEGMENT_GENERATION, STORE_ID, segment_nonce};
use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity};
use stratakv_format::frame::{Descriptor, FramePlace, HeaderBuilder, KIND_GROUPS};
use stratakv_format::ids::{FrameId, LayoutId, SequenceId};
use stratakv_format::layout::Layout;
use stratakv_format::{DeviceIndex, Location, PAGE_BYTES, SegmentId};
use zerocopy::little_endian::{U16, U32, U64};

/// A plane in a frame: its identity, its offset in the frame and its bytes.
pub(crate) struct StoredPlane {
    pub(crate) identity: PlaneIdentity,
    pub(crate) offset: usize,
    pub(crate) bytes: Vec<u8>,
}

/// A frame: the fields of its header, its planes and its pages.
pub(crate) struct GoldenFrame {
    pub(crate) place: FramePlace,
    pub(crate) frame: u64,
    pub(crate) lsn: u64,
    pub(crate) nonce: u64,
    pub(crate) header_pages: u32,
    pub(crate) front_pages: u32,
    pub(crate) descriptors: Vec<Descriptor>,
    pub(crate) checksums: Vec<u64>,
    pub(crate) planes: Vec<StoredPlane>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) crc: u32,
}

/// The parts of a frame.
pub(crate) struct FrameParts<'a> {
    pub(crate) id: u64,
    pub(crate) lsn: u64,
    pub(crate) nonce: u64,
    pub(crate) sequence: u64,
    pub(crate) key: &'a [u8],
    pub(crate) summaries: u32,
    pub(crate) location: Location,
    pub(crate) front_pages: u32,
    pub(crate) descriptors: Vec<Descriptor>,
    pub(crate) checksums: Vec<u64>,
    pub(crate) planes: Vec<StoredPlane>,
}

impl FrameParts<'_> {
    /// Returns the frame, with a header of one page.
    pub(crate) fn frame(self, layout: &Layout) -> GoldenFrame {
        let (nonce, bytes) = (segment_nonce(self.location.device.0), vec![0; self.location.bytes() as usize]);
        self.frame_over(layout, nonce, bytes)
    }

    /// Returns the frame in a segment with this nonce. It keeps `bytes` where it has neither header nor plane.
    pub(crate) fn frame_over(self, layout: &Layout, segment_nonce: u64, mut bytes: Vec<u8>) -> GoldenFrame {
        let location = self.location;
        let place = FramePlace { store_id: STORE_ID, location, segment_generation: SEGMENT_GENERATION, segment_nonce };
        for plane in &self.planes {
            bytes[plane.offset..plane.offset + plane.bytes.len()].copy_from_slice(&plane.bytes);
        }
        let header = HeaderBuilder {
            frame: FrameId(self.id),
            lsn: self.lsn,
            nonce: self.nonce,
            sequence: SequenceId(self.sequence),
            parent: None,
            created_unix_ms: 1_700_000_060_000 + self.id,
            layout_id: LayoutId(1),
            layout,
            key: self.key,
            summaries: self.summaries,
            descriptors: &self.descriptors,
            checksums: &self.checksums,
            front_pages: self.front_pages,
        };
        assert_eq!(header.bytes(), PAGE_BYTES);
        let crc = header.write(&place, &mut bytes[..PAGE_BYTES]).expect("a header");
        let Self { id: frame, lsn, nonce, front_pages, descriptors, checksums, planes, .. } = self;
        let header_pages = 1;
        GoldenFrame { place, frame, lsn, nonce, header_pages, front_pages, descriptors, checksums, planes, bytes, crc }
    }
}

/// A plane of an extent: its first token, tokens, number, offset in the extent and bytes.
pub(crate) struct ExtentPlane {
    pub(crate) first_token: u64,
    pub(crate) tokens: u32,
    pub(crate) plane: u16,
    pub(crate) offset: usize,
    pub(crate) bytes: Vec<u8>,
}

/// An extent: its descriptor without offset, length and checksums, its planes, and its length.
pub(crate) struct Extent {
    pub(crate) descriptor: Descriptor,
    pub(crate) planes: Vec<ExtentPlane>,
    pub(crate) bytes: u64,
}

/// Returns a descriptor without offset, length and checksums.
pub(crate) fn descriptor(kind: u16, layer: u16, first_token: u64, tokens: u32, pieces: u32) -> Descriptor {
    Descriptor {
        kind: U16::new(kind),
        layer: U16::new(layer),
        codec: U16::new(0),
        summary: U16::new(0),
        first_token: U64::new(first_token),
        tokens: U32::new(tokens),
        pieces: U32::new(pieces),
        offset: U64::new(0),
        bytes: U64::new(0),
        checksum_first: U32::new(0),
        checksum_count: U32::new(0),
        element: 0,
        cipher: 0,
        key: U16::new(0),
        record_bytes: U32::new(0),
    }
}

/// Returns frame `id` of a sequence at a device and page, with `extents` in this order.
pub(crate) fn lay_out(
    layout: &Layout,
    id: u64,
    sequence: u64,
    (device, page): (u16, u32),
    extents: Vec<Extent>,
) -> GoldenFrame {
    let (nonce, lsn) = (0x7265_7472_6965_7600 + id, 200 + id);
    let (mut descriptors, mut checksums, mut planes) = (Vec::new(), Vec::new(), Vec::new());
    let mut at = PAGE_BYTES;
    let mut front = None;
    for extent in extents {
        let mut descriptor = extent.descriptor;
        let (kind, layer) = (descriptor.kind.get(), descriptor.layer.get());
        at = at.next_multiple_of(if kind == KIND_GROUPS { PAGE_BYTES } else { 8 });
        if kind == KIND_GROUPS {
            front.get_or_insert(at);
        }
        descriptor.offset = U64::new(at as u64);
        descriptor.bytes = U64::new(extent.bytes);
        descriptor.checksum_first = U32::new(checksums.len() as u32);
        descriptor.checksum_count = U32::new(extent.planes.len() as u32);
        for ExtentPlane { first_token, tokens, plane, offset, bytes } in extent.planes {
            let identity = PlaneIdentity::new(nonce, SequenceId(sequence), kind, layer, first_token, tokens);
            let identity = identity.with_plane(plane);
            checksums.push(PayloadChecksum::Crc64Nvme.compute(&identity, &bytes));
            planes.push(StoredPlane { identity, offset: at + offset, bytes });
        }
        descriptors.push(descriptor);
        at += extent.bytes as usize;
    }
    let total = at.next_multiple_of(PAGE_BYTES);
    let (pages, front_pages) = ((total / PAGE_BYTES) as u32, (front.unwrap_or(total) / PAGE_BYTES) as u32);
    let location = Location { device: DeviceIndex(device), segment: SegmentId(1), page, pages };
    let (key, summaries): (&[u8], _) = (if sequence == ADAPTER_SEQUENCE { b"" } else { KEY }, 0);
    let parts =
        FrameParts { id, lsn, nonce, sequence, key, summaries, location, front_pages, descriptors, checksums, planes };
    parts.frame(layout)
}
