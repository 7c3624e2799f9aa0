//! `kvbench devices`: disks of a known speed, made of files: image, loop device, ext4, and a limit of bytes per second.
//!
//! What exists is read off the system (images in the directory, loop devices of these images, mounts of these loop devices),
//! not off a note of ours: whatever an earlier run left half-made, `down` finds.

use crate::cli::{DevicesCommand, DownArgs, UpArgs};
use crate::report::print;
use crate::work::check_interrupt;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The directory below `--dir` that holds images and mount points, and nothing else.
const HOME: &str = "kvbench-devices";
/// Devices that one set may have.
pub(crate) const COUNT_MAX: u32 = 16;

/// What a set of devices is to be.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) count: u32,
    pub(crate) bytes: u64,
    /// Bytes per second; none for no limit.
    pub(crate) read_bps: Option<u64>,
    pub(crate) write_bps: Option<u64>,
    /// A device with a limit of its own, for reads and writes.
    pub(crate) slow: Option<(u32, u64)>,
}

/// Devices that exist. Dropping it takes them down.
pub(crate) struct Devices {
    home: PathBuf,
    pub(crate) list: Vec<Device>,
}

/// One device: a mounted file system of its own.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Device {
    /// Where it is mounted: empty but for `lost+found`, mode 0700.
    pub(crate) path: PathBuf,
    /// Its block device.
    #[serde(rename = "loop")]
    pub(crate) block: PathBuf,
}

pub(crate) fn run(command: &DevicesCommand) -> Result<()> {
    match command {
        DevicesCommand::Up(args) => up(args),
        DevicesCommand::Down(args) => down(args),
    }
}

fn up(args: &UpArgs) -> Result<()> {
    if let Some(why) = missing() {
        return skipped(args.json, &why);
    }
    let spec = Spec {
        count: args.count,
        bytes: args.size.0,
        read_bps: args.read_bps.map(|b| b.0),
        write_bps: args.write_bps.map(|b| b.0),
        slow: args.slow,
    };
    let devices = Devices::up(&args.dir, &spec)?;
    for device in &devices.list {
        print(args.json, &device.path.display().to_string(), device)?;
    }
    devices.keep();
    Ok(())
}

fn down(args: &DownArgs) -> Result<()> {
    if let Some(why) = missing() {
        return skipped(args.json, &why);
    }
    take_down(&home(&args.dir)?)
}

#[derive(Serialize)]
struct Skipped<'a> {
    skipped: &'a str,
}

/// Says on stdout why there is nothing to do here.
pub(crate) fn skipped(json: bool, why: &str) -> Result<()> {
    if json {
        return print(true, "", &Skipped { skipped: why });
    }
    println!("skipped: {why}");
    Ok(())
}

/// Why no device can be made here.
pub(crate) fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("loop devices and mounts take root".into());
    }
    for (tool, probe) in
        [("losetup", "--version"), ("mkfs.ext4", "-V"), ("mount", "--version"), ("umount", "--version")]
    {
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

/// The directory of this process's block I/O limits (cgroup v1).
fn throttle_group() -> Result<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").context("/proc/self/cgroup")?;
    let path = own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        controllers.split(',').any(|name| name == "blkio").then(|| path.trim_start_matches('/').to_owned())
    });
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("/proc/self/mountinfo")?;
    let mounted = mounts.lines().find_map(|line| {
        let (front, back) = line.split_once(" - ")?;
        let mut back = back.split(' ');
        let is_it = back.next()? == "cgroup" && back.nth(1)?.split(',').any(|option| option == "blkio");
        is_it.then(|| front.split(' ').nth(4).map(PathBuf::from)).flatten()
    });
    let (Some(path), Some(mounted)) = (path, mounted) else {
        bail!("no blkio controller of cgroup v1, which limits the bytes per second");
    };
    let group = mounted.join(path);
    if !group.join("blkio.throttle.read_bps_device").exists() {
        bail!("{} has no blkio.throttle.read_bps_device: the kernel cannot limit bytes per second", group.display());
    }
    Ok(group)
}

/// Why bytes per second cannot be limited here.
pub(crate) fn throttle_missing() -> Option<String> {
    throttle_group().err().map(|e| format!("{e:#}"))
}

impl Devices {
    /// Makes the devices of `spec` below `dir`. What was made of them is taken down again when one fails.
    ///
    /// # Errors
    /// There are some already, no space, or a tool fails.
    pub(crate) fn up(dir: &Path, spec: &Spec) -> Result<Self> {
        if spec.count == 0 || spec.count > COUNT_MAX {
            bail!("--count {}: from 1 to {COUNT_MAX}", spec.count);
        }
        if let Some((slow, _)) = spec.slow.filter(|(slow, _)| *slow >= spec.count) {
            bail!("--slow {slow}: there are devices 0 to {}", spec.count - 1);
        }
        if spec.bytes < 16 << 20 {
            bail!("--size {}: at least 16 MiB for a file system", spec.bytes);
        }
        fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
        let stat = rustix::fs::statvfs(dir).with_context(|| dir.display().to_string())?;
        let (free, needed) =
            (stat.f_bavail.saturating_mul(stat.f_frsize), u64::from(spec.count).saturating_mul(spec.bytes));
        if free < needed.saturating_add(needed / 16) {
            bail!("{}: {needed} bytes are needed, {free} are free; give a smaller --size", dir.display());
        }
        let home = home(dir)?;
        let made = fs::DirBuilder::new().mode(0o700).create(&home);
        made.with_context(|| format!("make {} (kvbench devices down removes what stands there)", home.display()))?;
        let mut devices = Self { home, list: Vec::new() };
        for index in 0..spec.count {
            check_interrupt()?;
            let device = make(&devices.home, index, spec.bytes).with_context(|| format!("device {index}"))?;
            let own = spec.slow.filter(|(slow, _)| *slow == index).map(|(_, bps)| bps);
            devices.list.push(device);
            devices.limit(index as usize, own.or(spec.read_bps), own.or(spec.write_bps))?;
        }
        check_interrupt()?;
        Ok(devices)
    }

