//! Frame headers and batches with a correct checksum and wrong contents. Each is refused for its own reason.

#[allow(dead_code, unused_imports, unused_macros, reason = "the golden tests use the rest")]
mod builder;
#[allow(dead_code, reason = "the golden tests use the rest")]
mod golden_store;
mod hostile;

use builder as b;
use golden_store as g;
use proptest::prelude::*;
use stratakv_format::checksum::PayloadChecksum;
use stratakv_format::frame::{Descriptor, FrameView, KIND_GROUPS};
use stratakv_format::manifest::Batch;
use stratakv_format::{FormatError, PAGE_BYTES};
use zerocopy::little_endian::{U16, U32, U64};

/// Writes the CRC that matches the pages, seeded with `nonce`.
fn fix_crc(pages: &mut [u8], nonce: u64) {
    pages[4..8].fill(0);
    let mut crc = crc32fast::Hasher::new();
    crc.update(&nonce.to_le_bytes());
    crc.update(pages);
    pages[4..8].copy_from_slice(&crc.finalize().to_le_bytes());
}

/// Verifies golden frame 1 after a change.
fn read_changed(change: impl FnOnce(&mut b::GoldenFrame)) -> Result<(), FormatError> {
    let [frame, _] = g::frames(PayloadChecksum::Crc64Nvme);
    hostile::read_changed(frame, &g::layout(), change)
}

#[test]
fn every_wrong_descriptor_is_refused() {
    assert_eq!(read_changed(|_| {}), Ok(()));
    // The index of the descriptor (0-2 summaries, 3 token ids, 4-6 groups), the change, and the field in the error.
    type Change = fn(&mut Descriptor);
    let cases: &[(usize, Change, &str)] = &[
        (4, |d| d.kind = U16::new(0), "descriptor kind"),
        (4, |d| d.kind = U16::new(6), "descriptor kind"),
        (4, |d| d.layer = U16::new(1), "layer"),
        (4, |d| d.layer = U16::new(4), "layer"),
        (4, |d| d.codec = U16::new(1), "codec of the layout"),
        (4, |d| d.codec = U16::new(3), "codec"),
        (4, |d| d.codec = U16::new(0x300), "codec"),
        (0, |d| d.codec = U16::new(1), "codec of the layout"),
        (4, |d| d.cipher = 1, "cipher"),
        (4, |d| d.key = U16::new(1), "cipher"),
        (4, |d| d.record_bytes = U32::new(1), "descriptor"),
        (0, |d| d.record_bytes = U32::new(1), "descriptor"),
        (4, |d| d.summary = U16::new(1), "summary kind"),
        (4, |d| d.element = 1, "summary kind"),
        (4, |d| d.first_token = U64::new(2), "groups"),
        (4, |d| d.first_token = U64::new(u64::MAX - 3), "tokens"),
        (4, |d| d.tokens = U32::new(7), "groups"),
        (4, |d| d.tokens = U32::new(0), "tokens"),
        (4, |d| d.pieces = U32::new(3), "groups"),
        (4, |d| d.pieces = U32::new(u32::MAX), "groups"),
        (4, |d| d.bytes = U64::new(8192), "extent bytes"),
        (4, |d| d.offset = U64::new(u64::MAX), "extent end"),
        (4, |d| d.offset = U64::new(8200), "extent alignment"),
        (4, |d| d.offset = U64::new(4096), "extent on the wrong side of the front"),
        (5, |d| d.offset = U64::new(8192), "extent overlaps"),
        (6, |d| d.offset = U64::new(6 * 4096), "extent end"),
        (4, |d| d.checksum_count = U32::new(3), "extent checksums"),
        (4, |d| d.checksum_first = U32::new(3), "extent checksums"),
        (4, |d| d.checksum_first = U32::new(u32::MAX), "extent checksums"),
        (0, |d| d.summary = U16::new(2), "summary record"),
        (0, |d| d.summary = U16::new(6), "summary"),
        (0, |d| (d.summary, d.element) = (U16::new(4), 0), "summary record"),
        (0, |d| (d.summary, d.element, d.record_bytes) = (U16::new(4), 0, U32::new(u32::MAX)), "summary record"),
        (0, |d| (d.summary, d.element, d.record_bytes) = (U16::new(4), 0, U32::new(132)), "extent bytes"),
        (3, |d| (d.kind, d.tokens) = (U16::new(11), U32::new(0)), "adapter bytes"),
        (3, |d| (d.kind, d.first_token) = (U16::new(11), U64::new(1 << 32)), "adapter bytes"),
        (3, |d| (d.kind, d.layer) = (U16::new(11), U16::new(1)), "layer"),
        (0, |d| d.element = 0, "element type of a summary"),
        (0, |d| d.element = 1, "element type of a summary"),
        (0, |d| d.element = 3, "element type of a summary"),
        (0, |d| d.element = 9, "element type of a summary"),
        (0, |d| d.offset = U64::new(4095), "extent alignment"),
        (0, |d| d.offset = U64::new(0), "extent overlaps"),
        (3, |d| d.layer = U16::new(2), "pieces"),
        (3, |d| d.pieces = U32::new(0), "pieces"),
        (3, |d| d.tokens = U32::new(u32::MAX), "extent bytes"),
        (3, |d| d.first_token = U64::new(1 << 49), "tokens"),
        (3, |d| (d.tokens, d.bytes) = (U32::new(200), U64::new(800)), "extent on the wrong side of the front"),
        (3, |d| (d.kind, d.tokens) = (U16::new(5), U32::new(65_537)), "caller state bytes"),
        (3, |d| (d.kind, d.tokens) = (U16::new(3), U32::new(129)), "tail tokens"),
    ];
    for (row, (index, change, field)) in cases.iter().enumerate() {
        let found = read_changed(|frame| change(&mut frame.descriptors[*index]));
        assert_eq!(found.map_err(|e| e.field), Err(*field), "row {row}");
    }
    assert_eq!(read_changed(|frame| frame.checksums.push(1)).map_err(|e| e.field), Err("checksums"));
    assert_eq!(read_changed(|frame| frame.front_pages = 0).map_err(|e| e.field), Err("front pages"));
    assert_eq!(read_changed(|frame| frame.front_pages = 7).map_err(|e| e.field), Err("front pages"));
    assert_eq!(
        read_changed(|frame| frame.front_pages = 3).map_err(|e| e.field),
        Err("extent on the wrong side of the front")
    );
}

