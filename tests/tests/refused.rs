//! Manifests with valid checksums that this version does not write.
//!
//! The engine refuses them with the right kind of error and never truncates them, and kvfsck reports them. The last
//! tests show unusual manifests that are valid.

use std::fs;
use std::path::{Path, PathBuf};
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, SelectRequest, Store, StoreOptions,
    TensorView,
};
use stratakv_format::PAGE_BYTES;
use stratakv_format::checksum::page_crc;
use stratakv_format::manifest::{self as m, Kind, Record, encode_record};
use stratakv_tests::damage::ManifestLog;
use stratakv_tests::disk::{check, copy_devices, device_dirs, fast_scratch, small_options};
use stratakv_tests::rng::Rng;

fn options(dirs: &[PathBuf]) -> StoreOptions {
    small_options(dirs).segment_bytes(ByteSize::kib(64))
}

fn append(store: &Store, sequence: Option<stratakv::Sequence>, state: &[u8]) -> stratakv::Sequence {
    let layout =
        KvLayout::builder().layers(1).kv_heads(1).head_dim(8).dtype(DType::F16).group_tokens(4).build().unwrap();
    let sequence = sequence.map_or_else(|| store.create_sequence(&layout, CreateOptions::new().key("a")), Ok);
    let mut sequence = sequence.unwrap();
    let elements: Vec<f32> = (0..6 * 8).map(|i| i as f32).collect();
    let tensor = TensorView::token_major(&elements, 6, 1, 8);
    sequence.append(0, tensor, tensor).unwrap();
    sequence.commit_with(state, Durability::Sync).unwrap();
    sequence
}

/// Writes a store of two commits that is not closed: state `one` at 6 tokens, state `two` at 12.
fn killed(root: &Path) -> Vec<PathBuf> {
    let dirs = device_dirs(&root.join("first"), 1);
    let store = options(&dirs).open().unwrap();
    let sequence = append(&store, None, b"one");
    let sequence = append(&store, Some(sequence), b"two");
    let killed = copy_devices(&dirs, &root.join("killed"), &mut Rng(1));
    drop((sequence, store));
    killed
}

/// Damages the manifest and checks that the open fails with this kind of error, that kvfsck reports it, and that no
/// file changes. The store opens again once the manifest is restored. Returns the error in words.
fn refused(what: &str, kind: ErrorKind, damage: impl Fn(&ManifestLog)) -> String {
    let scratch = fast_scratch();
    let dirs = killed(scratch.path());
    let log = ManifestLog::of(&dirs[0]);
    let before: Vec<_> = log.files.iter().map(|path| fs::read(path).unwrap()).collect();
    damage(&log);
    let e = options(&dirs).create(false).open().map(drop).expect_err(what);
    assert_eq!(e.kind(), kind, "{what}: {e}");
    let exit = if kind == ErrorKind::Unsupported { kvfsck::EXIT_UNSUPPORTED } else { kvfsck::EXIT_DAMAGE };
    let report = check(&dirs);
    assert_eq!(report.exit_code, exit, "{what}: {}", report.to_text());
    for (path, bytes) in log.files.iter().zip(before) {
        fs::write(path, bytes).unwrap();
    }
    let store = options(&dirs).create(false).open().unwrap();
    assert_eq!(store.open_sequence("a", OpenSequence::new()).unwrap().caller_state(), Some(&b"two"[..]), "{what}");
    e.to_string()
}

#[test]
fn a_last_batch_of_another_version_is_not_cut() {
    refused("an unknown flag", ErrorKind::Unsupported, |log| log.change_last(|batch| batch[52] |= 4));
    refused("a reserved byte", ErrorKind::Corruption, |log| log.change_last(|batch| batch[54] = 1));
    refused("too many bytes of records", ErrorKind::Corruption, |log| log.change_last(|batch| batch[46] = 0xff));
    refused("another number", ErrorKind::Corruption, |log| log.change_last(|batch| batch[8] ^= 0x40));
}

/// Appends a changed copy of the record that created the sequence.
fn create(log: &ManifestLog, change: impl Fn(&mut m::SequenceCreate)) {
    let mut found = None;
    log.records(&mut |record| {
        if let Record::SequenceCreate(create, _) = record {
            found = Some(**create);
        }
    });
    let mut create = found.expect("a sequence");
    create.sequence = (create.sequence.get() + 1000).into();
    create.key_bytes = 0.into();
    change(&mut create);
    let mut record = Vec::new();
    encode_record(&mut record, Kind::SequenceCreate, &create, &[]);
    log.append(&record, 1);
}

