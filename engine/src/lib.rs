//! stratakv: an embeddable, log-structured storage engine for the KV cache of language models.
#![deny(unsafe_code)]

#[allow(dead_code, unsafe_code, reason = "unsafe lives here; drivers and the simulator use parts of it each")]
mod device;
pub mod error;
#[allow(dead_code, reason = "callers grow into it")]
pub mod metrics;
#[allow(dead_code, reason = "callers grow into it")]
mod shard;

pub use device::PageBacking;
pub use error::{Error, ErrorKind, Result};
pub use stratakv_format::DType;
