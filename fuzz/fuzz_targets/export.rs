//! Exported sequences: the input itself, and the input with correct checksums of page and pieces.
//!
//! kvfsck reads the file and reports findings, and never panics. It calls a file clean only if there is no finding.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::path::Path;
use stratakv_format::PAGE_BYTES;
use stratakv_format::checksum::crc_with_hole;
use stratakv_format::export::piece_checksum;

fn read(bytes: &[u8]) {
    let report = kvfsck::check_reader(bytes, bytes.len() as u64, Path::new("fuzz"), &kvfsck::Options::default(), &());
    assert_eq!(report.clean, report.findings.is_empty());
    assert!(!report.clean || report.export.pieces >= 2);
}

/// Writes correct checksums of the page and of every piece whose header is in the file.
fn fix(bytes: &mut [u8]) {
    stratakv_fuzz::fix_page(bytes);
    if bytes.len() < PAGE_BYTES {
        return;
    }
    let nonce: [u8; 8] = bytes[64..72].try_into().unwrap_or_default();
    let (mut at, mut index) = (PAGE_BYTES, 0_u64);
    while let Some(header) = bytes.get(at..at + 48) {
        let len = u32::from_le_bytes(header[36..40].try_into().unwrap_or_default()) as usize;
        let end = (at + 48 + len).min(bytes.len());
        let sum = piece_checksum(&bytes[at + 48..end]);
        let padded = end.next_multiple_of(8).min(bytes.len());
        bytes[end..padded].fill(0);
        let header = &mut bytes[at..at + 48];
        header[..4].copy_from_slice(b"SKXP");
        header[8..16].copy_from_slice(&index.to_le_bytes());
        header[16..24].copy_from_slice(&sum.to_le_bytes());
        let crc = crc_with_hole(&nonce, header, 4..8);
        header[4..8].copy_from_slice(&crc.to_le_bytes());
        (at, index) = (padded, index + 1);
    }
}

fuzz_target!(|data: &[u8]| {
    read(data);
    let mut fixed = data.to_vec();
    if fixed.len() >= PAGE_BYTES {
        fixed[..8].copy_from_slice(b"SKVEXPRT");
    }
    fix(&mut fixed);
    read(&fixed);
});