#[test]
fn sequences_of_another_version_are_refused() {
    refused("unknown summaries", ErrorKind::Unsupported, |log| create(log, |create| create.summaries = 2.into()));
    refused("four copies", ErrorKind::Corruption, |log| create(log, |create| create.replicas = 4));
    refused("two copies and no feature of copies", ErrorKind::Corruption, |log| {
        create(log, |create| create.replicas = 2)
    });
}

#[test]
fn segments_are_of_the_store() {
    let open = |pages: u32, kind: u8| {
        move |log: &ManifestLog| {
            let open = m::SegmentOpen {
                generation: 1.into(),
                nonce: 77.into(),
                segment: 900.into(),
                pages: pages.into(),
                device: 0.into(),
                kind,
                reserved: [0; 5],
            };
            let mut record = Vec::new();
            encode_record(&mut record, Kind::SegmentOpen, &open, &[]);
            log.append(&record, 1);
        }
    };
    refused("a segment that is too long", ErrorKind::Corruption, open(1 << 20, 1));
    refused("a segment of a pool", ErrorKind::Corruption, open(16, 2));
}

#[test]
fn derived_frames_need_the_feature_of_pools() {
    let flagged = |flags: u32| {
        move |log: &ManifestLog| {
            let mut found = None;
            log.records(&mut |record| {
                if let Record::Frame(frame) = record {
                    found = Some(**frame);
                }
            });
            let frame = found.expect("a frame");
            let frame = m::Frame { frame: (frame.frame.get() + 1000).into(), flags: flags.into(), ..frame };
            let mut record = Vec::new();
            encode_record(&mut record, Kind::Frame, &frame, &[]);
            log.append(&record, 1);
        }
    };
    refused("a derived frame", ErrorKind::Corruption, flagged(m::FLAG_DERIVED));
    refused("an unknown flag of a frame", ErrorKind::Unsupported, flagged(2));
}

#[test]
fn the_state_is_that_of_the_frame_which_the_commit_names() {
    let scratch = fast_scratch();
    let dirs = killed(scratch.path());
    let log = ManifestLog::of(&dirs[0]);
    let mut commits = Vec::new();
    log.records(&mut |record| {
        if let Record::SequenceCommit(commit) = record {
            commits.push(**commit);
        }
    });
    let (first, last) = (commits[0], commits[commits.len() - 1]);
    assert_ne!(first.state_frame, last.state_frame);
    // Both frames hold tokens, so both belong to the sequence. The commit need not name the later one.
    let mut record = Vec::new();
    encode_record(
        &mut record,
        Kind::SequenceCommit,
        &m::SequenceCommit { state_frame: first.state_frame, ..last },
        &[],
    );
    log.append(&record, 1);
    let report = check(&dirs);
    assert!(report.exit_code != kvfsck::EXIT_DAMAGE, "{}", report.to_text());
    let store = options(&dirs).create(false).open().unwrap();
    let sequence = store.open_sequence("a", OpenSequence::new()).unwrap();
    assert_eq!((sequence.len(), sequence.caller_state()), (12, Some(&b"one"[..])));
}

#[test]
fn the_state_of_another_sequence_is_a_finding() {
    let scratch = fast_scratch();
    let dirs = killed(scratch.path());
    let log = ManifestLog::of(&dirs[0]);
    let mut last = None;
    log.records(&mut |record| {
        if let Record::SequenceCommit(commit) = record {
            last = Some(**commit);
        }
    });
    let last = last.expect("a commit");
    create(&log, |_| {});
    let log = ManifestLog::of(&dirs[0]);
    let other = m::SequenceCommit {
        sequence: (last.sequence.get() + 1000).into(),
        tokens: 0.into(),
        token_ids: 0.into(),
        ..last
    };
    let mut record = Vec::new();
    encode_record(&mut record, Kind::SequenceCommit, &other, &[]);
    log.append(&record, 1);
    let report = check(&dirs);
    assert!(report.has(kvfsck::Code::CallerState), "{}", report.to_text());
    assert_eq!(report.exit_code, kvfsck::EXIT_DAMAGE);
}

/// Appends a batch that names a successor.
fn supersede(log: &ManifestLog, generation: u64) {
    let mut record = Vec::new();
    let next = m::Superseded { generation: generation.into(), nonce: 7.into() };
    encode_record(&mut record, Kind::Superseded, &next, &[]);
    log.append(&record, 1);
}

