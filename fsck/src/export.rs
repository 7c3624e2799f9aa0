//! An exported sequence (SPEC.md section 17), read from front to back by itself: no store, nothing of the engine.

use crate::finding::{Code, FilePlace, Finding, Sink};
use crate::planes;
use crate::{CheckError, EXIT_CLEAN, Options, Progress, Report, Severity};
use serde::Serialize;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use stratakv_format::export::{
    ExportEnd, ExportPage, PIECE_END, PIECE_GROUPS, PIECE_KEY, PIECE_LAYOUT, PIECE_STATE, PIECE_SUMMARY, PIECE_TAIL,
    PIECE_TOKEN_IDS, PieceHeader, piece_checksum,
};
use stratakv_format::layout::{LayerGeometry, Layout};
use stratakv_format::{DType, PAGE_BYTES, PlaneCodec, Unverified};
use zerocopy::FromBytes;

/// What the file says it holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ExportInfo {
    /// Bytes of the file.
    pub bytes: u64,
    /// Pieces that were read.
    pub pieces: u64,
    /// Tokens of every layer with KV.
    pub tokens: u64,
    /// Token ids.
    pub token_ids: u64,
    /// Layers, those without KV included.
    pub layers: u64,
    /// Tokens of a group.
    pub group_tokens: u64,
    /// Bytes of the caller's state; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_bytes: Option<u64>,
    /// The store it came from, in hexadecimal digits.
    pub store_id: String,
    /// Its id there.
    pub sequence: u64,
    /// Key, only when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// When it was written, milliseconds since 1970.
    pub exported_unix_ms: u64,
}

/// The result of a check of one file.
#[derive(Clone, Debug, Serialize)]
pub struct ExportReport {
    /// The file is whole and every byte of it is right.
    pub clean: bool,
    /// The findings, in the order of the file.
    pub findings: Vec<Finding>,
    /// What it holds, as far as it could be read.
    pub export: ExportInfo,
    /// The exit code of the program.
    pub exit_code: u8,
}

impl ExportReport {
    /// The report for a person.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            let _ = writeln!(text, "{finding}");
        }
        let e = &self.export;
        if let Some(key) = &e.key {
            let _ = writeln!(text, "key {key}");
        }
        let _ = writeln!(
            text,
            "sequence {} of store {}: {} tokens of {} layers, {} token ids; {} pieces, {} bytes",
            e.sequence, e.store_id, e.tokens, e.layers, e.token_ids, e.pieces, e.bytes
        );
        let damage = self.findings.iter().filter(|finding| finding.severity == Severity::Damage).count();
        let _ = if self.clean { writeln!(text, "clean") } else { writeln!(text, "not clean: {damage} findings") };
        text
    }
}

/// Checks an exported sequence. Reads only, and only as much memory as a piece takes.
///
/// # Errors
/// There is no such file, or it cannot be opened.
pub fn check_export(path: &Path, options: &Options, progress: &dyn Progress) -> Result<ExportReport, CheckError> {
    let not_a_file = |reason: &str| CheckError::NotAStore { path: path.to_path_buf(), reason: reason.into() };
    let failed = |source| CheckError::Io { path: path.to_path_buf(), source };
    // Without O_NONBLOCK a FIFO in place of a file would hold the check up forever.
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => not_a_file("there is no such file"),
        _ => failed(e),
    })?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(not_a_file("not a regular file"));
    }
    progress.start(metadata.len());
    Ok(check_reader(file, metadata.len(), path, options, progress))
}

/// [`check_export`] of bytes from anywhere: `bytes` of them, named `path` in findings.
pub fn check_reader(
    reader: impl Read,
    bytes: u64,
    path: &Path,
    options: &Options,
    progress: &dyn Progress,
) -> ExportReport {
    let sink = Sink::new(options.findings_max);
    let (directory, name) = (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or_default());
    let place = FilePlace { device: None, path: Arc::from(directory), file: Arc::from(&*name.to_string_lossy()) };
    let mut walk = Walk {
        reader,
        at: 0,
        index: 0,
        nonce: 0,
        piece: Vec::new(),
        place,
        sink: &sink,
        progress,
        info: ExportInfo { bytes, ..ExportInfo::default() },
        show_keys: options.show_keys,
    };
    // What stopped it is among the findings.
    let _ = walk.file();
    let mut info = walk.info;
    info.pieces = walk.index;
    let collected = sink.into_collected();
    let exit_code = Report::code(collected.damage, collected.unsupported, collected.io_errors);
    ExportReport { clean: exit_code == EXIT_CLEAN, findings: collected.findings, export: info, exit_code }
}

