//! The file of an exported sequence (SPEC.md chapter 17), checked without a store.
//!
//! The file is read once, from front to back, in the memory of one piece:
//!
//! 1. The export page, the layout, the key, the caller state and the token ids.
//! 2. For each layer with KV: the groups, each followed by its min/max summaries if the sequence has them. Then the
//!    tail.
//! 3. The end piece, which names the number of pieces and bytes.
//!
//! The order is fixed, so that the kind and place of the next piece are always known. The check stops where the next
//! piece cannot be found, and continues after every other defect.

mod reader;
mod report;
mod walk;

pub use report::{ExportInfo, ExportReport};

use crate::error::{CheckError, EXIT_CLEAN};
use crate::finding::{FilePlace, Sink};
use crate::options::Options;
use crate::report::Progress;
use reader::PieceReader;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use walk::ExportWalk;

/// Checks the file of an exported sequence. It never writes.
///
/// # Errors
/// Returns a [`CheckError`] if there is no such file, or if it cannot be opened.
pub fn check_export(path: &Path, options: &Options, progress: &dyn Progress) -> Result<ExportReport, CheckError> {
    let not_a_file = |reason: &str| CheckError::NotAStore { path: path.to_path_buf(), reason: reason.into() };
    let failed = |source| CheckError::Io { operation: "open", path: path.to_path_buf(), source };
    // O_NONBLOCK, because opening a FIFO would block without it.
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => not_a_file("no such file"),
        _ => failed(e),
    })?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(not_a_file("not a regular file"));
    }
    progress.start(metadata.len());
    Ok(check_reader(file, metadata.len(), path, options, progress))
}

/// Checks an exported sequence that `reader` returns. `bytes` is its length, and `path` its name in findings.
pub fn check_reader(
    reader: impl Read,
    bytes: u64,
    path: &Path,
    options: &Options,
    progress: &dyn Progress,
) -> ExportReport {
    let sink = Sink::new(options.findings_max);
    let (directory, name) = (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or_default());
    let place = FilePlace { device: None, path: Arc::from(directory), file: Arc::from(&*name.to_string_lossy()) };
    let info = ExportInfo { bytes, ..ExportInfo::default() };
    let walk = ExportWalk::new(PieceReader::new(reader, place, &sink, progress), info, options.show_keys);
    let info = walk.check();
    let findings = sink.into_findings();
    let exit_code = findings.exit_code();
    ExportReport { clean: exit_code == EXIT_CLEAN, findings: findings.list, export: info, exit_code }
}
