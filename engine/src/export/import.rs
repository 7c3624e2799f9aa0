//! Reading an export into a store.
//!
//! Each piece is verified before it is used. The sequence exists with the commit after the last piece.

use crate::error::{Error, ErrorKind, Result};
use crate::io::planted;
use crate::layout::{KvLayout, TensorView};
use crate::metrics::{Category, Reservation};
use crate::options::{CreateOptions, Durability, StoredSummary};
use crate::sequence::Sequence;
use crate::store::Store;
use half::slice::HalfBitsSliceExt;
use half::{bf16, f16};
use std::io::Read;
use std::time::Duration;
use stratakv_format::error::FormatErrorCode;
use stratakv_format::export::{
    ExportEnd, ExportPage, PIECE_END, PIECE_GROUPS, PIECE_KEY, PIECE_LAYOUT, PIECE_STATE, PIECE_SUMMARY, PIECE_TAIL,
    PIECE_TOKEN_IDS, PieceHeader,
};
use stratakv_format::frame::{SUMMARY_MIN_MAX, tail_plane_bytes};
use stratakv_format::layout::Layout;
use stratakv_format::{DType, FormatError, PAGE_BYTES, Unverified, Verified};
use zerocopy::FromBytes;

/// Options of an import.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportOptions {
    key: Option<String>,
    ttl: Option<Option<Duration>>,
    evictable: Option<u8>,
    copies: Option<u8>,
}

impl ImportOptions {
    /// Returns options with the key that is in the file.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the key, up to 512 bytes. Empty for none.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Sets the time to live, instead of that in the file. `None` for no end.
    #[must_use]
    pub fn ttl(mut self, ttl: Option<Duration>) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Sets the eviction priority, instead of that in the file. 0 for never.
    #[must_use]
    pub fn evictable(mut self, priority: u8) -> Self {
        self.evictable = Some(priority);
        self
    }

    /// Sets the copies of everything, as [`CreateOptions::copies`] does. The file does not record them.
    #[must_use]
    pub fn copies(mut self, copies: u8) -> Self {
        self.copies = Some(copies);
        self
    }
}

impl Store {
    /// Imports a sequence that [`Sequence::export`] wrote, for a model of this layout, and commits it durably.
    ///
    /// Nothing of it is visible before the commit. A damaged or truncated file leaves nothing, and neither does a
    /// crash. Everything is verified, and summaries are compared with the keys. The
    /// sequence keeps the time to live and the eviction priority of the exported one, unless `options` set them. The
    /// time to live begins with the import.
    ///
    /// ```
    /// use stratakv::export::ImportOptions;
    /// use stratakv::{ByteSize, CreateOptions, Durability, KvLayout, Store, TensorView};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let (from, to) = (tempfile::tempdir()?, tempfile::tempdir()?);
    /// let open = |dir: &std::path::Path| Store::options().device(dir).segment_bytes(ByteSize::mib(1)).open();
    /// let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).build()?;
    /// let store = open(from.path())?;
    /// let mut sequence = store.create_sequence(&layout, CreateOptions::new().key("session"))?;
    /// let tokens = vec![0.5_f32; 20 * 8];
    /// let tensor = TensorView::token_major(&tokens, 20, 1, 8);
    /// sequence.append(0, tensor, tensor)?;
    /// sequence.commit_with(b"where I was", Durability::Sync)?;
    /// let mut file = Vec::new();
    /// sequence.export(&mut file)?;
    ///
    /// let other = open(to.path())?;
    /// let moved = other.import(&file[..], &layout, ImportOptions::new())?;
    /// assert_eq!((moved.key(), moved.len(), moved.caller_state()), ("session", 20, Some(&b"where I was"[..])));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::LayoutMismatch`]: a sequence of another model, geometry or dtype. [`ErrorKind::Corruption`]: not an
    /// export, or a damaged one. The error names the byte. [`ErrorKind::Unsupported`]: an export of another version.
    /// [`ErrorKind::AlreadyExists`]: the key is taken. The errors of [`Sequence::append`] and [`Sequence::commit`].
    pub fn import(&self, reader: impl Read, layout: &KvLayout, options: ImportOptions) -> Result<Sequence> {
        import(self, reader, layout, options).map_err(|e| e.during("import"))
    }
}

/// The file that is being read.
struct ExportReader<R> {
    reader: R,
    /// The bytes read so far.
    at: u64,
    nonce: u64,
    index: u64,
    /// The bytes of the piece, as words so that elements are aligned.
    words: Vec<u64>,
    memory: Reservation,
}

