//! Forged images, with their checksums put right. The check returns a report or an error and never panics.

mod common;

use common::Image;
use proptest::prelude::*;
use std::fs;
use stratakv_format::PAGE_BYTES;
use stratakv_format::checksum::page_crc;
use stratakv_format::frame::Descriptor;
use stratakv_format::superblock::STATE_OPEN;

/// A change of up to 8 bytes. The place is taken modulo the length of the target.
#[derive(Clone, Debug)]
struct Change {
    target: u8,
    at: usize,
    value: u64,
    bytes: usize,
}

fn change() -> impl Strategy<Value = Change> {
    let value = prop_oneof![any::<u64>(), Just(0), Just(u64::MAX), Just(u64::from(u32::MAX)), 0..70_000_u64];
    (0..5_u8, any::<usize>(), value, prop_oneof![Just(1_usize), Just(2), Just(4), Just(8)])
        .prop_map(|(target, at, value, bytes)| Change { target, at, value, bytes })
}

fn apply(change: &Change, bytes: &mut [u8]) {
    if bytes.is_empty() {
        return;
    }
    let at = change.at % bytes.len() / change.bytes * change.bytes;
    for (byte, new) in bytes[at..].iter_mut().zip(&change.value.to_le_bytes()[..change.bytes]) {
        *byte = *new;
    }
}

fn fix_page(page: &mut [u8]) {
    let crc = page_crc((&*page).try_into().unwrap());
    page[508..512].copy_from_slice(&crc.to_le_bytes());
}

fn fix_frame(header: &mut [u8], nonce: u64) -> u32 {
    header[4..8].fill(0);
    let mut crc = crc32fast::Hasher::new();
    crc.update(&nonce.to_le_bytes());
    crc.update(header);
    let crc = crc.finalize();
    header[4..8].copy_from_slice(&crc.to_le_bytes());
    crc
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn check_of_a_forged_image_never_panics(changes in prop::collection::vec(change(), 1..4)) {
        let mut image = Image::standard(1, STATE_OPEN);
        for c in &changes {
            match c.target {
                0 => {
                    let batch = c.at % image.batches.len();
                    let change = Change { at: c.at / 7, ..c.clone() };
                    apply(&change, &mut image.batches[batch].bytes);
                }
                1 => {
                    let frame = image.frames[if c.at % 2 == 0 { 0 } else { 2 }].clone();
                    let at = frame.location.offset() as usize;
                    let header = &mut image.segments[0][at..at + PAGE_BYTES];
                    apply(&Change { at: c.at % (144 + 84 + 8 + 8 * size_of::<Descriptor>()), ..c.clone() }, header);
                    let old = u32::from_le_bytes(header[4..8].try_into().unwrap());
                    let new = fix_frame(header, 0xabc0);
                    for batch in &mut image.batches {
                        let place = batch.bytes.windows(4).position(|w| w == old.to_le_bytes());
                        if let Some(at) = place {
                            batch.bytes[at..at + 4].copy_from_slice(&new.to_le_bytes());
                        }
                    }
                }
                2 => {
                    let page = &mut image.segments[0][..PAGE_BYTES];
                    apply(&Change { at: c.at % 96, ..c.clone() }, page);
                    fix_page(page);
                }
                _ => {}
            }
        }
        image.write(STATE_OPEN);
        for c in changes.iter().filter(|c| c.target > 2) {
            let (file, fields) = if c.target == 3 { ("superblock", 136) } else { ("manifest/0000000000000001-0", 104) };
            let path = image.path(0, file);
            let mut bytes = fs::read(&path).unwrap();
            apply(&Change { at: c.at % fields, ..c.clone() }, &mut bytes[..PAGE_BYTES]);
            fix_page(&mut bytes[..PAGE_BYTES]);
            fs::write(&path, bytes).unwrap();
        }
        match kvfsck::check(&image.dirs, &kvfsck::Options::default(), &()) {
            Ok(report) => prop_assert_eq!(report.clean, report.exit_code == 0),
            Err(error) => prop_assert!(error.exit_code() > 1),
        }
    }
}

/// Every page past the end claims to start a long batch.
///
/// Reading each of these batches would take time quadratic in the size of the file. Only a forged file has overlapping
/// batches, so that kvfsck and the engine call it damage.
#[test]
fn overlapping_batches_past_the_end_are_damage() {
    let mut image = Image::standard(1, STATE_OPEN);
    // Batches that call no missing batch durable are not read past the limit either, and are no damage.
    for (pages, synced) in [(1_u32, 900_u64), (256, 900), (256, 1)] {
        image.write(STATE_OPEN);
        let path = image.path(0, "manifest/0000000000000001-0");
        let mut bytes = fs::read(&path).unwrap();
        let mut page = vec![0; PAGE_BYTES];
        page[..4].copy_from_slice(&stratakv_format::manifest::BATCH_MAGIC);
        for (at, value) in [(8, 1_000_u64), (16, synced), (24, 1)] {
            page[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        page[40..44].copy_from_slice(&pages.to_le_bytes());
        bytes.extend(vec![0; PAGE_BYTES]);
        (0..600).for_each(|_| bytes.extend_from_slice(&page));
        fs::write(&path, &bytes).unwrap();
        let report = kvfsck::check(&image.dirs, &kvfsck::Options::default(), &()).expect("a report");
        let found = report.to_text().contains("more than a file can hold");
        assert_eq!(found, pages == 256 && synced == 900, "{}", report.to_text());
        assert_eq!(found, !report.clean, "{}", report.to_text());
    }
}
