//! Memory and I/O figures of this process, from `/proc`.

/// Returns the peak resident set in bytes (`VmHWM`), or `None` if `/proc` does not have it.
#[must_use]
pub fn resident_peak_bytes() -> Option<u64> {
    status_field("VmHWM:")
}

/// Returns the resident set in bytes (`VmRSS`), or `None` if `/proc` does not have it.
#[must_use]
pub fn resident_bytes() -> Option<u64> {
    status_field("VmRSS:")
}

/// Returns the resident memory without mapped files, in bytes (`RssAnon`), or `None` if `/proc` does not have it.
#[must_use]
pub fn anonymous_bytes() -> Option<u64> {
    status_field("RssAnon:")
}

/// The memory of this process at one moment. A figure is `None` if `/proc` does not have it.
#[derive(Clone, Copy, Debug)]
pub struct ProcessMemory {
    /// The resident set in bytes.
    pub resident: Option<u64>,
    /// The resident memory without mapped files, in bytes.
    pub anonymous: Option<u64>,
}

impl ProcessMemory {
    /// Returns the memory at this moment.
    #[must_use]
    pub fn now() -> Self {
        Self { resident: resident_bytes(), anonymous: anonymous_bytes() }
    }

    /// Returns a line for reports.
    #[must_use]
    pub fn line(&self) -> Option<String> {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let (resident, anonymous) = (mib(self.resident?), mib(self.anonymous?));
        Some(format!("{resident:.0} MiB resident, of which {anonymous:.0} MiB are not mapped files"))
    }
}

/// Returns the bytes that the kernel read from block devices for this process (`read_bytes` of `/proc/self/io`). They
/// include page faults of mapped files.
#[must_use]
pub fn read_bytes() -> Option<u64> {
    let io = std::fs::read_to_string("/proc/self/io").ok()?;
    io.lines().find_map(|l| l.strip_prefix("read_bytes:"))?.trim().parse().ok()
}

/// Returns a field of `/proc/self/status` in bytes.
fn status_field(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn the_peak_is_at_least_the_resident_set() {
        let block = std::hint::black_box(vec![1u8; 32 << 20]);
        let (now, peak) = (resident_bytes().unwrap(), resident_peak_bytes().unwrap());
        // The kernel updates its counters in batches, so they may lag behind by up to 1 MiB.
        assert!(now > 32 << 20 && peak + (1 << 20) >= now, "now {now}, peak {peak}, {} bytes held", block.len());
    }
}
