//! The protocol of commits, checkpoints, superblocks, membership and recovery, as a model that is explored completely.
//!
//! The simulator runs the engine itself on random histories. This model is smaller than the engine, and every history
//! within its [`Scope`] is visited: every order of steps, every crash, and every subset of unsynced writes that lands.
//!
//! | part | models |
//! |---|---|
//! | `disk.rs` | superblock slots, manifest files and frames of each device, durable or in flight |
//! | `leader.rs` | the steps of a group commit, a checkpoint, a change of members, a close |
//! | `recovery.rs` | what an open decides from the bytes alone, and the steps of its repair |
//! | `model.rs` | the actions, and the properties after each open |
//! | `explore.rs` | breadth-first search over exact states |
//! | `mistake.rs` | steps that are left out or exchanged; the search must find each |
//!
//! What the model leaves out: bits that rot, names of files, the free space of devices, and segments. A frame has two
//! places instead, which its sequence uses alternately.
//!
//! These reductions keep it small. None hides a failure:
//! - A write waits for its sync before a crash is tried, because a crash with the write in flight may also lose it.
//! - A torn batch is an absent batch, because both fail their checksum. An absent one gives recovery fewer hints.
//! - A frame that did not land is torn, because its place then holds neither the new nor the old frame.
//! - The first commit is that of the first sequence if both have copies on both devices, because they are equal.
//! - Closed stores are compared in a normal form (`normal.rs`).

mod disk;
mod explore;
mod leader;
mod mistake;
mod model;
mod normal;
mod recovery;

pub use explore::{Counterexample, Explored, explore};
pub use mistake::Mistake;
pub use model::{Event, Property, ProtocolModel, Scope};
