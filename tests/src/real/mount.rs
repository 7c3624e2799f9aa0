//! Guards of loop devices and mounts. Dropping a guard detaches or unmounts.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// Runs a program and returns its standard output.
pub(super) fn call(program: &str, arguments: &[&str]) -> Result<String, String> {
    let out = Command::new(program).args(arguments).output().map_err(|e| format!("{program}: {e}"))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned());
    }
    Err(format!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&out.stderr).trim()))
}

/// Repeats `attempt` until it succeeds, for about two seconds.
fn retry(mut attempt: impl FnMut() -> Result<(), String>) -> Result<(), String> {
    let mut last = Ok(());
    for _ in 0..200 {
        last = attempt();
        if last.is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    last
}

/// A loop device.
pub(super) struct Loop(pub(super) String);

impl Loop {
    /// Attaches a loop device to this file, with sectors of 4096 bytes.
    ///
    /// # Errors
    /// `losetup` fails.
    pub(super) fn new(file: &Path) -> Result<Self, String> {
        let file = file.to_string_lossy();
        call("losetup", &["--find", "--show", "--direct-io=on", "--sector-size", "4096", &file]).map(Self)
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        if let Err(e) = retry(|| call("losetup", &["--detach", &self.0]).map(|_| ())) {
            eprintln!("{} remains attached: {e}", self.0);
        }
    }
}

/// A mounted file system.
pub(super) struct Mounted {
    /// The mount point.
    pub(super) at: PathBuf,
    /// The mounted device. It is detached after the unmount.
    _device: Loop,
}

impl Mounted {
    /// Mounts the file system on a device.
    ///
    /// # Errors
    /// The mount fails.
    pub(super) fn new(device: Loop, file_system: &str, at: &Path) -> Result<Self, String> {
        // An image has the UUID of the file system that it is a copy of, which xfs refuses by default.
        let data = if file_system == "xfs" { c"nouuid" } else { c"" };
        let flags = rustix::mount::MountFlags::NOATIME;
        rustix::mount::mount(device.0.as_str(), at, file_system, flags, data)
            .map_err(|e| format!("mount {} ({file_system}) at {}: {e}", device.0, at.display()))?;
        Ok(Self { at: at.to_path_buf(), _device: device })
    }
}

/// A small file system in a file. Dropping it unmounts it and deletes the file.
pub struct SmallFileSystem {
    mounted: Option<Mounted>,
    file_system: String,
    place: TempDir,
}

impl SmallFileSystem {
    /// Makes and mounts a file system of `bytes` bytes.
    ///
    /// # Errors
    /// The reason why this machine cannot do so.
    pub fn new(file_system: &str, bytes: u64) -> Result<Self, String> {
        if !super::replay::possible()?.iter().any(|found| found == file_system) {
            return Err(format!("mkfs.{file_system} is missing"));
        }
        let failed = |e: std::io::Error| format!("a scratch file: {e}");
        let place = tempfile::tempdir().map_err(failed)?;
        let mut small = Self { mounted: None, file_system: file_system.into(), place };
        std::fs::create_dir(small.at()).map_err(failed)?;
        std::fs::File::create(small.image()).and_then(|file| file.set_len(bytes)).map_err(failed)?;
        // mkfs runs on the loop device, because the sectors of the file itself are smaller.
        let device = Loop::new(&small.image())?;
        call(&format!("mkfs.{file_system}"), &["-q", &device.0])?;
        small.mounted = Some(Mounted::new(device, file_system, &small.at())?);
        Ok(small)
    }

    /// Returns the file that holds the file system.
    #[must_use]
    pub fn image(&self) -> PathBuf {
        self.place.path().join("image")
    }

    /// Returns the mount point.
    #[must_use]
    pub fn at(&self) -> PathBuf {
        self.place.path().join("mounted")
    }

    /// Unmounts the file system and mounts it again.
    ///
    /// # Errors
    /// The mount fails.
    pub fn mount(&mut self) -> Result<(), String> {
        self.mounted = None;
        self.mounted = Some(Mounted::new(Loop::new(&self.image())?, &self.file_system, &self.at())?);
        Ok(())
    }

    /// Makes the file system read-only although files are open, as ext4 does after an internal error.
    ///
    /// # Errors
    /// The remount fails.
    pub fn abort(&self) -> Result<(), String> {
        call("mount", &["-o", "remount,abort", &self.at().to_string_lossy()]).map(|_| ())
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        // The unmount must precede the removal of the directory.
        self.mounted = None;
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmount = |flags| rustix::mount::unmount(&self.at, flags).map_err(|e| e.to_string());
        if retry(|| unmount(rustix::mount::UnmountFlags::empty())).is_err() {
            let _ = unmount(rustix::mount::UnmountFlags::DETACH);
        }
    }
}
