//! A set of devices of a known speed. Each is an image file, a loop device, an ext4 file system and limits.
//!
//! The state is read from the system: images in the directory, loop devices of these images, mounts below the
//! directory. There is no state file, so [`take_down`] also finds devices that an earlier run left partly made.

use crate::devices::limits::{DeviceLimits, host_read_iops, host_warning};
use crate::devices::mounts::{attach, detach, format_and_mount, loops_of, mounts_below, unmount};
use crate::devices::throttle::set_limits;
use crate::support::directory::make_private;
use crate::support::interrupt::check_interrupt;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};

/// The directory below `--dir` that holds images and mount points, and nothing else.
const SET_DIRECTORY: &str = "kvbench-devices";
/// The largest number of devices in a set.
const COUNT_MAX: u32 = 16;

/// The devices that a set shall have.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSpec {
    pub(crate) count: u32,
    /// Bytes of each device.
    pub(crate) bytes: u64,
    /// Limits of each device.
    pub(crate) limits: DeviceLimits,
    /// One device and its own bytes per second, for reads and for writes.
    pub(crate) slow: Option<(u32, u64)>,
}

impl DeviceSpec {
    /// Returns the limits of one device.
    pub(super) fn limits_of(&self, index: u32) -> DeviceLimits {
        let own = self.slow.filter(|(slow, _)| *slow == index).map(|(_, bps)| bps);
        DeviceLimits { read_bps: own.or(self.limits.read_bps), write_bps: own.or(self.limits.write_bps), ..self.limits }
    }

    fn check(&self) -> Result<()> {
        if self.count == 0 || self.count > COUNT_MAX {
            bail!("--count {}: from 1 to {COUNT_MAX}", self.count);
        }
        if let Some((slow, _)) = self.slow.filter(|(slow, _)| *slow >= self.count) {
            bail!("--slow {slow}: the devices have the numbers 0 to {}", self.count - 1);
        }
        if self.bytes < 16 << 20 {
            bail!("--size {}: a file system needs at least 16 MiB", self.bytes);
        }
        Ok(())
    }
}

/// Devices that exist. They are taken down when dropped.
pub(crate) struct DeviceSet {
    directory: PathBuf,
    pub(crate) list: Vec<TestDevice>,
    /// Direct reads of 4 KiB per second that the host completes without limits; none if that was not measured.
    pub(crate) host_read_iops: Option<u64>,
}

/// One device: a mounted file system.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TestDevice {
    /// The mount point, with mode 0700. It is empty except for `lost+found`.
    pub(crate) path: PathBuf,
    /// The block device.
    #[serde(rename = "loop")]
    pub(crate) block: PathBuf,
}

impl DeviceSet {
    /// Makes the devices of `spec` below `dir`. If one fails, those made before it are taken down.
    ///
    /// # Errors
    /// Devices exist there already, the file system is too small, a step fails, or the run was interrupted.
    pub(crate) fn up(dir: &Path, spec: &DeviceSpec) -> Result<Self> {
        spec.check()?;
        fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
        let stat = rustix::fs::statvfs(dir).with_context(|| format!("--dir {}", dir.display()))?;
        let (free, needed) =
            (stat.f_bavail.saturating_mul(stat.f_frsize), u64::from(spec.count).saturating_mul(spec.bytes));
        if free < needed.saturating_add(needed / 16) {
            let dir = dir.display();
            bail!("--dir {dir}: the devices need {needed} bytes, but only {free} are free; give a smaller --size");
        }
        let directory = set_directory(dir)?;
        let context = || format!("make devices below {}; `kvbench devices down` removes existing ones", dir.display());
        make_private(&directory).with_context(context)?;
        let mut devices = Self { directory, list: Vec::new(), host_read_iops: None };
        for index in 0..spec.count {
            check_interrupt()?;
            let device = make(&devices.directory, index, spec.bytes).with_context(|| format!("make device {index}"))?;
            devices.list.push(device);
        }
        devices.measure_host(spec.bytes, &spec.limits)?;
        for index in 0..spec.count {
            devices.limit(index as usize, &spec.limits_of(index))?;
        }
        check_interrupt()?;
        Ok(devices)
    }

