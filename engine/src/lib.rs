//! stratakv: an embeddable, log-structured storage engine for the KV cache of language models.
#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "unsafe lives here: SIMD kernels")]
pub mod attention;
#[allow(dead_code, unsafe_code, reason = "unsafe lives here; drivers and the simulator use parts of it each")]
mod device;
pub mod error;
mod index;
mod layout;
mod log;
#[allow(dead_code, reason = "callers grow into it")]
pub mod metrics;
mod options;
mod plan;
mod read;
mod reclaim;
mod recover;
mod select;
mod sequence;
#[allow(dead_code, reason = "callers grow into it")]
mod shard;
mod store;
mod summary;

pub use device::PageBacking;
pub use error::{Error, ErrorKind, Result};
pub use layout::{Element, KvLayout, KvLayoutBuilder, LayerSpec, TensorView};
pub use options::{
    Budget, ByteSize, ChecksumChoice, DriverChoice, Durability, SequenceOptions, StoreOptions, Summary,
};
pub use read::{ReadBatch, ReadTicket, ViewBlocks, attend};
pub use select::{SelectOptions, View};
pub use sequence::Sequence;
pub use store::{SequenceInfo, Store, StoreStatus};
pub use stratakv_format::{DType, DeviceIndex, SequenceId};
