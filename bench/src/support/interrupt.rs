//! Ctrl-C and SIGTERM end a run in order.

use anyhow::{Context, Result, bail};
use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Installs the handler of Ctrl-C and SIGTERM.
///
/// The first signal makes [`check_interrupt`] fail, so that the run removes its files. The second one ends the process.
pub(crate) fn install_interrupt() -> Result<()> {
    let on_signal = || {
        if INTERRUPTED.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        eprintln!("kvbench: interrupted, removing the files of this run");
    };
    ctrlc::set_handler(on_signal).context("install the handler of Ctrl-C")
}

/// Returns whether a signal has arrived.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Fails once a signal has arrived.
pub(crate) fn check_interrupt() -> Result<()> {
    if interrupted() { bail!("interrupted") } else { Ok(()) }
}
