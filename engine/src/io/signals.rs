//! The signal that a write beyond the file size limit raises.

/// Keeps the file size limit from killing the process: if SIGXFSZ has its default action, ignores the signal from now
/// on.
///
/// The write then fails with EFBIG, which becomes `NoSpace`. A handler that the host installed stays.
pub(in crate::io) fn ignore_file_size_signal() {
    // SAFETY: sigaction with a null pointer for the new action only writes the old action to `old`. The struct is large
    // enough, and zeros are a valid value of it. SIG_IGN is a valid action.
    unsafe {
        let mut old: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGXFSZ, std::ptr::null(), &raw mut old) == 0 && old.sa_sigaction == libc::SIG_DFL {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        }
    }
}
