//! Copies of frames: those that differ from each other, and frames that only devices held which left the store.

mod common;

use common::{Image, Records, member};
use kvfsck::{Code, EXIT_CLEAN, EXIT_DAMAGE, Options, Report, Severity, check};
use std::path::PathBuf;
use stratakv_format::features::{INCOMPAT_POOLS, INCOMPAT_REPLICAS};
use stratakv_format::manifest::{self as m, FLAG_DERIVED, Kind};
use stratakv_format::segment::KIND_POOL;
use stratakv_format::superblock::STATE_OPEN;
use stratakv_format::{DeviceIndex, Location, PAGE_BYTES, SegmentId};

/// The offset of `created_unix_ms` in a frame header.
const CREATED: usize = 104;

/// Returns the standard store of three devices with one more batch, and with the feature bits of copies and pools.
///
/// The second device holds no frame, so tests put copies there. The third holds frame 3 of sequence 1.
fn image(records: impl FnOnce(&mut Image, &mut Records)) -> Image {
    let mut image = Image::standard(3, STATE_OPEN);
    let mut more = Records::default();
    records(&mut image, &mut more);
    image.batches.push(more);
    image.features = image.features.with(INCOMPAT_REPLICAS | INCOMPAT_POOLS);
    image.write(STATE_OPEN);
    image
}

/// Returns the report on the first two devices.
fn check_two(image: &Image) -> Report {
    check(&image.dirs[..2], &Options::default(), &()).unwrap()
}

#[test]
fn a_copy_whose_header_differs_is_damage() {
    let with_copy = |change: &dyn Fn(&mut [u8])| {
        image(|image, records| {
            let copy = image.copy_frame(0, 1, change);
            records.push(Kind::Replica, &copy, &[]);
        })
    };
    let report = with_copy(&|_| {}).check();
    assert_eq!((report.exit_code, report.checked.frames), (EXIT_CLEAN, 3), "{}", report.to_text());
    let image = with_copy(&|bytes| bytes[CREATED] ^= 1);
    for threads in [1, 8] {
        let report = check(&image.dirs, &Options { threads, ..Options::default() }, &()).unwrap();
        let [found] = &report.findings[..] else { panic!("{}", report.to_text()) };
        assert_eq!((found.code, found.severity), (Code::FrameHeader, Severity::Damage));
        assert_eq!((found.device, found.frame, found.sequence), (Some(1), Some(1), Some(1)));
        assert_eq!(found.file.as_deref(), Some("segments/00000000"));
        assert_eq!((found.offset, found.length), (Some(PAGE_BYTES as u64), Some(PAGE_BYTES as u64)));
        assert!(found.message.contains("differs from the copy on device 0"), "{found}");
    }
}

/// The engine opens such a store, but not the sequence.
#[test]
fn frames_that_only_a_lost_device_held_are_damage() {
    let lost = image(|_, records| records.push(Kind::Member, &member(2, m::MEMBER_LOST), &[]));
    let report = check_two(&lost);
    let [found] = &report.findings[..] else { panic!("{}", report.to_text()) };
    assert_eq!((found.code, found.severity), (Code::MissingDevice, Severity::Damage));
    assert_eq!((found.device, found.frame, found.sequence), (Some(2), Some(3), Some(1)));
    assert_eq!(found.message, "every copy of this frame is on a device that left the store");
    assert_eq!(report.exit_code, EXIT_DAMAGE);
    // The first device holds frame 1, to which both sequences refer.
    let lost = image(|_, records| records.push(Kind::Member, &member(0, m::MEMBER_LOST), &[]));
    let left: Vec<PathBuf> = lost.dirs[1..].to_vec();
    let report = check(&left, &Options::default(), &()).unwrap();
    let named: Vec<_> = report.findings.iter().map(|f| (f.code, f.frame, f.sequence)).collect();
    let of = |sequence| (Code::MissingDevice, Some(1), Some(sequence));
    assert_eq!(named, [of(1), of(2)], "{}", report.to_text());
}

/// A device may have held many frames of a sequence, so they are one finding.
#[test]
fn a_sequence_has_one_finding_for_all_of_its_lost_frames() {
    let lost = image(|_, records| {
        for device in [0, 2] {
            records.push(Kind::Member, &member(device, m::MEMBER_LOST), &[]);
        }
    });
    let report = check(&lost.dirs[1..2], &Options::default(), &()).unwrap();
    let [first, second] = &report.findings[..] else { panic!("{}", report.to_text()) };
    for found in [first, second] {
        assert_eq!((found.code, found.severity), (Code::MissingDevice, Severity::Damage));
        assert_eq!((found.device, found.frame), (Some(0), Some(1)), "{found}");
    }
    // The frames of sequence 1 are 1 and 3. Its fork refers to frame 1 only.
    assert_eq!((first.sequence, second.sequence), (Some(1), Some(2)));
    assert_eq!(first.message, "every copy of this frame and of 1 more is on a device that left the store");
    assert_eq!(second.message, "every copy of this frame is on a device that left the store");
    assert_eq!(report.exit_code, EXIT_DAMAGE);
}

#[test]
fn a_frame_with_a_copy_on_another_device_is_not_lost() {
    let copied = image(|image, records| {
        let copy = image.copy_frame(2, 1, |_| {});
        records.push(Kind::Replica, &copy, &[]);
        records.push(Kind::Member, &member(2, m::MEMBER_LOST), &[]);
    });
    let report = check_two(&copied);
    assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 0), "{}", report.to_text());
}

/// No token is lost with a derived frame.
#[test]
fn derived_frames_of_a_lost_device_are_not_missed() {
    let derived = image(|image, records| {
        let copy = image.copy_frame(2, 1, |_| {});
        records.push(Kind::Replica, &copy, &[]);
        let open = m::SegmentOpen {
            generation: 5.into(),
            nonce: 9.into(),
            segment: 1.into(),
            pages: common::SEGMENT_PAGES.into(),
            device: 2.into(),
            kind: KIND_POOL,
            reserved: [0; 5],
        };
        records.push(Kind::SegmentOpen, &open, &[]);
        let location = Location { device: DeviceIndex(2), segment: SegmentId(1), page: 1, pages: 1 };
        let frame = m::Frame {
            frame: 9.into(),
            origin: 1.into(),
            lsn: 50.into(),
            nonce: 1.into(),
            location: location.to_raw(),
            header_crc: 1.into(),
            header_pages: 1.into(),
            front_pages: 1.into(),
            flags: FLAG_DERIVED.into(),
        };
        records.push_frame(1, &frame);
        records.push(Kind::Member, &member(2, m::MEMBER_LOST), &[]);
    });
    let report = check_two(&derived);
    assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 0), "{}", report.to_text());
}
