//! A small CPU runtime for Llama-family models whose KV cache is a stratakv store: the reference embedder of the
//! engine.
//!
//! `README.md` of this crate says what each file shows. The path of a token, from the weights to the store:
//!
//! 1. [`config`] and [`weights`] read a Hugging Face model directory. Weights in bf16 and f16 stay mapped.
//! 2. [`model`] computes prefill and decode steps. It knows the cache only as the trait [`kv::KvCache`].
//! 3. [`kv`] implements the trait: in memory, and as a sequence of a store.
//! 4. [`sampler`] draws tokens, and [`text`] converts them to text.
//!
//! [`generate`] continues a text across restarts. [`recall`] measures accuracy on recall tasks. [`profile`]
//! records which tokens queries attend to. [`clusters`] describes the clusters of a stored session.

#![deny(unsafe_code)]

pub mod budget;
pub mod cli;
pub mod clusters;
pub mod config;
pub mod generate;
pub mod kv;
pub mod model;
pub mod process;
pub mod profile;
pub mod recall;
pub mod sampler;
pub mod text;
pub mod weights;

mod attention;
mod linear;
mod rope;
mod simd;
