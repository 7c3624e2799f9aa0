//! The corpus of broken images. Each file says what is broken, what kvfsck must find, and what the engine must do.

use serde::Deserialize;
use std::fs;
use std::mem::offset_of;
use std::path::Path;
use stratakv::ErrorKind;
use stratakv_format::PAGE_BYTES;
use stratakv_format::frame::{Descriptor, FrameHeader, MAGIC};
use stratakv_format::ids::NUMBER_MAX;
use stratakv_format::manifest::{BATCH_MAGIC, BATCH_PAGES_MAX, Batch, BatchHeader, Counters, Kind};
use stratakv_tests::damage::{Edit, Image, check, judge, recover, seal};
use stratakv_tests::rng::Rng;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// A file of `corrupt/`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Broken {
    /// The damage in words.
    why: String,
    /// The number of devices.
    devices: usize,
    /// The edits. Each applies to all files, on all devices, whose path starts with the given prefix.
    edits: Vec<(String, Edit)>,
    /// True if the checksums of metadata are made valid again.
    sealed: bool,
    /// The codes that kvfsck must find. The image is clean if the list is empty.
    finds: Vec<String>,
    /// The kind of the engine's error. Without one, the engine reads everything that the undamaged image holds.
    error: Option<String>,
}

fn broken_image(broken: &Broken) -> Image {
    let mut image = Image::base(broken.devices);
    for (front, edit) in &broken.edits {
        let mut at = 0;
        let mut touched = 0;
        while at < image.files.len() {
            let before = image.files.len();
            if image.files[at].1.starts_with(front.as_str()) {
                image.edit(&on_file(edit, at));
                touched += 1;
            }
            at += usize::from(image.files.len() == before);
        }
        assert!(touched > 0, "no file {front}");
    }
    if broken.sealed {
        seal(&mut image);
    }
    image
}

fn on_file(edit: &Edit, at: usize) -> Edit {
    let mut edit = edit.clone();
    match &mut edit {
        Edit::Flip { file, .. }
        | Edit::Number { file, .. }
        | Edit::Zero { file, .. }
        | Edit::Cut { file, .. }
        | Edit::Remove { file } => *file = at,
        Edit::Page { file, from_file, .. } => (*file, *from_file) = (at, at),
    }
    edit
}

#[test]
fn broken_images_are_reported_as_they_are() {
    let mut wrong = Vec::new();
    let mut count = 0;
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("corrupt");
    for entry in fs::read_dir(&dir).expect("the corpus") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let text = fs::read_to_string(&path).expect("a file");
        let broken: Broken = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let image = broken_image(&broken);
        let judgement = judge(&image);
        let found: Vec<String> = match &judgement.check {
            Ok(report) => report.findings.iter().map(|finding| finding.code.as_str().to_owned()).collect(),
            Err(e) => vec![e.code().to_owned()],
        };
        let error = judgement.held.as_ref().err().map(|e| format!("{:?}", e.kind()));
        let kept = judgement.held.as_ref().is_err()
            || judgement.held.as_ref().ok() == recover(&Image::base(broken.devices).simulate(1)).as_ref().ok();
        let finds_all =
            broken.finds.iter().all(|code| found.contains(code)) && broken.finds.is_empty() == found.is_empty();
        if !finds_all || error != broken.error || !kept {
            wrong.push(format!("{}: {}\n  found {found:?}, error {error:?}, kept {kept}", path.display(), broken.why));
        }
        count += 1;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count >= 14, "{count} images");
}