/// The check cannot go on: where the next piece begins is not known.
struct Stop;

struct Walk<'a, R> {
    reader: R,
    at: u64,
    index: u64,
    nonce: u64,
    /// Bytes of the piece read last, without padding.
    piece: Vec<u8>,
    place: FilePlace,
    sink: &'a Sink,
    progress: &'a dyn Progress,
    info: ExportInfo,
    show_keys: bool,
}

impl<R: Read> Walk<'_, R> {
    fn push(&self, finding: Finding, at: u64, length: u64) {
        self.sink.push(finding.at(&self.place, at, length));
    }

    fn stop(&self, code: Code, text: impl Into<String>, at: u64) -> Stop {
        self.push(Finding::damage(code, text), at, self.at.saturating_sub(at));
        Stop
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<(), Stop> {
        let start = self.at;
        let mut done = 0;
        while done < out.len() {
            match self.reader.read(&mut out[done..]) {
                Ok(0) => {
                    self.at += done as u64;
                    return Err(self.stop(Code::ExportLength, "the file ends in the middle", start));
                }
                Ok(read) => done += read,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.stop(Code::IoError, format!("cannot be read: {e}"), start)),
            }
        }
        self.at += done as u64;
        self.progress.advance(done as u64);
        Ok(())
    }

    /// The header of the next piece, its bytes in `self.piece` and whether they are right.
    fn next(&mut self, kind: u16) -> Result<(PieceHeader, u64, bool), Stop> {
        let start = self.at;
        let mut front = [0; size_of::<PieceHeader>()];
        self.fill(&mut front)?;
        let header = Unverified::<PieceHeader>::at_front(&front, "piece header");
        let header = match header.and_then(|header| header.verify(self.index, self.nonce)) {
            Ok(header) => header.into_inner(),
            Err(e) => {
                self.push(Finding::format(Code::ExportPiece, &e), start, front.len() as u64);
                return Err(Stop);
            }
        };
        if header.kind.get() != kind {
            let text = format!("piece {} is of kind {} where one of kind {kind} is due", self.index, header.kind);
            return Err(self.stop(Code::ExportOrder, text, start));
        }
        let bytes = header.bytes.get() as usize;
        let mut piece = std::mem::take(&mut self.piece);
        piece.resize(bytes.next_multiple_of(8), 0);
        let filled = self.fill(&mut piece);
        self.piece = piece;
        filled?;
        let mut right = true;
        if !crate::io::is_zero(&self.piece[bytes..]) {
            let finding = Finding::damage(Code::Padding, "padding of a piece is not zero");
            self.push(finding, start + front.len() as u64 + bytes as u64, (self.piece.len() - bytes) as u64);
            right = false;
        }
        self.piece.truncate(bytes);
        let computed = piece_checksum(&self.piece);
        if computed != header.checksum.get() {
            let text = format!("the bytes of piece {} do not match their checksum", self.index);
            let finding = Finding::damage(Code::PayloadChecksum, text).values(header.checksum.get(), computed);
            self.push(self.of(finding, &header), start + front.len() as u64, bytes as u64);
            right = false;
        }
        self.index += 1;
        Ok((header, start, right))
    }

    fn of(&self, finding: Finding, header: &PieceHeader) -> Finding {
        let finding = finding.sequence(self.info.sequence);
        match header.kind.get() {
            PIECE_GROUPS | PIECE_SUMMARY | PIECE_TAIL => {
                let (first, tokens) = (header.first.get(), u64::from(header.tokens.get()));
                finding.layer(header.layer.get()).tokens(first, first + tokens)
            }
            _ => finding,
        }
    }

    /// A piece of this kind and so many bytes.
    fn sized(&mut self, kind: u16, bytes: u64) -> Result<bool, Stop> {
        let (header, start, right) = self.next(kind)?;
        if u64::from(header.bytes.get()) == bytes {
            return Ok(right);
        }
        let text = format!("a piece of {} bytes where {bytes} are due", header.bytes);
        Err(self.stop(Code::ExportPiece, text, start))
    }

    fn file(&mut self) -> Result<(), Stop> {
        let mut front = vec![0; PAGE_BYTES];
        self.fill(&mut front)?;
        let page = Unverified::<ExportPage>::at_front(&front, "export page").and_then(|page| page.verify());
        let page = match page {
            Ok(page) => page.into_inner(),
            Err(e) => {
                self.push(Finding::format(Code::ExportPage, &e), 0, PAGE_BYTES as u64);
                return Err(Stop);
            }
        };
        self.nonce = page.nonce.get();
        let tokens = page.tokens.get();
        self.info.tokens = tokens;
        self.info.token_ids = page.token_ids.get();
        self.info.sequence = page.sequence.get();
        self.info.exported_unix_ms = page.exported_unix_ms.get();
        self.info.state_bytes = (page.has_state == 1).then_some(u64::from(page.state_bytes.get()));
        self.info.store_id = page.store_id.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
        let start = self.at;
        if !self.sized(PIECE_LAYOUT, u64::from(page.layout_bytes.get()))? {
            return Err(Stop);
        }
        let layout = match Layout::decode(&self.piece) {
            Ok(layout) if layout.encoded_bytes() == self.piece.len() => layout,
            Ok(_) => return Err(self.stop(Code::ExportPiece, "bytes behind the layout", start)),
            Err(e) => {
                self.push(Finding::format(Code::ExportPiece, &e), start, self.at - start);
                return Err(Stop);
            }
        };
        self.info.layers = layout.layers.len() as u64;
        self.info.group_tokens = u64::from(layout.group_tokens);
        if page.key_bytes.get() > 0 {
            let start = self.at;
            self.sized(PIECE_KEY, u64::from(page.key_bytes.get()))?;
            if std::str::from_utf8(&self.piece).is_err() {
                self.push(Finding::damage(Code::ExportPiece, "the key is not UTF-8"), start, self.at - start);
            } else if self.show_keys {
                self.info.key = Some(self.piece.escape_ascii().to_string());
            }
        }
        if page.has_state == 1 {
            self.sized(PIECE_STATE, u64::from(page.state_bytes.get()))?;
        }
        let mut ids = 0;
        while ids < page.token_ids.get() {
            let (header, start, _) = self.next(PIECE_TOKEN_IDS)?;
            let count = u64::from(header.tokens.get());
            let fits = header.first.get() == ids && header.layer.get() == 0 && count > 0;
            if !fits || u64::from(header.bytes.get()) != count * 4 || count > page.token_ids.get() - ids {
                return Err(self.stop(Code::ExportOrder, format!("token ids from {ids} on are due"), start));
            }
            ids += count;
        }
        for (index, layer) in layout.layers.iter().enumerate().filter(|(_, layer)| layer.has_kv()) {
            self.layer(&layout, index, layer, tokens, page.summaries.get() != 0)?;
        }
        let (pieces, start) = (self.index, self.at);
        if self.sized(PIECE_END, size_of::<ExportEnd>() as u64)? {
            let end = ExportEnd::read_from_bytes(&self.piece).map_err(|_| Stop)?;
            if (end.pieces.get(), end.file_bytes.get()) != (pieces, self.at) {
                let text = format!("the end names {} pieces and {} bytes", end.pieces, end.file_bytes);
                self.push(Finding::damage(Code::ExportLength, text), start, self.at - start);
            }
        }
        let mut more = [0];
        loop {
            return match self.reader.read(&mut more) {
                Ok(0) => Ok(()),
                Ok(_) => Err(self.stop(Code::ExportLength, "the file goes on behind its end", self.at)),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => Err(self.stop(Code::IoError, format!("cannot be read: {e}"), self.at)),
            };
        }
    }

    fn layer(
        &mut self,
        layout: &Layout,
        index: usize,
        layer: &LayerGeometry,
        tokens: u64,
        summaries: bool,
    ) -> Result<(), Stop> {
        let group = u64::from(layout.group_tokens);
        let sealed = tokens - tokens % group;
        let element = layout.dtype.bytes();
        let (key, value) = (layer.key_elements() * element, layer.value_elements() * element);
        let stored = layout.block(layer);
        let block = stored.key_bytes + stored.value_bytes;
        let mut first = 0;
        while first < sealed {
            let (header, start, right) = self.next(PIECE_GROUPS)?;
            let count = u64::from(header.tokens.get());
            let whole = count > 0 && count.is_multiple_of(group) && count <= sealed - first;
            let fits = usize::from(header.layer.get()) == index && header.first.get() == first && whole;
            if !fits || u64::from(header.bytes.get()) != count / group * block as u64 {
                let text = format!("groups of layer {index} from token {first} on are due");
                return Err(self.stop(Code::ExportOrder, text, start));
            }
            let right = match layer.is_encoded() {
                true => right && self.decodable(layout, layer, &header, start),
                false => {
                    if right {
                        self.finite(layout, &header, start);
                    }
                    right
                }
            };
            if summaries {
                let keys = self.piece.chunks_exact(block).map(|block| {
                    planes::decoded(layer.codecs[0], &layout.plane_shape(layer, 0), &block[..stored.key_bytes])
                });
                let keys: Vec<Vec<u8>> = if right { keys.collect() } else { Vec::new() };
                self.summary(layout, &header, layer, &keys)?;
            }
            first += count;
        }
        if tokens > sealed {
            let (header, start, right) = self.next(PIECE_TAIL)?;
            let count = tokens - sealed;
            let due = (index, sealed, count, count * (key + value) as u64);
            let found = (
                usize::from(header.layer.get()),
                header.first.get(),
                u64::from(header.tokens.get()),
                u64::from(header.bytes.get()),
            );
            if found != due {
                let text = format!("the last {count} tokens of layer {index} are due");
                return Err(self.stop(Code::ExportOrder, text, start));
            }
            if right {
                self.finite(layout, &header, start);
            }
        }
        Ok(())
    }

    /// The ranges of encoded planes are finite, and so are the elements of the others.
    fn decodable(&self, layout: &Layout, layer: &LayerGeometry, header: &PieceHeader, start: u64) -> bool {
        let stored = layout.block(layer);
        let block = stored.key_bytes + stored.value_bytes;
        let bad = self.piece.chunks_exact(block).enumerate().find_map(|(nth, planes)| {
            let (keys, values) = planes.split_at(stored.key_bytes);
            [(0, keys), (stored.key_bytes, values)].into_iter().enumerate().find_map(|(plane, (base, bytes))| {
                let at = match layer.codecs[plane] {
                    PlaneCodec::Raw => first_infinite(layout.dtype, bytes),
                    codec => codec.first_bad(&layout.plane_shape(layer, plane), bytes),
                };
                at.map(|at| nth * block + base + at)
            })
        });
        if let Some(at) = bad {
            let finding = Finding::damage(Code::ExportPiece, "a range or an element is not a finite number");
            let at = start + (size_of::<PieceHeader>() + at) as u64;
            self.push(self.of(finding, header), at, layout.dtype.bytes() as u64);
        }
        bad.is_none()
    }

    /// Keys and values are finite.
    fn finite(&self, layout: &Layout, header: &PieceHeader, start: u64) {
        if let Some(at) = first_infinite(layout.dtype, &self.piece) {
            let finding = Finding::damage(Code::ExportPiece, "an element is not a finite number");
            let at = start + (size_of::<PieceHeader>() + at) as u64;
            self.push(self.of(finding, header), at, layout.dtype.bytes() as u64);
        }
    }

    /// The summaries of the groups of the piece before, whose keys these are (none when they are damaged).
    fn summary(
        &mut self,
        layout: &Layout,
        groups: &PieceHeader,
        layer: &LayerGeometry,
        keys: &[Vec<u8>],
    ) -> Result<(), Stop> {
        let (header, start, right) = self.next(PIECE_SUMMARY)?;
        let same = |h: &PieceHeader| (h.layer.get(), h.first.get(), h.tokens.get());
        let count = u64::from(header.tokens.get()) / u64::from(layout.group_tokens);
        // Minima and maxima in 16 bits.
        let record = 4 * layer.key_elements();
        if same(&header) != same(groups) || u64::from(header.bytes.get()) != count * record as u64 {
            return Err(self.stop(Code::ExportOrder, "the summaries of the groups before are due", start));
        }
        let due = if layout.dtype == DType::F16 { DType::F16 } else { DType::Bf16 };
        if DType::from_code(header.element) != Some(due) {
            let text = format!("summaries of element type {} where {} is due", header.element, due.name());
            return Err(self.stop(Code::ExportPiece, text, start));
        }
        if !right {
            return Ok(());
        }
        for (nth, (record, keys)) in self.piece.chunks_exact(record).zip(keys).enumerate() {
            if !covers(record, keys, layer, layout) {
                let group = groups.first.get() / u64::from(layout.group_tokens) + nth as u64;
                let text = format!("the summary of group {group} is not the extremes of its keys");
                let finding = self.of(Finding::damage(Code::Summary, text).plane("summary"), &header);
                let at = start + (size_of::<PieceHeader>() + nth * record.len()) as u64;
                self.push(finding, at, record.len() as u64);
            }
        }
        Ok(())
    }
}

