//! Retrieval methods: selectors, the summaries they score, and what calibration fits for them. Pure: no I/O.
//!
//! One folder per method. A method of an embedder is one implementation of [`Selector`], over a summary of this crate or of
//! the embedder. [`Sequence::attach`](crate::Sequence::attach) builds its summary and keeps it up to date, and
//! [`Sequence::select_with`](crate::Sequence::select_with) chooses by it.

mod adapter;
mod bounds;
#[cfg(feature = "calibrate")]
mod calibrate;
mod exact;
mod lanes;
mod low_rank;
mod matrix;
mod rotation;
mod selector;
mod shadowkv;
mod sign_bits;
mod stored_summary;
mod suffix_summary;
mod summary;
mod top_k;
mod transform_coded;

pub use adapter::{Adapter, LayerAdapter, LowRankAdapter};
pub(crate) use bounds::layer_records::{LayerRecords, RecordPiece, add_record};
pub use bounds::leoam::LeoAm;
pub use bounds::min_max::Quest;
pub(crate) use bounds::records::{MinMax, SharedRecords, upper_bounds};
pub(crate) use bounds::summary::Bounds;
pub use bounds::summary::KeyBounds;
#[cfg(feature = "calibrate")]
pub use calibrate::{Calibrator, CodeOptions};
pub use exact::selector::Oracle;
pub use exact::summary::ExactKeys;
pub use low_rank::infinigen::InfiniGen;
pub use low_rank::kvswap::KvSwap;
pub use low_rank::summary::LowRankKeys;
pub(crate) use rotation::Rotation;
pub use selector::{Ask, ScoreForm, Selector, SelectorId, combine, summary_as};
pub use shadowkv::reconstructed::RebuildOptions;
pub(crate) use shadowkv::reconstructed::{FirstPass, Kept, KeptKeys, RebuiltKeys};
pub use shadowkv::selector::ShadowKv;
pub use shadowkv::summary::LandmarkKeys;
pub use sign_bits::selector::SignBits;
pub use sign_bits::summary::SignKeys;
pub use stored_summary::StoredAs;
pub(crate) use suffix_summary::Newest;
pub use summary::{KeyGroup, KeyShape, KeySummary, SummaryKind};
pub(crate) use top_k::choose;
pub use transform_coded::codebook::Codebook;
pub use transform_coded::selector::Tck;
pub use transform_coded::summary::{CodedKeys, Codes};
