//! Batches and their records: the input itself, and the input with a correct generation, sequence number and CRC.
//!
//! A batch that verifies has at most as many records as its header says, then one error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use stratakv_format::layout::Layout;
use stratakv_format::manifest::{Batch, BatchPlace, Record};

fn walk(bytes: &[u8], place: &BatchPlace) {
    let _ = Batch::claimed_pages(bytes);
    let Ok(batch) = Batch::verify(bytes, place) else { return };
    let (mut records, most) = (0_u32, batch.header().record_count.get());
    for record in batch.records() {
        records += 1;
        match record {
            Ok(Record::Layout(_, tail)) => {
                if let Ok(layout) = Layout::decode(tail) {
                    let mut again = Vec::new();
                    layout.encode(&mut again);
                    assert_eq!(again[..], tail[..again.len()]);
                }
            }
            Ok(Record::SequenceCreate(create, key)) => assert_eq!(usize::from(create.key_bytes.get()), key.len()),
            Ok(Record::Frame(frame)) => {
                assert!(frame.location.page.get().checked_add(frame.location.pages.get()).is_some())
            }
            Ok(_) => {}
            Err(_) => break,
        }
    }
    assert!(records <= most.saturating_add(1));
}

fuzz_target!(|data: &[u8]| {
    let place = BatchPlace { generation: 3, nonce: stratakv_fuzz::MANIFEST_NONCE, sequence: 41 };
    walk(data, &place);
    let mut fixed = stratakv_fuzz::padded(data);
    fixed[..4].copy_from_slice(b"SKMB");
    fixed[8..16].copy_from_slice(&41_u64.to_le_bytes());
    fixed[24..32].copy_from_slice(&3_u64.to_le_bytes());
    let _ = stratakv_fuzz::fix_seeded(&mut fixed, 40, place.nonce);
    walk(&fixed, &place);
});
