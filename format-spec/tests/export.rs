//! Exported sequences: the golden file `v0.2/export`, piece by piece, and hostile bytes.

use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};
use stratakv_format::checksum::crc_with_hole;
use stratakv_format::error::FormatErrorCode;
use stratakv_format::export::{
    ExportEnd, ExportPage, MAGIC, PIECE_BYTES_MAX, PIECE_END, PIECE_GROUPS, PIECE_KEY, PIECE_LAYOUT, PIECE_STATE,
    PIECE_SUMMARY, PIECE_TAIL, PIECE_TOKEN_IDS, Piece, PieceHeader,
};
use stratakv_format::features::Features;
use stratakv_format::frame::SUMMARY_MIN_MAX;
use stratakv_format::layout::{LAYERS_MAX, LAYOUT_BYTES_MAX, LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::page::{PAGE_CRC_OFFSET, SECTOR_BYTES};
use stratakv_format::rope::{ROPES_MAX, Rope};
use stratakv_format::{DType, PAGE_BYTES, PlaneCodec, Unverified};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

const NONCE: u64 = 0x6578_706f_7274_2121;
const KEY: &[u8] = b"golden";
const STATE: &[u8] = b"sampler state";
const TOKENS: u64 = 9;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/v0.2/export")
}

/// Returns a layout with groups of four tokens: a layer with two planes, one without KV, and one without V.
fn layout() -> Layout {
    let layer = |kv_heads, key_dim, value_dim, window| LayerGeometry {
        kv_heads,
        key_dim,
        value_dim,
        window,
        rope: None,
        codecs: RAW_PLANES,
    };
    Layout {
        dtype: DType::F16,
        group_tokens: 4,
        padded_planes: false,
        fingerprint: *b"golden fingerprint of the model!",
        layers: vec![layer(2, 3, 1, None), layer(0, 0, 0, None), layer(1, 5, 0, Some(6))],
    }
}

fn page() -> ExportPage {
    ExportPage {
        magic: MAGIC,
        features: Features::current(),
        store_id: *b"golden-store-id!",
        sequence: U64::new(7),
        nonce: U64::new(NONCE),
        tokens: U64::new(TOKENS),
        token_ids: U64::new(10),
        created_unix_ms: U64::new(1_700_000_000_123),
        exported_unix_ms: U64::new(1_700_000_100_456),
        ttl_ms: U64::new(86_400_000),
        layout_bytes: U32::new(84),
        key_bytes: U32::new(KEY.len() as u32),
        state_bytes: U32::new(STATE.len() as u32),
        summaries: U32::new(1),
        has_state: 1,
        evictable: 3,
        reserved: [0; 6],
    }
}

/// Returns f16 elements that count 0, 1, ... 7, 0, ... starting at `from`.
fn elements(count: usize, from: usize) -> Vec<u8> {
    const SMALL: [u16; 8] = [0, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700];
    (from..from + count).flat_map(|at| SMALL[at % 8].to_le_bytes()).collect()
}

/// Returns the minima and maxima of a K plane `[heads, 4, dim]`. The bits of small whole numbers are ordered like them.
fn extremes(plane: &[u8], heads: usize, dim: usize) -> Vec<u8> {
    let bits: Vec<u16> = plane.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
    let column = |head: usize, at: usize| (0..4).map(move |token| (head * 4 + token) * dim + at);
    let all = |pick: fn(u16, u16) -> u16| {
        let columns = (0..heads).flat_map(|head| (0..dim).map(move |at| (head, at)));
        columns.map(|(head, at)| column(head, at).map(|i| bits[i]).reduce(pick).unwrap()).collect::<Vec<_>>()
    };
    [all(u16::min), all(u16::max)].concat().iter().flat_map(|bits| bits.to_le_bytes()).collect()
}

