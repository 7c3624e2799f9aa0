//! A flipped byte in a live page is found at its place. A flipped byte elsewhere is not reported.

mod common;

use common::{Image, MANIFEST_PAGES, flip};
use kvfsck::{EXIT_CLEAN, EXIT_DAMAGE, Severity};
use stratakv_format::PAGE_BYTES;
use stratakv_format::superblock::{STATE_CLOSED, STATE_OPEN};

/// Returns the offsets to flip: the first 256 bytes of every page, and every `stride`th byte of the rest.
fn positions(length: usize, stride: usize) -> impl Iterator<Item = usize> {
    (0..length).filter(move |at| at % PAGE_BYTES < 256 || at % stride == 0)
}

fn flip_everywhere(devices: u16, state: u8, stride: usize) -> usize {
    let image = Image::standard(devices, state);
    assert!(image.check().clean);
    let mut tried = 0;
    for (device, file, start, length) in image.live() {
        let path = image.path(device, &file);
        for at in positions(length, stride) {
            let offset = start + at;
            let mask = 1 << (at % 8);
            flip(&path, offset, mask);
            let report = image.check();
            let named = report.findings.iter().any(|f| {
                let (first, bytes) = (f.offset.unwrap_or(u64::MAX), f.length.unwrap_or(0));
                f.severity == Severity::Damage
                    && f.device == Some(device as u16)
                    && f.path.as_deref() == Some(image.dirs[device].as_path())
                    && f.file.as_deref() == Some(file.as_str())
                    && (first..first.saturating_add(bytes)).contains(&(offset as u64))
            });
            assert!(named, "device {device} {file} byte {offset}: {}", report.to_text());
            assert_eq!(report.exit_code, EXIT_DAMAGE, "device {device} {file} byte {offset}: {}", report.to_text());
            flip(&path, offset, mask);
            tried += 1;
        }
    }
    assert!(image.check().clean);
    tried
}

#[test]
fn flipped_byte_is_found_on_one_closed_device() {
    let tried = flip_everywhere(1, STATE_CLOSED, 37);
    assert!(tried > 5_000, "{tried}");
}

#[test]
fn flipped_byte_is_found_on_two_open_devices() {
    let tried = flip_everywhere(2, STATE_OPEN, 53);
    assert!(tried > 5_000, "{tried}");
}

#[test]
fn flipped_dead_bytes_are_not_reported() {
    for state in [STATE_CLOSED, STATE_OPEN] {
        let image = Image::standard(1, state);
        let live = image.live();
        for (file, pages) in
            [("segments/00000000", common::SEGMENT_PAGES as usize), ("manifest/0000000000000001-1", MANIFEST_PAGES)]
        {
            let is_live = |at: usize| {
                live.iter().any(|(_, f, start, length)| f == file && (*start..start + length).contains(&at))
            };
            let dead: Vec<_> = (0..pages * PAGE_BYTES).filter(|at| at % 61 == 0 && !is_live(*at)).collect();
            assert!(dead.len() > 100, "{file}: {}", dead.len());
            for at in dead {
                flip(&image.path(0, file), at, 0x40);
            }
            let report = image.check();
            assert_eq!(report.exit_code, EXIT_CLEAN, "{}", report.to_text());
        }
    }
}