/// Runs `doing` in a process of its own with this limit of its address space.
fn limited(test: &str, bytes: Option<u64>, doing: impl FnOnce()) {
    const CHILD: &str = "STRATAKV_TEST_LIMITED";
    if std::env::var_os(CHILD).is_some() {
        if let Some(bytes) = bytes {
            let limit = rustix::process::Rlimit { current: Some(bytes), maximum: Some(bytes) };
            rustix::process::setrlimit(rustix::process::Resource::As, limit).expect("a limit");
        }
        doing();
        return;
    }
    let mut command = std::process::Command::new(std::env::current_exe().expect("this program"));
    let out = command.args(["--exact", test, "--test-threads=1"]).env(CHILD, "1").output().expect("a child");
    assert!(out.status.success(), "{}\n{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
}

/// Pages of segments are exchanged and their checksums made valid. Right bytes in the wrong place are an error.
#[test]
fn lmcache_4385_wrong_content_served_from_disk() {
    let mut rng = Rng(4385);
    let mut refused = 0;
    for _ in 0..200 {
        let mut image = Image::base(1 + rng.below(2));
        let whole = recover(&image.simulate(1)).expect("an image that is whole");
        let segments: Vec<usize> =
            (0..image.files.len()).filter(|file| image.files[*file].1.starts_with("segments/")).collect();
        let mut any = || (segments[rng.below(segments.len())], 1 + rng.below(60));
        let ((file, to), (from_file, from)) = (any(), any());
        image.edit(&Edit::Page { file, to, from_file, from });
        seal(&mut image);
        match recover(&image.simulate(1)) {
            Ok(held) => assert_eq!(held, whole, "{file} {to} {from_file} {from}"),
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::Corruption, "{e:?}");
                refused += 1;
            }
        }
    }
    assert!(refused > 50, "only {refused} swaps met a page that is read");
}

/// Every field of every header gets huge numbers under valid checksums. The process cannot allocate 3 GiB.
#[test]
fn redb_1331_huge_allocation_from_a_length_field() {
    limited("redb_1331_huge_allocation_from_a_length_field", Some(3 << 30), || {
        let base = Image::base(1);
        for (file, (_, name, _)) in base.files.iter().enumerate() {
            let fronts: &[usize] = if name == "superblock" { &[0] } else { &[0, 4096] };
            for front in fronts {
                for at in (0..208).step_by(4) {
                    for (value, bytes) in [(u64::MAX, 8), (1 << 43, 8), (u64::from(u32::MAX), 4), (0x7fff_ffff, 4)] {
                        let mut image = base.clone();
                        image.edit(&Edit::Number { file, at: front + at, value, bytes });
                        seal(&mut image);
                        let _ = recover(&image.simulate(1));
                    }
                }
            }
        }
    });
}

/// kvfsck and the engine answer on images with random edits and never panic. An image that kvfsck calls clean opens.
#[test]
fn redb_1333_repair_panics() {
    let mut rng = Rng(1333);
    let (mut clean, mut refused) = (0, 0);
    for round in 0..300 {
        let mut image = Image::base(1 + rng.below(2));
        for _ in 0..=rng.below(3) {
            let bytes: Vec<u8> = (0..8).map(|_| rng.next_u64() as u8).collect();
            Edit::many(&bytes).iter().for_each(|edit| image.edit(edit));
        }
        if round % 2 == 0 {
            seal(&mut image);
        }
        let judgement = judge(&image);
        assert!(!judgement.is_clean() || judgement.held.is_ok(), "{judgement:?}");
        clean += usize::from(judgement.is_clean());
        refused += usize::from(judgement.held.is_err());
    }
    assert!(clean > 0 && refused > 0, "{clean} clean, {refused} refused");
}

/// Returns the first byte and the length of each header in a file: pages of superblocks and manifests, the first page
/// of a segment, and headers of frames. Zeros at the end of a header do not count.
fn headers(name: &str, file: &[u8]) -> Vec<(usize, usize)> {
    let pages_of = |start: usize| match name {
        name if !name.starts_with("segments/") || start == 0 => 1,
        _ if !file[start..].starts_with(&MAGIC) => 0,
        _ => u32::from_le_bytes(file[start + 8..start + 12].try_into().expect("4 bytes")) as usize,
    };
    let starts = (0..file.len()).step_by(PAGE_BYTES).map(|start| (start, start + pages_of(start) * PAGE_BYTES));
    let used = |(start, end): (usize, usize)| {
        let last = file[start..end].iter().rposition(|byte| *byte != 0)?;
        Some((start, last + 1))
    };
    starts.filter_map(used).collect()
}

