//! The limits of an open.

use super::*;
use crate::io::file::directory::Access;
use crate::recovery::{ProbeResult, open_directories, read_devices, replay};
use stratakv_format::PAGE_BYTES;

#[test]
fn a_manifest_is_read_within_the_memory_that_there_is() {
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path(), 2);
    drop(sequence);
    store.close().unwrap();
    let paths = [dir.path().join("0"), dir.path().join("1")];
    let opened = read_devices(open_directories(&paths, Access::ReadOnly).unwrap(), true, 1 << 20).unwrap();
    let ProbeResult::Store(found) = opened else { panic!("the store is there") };
    let store_id = found[0].slot.unwrap().store_id;
    let whole = replay(&found, store_id, 1 << 20).unwrap();
    assert_eq!(whole.catalog.sequences.len(), 1);
    let error = replay(&found, store_id, 2 * PAGE_BYTES).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::MemoryLimit, "{error}");
    assert!(error.to_string().contains("memory_limit"), "{error}");
}
