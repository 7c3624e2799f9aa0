//! The pieces of an exported file, read in order and verified one by one.

use crate::finding::{Code, FilePlace, Finding, Sink};
use crate::io::is_zero;
use crate::report::Progress;
use std::io::Read;
use stratakv_format::Unverified;
use stratakv_format::export::{PIECE_GROUPS, PIECE_SUMMARY, PIECE_TAIL, PieceHeader, piece_checksum};

/// The end of a check whose next piece cannot be found. The cause is among the findings.
pub(super) struct CheckEnd;

/// A piece whose header is valid.
pub(super) struct ReadPiece {
    pub(super) header: PieceHeader,
    /// The offset of the header in the file.
    pub(super) start: u64,
    /// True if the bytes match their checksum.
    pub(super) good: bool,
}

impl ReadPiece {
    /// Returns the offset of the piece's first byte in the file.
    pub(super) fn bytes_start(&self) -> u64 {
        self.start + size_of::<PieceHeader>() as u64
    }
}

/// A reader of pieces.
pub(super) struct PieceReader<'a, R> {
    reader: R,
    /// The offset of the next byte.
    at: u64,
    /// The number of pieces that were read.
    index: u64,
    /// The nonce of the file, which seeds the checksums of the headers.
    nonce: u64,
    /// The id of the sequence, for findings.
    sequence: u64,
    /// The bytes of the piece that was read last, without padding.
    piece: Vec<u8>,
    place: FilePlace,
    sink: &'a Sink,
    progress: &'a dyn Progress,
}

impl<'a, R: Read> PieceReader<'a, R> {
    pub(super) fn new(reader: R, place: FilePlace, sink: &'a Sink, progress: &'a dyn Progress) -> Self {
        Self { reader, at: 0, index: 0, nonce: 0, sequence: 0, piece: Vec::new(), place, sink, progress }
    }

    /// Sets what the export page says: the nonce of the file, and the sequence that findings name.
    pub(super) fn start_pieces(&mut self, nonce: u64, sequence: u64) {
        (self.nonce, self.sequence) = (nonce, sequence);
    }

    /// Returns the offset of the next byte.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Returns the number of pieces that were read.
    pub(super) fn pieces(&self) -> u64 {
        self.index
    }

    /// Returns the bytes of the piece that was read last.
    pub(super) fn piece(&self) -> &[u8] {
        &self.piece
    }

    /// Reports a finding at `length` bytes from `at` on.
    pub(super) fn push(&self, finding: Finding, at: u64, length: u64) {
        self.sink.push(finding.at(&self.place, at, length));
    }

    /// Adds the sequence, layer and tokens of a piece to a finding.
    pub(super) fn about(&self, finding: Finding, header: &PieceHeader) -> Finding {
        let finding = finding.sequence(self.sequence);
        match header.kind.get() {
            PIECE_GROUPS | PIECE_SUMMARY | PIECE_TAIL => {
                let (first, tokens) = (header.first.get(), u64::from(header.tokens.get()));
                finding.layer(header.layer.get()).tokens(first, first + tokens)
            }
            _ => finding,
        }
    }

    /// Reports damage from `at` to the current offset, and returns the error that ends the check.
    pub(super) fn stop(&self, code: Code, text: impl Into<String>, at: u64) -> CheckEnd {
        self.push(Finding::damage(code, text), at, self.at.saturating_sub(at));
        CheckEnd
    }

    /// Fills `out` with the next bytes of the file.
    pub(super) fn fill(&mut self, out: &mut [u8]) -> Result<(), CheckEnd> {
        let start = self.at;
        let mut done = 0;
        while done < out.len() {
            match self.reader.read(&mut out[done..]) {
                Ok(0) => {
                    self.at += done as u64;
                    let text = format!("the file ends at byte {}, inside a piece", self.at);
                    return Err(self.stop(Code::ExportLength, text, start));
                }
                Ok(read) => done += read,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.stop(Code::IoError, format!("read failed: {e}"), start)),
            }
        }
        self.at += done as u64;
        self.progress.advance(done as u64);
        Ok(())
    }

    /// Checks that the file has no further byte.
    pub(super) fn expect_end(&mut self) -> Result<(), CheckEnd> {
        let mut more = [0];
        loop {
            return match self.reader.read(&mut more) {
                Ok(0) => Ok(()),
                Ok(_) => Err(self.stop(Code::ExportLength, "bytes follow the end piece", self.at)),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => Err(self.stop(Code::IoError, format!("read failed: {e}"), self.at)),
            };
        }
    }

    /// Reads the next piece, which must be of this kind.
    pub(super) fn next(&mut self, kind: u16) -> Result<ReadPiece, CheckEnd> {
        let start = self.at;
        let mut front = [0; size_of::<PieceHeader>()];
        self.fill(&mut front)?;
        let header = Unverified::<PieceHeader>::at_front(&front, "piece header");
        let header = match header.and_then(|header| header.verify(self.index, self.nonce)) {
            Ok(header) => header.into_inner(),
            Err(e) => {
                self.push(Finding::format(Code::ExportPiece, &e), start, front.len() as u64);
                return Err(CheckEnd);
            }
        };
        if header.kind.get() != kind {
            let text = format!("piece {} has kind {}, expected kind {kind}", self.index, header.kind);
            return Err(self.stop(Code::ExportOrder, text, start));
        }
        let bytes = header.bytes.get() as usize;
        let mut piece = std::mem::take(&mut self.piece);
        piece.resize(bytes.next_multiple_of(8), 0);
        let filled = self.fill(&mut piece);
        self.piece = piece;
        filled?;
        let mut read = ReadPiece { header, start, good: true };
        if !is_zero(&self.piece[bytes..]) {
            let finding = Finding::damage(Code::Padding, "the padding of the piece is not zero");
            self.push(finding, read.bytes_start() + bytes as u64, (self.piece.len() - bytes) as u64);
            read.good = false;
        }
        self.piece.truncate(bytes);
        let (expected, computed) = (header.checksum.get(), piece_checksum(&self.piece));
        if computed != expected {
            let text =
                format!("the checksum of piece {} is {computed:#x}, but its header says {expected:#x}", self.index);
            let finding = Finding::damage(Code::PayloadChecksum, text).values(expected, computed);
            self.push(self.about(finding, &header), read.bytes_start(), bytes as u64);
            read.good = false;
        }
        self.index += 1;
        Ok(read)
    }

    /// Reads the next piece, which must be of this kind and size. Returns whether its bytes match their checksum.
    pub(super) fn next_sized(&mut self, kind: u16, bytes: u64) -> Result<bool, CheckEnd> {
        let piece = self.next(kind)?;
        if u64::from(piece.header.bytes.get()) == bytes {
            return Ok(piece.good);
        }
        let text = format!("the piece has {} bytes, expected {bytes}", piece.header.bytes);
        Err(self.stop(Code::ExportPiece, text, piece.start))
    }
}
