//! Limits of bytes per second on a block device, by the blkio controller of cgroup v1.

use anyhow::{Context, Result, bail};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Returns the reason why bytes per second cannot be limited here; none if they can.
pub(crate) fn limits_unavailable() -> Option<String> {
    throttle_group().err().map(|e| format!("{e:#}"))
}

/// Returns the directory of this process's group in the blkio hierarchy.
fn throttle_group() -> Result<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").context("read /proc/self/cgroup")?;
    let path = own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        controllers.split(',').any(|name| name == "blkio").then(|| path.trim_start_matches('/').to_owned())
    });
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
    let mounted = mounts.lines().find_map(|line| {
        let (front, back) = line.split_once(" - ")?;
        let mut back = back.split(' ');
        let is_blkio = back.next()? == "cgroup" && back.nth(1)?.split(',').any(|option| option == "blkio");
        is_blkio.then(|| front.split(' ').nth(4).map(PathBuf::from)).flatten()
    });
    let (Some(path), Some(mounted)) = (path, mounted) else {
        bail!("the kernel has no blkio controller of cgroup v1, which limits bytes per second");
    };
    let group = mounted.join(path);
    if !group.join("blkio.throttle.read_bps_device").exists() {
        bail!("{} has no blkio.throttle.read_bps_device: the kernel cannot limit bytes per second", group.display());
    }
    Ok(group)
}

/// Sets the limits of a block device in bytes per second. None removes a limit.
///
/// # Errors
/// The device does not exist, or a limit is given and the kernel cannot set it.
pub(super) fn set_limits(block: &Path, read_bps: Option<u64>, write_bps: Option<u64>) -> Result<()> {
    let number = fs::metadata(block).with_context(|| format!("stat {}", block.display()))?.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let group = match throttle_group() {
        Ok(group) => group,
        Err(e) if read_bps.is_some() || write_bps.is_some() => return Err(e),
        Err(_) => return Ok(()),
    };
    for (name, bps) in [("read", read_bps), ("write", write_bps)] {
        let file = group.join(format!("blkio.throttle.{name}_bps_device"));
        let line = format!("{major}:{minor} {}", bps.unwrap_or(0));
        fs::write(&file, &line).with_context(|| format!("write {line:?} to {}", file.display()))?;
    }
    Ok(())
}
