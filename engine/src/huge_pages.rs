//! Huge pages for memory that is read again and again.
//!
//! On 4 KiB pages a third of the time to score large summaries is spent on address translation.

/// Bytes of a huge page.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Moves memory to huge pages, as far as whole ones fit in it and the kernel has them. Before Linux 6.1 nothing
/// changes.
pub(crate) fn make_huge<T>(memory: &[T]) {
    let start = memory.as_ptr().cast::<u8>();
    let skip = start.align_offset(HUGE_PAGE_BYTES);
    let bytes = size_of_val(memory).saturating_sub(skip) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if bytes > 0 {
        // SAFETY: the range is inside borrowed memory, which has the same contents afterwards. The call is advice: if
        // the kernel refuses, the pages stay as they are.
        unsafe { libc::madvise(start.wrapping_add(skip).cast_mut().cast(), bytes, libc::MADV_COLLAPSE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_keeps_its_contents_on_huge_pages() {
        // Two whole huge pages are inside, wherever the memory begins.
        let memory: Vec<u32> = (0..3 * HUGE_PAGE_BYTES as u32 / 4).collect();
        make_huge(&memory);
        make_huge(&memory[..7]);
        make_huge::<u32>(&[]);
        assert!(memory.iter().zip(0..).all(|(found, expected)| *found == expected));
    }
}
