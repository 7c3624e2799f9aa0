//! Damage and crashes of every kind. Each test damages an image and checks the findings and the exit code.

mod common;

use common::{Image, Records, commit, flip, slot};
use kvfsck::{CheckError, Code, EXIT_CLEAN, EXIT_DAMAGE, EXIT_UNSUPPORTED, Options, Report, Severity, check};
use std::fs;
use std::process::Command;
use stratakv_format::PAGE_BYTES;
use stratakv_format::checksum::page_crc;
use stratakv_format::frame::{KIND_GROUPS, KIND_SUMMARY, KIND_TAIL};
use stratakv_format::manifest::{self as m, Kind};
use stratakv_format::superblock::{STATE_CLOSED, STATE_OPEN};
use zerocopy::little_endian::{U32, U64};

const SEGMENT: &str = "segments/00000000";
const MANIFEST: [&str; 2] = ["manifest/0000000000000001-0", "manifest/0000000000000001-1"];

fn assert_damage(report: &Report, code: Code) {
    let found = report.findings.iter().any(|f| f.code == code && f.severity == Severity::Damage);
    assert!(found && report.exit_code == EXIT_DAMAGE && !report.clean, "{code}: {}", report.to_text());
}

/// Changes bytes of a page and puts its checksum right.
fn patch_page(image: &Image, device: usize, file: &str, page: usize, patch: impl FnOnce(&mut [u8])) {
    let path = image.path(device, file);
    let mut bytes = fs::read(&path).unwrap();
    let page = &mut bytes[page * PAGE_BYTES..(page + 1) * PAGE_BYTES];
    patch(page);
    let crc = page_crc((&*page).try_into().unwrap());
    page[508..512].copy_from_slice(&crc.to_le_bytes());
    fs::write(&path, bytes).unwrap();
}

fn zero(image: &Image, file: &str, from: usize, bytes: usize) {
    let path = image.path(0, file);
    let mut all = fs::read(&path).unwrap();
    all[from..from + bytes].fill(0);
    fs::write(&path, all).unwrap();
}

#[test]
fn good_store_is_clean_and_counted() {
    for (devices, state) in [(1, STATE_CLOSED), (1, STATE_OPEN), (2, STATE_CLOSED), (2, STATE_OPEN), (3, STATE_OPEN)] {
        let image = Image::standard(devices, state);
        let report = image.check();
        assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 0), "{}", report.to_text());
        let c = &report.checked;
        assert_eq!((c.devices, c.segments), (u64::from(devices), u64::from(devices)));
        assert_eq!((c.manifest_batches, c.frames, c.sequences), (4, 2, 2));
        // Frame 1 has 2 groups of 2 layers with 2 planes each, 2 summaries, 2 tails of 2 planes, token ids and state.
        // Frame 3 has one group per layer instead of two.
        assert_eq!(c.planes, (8 + 2 + 4 + 2) + (4 + 2 + 4 + 2));
        assert!(c.complete && c.payload_bytes > 0);
    }
}

#[test]
fn torn_end_of_the_manifest_is_legal_unless_the_store_was_closed() {
    for copies in [&MANIFEST[..1], &MANIFEST[1..], &MANIFEST[..]] {
        let image = Image::standard(1, STATE_OPEN);
        let last = *image.batch_offsets.last().unwrap();
        for file in copies {
            zero(&image, file, last, 512);
        }
        let report = image.check();
        assert_eq!(report.exit_code, EXIT_CLEAN, "{}", report.to_text());
        // If both copies are torn, the last batch is cut and its frame is not live.
        assert_eq!(report.checked.manifest_batches, if copies.len() == 2 { 3 } else { 4 });
        if copies.len() == 1 {
            assert!(report.has(Code::ManifestTail));
        }
        // In a closed store the batch was durable, so that the same bytes are damage.
        let image = Image::standard(1, STATE_CLOSED);
        for file in copies {
            zero(&image, file, last, 512);
        }
        assert_damage(&image.check(), Code::ManifestBatch);
    }
}

#[test]
fn hole_in_the_manifest_is_damage() {
    let image = Image::standard(1, STATE_OPEN);
    // Batch 4 says that batch 2 is durable.
    for file in MANIFEST {
        zero(&image, file, image.batch_offsets[1], PAGE_BYTES);
    }
    let report = image.check();
    assert_damage(&report, Code::ManifestBatch);
    assert!(!report.checked.complete);
}