/// The properties that the next piece must have.
#[derive(Clone, Copy, Default)]
struct ExpectedPiece {
    kind: u16,
    layer: usize,
    first: u64,
    /// The tokens, at most. If `whole`: exactly these.
    tokens: u64,
    whole: bool,
    bytes: Option<usize>,
}

fn damaged(at: u64, what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Corruption, format!("byte {at} of the file: {what}"))
}

fn wrong(at: u64, e: &FormatError) -> Error {
    let kind = if e.code == FormatErrorCode::Unsupported { ErrorKind::Unsupported } else { ErrorKind::Corruption };
    damaged(at, e).with_kind(kind)
}

impl<R: Read> ExportReader<R> {
    fn fill(&mut self, out: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < out.len() {
            match self.reader.read(&mut out[done..]) {
                Ok(0) => {
                    let at = self.at + done as u64;
                    return Err(damaged(at, "it ends here, in the middle; the export was cut short"));
                }
                Ok(read) => done += read,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::io(format!("read at byte {} of the file", self.at), e)),
            }
        }
        self.at += out.len() as u64;
        Ok(())
    }

    /// Reads the next piece, which must be this one. Its bytes are in [`Self::bytes`] then.
    fn next(&mut self, layout: Option<&Layout>, expected: &ExpectedPiece) -> Result<Verified<PieceHeader>> {
        let start = self.at;
        let mut front = [0; size_of::<PieceHeader>()];
        self.fill(&mut front)?;
        let header = Unverified::<PieceHeader>::at_front(&front, "piece header");
        let header = header.and_then(|h| h.verify(self.index, self.nonce)).map_err(|e| wrong(start, &e))?;
        self.index += 1;
        let piece = header.piece();
        let found = (piece.kind, usize::from(piece.layer), piece.first);
        if found != (expected.kind, expected.layer, expected.first) {
            let ExpectedPiece { kind, layer, first, .. } = expected;
            let text = format!("a piece of kind {kind}, layer {layer}, from {first} on is due, not {found:?}");
            return Err(damaged(start, text));
        }
        let tokens = u64::from(piece.tokens);
        if tokens > expected.tokens || (expected.whole && tokens != expected.tokens) {
            return Err(damaged(start, format!("a piece of {tokens} tokens where {} are due", expected.tokens)));
        }
        let bytes = match (expected.bytes, layout) {
            (None, Some(layout)) => piece.bytes_in(layout),
            (bytes, _) => bytes.map(|bytes| bytes as u64),
        };
        if bytes != Some(u64::from(header.bytes.get())) {
            let (found, due) = (header.bytes.get(), bytes.unwrap_or(0));
            return Err(damaged(start, format!("a piece of {found} bytes where {due} are due")));
        }
        let padded = header.padded_bytes();
        if padded > self.memory.bytes() && !self.memory.resize(padded) {
            let text = format!("a piece of {padded} bytes does not fit in what memory_limit has left");
            return Err(Error::new(ErrorKind::MemoryLimit, text));
        }
        let mut words = std::mem::take(&mut self.words);
        words.clear();
        words.resize(padded / 8, 0);
        let filled = self.fill(bytemuck::cast_slice_mut(&mut words));
        self.words = words;
        filled?;
        header.check_bytes(self.bytes()).map_err(|e| wrong(start, &e))?;
        Ok(header)
    }

    /// Returns the bytes of the piece, with padding.
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    /// Reads the first page of the file.
    fn page(&mut self) -> Result<Verified<ExportPage>> {
        let mut front = [0; PAGE_BYTES];
        self.fill(&mut front)?;
        let page = Unverified::<ExportPage>::at_front(&front, "export page").and_then(|page| page.verify());
        page.map_err(|e| wrong(0, &e))
    }

    /// Reads the layout, which must be the one that the importer expects.
    fn layout(&mut self, page: &ExportPage, expected: &KvLayout) -> Result<Layout> {
        let start = self.at;
        let header = self.next(None, &plain(PIECE_LAYOUT, page.layout_bytes.get()))?;
        let stored = Layout::decode(&self.bytes()[..header.bytes.get() as usize]).map_err(|e| wrong(start, &e))?;
        if stored.encoded_bytes() != header.bytes.get() as usize {
            return Err(damaged(start, "bytes behind the layout"));
        }
        if &stored != expected.raw() {
            let what = expected.difference(&stored);
            let text = format!(
                "import: the sequence was written with another {what}; the model, dtype, group size or codec differs"
            );
            return Err(Error::new(ErrorKind::LayoutMismatch, text));
        }
        Ok(stored)
    }

    /// Reads the key. It is empty if the file has none.
    fn key(&mut self, page: &ExportPage) -> Result<String> {
        if page.key_bytes.get() == 0 {
            return Ok(String::new());
        }
        let start = self.at;
        let header = self.next(None, &plain(PIECE_KEY, page.key_bytes.get()))?;
        let bytes = self.bytes()[..header.bytes.get() as usize].to_vec();
        String::from_utf8(bytes).map_err(|_| damaged(start, "the key is not UTF-8"))
    }

    /// Reads the caller's state, if the file has one.
    fn state(&mut self, page: &ExportPage) -> Result<Option<Vec<u8>>> {
        if page.has_state != 1 {
            return Ok(None);
        }
        self.next(None, &plain(PIECE_STATE, page.state_bytes.get()))?;
        Ok(Some(self.bytes()[..page.state_bytes.get() as usize].to_vec()))
    }

    /// Reads the end of the file. Its counts must equal the counts of the pieces that were read. Nothing may follow it.
    fn end(&mut self) -> Result<()> {
        let (pieces, start) = (self.index, self.at);
        self.next(None, &plain(PIECE_END, size_of::<ExportEnd>() as u32))?;
        let end = ExportEnd::ref_from_prefix(self.bytes()).map_err(|_| damaged(start, "no end"))?.0;
        if (end.pieces.get(), end.file_bytes.get()) != (pieces, self.at) {
            let (counted, bytes) = (end.pieces.get(), end.file_bytes.get());
            return Err(damaged(start, format!("it says it ends behind {counted} pieces, at byte {bytes}")));
        }
        let at = self.at;
        match self.fill(&mut [0]) {
            Ok(()) => Err(damaged(at, "there is more behind its end")),
            Err(e) if e.kind() == ErrorKind::Corruption => Ok(()),
            Err(e) => Err(e),
        }
    }
}

