//! What to prefetch: a cursor that runs a fixed number of bytes ahead of the work, over the rows of this run and the next.

use super::kernel::Plane;

/// How far the prefetches run ahead of the work, in bytes: DRAM latency times the bandwidth of a core, with a margin.
const DISTANCE: isize = 8192;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Most lines handed out at once.
const MAX_LINES: usize = 512;

/// Where the prefetches are, in the order in which the passes read: plane, head, token.
pub(super) struct Cursor {
    plane: usize,
    head: usize,
    row: usize,
    byte: usize,
    /// Bytes that may be asked for now.
    credit: isize,
    lines: [*const u8; MAX_LINES],
}

impl Cursor {
    /// At the start of a run, allowed the whole distance at once.
    pub(super) fn new() -> Self {
        Self { plane: 0, head: 0, row: 0, byte: 0, credit: DISTANCE, lines: [std::ptr::null(); MAX_LINES] }
    }

    /// The work goes on to the next run.
    pub(super) fn advance(&mut self) {
        if self.plane < 2 {
            (self.plane, self.head, self.row, self.byte) = (0, 0, 0, 0);
        } else {
            self.plane -= 2;
        }
    }
}

/// A cursor over the cache lines of the K and V plane of this run and those of the next. A plane that is not read is empty.
pub(super) struct Ahead<'a> {
    pub(super) cursor: &'a mut Cursor,
    pub(super) planes: [Plane<'a>; 4],
}

impl Ahead<'_> {
    /// `bytes` of the planes are going to be worked on: the lines that come into the distance, to be asked for meanwhile.
    #[inline(never)]
    pub(super) fn lines(&mut self, bytes: usize) -> &[*const u8] {
        let Cursor { plane: at_plane, head: at_head, row: at_row, byte, credit, lines } = &mut *self.cursor;
        *credit = credit.saturating_add(bytes as isize).min(DISTANCE + (LINE * MAX_LINES) as isize);
        let mut n = 0;
        while let Some(plane) = self.planes.get(*at_plane) {
            let (Some(&head), Some(row)) = (plane.heads.get(*at_head), plane.rows.get(*at_row)) else {
                (*at_plane, *at_head, *at_row) = (*at_plane + 1, 0, 0);
                continue;
            };
            let row_bytes = plane.row_bytes();
            let start = row.as_ptr().wrapping_add(usize::from(head) * plane.head_stride);
            while *byte < row_bytes {
                if *credit <= 0 || n == MAX_LINES {
                    return &lines[..n];
                }
                lines[n] = start.wrapping_add(*byte);
                n += 1;
                *credit -= LINE.min(row_bytes - *byte) as isize;
                *byte += LINE;
            }
            *byte = 0;
            *at_row += 1;
            if *at_row == plane.rows.len() {
                (*at_row, *at_head) = (0, *at_head + 1);
            }
        }
        &lines[..n]
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
        let k = plane(&rows, &heads, 80); // 160 bytes: 3 lines
        let v = plane(&rows, &heads[1..], 32); // 64 bytes: 1 line
        let mut cursor = Cursor::new();
        let mut ahead = Ahead { cursor: &mut cursor, planes: [k, v, none, v] };
        let base = bytes.as_ptr() as usize;
        let at = |list: &[*const u8]| list.iter().map(|at| *at as usize - base).collect::<Vec<_>>();
        let k_lines = [0, 3 * 4096].into_iter().flat_map(|h| [256, 1024].map(|r| h + r));
        let k_lines = k_lines.flat_map(|row| [row, row + 64, row + 128]);
        let v_lines = [3 * 4096 + 256, 3 * 4096 + 1024];
        let wanted: Vec<usize> = k_lines.chain(v_lines).chain(v_lines).collect();
        assert_eq!(at(ahead.lines(1)), wanted);
        assert!(ahead.lines(1 << 20).is_empty());
        // The next run was asked for already; the one behind it was not.
        cursor.advance();
        let mut ahead = Ahead { cursor: &mut cursor, planes: [none, v, none, v] };
        assert_eq!(at(ahead.lines(1)), v_lines);
        // A run that the cursor did not reach is left behind.
        let mut cursor = Cursor::new();
        cursor.advance();
        let mut ahead = Ahead { cursor: &mut cursor, planes: [none, v, none, none] };
        assert_eq!(at(ahead.lines(1)), v_lines);
    }

    #[test]
    fn keeps_its_distance() {
        let bytes = vec![0u8; 2 * 4096];
        let rows: Vec<&[u8]> = (0..64).map(|t| &bytes[t * 64..]).collect();
        let plane = plane(&rows, &[0, 1], 32);
        let total = 4 * 2 * 4096;
        let mut ahead = Ahead { cursor: &mut Cursor::new(), planes: [plane; 4] };
        let (mut asked, mut worked) = (0, 0);
        while worked < total {
            worked += 200;
            asked += ahead.lines(200).len() * LINE;
            let expected = (worked + DISTANCE as usize).min(total);
            assert!(asked >= expected && asked < expected + LINE, "{asked} after {worked}");
        }
        assert_eq!(asked, total);
    }
}
