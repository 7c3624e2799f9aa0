//! What the benchmarks share: a directory that goes away, interruption, clocks, keys and values to append.

use crate::cli::{Common, Driver};
use anyhow::{Context, Result, bail};
use half::f16;
use rustix::time::{ClockId, clock_gettime};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stratakv::{ByteSize, KvLayout, PlaneCodec, Store, StoreOptions, TensorView};
use tempfile::TempDir;

/// KV heads and head dim of LLaMA-3-8B, whose token takes 4 KiB per layer in f16.
pub(crate) const KV_HEADS: usize = 8;
/// See [`KV_HEADS`].
pub(crate) const HEAD_DIM: usize = 128;
/// Elements of the keys, or of the values, of one token in one layer.
pub(crate) const ROW: usize = KV_HEADS * HEAD_DIM;
/// Bytes of keys and values of one token in one layer.
pub(crate) const TOKEN_LAYER_BYTES: u64 = (2 * ROW * 2) as u64;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Makes Ctrl-C and SIGTERM end the run in order: what was written is removed. A second one ends it at once.
pub(crate) fn install_interrupt() -> Result<()> {
    let on_signal = || {
        if INTERRUPTED.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        eprintln!("kvbench: interrupted, removing what was written");
    };
    ctrlc::set_handler(on_signal).context("cannot handle Ctrl-C")
}

pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// An error once the run was interrupted.
pub(crate) fn check_interrupt() -> Result<()> {
    if interrupted() { bail!("interrupted") } else { Ok(()) }
}

/// A directory for this run below the device's, removed when dropped. Refuses to begin without room for `bytes`.
pub(crate) fn work_directory(device: &Path, bytes: u64) -> Result<TempDir> {
    let stat = rustix::fs::statvfs(device).with_context(|| format!("--device {}", device.display()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free < bytes + bytes / 16 {
        let (device, needed, free) = (device.display(), ByteSize(bytes + bytes / 16), ByteSize(free));
        bail!("--device {device}: {needed} are needed, {free} are free; give a smaller --size");
    }
    tempfile::Builder::new()
        .prefix("kvbench-")
        .tempdir_in(device)
        .with_context(|| format!("cannot make a directory below {}", device.display()))
}

/// How long a device must have done nothing to count as at rest, and how long that is waited for.
const REST: (Duration, Duration) = (Duration::from_millis(150), Duration::from_secs(10));

/// Lets the file system finish what deletions and earlier writes left it, outside of anything that is timed. File systems
/// that discard what is deleted do so in the background, after the sync: the block device is waited for as well, where its
/// counters can be read.
pub(crate) fn settle(directory: &Path) -> Result<()> {
    let handle = std::fs::File::open(directory).with_context(|| format!("open {}", directory.display()))?;
    rustix::fs::syncfs(&handle).with_context(|| format!("syncfs of {}", directory.display()))?;
    let device = rustix::fs::fstat(&handle).with_context(|| format!("stat of {}", directory.display()))?.st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let counters = || std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).ok();
    let deadline = Instant::now() + REST.1;
    let mut seen = counters();
    while seen.is_some() && Instant::now() < deadline {
        check_interrupt()?;
        std::thread::sleep(REST.0);
        let now = counters();
        // A discard of many blocks is long in flight and changes no counter meanwhile.
        let in_flight = now.as_ref().and_then(|now| now.split_whitespace().nth(8));
        if now == seen && in_flight.is_none_or(|requests| requests == "0") {
            break;
        }
        seen = now;
    }
    Ok(())
}

/// Opens the store in `directory`, which is made if need be.
pub(crate) fn open_store(common: &Common, directory: &Path, memory: ByteSize) -> Result<Store> {
    open_store_with(common, None, directory, StoreOptions::default().memory_limit(memory))
}

/// The same, with options that name no device, and perhaps another driver.
pub(crate) fn open_store_with(
    common: &Common,
    driver: Option<Driver>,
    directory: &Path,
    options: StoreOptions,
) -> Result<Store> {
    match std::fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        made => made.with_context(|| format!("make {}", directory.display()))?,
    }
    let options = options.device(directory);
    let store = options.driver(driver.unwrap_or(common.driver).into()).checksum(common.checksum.into()).open()?;
    for device in store.status().devices {
        for note in device.notes {
            eprintln!("kvbench: {note}");
        }
        if !device.direct {
            eprintln!("kvbench: {} has no direct I/O: reads come from the page cache", device.path);
        }
    }
    Ok(store)
}

/// LLaMA-3-8B's geometry with `layers` layers and groups of `group` tokens.
pub(crate) fn layout(layers: u16, group: u16) -> Result<KvLayout> {
    layout_under(layers, group, (PlaneCodec::Raw, 1.0))
}

/// The same, a share of the layers under a codec.
pub(crate) fn layout_under(layers: u16, group: u16, (codec, share): (PlaneCodec, f64)) -> Result<KvLayout> {
    let builder = KvLayout::builder().layers(layers).kv_heads(KV_HEADS as u16).head_dim(HEAD_DIM as u16);
    Ok(builder.group_tokens(group).codec(codec).codec_share(share).fingerprint([0x5b; 32]).build()?)
}

/// Random finite f16 elements to take keys and values from, a different stretch every time.
pub(crate) struct KvSource {
    elements: Vec<f16>,
    random: fastrand::Rng,
}

impl KvSource {
    /// For up to `tokens` tokens of one layer at once.
    pub(crate) fn new(tokens: usize) -> Self {
        let mut random = fastrand::Rng::with_seed(7);
        // Values below 2: the highest bit of the exponent is never set.
        let elements = (0..(tokens + 64) * ROW).map(|_| f16::from_bits(random.u16(..) & 0xbfff)).collect();
        Self { elements, random }
    }

    /// Keys and values of `tokens` tokens, each `[tokens, kv_heads, head_dim]`.
    pub(crate) fn pair(&mut self, tokens: usize) -> (TensorView<'_>, TensorView<'_>) {
        let room = self.elements.len() - tokens * ROW;
        let (k, v) = (self.random.usize(..=room), self.random.usize(..=room));
        let view =
            |start| TensorView::token_major(&self.elements[start..start + tokens * ROW], tokens, KV_HEADS, HEAD_DIM);
        (view(k), view(v))
    }
}

/// CPU seconds of this process so far, all threads, user and system.
pub(crate) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// CPU seconds of the calling thread so far.
pub(crate) fn thread_cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
