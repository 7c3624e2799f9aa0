//! Directories, files and pages in a wrong place or state. Each has its code, its place and its exit code.

mod common;

use common::{GENERATION, Image, NONCE, Records, find, replace, slot};
use kvfsck::{
    CheckError, Code, EXIT_CLEAN, EXIT_DAMAGE, EXIT_IO, EXIT_USAGE, Finding, Options, Severity, check, check_export,
    check_reader,
};
use std::error::Error;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use stratakv_format::PAGE_BYTES;
use stratakv_format::checksum::page_crc;
use stratakv_format::error::{FormatError, FormatErrorCode};
use stratakv_format::manifest::{self as m, Kind};
use stratakv_format::superblock::{STATE_CLOSED, STATE_OPEN, Slot};

const SEGMENT: &str = "segments/00000000";
const MANIFEST: &str = "manifest/0000000000000001-0";

/// Writes two slots to the superblock of a device.
fn write_slots(image: &Image, device: usize, newest: &Slot, older: &Slot) {
    fs::write(image.path(device, "superblock"), [newest.encode(), older.encode()].concat()).unwrap();
}

/// Changes both slots of a device of an open store.
fn change_slots(image: &Image, device: u16, change: impl Fn(&mut Slot)) {
    let slots = [2, 1].map(|sequence| {
        let mut slot = slot(device, image.devices, sequence, STATE_OPEN, 1);
        change(&mut slot);
        slot
    });
    write_slots(image, usize::from(device), &slots[0], &slots[1]);
}

fn append(path: &Path, more: &[u8]) {
    let mut bytes = fs::read(path).unwrap();
    bytes.extend_from_slice(more);
    fs::write(path, bytes).unwrap();
}

#[test]
fn directories_that_are_no_device_are_refused_with_the_reason() {
    let image = Image::standard(1, STATE_CLOSED);
    let run = |paths: &[PathBuf]| check(paths, &Options::default(), &()).unwrap_err();
    let error = run(&[]);
    assert!(error.to_string().contains("no device directory was given") && error.source().is_none(), "{error}");
    assert_eq!((error.exit_code(), error.code()), (EXIT_USAGE, "not-a-store"));
    let error = run(&[image.path(0, "superblock")]);
    assert!(error.to_string().contains("superblock: not a directory"), "{error}");
    let link = image.root.path().join("link");
    symlink(&link, &link).unwrap();
    let error = run(std::slice::from_ref(&link));
    assert!(matches!(error, CheckError::Io { operation: "open", .. }), "{error:?}");
    assert!(error.to_string().starts_with("open ") && error.source().is_some(), "{error}");
    assert_eq!((error.exit_code(), error.code()), (EXIT_IO, "io-error"));
    let mut newer = slot(0, 1, 2, STATE_CLOSED, 4);
    newer.features.major = 9.into();
    write_slots(&image, 0, &newer, &slot(0, 1, 1, STATE_OPEN, 1));
    let error = run(&image.dirs);
    assert!(error.to_string().contains("superblock at offset 0: ") && error.source().is_some(), "{error}");
    assert!(error.to_string().ends_with("use a newer kvfsck"), "{error}");
}

#[test]
fn the_source_of_an_error_is_its_cause() {
    let image = Image::standard(1, STATE_CLOSED);
    let run = |path: &Path| check(&[path.to_path_buf()], &Options::default(), &()).unwrap_err();
    let link = image.root.path().join("link");
    symlink(&link, &link).unwrap();
    let error = run(&link);
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>()).expect("an I/O error");
    assert_eq!(source.raw_os_error(), fs::File::open(&link).unwrap_err().raw_os_error(), "{error}");
    // A lock that a writer holds is no error of the operating system.
    let writer = fs::File::open(&image.dirs[0]).unwrap();
    writer.lock().unwrap();
    let error = run(&image.dirs[0]);
    assert!(matches!(error, CheckError::InUse { .. }) && error.source().is_none(), "{error:?}");
    drop(writer);
    let mut newer = slot(0, 1, 2, STATE_CLOSED, 4);
    newer.features.major = 9.into();
    write_slots(&image, 0, &newer, &slot(0, 1, 1, STATE_OPEN, 1));
    let error = run(&image.dirs[0]);
    let source = error.source().and_then(|source| source.downcast_ref::<FormatError>()).expect("a format error");
    assert_eq!((source.code, source.found), (FormatErrorCode::Unsupported, 9), "{error}");
}