/// Returns the pieces of the file, except the last one.
fn pieces() -> Vec<(Piece, Vec<u8>)> {
    let mut encoded = Vec::new();
    layout().encode(&mut encoded);
    let ids = |range: std::ops::Range<u32>| range.flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
    let mut all = vec![
        (Piece::plain(PIECE_LAYOUT), encoded),
        (Piece::plain(PIECE_KEY), KEY.to_vec()),
        (Piece::plain(PIECE_STATE), STATE.to_vec()),
        (Piece { tokens: 3, ..Piece::plain(PIECE_TOKEN_IDS) }, ids(100..103)),
        (Piece { first: 3, tokens: 7, ..Piece::plain(PIECE_TOKEN_IDS) }, ids(103..110)),
    ];
    let summary = |piece: Piece, bytes| {
        let element = Some(DType::F16);
        (Piece { kind: PIECE_SUMMARY, summary: SUMMARY_MIN_MAX, element, ..piece }, bytes)
    };
    // Layer 0 has one piece per group and a tail of one token.
    for group in 0..2 {
        let (keys, values) = (elements(24, group), elements(8, 5 + group));
        let groups = Piece { first: group as u64 * 4, tokens: 4, ..Piece::plain(PIECE_GROUPS) };
        all.push((groups, [&keys[..], &values].concat()));
        all.push(summary(groups, extremes(&keys, 2, 3)));
    }
    all.push((Piece { first: 8, tokens: 1, ..Piece::plain(PIECE_TAIL) }, elements(8, 3)));
    // Layer 2 has both groups in one piece, and no V.
    let keys = [elements(20, 0), elements(20, 4)];
    let groups = Piece { layer: 2, tokens: 8, ..Piece::plain(PIECE_GROUPS) };
    all.push((groups, keys.concat()));
    all.push(summary(groups, keys.iter().flat_map(|keys| extremes(keys, 1, 5)).collect()));
    all.push((Piece { layer: 2, first: 8, tokens: 1, ..Piece::plain(PIECE_TAIL) }, elements(5, 2)));
    all
}

fn file() -> Vec<u8> {
    let mut file = page().encode().to_vec();
    let put = |piece: &Piece, index: usize, bytes: &[u8], file: &mut Vec<u8>| {
        file.extend_from_slice(PieceHeader::new(piece, index as u64, NONCE, bytes).as_bytes());
        file.extend_from_slice(bytes);
        file.resize(file.len().next_multiple_of(8), 0);
    };
    let all = pieces();
    for (index, (piece, bytes)) in all.iter().enumerate() {
        put(piece, index, bytes, &mut file);
    }
    let end = ExportEnd { pieces: U64::new(all.len() as u64), file_bytes: U64::new(file.len() as u64 + 64) };
    put(&Piece::plain(PIECE_END), all.len(), end.as_bytes(), &mut file);
    file
}

#[test]
fn a_page_of_the_largest_layout_is_valid() {
    let encoded = |layers: usize| {
        let layer = |at: usize| LayerGeometry {
            kv_heads: 1,
            key_dim: 16,
            value_dim: 16,
            window: None,
            rope: Some(Rope::new(16, 10_000.0 + (at % ROPES_MAX) as f64)),
            codecs: [PlaneCodec::Int8; 2],
        };
        let layout = Layout { group_tokens: 64, layers: (0..layers).map(layer).collect(), ..layout() };
        layout.check().expect("a layout");
        layout.encoded_bytes()
    };
    assert_eq!(encoded(LAYERS_MAX), LAYOUT_BYTES_MAX);
    for (bytes, is_valid) in [(LAYOUT_BYTES_MAX, true), (LAYOUT_BYTES_MAX + 1, false), (0, false)] {
        let bytes = ExportPage { layout_bytes: U32::new(bytes as u32), ..page() }.encode();
        let page = Unverified::<ExportPage>::at_front(&bytes, "export page").expect("a page");
        assert_eq!(page.verify().is_ok(), is_valid);
    }
}

#[test]
#[ignore = "writes the golden file if it does not exist yet"]
fn generate_writes_the_golden_file() {
    fs::create_dir_all(golden().parent().expect("a directory")).expect("the directory");
    let out = fs::File::options().write(true).create_new(true).open(golden());
    std::io::Write::write_all(&mut out.expect("the golden file is never overwritten"), &file()).expect("written");
}

#[test]
fn the_golden_file_is_built_byte_for_byte() {
    let golden = fs::read(golden()).expect("the golden file");
    let written = file();
    let differs = golden.iter().zip(&written).position(|(a, b)| a != b);
    assert_eq!((differs, golden.len()), (None, written.len()));
}

#[test]
fn the_golden_file_is_read_piece_by_piece() {
    let file = fs::read(golden()).expect("the golden file");
    let read = Unverified::<ExportPage>::at_front(&file[..PAGE_BYTES], "page").and_then(|page| page.verify());
    assert_eq!(*read.expect("valid"), page());
    let (mut at, mut index) = (PAGE_BYTES, 0);
    for (piece, bytes) in pieces() {
        let header = Unverified::<PieceHeader>::at_front(&file[at..], "piece").and_then(|h| h.verify(index, NONCE));
        let header = header.expect("valid");
        assert_eq!(header.piece(), piece);
        if let PIECE_TOKEN_IDS..=PIECE_TAIL = piece.kind {
            assert_eq!(piece.bytes_in(&layout()), Some(bytes.len() as u64), "{piece:?}");
        }
        at += size_of::<PieceHeader>();
        assert_eq!(header.check_bytes(&file[at..at + header.padded_bytes()]).expect("valid"), &bytes[..]);
        at += header.padded_bytes();
        index += 1;
    }
    assert_eq!(at + 64, file.len());
}

