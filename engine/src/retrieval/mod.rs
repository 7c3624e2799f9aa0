//! Retrieval methods: selectors, the summaries they score, and what calibration fits for them. Pure: no I/O.
//!
//! One folder per method. An embedder adds a method by one implementation of [`Selector`], over a summary of this crate
//! or of its own.
//! - [`Sequence::attach`](crate::Sequence::attach) builds its summary and keeps it up to date.
//! - [`SelectRequest::selector`](crate::SelectRequest::selector) chooses groups by it.

mod adapter;
mod balanced;
mod block_mean;
mod bounds;
mod byte_rows;
#[cfg(feature = "calibrate")]
mod calibrate;
mod cluster_choice;
pub(crate) mod cluster_state;
pub mod clusters;
mod dynakv;
mod encoding;
mod entry_selector;
mod exact;
mod fixed_clusters;
mod head_aggregation;
mod infllm;
mod key_group;
mod key_shape;
mod low_rank;
mod method;
mod pqcache;
mod query_batch;
mod recorded_attention;
mod registry;
mod scaled_rows;
mod score_tiles;
mod sealed_keys;
mod selector;
mod shadowkv;
mod sign_bits;
mod stored_summary;
mod suffix_summary;
mod summary;
mod summary_records;
mod swarm;
mod tokens;
mod top_k;
mod transform_coded;

pub use adapter::{Adapter, LayerAdapter, LowRankAdapter};
pub use block_mean::BlockMean;
pub(crate) use bounds::layer_records::{LayerRecords, LoadedMinMax, RecordPiece, add_record};
pub use bounds::leoam::LeoAm;
pub use bounds::min_max::Quest;
pub(crate) use bounds::records::{MinMax, upper_bounds};
pub use bounds::summary::BoundsSpec;
#[cfg(feature = "calibrate")]
pub use calibrate::{Calibrator, CodeOptions};
pub use cluster_choice::{ChosenBy, HeadSharing};
pub use cluster_state::{StateError, StateReader, StateWriter};
pub use dynakv::DynaKv;
pub use entry_selector::{ChosenEntries, ClusterChange, ClusterFacts, EntryRequest, EntrySelector};
pub use exact::selector::Oracle;
pub use exact::summary::ExactSpec;
pub use infllm::InfLlm;
pub use low_rank::infinigen::InfiniGen;
pub use low_rank::kvswap::KvSwap;
pub use low_rank::summary::LowRankSpec;
pub use method::{AdapterFit, ChosenUnit, Method, MethodParameter};
pub use pqcache::PqCache;
pub use registry::{MethodSpec, methods};
pub(crate) use score_tiles::sharing_threads;
pub use sealed_keys::{QueryProfile, SealedKeys};
pub use selector::{HeadAggregation, ScoreRequest, Selector, SelectorId, aggregate, summary_as};
pub use shadowkv::reconstructed::ReconstructOptions;
pub(crate) use shadowkv::reconstructed::{FirstPass, KeptKeys, KeptOutliers, ReconstructedKeys};
pub use shadowkv::selector::ShadowKv;
pub use shadowkv::summary::LandmarkSpec;
pub use sign_bits::selector::SignBits;
pub use sign_bits::summary::SignSpec;
pub use stored_summary::SummaryRecordId;
pub(crate) use suffix_summary::SuffixSummary;
pub use summary::{KeyGroup, KeyShape, LayerSummary, SummarySpec};
pub use swarm::Swarm;
pub use tokens::ExactTokens;
pub(crate) use top_k::choose;
pub use transform_coded::codebook::Codebook;
pub use transform_coded::selector::TransformCoded;
pub use transform_coded::summary::{CodeSpec, Codes};
