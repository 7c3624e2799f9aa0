//! Sizes and identities of the synthetic store.

use anyhow::{Context, Result};
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use stratakv_format::PAGE_BYTES;

pub(super) const SEGMENT_PAGES: u32 = 16_384;
pub(super) const SEGMENT_BYTES: u64 = SEGMENT_PAGES as u64 * PAGE_BYTES as u64;
pub(super) const FRAMES_PER_SEQUENCE: u64 = 2;
pub(super) const GROUP: u16 = 8;
pub(super) const STORE_ID: [u8; 16] = [0x5b; 16];
pub(super) const DEVICE_ID: [u8; 16] = [0x5c; 16];
pub(super) const NONCE: u64 = 0x5eed;
pub(super) const CREATED_S: u64 = 1_700_000_000;

/// Creates or truncates a file.
///
/// # Errors
/// The file cannot be opened.
pub(super) fn create(path: &Path) -> Result<File> {
    let file = File::options().write(true).create(true).truncate(true).mode(0o600).open(path);
    file.with_context(|| format!("make {}", path.display()))
}