#[test]
fn missing_doubled_and_foreign_devices_are_damage() {
    let image = Image::standard(2, STATE_CLOSED);
    let run = |dirs: &[std::path::PathBuf]| check(dirs, &Options::default(), &()).unwrap();
    let report = run(&image.dirs[..1]);
    assert_damage(&report, Code::MissingDevice);
    assert_eq!(report.findings[0].device, Some(1));
    assert_damage(&run(&[image.dirs[0].clone(), image.dirs[1].clone(), image.dirs[0].clone()]), Code::DoubledDevice);
    let other = Image::standard(2, STATE_CLOSED);
    for page in 0..2 {
        patch_page(&other, 1, "superblock", page, |bytes| bytes[48] ^= 1);
    }
    let report = run(&[image.dirs[0].clone(), image.dirs[1].clone(), other.dirs[1].clone()]);
    assert_damage(&report, Code::ForeignDevice);
    assert_eq!(report.findings.len(), 1, "{}", report.to_text());
    for page in 0..2 {
        patch_page(&image, 1, "superblock", page, |bytes| bytes[64] ^= 1);
    }
    assert_damage(&image.check(), Code::ForeignDevice);
}

#[test]
fn extra_files_are_notes_and_missing_or_short_files_are_damage() {
    let image = Image::standard(1, STATE_CLOSED);
    fs::write(image.path(0, "segments/0000002a"), b"x").unwrap();
    fs::write(image.path(0, "manifest/0000000000000003-0"), b"x").unwrap();
    // Reserves for the next generation: zeros, or an older generation of the same copy.
    fs::write(image.path(0, "manifest/0000000000000002-0"), [0; PAGE_BYTES]).unwrap();
    fs::copy(image.path(0, MANIFEST[1]), image.path(0, "manifest/0000000000000002-1")).unwrap();
    fs::write(image.path(0, "notes.txt"), b"x").unwrap();
    let report = image.check();
    assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 3), "{}", report.to_text());
    assert!(report.findings.iter().all(|f| f.code == Code::Leftover));
    // A reserve of another copy, and one without whole pages: neither can be used, and neither is damage.
    fs::copy(image.path(0, MANIFEST[1]), image.path(0, "manifest/0000000000000002-0")).unwrap();
    fs::write(image.path(0, "manifest/0000000000000002-1"), b"x").unwrap();
    let report = image.check();
    assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 5), "{}", report.to_text());
    let segment = image.path(0, SEGMENT);
    let bytes = fs::read(&segment).unwrap();
    fs::write(&segment, &bytes[..bytes.len() - 1]).unwrap();
    assert_damage(&image.check(), Code::SegmentLength);
    fs::write(&segment, &bytes[..2 * PAGE_BYTES]).unwrap();
    assert_damage(&image.check(), Code::FrameLocation);
    fs::remove_file(&segment).unwrap();
    assert_damage(&image.check(), Code::MissingFile);
    std::os::unix::fs::symlink("/dev/zero", &segment).unwrap();
    assert_damage(&image.check(), Code::MissingFile);
    fs::remove_file(&segment).unwrap();
    fs::write(&segment, &bytes).unwrap();
    fs::remove_file(image.path(0, MANIFEST[1])).unwrap();
    assert_damage(&image.check(), Code::MissingFile);
}

#[test]
fn newer_versions_and_unknown_features_are_unsupported() {
    type Patch = fn(&mut [u8]);
    let patches: [Patch; 3] = [|b| b[8] = 1, |b| b[10] = 2, |b| b[32] |= 0x10];
    for patch in patches {
        let image = Image::standard(1, STATE_CLOSED);
        patch_page(&image, 0, "superblock", 1, patch);
        let error = check(&image.dirs, &Options::default(), &()).unwrap_err();
        assert!(matches!(error, CheckError::Unsupported { offset: 4096, .. }), "{error}");
        assert_eq!(error.exit_code(), EXIT_UNSUPPORTED);
        for (file, page) in [(SEGMENT, 0), (MANIFEST[0], 0)] {
            let image = Image::standard(1, STATE_CLOSED);
            patch_page(&image, 0, file, page, patch);
            let report = image.check();
            assert!(report.exit_code == EXIT_UNSUPPORTED && report.has(Code::Unsupported), "{}", report.to_text());
        }
    }
}

