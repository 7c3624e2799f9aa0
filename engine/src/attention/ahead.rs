//! What to prefetch: a cursor that runs a fixed number of bytes ahead of the work, over the rows of this run and the next.

use super::kernel::Plane;

/// How far the prefetches run ahead of the work, in bytes: a multiple of DRAM latency times the bandwidth of a core, because a
/// pass reads the rows of a head in tiles, not in the order in which they are asked for. Measured on Zen 4.
const DISTANCE: isize = 16384;
/// Bytes of a cache line.
pub(super) const LINE: usize = 64;
/// Most rows handed out at once.
const MAX_ROWS: usize = 128;

/// The part of a stored row that a pass will read: where it starts, and its bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Stretch {
    pub(super) start: *const u8,
    pub(super) bytes: usize,
}

/// Where the prefetches are, in the order in which the passes read: plane, head, token.
pub(super) struct Cursor {
    plane: usize,
    head: usize,
    row: usize,
    /// Bytes that may be asked for now.
    credit: isize,
    rows: [Stretch; MAX_ROWS],
}

impl Cursor {
    /// At the start of a run, allowed the whole distance at once.
    pub(super) fn new() -> Self {
        let none = Stretch { start: std::ptr::null(), bytes: 0 };
        Self { plane: 0, head: 0, row: 0, credit: DISTANCE, rows: [none; MAX_ROWS] }
    }

    /// The work goes on to the next run.
    pub(super) fn advance(&mut self) {
        if self.plane < 2 {
            (self.plane, self.head, self.row) = (0, 0, 0);
        } else {
            self.plane -= 2;
        }
    }
}

/// A cursor over the K and V plane of this run and those of the next. A plane that is not read is empty.
pub(super) struct Ahead<'a> {
    pub(super) cursor: &'a mut Cursor,
    pub(super) planes: [Plane<'a>; 4],
}

impl Ahead<'_> {
    /// `bytes` of the planes are going to be worked on: the rows that come into the distance, to be asked for meanwhile.
    #[inline(never)]
    pub(super) fn rows(&mut self, bytes: usize) -> &[Stretch] {
        let Cursor { plane: at_plane, head: at_head, row: at_row, credit, rows } = &mut *self.cursor;
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
            // As many rows as the credit pays for, the last one perhaps on account.
            let left = &plane.rows[*at_row..];
            let wanted = usize::try_from(*credit).unwrap_or(0).div_ceil(bytes).min(MAX_ROWS - n);
            let count = wanted.min(left.len());
            for (to, row) in rows[n..n + count].iter_mut().zip(left) {
                *to = Stretch { start: row.as_ptr().wrapping_add(head), bytes };
            }
            n += count;
            *credit -= (count * bytes) as isize;
            if count < left.len() {
                *at_row += count;
                break;
            }
            (*at_row, *at_head) = (0, *at_head + 1);
        }
        &rows[..n]
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
    fn covers_what_takes_part_in_the_order_of_the_work() {
        let bytes = vec![0u8; 4 * 4096];
        let rows = [&bytes[256..], &bytes[1024..]];
        let (heads, none): ([u8; 2], Plane<'_>) = ([0, 3], plane(&[], &[], 1));
        let k = plane(&rows, &heads, 80); // 160 bytes
        let v = plane(&rows, &heads[1..], 32); // 64 bytes
        let mut cursor = Cursor::new();
        let mut ahead = Ahead { cursor: &mut cursor, planes: [k, v, none, v] };
        let base = bytes.as_ptr() as usize;
        let at = |list: &[Stretch]| list.iter().map(|s| (s.start as usize - base, s.bytes)).collect::<Vec<_>>();
        let k_rows = [0, 3 * 4096].into_iter().flat_map(|h| [256, 1024].map(|r| (h + r, 160)));
        let v_rows = [(3 * 4096 + 256, 64), (3 * 4096 + 1024, 64)];
        let wanted: Vec<(usize, usize)> = k_rows.chain(v_rows).chain(v_rows).collect();
        assert_eq!(at(ahead.rows(1)), wanted);
        assert!(ahead.rows(1 << 20).is_empty());
        // The next run was asked for already; the one behind it was not.
        cursor.advance();
        let mut ahead = Ahead { cursor: &mut cursor, planes: [none, v, none, v] };
        assert_eq!(at(ahead.rows(1)), v_rows);
        // A run that the cursor did not reach is left behind.
        let mut cursor = Cursor::new();
        cursor.advance();
        let mut ahead = Ahead { cursor: &mut cursor, planes: [none, v, none, none] };
        assert_eq!(at(ahead.rows(1)), v_rows);
    }

    #[test]
    fn keeps_its_distance() {
        let bytes = vec![0u8; 2 * 4096];
        let rows: Vec<&[u8]> = (0..64).map(|t| &bytes[t * 64..]).collect();
        let plane = plane(&rows, &[0, 1], 128); // rows of 256 bytes
        let total = 4 * 2 * 64 * 256;
        let mut ahead = Ahead { cursor: &mut Cursor::new(), planes: [plane; 4] };
        let (mut asked, mut worked) = (0, 0);
        while worked < total {
            worked += 200;
            asked += ahead.rows(200).iter().map(|s| s.bytes).sum::<usize>();
            let expected = (worked + DISTANCE as usize).min(total);
            assert!(asked >= expected && asked < expected + 256, "{asked} after {worked}");
        }
        assert_eq!(asked, total);
    }
}
