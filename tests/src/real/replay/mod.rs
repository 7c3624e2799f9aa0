//! Power failures of block devices under real file systems and the real driver.
//!
//! 1. A recording makes a file system on each device of `disk`, works on a store, and logs every write and flush. Each
//!    device directory of the store has a file system of its own, as on independent disks.
//! 2. Each image is a state of all devices that a power failure at a random request may have left.
//! 3. The images are mounted, checked with kvfsck, opened, and compared with the reports before that request.

mod disk;

use super::mount::{Loop, Mounted, call};
use super::{Job, LedgerEntry, WorkerReport, apply_report, catch_panic, check_store, work, worker};
use crate::disk::{check, device_dirs};
use crate::rng::Rng;
use disk::{Devices, Fault};
use kvfsck::{Code, Severity};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stratakv::ErrorKind;
use stratakv::sim::{Mutant, set_mutant};

/// The images of one recording.
const IMAGES_PER_RECORDING: u64 = 250;
/// The working time of a recording.
const RECORDING: Duration = Duration::from_millis(600);
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// The settings of a replay run.
#[derive(Clone, Debug)]
pub struct ReplayPlan {
    /// The number of images.
    pub images: u64,
    /// The first seed.
    pub seed: u64,
    /// The file systems. Recordings use one after another.
    pub file_systems: Vec<String>,
    /// A fault planted in the engine during the recording, to show that the run finds it.
    pub mutant: Option<Mutant>,
}

/// The result of a replay run.
#[derive(Clone, Debug, Default)]
pub struct ReplayReport {
    /// The images that held everything acknowledged.
    pub passed: u64,
    /// The failures, each with its seed and the last reports.
    pub failures: Vec<String>,
    /// The images by file system.
    pub by_file_system: BTreeMap<String, u64>,
    /// The recordings, and those in which a write or flush failed.
    pub recordings: (u64, u64),
    /// The images of a failed device, or with torn writes, that the file system itself refuses to mount.
    pub unmountable: u64,
    /// The recorded writes, discards and flushes.
    pub entries: u64,
}

/// Returns the file systems that this machine can make.
///
/// # Errors
/// The machine lacks something that every recording needs.
pub fn possible() -> Result<Vec<String>, String> {
    if !rustix::process::geteuid().is_root() {
        return Err("loop devices and mounts need root".into());
    }
    for device in ["/dev/fuse", "/dev/loop-control"] {
        if !Path::new(device).exists() {
            return Err(format!("{device} is missing"));
        }
    }
    call("losetup", &["--version"])?;
    let can_make = |fs: &&str| call(&format!("mkfs.{fs}"), &["-V"]).is_ok();
    let found: Vec<String> = ["ext4", "xfs"].into_iter().filter(can_make).map(ToString::to_string).collect();
    if found.is_empty() { Err("mkfs.ext4 and mkfs.xfs are missing".into()) } else { Ok(found) }
}

/// Records and replays until all images are done, a check fails, or `stop` is set. Leaves no mount and no loop device
/// behind.
#[must_use]
pub fn run(plan: &ReplayPlan, stop: &AtomicBool) -> ReplayReport {
    let mut outcome = ReplayReport::default();
    let mut recording = 0;
    while outcome.passed < plan.images && !stop.load(Ordering::Relaxed) && outcome.failures.is_empty() {
        let images = IMAGES_PER_RECORDING.min(plan.images - outcome.passed);
        let seed = plan.seed.wrapping_add(recording as u64);
        let file_system = &plan.file_systems[recording % plan.file_systems.len()];
        if let Err(e) = one_recording(plan, file_system, seed, images, stop, &mut outcome) {
            outcome.failures.push(format!("seed {seed} on {file_system}: {e}"));
        }
        recording += 1;
    }
    if outcome.unmountable > outcome.passed.max(IMAGES_PER_RECORDING) {
        outcome.failures.push(format!("the file system refused {} images", outcome.unmountable));
    }
    outcome
}