#[test]
fn unknown_ro_compat_features_are_a_note() {
    for (file, page) in [("superblock", 0), (MANIFEST[0], 0)] {
        let image = Image::standard(1, STATE_CLOSED);
        patch_page(&image, 0, file, page, |bytes| bytes[24] |= 4);
        let report = image.check();
        let note = report.findings.iter().find(|finding| finding.code == Code::ReadOnlyFeatures).expect(file);
        let offset = (page * PAGE_BYTES) as u64;
        assert_eq!((note.severity, note.file.as_deref(), note.offset), (Severity::Note, Some(file), Some(offset)));
        assert!(report.clean && report.exit_code == EXIT_CLEAN, "{}", report.to_text());
    }
}

#[test]
fn contradicting_superblocks_are_damage() {
    let image = Image::standard(2, STATE_CLOSED);
    let mut page = slot(1, 2, 2, STATE_CLOSED, 4);
    page.manifest_nonce = U64::new(5);
    fs::write(image.path(1, "superblock"), [page.encode(), slot(1, 2, 1, STATE_OPEN, 1).encode()].concat()).unwrap();
    assert_damage(&image.check(), Code::SuperblockMismatch);
    let image = Image::standard(1, STATE_CLOSED);
    let skipped = [slot(0, 1, 4, STATE_CLOSED, 4).encode(), slot(0, 1, 1, STATE_OPEN, 1).encode()].concat();
    fs::write(image.path(0, "superblock"), skipped).unwrap();
    assert_damage(&image.check(), Code::SuperblockSlot);
    let mut other = slot(0, 1, 1, STATE_OPEN, 1);
    other.manifest_nonce = U64::new(5);
    fs::write(image.path(0, "superblock"), [slot(0, 1, 2, STATE_CLOSED, 4).encode(), other.encode()].concat()).unwrap();
    let report = image.check();
    assert_damage(&report, Code::SuperblockSlot);
    assert!(report.to_text().contains("two nonces"), "{}", report.to_text());
    fs::write(image.path(0, "superblock"), b"").unwrap();
    let report = image.check();
    assert_damage(&report, Code::SuperblockSlot);
    assert!(!report.checked.complete);
    fs::remove_file(image.path(0, "superblock")).unwrap();
    assert_damage(&image.check(), Code::MissingFile);
}

/// Checks the standard store with one more batch.
fn with(records: impl FnOnce(&mut Records)) -> Report {
    let mut image = Image::standard(1, STATE_OPEN);
    let mut more = Records::default();
    records(&mut more);
    image.batches.push(more);
    image.write(STATE_OPEN);
    image.check()
}

#[test]
fn records_that_contradict_earlier_records_are_damage() {
    let reference =
        |sequence, frame| m::FrameRef { sequence: U64::new(sequence), frame: U64::new(frame), token_end: U64::new(9) };
    let bad = Code::ManifestRecord;
    assert_damage(&with(|r| r.push(Kind::SequenceCommit, &commit(9, 1, 0, 0), &[])), bad);
    assert_damage(&with(|r| r.push(Kind::FrameRef, &reference(1, 99), &[])), bad);
    assert_damage(&with(|r| r.push(Kind::FrameRef, &reference(1, 1), &[])), bad);
    assert_damage(&with(|r| r.push(Kind::SequenceCreate, &common::create(3, b""), b"")), bad);
    assert_damage(&with(|r| r.push(Kind::SequenceCreate, &common::create(4, b"alpha"), b"alpha")), bad);
    let free =
        m::SegmentFree { generation: U64::new(3), segment: U32::new(0), device: 0.into(), removed: 0, reserved: 0 };
    assert_damage(&with(|r| r.push(Kind::SegmentFree, &free, &[])), bad);
    let end = m::CheckpointEnd { records: U64::new(0) };
    assert_damage(&with(|r| r.push(Kind::CheckpointEnd, &end, &[])), bad);
    // The named successor does not exist.
    let next = m::Superseded { generation: U64::new(2), nonce: U64::new(1) };
    assert_damage(&with(|r| r.push(Kind::Superseded, &next, &[])), Code::MissingFile);
}