/// Every byte of all headers and manifest records is changed under valid checksums. kvfsck and the engine know the
/// same rules. A store that kvfsck calls clean therefore opens and reads.
#[test]
fn each_byte_of_metadata_means_the_same_to_both_readers() {
    let base = Image::base(1);
    let (mut clean, mut refused) = (0, 0);
    for (file, (_, name, bytes)) in base.files.iter().enumerate() {
        for (start, header) in headers(name, bytes) {
            for (at, byte) in bytes.iter().enumerate().skip(start).take(header) {
                for value in [byte ^ 1, 3] {
                    let mut image = base.clone();
                    image.files[file].2[at] = value;
                    seal(&mut image);
                    let Err(e) = recover(&image.simulate(1)) else {
                        clean += 1;
                        continue;
                    };
                    let is_clean = check(&image).is_ok_and(|report| report.clean);
                    assert!(!is_clean, "{name}: byte {} of the header at {start} is {value}: {e:?}", at - start);
                    refused += 1;
                }
            }
        }
    }
    assert!(clean > 1000 && refused > 1000, "{clean} clean, {refused} refused");
}

/// Puts the extents of a frame's front into another order, with their descriptors and checksums. Returns whether it
/// has two such extents, and room for the zeros between them.
fn shuffle_front(frame: &mut [u8], rng: &mut Rng) -> bool {
    let (header, _) = FrameHeader::read_from_prefix(frame).expect("a frame header");
    let padded = |bytes: u32| (bytes as usize).next_multiple_of(8);
    let table = size_of::<FrameHeader>() + padded(header.layout_bytes.get()) + padded(header.key_bytes.get());
    let sums = table + header.descriptors.get() as usize * size_of::<Descriptor>();
    let rows = frame[table..sums].chunks(size_of::<Descriptor>());
    let mut parts: Vec<(Descriptor, Vec<u8>, Vec<u8>)> = rows
        .map(|row| {
            let row = Descriptor::read_from_bytes(row).expect("a descriptor");
            let (at, first) = (row.offset.get() as usize, sums + row.checksum_first.get() as usize * 8);
            let bytes =
                if row.is_behind_front() { Vec::new() } else { frame[at..at + row.bytes.get() as usize].to_vec() };
            (row, bytes, frame[first..first + row.checksum_count.get() as usize * 8].to_vec())
        })
        .collect();
    let count = parts.iter().filter(|(row, ..)| !row.is_behind_front()).count();
    let front = header.front_pages.get() as usize * PAGE_BYTES;
    let needed: usize = parts[..count].iter().map(|(_, bytes, _)| bytes.len().next_multiple_of(8)).sum();
    let mut to = header.header_pages.get() as usize * PAGE_BYTES;
    if count < 2 || to + needed > front {
        return false;
    }
    (1..count).rev().for_each(|at| parts.swap(at, rng.below(at + 1)));
    frame[to..front].fill(0);
    let mut first = 0;
    for (nth, (row, bytes, own_sums)) in parts.iter_mut().enumerate() {
        if nth < count {
            row.offset = (to as u64).into();
            frame[to..to + bytes.len()].copy_from_slice(bytes);
            to += bytes.len().next_multiple_of(8);
        }
        row.checksum_first = (first as u32).into();
        frame[sums + first * 8..][..own_sums.len()].copy_from_slice(own_sums);
        first += own_sums.len() / 8;
        frame[table + nth * size_of::<Descriptor>()..][..size_of::<Descriptor>()].copy_from_slice(row.as_bytes());
    }
    true
}

/// Readers accept the extents of a front in any order, and find the same in each.
#[test]
fn fronts_in_another_order_hold_the_same() {
    let base = Image::base(1);
    let whole = recover(&base.simulate(1)).expect("an image that is whole");
    let mut rng = Rng(1331);
    let mut shuffled = 0;
    for round in 0..100 {
        let mut image = base.clone();
        for (_, name, bytes) in image.files.iter_mut().filter(|(_, name, _)| name.starts_with("segments/")) {
            for (start, _) in headers(name, bytes) {
                let frame = &mut bytes[start..];
                if frame.starts_with(&MAGIC) {
                    shuffled += usize::from(shuffle_front(frame, &mut rng));
                }
            }
        }
        seal(&mut image);
        let report = check(&image).expect("a report");
        assert!(report.clean, "round {round}: {}", report.to_text());
        assert_eq!(recover(&image.simulate(1)).expect("a store that reads"), whole, "round {round}");
    }
    assert!(shuffled > 100, "{shuffled} fronts");
}

