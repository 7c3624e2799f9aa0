//! Stores that are open read-only, also after a crash: all content is readable and no call writes.
//!
//! Each test compares bytes, times and modes of all files before and after.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;
use stratakv::export::ImportOptions;
use stratakv::{CreateOptions, Durability, ErrorKind, OpenSequence, Store, StoreOptions, StoredSummary};
use stratakv_format::PAGE_BYTES;
use stratakv_format::superblock::{STATE_CLOSED, newest};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::damage::seal_page;
use stratakv_tests::disk::{assert_clean, copy_devices, device_dirs, fast_scratch, files, skipped, small_options};
use stratakv_tests::rng::{Rng, mix};

fn shape() -> SequenceShape {
    let layers = vec![LayerShape::full(2, 16), LayerShape { window: Some(40), ..LayerShape::full(1, 24) }];
    SequenceShape { layers, dtype: stratakv::DType::F16, group: 4 }
}

/// Returns bytes, modification time and mode of every file below some directories.
fn state(dirs: &[PathBuf]) -> BTreeMap<PathBuf, (Vec<u8>, SystemTime, u32)> {
    use std::os::unix::fs::PermissionsExt;
    let all = dirs.iter().flat_map(|dir| files(dir).into_iter().map(move |file| dir.join(file)));
    all.map(|path| {
        let metadata = fs::metadata(&path).unwrap();
        let modified = metadata.modified().unwrap();
        let bytes = fs::read(&path).unwrap();
        (path, (bytes, modified, metadata.permissions().mode()))
    })
    .collect()
}

fn seeds(count: usize, from: u64) -> Vec<u64> {
    (0..count as u64).map(|at| mix(from << 32 | at)).collect()
}

/// Writes a store and returns its directories. Without `close`, it returns a copy made while the store was open.
fn write(root: &Path, devices: usize, close: bool) -> Vec<PathBuf> {
    let (shape, dirs) = (shape(), device_dirs(&root.join("written"), devices));
    let store = small_options(&dirs).open().unwrap();
    for key in ["a", "b", "gone"] {
        let options = CreateOptions::new().key(key).store_summary(StoredSummary::MinMax);
        let mut sequence = store.create_sequence(&shape.layout().unwrap(), options).unwrap();
        for layer in shape.kv_layers() {
            shape.append(&mut sequence, layer, &seeds(203, 1), Order::TokenMajor).unwrap();
        }
        sequence.append_token_ids(&[1, 2, 3]).unwrap();
        sequence.commit_with(key.as_bytes(), Durability::Sync).unwrap();
        match key {
            "gone" => sequence.delete(Durability::Sync).unwrap(),
            // Tokens that are never committed.
            _ => shape.append(&mut sequence, 0, &seeds(90, 2), Order::TokenMajor).unwrap(),
        }
    }
    if close {
        store.close().unwrap();
        return dirs;
    }
    let copy = copy_devices(&dirs, &root.join("crashed"), &mut Rng(devices as u64));
    drop(store);
    copy
}

fn check(store: &Store) {
    let shape = shape();
    let keys: Vec<String> = store.sequences().into_iter().map(|info| info.key).collect();
    assert_eq!(keys, ["a", "b"]);
    for key in ["a", "b"] {
        let sequence = store.open_sequence(key, OpenSequence::new().layout(&shape.layout().unwrap())).unwrap();
        assert_eq!((sequence.caller_state(), sequence.token_ids()), (Some(key.as_bytes()), &[1, 2, 3][..]));
        shape.check_all(store, &sequence, |_| seeds(203, 1));
    }
    assert_eq!(store.open_sequence("gone", OpenSequence::new()).unwrap_err().kind(), ErrorKind::NotFound);
}

fn every_writing_call_is_refused(store: &Store) {
    let shape = shape();
    let layout = shape.layout().unwrap();
    let refused = |what: &str, error: stratakv::Error| assert_eq!(error.kind(), ErrorKind::ReadOnly, "{what}: {error}");
    refused("create", store.create_sequence(&layout, CreateOptions::new()).unwrap_err());
    let mut sequence = store.open_sequence("a", OpenSequence::new()).unwrap();
    refused("append", shape.append(&mut sequence, 0, &[1], Order::TokenMajor).unwrap_err());
    refused("token ids", sequence.append_token_ids(&[9]).unwrap_err());
    refused("truncate", sequence.truncate(3).unwrap_err());
    for durability in [Durability::Sync, Durability::Lazy, Durability::None] {
        refused("commit", sequence.commit(durability).unwrap_err());
        refused("commit", sequence.commit_with(b"x", durability).unwrap_err());
    }
    assert_eq!((sequence.caller_state(), sequence.len(), sequence.token_ids().len()), (Some(&b"a"[..]), 203, 3));
    let mut file = Vec::new();
    sequence.export(&mut file).unwrap();
    refused("import", store.import(&file[..], &layout, ImportOptions::new().key("c")).unwrap_err());
    let reader = sequence.reader().unwrap();
    let id = sequence.id();
    refused("delete", sequence.delete(Durability::Sync).unwrap_err());
    assert_eq!(reader.len(), 203);
    for durability in [Durability::Sync, Durability::Lazy, Durability::None] {
        refused("delete by id", store.delete_sequence_id(id, durability).unwrap_err());
    }
    store.flush().unwrap();
}

fn read_only(dirs: &[PathBuf]) -> StoreOptions {
    small_options(dirs).read_only(true)
}

