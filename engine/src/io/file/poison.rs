//! The mark that a device must not be written any more.

use crate::events::event;
use std::sync::OnceLock;

use crate::error::{Error, ErrorKind, Result};

/// The mark that the first failed sync sets.
///
/// From then on the content of the device is unknown. A repeated sync could report success although the data is lost,
/// because the kernel reports a write-back error only once.
#[derive(Default)]
pub(crate) struct Poison(OnceLock<String>);

impl Poison {
    /// Sets the cause, unless there is one already.
    pub(crate) fn set(&self, cause: &Error) {
        if self.0.set(cause.to_string()).is_ok() {
            event!(error, cause = cause, "a device takes no more writes until the store is opened again");
        }
    }

    pub(crate) fn cause(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }

    /// Checks that the device may be written.
    ///
    /// # Errors
    /// `Poisoned`, with the first cause.
    pub(crate) fn check(&self) -> Result<()> {
        match self.cause() {
            None => Ok(()),
            Some(cause) => {
                let text =
                    format!("write: the device is read-only because a sync failed: {cause}; open the store again");
                Err(Error::new(ErrorKind::Poisoned, text))
            }
        }
    }
}
