//! Summaries: what selection scores instead of keys. Built group by group; pure, no I/O.

mod adapter;
mod bounds;
#[cfg(feature = "calibrate")]
mod calibrate;
mod codebook;
mod codes;
mod exact;
mod keys;
mod landmarks;
mod lanes;
mod low_rank;
mod matrix;
mod min_max;
mod newest;
mod rebuilt;
mod rotation;
mod signs;
mod stored;
mod streamed;

pub use adapter::{Adapter, LayerAdapter, LowRankAdapter};
pub(crate) use bounds::Bounds;
pub use bounds::KeyBounds;
#[cfg(feature = "calibrate")]
pub use calibrate::{Calibrator, CodeOptions};
pub use codebook::Codebook;
pub use codes::{CodedKeys, Codes};
pub(crate) use exact::Exact;
pub use exact::ExactKeys;
pub use keys::{KeyGroup, KeyShape, KeySummary, SummaryKind};
pub use landmarks::LandmarkKeys;
pub(crate) use landmarks::Landmarks;
pub(crate) use lanes::Lanes;
pub(crate) use low_rank::LowRank;
pub use low_rank::LowRankKeys;
pub(crate) use min_max::{MinMax, SharedRecords, upper_bounds};
pub(crate) use newest::Newest;
pub use rebuilt::RebuildOptions;
pub(crate) use rebuilt::{FirstPass, Kept, KeptKeys, RebuiltKeys};
pub(crate) use rotation::Rotation;
pub use signs::SignKeys;
pub(crate) use signs::Signs;
pub use stored::StoredAs;
pub(crate) use streamed::{LayerRecords, RecordPiece, add_record};
