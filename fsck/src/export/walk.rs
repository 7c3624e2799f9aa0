//! The pieces of an exported file in their fixed order, and what each of them must hold.

use super::reader::{CheckEnd, PieceReader, ReadPiece};
use super::report::ExportInfo;
use crate::elements::is_min_max;
use crate::finding::{Code, Finding};
use crate::planes;
use std::io::Read;
use stratakv_format::export::{
    ExportEnd, ExportPage, PIECE_END, PIECE_GROUPS, PIECE_KEY, PIECE_LAYOUT, PIECE_STATE, PIECE_SUMMARY, PIECE_TAIL,
    PIECE_TOKEN_IDS, PieceHeader,
};
use stratakv_format::frame::{min_max_element, min_max_record_bytes};
use stratakv_format::layout::{LayerGeometry, Layout};
use stratakv_format::{DType, PAGE_BYTES, PlaneCodec, Unverified};
use zerocopy::FromBytes;

/// The check of one exported file.
pub(super) struct ExportWalk<'a, R> {
    reader: PieceReader<'a, R>,
    info: ExportInfo,
    show_keys: bool,
}

/// A layer of the export.
#[derive(Clone, Copy)]
struct LayerPieces<'a> {
    layout: &'a Layout,
    index: usize,
    layer: &'a LayerGeometry,
    /// The number of tokens of the layer.
    tokens: u64,
    /// True if a summary piece follows each groups piece.
    summaries: bool,
}

impl LayerPieces<'_> {
    fn group(&self) -> u64 {
        u64::from(self.layout.group_tokens)
    }

    /// Returns the number of tokens in full groups.
    fn grouped(&self) -> u64 {
        self.tokens - self.tokens % self.group()
    }

    /// Returns the stored bytes of a group, and of its K plane.
    fn block_bytes(&self) -> (usize, usize) {
        let block = self.layout.block(self.layer);
        (block.key_bytes + block.value_bytes, block.key_bytes)
    }
}

impl<'a, R: Read> ExportWalk<'a, R> {
    pub(super) fn new(reader: PieceReader<'a, R>, info: ExportInfo, show_keys: bool) -> Self {
        Self { reader, info, show_keys }
    }

    /// Checks the file, and returns what it holds as far as it could be read.
    pub(super) fn check(mut self) -> ExportInfo {
        // The finding that stopped the check is in the sink.
        let _ = self.file();
        self.info.pieces = self.reader.pieces();
        self.info
    }

    fn file(&mut self) -> Result<(), CheckEnd> {
        let page = self.page()?;
        let layout = self.layout(&page)?;
        if page.key_bytes.get() > 0 {
            self.key(u64::from(page.key_bytes.get()))?;
        }
        if page.has_state == 1 {
            self.reader.next_sized(PIECE_STATE, u64::from(page.state_bytes.get()))?;
        }
        self.token_ids(page.token_ids.get())?;
        let (tokens, summaries) = (page.tokens.get(), page.summaries.get() != 0);
        for (index, layer) in layout.layers.iter().enumerate().filter(|(_, layer)| layer.has_kv()) {
            let pieces = LayerPieces { layout: &layout, index, layer, tokens, summaries };
            self.groups(pieces)?;
            self.tail(pieces)?;
        }
        self.end()
    }

    fn page(&mut self) -> Result<ExportPage, CheckEnd> {
        let mut front = vec![0; PAGE_BYTES];
        self.reader.fill(&mut front)?;
        let page = Unverified::<ExportPage>::at_front(&front, "export page").and_then(|page| page.verify());
        let page = match page {
            Ok(page) => page.into_inner(),
            Err(e) => {
                self.reader.push(Finding::format(Code::ExportPage, &e), 0, PAGE_BYTES as u64);
                return Err(CheckEnd);
            }
        };
        self.reader.start_pieces(page.nonce.get(), page.sequence.get());
        let info = &mut self.info;
        info.tokens = page.tokens.get();
        info.token_ids = page.token_ids.get();
        info.sequence = page.sequence.get();
        info.exported_unix_ms = page.exported_unix_ms.get();
        info.state_bytes = (page.has_state == 1).then_some(u64::from(page.state_bytes.get()));
        info.store_id = page.store_id.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
        Ok(page)
    }