/// Returns the expectation of a piece that is not a part of a layer.
fn plain(kind: u16, bytes: u32) -> ExpectedPiece {
    ExpectedPiece { kind, bytes: Some(bytes as usize), ..ExpectedPiece::default() }
}

fn import(store: &Store, reader: impl Read, layout: &KvLayout, options: ImportOptions) -> Result<Sequence> {
    let inner = store.inner();
    inner.committer.check()?;
    let no_memory = || Error::new(ErrorKind::MemoryLimit, "import: no memory within memory_limit");
    let memory = inner.devices.reserve(0, Category::Other).ok_or_else(no_memory)?;
    let mut file = ExportReader { reader, at: 0, nonce: 0, index: 0, words: Vec::new(), memory };
    let page = file.page()?;
    file.nonce = page.nonce.get();
    let stored = file.layout(&page, layout)?;
    let key = file.key(&page)?;
    let has_summary = page.summaries.get() & (1 << (SUMMARY_MIN_MAX - 1)) != 0;
    let mut sequence = store.create_sequence(layout, create_options(&page, key, options, has_summary))?;
    let state = file.state(&page)?;
    import_token_ids(&mut file, &mut sequence, &stored, page.token_ids.get())?;
    for at in 0..stored.layers.len() {
        if stored.layers[at].has_kv() {
            import_layer(&mut file, &mut sequence, &stored, at, page.tokens.get(), has_summary)?;
        }
        if planted!(ImportVisible) {
            sequence.commit(Durability::Sync)?;
        }
    }
    file.end()?;
    match &state {
        Some(state) => sequence.commit_with(state, Durability::Sync)?,
        None => sequence.commit(Durability::Sync)?,
    }
    Ok(sequence)
}

/// Returns the options of the imported sequence. Options of the caller replace the options in the file.
fn create_options(page: &ExportPage, key: String, options: ImportOptions, has_summary: bool) -> CreateOptions {
    let mut create = CreateOptions::new().key(options.key.unwrap_or(key));
    create = match options.ttl {
        Some(Some(ttl)) => create.ttl(ttl),
        Some(None) => create,
        None => CreateOptions { ttl_ms: page.ttl_ms.get(), ..create },
    };
    create = create.evictable(options.evictable.unwrap_or(page.evictable));
    if let Some(copies) = options.copies {
        create = create.copies(copies);
    }
    if has_summary { create.store_summary(StoredSummary::MinMax) } else { create }
}

fn import_token_ids(
    file: &mut ExportReader<impl Read>,
    sequence: &mut Sequence,
    layout: &Layout,
    count: u64,
) -> Result<()> {
    let mut ids = 0;
    while ids < count {
        let expected =
            ExpectedPiece { kind: PIECE_TOKEN_IDS, first: ids, tokens: count - ids, ..ExpectedPiece::default() };
        let header = file.next(Some(layout), &expected)?;
        let bytes = &file.bytes()[..header.bytes.get() as usize];
        let some: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id)).collect();
        sequence.append_token_ids(&some)?;
        ids += some.len() as u64;
    }
    Ok(())
}

