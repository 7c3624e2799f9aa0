//! Writing an export: what a reader of the sequence sees, piece by piece. The next blocks are read while a piece is
//! written.

use super::PIECE_BYTES;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::{Category, lock};
use crate::plan::ReadPriority;
use crate::read::ReadTicket;
use crate::sequence::{Sequence, SequenceReader};
use std::io::Write;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::export::{
    ExportEnd, ExportPage, MAGIC, PIECE_BYTES_MAX, PIECE_END, PIECE_GROUPS, PIECE_KEY, PIECE_LAYOUT, PIECE_STATE,
    PIECE_SUMMARY, PIECE_TAIL, PIECE_TOKEN_IDS, Piece, PieceHeader,
};
use stratakv_format::features::Features;
use stratakv_format::frame::{SUMMARY_MIN_MAX, min_max_record_bytes};
use stratakv_format::layout::{LayerGeometry, Layout};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// The result of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Tokens of every layer with keys and values.
    pub tokens: u64,
    /// The bytes of the file.
    pub bytes: u64,
}

/// The file that is being written.
struct Out<W> {
    writer: W,
    nonce: u64,
    index: u64,
    bytes: u64,
    /// A piece with its header, for one write.
    piece: Vec<u8>,
}

impl<W: Write> Out<W> {
    fn write(&mut self, from_piece: bool, bytes: &[u8]) -> Result<()> {
        let bytes = if from_piece { &self.piece } else { bytes };
        self.writer.write_all(bytes).map_err(|e| Error::io(format!("write of an export at byte {}", self.bytes), e))?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn piece(&mut self, piece: &Piece, bytes: &[u8]) -> Result<()> {
        let header = PieceHeader::new(piece, self.index, self.nonce, bytes);
        self.index += 1;
        self.piece.clear();
        self.piece.extend_from_slice(header.as_bytes());
        self.piece.extend_from_slice(bytes);
        self.piece.resize(size_of::<PieceHeader>() + header.padded_bytes(), 0);
        self.write(true, &[])
    }
}

impl Sequence {
    /// Writes the sequence as it is now, committed or not, to `writer` as one self-contained file.
    ///
    /// The file holds the layout, key, caller's state, token ids, keys and values, and summaries. Memory is bounded by
    /// the size of a piece. [`Store::import`](crate::Store::import) reads the file.
    ///
    /// ```
    /// use stratakv::{ByteSize, CreateOptions, Durability, KvLayout, Store, TensorView};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// let store = Store::options().device(dir.path()).segment_bytes(ByteSize::mib(1)).open()?;
    /// let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).build()?;
    /// let mut sequence = store.create_sequence(&layout, CreateOptions::new().key("session"))?;
    /// let rows = vec![0.5_f32; 20 * 8];
    /// let tensor = TensorView::token_major(&rows, 20, 1, 8);
    /// sequence.append(0, tensor, tensor)?;
    /// sequence.commit(Durability::Sync)?;
    ///
    /// let path = dir.path().join("session.kv");
    /// let exported = sequence.export(std::fs::File::create(&path)?)?;
    /// assert_eq!((exported.tokens, exported.bytes), (20, std::fs::metadata(&path)?.len()));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Io`], [`ErrorKind::NoSpace`]: the writer failed. [`ErrorKind::Corruption`]: a block of the
    /// sequence is damaged. Import refuses the incomplete file. The errors of [`Sequence::reader`].
    pub fn export(&mut self, writer: impl Write) -> Result<Exported> {
        self.reader()?.export(writer)
    }
}

impl SequenceReader {
    /// Exports what this reader sees, as [`Sequence::export`] does. The writer of the sequence may continue meanwhile.
    ///
    /// # Errors
    /// The errors of [`Sequence::export`].
    pub fn export(&self, writer: impl Write) -> Result<Exported> {
        export(self.sequence(), writer).map_err(|e| e.during(format!("export of sequence {}", self.id())))
    }
}

fn export(sequence: &Sequence, writer: impl Write) -> Result<Exported> {
    let (store, identity) = (sequence.store(), sequence.identity());
    if identity.summaries & !(1 << (SUMMARY_MIN_MAX - 1)) != 0 {
        let text = "the sequence carries a summary that files of this version do not know";
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let memory = memory_bytes(identity.layout.raw());
    let _memory = store.devices.reserve(memory, Category::Other).ok_or_else(|| {
        Error::new(ErrorKind::MemoryLimit, format!("an export takes {memory} bytes, more than memory_limit has left"))
    })?;
    let mut layout = Vec::new();
    identity.layout.raw().encode(&mut layout);
    let environment = &store.devices.environment;
    let created = lock(&store.catalog).sequences.get(&identity.sequence).map(|meta| meta.created_unix_ms);
    let created = created.unwrap_or_else(|| environment.unix_ms());
    let state = sequence.caller_state();
    let page = ExportPage {
        magic: MAGIC,
        features: if identity.layout.raw().is_encoded() {
            Features::current().with_codecs()
        } else {
            Features::current()
        },
        store_id: store.devices.identity.store_id,
        sequence: U64::new(identity.sequence.0),
        nonce: U64::new(environment.random_u64()?),
        tokens: U64::new(sequence.len()),
        token_ids: U64::new(sequence.token_ids().len() as u64),
        created_unix_ms: U64::new(created),
        exported_unix_ms: U64::new(environment.unix_ms()),
        ttl_ms: U64::new(identity.ttl_ms),
        layout_bytes: U32::new(layout.len() as u32),
        key_bytes: U32::new(identity.key.len() as u32),
        state_bytes: U32::new(state.map_or(0, <[u8]>::len) as u32),
        summaries: U32::new(identity.summaries),
        has_state: u8::from(state.is_some()),
        evictable: identity.evictable,
        reserved: [0; 6],
    };
    let mut out = Out { writer, nonce: page.nonce.get(), index: 0, bytes: 0, piece: Vec::new() };
    out.write(false, &page.encode())?;
    out.piece(&Piece::plain(PIECE_LAYOUT), &layout)?;
    if !identity.key.is_empty() {
        out.piece(&Piece::plain(PIECE_KEY), identity.key.as_bytes())?;
    }
    if let Some(state) = state {
        out.piece(&Piece::plain(PIECE_STATE), state)?;
    }
    let mut bytes = Vec::new();
    for (at, ids) in sequence.token_ids().chunks(PIECE_BYTES / 4).enumerate() {
        bytes.clear();
        bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        let first = (at * (PIECE_BYTES / 4)) as u64;
        out.piece(&Piece { first, tokens: ids.len() as u32, ..Piece::plain(PIECE_TOKEN_IDS) }, &bytes)?;
    }
    for layer in 0..identity.layout.layers() {
        if identity.layout.raw().layers[layer].has_kv() {
            groups(sequence, layer, &mut out, &mut bytes)?;
        }
    }
    let end = (size_of::<PieceHeader>() + size_of::<ExportEnd>()) as u64;
    let end = ExportEnd { pieces: U64::new(out.index), file_bytes: U64::new(out.bytes + end) };
    out.piece(&Piece::plain(PIECE_END), end.as_bytes())?;
    out.writer.flush().map_err(|e| Error::io("write of an export", e))?;
    Ok(Exported { tokens: sequence.len(), bytes: out.bytes })
}

/// Returns the groups of a layer per piece. Their min/max summaries are a piece too.
fn groups_per_piece(layout: &Layout, layer: &LayerGeometry) -> u64 {
    let block = layout.block(layer);
    let dense = block.key_bytes + block.value_bytes;
    (PIECE_BYTES / dense).min(PIECE_BYTES_MAX / min_max_record_bytes(layer)).max(1) as u64
}

/// Returns the most memory beside the buffers of reads: a piece, its bytes without the header, and its summaries.
fn memory_bytes(layout: &Layout) -> usize {
    let layers = layout.layers.iter().filter(|layer| layer.has_kv());
    let of = |layer: &LayerGeometry| {
        let (block, groups) = (layout.block(layer), groups_per_piece(layout, layer) as usize);
        (groups * (block.key_bytes + block.value_bytes), groups * min_max_record_bytes(layer))
    };
    let largest = layers.map(of).fold((PIECE_BYTES, 0), |a, b| (a.0.max(b.0), a.1.max(b.1)));
    2 * largest.0.max(largest.1) + largest.1 + 2 * size_of::<PieceHeader>()
}

/// A read of groups in flight.
fn read(sequence: &Sequence, layer: usize, groups: Range<u64>) -> Result<ReadTicket> {
    let view = sequence.stored_groups(layer, groups)?;
    ReadTicket::new(Arc::clone(&sequence.store().devices), vec![view.inner], ReadPriority::Demand(None))
}

fn groups(sequence: &Sequence, layer: usize, out: &mut Out<impl Write>, bytes: &mut Vec<u8>) -> Result<()> {
    let layout = &sequence.identity().layout;
    let per_piece = groups_per_piece(layout.raw(), layout.kv_layer(layer)?);
    let size = layout.group_tokens() as u64;
    let sealed = sequence.len() / size;
    let at = |first: u64| first..(first + per_piece).min(sealed);
    let mut next = if sealed > 0 { Some(read(sequence, layer, at(0))?) } else { None };
    let mut first = 0;
    let mut summaries = Vec::new();
    while let Some(ticket) = next.take() {
        let range = at(first);
        let batch = ticket.wait()?;
        first = range.end;
        if first < sealed {
            next = Some(read(sequence, layer, at(first))?);
        }
        let blocks = batch.get(0)?;
        bytes.clear();
        for nth in 0..(range.end - range.start) as usize {
            let (keys, values) = blocks.stored(nth)?;
            bytes.extend_from_slice(keys);
            bytes.extend_from_slice(values);
        }
        let tokens = ((range.end - range.start) * size) as u32;
        let piece = Piece { layer: layer as u16, first: range.start * size, tokens, ..Piece::plain(PIECE_GROUPS) };
        out.piece(&piece, bytes)?;
        if let Some(element) = sequence.stored_summaries(layer, range, &mut summaries)? {
            let summary = Piece { kind: PIECE_SUMMARY, summary: SUMMARY_MIN_MAX, element: Some(element), ..piece };
            out.piece(&summary, &summaries)?;
        }
    }
    bytes.clear();
    if let Some(tail) = sequence.stored_tail(layer, bytes)? {
        let (layer, first, tokens) = (tail.layer as u16, tail.first_token, tail.tokens);
        out.piece(&Piece { layer, first, tokens, ..Piece::plain(PIECE_TAIL) }, bytes)?;
    }
    Ok(())
}
