//! Which pages the kernel gave a range of memory: huge ones or small ones.
//!
//! Sources: linux/fs.h (`PAGEMAP_SCAN`), proc(5) (`smaps`).

use std::fs::File;
use std::os::fd::AsRawFd;

/// Returns whether this range, a mapping of its own, is on huge pages throughout.
pub(in crate::io) fn is_huge(start: usize, len: usize) -> bool {
    scan(start, len).or_else(|| read_smaps(start, len)).unwrap_or(false)
}

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
struct PageScan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

const PAGE_IS_HUGE: u64 = 1 << 6;
/// `_IOWR('f', 16, struct pm_scan_arg)`, with the layout of ioctl numbers on x86 and Arm.
const PAGEMAP_SCAN: u64 = 3 << 30 | (size_of::<PageScan>() as u64) << 16 | (b'f' as u64) << 8 | 16;

/// Asks the kernel for the first region of huge pages in the range. Returns none before Linux 6.7.
pub(in crate::io) fn scan(start: usize, len: usize) -> Option<bool> {
    if !cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        return None;
    }
    let pagemap = File::open("/proc/self/pagemap").ok()?;
    let mut region = PageRegion::default();
    let (start, end) = (start as u64, (start + len) as u64);
    let mut arg = PageScan {
        size: size_of::<PageScan>() as u64,
        flags: 0,
        start,
        end,
        walk_end: 0,
        vec: (&raw mut region).expose_provenance() as u64,
        vec_len: 1,
        max_pages: 0,
        category_inverted: 0,
        category_mask: PAGE_IS_HUGE,
        category_anyof_mask: 0,
        return_mask: PAGE_IS_HUGE,
    };
    // SAFETY: the argument and its one output element are valid for the call, which writes nothing else. No flag
    // changes pages.
    let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN as _, &raw mut arg) };
    match found {
        0 => Some(false),
        1 => Some(region.start == start && region.end == end),
        _ => None,
    }
}

/// Returns the same from the text file that every kernel has. For a large process the kernel takes long to write it.
pub(in crate::io) fn read_smaps(start: usize, len: usize) -> Option<bool> {
    let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let head = format!("{start:x}-");
    // The kernel pads short addresses with zeros.
    let mut lines = maps.lines().skip_while(|line| !line.trim_start_matches('0').starts_with(&head)).skip(1);
    let kib: usize =
        lines.find_map(|line| line.strip_prefix("AnonHugePages:"))?.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024 == len)
}
