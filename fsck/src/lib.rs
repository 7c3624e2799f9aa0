//! kvfsck checks stratakv stores and exported sequences. It never writes.
//!
//! kvfsck is a second reader of the format: it shares the crate `stratakv-format` with the engine, and nothing else.
//! A mistake of the engine's reader is therefore not repeated here.
//!
//! [`check`] reads every live byte of a store and reports each deviation from the format as a [`Finding`]:
//!
//! 1. Open and lock the device directories, and compare their superblocks (`devices`).
//! 2. Compare all copies of the manifest generation in force, batch by batch (`manifest`).
//! 3. Replay the records of the manifest into the state of the store (`replay`).
//! 4. Check the segment files, and every frame in them, byte by byte (`segments`, `frames`).
//! 5. Check that frames hold every committed token, summary, token id and adapter byte (`sequences`, `adapters`).
//! 6. Check the clusters in derived frames: directories, pages and covered tokens (`clusters`).
//! 7. List the pools, and sum up what the store holds (`pool_map`, `stats`).
//!
//! [`check_export`] does the same for the file of one exported sequence (`export`).
//!
//! The program holds shared locks on the device directories while it reads, so a writer cannot open the store.
//!
//! ```no_run
//! let report = kvfsck::check(&["/nvme0/kv".into(), "/nvme1/kv".into()], &kvfsck::Options::default(), &())?;
//! for finding in &report.findings {
//!     println!("{finding}");
//! }
//! # Ok::<(), kvfsck::CheckError>(())
//! ```
#![forbid(unsafe_code)]

mod adapters;
mod check;
pub mod cli;
mod cluster_entries;
mod cluster_states;
mod clusters;
mod devices;
mod elements;
mod error;
mod export;
mod finding;
mod frames;
mod io;
mod lost_frames;
mod manifest;
mod named_pages;
mod options;
mod overlay;
mod planes;
mod pool_map;
mod replay;
mod report;
mod segments;
mod sequences;
mod stats;
mod window;

pub use check::check;
pub use error::{CheckError, EXIT_CLEAN, EXIT_DAMAGE, EXIT_IN_USE, EXIT_IO, EXIT_UNSUPPORTED, EXIT_USAGE};
pub use export::{ExportInfo, ExportReport, check_export, check_reader};
pub use finding::{Code, Finding, Severity};
pub use options::Options;
pub use pool_map::{PoolFrame, PoolMap, PoolSegment, StoredDirectory};
pub use report::{CheckTotals, ClusterTotals, Progress, Report};
pub use stats::{ClusterStats, DeviceStats, StoreStats};