#[test]
fn superblocks_that_disagree_about_the_devices_are_damage() {
    let image = Image::standard(2, STATE_OPEN);
    change_slots(&image, 1, |slot| slot.device_index = 0.into());
    let report = image.check();
    let found = find(&report, Code::DoubledDevice, "has device index 0 too");
    assert_eq!((found.path.as_ref(), report.exit_code), (Some(&image.dirs[1]), EXIT_DAMAGE));

    // The newest epoch counts one device.
    let image = Image::standard(2, STATE_OPEN);
    change_slots(&image, 0, |slot| (slot.epoch, slot.device_count) = (2.into(), 1.into()));
    let report = image.check();
    let found = find(&report, Code::SuperblockMismatch, "device index 1 in a store of 1 devices");
    assert_eq!((found.path.as_ref(), report.exit_code), (Some(&image.dirs[1]), EXIT_DAMAGE));

    let image = Image::standard(2, STATE_OPEN);
    change_slots(&image, 1, |slot| slot.segment_bytes = (2 * slot.segment_bytes.get()).into());
    let report = image.check();
    let found = find(&report, Code::SuperblockMismatch, "the segment size or the checksum kind differs");
    assert_eq!((found.device, report.exit_code), (Some(1), EXIT_DAMAGE));
}

/// A crash between the two rounds of superblock writes leaves an older epoch on a device.
#[test]
fn an_older_epoch_is_a_note_until_a_device_has_the_newer_one_twice() {
    for (slots, severity) in [(1, Severity::Note), (2, Severity::Damage)] {
        let image = Image::standard(2, STATE_OPEN);
        let [mut newest, mut older] = [2, 1].map(|sequence| slot(0, 2, sequence, STATE_OPEN, 1));
        newest.epoch = 2.into();
        older.epoch = slots.into();
        write_slots(&image, 0, &newest, &older);
        let report = image.check();
        let found = find(&report, Code::StaleDevice, "membership epoch 1, but another device has epoch 2");
        assert_eq!((found.severity, found.device), (severity, Some(1)), "{}", report.to_text());
        assert_eq!(report.clean, severity == Severity::Note, "{}", report.to_text());
    }
}

#[test]
fn given_devices_that_are_no_members_are_damage() {
    let with_state = |devices: u16, state: u8| {
        let mut image = Image::standard(devices, STATE_OPEN);
        let member = m::Member {
            epoch: 1.into(),
            device_id: [2; 16],
            device: 1.into(),
            state,
            manifest_copies: 1,
            weight: 0.into(),
            bytes_limit: 0.into(),
        };
        let mut records = Records::default();
        records.push(Kind::Member, &member, &[]);
        image.batches.push(records);
        image.write(STATE_OPEN);
        image.check()
    };
    let lost = with_state(2, m::MEMBER_LOST);
    assert_eq!(find(&lost, Code::StaleDevice, "has declared this device lost").device, Some(1));
    // The second of three devices holds no frame.
    let removed = with_state(3, m::MEMBER_REMOVED);
    assert_eq!(find(&removed, Code::StaleDevice, "has removed this device").device, Some(1));
    let damage = removed.findings.iter().filter(|f| f.severity == Severity::Damage).count();
    assert_eq!((damage, removed.checked.frames), (1, 2), "{}", removed.to_text());
    // The record of the member becomes one that readers ignore.
    let mut image = Image::standard(1, STATE_OPEN);
    image.batches[0].bytes[..4].copy_from_slice(&[99, 0, 1, 0]);
    image.write(STATE_OPEN);
    find(&image.check(), Code::ManifestRecord, "the manifest does not name this device");
}