/// The offset of the first element that is not finite: its exponent is all ones.
fn first_infinite(dtype: DType, elements: &[u8]) -> Option<usize> {
    let (bytes, exponent) = match dtype {
        DType::F32 => (4, 0x7f80),
        DType::F16 => (2, 0x7c00),
        DType::Bf16 => (2, 0x7f80),
    };
    let infinite = |element: &[u8]| {
        let upper = u16::from_le_bytes([element[bytes - 2], element[bytes - 1]]);
        upper & exponent == exponent
    };
    elements.chunks_exact(bytes).position(infinite).map(|nth| nth * bytes)
}

/// A number whose order is that of the float with these bits.
fn ordered(bits: u16) -> i32 {
    let magnitude = i32::from(bits & 0x7fff);
    if bits & 0x8000 == 0 { magnitude } else { -1 - magnitude }
}

/// Whether a record is the minima and maxima of keys `[kv_heads, G, key_dim]`: exactly those of 16-bit keys; around those
/// of 32-bit keys, and no further away than rounding takes them.
fn covers(record: &[u8], keys: &[u8], layer: &LayerGeometry, layout: &Layout) -> bool {
    let (dim, tokens) = (usize::from(layer.key_dim), usize::from(layout.group_tokens));
    let stored: Vec<u16> = record.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
    let (minima, maxima) = stored.split_at(stored.len() / 2);
    (0..minima.len()).all(|at| {
        let (head, column) = (at / dim, at % dim);
        let row = |token: usize| ((head * tokens + token) * dim + column) * layout.dtype.bytes();
        if layout.dtype == DType::F32 {
            let value = |token| {
                let at = row(token);
                f32::from_le_bytes([keys[at], keys[at + 1], keys[at + 2], keys[at + 3]])
            };
            let low = (0..tokens).map(value).fold(f32::INFINITY, f32::min);
            let high = (0..tokens).map(value).fold(f32::NEG_INFINITY, f32::max);
            let (min, max) = (f32::from_bits(u32::from(minima[at]) << 16), f32::from_bits(u32::from(maxima[at]) << 16));
            let slack = |x: f32| x.abs() / 64.0 + f32::MIN_POSITIVE;
            return min <= low && high <= max && low - min <= slack(low) && max - high <= slack(high);
        }
        let values = (0..tokens).map(|token| ordered(u16::from_le_bytes([keys[row(token)], keys[row(token) + 1]])));
        let (low, high) = (values.clone().min(), values.max());
        low == Some(ordered(minima[at])) && high == Some(ordered(maxima[at]))
    })
}
