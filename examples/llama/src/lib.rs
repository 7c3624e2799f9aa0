//! The reference embedder of stratakv: a small CPU runtime for Llama-family models whose KV cache is pluggable.
//!
//! The path of one run: [`config`] and [`weights`] read a Hugging Face model directory, [`model`] computes prefill (layer by layer, keys and
//! values handed to a [`kv::KvCache`] as soon as a layer is done) and decode (attention through the cache), [`sampler`] draws
//! tokens. [`recall`] measures accuracy on recall tasks, [`generate`] continues a text.

pub mod budget;
pub mod cli;
pub mod config;
pub mod generate;
pub mod kv;
pub mod model;
pub mod process;
pub mod recall;
pub mod sampler;
pub mod text;
pub mod weights;

mod attention;
mod linear;
mod rope;
mod simd;
