//! Crash tests on real drivers and file systems.
//!
//! - `kill` kills processes at any moment and checks their stores.
//! - `replay` cuts the power of a block device that may lose everything since its last flush.
//!
//! Both run [`work`], which reports what it asks of the store and what the store acknowledges. [`check_store`] compares
//! a recovered store with these reports.

mod clusters;
mod content;
pub mod kill;
mod ledger;
mod mount;
pub mod replay;
mod summaries;
mod worker;

pub use ledger::{LedgerEntry, WorkerReport, apply_report, check_store};
pub use mount::SmallFileSystem;
pub use worker::{Job, work};

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a check and returns the message of its panic as an error.
///
/// # Errors
/// The check panics.
pub fn catch_panic<T>(check: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(check)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
    })
}