#[test]
fn a_store_is_read_without_a_trace() {
    for devices in [1, 2] {
        for close in [true, false] {
            let scratch = fast_scratch();
            let dirs = write(scratch.path(), devices, close);
            let slot = newest(&fs::read(dirs[0].join("superblock")).unwrap()).unwrap();
            assert_eq!(slot.state == STATE_CLOSED, close, "the superblock's state");
            let before = state(&dirs);
            // Each read-only open recovers a crashed store in memory.
            for _ in 0..2 {
                let store = read_only(&dirs).open().unwrap();
                check(&store);
                every_writing_call_is_refused(&store);
                check(&store);
                // Other readers, kvfsck included, may open the store at the same time.
                let second = read_only(&dirs).open().unwrap();
                check(&second);
                assert_clean(&dirs, "while readers are open");
                second.close().unwrap();
                store.close().unwrap();
                assert!(state(&dirs) == before, "something was written");
            }
            let store = small_options(&dirs).open().unwrap();
            check(&store);
            store.close().unwrap();
            assert_clean(&dirs, "after readers");
        }
    }
}

#[test]
fn writers_and_read_only_stores_keep_each_other_out() {
    let scratch = fast_scratch();
    let dirs = write(scratch.path(), 1, true);
    let store = read_only(&dirs).open().unwrap();
    let error = small_options(&dirs).open().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    drop(store);
    let store = small_options(&dirs).open().unwrap();
    let error = read_only(&dirs).open().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    check(&store);
}

#[test]
fn nothing_is_created() {
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), 1);
    assert_eq!(read_only(&dirs).open().unwrap_err().kind(), ErrorKind::Configuration);
    assert_eq!(read_only(&[scratch.path().join("missing")]).open().unwrap_err().kind(), ErrorKind::Configuration);
    assert!(files(scratch.path()).is_empty() && !scratch.path().join("missing").exists());
}

/// A bind mount that is read-only until this is dropped.
struct Mount(PathBuf);

impl Mount {
    fn read_only(from: &Path, to: &Path) -> Result<Self, String> {
        fs::create_dir_all(to).map_err(|e| e.to_string())?;
        let mount = |args: &[&str]| {
            let output = Command::new("mount").args(args).output().map_err(|e| e.to_string())?;
            output.status.success().then_some(()).ok_or_else(|| String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let (from, at) = (from.to_str().ok_or("a path")?, to.to_str().ok_or("a path")?);
        mount(&["--bind", from, at])?;
        let mounted = Self(to.to_path_buf());
        mount(&["-o", "remount,bind,ro", at])?;
        Ok(mounted)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).output();
    }
}

#[test]
fn a_store_on_a_read_only_mount_is_read() {
    for close in [true, false] {
        let scratch = tempfile::tempdir().unwrap();
        let dirs = write(scratch.path(), 1, close);
        let mount = match Mount::read_only(&dirs[0], &scratch.path().join("mounted")) {
            Ok(mount) => mount,
            Err(why) => {
                skipped(format!("no read-only bind mount can be made here: {why}"));
                return;
            }
        };
        let dirs = [mount.0.clone()];
        assert!(fs::write(dirs[0].join("x"), "x").is_err(), "the mount is read-only");
        let refused = small_options(&dirs).open().unwrap_err();
        assert!(!matches!(refused.kind(), ErrorKind::InUse | ErrorKind::Corruption), "{refused:?}");
        let store = read_only(&dirs).open().unwrap();
        check(&store);
        every_writing_call_is_refused(&store);
        store.close().unwrap();
        assert_clean(&dirs, "on a read-only mount");
    }
}

#[test]
fn a_store_with_features_that_only_writers_must_know_is_read_and_not_written() {
    for directory in ["superblock", "manifest"] {
        let scratch = fast_scratch();
        let dirs = write(scratch.path(), 1, true);
        for file in files(&dirs[0]).iter().filter(|file| file.starts_with(directory)) {
            let path = dirs[0].join(file);
            let mut bytes = fs::read(&path).unwrap();
            let headers = if directory == "manifest" { 1 } else { bytes.len() / PAGE_BYTES };
            for page in bytes.chunks_mut(PAGE_BYTES).take(headers).filter(|page| page[0] != 0) {
                page[24] |= 1;
                seal_page(page);
            }
            fs::write(&path, bytes).unwrap();
        }
        let before = state(&dirs);
        let refused = small_options(&dirs).open().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{directory}: {refused:?}");
        assert!(refused.to_string().contains("open it for reading only"), "{directory}: {refused}");
        let store = read_only(&dirs).open().unwrap();
        check(&store);
        every_writing_call_is_refused(&store);
        store.close().unwrap();
        assert_eq!(state(&dirs), before, "{directory}: nothing is written");
        assert_clean(&dirs, directory);
    }
}

#[test]
fn a_store_whose_files_deny_writing_is_read() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = fast_scratch();
    let dirs = write(scratch.path(), 1, false);
    for file in files(&dirs[0]) {
        fs::set_permissions(dirs[0].join(file), fs::Permissions::from_mode(0o400)).unwrap();
    }
    for dir in ["manifest", "segments", "."] {
        fs::set_permissions(dirs[0].join(dir), fs::Permissions::from_mode(0o500)).unwrap();
    }
    let store = read_only(&dirs).open().unwrap();
    check(&store);
    drop(store);
    for dir in [".", "manifest", "segments"] {
        fs::set_permissions(dirs[0].join(dir), fs::Permissions::from_mode(0o700)).unwrap();
    }
}