/// Recovery takes the maximum of a counter and the ids of other records.
#[test]
fn a_counter_below_the_ids_in_use_or_below_an_earlier_counter_is_a_note() {
    let counters = |next: u64| m::Counters {
        next_frame: U64::new(next),
        next_sequence: U64::new(40),
        next_lsn: U64::new(40),
        lifetime_bytes: U64::new(0),
        next_layout: U32::new(2),
        reserved: U32::new(0),
    };
    // The store has frames up to 3.
    for (given, earlier, expected) in [(3, None, 4), (30, Some(31), 31), (4, None, 4), (31, Some(31), 31)] {
        let report = with(|r| {
            earlier.into_iter().for_each(|earlier| r.push(Kind::Counters, &counters(earlier), &[]));
            r.push(Kind::Counters, &counters(given), &[]);
        });
        assert!(report.clean && report.exit_code == EXIT_CLEAN, "{}", report.to_text());
        let notes: Vec<_> = report.findings.iter().filter(|finding| finding.code == Code::ManifestRecord).collect();
        assert_eq!(notes.len(), usize::from(given < expected), "{}", report.to_text());
        for note in notes {
            let named =
                note.message.contains(&format!("{given} as the next frame id, but other records imply {expected}"));
            assert!(note.severity == Severity::Note && named, "{}", note.message);
        }
    }
}

#[test]
fn checkpoint_that_no_superblock_names_yet_is_followed() {
    let mut image = Image::standard(1, STATE_OPEN);
    let old = image.batches.len() as u64;
    // The next generation is the checkpoint of an empty store, in two batches that take effect together.
    let (generation, nonce) = (2, 0x77);
    for (copy, file) in MANIFEST.iter().enumerate() {
        let mut bytes = fs::read(image.path(0, file)).unwrap()[..PAGE_BYTES].to_vec();
        bytes[56..64].copy_from_slice(&u64::to_le_bytes(generation));
        bytes[64..72].copy_from_slice(&u64::to_le_bytes(nonce));
        bytes[72..80].copy_from_slice(&u64::to_le_bytes(1));
        bytes[80..88].copy_from_slice(&u64::to_le_bytes(old + 2));
        let crc = page_crc(bytes.as_slice().try_into().unwrap());
        bytes[508..512].copy_from_slice(&crc.to_le_bytes());
        let first = &image.batches[0];
        let mut end = Records::default();
        end.push(Kind::CheckpointEnd, &m::CheckpointEnd { records: U64::new(u64::from(first.count) - 1) }, &[]);
        let body = &first.bytes[..first.bytes.len() - end.bytes.len()];
        let mut place = m::BatchPlace { generation, nonce, sequence: old + 2 };
        let flags = m::FLAG_CHECKPOINT | m::FLAG_MORE;
        bytes.extend(m::encode_batch(&place, old + 1, 1, flags, body, first.count - 1).unwrap());
        place.sequence += 1;
        bytes.extend(m::encode_batch(&place, old + 1, 1, m::FLAG_CHECKPOINT, &end.bytes, 1).unwrap());
        fs::write(image.path(0, &m::file_name(generation, copy as u8)), bytes).unwrap();
    }
    // No record names it yet, so that its files count as reserves.
    let report = image.check();
    assert_eq!((report.exit_code, report.checked.sequences), (EXIT_CLEAN, 2), "{}", report.to_text());
    let mut last = Records::default();
    last.push(Kind::Superseded, &m::Superseded { generation: U64::new(generation), nonce: U64::new(nonce) }, &[]);
    image.batches.push(last);
    image.write(STATE_OPEN);
    let report = image.check();
    assert_eq!((report.exit_code, report.checked.sequences), (EXIT_CLEAN, 0), "{}", report.to_text());
    assert_eq!(report.findings.len(), 0, "{}", report.to_text());
    let predecessor = |generation: u8| {
        patch_page(&image, 0, &m::file_name(2, 0), 0, |bytes| bytes[72] = generation);
        image.check()
    };
    let report = predecessor(7);
    assert_damage(&report, Code::ManifestPage);
    assert!(report.to_text().contains("does not name the generation before it"), "{}", report.to_text());
    assert_eq!(predecessor(1).exit_code, EXIT_CLEAN);
    // An incomplete checkpoint never takes effect.
    for copy in 0..2 {
        let path = image.path(0, &m::file_name(generation, copy));
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - PAGE_BYTES]).unwrap();
    }
    assert_damage(&image.check(), Code::ManifestBatch);
}

