//! Stores on real drivers and file systems that are cut short: processes killed, block devices that lose what was not
//! flushed.

pub mod kill;
mod ledger;
mod mount;
pub mod replay;
mod worker;

pub use ledger::{Known, Line, check_store, learn};
pub use mount::Small;
pub use worker::{Job, work};

use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a check that panics has to say.
///
/// # Errors
/// Its message.
pub fn told<T>(check: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(check)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
    })
}
