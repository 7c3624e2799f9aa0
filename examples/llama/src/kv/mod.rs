//! The KV cache: append per layer, attend per layer, commit per step.
//!
//! | File | What it shows |
//! |---|---|
//! | [`cache`] | the trait that the model calls |
//! | [`geometry`], [`layout`] | the shape of a cache, and its translation to the engine's layout |
//! | [`store`] | a cache that is a sequence of a store: select, read, attend, prefetch, commit |
//! | [`backend`] | opening a store, creating and resuming sequences, storing adapters |
//! | [`method`] | policies: parsing their names, making their selectors |
//! | [`adapters`] | adapters as safetensors files |
//! | [`prompt_sample`], [`fitting`] | adapters that are fitted to a prompt while it is prefilled |
//! | [`memory`], [`grouped`] | caches in memory, the reference for every accuracy figure |
//! | [`probe`] | the attention weight that a selection misses |
//! | [`recorded`], [`recording`] | queries that clusters are made of, and a cache in memory that records them |
//! | [`error`] | the engine's errors with advice |

pub mod adapters;
pub mod backend;
pub mod cache;
pub mod error;
pub mod fitting;
pub mod geometry;
pub mod grouped;
pub mod layout;
pub mod memory;
pub mod method;
pub mod probe;
pub mod prompt_sample;
mod rayon_threads;
pub mod recorded;
pub mod recording;
pub mod store;

pub use cache::{Committed, KvCache, KvStats, Predict};
pub use error::engine_error;
pub use geometry::{KvDType, KvGeometry, LayerGeometry};
pub use memory::MemoryKv;
