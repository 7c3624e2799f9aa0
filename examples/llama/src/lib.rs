//! A small CPU runtime for Llama-family models whose KV cache is a stratakv store: the reference embedder of the
//! engine.
//!
//! `README.md` of this crate says what each file shows. The path of a token, from the weights to the store:
//!
//! 1. [`config`] and [`weights`] read a Hugging Face model directory, or a GGUF file through [`gguf`]. Weights stay
//!    mapped, except matrices in f32.
//! 2. [`model`] computes prefill and decode steps. It knows the cache only as the trait [`kv::KvCache`].
//! 3. [`kv`] implements the trait: in memory, and as a sequence of a store.
//! 4. [`sampler`] draws tokens, and [`text`] converts them to text.
//!
//! [`convert`] makes GGUF files. [`generate`] continues a text across restarts. [`recall`] measures accuracy on recall
//! tasks. [`profile`] records which tokens queries attend to. [`clusters`] describes the clusters of a stored session.

#![deny(unsafe_code)]

pub mod budget;
pub mod chat_format;
pub mod cli;
pub mod clusters;
pub mod config;
pub mod convert;
pub mod generate;
pub mod gguf;
pub mod kv;
pub mod model;
pub mod process;
pub mod profile;
pub mod random_model;
pub mod recall;
pub mod sampler;
pub mod text;
pub mod weights;

mod attention;
mod awake;
mod linear;
mod prompt_rows;
mod rope;
mod simd;
