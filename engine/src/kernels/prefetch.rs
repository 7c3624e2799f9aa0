//! Prefetches: single cache lines ([`prefetch`]), and the rows that attention will read next ([`Prefetcher`]).
//!
//! Attention reads rows in an order that the processor does not foresee, because a selection is sparse. Its passes
//! therefore prefetch themselves:
//! 1. A [`PrefetchCursor`] moves over the rows in the order of the work: plane, head, token.
//! 2. Before a pass works on some bytes, it asks [`Prefetcher::next_ranges`] which rows come within [`DISTANCE`] now.
//! 3. The pass prefetches them one by one between its own loads.
//!
//! Invariant: the cursor is at most one run of blocks ahead of the work.

use super::plane::Plane;
use super::vector::Vector;

/// Bytes by which prefetches are ahead of the work: several times the product of DRAM latency and a core's bandwidth.
/// A pass reads rows in tiles, not in the order of the prefetches. Measured on Zen 4.
const DISTANCE: isize = 16384;
/// Bytes of a cache line.
pub(super) const LINE: usize = 64;
/// The most rows that [`Prefetcher::next_ranges`] returns.
const MAX_ROWS: usize = 128;

/// Hints that the cache line in which `value` begins is needed soon.
///
/// Use it before a loop over values that are probably in no cache. Each of them would otherwise stall the loop.
#[inline(always)]
pub(crate) fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch neither reads nor writes, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// Bytes to prefetch, such as the part of a stored row that a pass will read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PrefetchRange {
    /// The first byte.
    pub(super) start: *const u8,
    /// The number of bytes.
    pub(super) bytes: usize,
}

/// Prefetches all cache lines of a range.
///
/// # Safety
/// The processor has the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn prefetch_range<S: Vector>(range: &PrefetchRange) {
    let mut offset = 0;
    while offset < range.bytes {
        // SAFETY: a prefetch takes any address, and the processor has the instruction set.
        unsafe { S::prefetch(range.start.wrapping_add(offset)) };
        offset += LINE;
    }
}

/// The position of the prefetches in the order in which the passes read: plane, head, token.
pub(crate) struct PrefetchCursor {
    plane: usize,
    head: usize,
    row: usize,
    /// Bytes that may be prefetched now. Negative if the last row exceeded what was allowed.
    credit: isize,
    ranges: [PrefetchRange; MAX_ROWS],
}

impl PrefetchCursor {
    /// Returns a cursor at the start of a run, with the whole distance as credit.
    pub(crate) fn new() -> Self {
        let none = PrefetchRange { start: std::ptr::null(), bytes: 0 };
        Self { plane: 0, head: 0, row: 0, credit: DISTANCE, ranges: [none; MAX_ROWS] }
    }

    /// Follows the work to the next run.
    pub(crate) fn next_run(&mut self) {
        if self.plane < 2 {
            (self.plane, self.head, self.row) = (0, 0, 0);
        } else {
            self.plane -= 2;
        }
    }
}

/// A cursor, and the planes that it moves over: K and V of this run, then K and V of the next run.
pub(crate) struct Prefetcher<'a> {
    /// The position, which outlives the planes.
    pub(crate) cursor: &'a mut PrefetchCursor,
    /// The planes. A plane that is not read is empty.
    pub(crate) planes: [Plane<'a>; 4],
}