#[test]
fn committed_tokens_that_no_frame_holds_are_damage() {
    let report = with(|r| r.push(Kind::SequenceCommit, &commit(1, 14, 13, 3), &[]));
    assert_damage(&report, Code::Coverage);
    let finding = &report.findings[0];
    assert_eq!((finding.sequence, finding.layer, finding.tokens), (Some(1), Some(0), Some([13, 14])));
    assert_eq!(report.findings.len(), 2, "one per layer with KV: {}", report.to_text());
    assert_damage(&with(|r| r.push(Kind::SequenceCommit, &commit(1, 13, 14, 3), &[])), Code::TokenIds);
    assert_damage(&with(|r| r.push(Kind::SequenceCommit, &commit(1, 13, 13, 9), &[])), Code::CallerState);
    // A cut inside a group leaves tokens that the frames hold.
    let cut = m::SequenceTruncate { sequence: U64::new(1), tokens: U64::new(6) };
    let report = with(|r| r.push(Kind::SequenceTruncate, &cut, &[]));
    assert_eq!(report.exit_code, EXIT_CLEAN, "{}", report.to_text());
    let report = with(|r| {
        r.push(Kind::SequenceTruncate, &cut, &[]);
        r.push(Kind::SequenceCommit, &commit(1, 7, 6, 0), &[]);
    });
    assert_damage(&report, Code::Coverage);
}

#[test]
fn frames_of_a_layer_must_continue_each_other() {
    const G: u16 = KIND_GROUPS;
    const S: u16 = KIND_SUMMARY;
    const T: u16 = KIND_TAIL;
    type Frames = &'static [&'static [(u16, u64, u32)]];
    // Both layers with KV have groups of 4 tokens.
    let clean: [(Frames, u64); 5] = [
        (&[&[(S, 0, 8), (G, 0, 8)], &[(T, 8, 2)], &[(S, 8, 4), (G, 8, 4)]], 12),
        // A tail inside a group hides it. The group is written again.
        (&[&[(S, 0, 8), (G, 0, 8)], &[(T, 6, 1)], &[(S, 4, 4), (G, 4, 4)]], 8),
        // The tokens that a tail hides are not committed.
        (&[&[(S, 0, 8), (G, 0, 8)], &[(T, 3, 2)]], 5),
        // A group that the commit cuts needs no min/max summary.
        (&[&[(S, 0, 4), (G, 0, 8)]], 7),
        // The order of summaries in a frame is free.
        (&[&[(S, 4, 4), (S, 0, 4), (G, 0, 8)]], 8),
    ];
    for (frames, committed) in clean {
        let report = Image::with_frames(frames, committed).check();
        assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 0), "{frames:?}: {}", report.to_text());
    }
    let tokens = |report: &Report| report.findings.iter().map(|f| (f.layer, f.tokens)).collect::<Vec<_>>();
    let both = |tokens| vec![(Some(0), Some(tokens)), (Some(2), Some(tokens))];
    let bad: [(Frames, u64, Code, [u64; 2]); 6] = [
        // Groups are written before the groups that precede them.
        (&[&[(S, 4, 4), (G, 4, 4)], &[(S, 0, 4), (G, 0, 4)]], 8, Code::Overlay, [4, 8]),
        // A newer tail hides the groups after it.
        (&[&[(S, 0, 8), (G, 0, 8)], &[(T, 2, 1)]], 8, Code::Coverage, [3, 8]),
        (&[&[(S, 0, 4), (G, 0, 4)], &[(G, 4, 4)]], 8, Code::Summary, [4, 8]),
        (&[&[(S, 0, 4), (G, 0, 8)]], 8, Code::Summary, [4, 8]),
        // Summaries in another frame belong to other keys.
        (&[&[(S, 0, 8), (G, 0, 8)], &[(G, 4, 4)]], 8, Code::Summary, [4, 8]),
        (&[&[(S, 0, 8), (G, 0, 4)], &[(G, 4, 4)]], 8, Code::Summary, [4, 8]),
    ];
    for (frames, committed, code, place) in bad {
        let report = Image::with_frames(frames, committed).check();
        assert_damage(&report, code);
        assert_eq!(tokens(&report), both(place), "{frames:?}: {}", report.to_text());
    }
}

