//! Errors of reads that several files return.

use crate::error::{Corruption, Error, ErrorKind};
use crate::plan::{GroupSource, SelectedGroup, SelectionInner};
use stratakv_format::segment;

/// Returns the error for a selection, block or plane that the caller names and that does not exist.
pub(super) fn not_there(what: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("read: there is no {what}"))
}

/// Returns the error for a selection that is not the one at `index` of the read.
pub(super) fn wrong_selection(index: usize) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("attend: the selection given is not number {index} of the read"))
}

/// Returns the error for a block with a codec range that is not finite. `at` counts from the first byte that is read of
/// the block.
pub(super) fn undecodable(selection: &SelectionInner, group: &SelectedGroup, at: usize) -> Error {
    let error = match &group.source {
        GroupSource::Disk { frame, offset, .. } => Error::corrupt(Corruption {
            code: "payload-codec",
            device: frame.segment.key.0.0,
            file: segment::file_name(frame.segment.key.1),
            offset: offset + at as u64,
            len: selection.layout.dtype().bytes() as u64,
            expected: "finite ranges".into(),
            found: "a range that is not finite".into(),
        }),
        _ => Error::new(ErrorKind::Corruption, "a range that is not finite"),
    };
    error.during(format!("layer {}, group {}", selection.layer, group.index))
}
