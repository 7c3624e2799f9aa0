//! stratakv: an embeddable, log-structured storage engine for the KV cache of language models.
//!
//! Keys and values of attention are stored on SSD. At each decode step, for each layer:
//! 1. The engine scores small summaries of the keys and chooses the groups that matter.
//! 2. It reads these groups in one batch.
//! 3. Attention consumes them as they arrive.
//!
//! `docs/start.md` has the steps for a runtime, `docs/internals` the map of the engine, and `format-spec/SPEC.md` the
//! bytes on disk.
//!
//! The root of the crate has the names of a decode loop. The modules have the rest:
//!
//! | module | holds |
//! |---|---|
//! | [`store`] | status, usage and reports |
//! | [`options`] | settings |
//! | [`layout`] | the shapes of a model |
//! | [`sequence`], [`read`] | handles and reads |
//! | [`export`] | files of single sequences |
//! | [`retrieval`] | selectors |
//! | [`pipeline`] | decode steps that prefetch |
//!
//! ```
//! use stratakv::{
//!     Budget, ByteSize, CreateOptions, DType, Durability, KvLayout, OpenSequence, SelectRequest, Store, StoredSummary,
//!     TensorView, attend,
//! };
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     // 1. Open a store. A device is a directory: give one per SSD.
//!     let dir = std::env::temp_dir().join(format!("stratakv-example-{}", std::process::id()));
//!     std::fs::create_dir(&dir)?;
//!     let store = Store::options().device(&dir).memory_limit(ByteSize::mib(64)).open()?;
//!
//!     // 2. Describe the model and create a sequence. The fingerprint is a hash of the model.
//!     let layout = KvLayout::builder().layers(2).kv_heads(8).head_dim(128).dtype(DType::F16).group_tokens(8);
//!     let layout = layout.fingerprint([7; 32]).build()?;
//!     let options = CreateOptions::new().key("session-42").store_summary(StoredSummary::MinMax);
//!     let mut sequence = store.create_sequence(&layout, options)?;
//!
//!     // 3. Prefill: append many tokens of a layer at once, `[tokens, kv_heads, head_dim]`.
//!     let kv: Vec<f32> = (0..1024 * 8 * 128).map(|i| (i % 251) as f32 / 251.0 - 0.5).collect();
//!     for layer in 0..2 {
//!         let prompt = TensorView::token_major(&kv, 1024, 8, 128);
//!         sequence.append(layer, prompt, prompt)?;
//!     }
//!
//!     // 4. Commit, with bytes of your own. From here on a crash loses none of this.
//!     sequence.commit_with(b"sampler state", Durability::Sync)?;
//!
//!     // 5. Decode: append the token, select groups, read them, attend.
//!     let (query, mut out) = (vec![0.1; 32 * 128], vec![0.0; 32 * 128]); // `[q_heads, head_dim]`
//!     for layer in 0..2 {
//!         let token = TensorView::token_major(&kv[..8 * 128], 1, 8, 128);
//!         sequence.append(layer, token, token)?;
//!         let selection = sequence.select(layer, SelectRequest::query(&query).budget(Budget::tokens(128)))?;
//!         let batch = store.read(&[&selection]).wait()?;
//!         attend(&query, &selection, batch.get(0)?, &mut out)?;
//!     }
//!     sequence.commit(Durability::Sync)?;
//!     drop(sequence);
//!     store.close()?;
//!
//!     // 6. Resume in another process: tokens, summaries and your bytes are there.
//!     let store = Store::options().device(&dir).open()?;
//!     let sequence = store.open_sequence("session-42", OpenSequence::new())?;
//!     assert_eq!((sequence.len(), sequence.caller_state()), (1025, Some(&b"sampler state"[..])));
//!     # drop(sequence);
//!     # store.close()?;
//!     # std::fs::remove_dir_all(&dir)?;
//!     Ok(())
//! }
//! ```
#![deny(unsafe_code)]

pub mod attention;
mod cache;
mod catalog;
pub mod codec;
pub mod error;
mod events;
pub mod export;
#[allow(unsafe_code, reason = "advice to the kernel about memory")]
mod huge_pages;
#[allow(unsafe_code, reason = "unsafe lives here: memory shared with the kernel")]
mod io;
#[allow(unsafe_code, reason = "unsafe lives here: SIMD kernels")]
mod kernels;
pub mod layout;
mod log;
mod maintenance;
pub mod metrics;
pub mod options;
pub mod pipeline;
mod plan;
mod pools;
pub mod read;
mod recovery;
pub mod retrieval;
pub mod sequence;
#[cfg(feature = "sim")]
#[doc(hidden)]
pub mod sim;
pub mod store;
mod sync;

pub use error::{Error, ErrorKind, Result};
// For benches/checksum_bandwidth.rs.
#[doc(hidden)]
pub use kernels::plane_checksum;
pub use layout::{KvLayout, TensorView};
pub use options::{
    Budget, ByteSize, ComputeThreads, CreateOptions, Durability, StoreOptions, StoredSummary, SummaryResidency,
};
pub use plan::{PlaneSet, SelectOptions, SelectRequest, Selection};
pub use read::{AttendOptions, ReadBatch, attend};
pub use sequence::{OpenSequence, Sequence, SequenceReader};
pub use store::Store;
pub use stratakv_format::{DType, SequenceId};

/// The README's example is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
