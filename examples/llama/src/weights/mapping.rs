//! Maps a weight file into memory: the one place of this crate with `unsafe` code.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use memmap2::Mmap;

/// Maps a regular file read-only. Its pages are read when they are first used, and the kernel may drop them again.
///
/// The file must not be changed while it is mapped. If another process truncates it, reading past its new end ends
/// this process with SIGBUS.
///
/// # Errors
/// Fails if the file cannot be opened or mapped, or if it is not a regular file.
pub(super) fn map(path: &Path) -> Result<Mmap> {
    let place = || format!("cannot read weights from {}", path.display());
    // Opening a pipe would wait for its writer, so the kind of the file is checked first.
    let regular = std::fs::metadata(path).with_context(place)?.is_file();
    ensure!(regular, "{}: it is not a regular file", place());
    let file = File::open(path).with_context(place)?;
    // SAFETY: the mapping is read-only and nothing in this process writes to the file. If another process writes to it,
    // the bytes change but every byte pattern is a valid `u8`. The header is parsed once, and all later reads use the
    // ranges checked then, so changed bytes give wrong weights and never a read outside of the mapping.
    #[expect(unsafe_code, reason = "mapping a file is unsafe in Rust, because other processes may change the file")]
    let mapping = unsafe { Mmap::map(&file) };
    mapping.with_context(place)
}
