//! Stores on disk and on simulated devices: the helpers of `stratakv-testing`, and runs of kvfsck.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stratakv::sim::Geometry;
use stratakv_testing::rng::Rng;

pub use stratakv_testing::scratch::{copy_devices, device_dirs, fast_scratch, files, skipped, try_copy_devices};
pub use stratakv_testing::small_options;

/// The pages of a manifest file on devices of [`small_geometry`].
pub const MANIFEST_PAGES: u64 = 12;

/// Returns simulated devices of 64 MiB whose manifest is full after few commits.
#[must_use]
pub fn small_geometry(devices: usize) -> Geometry {
    let device_bytes = 64 << 20;
    Geometry {
        devices,
        device_bytes,
        manifest_pages: MANIFEST_PAGES,
        batch_bytes: 12_000,
        whole: false,
        open_files: None,
    }
}

/// Flips a bit of every 1231st byte of the first device's segments, without zeros, each on a copy of the devices below
/// `root`. Calls `each` with the offset and the directories of the copy.
///
/// # Panics
/// A file cannot be read, copied or written.
pub fn each_flipped_byte(root: &Path, dirs: &[PathBuf], mut each: impl FnMut(usize, &[PathBuf])) {
    let mut rng = Rng(3);
    for segment in files(&dirs[0]).into_iter().filter(|file| file.starts_with("segments")) {
        let whole = std::fs::read(dirs[0].join(&segment)).expect("a file");
        for at in (8192..whole.len() - 4096).step_by(1231).filter(|at| whole[*at] != 0) {
            let copy = root.join(format!("copy-{at}"));
            let copied = copy_devices(dirs, &copy, &mut rng);
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            std::fs::write(copied[0].join(&segment), bytes).expect("written");
            each(at, &copied);
            std::fs::remove_dir_all(copy).expect("removed");
        }
    }
}

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
