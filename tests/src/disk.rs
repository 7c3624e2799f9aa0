//! Stores on disk: the helpers of `stratakv-testing`, and runs of kvfsck.

use std::path::PathBuf;
use std::time::{Duration, Instant};

pub use stratakv_testing::scratch::{copy_devices, device_dirs, fast_scratch, files, skipped, try_copy_devices};
pub use stratakv_testing::small_options;

/// Runs kvfsck. Waits up to ten seconds for the lock, because the last writes of a killed process hold it a moment
/// longer.
///
/// # Panics
/// kvfsck cannot check the store at all.
#[must_use]
pub fn check(dirs: &[PathBuf]) -> kvfsck::Report {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match kvfsck::check(dirs, &kvfsck::Options::default(), &()) {
            Ok(report) => return report,
            Err(kvfsck::CheckError::InUse { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(e) => panic!("kvfsck: {e}"),
        }
    }
}

/// Runs kvfsck and requires a clean report.
///
/// # Panics
/// kvfsck finds something.
pub fn assert_clean(dirs: &[PathBuf], when: &str) {
    let report = check(dirs);
    assert!(report.clean && report.exit_code == kvfsck::EXIT_CLEAN, "kvfsck {when}:\n{}", report.to_text());
}
