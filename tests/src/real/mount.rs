//! Loop devices and mounts that go when their guard goes.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// Runs a program; its standard output.
pub(super) fn call(program: &str, arguments: &[&str]) -> Result<String, String> {
    let out = Command::new(program).args(arguments).output().map_err(|e| format!("{program}: {e}"))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned());
    }
    Err(format!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&out.stderr).trim()))
}

/// Tries until it works, for about two seconds.
fn insist(mut attempt: impl FnMut() -> Result<(), String>) -> Result<(), String> {
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
    /// One for this file, with sectors of a page.
    ///
    /// # Errors
    /// It cannot be made.
    pub(super) fn new(file: &Path) -> Result<Self, String> {
        let file = file.to_string_lossy();
        call("losetup", &["--find", "--show", "--direct-io=on", "--sector-size", "4096", &file]).map(Self)
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        if let Err(e) = insist(|| call("losetup", &["--detach", &self.0]).map(|_| ())) {
            eprintln!("{} stays: {e}", self.0);
        }
    }
}

/// A mounted file system.
pub(super) struct Mounted {
    /// Where.
    pub(super) at: PathBuf,
    /// Behind the mount: detached after it.
    _device: Loop,
}

impl Mounted {
    /// Mounts what is on a device.
    ///
    /// # Errors
    /// It cannot be mounted.
    pub(super) fn new(device: Loop, file_system: &str, at: &Path) -> Result<Self, String> {
        // A second file system with the same identity is a copy of the first, here on purpose.
        let data = if file_system == "xfs" { c"nouuid" } else { c"" };
        let flags = rustix::mount::MountFlags::NOATIME;
        rustix::mount::mount(device.0.as_str(), at, file_system, flags, data)
            .map_err(|e| format!("mount {} ({file_system}) at {}: {e}", device.0, at.display()))?;
        Ok(Self { at: at.to_path_buf(), _device: device })
    }
}

/// A small file system in a file, which goes with its guard.
pub struct Small {
    mounted: Option<Mounted>,
    file_system: String,
    place: TempDir,
}

impl Small {
    /// Makes and mounts one of so many bytes.
    ///
    /// # Errors
    /// Why it cannot be had here.
    pub fn new(file_system: &str, bytes: u64) -> Result<Self, String> {
        if !super::replay::possible()?.iter().any(|found| found == file_system) {
            return Err(format!("there is no mkfs.{file_system}"));
        }
        let failed = |e: std::io::Error| format!("a scratch file: {e}");
        let place = tempfile::tempdir().map_err(failed)?;
        let mut small = Self { mounted: None, file_system: file_system.into(), place };
        std::fs::create_dir(small.at()).map_err(failed)?;
        std::fs::File::create(small.image()).and_then(|file| file.set_len(bytes)).map_err(failed)?;
        // On the device: the sectors of the file are smaller.
        let device = Loop::new(&small.image())?;
        call(&format!("mkfs.{file_system}"), &["-q", &device.0])?;
        small.mounted = Some(Mounted::new(device, file_system, &small.at())?);
        Ok(small)
    }

    /// The file behind it.
    #[must_use]
    pub fn image(&self) -> PathBuf {
        self.place.path().join("image")
    }

    /// Where it is mounted.
    #[must_use]
    pub fn at(&self) -> PathBuf {
        self.place.path().join("mounted")
    }

    /// Mounts it again.
    ///
    /// # Errors
    /// It cannot be mounted.
    pub fn mount(&mut self) -> Result<(), String> {
        self.mounted = None;
        self.mounted = Some(Mounted::new(Loop::new(&self.image())?, &self.file_system, &self.at())?);
        Ok(())
    }

    /// What an error of its own does to ext4: it is read-only, whatever is open.
    ///
    /// # Errors
    /// It goes on.
    pub fn abort(&self) -> Result<(), String> {
        call("mount", &["-o", "remount,abort", &self.at().to_string_lossy()]).map(|_| ())
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Before its directory.
        self.mounted = None;
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmount = |flags| rustix::mount::unmount(&self.at, flags).map_err(|e| e.to_string());
        if insist(|| unmount(rustix::mount::UnmountFlags::empty())).is_err() {
            let _ = unmount(rustix::mount::UnmountFlags::DETACH);
        }
    }
}
