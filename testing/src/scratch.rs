//! Scratch directories for devices, and copies of the devices of a store.

use crate::rng::Rng;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Makes a scratch directory, in memory if the machine has `/dev/shm`, because some tests copy and sync thousands of
/// times.
///
/// # Panics
/// No directory can be made.
#[must_use]
pub fn fast_scratch() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a scratch directory")
}

/// Prints what a test left out. Writes to the standard error itself, because the test runner hides what passing tests
/// print.
pub fn skipped(why: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}

/// Makes empty device directories under `root`.
///
/// # Panics
/// A directory cannot be made.
#[must_use]
pub fn device_dirs(root: &Path, count: usize) -> Vec<PathBuf> {
    let make = |index: usize| {
        let dir = root.join(format!("device-{index}"));
        fs::create_dir_all(&dir).expect("a device directory");
        restrict(&dir);
        dir
    };
    (0..count).map(make).collect()
}

fn restrict(dir: &Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).expect("permissions");
}

/// Returns the paths of all files below `dir`, relative to it and sorted.
///
/// # Panics
/// The directory cannot be listed.
#[must_use]
pub fn files(dir: &Path) -> Vec<PathBuf> {
    fn walk(root: &Path, dir: &Path, out: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).expect("a directory").map(|e| e.expect("an entry")) {
            let path = entry.path();
            if entry.file_type().expect("a file type").is_dir() {
                walk(root, &path, out);
            } else {
                out.push(path.strip_prefix(root).expect("inside").to_path_buf());
            }
        }
    }
    let mut out = Vec::new();
    walk(dir, dir, &mut out);
    out.sort();
    out
}

/// Copies device directories one file at a time, in an order that `rng` chooses.
///
/// # Errors
/// A file cannot be copied, for example because the store deleted it meanwhile.
///
/// # Panics
/// The target directories cannot be made.
pub fn try_copy_devices(dirs: &[PathBuf], to: &Path, rng: &mut Rng) -> std::io::Result<Vec<PathBuf>> {
    let targets = device_dirs(to, dirs.len());
    let mut all: Vec<(PathBuf, PathBuf)> = Vec::new();
    for (from, to) in dirs.iter().zip(&targets) {
        for name in ["manifest", "segments"] {
            if from.join(name).is_dir() {
                fs::create_dir_all(to.join(name)).expect("a directory");
                restrict(&to.join(name));
            }
        }
        all.extend(files(from).into_iter().map(|file| (from.join(&file), to.join(&file))));
    }
    while !all.is_empty() {
        let (from, to) = all.swap_remove(rng.below(all.len()));
        fs::copy(&from, &to)?;
    }
    Ok(targets)
}

/// Calls [`try_copy_devices`] for a store without a writer.
///
/// # Panics
/// The copy fails.
#[must_use]
pub fn copy_devices(dirs: &[PathBuf], to: &Path, rng: &mut Rng) -> Vec<PathBuf> {
    try_copy_devices(dirs, to, rng).expect("a copy")
}
