//! GGUF files: the format that llama.cpp keeps models in.
//!
//! | File | What it does |
//! |---|---|
//! | [`header`] | parses metadata and tensor descriptions, and checks all lengths and ranges |
//! | [`value`] | values of the metadata, which borrow the bytes of the file |
//! | [`kind`] | element types by number and name |
//! | `settings.rs` | the model's configuration from the metadata |
//! | `names.rs` | names of tensors in GGUF files and in Hugging Face models |
//! | `tokens.rs` | the tokenizer from the metadata |
//! | [`mod@write`] | writes a file |

pub mod header;
pub mod kind;
pub mod value;
pub mod write;

mod cursor;
mod names;
mod settings;
mod tokens;

pub use header::{GgufHeader, TensorEntry};
pub(crate) use names::{from_gguf, to_gguf};
pub(crate) use settings::model_config;
pub use tokens::tokenizer;
