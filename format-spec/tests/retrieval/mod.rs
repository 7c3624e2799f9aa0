//! The golden store of what retrieval keeps: adapters, and summaries beside the groups they are of. It is read completely
//! and written again byte for byte.

pub(crate) mod store;

use crate::golden_store;
use std::fs;
use std::path::{Path, PathBuf};
use stratakv_format::PAGE_BYTES;
use stratakv_format::checksum::{PayloadChecksum, crc64};
use stratakv_format::frame::{FrameView, KIND_ADAPTER};
use stratakv_format::manifest::{Batch, Kind, Record};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/v0.2/store-retrieval")
}

#[test]
#[ignore = "writes the golden files of the version in the making"]
fn generate() {
    for (name, bytes) in store::files() {
        let path = directory().join(name);
        fs::create_dir_all(path.parent().expect("a directory")).expect("the directory");
        fs::write(path, bytes).expect("written");
    }
}

#[test]
fn written_again_byte_for_byte() {
    for (name, bytes) in store::files() {
        let golden = fs::read(directory().join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let differs = golden.iter().zip(&bytes).position(|(a, b)| a != b);
        assert_eq!((differs, golden.len()), (None, bytes.len()), "{name} differs");
    }
}

#[test]
fn the_manifest_names_the_adapter() {
    let file = fs::read(directory().join("manifest/0000000000000003-0")).expect("a manifest");
    let batch =
        Batch::verify(&file[PAGE_BYTES..], &golden_store::batch_place(golden_store::FIRST_BATCH)).expect("valid");
    let mut found = Vec::new();
    for record in batch.records() {
        if let Record::Adapter(adapter, name) = record.expect("a record") {
            found.push((*adapter, name.to_vec()));
        }
    }
    assert_eq!(Kind::from_code(20), Some(Kind::Adapter));
    assert_eq!(found, [(store::adapter_record(), b"golden".to_vec())]);
}

#[test]
fn frames_hold_what_the_literals_say() {
    let file = fs::read(directory().join("segments/00000001")).expect("a segment");
    let mut adapter: Vec<(u16, u64, Vec<u8>)> = Vec::new();
    for frame in store::frames() {
        let at = frame.place.location.offset() as usize;
        let bytes = &file[at..at + frame.place.location.bytes() as usize];
        let view = FrameView::verify(bytes, &frame.place).expect("valid");
        assert_eq!((view.header().crc.get(), view.descriptors()), (frame.crc, &frame.descriptors[..]));
        let stored: Vec<u64> = view.descriptors().iter().flat_map(|d| view.checksums(d)).map(|sum| sum.get()).collect();
        assert_eq!(stored.len(), frame.planes.len());
        for ((_, identity, at, data), sum) in frame.planes.iter().zip(stored) {
            assert_eq!(&bytes[*at..at + data.len()], &data[..]);
            assert_eq!(PayloadChecksum::Crc64Nvme.compute(identity, data), sum);
        }
        for descriptor in view.descriptors().iter().filter(|d| d.kind.get() == KIND_ADAPTER) {
            let start = descriptor.offset.get() as usize;
            let piece = bytes[start..start + descriptor.bytes.get() as usize].to_vec();
            adapter.push((descriptor.layer.get(), descriptor.first_token.get(), piece));
        }
    }
    adapter.sort();
    let whole: Vec<u8> = adapter.into_iter().flat_map(|(.., bytes)| bytes).collect();
    assert_eq!(
        (whole.len() as u64, crc64(&whole)),
        (store::adapter_record().bytes.get(), store::adapter_record().checksum.get())
    );
}
