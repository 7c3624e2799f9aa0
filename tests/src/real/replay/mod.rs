//! The real driver on a real file system on a block device that remembers every write and flush: any state that a power
//! failure may have left is mounted, checked, opened and compared with what was acknowledged by then.

mod disk;

use super::mount::{Loop, Mounted, call};
use super::{Job, Known, Line, check_store, learn, told, work, worker};
use crate::disk::{check, device_dirs};
use crate::rng::Rng;
use disk::{Device, Fault};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stratakv::sim::{Mutant, set_mutant};

/// Images of one recording.
const IMAGES_PER_RECORDING: u64 = 250;
/// How long a recording works.
const RECORDING: Duration = Duration::from_millis(600);
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// What to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Images in all.
    pub images: u64,
    /// First seed.
    pub seed: u64,
    /// File systems, in turn.
    pub file_systems: Vec<String>,
    /// A fault planted in the engine while it is recorded, to show that it is found.
    pub mutant: Option<Mutant>,
}

/// How it went.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Images that held all that was acknowledged.
    pub passed: u64,
    /// Those that did not, with seed and reports.
    pub failures: Vec<String>,
    /// Images by file system.
    pub by_file_system: BTreeMap<String, u64>,
    /// Recordings, and those in which a write or flush failed.
    pub recordings: (u64, u64),
    /// Images of a device that had failed which the file system itself refuses to mount.
    pub unmountable: u64,
    /// Writes, discards and flushes recorded.
    pub entries: u64,
}

/// Why it cannot run here, if it cannot, and the file systems that can be made.
///
/// # Errors
/// What is missing.
pub fn possible() -> Result<Vec<String>, String> {
    if !rustix::process::geteuid().is_root() {
        return Err("it takes root, for loop devices and mounts".into());
    }
    for device in ["/dev/fuse", "/dev/loop-control"] {
        if !Path::new(device).exists() {
            return Err(format!("there is no {device}"));
        }
    }
    call("losetup", &["--version"])?;
    let can_make = |fs: &&str| call(&format!("mkfs.{fs}"), &["-V"]).is_ok();
    let found: Vec<String> = ["ext4", "xfs"].into_iter().filter(can_make).map(ToString::to_string).collect();
    if found.is_empty() { Err("neither mkfs.ext4 nor mkfs.xfs is here".into()) } else { Ok(found) }
}

/// Records and replays until all is done, something fails, or `stop` is set. Leaves no mount and no loop device behind.
#[must_use]
pub fn run(plan: &Plan, stop: &AtomicBool) -> Outcome {
    let mut outcome = Outcome::default();
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
    outcome
}

fn one_recording(
    plan: &Plan,
    file_system: &str,
    seed: u64,
    images: u64,
    stop: &AtomicBool,
    outcome: &mut Outcome,
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
    let (fuse, mounted_at, image_at) = (place("fuse")?, place("mounted")?, place("image")?);
    // An xfs takes 300 MiB at least; memory is taken for what is written only.
    let device = Device::new(if file_system == "xfs" { 320 << 20 } else { 96 << 20 });
    let _session = Session(Some(
        fuser::spawn_mount(device.clone(), &fuse, &fuser::Config::default()).map_err(failed("a FUSE mount"))?,
    ));
    let mut rng = Rng(seed);
    set_mutant(plan.mutant);
    let failed_before = outcome.recordings.1;
    let lines = record(file_system, &device, &fuse.join("disk"), &mounted_at, &mut rng, outcome);
    set_mutant(None);
    let lines = lines?;
    let faulty = outcome.recordings.1 > failed_before;
    if device.misaligned() > 0 {
        return Err(format!("{} requests were not whole sectors", device.misaligned()));
    }
    let end = device.position();
    let mut cuts: Vec<usize> = (0..images).map(|_| rng.below(end + 1)).collect();
    cuts.sort_unstable();
    for (nth, cut) in cuts.into_iter().enumerate() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        device.cut(cut, &mut rng);
        let mut known = BTreeMap::new();
        let mounted = Loop::new(&fuse.join("image")).and_then(|device| Mounted::new(device, file_system, &image_at));
        let mounted = match mounted {
            // A device that failed may have cost the file system its own metadata.
            Err(_) if faulty => {
                outcome.unmountable += 1;
                continue;
            }
            other => other?,
        };
        let reported = lines.iter().take_while(|(at, _)| *at <= cut);
        reported.clone().for_each(|(_, line)| learn(&mut known, *line));
        if let Err(e) = check_image(mounted, &mut known) {
            let last: Vec<String> = reported.map(|(at, line)| format!("[{at}] {line}")).collect();
            let last = last.iter().rev().take(16).rev().cloned().collect::<Vec<_>>().join("\n    ");
            return Err(format!("image {nth}, cut behind {cut} of {end} requests: {e}\n    {last}"));
        }
        outcome.passed += 1;
        *outcome.by_file_system.entry(file_system.to_owned()).or_default() += 1;
    }
    Ok(())
}

