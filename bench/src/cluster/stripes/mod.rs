//! `kvbench cluster place` and `kvbench cluster schedule` measure stored clusters on several devices.
//!
//! 1. Plant topics, and the topics of each step (`steps`). A cluster is a topic.
//! 2. Write a sequence to a store on several devices, and store its clusters (`rig`).
//! 3. Select the entries of each step (`selector`), and read the steps one after the other.
//! 4. Compare the time with what the busiest device allows, by its bytes and its requests (`result`).
//!
//! Invariant: requests and bytes depend on the arguments alone, if all devices have the same limits.

mod args;
mod place;
mod result;
mod rig;
mod schedule;
mod selector;
mod steps;

pub(crate) use args::{ClusterPlaceArgs, ClusterScheduleArgs};
pub(super) use place::run as run_place;
pub(super) use schedule::run as run_schedule;
