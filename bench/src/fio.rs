//! Runs fio with the same block size and the same batches, and takes its figures.

use crate::work::{check_interrupt, interrupted};
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Why there are no figures of fio when it cannot be started.
pub(crate) const MISSING: &str = "skipped: fio is not installed (apt-get install fio)";

/// What one run of fio did.
pub(crate) struct FioRun {
    pub(crate) gb_per_s: f64,
    pub(crate) cpu_s_per_gb: f64,
    /// What fio's buffers were asked to be made of.
    pub(crate) memory: &'static str,
}

/// How fio refills its queue.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refill {
    /// A batch is submitted when the one before has ended, as the engine's caller does with one batch in flight.
    Batches,
    /// The queue is topped up with every 16 completions: no reader of batches can do better.
    Always,
}

/// Whether fio can be started.
pub(crate) fn is_installed() -> bool {
    let probe = Command::new("fio").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    probe.is_ok_and(|status| status.success())
}

/// Random reads of `block` bytes from `file` for `seconds`, `batch` at a time in one submission.
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

/// Writes `file` of `bytes` from front to back, preallocated, and syncs it.
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

/// Makes malloc keep buffers of any size on its heap, and the heap in transparent huge pages.
const TRANSPARENT: &str = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.top_pad=33554432";

/// Buffers of `bytes` in huge pages: explicit ones when enough are free, else transparent ones by way of malloc.
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
struct Output {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    error: i64,
    usr_cpu: f64,
    sys_cpu: f64,
    job_runtime: f64,
    read: Direction,
    write: Direction,
}

#[derive(Deserialize)]
struct Direction {
    io_bytes: f64,
    /// Milliseconds.
    runtime: f64,
}

impl Job {
    fn figures(&self, direction: &Direction, memory: &'static str) -> Result<FioRun> {
        if self.error != 0 || direction.io_bytes <= 0.0 || direction.runtime <= 0.0 {
            bail!("fio ended with error {} after {} bytes", self.error, direction.io_bytes);
        }
        let gb = direction.io_bytes / 1e9;
        let cpu = (self.usr_cpu + self.sys_cpu) / 100.0 * self.job_runtime / 1e3;
        Ok(FioRun { gb_per_s: gb / (direction.runtime / 1e3), cpu_s_per_gb: cpu / gb, memory })
    }
}

/// Ends a child that is still there when the run ends early.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if let (Ok(None), Some(pid)) = (self.0.try_wait(), rustix::process::Pid::from_raw(self.0.id() as i32)) {
            // fio then ends its jobs, which are processes of their own.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
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

fn run(mut command: Command) -> Result<Job> {
    check_interrupt()?;
    let mut child = Running(command.spawn().context("start fio")?);
    // Read on threads of their own, so that fio never waits for a full pipe.
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
    // Notes may stand before the JSON.
    let json = out.find('{').map_or("", |start| &out[start..]);
    let output: Output = serde_json::from_str(json).context("fio's output")?;
    output.jobs.into_iter().next().context("fio's output names no job")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_follow_from_fios_own() {
        let text = r#"{"jobs":[{"error":0,"usr_cpu":10.0,"sys_cpu":30.0,"job_runtime":2000,
            "read":{"io_bytes":4000000000,"runtime":1600},"write":{"io_bytes":0,"runtime":0}}]}"#;
        let output: Output = serde_json::from_str(text).unwrap();
        let job = &output.jobs[0];
        let figures = job.figures(&job.read, "plain").unwrap();
        assert!((figures.gb_per_s - 2.5).abs() < 1e-9 && (figures.cpu_s_per_gb - 0.2).abs() < 1e-9);
        assert!(job.figures(&job.write, "plain").is_err());
    }
}
