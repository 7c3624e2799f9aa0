//! Loop devices, file systems and mounts of image files.
//!
//! Mounts are made and removed by system calls. Loop devices are attached by `losetup`, because its ioctls have no safe
//! wrapper, and found in `/sys/block`. File systems are made by `mkfs.ext4`.

use anyhow::{Context, Result, bail};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Returns the reason why devices cannot be made here; none if they can.
pub(crate) fn unavailable() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("loop devices and mounts need root".into());
    }
    for (tool, probe) in [("losetup", "--version"), ("mkfs.ext4", "-V")] {
        let ran =
            Command::new(tool).arg(probe).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        if !ran.is_ok_and(|status| status.success()) {
            return Some(format!("{tool} is not installed"));
        }
    }
    if !Path::new("/dev/loop-control").exists() {
        return Some("the kernel has no loop devices".into());
    }
    None
}

/// Attaches an image to a free loop device with direct I/O. Returns the block device.
///
/// # Errors
/// losetup fails.
pub(super) fn attach(image: &Path) -> Result<PathBuf> {
    let block = run_tool(Command::new("losetup").args(["--find", "--show", "--direct-io=on"]).arg(image))?;
    Ok(PathBuf::from(block.trim()))
}

/// Detaches a loop device.
///
/// # Errors
/// losetup fails.
pub(super) fn detach(block: &Path) -> Result<()> {
    run_tool(Command::new("losetup").arg("--detach").arg(block)).map(drop)
}

/// Makes an ext4 file system on a block device, and mounts it at `path`.
///
/// # Errors
/// mkfs.ext4 or the mount fails.
pub(super) fn format_and_mount(block: &Path, path: &Path) -> Result<()> {
    let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
    run_tool(Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0", "-E", options]).arg(block))?;
    mount(Some(block), path, Some("ext4"), MsFlags::MS_NOATIME, None::<&str>)
        .with_context(|| format!("mount {} at {}", block.display(), path.display()))
}

/// Unmounts a file system. One that stays busy for two seconds is detached, so that it ends with its last user.
///
/// # Errors
/// The kernel refuses.
pub(super) fn unmount(path: &Path) -> Result<()> {
    for _ in 0..20 {
        if umount2(path, MntFlags::empty()).is_ok() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    umount2(path, MntFlags::MNT_DETACH).with_context(|| format!("unmount {}", path.display()))
}

/// Returns the mount points below `directory`, the innermost first.
///
/// # Errors
/// `/proc/self/mountinfo` cannot be read.
pub(super) fn mounts_below(directory: &Path) -> Result<Vec<PathBuf>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(unescaped);
    let mut below: Vec<PathBuf> = points.filter(|point| point.starts_with(directory)).collect();
    below.reverse();
    Ok(below)
}

/// Returns the loop devices that an image is attached to.
///
/// # Errors
/// `/sys/block` cannot be listed.
pub(super) fn loops_of(image: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/block").context("list /sys/block")? {
        let entry = entry?;
        // Only an attached loop device has this file.
        let Ok(mut backing) = fs::read(entry.path().join("loop/backing_file")) else { continue };
        backing.pop_if(|last| *last == b'\n');
        if backing == image.as_os_str().as_bytes() {
            found.push(Path::new("/dev").join(entry.file_name()));
        }
    }
    Ok(found)
}

/// Decodes a path of `mountinfo`, in which blanks and backslashes are octal escapes.
fn unescaped(text: &str) -> PathBuf {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let octal = (first == b'\\').then(|| tail.get(..3)).flatten();
        let code = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match code {
            Some(byte) => (bytes.push(byte), rest = &tail[3..]).1,
            None => (bytes.push(first), rest = tail).1,
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

/// Runs a tool and returns what it printed.
fn run_tool(command: &mut Command) -> Result<String> {
    use std::os::unix::process::CommandExt;
    // The tool has its own process group, so that Ctrl-C reaches only this process, which then ends in order.
    command.process_group(0).stdin(Stdio::null());
    let output = command.output().with_context(|| format!("run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_unescaped() {
        assert_eq!(unescaped(r"/mnt/a\040b\134c"), PathBuf::from(r"/mnt/a b\c"));
        assert_eq!(unescaped(r"/mnt/end\04"), PathBuf::from(r"/mnt/end\04"));
    }
}