#[test]
fn program_prints_text_and_json_and_returns_the_exit_code() {
    let image = Image::standard(1, STATE_CLOSED);
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_kvfsck")).args(args).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    };
    let dir = image.dirs[0].to_str().unwrap().to_owned();
    let (code, text) = run(&["check", &dir]);
    assert!(code == 0 && text.ends_with("clean\n"), "{code} {text}");
    let offset = image.frames[0].location.offset() as usize + 2 * PAGE_BYTES + 1;
    flip(&image.path(0, SEGMENT), offset, 1);
    let (code, text) = run(&["check", "--json", &dir]);
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, &report["clean"], &report["exit_code"]), (1, &false.into(), &1.into()));
    let finding = &report["findings"][0];
    assert_eq!((&finding["code"], &finding["severity"]), (&"payload-checksum".into(), &"damage".into()), "{text}");
    assert_eq!((&finding["file"], &finding["path"]), (&SEGMENT.into(), &dir.as_str().into()));
    assert!(!text.contains("alpha"), "keys are private");
    assert!(run(&["check", "--show-keys", &dir]).1.contains("key alpha"));
    assert_eq!(run(&["check"]).0, 2);
    assert_eq!(run(&["check", "/no/such/directory"]).0, 2);
    assert_eq!(run(&["check", image.root.path().to_str().unwrap()]).0, 2);
    assert_eq!(run(&["--help"]).0, 0);
    let writer = fs::File::open(&dir).unwrap();
    writer.lock().unwrap();
    let (code, text) = run(&["check", "--json", &dir]);
    assert_eq!(code, 6);
    let object: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&object["clean"], &object["error"]["code"]), (&false.into(), &"in-use".into()));
}

/// Returns the bytes of numbers in the order of an adapter.
fn numbers(integers: &[u32], floats: &[f32]) -> Vec<u8> {
    let integers = integers.iter().flat_map(|number| number.to_le_bytes());
    integers.chain(floats.iter().flat_map(|number| number.to_le_bytes())).collect()
}

/// Returns a low-rank adapter for layer 0, which has 16 joint key dimensions.
fn low_rank(rank: u32) -> Vec<u8> {
    numbers(&[1, 16, rank], &vec![0.5; 16 * rank as usize])
}

/// Returns a transform-coded adapter for layer 2, which has 256 joint key dimensions.
///
/// It has two dimensions with two levels each, and one code byte per dimension.
fn codes() -> Vec<u8> {
    let floats = vec![0.25; 1 + 256 + 2 * 512];
    let parts = [
        numbers(&[2, 256, 2, 2], &floats),
        numbers(&[2], &[-1.0, 1.0]),
        numbers(&[2], &[0.0, 0.0]),
        numbers(&[1, 1, 1, 0], &[]),
    ];
    parts.concat()
}

#[test]
fn adapters_that_contradict_their_record_or_form_are_damage() {
    let good = [(0, low_rank(2)), (2, codes())];
    let report = Image::with_adapter(&good, None).check();
    assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 0), "{}", report.to_text());
    // Each piece matches its own checksum, but the whole adapter does not match its record.
    assert_damage(&Image::with_adapter(&good, Some(7)).check(), Code::Adapter);
    let with = |layer: u16, at: usize, value: u32| {
        let mut layers = good.clone();
        let bytes = &mut layers[usize::from(layer == 2)].1;
        bytes[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes());
        Image::with_adapter(&layers, None).check()
    };
    // Fields by index: 0 is the kind, 1 the width, 2 the rank, 5 an element.
    let first = [(0, 3), (0, u32::MAX), (1, 15), (2, 0), (2, 1), (2, 3), (2, u32::MAX), (5, f32::NAN.to_bits())];
    for (at, value) in first {
        let report = with(0, at, value);
        assert_damage(&report, Code::Adapter);
        assert!(report.findings.iter().all(|f| f.layer == Some(0)), "{at}: {}", report.to_text());
    }
    // Fields by index: 2 is the dimensions, 3 the code bytes, 4 the distortion. Levels and code bytes follow.
    let levels = 4 + 1 + 256 + 2 * 512;
    let of_codes = [
        (2, 1),
        (2, 3),
        (2, u32::MAX),
        (3, 0),
        (3, 1),
        (3, 3),
        (3, 257),
        (4, (-1.0_f32).to_bits()),
        (levels, 1),
        (levels, 3),
        (levels, 512),
        (levels + 1, 2.0_f32.to_bits()),
        (levels + 2, f32::INFINITY.to_bits()),
        (levels + 6, 0),
        (levels + 6, 2),
        (levels + 7, 2),
        (levels + 7, 0),
        (levels + 9, u32::MAX),
    ];
    for (at, value) in of_codes {
        let report = with(2, at, value);
        assert_damage(&report, Code::Adapter);
        assert!(report.findings.iter().all(|f| f.layer == Some(2)), "{at}: {}", report.to_text());
    }
    let mut longer = good.clone();
    longer[0].1.extend_from_slice(&[0; 4]);
    assert_damage(&Image::with_adapter(&longer, None).check(), Code::Adapter);
    longer[0].1.truncate(11);
    assert_damage(&Image::with_adapter(&longer, None).check(), Code::Adapter);
}