#[test]
fn successors_and_copies_that_no_writer_records_are_refused() {
    let text = refused("an older successor", ErrorKind::Corruption, |log| supersede(log, log.generation));
    assert!(text.contains("as its successor"), "{text}");
    let text = refused("a checkpoint with a successor", ErrorKind::Corruption, |log| {
        supersede(log, log.generation + 1);
        let dir = log.files[0].ancestors().nth(2).expect("a device directory");
        ManifestLog::of(dir).change_last(|batch| batch[52] |= m::FLAG_CHECKPOINT as u8);
    });
    assert!(text.contains("a checkpoint that names a successor") && text.contains("manifest/"), "{text}");
    let text = refused("a copy", ErrorKind::Corruption, |log| {
        let mut found = None;
        log.records(&mut |record| {
            if let Record::Frame(frame) = record {
                found = Some(**frame);
            }
        });
        let m::Frame { frame, location, header_crc, .. } = found.expect("a frame");
        let mut record = Vec::new();
        let replica = m::Replica { frame, generation: 1.into(), location, header_crc, reserved: 0.into() };
        encode_record(&mut record, Kind::Replica, &replica, &[]);
        log.append(&record, 1);
    });
    assert!(text.contains("lacks the feature bit of copies") && text.contains("manifest/"), "{text}");
}

#[test]
fn manifests_of_impossible_sizes_and_numbers_are_refused() {
    let text = refused("batches from number 0 on", ErrorKind::Corruption, |log| {
        log.edit(|bytes| {
            bytes[80..88].fill(0);
            let crc = page_crc(bytes[..PAGE_BYTES].try_into().expect("a page"));
            bytes[508..512].copy_from_slice(&crc.to_le_bytes());
        });
    });
    assert!(text.contains("every copy of the manifest is unusable") && text.contains("manifest/"), "{text}");
    let text = refused("a file that is too long", ErrorKind::Corruption, |log| {
        for path in &log.files {
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_len(m::FILE_BYTES_MAX + PAGE_BYTES as u64).unwrap();
        }
    });
    assert!(text.contains("above the maximum of 4294967296"), "{text}");
    // Every page after the end claims to start a long batch that calls the missing one durable.
    let text = refused("batches that overlap", ErrorKind::Corruption, |log| {
        log.edit(|bytes| {
            let mut page = vec![0; PAGE_BYTES];
            page[..4].copy_from_slice(&m::BATCH_MAGIC);
            for (at, value) in [(8, 1_000_u64), (16, 900), (24, log.generation)] {
                page[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            page[40..44].copy_from_slice(&m::BATCH_PAGES_MAX.to_le_bytes());
            bytes.truncate((log.next_page + 1) * PAGE_BYTES);
            (0..600).for_each(|_| bytes.extend_from_slice(&page));
        });
    });
    assert!(text.contains("what looks like batches in manifest/"), "{text}");
}

/// A manifest may commit a length inside a stored group, of which only the first tokens then count.
#[test]
fn a_group_that_a_truncation_cut_is_read_for_its_first_tokens() {
    let scratch = fast_scratch();
    let dirs = killed(scratch.path());
    let cut = m::SequenceTruncate { sequence: 1.into(), tokens: 10.into() };
    let mut record = Vec::new();
    encode_record(&mut record, Kind::SequenceTruncate, &cut, &[]);
    ManifestLog::of(&dirs[0]).append(&record, 1);
    let report = check(&dirs);
    assert_eq!(report.exit_code, kvfsck::EXIT_CLEAN, "{}", report.to_text());
    let open = || options(&dirs).create(false).open().unwrap();
    let store = open();
    let sequence = store.open_sequence("a", OpenSequence::new()).unwrap();
    assert_eq!(sequence.len(), 10);
    let view = sequence.select(0, SelectRequest::all()).unwrap();
    let batch = store.read(&[&view]).submit().unwrap().wait().unwrap();
    let mut out = [0.0; 8];
    stratakv::attend(&[0.0; 8], &view, batch.get(0).unwrap(), &mut out).unwrap();
    // A zero query gives the mean of all tokens: 0 to 5 of the first append, 0 to 3 of the second.
    for (i, x) in out.iter().enumerate() {
        let mean = (0..6).chain(0..4).map(|token| (token * 8 + i) as f32).sum::<f32>() / 10.0;
        assert!((x - mean).abs() < 0.05, "{i}: {x}, not {mean}");
    }
    drop((batch, view, sequence));
    store.close().unwrap();

    // The keys of tokens 8 to 11 are the third to the sixth of the second append.
    let keys: Vec<u8> = (16..48).flat_map(|i| half::f16::from_f32(i as f32).to_le_bytes()).collect();
    let path = dirs[0].join("segments/00000000");
    let mut bytes = fs::read(&path).unwrap();
    let places: Vec<usize> =
        bytes.windows(keys.len()).enumerate().filter(|(_, w)| *w == keys).map(|(at, _)| at).collect();
    assert!(!places.is_empty());
    places.iter().for_each(|at| bytes[*at] ^= 1);
    fs::write(&path, bytes).unwrap();
    let store = open();
    let error = store.open_sequence("a", OpenSequence::new()).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
    assert!(error.to_string().contains("segments/00000000"), "{error}");
    assert!(!store.health().is_well(), "{:?}", store.health());
}