fn one_recording(
    plan: &ReplayPlan,
    file_system: &str,
    seed: u64,
    images: u64,
    stop: &AtomicBool,
    outcome: &mut ReplayReport,
) -> Result<(), String> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |e: std::io::Error| format!("{what}: {e}")
    };
    let root = tempfile::Builder::new().prefix("stratakv-replay-").tempdir().map_err(failed("a scratch directory"))?;
    let place = |name: &str| -> Result<PathBuf, String> {
        let path = root.path().join(name);
        std::fs::create_dir(&path).map_err(failed(name))?;
        Ok(path)
    };
    let kind = StoreKind { devices: 1 + (seed % 2) as usize, limited: seed.is_multiple_of(3) };
    // An xfs needs at least 300 MiB. A device takes memory only for written pages.
    let devices = Devices::new(kind.devices, if file_system == "xfs" { 320 << 20 } else { 96 << 20 });
    let (mut places, mut sessions) = (Vec::new(), Vec::new());
    for (index, device) in devices.iter().enumerate() {
        let path = |name: &str| place(&format!("{name}-{index}"));
        let own = DevicePaths { fuse: path("fuse")?, mounted: path("mounted")?, image: path("image")? };
        let session = fuser::spawn_mount(device.clone(), &own.fuse, &fuser::Config::default());
        sessions.push(Session(Some(session.map_err(failed("a FUSE mount"))?)));
        places.push(own);
    }
    let mut rng = Rng(seed);
    set_mutant(plan.mutant);
    let failed_before = outcome.recordings.1;
    let lines = record((file_system, kind), &devices, &places, &mut rng, outcome);
    set_mutant(None);
    let lines = lines?;
    let faulty = outcome.recordings.1 > failed_before;
    if devices.misaligned() > 0 {
        return Err(format!("{} requests were not whole sectors", devices.misaligned()));
    }
    let end = devices.position();
    let mut cuts: Vec<usize> = (0..images).map(|_| rng.below(end + 1)).collect();
    cuts.sort_unstable();
    for (nth, cut) in cuts.into_iter().enumerate() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let torn = devices.cut(cut, &mut rng);
        let mut known = BTreeMap::new();
        let mount = |own: &DevicePaths| Mounted::new(Loop::new(&own.fuse.join("image"))?, file_system, &own.image);
        let mounted = match places.iter().map(mount).collect::<Result<Vec<_>, _>>() {
            // The failed request may have been metadata of the file system. XFS expects that a block of its metadata
            // is not torn.
            Err(_) if faulty || torn => {
                outcome.unmountable += 1;
                continue;
            }
            other => other?,
        };
        let reported = lines.iter().take_while(|(at, _)| *at <= cut);
        reported.clone().for_each(|(_, line)| apply_report(&mut known, *line));
        if let Err(e) = check_images(mounted, kind.limited, faulty, &mut known) {
            let last: Vec<String> = reported.map(|(at, line)| format!("[{at}] {line}")).collect();
            let last = last.iter().rev().take(16).rev().cloned().collect::<Vec<_>>().join("\n    ");
            return Err(format!("image {nth}, cut after {cut} of {end} requests: {e}\n    {last}"));
        }
        outcome.passed += 1;
        *outcome.by_file_system.entry(file_system.to_owned()).or_default() += 1;
    }
    Ok(())
}

/// The store of a recording.
#[derive(Clone, Copy)]
struct StoreKind {
    /// Its device directories, each on a file system of its own.
    devices: usize,
    /// True if it has a capacity, so that it evicts sequences.
    limited: bool,
}

/// The directories of one device of a recording.
struct DevicePaths {
    /// The files of the device.
    fuse: PathBuf,
    /// The file system during the recording.
    mounted: PathBuf,
    /// The file system of an image.
    image: PathBuf,
}

/// A FUSE mount. Dropping it unmounts.
struct Session(Option<fuser::BackgroundSession>);

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(Err(e)) = self.0.take().map(fuser::BackgroundSession::umount_and_join) {
            eprintln!("the FUSE mount remains: {e}");
        }
    }
}

/// Returns the device directory of each file system.
fn directories(mounted: &[Mounted]) -> Vec<PathBuf> {
    mounted.iter().flat_map(|own| device_dirs(&own.at, 1)).collect()
}