impl Prefetcher<'_> {
    /// Returns the rows to prefetch while the caller works on the next `bytes` of the planes.
    #[inline(never)]
    pub(super) fn next_ranges(&mut self, bytes: usize) -> &[PrefetchRange] {
        let PrefetchCursor { plane: at_plane, head: at_head, row: at_row, credit, ranges } = &mut *self.cursor;
        *credit = credit.saturating_add(bytes as isize).min(2 * DISTANCE);
        let mut n = 0;
        while let Some(plane) = self.planes.get(*at_plane) {
            let bytes = plane.row_bytes();
            let head = match plane.heads.get(*at_head) {
                Some(&head) if bytes > 0 => usize::from(head) * plane.head_stride,
                _ => {
                    (*at_plane, *at_head, *at_row) = (*at_plane + 1, 0, 0);
                    continue;
                }
            };
            // As many rows as the credit covers. The last one may exceed it.
            let left = &plane.rows[*at_row..];
            let wanted = usize::try_from(*credit).unwrap_or(0).div_ceil(bytes).min(MAX_ROWS - n);
            let count = wanted.min(left.len());
            for (to, row) in ranges[n..n + count].iter_mut().zip(left) {
                *to = PrefetchRange { start: row.as_ptr().wrapping_add(head), bytes };
            }
            n += count;
            *credit -= (count * bytes) as isize;
            if count < left.len() {
                *at_row += count;
                break;
            }
            (*at_row, *at_head) = (0, *at_head + 1);
        }
        &ranges[..n]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratakv_format::DType;

    fn plane<'a>(rows: &'a [&'a [u8]], heads: &'a [u8], take: usize) -> Plane<'a> {
        Plane { rows, heads, head_stride: 4096, dtype: DType::F16, take }
    }

    #[test]
    fn prefetcher_covers_the_rows_that_take_part_in_the_order_of_the_work() {
        let bytes = vec![0u8; 4 * 4096];
        let rows = [&bytes[256..], &bytes[1024..]];
        let (heads, none): ([u8; 2], Plane<'_>) = ([0, 3], plane(&[], &[], 1));
        let k = plane(&rows, &heads, 80); // 160 bytes
        let v = plane(&rows, &heads[1..], 32); // 64 bytes
        let mut cursor = PrefetchCursor::new();
        let mut prefetcher = Prefetcher { cursor: &mut cursor, planes: [k, v, none, v] };
        let base = bytes.as_ptr() as usize;
        let at = |list: &[PrefetchRange]| list.iter().map(|s| (s.start as usize - base, s.bytes)).collect::<Vec<_>>();
        let k_rows = [0, 3 * 4096].into_iter().flat_map(|h| [256, 1024].map(|r| (h + r, 160)));
        let v_rows = [(3 * 4096 + 256, 64), (3 * 4096 + 1024, 64)];
        let wanted: Vec<(usize, usize)> = k_rows.chain(v_rows).chain(v_rows).collect();
        assert_eq!(at(prefetcher.next_ranges(1)), wanted);
        assert!(prefetcher.next_ranges(1 << 20).is_empty());
        // The rows of the next run were returned before. The rows of the run after it were not.
        cursor.next_run();
        let mut prefetcher = Prefetcher { cursor: &mut cursor, planes: [none, v, none, v] };
        assert_eq!(at(prefetcher.next_ranges(1)), v_rows);
        // A run that the cursor did not reach is skipped.
        let mut cursor = PrefetchCursor::new();
        cursor.next_run();
        let mut prefetcher = Prefetcher { cursor: &mut cursor, planes: [none, v, none, none] };
        assert_eq!(at(prefetcher.next_ranges(1)), v_rows);
    }

    #[test]
    fn prefetcher_keeps_its_distance() {
        let bytes = vec![0u8; 2 * 4096];
        let rows: Vec<&[u8]> = (0..64).map(|t| &bytes[t * 64..]).collect();
        let plane = plane(&rows, &[0, 1], 128); // rows of 256 bytes
        let total = 4 * 2 * 64 * 256;
        let mut prefetcher = Prefetcher { cursor: &mut PrefetchCursor::new(), planes: [plane; 4] };
        let (mut asked, mut worked) = (0, 0);
        while worked < total {
            worked += 200;
            asked += prefetcher.next_ranges(200).iter().map(|s| s.bytes).sum::<usize>();
            let expected = (worked + DISTANCE as usize).min(total);
            assert!(asked >= expected && asked < expected + 256, "{asked} after {worked}");
        }
        assert_eq!(asked, total);
    }
}