#[test]
fn a_flipped_bit_is_refused() {
    let file = file();
    for bit in 0..PAGE_BYTES * 8 {
        let mut bad = file[..PAGE_BYTES].to_vec();
        bad[bit / 8] ^= 1 << (bit % 8);
        let read = Unverified::<ExportPage>::at_front(&bad, "page").and_then(|page| page.verify());
        assert!(read.is_err(), "bit {bit} of the page");
    }
    let header_end = PAGE_BYTES + size_of::<PieceHeader>();
    for bit in 0..size_of::<PieceHeader>() * 8 {
        let mut bad = file[PAGE_BYTES..header_end].to_vec();
        bad[bit / 8] ^= 1 << (bit % 8);
        let read = Unverified::<PieceHeader>::at_front(&bad, "piece").and_then(|h| h.verify(0, NONCE));
        assert!(read.is_err(), "bit {bit} of a piece header");
    }
}

#[test]
fn a_piece_verifies_only_in_its_file_and_place() {
    let header = PieceHeader::new(&Piece::plain(PIECE_KEY), 4, NONCE, KEY);
    let verify = |index, nonce| {
        Unverified::<PieceHeader>::at_front(header.as_bytes(), "piece").and_then(|h| h.verify(index, nonce))
    };
    assert!(verify(4, NONCE).is_ok());
    assert_eq!(verify(5, NONCE).unwrap_err().code, FormatErrorCode::Identity);
    assert_eq!(verify(4, NONCE + 1).unwrap_err().code, FormatErrorCode::Checksum);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    /// A page with changed bytes and a correct checksum is refused, or it is encoded to the same bytes.
    #[test]
    fn hostile_pages_are_refused_or_bounded(changes in prop::collection::vec((8_usize..140, any::<u8>()), 0..6)) {
        let mut bytes = page().encode();
        for (at, value) in changes {
            bytes[at] = value;
        }
        let crc = stratakv_format::checksum::page_crc(&bytes);
        bytes[PAGE_CRC_OFFSET..SECTOR_BYTES].copy_from_slice(&crc.to_le_bytes());
        if let Ok(page) = Unverified::<ExportPage>::at_front(&bytes, "page").and_then(|page| page.verify()) {
            prop_assert_eq!(page.encode(), bytes);
            prop_assert!(page.layout_bytes.get() as usize <= LAYOUT_BYTES_MAX && page.key_bytes.get() <= 512);
            prop_assert!(page.state_bytes.get() <= 65_536 && page.tokens.get() <= 1 << 48);
        }
    }

    /// A piece header with any bytes and a correct checksum is refused, or its lengths are bounded.
    #[test]
    fn hostile_piece_headers_are_refused_or_bounded(
        mut bytes in prop::array::uniform32(any::<u8>()), rest in prop::array::uniform16(any::<u8>()),
        small in any::<bool>(), kind in 0_u16..10, index in 0_u64..3,
    ) {
        if small {
            // High bytes of numbers are zero, so that values within their ranges occur.
            bytes[9..].iter_mut().skip(1).step_by(2).for_each(|byte| *byte = 0);
        }
        let mut header = [&bytes[..], &rest].concat();
        header[..4].copy_from_slice(b"SKXP");
        header[8..16].copy_from_slice(&index.to_le_bytes());
        header[40..42].copy_from_slice(&kind.to_le_bytes());
        if small {
            header[28..32].fill(0);
            header[34..36].fill(0);
            header[38..40].fill(0);
            header[43] = 0;
            header[44..48].fill(0);
        }
        let crc = crc_with_hole(&NONCE.to_le_bytes(), &header, 4..8);
        header[4..8].copy_from_slice(&crc.to_le_bytes());
        if let Ok(valid) = Unverified::<PieceHeader>::at_front(&header, "piece").and_then(|h| h.verify(index, NONCE)) {
            prop_assert!((PIECE_LAYOUT..=PIECE_END).contains(&valid.kind.get()));
            prop_assert!(valid.padded_bytes() <= PIECE_BYTES_MAX);
            let _ = valid.piece().bytes_in(&layout());
            prop_assert!(valid.check_bytes(&[]).is_err() || valid.bytes.get() == 0);
        }
    }
}