    /// Sets the limits of one device, in bytes per second; none takes a limit away.
    pub(crate) fn limit(&self, index: usize, read_bps: Option<u64>, write_bps: Option<u64>) -> Result<()> {
        limit(&self.list[index].block, read_bps, write_bps)
    }

    /// Leaves them up.
    fn keep(mut self) {
        self.home = PathBuf::new();
    }

    /// Takes them down.
    ///
    /// # Errors
    /// One is in use.
    pub(crate) fn down(mut self) -> Result<()> {
        take_down(&std::mem::take(&mut self.home))
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        if !self.home.as_os_str().is_empty()
            && let Err(e) = take_down(&self.home)
        {
            eprintln!("kvbench: {e:#}");
        }
    }
}

fn home(dir: &Path) -> Result<PathBuf> {
    // Without links: mounts and loop devices are known by the names the kernel gives them.
    let dir = dir.canonicalize().with_context(|| format!("--dir {}", dir.display()))?;
    Ok(dir.join(HOME))
}

fn make(home: &Path, index: u32, bytes: u64) -> Result<Device> {
    let (image, path) = (home.join(format!("{index}.img")), home.join(index.to_string()));
    let file = fs::File::create_new(&image).with_context(|| image.display().to_string())?;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)
        .with_context(|| format!("{bytes} bytes for {}", image.display()))?;
    drop(file);
    let block = tool(Command::new("losetup").args(["--find", "--show", "--direct-io=on"]).arg(&image))?;
    let block = PathBuf::from(block.trim());
    let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
    tool(Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0", "-E", options]).arg(&block))?;
    fs::DirBuilder::new().mode(0o700).create(&path)?;
    tool(Command::new("mount").args(["-t", "ext4", "-o", "noatime"]).arg(&block).arg(&path))?;
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
    Ok(Device { path, block })
}

fn limit(block: &Path, read_bps: Option<u64>, write_bps: Option<u64>) -> Result<()> {
    let numbers = fs::metadata(block).with_context(|| block.display().to_string())?.rdev();
    let (major, minor) = (rustix::fs::major(numbers), rustix::fs::minor(numbers));
    let group = match throttle_group() {
        Ok(group) => group,
        Err(e) if read_bps.is_some() || write_bps.is_some() => return Err(e),
        Err(_) => return Ok(()),
    };
    for (name, bps) in [("read", read_bps), ("write", write_bps)] {
        let file = group.join(format!("blkio.throttle.{name}_bps_device"));
        let line = format!("{major}:{minor} {}", bps.unwrap_or(0));
        fs::write(&file, &line).with_context(|| format!("{line:?} to {}", file.display()))?;
    }
    Ok(())
}

/// Unmounts, detaches and removes everything in `home`. Goes on after an error; the first is reported.
fn take_down(home: &Path) -> Result<()> {
    if !home.exists() {
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
    for path in mounts_below(home)? {
        keep(unmount(&path));
    }
    let entries = fs::read_dir(home).with_context(|| home.display().to_string())?;
    let entries: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    for image in entries.iter().filter(|path| path.extension().is_some_and(|e| e == "img")) {
        for block in loops_of(image)? {
            // The number is used again by others: its limit must not stay.
            keep(limit(&block, None, None));
            keep(tool(Command::new("losetup").arg("--detach").arg(&block)).map(drop));
        }
        keep(fs::remove_file(image).with_context(|| image.display().to_string()));
    }
    for path in entries.iter().filter(|path| path.is_dir()) {
        // Never what is in it: a mount that stayed keeps its files.
        keep(fs::remove_dir(path).with_context(|| path.display().to_string()));
    }
    keep(fs::remove_dir(home).with_context(|| home.display().to_string()));
    first
}

/// Mount points below `home`, the innermost first.
fn mounts_below(home: &Path) -> Result<Vec<PathBuf>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("/proc/self/mountinfo")?;
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(unescaped);
    let mut below: Vec<PathBuf> = points.filter(|point| point.starts_with(home)).collect();
    below.reverse();
    Ok(below)
}

/// A path of `mountinfo`, which writes blanks and the like in octal.
fn unescaped(text: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
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

/// Unmounts; a mount that somebody keeps busy goes when they let go of it.
fn unmount(path: &Path) -> Result<()> {
    for _ in 0..20 {
        if tool(Command::new("umount").arg(path)).is_ok() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    tool(Command::new("umount").arg("--lazy").arg(path)).map(drop)
}

fn loops_of(image: &Path) -> Result<Vec<PathBuf>> {
    let list = tool(Command::new("losetup").args(["--noheadings", "--output", "NAME", "--associated"]).arg(image))?;
    Ok(list.lines().map(str::trim).filter(|line| !line.is_empty()).map(PathBuf::from).collect())
}

/// Runs a tool to its end and gives what it printed.
fn tool(command: &mut Command) -> Result<String> {
    use std::os::unix::process::CommandExt;
    // A group of its own: Ctrl-C is for this process, which then ends in order.
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