fn import_layer(
    file: &mut ExportReader<impl Read>,
    sequence: &mut Sequence,
    layout: &Layout,
    at: usize,
    tokens: u64,
    has_summary: bool,
) -> Result<()> {
    let geometry = layout.layers[at];
    let block = layout.block(&geometry);
    let group = u64::from(layout.group_tokens);
    let sealed = tokens / group * group;
    let mut next = 0;
    let mut summaries = Vec::new();
    while next < sealed {
        let expected = ExpectedPiece {
            kind: PIECE_GROUPS,
            layer: at,
            first: next,
            tokens: sealed - next,
            ..ExpectedPiece::default()
        };
        let start = file.at;
        let header = file.next(Some(layout), &expected)?;
        let bytes = &file.bytes()[..header.bytes.get() as usize];
        for planes in bytes.chunks_exact(block.key_bytes + block.value_bytes) {
            let planes = planes.split_at(block.key_bytes);
            if geometry.is_encoded() {
                sequence.append_stored(at, planes).map_err(|e| match e.kind() {
                    ErrorKind::Corruption => damaged(start, e),
                    _ => e,
                })?;
                continue;
            }
            append(sequence, layout, at, group as usize, planes, start)?;
        }
        let count = u64::from(header.tokens.get());
        if has_summary {
            let expected = ExpectedPiece { kind: PIECE_SUMMARY, tokens: count, whole: true, ..expected };
            let start = file.at;
            let header = file.next(Some(layout), &expected)?;
            let element = sequence.stored_summaries(at, next / group..(next + count) / group, &mut summaries)?;
            let same = element == DType::from_code(header.element)
                && are_same(&file.bytes()[..header.bytes.get() as usize], &summaries);
            if !same {
                return Err(damaged(start, format!("summaries of layer {at} that are not those of its keys")));
            }
        }
        next += count;
    }
    if tokens > sealed {
        let (first, left) = (sealed, tokens - sealed);
        let expected = ExpectedPiece { kind: PIECE_TAIL, layer: at, first, tokens: left, whole: true, bytes: None };
        let start = file.at;
        let header = file.next(Some(layout), &expected)?;
        let (key, _) = tail_plane_bytes(&geometry, layout.dtype, left as usize);
        let planes = file.bytes()[..header.bytes.get() as usize].split_at(key);
        append(sequence, layout, at, left as usize, planes, start)?;
    }
    Ok(())
}

/// Returns whether two lists of 16-bit floats hold the same numbers. Zeros of both signs are equal, because exports
/// hold both.
fn are_same(a: &[u8], b: &[u8]) -> bool {
    let number = |bits: &[u8; 2]| match u16::from_le_bytes(*bits) {
        0x8000 => 0,
        bits => bits,
    };
    a.len() == b.len() && a.as_chunks().0.iter().map(number).eq(b.as_chunks().0.iter().map(number))
}

/// Appends planes `[kv_heads, tokens, dim]`.
fn append(
    sequence: &mut Sequence,
    layout: &Layout,
    layer: usize,
    tokens: usize,
    (keys, values): (&[u8], &[u8]),
    at: u64,
) -> Result<()> {
    let geometry = layout.layers[layer];
    let heads = usize::from(geometry.kv_heads);
    let view = |plane, dim| tensor(layout.dtype, plane, tokens, heads, usize::from(dim));
    let (keys, values) = (view(keys, geometry.key_dim), view(values, geometry.value_dim));
    let (Some(keys), Some(values)) = (keys, values) else { return Err(damaged(at, "elements out of line")) };
    sequence.append(layer, keys, values).map_err(|e| match e.kind() {
        // No sequence holds such values, so no export has them.
        ErrorKind::InvalidArgument => damaged(at, e),
        _ => e,
    })
}

/// Returns a plane as a tensor, or none if its elements are not aligned.
fn tensor(dtype: DType, plane: &[u8], tokens: usize, heads: usize, dim: usize) -> Option<TensorView<'_>> {
    if dim == 0 {
        return Some(TensorView::empty(tokens));
    }
    Some(match dtype {
        DType::F32 => TensorView::head_major::<f32>(bytemuck::try_cast_slice(plane).ok()?, tokens, heads, dim),
        DType::F16 => {
            let bits: &[u16] = bytemuck::try_cast_slice(plane).ok()?;
            TensorView::head_major::<f16>(bits.reinterpret_cast(), tokens, heads, dim)
        }
        DType::Bf16 => {
            let bits: &[u16] = bytemuck::try_cast_slice(plane).ok()?;
            TensorView::head_major::<bf16>(bits.reinterpret_cast(), tokens, heads, dim)
        }
    })
}