    fn layout(&mut self, page: &ExportPage) -> Result<Layout, CheckEnd> {
        let start = self.reader.at();
        if !self.reader.next_sized(PIECE_LAYOUT, u64::from(page.layout_bytes.get()))? {
            return Err(CheckEnd);
        }
        let bytes = self.reader.piece();
        let layout = match Layout::decode(bytes) {
            Ok(layout) if layout.encoded_bytes() == bytes.len() => layout,
            Ok(_) => return Err(self.reader.stop(Code::ExportPiece, "bytes follow the layout in its piece", start)),
            Err(e) => {
                self.reader.push(Finding::format(Code::ExportPiece, &e), start, self.reader.at() - start);
                return Err(CheckEnd);
            }
        };
        self.info.layers = layout.layers.len() as u64;
        self.info.group_tokens = u64::from(layout.group_tokens);
        Ok(layout)
    }

    fn key(&mut self, bytes: u64) -> Result<(), CheckEnd> {
        let start = self.reader.at();
        self.reader.next_sized(PIECE_KEY, bytes)?;
        if std::str::from_utf8(self.reader.piece()).is_err() {
            let finding = Finding::damage(Code::ExportPiece, "the key is not UTF-8");
            self.reader.push(finding, start, self.reader.at() - start);
        } else if self.show_keys {
            self.info.key = Some(self.reader.piece().escape_ascii().to_string());
        }
        Ok(())
    }

