//! Frames that contradict their sequence or their record in the manifest.

mod common;

use common::{Image, Records, commit, find, replace};
use kvfsck::{Code, EXIT_DAMAGE, Finding, Severity};
use stratakv_format::PAGE_BYTES;
use stratakv_format::manifest::{self as m, Kind};
use stratakv_format::superblock::STATE_OPEN;

const SEGMENT: &str = "segments/00000000";

#[test]
fn frames_that_contradict_their_sequence_are_damage() {
    let changed = |change: &dyn Fn(&mut Image)| {
        let mut image = Image::standard(1, STATE_OPEN);
        change(&mut image);
        image.write(STATE_OPEN);
        image.check()
    };
    let report = changed(&|image| replace(&mut image.batches[1].bytes, b"alpha", b"alphb"));
    assert_eq!(find(&report, Code::FrameHeader, "the key differs").frame, Some(1));
    // The summaries of the create record are 4 bytes before its copies.
    let report = changed(&|image| {
        let at = 8 + std::mem::offset_of!(m::SequenceCreate, summaries);
        image.batches[1].bytes[at] = 0;
    });
    assert_eq!(find(&report, Code::FrameHeader, "the stored summary kinds differ").frame, Some(1));
    // Frame 3 of sequence 1 has LSN 3.
    let [one, three] = [1_u64, 3].map(u64::to_le_bytes);
    let report = changed(&|image| {
        let (from, to) = ([three, one, three].concat(), [three, one, one].concat());
        replace(&mut image.batches[3].bytes, &from, &to);
    });
    assert_eq!(find(&report, Code::ManifestRecord, "frames 1 and 3 have the same LSN 1").frame, Some(3));
    let report = changed(&|image| {
        let mut records = Records::default();
        let (segment, used_pages) = (0.into(), 2.into());
        let seal = m::SegmentSeal { segment, used_pages, device: 0.into(), reserved: [0; 6] };
        records.push(Kind::SegmentSeal, &seal, &[]);
        image.batches.push(records);
    });
    let found = find(&report, Code::FrameLocation, "of a segment sealed with 2 pages in use");
    assert_eq!((found.file.as_deref(), found.offset), (Some(SEGMENT), Some(PAGE_BYTES as u64)));
    // The frames of this store hold no caller state.
    let mut image = Image::with_frames(&[&[(stratakv_format::frame::KIND_TAIL, 0, 2)]], 2);
    let mut records = Records::default();
    records.push(Kind::SequenceCommit, &commit(1, 2, 0, 1), &[]);
    image.batches.push(records);
    image.write(STATE_OPEN);
    assert_eq!(find(&image.check(), Code::CallerState, "that holds no caller state").frame, Some(1));
}

#[test]
fn frames_of_another_layout_than_their_sequence_are_damage() {
    // Sequence 1 has layout 2, which has the content of layout 1. Its fork has the same layout.
    let mut image = Image::standard(1, STATE_OPEN);
    let (mut records, mut bytes) = (Records::default(), Vec::new());
    common::layout().encode(&mut bytes);
    records.push(Kind::Layout, &m::LayoutDefined { layout: 2.into(), reserved: 0.into() }, &bytes);
    let at = records.bytes.len() + 8 + std::mem::offset_of!(m::SequenceCreate, layout);
    records.bytes.extend_from_slice(&image.batches[1].bytes);
    records.bytes[at] = 2;
    records.count += image.batches[1].count;
    image.batches[1] = records;
    image.write(STATE_OPEN);
    let report = image.check();
    let found = |f: &Finding| {
        assert_eq!((f.code, f.severity), (Code::FrameHeader, Severity::Damage), "{f}");
        assert_eq!(f.message, "the frame has layout 1, its sequence layout 2");
        (f.sequence, f.frame)
    };
    let named: Vec<_> = report.findings.iter().map(found).collect();
    assert_eq!(named, [(Some(1), Some(1)), (Some(1), Some(3)), (Some(2), Some(1))], "{}", report.to_text());
    assert_eq!(report.exit_code, EXIT_DAMAGE);
}

#[test]
fn a_header_with_another_number_of_pages_than_its_record_is_damage() {
    let mut image = Image::standard(1, STATE_OPEN);
    let planes = image.check().checked.planes;
    let header = &image.segments[0][PAGE_BYTES..];
    let (crc, pages) = (header[4..8].to_vec(), header[8..12].to_vec());
    assert_eq!(pages, 1_u32.to_le_bytes());
    let (from, to) = ([crc.clone(), pages].concat(), [crc, 2_u32.to_le_bytes().to_vec()].concat());
    replace(&mut image.batches[1].bytes, &from, &to);
    image.write(STATE_OPEN);
    let report = image.check();
    let [found] = &report.findings[..] else { panic!("{}", report.to_text()) };
    assert_eq!((found.code, found.severity), (Code::FrameHeader, Severity::Damage));
    assert_eq!(found.message, "header pages is 0x1, but the manifest says 0x2");
    assert_eq!((found.expected.as_deref(), found.found.as_deref()), (Some("0x2"), Some("0x1")));
    assert_eq!((found.frame, found.sequence, found.file.as_deref()), (Some(1), Some(1), Some(SEGMENT)));
    assert_eq!((found.offset, found.length), (Some(PAGE_BYTES as u64), Some(2 * PAGE_BYTES as u64)));
    assert_eq!(report.exit_code, EXIT_DAMAGE);
    // Frame 1 has 16 planes.
    assert_eq!(planes - report.checked.planes, 16, "{}", report.to_text());
}