    /// Measures the reads that the host completes, and warns if they are fewer than `limits` let all devices have. Does
    /// nothing if read requests are not limited. The devices, of `bytes` bytes each, have no limits yet.
    ///
    /// # Errors
    /// The first device cannot be written or read, or the run was interrupted.
    pub(crate) fn measure_host(&mut self, bytes: u64, limits: &DeviceLimits) -> Result<()> {
        if let (Some(read_iops), Some(first)) = (limits.read_iops, self.list.first()) {
            let host = host_read_iops(&first.path, bytes).context("measure the host's reads")?;
            self.host_read_iops = Some(host);
            if let Some(warning) = host_warning(host, read_iops, self.list.len() as u32) {
                eprintln!("kvbench: {warning}");
            }
        }
        Ok(())
    }

    /// Sets the limits of one device, and removes those that are none.
    ///
    /// # Errors
    /// The kernel cannot set a limit.
    pub(crate) fn limit(&self, index: usize, limits: &DeviceLimits) -> Result<()> {
        set_limits(&self.list[index].block, limits)
    }

    /// Leaves the devices in place for later commands.
    pub(crate) fn keep(mut self) {
        self.directory = PathBuf::new();
    }

    /// Takes the devices down.
    ///
    /// # Errors
    /// A device is in use.
    pub(crate) fn down(mut self) -> Result<()> {
        take_down(&std::mem::take(&mut self.directory))
    }
}

impl Drop for DeviceSet {
    fn drop(&mut self) {
        if !self.directory.as_os_str().is_empty()
            && let Err(e) = take_down(&self.directory)
        {
            eprintln!("kvbench: {e:#}");
        }
    }
}

/// Returns the directory of the set below `dir`, without symbolic links, because the kernel names mounts and images so.
///
/// # Errors
/// `dir` does not exist.
pub(crate) fn set_directory(dir: &Path) -> Result<PathBuf> {
    let dir = dir.canonicalize().with_context(|| format!("--dir {}", dir.display()))?;
    Ok(dir.join(SET_DIRECTORY))
}

fn make(directory: &Path, index: u32, bytes: u64) -> Result<TestDevice> {
    let (image, path) = (directory.join(format!("{index}.img")), directory.join(index.to_string()));
    let file = fs::File::create_new(&image).with_context(|| format!("make {}", image.display()))?;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)
        .with_context(|| format!("preallocate {bytes} bytes for {}", image.display()))?;
    drop(file);
    let block = attach(&image)?;
    make_private(&path)?;
    format_and_mount(&block, &path)?;
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
    Ok(TestDevice { path, block })
}

/// Unmounts, detaches and removes all of a set. It continues after an error and returns the first one.
///
/// # Errors
/// A device is in use, or a file cannot be removed.
pub(crate) fn take_down(directory: &Path) -> Result<()> {
    if !directory.exists() {
        return Ok(());
    }
    let mut first = Ok(());
    let mut keep = |outcome: Result<()>| {
        if let Err(e) = outcome
            && first.is_ok()
        {
            first = Err(e);
        }
    };
    for path in mounts_below(directory)? {
        keep(unmount(&path));
    }
    let entries = fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))?;
    let entries: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    for image in entries.iter().filter(|path| path.extension().is_some_and(|e| e == "img")) {
        for block in loops_of(image)? {
            // The kernel reuses the device number, so its limits must not stay.
            keep(set_limits(&block, &DeviceLimits::NONE));
            keep(detach(&block));
        }
        keep(fs::remove_file(image).with_context(|| format!("remove {}", image.display())));
    }
    for path in entries.iter().filter(|path| path.is_dir()) {
        // This removes empty directories only: the files of a mount that is still busy stay.
        keep(fs::remove_dir(path).with_context(|| format!("remove {}", path.display())));
    }
    keep(fs::remove_dir(directory).with_context(|| format!("remove {}", directory.display())));
    first
}
