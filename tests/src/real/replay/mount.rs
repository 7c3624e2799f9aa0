//! Loop devices and mounts that go when their guard goes.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

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
    pub(super) at: PathBuf,
    /// Behind the mount: detached after it.
    _device: Loop,
}

impl Mounted {
    pub(super) fn new(device: Loop, file_system: &str, at: &Path) -> Result<Self, String> {
        // A second file system with the same identity is a copy of the first, here on purpose.
        let data = if file_system == "xfs" { c"nouuid" } else { c"" };
        let flags = rustix::mount::MountFlags::NOATIME;
        rustix::mount::mount(device.0.as_str(), at, file_system, flags, data)
            .map_err(|e| format!("mount {} ({file_system}) at {}: {e}", device.0, at.display()))?;
        Ok(Self { at: at.to_path_buf(), _device: device })
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
