//! Limits of bytes and requests per second on a block device, by the blkio controller of cgroup v1.

use crate::devices::limits::DeviceLimits;
use anyhow::{Context, Result, bail};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Returns the reason why a device cannot be limited here; none if it can.
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
        bail!("the kernel has no blkio controller of cgroup v1, which limits bytes and requests per second");
    };
    let group = mounted.join(path);
    for (file, _) in throttle_lines((0, 0), &DeviceLimits::NONE) {
        if !group.join(file).exists() {
            bail!("{} has no {file}: the kernel cannot limit a device", group.display());
        }
    }
    Ok(group)
}

/// Returns the files of a group and the line that each takes for a device of this number. A 0 removes a limit.
fn throttle_lines((major, minor): (u32, u32), limits: &DeviceLimits) -> [(&'static str, String); 4] {
    let files = [
        ("blkio.throttle.read_bps_device", limits.read_bps),
        ("blkio.throttle.write_bps_device", limits.write_bps),
        ("blkio.throttle.read_iops_device", limits.read_iops),
        ("blkio.throttle.write_iops_device", limits.write_iops),
    ];
    files.map(|(file, limit)| (file, format!("{major}:{minor} {}", limit.unwrap_or(0))))
}

/// Sets the limits of a block device, and removes those that are none.
///
/// # Errors
/// The device does not exist, or a limit is given and the kernel cannot set it.
pub(super) fn set_limits(block: &Path, limits: &DeviceLimits) -> Result<()> {
    let number = fs::metadata(block).with_context(|| format!("stat {}", block.display()))?.rdev();
    let group = match throttle_group() {
        Ok(group) => group,
        Err(e) if *limits != DeviceLimits::NONE => return Err(e),
        Err(_) => return Ok(()),
    };
    for (file, line) in throttle_lines((rustix::fs::major(number), rustix::fs::minor(number)), limits) {
        let file = group.join(file);
        fs::write(&file, &line).with_context(|| format!("write {line:?} to {}", file.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_become_one_line_per_file_of_the_group() {
        let limits = DeviceLimits { read_bps: Some(100_000_000), write_iops: Some(300), ..DeviceLimits::NONE };
        let expected = [
            ("blkio.throttle.read_bps_device", "7:3 100000000"),
            ("blkio.throttle.write_bps_device", "7:3 0"),
            ("blkio.throttle.read_iops_device", "7:3 0"),
            ("blkio.throttle.write_iops_device", "7:3 300"),
        ];
        assert_eq!(throttle_lines((7, 3), &limits), expected.map(|(file, line)| (file, line.to_owned())));
    }
}
