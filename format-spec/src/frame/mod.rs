//! Frames: one atomic append to a log segment. Header pages with descriptors and checksums, then payload pages.

mod builder;
mod descriptor;
mod header;
mod summary;

pub use builder::{HeaderBuilder, header_bytes};
pub use descriptor::{
    CODEC_RAW, Descriptor, KIND_ADAPTER, KIND_CALLER_STATE, KIND_CLUSTER_DELTA, KIND_CLUSTER_DIRECTORY, KIND_GROUPS,
    KIND_KEYED_OBJECT, KIND_LOW_RANK_BASIS, KIND_REPLICA, KIND_SUMMARY, KIND_TAIL, KIND_TOKEN_IDS, PieceGeometry,
    TOKENS_MAX, summary_record_bytes, tail_plane_bytes,
};
pub use header::{
    CALLER_STATE_BYTES_MAX, DESCRIPTORS_MAX, FrameHeader, FramePlace, FrameView, HEADER_PAGES_MAX, MAGIC,
    TOTAL_PAGES_MAX,
};
pub use summary::{
    SUMMARY_CODES, SUMMARY_LANDMARKS, SUMMARY_LOW_RANK, SUMMARY_MIN_MAX, SUMMARY_RECORD_BYTES_MAX, SUMMARY_SIGNS,
    SUMMARY_VERSION, SummaryHeader, SummaryRecords, has_adapter, record_bytes, sign_dims,
};