/// The FUSE mount; unmounted at its end.
struct Session(Option<fuser::BackgroundSession>);

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(Err(e)) = self.0.take().map(fuser::BackgroundSession::umount_and_join) {
            eprintln!("the FUSE mount stays: {e}");
        }
    }
}

/// Makes a file system with a store, and works on it; what was reported, each with the requests that had completed by
/// then.
fn record(
    file_system: &str,
    device: &Device,
    file: &Path,
    at: &Path,
    rng: &mut Rng,
    outcome: &mut Outcome,
) -> Result<Vec<(usize, Line)>, String> {
    let backing = Loop::new(file)?;
    let quiet = if file_system == "xfs" { "-q" } else { "-Fq" };
    call(&format!("mkfs.{file_system}"), &[quiet, &backing.0])?;
    let mounted = Mounted::new(backing, file_system, at)?;
    let dirs = device_dirs(&mounted.at, 1);
    worker::open(&dirs).map_err(|e| format!("create: {e:?}"))?;
    call("sync", &["-f", &mounted.at.to_string_lossy()])?;
    // In some recordings the device fails once.
    let fault = match rng.below(6) {
        0 => Some(Fault::Write(rng.below(600) as u64, EIO)),
        1 => Some(Fault::Write(rng.below(600) as u64, ENOSPC)),
        2 => Some(Fault::Flush(rng.below(200) as u64, EIO)),
        _ => None,
    };
    device.record(fault);
    let end = Instant::now() + RECORDING;
    let mut lines = Vec::new();
    let mut seed = rng.next_u64();
    loop {
        let next = 1 + lines.len() as u64 * 100;
        let job = Job { dirs: dirs.clone(), seed, next };
        // Several lives of one store: some are closed in the middle of the recording.
        let life = Instant::now() + Duration::from_millis(50 + rng.below(300) as u64);
        let worked =
            told(|| work(&job, || Instant::now() > end.min(life), |line| lines.push((device.position(), line))))?;
        match worked {
            Ok(()) if Instant::now() < end => seed = rng.next_u64(),
            Ok(()) => break,
            // A device that failed: what was acknowledged before counts all the same.
            Err(_) if fault.is_some() => break,
            Err(e) => return Err(format!("work: {e:?}")),
        }
    }
    outcome.recordings.0 += 1;
    outcome.recordings.1 += u64::from(device.stop());
    outcome.entries += device.position() as u64;
    let cut = device.position();
    drop(mounted);
    // What the unmount wrote is part of the log; what was reported is not touched by it.
    debug_assert!(device.position() >= cut);
    Ok(lines)
}

fn check_image(mounted: Mounted, known: &mut BTreeMap<u64, Known>) -> Result<(), String> {
    let dirs = device_dirs(&mounted.at, 1);
    let report = told(|| check(&dirs))?;
    if !report.clean {
        return Err(format!("kvfsck:\n{}", report.to_text()));
    }
    let store = worker::open(&dirs).map_err(|e| format!("open: {e:?}"))?;
    told(|| check_store(&store, known))?;
    drop(store);
    drop(mounted);
    Ok(())
}
