//! The golden store `v0.2/store-retrieval`: an adapter, and summaries of groups above min/max.

pub(crate) mod store;

use crate::builder as b;
use std::fs;
use std::path::PathBuf;
use stratakv_format::PAGE_BYTES;
use stratakv_format::checksum::{PayloadChecksum, crc64};
use stratakv_format::frame::{FrameView, KIND_ADAPTER};
use stratakv_format::manifest::{Batch, Kind, Record};

fn directory() -> PathBuf {
    b::golden_directory("v0.2/store-retrieval")
}

b::golden_file_tests!(directory(), store::files());

#[test]
fn the_manifest_names_the_adapter() {
    let file = fs::read(directory().join("manifest/0000000000000003-0")).expect("a manifest");
    let batch = Batch::verify(&file[PAGE_BYTES..], &b::batch_place(b::FIRST_BATCH)).expect("valid");
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
fn the_frames_hold_the_adapter_and_the_summaries() {
    let mut adapter: Vec<(u16, u64, Vec<u8>)> = Vec::new();
    for frame in store::frames() {
        let bytes = b::read_segment_frame(&directory(), &frame);
        let view = FrameView::verify(&bytes, &frame.place).expect("valid");
        assert_eq!((view.header().crc.get(), view.descriptors()), (frame.crc, &frame.descriptors[..]));
        b::assert_planes_match(PayloadChecksum::Crc64Nvme, &frame, &bytes);
        for descriptor in view.descriptors().iter().filter(|d| d.kind.get() == KIND_ADAPTER) {
            let start = descriptor.offset.get() as usize;
            let extent = bytes[start..start + descriptor.bytes.get() as usize].to_vec();
            adapter.push((descriptor.layer.get(), descriptor.first_token.get(), extent));
        }
    }
    adapter.sort();
    let whole: Vec<u8> = adapter.into_iter().flat_map(|(.., bytes)| bytes).collect();
    assert_eq!(
        (whole.len() as u64, crc64(&whole)),
        (store::adapter_record().bytes.get(), store::adapter_record().checksum.get())
    );
}