/// Nothing says which number is right, so the frame is not read further.
#[test]
fn adapters_with_missing_or_unexpected_pieces_are_damage() {
    let layer = vec![0_u8; 64];
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut image = Image::with_adapter(&[(0, layer.clone())], None);
        change(&mut image.batches[1].bytes);
        image.write(STATE_CLOSED);
        image.check()
    };
    // The adapter record follows the create record, which has no key.
    let adapter = 8 + size_of::<m::SequenceCreate>();
    let report = changed(&|bytes| bytes[adapter..adapter + 4].copy_from_slice(&[99, 0, 1, 0]));
    find(&report, Code::Adapter, "its sequence has no adapter record");
    let report = changed(&|bytes| bytes[adapter + 8 + std::mem::offset_of!(m::AdapterDefined, bytes)] += 1);
    find(&report, Code::Adapter, "the frames hold 64 bytes of the adapter, its record names 65");
    // The reference to the first frame, which has the first half, becomes a record that readers ignore.
    let report = changed(&|bytes| {
        let reference = [[18, 0, 0, 0, 24, 0, 0, 0], 1_u64.to_le_bytes(), 1_u64.to_le_bytes()].concat();
        replace(bytes, &reference, &[99, 0, 1, 0]);
    });
    find(&report, Code::Adapter, "layer 0 of the adapter continues at byte 32, not at byte 0");
}

#[test]
fn files_that_are_longer_or_not_of_the_store_are_notes() {
    let image = Image::standard(1, STATE_CLOSED);
    append(&image.path(0, "superblock"), &[0; PAGE_BYTES]);
    append(&image.path(0, SEGMENT), &[0; 512]);
    fs::write(image.path(0, "segments/notes"), b"x").unwrap();
    fs::write(image.path(0, "manifest/notes"), b"x").unwrap();
    let report = image.check();
    assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 4), "{}", report.to_text());
    let place = |f: &Finding| (f.offset, f.length);
    let whole = (2 * PAGE_BYTES) as u64;
    let found = find(&report, Code::Leftover, "the superblock file extends past its two slots");
    assert_eq!(place(found), (Some(whole), Some(PAGE_BYTES as u64)));
    let end = u64::from(common::SEGMENT_PAGES) * PAGE_BYTES as u64;
    assert_eq!(place(find(&report, Code::Leftover, "past the end of its segment")), (Some(end), Some(512)));
    let foreign: Vec<_> = report.findings.iter().filter(|f| f.message == "the file is not part of the store").collect();
    let names: Vec<_> = foreign.iter().map(|f| f.file.as_deref()).collect();
    assert_eq!(names, [Some("manifest/notes"), Some("segments/notes")]);
    assert!(report.to_text().contains("note leftover") && report.to_text().ends_with("clean (4 notes)\n"));
}

#[test]
fn a_manifest_copy_that_its_device_does_not_hold_is_a_note() {
    // Each of two devices holds one copy of the manifest.
    let image = Image::standard(2, STATE_CLOSED);
    let more = m::file_name(GENERATION, 1);
    fs::copy(image.path(1, MANIFEST), image.path(1, &more)).unwrap();
    let report = image.check();
    let [found] = &report.findings[..] else { panic!("{}", report.to_text()) };
    assert_eq!((found.code, found.severity), (Code::Leftover, Severity::Note));
    assert_eq!(found.message, "the device does not hold this manifest copy");
    assert_eq!((found.device, found.file.as_deref()), (Some(1), Some(&*more)));
    assert_eq!(report.exit_code, EXIT_CLEAN);
}

/// The engine refuses such a directory.
#[test]
fn a_directory_that_others_may_write_to_is_damage() {
    let image = Image::standard(1, STATE_CLOSED);
    for (mode, exit) in [(0o755, EXIT_CLEAN), (0o770, EXIT_DAMAGE), (0o777, EXIT_DAMAGE)] {
        fs::set_permissions(&image.dirs[0], fs::Permissions::from_mode(mode)).unwrap();
        let report = image.check();
        assert_eq!(report.exit_code, exit, "{mode:o}: {}", report.to_text());
        if exit == EXIT_DAMAGE {
            let found = find(&report, Code::Permissions, &format!("mode {mode:o}; use 700"));
            assert_eq!((found.severity, found.path.as_ref()), (Severity::Damage, Some(&image.dirs[0])));
        }
    }
}