    fn token_ids(&mut self, total: u64) -> Result<(), CheckEnd> {
        let mut ids = 0;
        while ids < total {
            let ReadPiece { header, start, .. } = self.reader.next(PIECE_TOKEN_IDS)?;
            let count = u64::from(header.tokens.get());
            let fits = header.first.get() == ids && header.layer.get() == 0 && count > 0;
            if !fits || u64::from(header.bytes.get()) != count * 4 || count > total - ids {
                let text = format!("expected token ids from {ids} on");
                return Err(self.reader.stop(Code::ExportOrder, text, start));
            }
            ids += count;
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), CheckEnd> {
        let (pieces, start) = (self.reader.pieces(), self.reader.at());
        if self.reader.next_sized(PIECE_END, size_of::<ExportEnd>() as u64)? {
            let end = ExportEnd::read_from_bytes(self.reader.piece()).map_err(|_| CheckEnd)?;
            let at = self.reader.at();
            if (end.pieces.get(), end.file_bytes.get()) != (pieces, at) {
                let text = format!(
                    "the end piece names {} pieces and {} bytes, the file has {pieces} pieces and {at} bytes",
                    end.pieces, end.file_bytes
                );
                self.reader.push(Finding::damage(Code::ExportLength, text), start, at - start);
            }
        }
        self.reader.expect_end()
    }

    /// Checks the full groups of a layer, and their summaries.
    fn groups(&mut self, pieces: LayerPieces<'_>) -> Result<(), CheckEnd> {
        let LayerPieces { layout, index, layer, .. } = pieces;
        let (group, grouped) = (pieces.group(), pieces.grouped());
        let (block, key_bytes) = pieces.block_bytes();
        let mut first = 0;
        while first < grouped {
            let piece = self.reader.next(PIECE_GROUPS)?;
            let header = &piece.header;
            let count = u64::from(header.tokens.get());
            let whole = count > 0 && count.is_multiple_of(group) && count <= grouped - first;
            let fits = usize::from(header.layer.get()) == index && header.first.get() == first && whole;
            if !fits || u64::from(header.bytes.get()) != count / group * block as u64 {
                let text = format!("expected groups of layer {index} from token {first} on");
                return Err(self.reader.stop(Code::ExportOrder, text, piece.start));
            }
            let good = match layer.is_encoded() {
                true => piece.good && self.is_decodable(pieces, &piece),
                false => {
                    if piece.good {
                        self.check_finite(layout, &piece);
                    }
                    piece.good
                }
            };
            if pieces.summaries {
                let keys =
                    self.reader.piece().chunks_exact(block).map(|block| {
                        planes::decoded(layer.codecs[0], &layout.plane_shape(layer, 0), &block[..key_bytes])
                    });
                let keys: Vec<Vec<u8>> = if good { keys.collect() } else { Vec::new() };
                self.summary(pieces, header, &keys)?;
            }
            first += count;
        }
        Ok(())
    }

    /// Checks the last tokens of a layer, which fill no group.
    fn tail(&mut self, pieces: LayerPieces<'_>) -> Result<(), CheckEnd> {
        let LayerPieces { layout, index, layer, tokens, .. } = pieces;
        let grouped = pieces.grouped();
        if tokens == grouped {
            return Ok(());
        }
        let element = layout.dtype.bytes();
        let (key, value) = (layer.key_elements() * element, layer.value_elements() * element);
        let piece = self.reader.next(PIECE_TAIL)?;
        let header = &piece.header;
        let count = tokens - grouped;
        let expected = (index, grouped, count, count * (key + value) as u64);
        let found = (
            usize::from(header.layer.get()),
            header.first.get(),
            u64::from(header.tokens.get()),
            u64::from(header.bytes.get()),
        );
        if found != expected {
            let text = format!("expected the last {count} tokens of layer {index}");
            return Err(self.reader.stop(Code::ExportOrder, text, piece.start));
        }
        if piece.good && layer.is_encoded() {
            if let Some(at) = layout.dtype.first_not_encodable(self.reader.piece()) {
                let text = "an element of the tail is not a finite number up to 2^126, so its group cannot be encoded";
                self.report_number(text, at, layout, &piece);
            }
        } else if piece.good {
            self.check_finite(layout, &piece);
        }
        Ok(())
    }

    /// Checks the planes of a layer with codecs. Returns whether all of them can be decoded.
    ///
    /// The ranges of encoded planes must be finite, and so must the elements of raw planes.
    fn is_decodable(&self, pieces: LayerPieces<'_>, piece: &ReadPiece) -> bool {
        let LayerPieces { layout, layer, .. } = pieces;
        let (block, key_bytes) = pieces.block_bytes();
        let bad = self.reader.piece().chunks_exact(block).enumerate().find_map(|(nth, planes)| {
            let (keys, values) = planes.split_at(key_bytes);
            [(0, keys), (key_bytes, values)].into_iter().enumerate().find_map(|(plane, (base, bytes))| {
                let at = match layer.codecs[plane] {
                    PlaneCodec::Raw => layout.dtype.first_not_finite(bytes),
                    codec => codec.first_bad(&layout.plane_shape(layer, plane), bytes),
                };
                at.map(|at| nth * block + base + at)
            })
        });
        if let Some(at) = bad {
            self.report_number("a range or an element is not a finite number", at, layout, piece);
        }
        bad.is_none()
    }

    /// Checks that the keys and values of a piece are finite.
    fn check_finite(&self, layout: &Layout, piece: &ReadPiece) {
        if let Some(at) = layout.dtype.first_not_finite(self.reader.piece()) {
            self.report_number("an element is not a finite number", at, layout, piece);
        }
    }

    fn report_number(&self, text: &str, at: usize, layout: &Layout, piece: &ReadPiece) {
        let finding = self.reader.about(Finding::damage(Code::ExportPiece, text), &piece.header);
        self.reader.push(finding, piece.bytes_start() + at as u64, layout.dtype.bytes() as u64);
    }

    /// Checks the summaries of the groups in the piece before. `keys` holds their keys, or nothing if they are damaged.
    fn summary(&mut self, pieces: LayerPieces<'_>, groups: &PieceHeader, keys: &[Vec<u8>]) -> Result<(), CheckEnd> {
        let LayerPieces { layout, layer, .. } = pieces;
        let piece = self.reader.next(PIECE_SUMMARY)?;
        let header = &piece.header;
        let place = |h: &PieceHeader| (h.layer.get(), h.first.get(), h.tokens.get());
        let count = u64::from(header.tokens.get()) / pieces.group();
        let record = min_max_record_bytes(layer);
        if place(header) != place(groups) || u64::from(header.bytes.get()) != count * record as u64 {
            let text = "expected the summaries of the groups in the piece before";
            return Err(self.reader.stop(Code::ExportOrder, text, piece.start));
        }
        let expected = min_max_element(layout.dtype);
        if DType::from_code(header.element) != Some(expected) {
            let text = format!("the summaries have element type {}, expected {}", header.element, expected.name());
            return Err(self.reader.stop(Code::ExportPiece, text, piece.start));
        }
        if !piece.good {
            return Ok(());
        }
        for (nth, (record, keys)) in self.reader.piece().chunks_exact(record).zip(keys).enumerate() {
            if !is_min_max(record, keys, layer, layout) {
                let group = groups.first.get() / pieces.group() + nth as u64;
                let text = format!("the summary of group {group} is not the minima and maxima of its keys");
                let finding = self.reader.about(Finding::damage(Code::Summary, text).plane("summary"), header);
                let at = piece.bytes_start() + (nth * record.len()) as u64;
                self.reader.push(finding, at, record.len() as u64);
            }
        }
        Ok(())
    }
}