#[test]
fn every_wrong_size_in_a_header_is_refused() {
    let [frame, _] = g::frames(PayloadChecksum::Crc64Nvme);
    let read = |at: usize, value: u32| {
        let mut bytes = frame.bytes.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        fix_crc(&mut bytes[..PAGE_BYTES], b::SEGMENT_NONCE);
        FrameView::verify(&bytes, &frame.place).map(|_| ()).map_err(|e| e.field)
    };
    assert_eq!(read(8, 1), Ok(()));
    for (at, values, field) in [
        (8, &[0, 1025, u32::MAX][..], "header pages"),
        (8, &[7], "frame header"),
        (12, &[0, 65_537, u32::MAX], "total pages"),
        (12, &[5, 7], "frame pages"),
        (116, &[97, 95, 88, 104], "layout bytes"),
        (116, &[0, 8, u32::MAX], "layout"),
        (120, &[513, u32::MAX], "key bytes"),
        (124, &[32_769, u32::MAX], "descriptors"),
        (128, &[u32::MAX, 1000], "checksums"),
        (132, &[0, 7, u32::MAX], "front pages"),
        (140, &[1], "frame header"),
    ] {
        for &value in values {
            let found = read(at, value);
            assert!(found.is_err(), "{value} at {at}");
            // The error of a truncated layout names the first part that is missing.
            let layout = field.starts_with("layout") && found.is_err_and(|f| f.starts_with("layout"));
            assert!(layout || found == Err(field), "{value} at {at}: {found:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

    /// Changes a few bytes of a header and corrects the CRC. The result is an error or a consistent frame.
    #[test]
    fn mutated_frames_are_refused_or_consistent(
        changes in proptest::collection::vec((64..900_usize, any::<u8>()), 1..5),
    ) {
        let [frame, _] = g::frames(PayloadChecksum::Crc64Nvme);
        let mut bytes = frame.bytes;
        for (at, value) in changes {
            bytes[at] = value;
        }
        fix_crc(&mut bytes[..PAGE_BYTES], b::SEGMENT_NONCE);
        if let Ok(view) = FrameView::verify(&bytes, &frame.place) {
            let mut end = PAGE_BYTES as u64;
            for d in view.descriptors() {
                prop_assert!(d.offset.get() >= end);
                end = d.offset.get() + d.bytes.get();
                prop_assert_eq!(view.checksums(d).len(), d.checksum_count.get() as usize);
                if d.kind.get() == KIND_GROUPS {
                    let block = view.layout().block(&view.layout().layers[usize::from(d.layer.get())]);
                    let last = block.block_offset(d.pieces.get() as usize - 1) + block.block_bytes;
                    prop_assert!(last as u64 <= d.bytes.get());
                }
            }
            prop_assert!(end <= bytes.len() as u64);
        }
    }

    /// Changes a few bytes of a batch and corrects the CRC. Records end after the first error.
    #[test]
    fn mutated_batches_are_refused_or_bounded(
        changes in proptest::collection::vec((40..1500_usize, any::<u8>()), 1..5),
    ) {
        let mut bytes = g::manifest_file(0, &[g::every_record()])[PAGE_BYTES..].to_vec();
        for (at, value) in changes {
            bytes[at] = value;
        }
        fix_crc(&mut bytes[..PAGE_BYTES], b::MANIFEST_NONCE);
        if let Ok(batch) = Batch::verify(&bytes, &b::batch_place(41)) {
            let read: Vec<_> = batch.records().collect();
            prop_assert!(read.len() as u64 <= u64::from(batch.header().record_count.get()) + 1);
            prop_assert!(read.iter().rev().skip(1).all(Result::is_ok));
        }
    }
}

#[test]
fn every_wrong_summary_header_is_refused() {
    use stratakv_format::frame::{
        SUMMARY_CODES, SUMMARY_LANDMARKS, SUMMARY_LOW_RANK, SUMMARY_MIN_MAX, SUMMARY_SIGNS, SummaryHeader, record_bytes,
    };
    let layer = g::layout().layers[0];
    let good = |parameter: u32| SummaryHeader {
        version: U32::new(1),
        parameter: U32::new(parameter),
        adapter: U64::new(0),
        adapter_checksum: U64::new(0),
        reserved: U64::new(0),
    };
    let verify = |header: &SummaryHeader, kind: u16, record: u32| {
        let bytes = zerocopy::IntoBytes::as_bytes(header);
        SummaryHeader::verify(bytes, kind, &layer, 4, record).map(|_| ()).map_err(|e| e.field)
    };
    // The layer has one KV head of 64.
    for (kind, parameter, record) in
        [(SUMMARY_LOW_RANK, 8, 64), (SUMMARY_CODES, 8, 32), (SUMMARY_LANDMARKS, 0, 132), (SUMMARY_SIGNS, 64, 40)]
    {
        let header = good(parameter);
        assert_eq!(record_bytes(kind, &layer, 4, parameter), Some(u64::from(record)));
        assert_eq!(verify(&header, kind, record), Ok(()));
        assert_eq!(verify(&header, kind, record + 1), Err("summary parameter"));
        assert_eq!(verify(&good(parameter + 1), kind, record), Err("summary parameter"));
        assert_eq!(verify(&SummaryHeader { version: U32::new(2), ..header }, kind, record), Err("summary version"));
        assert_eq!(verify(&SummaryHeader { reserved: U64::new(1), ..header }, kind, record), Err("summary header"));
        let adapter = verify(&SummaryHeader { adapter_checksum: U64::new(1), ..header }, kind, record);
        assert_eq!(adapter.is_ok(), matches!(kind, SUMMARY_LOW_RANK | SUMMARY_CODES));
        assert!(SummaryHeader::verify(&[0; 31], kind, &layer, 4, record).is_err());
    }
    assert_eq!(verify(&good(0), SUMMARY_LOW_RANK, 0), Err("summary parameter"));
    assert_eq!(record_bytes(SUMMARY_LOW_RANK, &layer, 128, u32::MAX), Some(128 * 2 * u64::from(u32::MAX)));
    assert_eq!((record_bytes(SUMMARY_MIN_MAX, &layer, 4, 0), record_bytes(6, &layer, 4, 0)), (None, None));
}
