//! Frames with changed headers, for tests of hostile bytes.

use crate::builder::{GoldenFrame, KEY, TOKEN_SEQUENCE};
use stratakv_format::FormatError;
use stratakv_format::frame::{FrameView, HeaderBuilder};
use stratakv_format::ids::{FrameId, LayoutId, SequenceId};
use stratakv_format::layout::Layout;

/// Verifies a frame after a change of its fields. Its header has the changed descriptors, checksums and front.
pub(crate) fn read_changed(
    mut frame: GoldenFrame,
    layout: &Layout,
    change: impl FnOnce(&mut GoldenFrame),
) -> Result<(), FormatError> {
    change(&mut frame);
    let header = HeaderBuilder {
        frame: FrameId(frame.frame),
        lsn: frame.lsn,
        nonce: frame.nonce,
        sequence: SequenceId(TOKEN_SEQUENCE),
        parent: None,
        created_unix_ms: 1,
        layout_id: LayoutId(1),
        layout,
        key: KEY,
        summaries: 0,
        descriptors: &frame.descriptors,
        checksums: &frame.checksums,
        front_pages: frame.front_pages,
    };
    header.write(&frame.place, &mut frame.bytes)?;
    FrameView::verify(&frame.bytes, &frame.place).map(|_| ())
}