/// Makes file systems with a store and works on it. Returns the reports, each with the number of requests that had
/// completed before it.
fn record(
    (file_system, StoreKind { devices: count, limited }): (&str, StoreKind),
    devices: &Devices,
    places: &[DevicePaths],
    rng: &mut Rng,
    outcome: &mut ReplayReport,
) -> Result<Vec<(usize, WorkerReport)>, String> {
    let mut mounted = Vec::new();
    for own in places {
        let backing = Loop::new(&own.fuse.join("disk"))?;
        let quiet = if file_system == "xfs" { "-q" } else { "-Fq" };
        call(&format!("mkfs.{file_system}"), &[quiet, &backing.0])?;
        mounted.push(Mounted::new(backing, file_system, &own.mounted)?);
    }
    let dirs = directories(&mounted);
    worker::open(&dirs, limited).map_err(|e| format!("create: {e:?}"))?;
    for own in &mounted {
        call("sync", &["-f", &own.at.to_string_lossy()])?;
    }
    // In some recordings a device fails once. On a shared file system, the failure of one write to its journal could
    // cost data of two directories and be reported to one of them.
    let fault = match rng.below(6) {
        0 => Some(Fault::Write(rng.below(600 / count) as u64, EIO)),
        1 => Some(Fault::Write(rng.below(600 / count) as u64, ENOSPC)),
        2 => Some(Fault::Flush(rng.below(200 / count) as u64, EIO)),
        _ => None,
    };
    devices.record(fault.map(|fault| (rng.below(count), fault)));
    let end = Instant::now() + RECORDING;
    let mut lines = Vec::new();
    let mut seed = rng.next_u64();
    loop {
        let next = 1 + lines.len() as u64 * 100;
        let job = Job { dirs: dirs.clone(), seed, next, limited };
        // The store is closed and opened again several times during a recording.
        let life = Instant::now() + Duration::from_millis(50 + rng.below(300) as u64);
        let worked = catch_panic(|| {
            work(&job, || Instant::now() > end.min(life), |line| lines.push((devices.position(), line)))
        })?;
        match worked {
            Ok(()) if Instant::now() < end => seed = rng.next_u64(),
            Ok(()) => break,
            // The device failed. Everything acknowledged before must still be there.
            Err(_) if fault.is_some() => break,
            Err(e) => return Err(format!("work: {e:?}")),
        }
    }
    outcome.recordings.0 += 1;
    outcome.recordings.1 += u64::from(devices.stop());
    outcome.entries += devices.position() as u64;
    let cut = devices.position();
    drop(mounted);
    // The writes of the unmount are part of the log, after all reports.
    debug_assert!(devices.position() >= cut);
    Ok(lines)
}

/// Checks the mounted images. In a `faulty` recording, a device that the store has declared lost may have damage. If
/// the store asks to leave it out, the other devices must open and hold everything.
fn check_images(
    mounted: Vec<Mounted>,
    limited: bool,
    faulty: bool,
    known: &mut BTreeMap<u64, LedgerEntry>,
) -> Result<(), String> {
    let mut dirs = directories(&mounted);
    let report = catch_panic(|| check(&dirs))?;
    let lost = lost_devices(&report);
    if !(report.clean || faulty && lost.len() < mounted.len() && damage_is_of(&lost, &report)) {
        return Err(format!("kvfsck:\n{}", report.to_text()));
    }
    let mut opened = worker::open(&dirs, limited);
    if !lost.is_empty() && opened.as_ref().is_err_and(|e| e.kind() == ErrorKind::StaleDevice) {
        let mut index = 0..;
        dirs.retain(|_| index.next().is_none_or(|index| !lost.contains(&index)));
        opened = worker::open(&dirs, limited);
    }
    let store = opened.map_err(|e| format!("open: {e:?}"))?;
    catch_panic(|| check_store(&store, known, limited))?;
    drop(store);
    drop(mounted);
    Ok(())
}

/// Returns the devices that the store has declared lost.
fn lost_devices(report: &kvfsck::Report) -> BTreeSet<u16> {
    let stale = report.findings.iter().filter(|finding| finding.code == Code::StaleDevice);
    stale.filter(|finding| finding.severity == Severity::Damage).filter_map(|finding| finding.device).collect()
}

/// Returns whether all damage is on these devices.
fn damage_is_of(devices: &BTreeSet<u16>, report: &kvfsck::Report) -> bool {
    let mut damage = report.findings.iter().filter(|finding| finding.severity == Severity::Damage);
    report.findings_left_out == 0 && damage.all(|finding| finding.device.is_some_and(|own| devices.contains(&own)))
}