#[test]
fn missing_directories_and_files_of_another_type_are_found() {
    for directory in ["segments", "manifest"] {
        let image = Image::standard(1, STATE_CLOSED);
        fs::remove_dir_all(image.path(0, directory)).unwrap();
        let report = image.check();
        assert_eq!(report.exit_code, EXIT_DAMAGE);
        let inside = |f: &Finding| f.file.as_deref().is_some_and(|file| file.starts_with(directory));
        let found = report.findings.iter().any(|f| f.code == Code::MissingFile && inside(f));
        assert!(found, "{}", report.to_text());
    }
    let image = Image::standard(1, STATE_CLOSED);
    let segment = image.path(0, SEGMENT);
    fs::remove_file(&segment).unwrap();
    fs::create_dir(&segment).unwrap();
    let report = image.check();
    assert_eq!(find(&report, Code::MissingFile, "not a regular file").file.as_deref(), Some(SEGMENT));
    // A socket cannot be opened. The manifest is still checked.
    fs::remove_dir(&segment).unwrap();
    let _socket = UnixListener::bind(&segment).unwrap();
    let report = image.check();
    assert_eq!(find(&report, Code::IoError, "open failed").file.as_deref(), Some(SEGMENT));
    assert_eq!((report.exit_code, report.checked.manifest_batches), (EXIT_IO, 4), "{}", report.to_text());
}

/// The engine refuses such a copy too, so kvfsck must not read it.
#[test]
fn a_manifest_file_above_the_maximum_size_is_damage() {
    let image = Image::standard(1, STATE_CLOSED);
    let longer = |copy: u8| {
        let file = fs::File::options().write(true).open(image.path(0, &m::file_name(GENERATION, copy))).unwrap();
        file.set_len(m::FILE_BYTES_MAX + 2 * PAGE_BYTES as u64).unwrap();
    };
    longer(0);
    let report = image.check();
    let found = find(&report, Code::ManifestPage, "above the maximum of 4294967296");
    assert_eq!((found.file.as_deref(), found.offset), (Some(MANIFEST), Some(m::FILE_BYTES_MAX)));
    assert_eq!((report.exit_code, report.checked.sequences), (EXIT_DAMAGE, 2), "{}", report.to_text());
    longer(1);
    assert!(!image.check().checked.complete);
}

