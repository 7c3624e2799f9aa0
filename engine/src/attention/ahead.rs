//! What to prefetch: a cursor that runs a fixed number of bytes ahead of the work, over the taking-part spans of the pieces to
//! come.

use super::piece::Piece;
use super::shape::AttentionShape;

/// How far the prefetches run ahead of the work, in bytes: DRAM latency times the bandwidth of a core, with a margin.
const DISTANCE: isize = 8192;
/// Bytes of a cache line.
const LINE: usize = 64;

/// A cursor over the cache lines of pieces, in the order in which the passes read them (K plane, V plane, next piece).
pub(super) struct Ahead<'a> {
    shape: AttentionShape,
    pieces: &'a [Piece<'a>],
    /// The plane from which spans are taken now, cut at its heads.
    spans: Spans<'a>,
    in_v: bool,
    span: &'a [u8],
    /// Bytes that may be asked for now.
    credit: isize,
}

/// The spans of the taking-part heads of one plane: each from the first taking-part token to the last.
#[derive(Default)]
struct Spans<'a> {
    plane: &'a [u8],
    heads: super::mask::MaskIter,
    stride: usize,
    from: usize,
    to: usize,
}

impl<'a> Spans<'a> {
    fn new(plane: &'a [u8], piece: &Piece<'_>, row_bytes: usize) -> Self {
        let tokens = piece.selected_tokens().bits();
        let (first, end) = if tokens == 0 { (0, 0) } else { (tokens.trailing_zeros(), 128 - tokens.leading_zeros()) };
        Self {
            plane,
            heads: piece.heads.iter(),
            stride: piece.group_tokens.saturating_mul(row_bytes),
            from: first as usize * row_bytes,
            to: end as usize * row_bytes,
        }
    }
}

impl<'a> Iterator for Spans<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let start = self.heads.next()?.saturating_mul(self.stride);
        // Pieces to come are not validated yet: a span beyond the plane is empty.
        Some(self.plane.get(start.saturating_add(self.from)..start.saturating_add(self.to)).unwrap_or(&[]))
    }
}

impl<'a> Ahead<'a> {
    /// At the start of `pieces`, allowed the whole distance at once.
    pub(super) fn new(shape: &AttentionShape, pieces: &'a [Piece<'a>]) -> Self {
        Self { shape: *shape, pieces, spans: Spans::default(), in_v: true, span: &[], credit: DISTANCE }
    }

    /// `bytes` of the pieces are being worked on: calls `prefetch` with the address of each line that comes into the distance.
    #[inline(always)]
    pub(super) fn step(&mut self, bytes: usize, mut prefetch: impl FnMut(*const u8)) {
        self.credit = self.credit.saturating_add(bytes as isize);
        while self.credit > 0 {
            if self.span.is_empty() && !self.next_span() {
                return;
            }
            prefetch(self.span.as_ptr());
            let (line, rest) = self.span.split_at(self.span.len().min(LINE));
            self.credit -= line.len() as isize;
            self.span = rest;
        }
    }

    /// Goes to the next span that is not empty; false at the end of the pieces.
    #[cold]
    fn next_span(&mut self) -> bool {
        let element = self.shape.dtype().bytes();
        loop {
            if let Some(span) = self.spans.next() {
                if span.is_empty() {
                    continue;
                }
                self.span = span;
                return true;
            }
            let Some((piece, rest)) = self.pieces.split_first() else { return false };
            if self.in_v {
                self.spans = Spans::new(piece.k, piece, self.shape.dk() * element);
                self.in_v = false;
            } else {
                self.spans = Spans::new(piece.v, piece, self.shape.dv() * element);
                self.in_v = true;
            }
            if self.in_v || self.shape.dv() == 0 {
                self.in_v = true;
                self.pieces = rest;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{HeadMask, TokenMask};
    use stratakv_format::DType;

    #[test]
    fn covers_exactly_what_takes_part() {
        let shape = AttentionShape::new(3, 3, 32, 16, DType::F32).unwrap(); // rows of 128 and 64 bytes
        let k = vec![0u8; 3 * 4 * 128];
        let v = vec![0u8; 3 * 4 * 64];
        let heads: HeadMask = [0, 2].into_iter().collect();
        let positions: TokenMask = [1, 2].into_iter().collect();
        let whole = Piece { k: &k, v: &v, group_tokens: 4, tokens: 4, heads: HeadMask::one(1), positions: None };
        let part = Piece { heads, positions: Some(positions), ..whole };
        let none = Piece { positions: Some(TokenMask::EMPTY), ..whole };
        let broken = Piece { k: &k[..1], v: &[], ..whole };
        let pieces = [part, none, broken, whole];
        let mut ahead = Ahead::new(&shape, &pieces);
        let mut lines = Vec::new();
        ahead.step(1, |at| lines.push(at as usize));
        let (k, v) = (k.as_ptr() as usize, v.as_ptr() as usize);
        let span = |base, from: usize, to: usize| (from..to).step_by(LINE).map(move |at| base + at);
        let wanted: Vec<usize> = span(k, 128, 3 * 128)
            .chain(span(k, 9 * 128, 11 * 128))
            .chain(span(v, 64, 3 * 64))
            .chain(span(v, 9 * 64, 11 * 64))
            .chain(span(k, 4 * 128, 8 * 128))
            .chain(span(v, 4 * 64, 8 * 64))
            .collect();
        assert_eq!(lines, wanted);
    }

    #[test]
    fn keeps_its_distance() {
        let shape = AttentionShape::new(1, 1, 64, 64, DType::F16).unwrap();
        let plane = vec![0u8; 128 * 128];
        let piece =
            Piece { k: &plane, v: &plane, group_tokens: 128, tokens: 128, heads: HeadMask::one(0), positions: None };
        let pieces = [piece; 3];
        let mut ahead = Ahead::new(&shape, &pieces);
        let (mut asked, mut worked) = (0, 0);
        while worked < 6 * plane.len() {
            worked += 200;
            ahead.step(200, |_| asked += LINE);
            let expected = (worked + DISTANCE as usize).min(6 * plane.len());
            assert!(asked >= expected.min(asked + LINE) && asked < expected + LINE, "{asked} after {worked}");
        }
        assert_eq!(asked, 6 * plane.len());
    }
}
