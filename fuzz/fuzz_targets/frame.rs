//! Frame headers: the input itself, and the input with a correct identity and CRC.
//!
//! A header that verifies is consistent. Its extents are in order inside the frame and have all their checksums. Every
//! block is inside its extent, and the front holds all extents except groups and pools.
#![no_main]

use libfuzzer_sys::fuzz_target;
use stratakv_format::frame::{FramePlace, FrameView, KIND_GROUPS};
use stratakv_format::{DeviceIndex, Location, PAGE_BYTES, SegmentId};

fn walk(bytes: &[u8], place: &FramePlace) {
    let _ = FrameView::claimed_header_pages(bytes);
    let Ok(view) = FrameView::verify(bytes, place) else { return };
    let header = view.header();
    let page = PAGE_BYTES as u64;
    let mut end = u64::from(header.header_pages.get()) * page;
    let mut checksums = 0;
    for d in view.descriptors() {
        assert!(d.offset.get() >= end);
        end = d.offset.get() + d.bytes.get();
        checksums += view.checksums(d).len();
        assert_eq!(view.checksums(d).len(), d.checksum_count.get() as usize);
        if !d.is_behind_front() {
            assert!(end <= u64::from(header.front_pages.get()) * page);
        }
        if d.kind.get() == KIND_GROUPS {
            let block = view.layout().block(&view.layout().layers[usize::from(d.layer.get())]);
            let last = block.block_offset(d.pieces.get() as usize - 1);
            assert!((last + block.block_bytes) as u64 <= d.bytes.get());
            assert_eq!(d.first_group(view.layout()) * u64::from(view.layout().group_tokens), d.first_token.get());
        }
        assert_eq!(d.is_derived(), view.is_derived());
        let _ = d.end_token();
    }
    assert!(end <= u64::from(header.total_pages.get()) * page);
    assert_eq!(checksums, header.checksums.get() as usize);
}

fuzz_target!(|data: &[u8]| {
    let location = Location { device: DeviceIndex(0), segment: SegmentId(1), page: 1, pages: 0 };
    let store_id = *b"golden-store-id!";
    let place = FramePlace { store_id, location, segment_generation: 5, segment_nonce: stratakv_fuzz::SEGMENT_NONCE };
    walk(data, &place);
    let mut fixed = stratakv_fuzz::padded(data);
    fixed[..4].copy_from_slice(b"SKFR");
    fixed[32..36].copy_from_slice(&1_u32.to_le_bytes());
    fixed[36..40].copy_from_slice(&1_u32.to_le_bytes());
    let total: [u8; 4] = [fixed[12], fixed[13], fixed[14], fixed[15]];
    fixed[40..44].copy_from_slice(&total);
    fixed[44..48].fill(0);
    fixed[48..64].copy_from_slice(&store_id);
    fixed[64..72].copy_from_slice(&5_u64.to_le_bytes());
    let _ = stratakv_fuzz::fix_seeded(&mut fixed, 8, place.segment_nonce);
    walk(&fixed, &place);
});