#[test]
fn header_pages_of_one_generation_that_disagree_are_damage() {
    let image = Image::standard(1, STATE_CLOSED);
    let copy = m::file_name(GENERATION, 1);
    let path = image.path(0, &copy);
    let mut bytes = fs::read(&path).unwrap();
    // The time of its creation.
    bytes[88] ^= 1;
    let crc = page_crc(bytes[..PAGE_BYTES].try_into().unwrap());
    bytes[508..512].copy_from_slice(&crc.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let report = image.check();
    let found = find(&report, Code::ManifestPage, "contradicts the header page of the first copy");
    assert_eq!((found.file.as_deref(), found.offset), (Some(&*copy), Some(0)));
    assert_eq!((report.exit_code, report.checked.sequences), (EXIT_DAMAGE, 2), "{}", report.to_text());
}

/// Only bytes of the file can be a batch, so what claims more pages is neither read nor damage.
#[test]
fn a_header_of_a_batch_that_ends_past_the_file_is_no_batch() {
    let image = Image::standard(1, STATE_OPEN);
    let mut page = vec![0; PAGE_BYTES];
    page[..4].copy_from_slice(&m::BATCH_MAGIC);
    for (at, value) in [(8, 1_000_u64), (16, 900), (24, GENERATION), (32, NONCE)] {
        page[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    page[40..44].copy_from_slice(&9_u32.to_le_bytes());
    append(&image.path(0, MANIFEST), &page);
    let report = image.check();
    assert_eq!((report.exit_code, report.checked.manifest_batches), (EXIT_CLEAN, 4), "{}", report.to_text());
}

/// The engine reads whole pages only.
#[test]
fn a_batch_in_a_part_of_a_page_is_no_batch() {
    let image = Image::standard(1, STATE_CLOSED);
    let last = image.batch_offsets[3] as u64;
    for copy in 0..2 {
        let file = fs::File::options().write(true).open(image.path(0, &m::file_name(GENERATION, copy))).unwrap();
        file.set_len(last + 3000).unwrap();
    }
    let report = image.check();
    let found = find(&report, Code::ManifestBatch, "no copy holds batch 4");
    assert_eq!((found.offset, report.exit_code), (Some(last), EXIT_DAMAGE), "{}", report.to_text());
}

/// Pages after the end may claim four times the whole pages of the file.
#[test]
fn claims_of_batches_are_limited_by_the_whole_pages_of_a_file() {
    for (claimed, exit) in [(68_u32, EXIT_CLEAN), (69, EXIT_DAMAGE)] {
        let image = Image::standard(1, STATE_OPEN);
        let mut page = vec![0; PAGE_BYTES];
        page[..4].copy_from_slice(&m::BATCH_MAGIC);
        for (at, value) in [(8, 1_000_u64), (16, 900), (24, GENERATION), (32, NONCE)] {
            page[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        page[40..44].copy_from_slice(&claimed.to_le_bytes());
        page.resize(PAGE_BYTES + 3000, 0);
        append(&image.path(0, MANIFEST), &page);
        assert_eq!(fs::metadata(image.path(0, MANIFEST)).unwrap().len() / PAGE_BYTES as u64, 17);
        let report = image.check();
        assert_eq!(report.exit_code, exit, "{claimed}: {}", report.to_text());
    }
}

#[test]
fn findings_past_the_limit_are_counted_and_an_unusable_store_is_incomplete() {
    let image = Image::standard(1, STATE_CLOSED);
    fs::remove_file(image.path(0, SEGMENT)).unwrap();
    fs::write(image.path(0, "notes"), b"x").unwrap();
    let options = Options { findings_max: 0, ..Options::default() };
    let report = check(&image.dirs, &options, &()).unwrap();
    assert_eq!((report.findings.len(), report.exit_code), (0, EXIT_DAMAGE));
    assert!(report.findings_left_out >= 2, "{}", report.findings_left_out);
    let text = format!("{} more findings; raise --max-findings to see them\n", report.findings_left_out);
    assert!(report.to_text().starts_with(&text), "{}", report.to_text());
    fs::write(image.path(0, "superblock"), b"").unwrap();
    assert!(image.check().to_text().contains("incomplete: no usable superblock or manifest"));
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../format-spec/golden").join(name)
}

#[test]
fn program_maps_pools_and_checks_exports() {
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_kvfsck")).args(args).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    };
    let (store, export) = (golden("v0.4/store-pools"), golden("v0.2/export"));
    let (store, export) = (store.to_str().unwrap(), export.to_str().unwrap());
    let (code, text) = run(&["map", store]);
    assert!(code == 0 && text.starts_with("pool segment 00000002 device 0: "), "{code} {text}");
    let (code, text) = run(&["check", "--full", golden("v0.2/store-retrieval").to_str().unwrap()]);
    assert!(code == 0 && text.contains("summary records compared with the keys"), "{code} {text}");
    let (code, text) = run(&["check-export", export]);
    assert!(code == 0 && text.ends_with("\nclean\n") && !text.contains("key "), "{code} {text}");
    let (code, text) = run(&["check-export", "--show-keys", export]);
    assert!(code == 0 && text.starts_with("key "), "{code} {text}");
    assert_eq!(run(&["check-export", "/no/such/file"]).0, i32::from(EXIT_USAGE));
    assert_eq!(run(&["check-export", store]).0, i32::from(EXIT_USAGE));
    // A file is no directory.
    let error = check_export(&Path::new(export).join("inner"), &Options::default(), &()).unwrap_err();
    assert!(matches!(error, CheckError::Io { operation: "open", .. }), "{error:?}");
}

/// A reader of a file that is interrupted once, and fails at byte `end`.
struct FailingReader<'a> {
    file: &'a [u8],
    end: usize,
    at: usize,
    interrupted: bool,
}

impl Read for FailingReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if !std::mem::replace(&mut self.interrupted, true) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if self.at == self.end {
            return Err(io::Error::other("broken"));
        }
        let bytes = out.len().min(self.end - self.at);
        out[..bytes].copy_from_slice(&self.file[self.at..self.at + bytes]);
        self.at += bytes;
        self.interrupted = self.at < self.file.len();
        Ok(bytes)
    }
}

#[test]
fn a_failed_read_of_an_export_is_an_io_error_at_its_place() {
    let file = fs::read(golden("v0.2/export")).unwrap();
    let read = |end: usize| {
        let reader = FailingReader { file: &file, end, at: 0, interrupted: false };
        check_reader(reader, file.len() as u64, Path::new("session.skv"), &Options::default(), &())
    };
    for end in [100, PAGE_BYTES + 10, file.len()] {
        let report = read(end);
        assert_eq!((report.exit_code, report.findings.len()), (EXIT_IO, 1), "{}", report.to_text());
        let found = &report.findings[0];
        assert_eq!((found.code, found.message.as_str()), (Code::IoError, "read failed: broken"));
        assert!(found.offset.is_some_and(|offset| offset <= end as u64), "{}", report.to_text());
    }
}