/// SPEC.md, chapter 13, step 3: what looks like batches behind the end may name 4 times the pages of the file.
#[test]
fn claims_of_batches_behind_the_end_have_a_limit() {
    let whole = recover(&Image::base(1).simulate(1)).expect("an image that is whole");
    for more in 0..2 {
        let mut image = Image::base(1);
        for (_, _, bytes) in image.files.iter_mut().filter(|(_, name, _)| name.starts_with("manifest/")) {
            let mut end = PAGE_BYTES;
            while let Some(pages) = bytes.get(end..).and_then(Batch::claimed_pages) {
                end += pages as usize * PAGE_BYTES;
            }
            let mut left = 4 * (bytes.len() / PAGE_BYTES) + more;
            for page in bytes[end..].chunks_mut(PAGE_BYTES) {
                let pages = left.min(BATCH_PAGES_MAX as usize);
                if pages == 0 {
                    break;
                }
                left -= pages;
                let header = BatchHeader {
                    magic: BATCH_MAGIC,
                    sequence: 1_000_000.into(),
                    synced_through: 999_999.into(),
                    pages: (pages as u32).into(),
                    ..BatchHeader::new_zeroed()
                };
                page[..size_of::<BatchHeader>()].copy_from_slice(header.as_bytes());
            }
            assert_eq!(left, 0, "a file with too few pages behind its end");
        }
        match recover(&image.simulate(1)) {
            Ok(held) => assert!(more == 0 && held == whole, "{more} above the limit"),
            Err(e) => {
                assert!(more == 1 && e.to_string().contains("what looks like batches"), "{e}");
                assert!(!check(&image).is_ok_and(|report| report.clean));
            }
        }
    }
}

/// Writes a number to a field of every Counters record of an image.
fn set_counter(image: &mut Image, field: usize, number: u64) {
    let mut start = (Kind::Counters as u16).to_le_bytes().to_vec();
    start.extend([0; 2]);
    start.extend((size_of::<Counters>() as u32).to_le_bytes());
    let mut count = 0;
    for (_, name, bytes) in &mut image.files {
        if !name.starts_with("manifest/") {
            continue;
        }
        for at in (0..bytes.len()).step_by(8) {
            if bytes[at..].starts_with(&start) {
                let at = at + start.len() + field;
                bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
                count += 1;
            }
        }
    }
    assert!(count > 0, "no Counters record");
    seal(image);
}

/// Numbers grow with every open. A store with a number near its limit is refused before anything is written, because no
/// reader would accept what follows.
#[test]
fn a_store_with_a_number_near_its_limit_opens_read_only() {
    let whole = recover(&Image::base(1).simulate(1)).expect("an image that is whole");
    let fields = [
        offset_of!(Counters, next_frame),
        offset_of!(Counters, next_sequence),
        offset_of!(Counters, next_lsn),
        offset_of!(Counters, lifetime_bytes),
    ];
    for field in fields {
        let mut image = Image::base(1);
        set_counter(&mut image, field, NUMBER_MAX - 10);
        assert!(check(&image).is_ok_and(|report| report.clean), "field {field}");
        let simulation = image.simulate(1);
        let refused = simulation.open(Image::options().create(false)).map(|_| ()).expect_err("a number at its limit");
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
        assert!(refused.to_string().contains("open read-only"), "{refused}");
        // It reads read-only, also after the refusal.
        assert_eq!(recover(&simulation).expect("a store that reads"), whole, "field {field}");
        // Far from the limit it opens for writing.
        set_counter(&mut image, field, 1 << 60);
        image.simulate(1).open(Image::options().create(false)).expect("a store that opens for writing");
    }
}
