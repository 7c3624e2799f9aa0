//! Runs fio with the same block size and batches as the engine, and parses its figures.

use crate::support::interrupt::{check_interrupt, interrupted};
use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The reason that results give if fio cannot be started.
pub(crate) const MISSING: &str = "skipped: fio is not installed (apt-get install fio)";

/// Figures of one run of fio.
pub(crate) struct FioRun {
    pub(crate) gb_per_s: f64,
    pub(crate) cpu_s_per_gb: f64,
    /// The kind of huge pages that fio was asked to use for its buffers.
    pub(crate) memory: &'static str,
}

/// The moment at which fio refills its queue.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refill {
    /// fio submits a batch when the previous one has completed, as a caller of the engine does with one batch in
    /// flight.
    Batches,
    /// fio tops the queue up with every 16 completions. A reader of whole batches cannot be faster.
    Always,
}

/// Returns whether fio can be started.
pub(crate) fn is_installed() -> bool {
    let probe = Command::new("fio").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    probe.is_ok_and(|status| status.success())
}

/// Reads random blocks of `block` bytes from `file` for `seconds`, `batch` blocks per submission.
///
/// # Errors
/// fio fails or its output cannot be parsed, or the run was interrupted.
pub(crate) fn read(file: &Path, block: u64, batch: u32, seconds: f64, refill: Refill) -> Result<FioRun> {
    let mut command = base(file);
    let memory = huge_pages(&mut command, block * u64::from(batch));
    command.args([
        "--rw=randread".to_owned(),
        "--randrepeat=0".to_owned(),
        "--norandommap".to_owned(),
        "--random_generator=lfsr".to_owned(),
        format!("--bs={block}"),
        format!("--iodepth={batch}"),
        format!("--iodepth_batch_submit={batch}"),
        format!("--iodepth_batch_complete_min={}", batch.min(16)),
        format!("--iodepth_low={}", if refill == Refill::Batches { 1 } else { batch }),
        "--time_based".to_owned(),
        format!("--runtime={}ms", (seconds * 1e3).ceil().max(100.0)),
    ]);
    let job = run(command)?;
    job.figures(&job.read, memory)
}

/// Writes `bytes` to `file` sequentially, preallocated, and syncs it.
///
/// # Errors
/// As [`read`].
pub(crate) fn write(file: &Path, bytes: u64) -> Result<FioRun> {
    let mut command = base(file);
    let memory = huge_pages(&mut command, 4 << 20);
    command.args([
        "--rw=write".to_owned(),
        "--bs=1M".to_owned(),
        "--iodepth=4".to_owned(),
        "--fallocate=posix".to_owned(),
        "--end_fsync=1".to_owned(),
        "--refill_buffers=0".to_owned(),
        format!("--size={bytes}"),
    ]);
    let job = run(command)?;
    job.figures(&job.write, memory)
}

fn base(file: &Path) -> Command {
    let mut command = Command::new("fio");
    command.args(["--name=kvbench", "--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--registerfiles=1"]);
    command.args(["--invalidate=0", "--output-format=json", "--eta=never"]);
    command.arg(format!("--filename={}", file.display()));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Settings of glibc that keep buffers of any size on the heap, and the heap in transparent huge pages.
const TRANSPARENT: &str = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.top_pad=33554432";

/// Puts fio's buffers of `bytes` in huge pages: explicit ones if enough are free, else transparent ones through malloc.
fn huge_pages(command: &mut Command, bytes: u64) -> &'static str {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = info.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
    let free: u64 = free.and_then(|n| n.trim().parse().ok()).unwrap_or(0);
    if free > bytes.div_ceil(2 << 20) {
        command.arg("--mem=mmaphuge");
        return "explicit";
    }
    command.arg("--mem=malloc").env("GLIBC_TUNABLES", TRANSPARENT);
    "transparent"
}

#[derive(Deserialize)]
struct FioOutput {
    jobs: Vec<FioJob>,
}

#[derive(Deserialize)]
struct FioJob {
    error: i64,
    usr_cpu: f64,
    sys_cpu: f64,
    job_runtime: f64,
    read: FioDirection,
    write: FioDirection,
}

#[derive(Deserialize)]
struct FioDirection {
    io_bytes: f64,
    /// Milliseconds.
    runtime: f64,
}

impl FioJob {
    fn figures(&self, direction: &FioDirection, memory: &'static str) -> Result<FioRun> {
        if self.error != 0 || direction.io_bytes <= 0.0 || direction.runtime <= 0.0 {
            bail!("fio: error {} after {} bytes", self.error, direction.io_bytes);
        }
        let gb = direction.io_bytes / 1e9;
        let cpu = (self.usr_cpu + self.sys_cpu) / 100.0 * self.job_runtime / 1e3;
        Ok(FioRun { gb_per_s: gb / (direction.runtime / 1e3), cpu_s_per_gb: cpu / gb, memory })
    }
}

/// A running fio that is ended when dropped.
struct RunningFio(Child);

impl Drop for RunningFio {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            // SIGTERM lets fio end its jobs, which are separate processes. SIGKILL would leave them running.
            let _ = kill(Pid::from_raw(self.0.id() as i32), Signal::SIGTERM);
            for _ in 0..100 {
                if !matches!(self.0.try_wait(), Ok(None)) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(mut command: Command) -> Result<FioJob> {
    check_interrupt()?;
    let mut child = RunningFio(command.spawn().context("start fio")?);
    // Two threads drain the pipes, so that fio never waits for a full pipe.
    let reader = |pipe: Option<Box<dyn std::io::Read + Send>>| {
        std::thread::spawn(move || {
            let mut text = String::new();
            pipe.map(|mut pipe| pipe.read_to_string(&mut text));
            text
        })
    };
    let out = reader(child.0.stdout.take().map(|pipe| Box::new(pipe) as Box<dyn std::io::Read + Send>));
    let err = reader(child.0.stderr.take().map(|pipe| Box::new(pipe) as Box<dyn std::io::Read + Send>));
    let status = loop {
        if let Some(status) = child.0.try_wait().context("wait for fio")? {
            break status;
        }
        if interrupted() {
            bail!("interrupted");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let (out, err) = (out.join().unwrap_or_default(), err.join().unwrap_or_default());
    check_interrupt()?;
    if !status.success() {
        bail!("fio: {status}: {}", err.lines().next().unwrap_or("no message"));
    }
    // fio may print notes before the JSON.
    let json = out.find('{').map_or("", |start| &out[start..]);
    let output: FioOutput = serde_json::from_str(json).context("parse fio's output")?;
    output.jobs.into_iter().next().context("fio's output has no job")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_figures_are_computed_from_its_json() {
        let text = r#"{"jobs":[{"error":0,"usr_cpu":10.0,"sys_cpu":30.0,"job_runtime":2000,
            "read":{"io_bytes":4000000000,"runtime":1600},"write":{"io_bytes":0,"runtime":0}}]}"#;
        let output: FioOutput = serde_json::from_str(text).unwrap();
        let job = &output.jobs[0];
        let figures = job.figures(&job.read, "plain").unwrap();
        assert!((figures.gb_per_s - 2.5).abs() < 1e-9 && (figures.cpu_s_per_gb - 0.2).abs() < 1e-9);
        assert!(job.figures(&job.write, "plain").is_err());
    }
}
