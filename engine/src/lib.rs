//! stratakv: an embeddable, log-structured storage engine for the KV cache of language models.
#![deny(unsafe_code)]

pub mod attention;
pub mod error;

pub use error::{Error, ErrorKind, Result};
pub use stratakv_format::DType;
