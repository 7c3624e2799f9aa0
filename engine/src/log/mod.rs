//! The log: frames in segments, and the manifest that says which of them exist.

mod commit;
mod copies;
mod core;
mod devices;
mod draft;
mod frame;
mod group;
mod late;
mod manifest;
mod members;
mod pace;
mod space;

pub(crate) use commit::{CommitRequest, Committer, keep_spare};
pub(crate) use copies::{CopyChange, Place, places};
pub(crate) use core::{Claim, CopyAt, FRAMES_IN_FLIGHT, StoreInner, copies_of};
pub(crate) use devices::{CONTROL_BYTES, Device, Devices, Identity, exhausted};
pub(crate) use draft::{AdapterPart, Draft, Ends, RecordBytes, SequenceIdentity, Tail, TailRows};
pub(crate) use frame::{WrittenFrame, front_limit, write as write_frame};
pub(crate) use late::{Latencies, Suspects};
pub(crate) use manifest::{GenerationStart, ManifestLog, ManifestPlace, copies_for};
pub(crate) use members::{DeviceList, with_heirs};
pub(crate) use pace::Pace;
pub(crate) use space::{Space, Writer, allocate, open_ahead};

pub(crate) use crate::io::seams::{random_u64, unix_ms};
