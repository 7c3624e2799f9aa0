//! Pools and directories of clusters with wrong contents. Each is refused for its own reason, without a read past its
//! bytes.

#[allow(dead_code, unused_imports, unused_macros, reason = "the golden tests use the rest")]
mod builder;
mod hostile;
#[allow(dead_code, reason = "the golden tests use the rest")]
#[path = "pools/store.rs"]
mod store;

use builder as b;
use proptest::prelude::*;
use store::{all_pieces, layout, pool_frame, token_frame};
use stratakv_format::error::FormatErrorCode;
use stratakv_format::frame::{Descriptor, KIND_POOL};
use stratakv_format::layout::Layout;
use stratakv_format::pool::{
    Cluster, ClusterPage, ClusterParts, DirectoryFields, DirectoryPiece, EntryHeads, PageGeometry, PageRun, PieceTables,
};
use stratakv_format::{DType, FormatError, PAGE_BYTES};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Verifies the golden derived frame after a change.
fn read_changed(change: impl FnOnce(&mut b::GoldenFrame)) -> Result<(), FormatError> {
    hostile::read_changed(pool_frame(), &layout(), change)
}

#[test]
fn every_wrong_descriptor_of_a_derived_frame_is_refused() {
    assert_eq!(read_changed(|_| {}), Ok(()));
    type Change = fn(&mut Descriptor);
    // The index of the descriptor (0-8 pieces of directories, 9-11 pools), the change, and the field in the error.
    let cases: &[(usize, Change, &str)] = &[
        (0, |d| d.layer = U16::new(1), "layer"),
        (0, |d| d.tokens = U32::new(0), "directory bytes"),
        (0, |d| d.tokens = U32::new((1 << 20) + 1), "directory bytes"),
        (0, |d| d.tokens = U32::new(u32::MAX), "directory bytes"),
        (0, |d| d.pieces = U32::new(2), "directory bytes"),
        (0, |d| d.bytes = U64::new(8), "extent bytes"),
        (0, |d| d.first_token = U64::new(1), "number of a directory piece"),
        (0, |d| d.first_token = U64::new(u64::MAX), "directory bytes"),
        (0, |d| d.record_bytes = U32::new(1), "descriptor"),
        (0, |d| d.summary = U16::new(1), "summary kind"),
        (0, |d| d.codec = U16::new(1), "codec of the layout"),
        (0, |d| d.offset = U64::new(4100), "extent alignment"),
        (0, |d| d.checksum_count = U32::new(0), "extent checksums"),
        (9, |d| d.layer = U16::new(1), "layer"),
        (9, |d| d.record_bytes = U32::new(0), "page bytes"),
        (9, |d| d.record_bytes = U32::new(4095), "page bytes"),
        (9, |d| d.record_bytes = U32::new(u32::MAX), "page bytes"),
        (9, |d| d.record_bytes = U32::new(8192), "extent bytes"),
        (9, |d| d.pieces = U32::new(0), "pool pages"),
        (9, |d| d.pieces = U32::new(u32::MAX), "pool pages"),
        (9, |d| d.pieces = U32::new(5), "extent bytes"),
        (9, |d| d.tokens = U32::new(5), "pool pages written"),
        (9, |d| d.first_token = U64::new(1), "tokens"),
        (9, |d| d.offset = U64::new(4096), "extent on the wrong side of the front"),
        (9, |d| d.offset = U64::new(8200), "extent alignment"),
        (10, |d| d.offset = U64::new(8192), "extent overlaps"),
        (11, |d| d.offset = U64::new(11 * 4096), "extent end"),
        (9, |d| d.checksum_count = U32::new(1), "extent checksums"),
        (9, |d| d.kind = U16::new(13), "descriptor kind"),
        // Token ids in a derived frame.
        (8, |d| (d.kind, d.tokens) = (U16::new(4), U32::new(d.tokens.get() / 4)), "pieces"),
        (
            8,
            |d| (d.kind, d.layer, d.tokens) = (U16::new(4), U16::new(0), U32::new(d.tokens.get() / 4)),
            "extents of a derived frame",
        ),
    ];
    for (row, (index, change, field)) in cases.iter().enumerate() {
        let found = read_changed(|frame| change(&mut frame.descriptors[*index]));
        assert_eq!(found.map_err(|e| e.field), Err(*field), "row {row}");
    }
    assert_eq!(read_changed(|frame| frame.checksums.push(1)).map_err(|e| e.field), Err("checksums"));
}

#[test]
fn every_wrong_delta_is_refused() {
    assert_eq!(hostile::read_changed(token_frame(), &layout(), |_| {}), Ok(()));
    type Change = fn(&mut Descriptor);
    let cases: &[(Change, &str)] = &[
        (|d| d.layer = U16::new(1), "layer"),
        (|d| d.tokens = U32::new(0), "tokens"),
        (|d| d.first_token = U64::new(1 << 48), "tokens"),
        (|d| d.pieces = U32::new(2), "delta bytes"),
        (|d| d.record_bytes = U32::new(0), "delta bytes"),
        (|d| d.record_bytes = U32::new(u32::MAX), "delta bytes"),
        (|d| d.record_bytes = U32::new(22), "extent bytes"),
        // A pool among tokens.
        (|d| (d.kind, d.tokens) = (U16::new(KIND_POOL), U32::new(0)), "page bytes"),
        (
            |d| (d.kind, d.tokens, d.record_bytes) = (U16::new(8), U32::new(23), U32::new(0)),
            "extents of a derived frame",
        ),
    ];
    for (row, (change, field)) in cases.iter().enumerate() {
        let found = hostile::read_changed(token_frame(), &layout(), |frame| change(&mut frame.descriptors[0]));
        assert_eq!(found.map_err(|e| e.field), Err(*field), "row {row}");
    }
}

/// Returns the error of a golden piece after a change.
fn refused(nth: usize, change: impl FnOnce(&mut [u8])) -> FormatError {
    let (layer, mut bytes) = all_pieces().remove(nth);
    change(&mut bytes);
    DirectoryPiece::verify(&bytes, &layout(), layer).map(|_| ()).expect_err("a wrong piece")
}

/// Asserts that golden pieces are refused after a change: the number of the piece, the byte, its value, and the field
/// in the error.
///
/// Pieces 0 and 1 are a directory of one head with centroids. Piece 4 has clusters over all heads with medoids.
fn assert_refused(cases: &[(usize, usize, u8, &str)]) {
    for (row, &(nth, at, value, field)) in cases.iter().enumerate() {
        let error = refused(nth, |bytes| bytes[at] = value);
        assert_eq!(error.field, field, "row {row}: {error}");
    }
}

#[test]
fn every_wrong_field_of_a_piece_is_refused() {
    let cases: &[(usize, usize, u8, &str)] = &[
        (0, 2, 0, "part"),
        (0, 2, 3, "part"),
        (0, 4, 2, "head"),
        (0, 6, 0, "method bytes"),
        (0, 7, 1, "method bytes"),
        (0, 8, 0, "set"),
        (0, 15, 0x80, "set"),
        (0, 16, 0, "directory generation"),
        (0, 32, 0, "covered tokens"),
        (0, 32, 6, "covered tokens"),
        (0, 39, 1, "covered tokens"),
        (0, 40, 7, "entries"),
        (0, 40, 9, "entries"),
        (0, 48, 0, "clusters"),
        (0, 51, 0xff, "clusters"),
        (0, 56, 0, "memberships"),
        (0, 57, 0xff, "memberships"),
        (0, 58, 3, "representative"),
        (0, 58, 0, "representatives"),
        (0, 60, 0, "representatives"),
        (0, 60, 17, "representatives"),
        (0, 62, 1, "directory piece"),
        (0, 64, 1, "clusters of the piece"),
        (0, 67, 0xff, "clusters of the piece"),
        (0, 68, 0, "clusters of the piece"),
        (0, 68, 1, "directory tables"),
        (0, 72, 1, "entries of the piece"),
        (0, 76, 2, "directory tables"),
        (0, 79, 0xff, "directory tables"),
        (0, 80, 3, "directory tables"),
        (0, 84, 3, "directory tables"),
        (0, 87, 0xff, "directory tables"),
        (1, 76, 1, "tables of positions"),
        (1, 84, 1, "tables of positions"),
        (1, 72, 7, "directory table"),
    ];
    assert_refused(cases);
    let (_, bytes) = all_pieces().remove(0);
    for layer in [1, 3, u16::MAX] {
        let error = DirectoryPiece::verify(&bytes, &layout(), layer).map(|_| ()).expect_err("a layer without KV");
        assert_eq!(error.field, "directory layer");
    }
}

#[test]
fn every_wrong_table_of_a_piece_is_refused() {
    // The method, its padding, the records, the runs, the centroids and the positions.
    let cases: &[(usize, usize, u8, &str)] = &[
        (0, 88, 0xff, "method"),
        (0, 98, 1, "directory table"),
        (0, 112, 0, "entries of a cluster"),
        (0, 112, 2, "entries in pages"),
        (0, 112, 9, "entries of a cluster"),
        (0, 116, 2, "entries in pages"),
        (0, 116, 3, "runs of a cluster"),
        (0, 116, 0, "runs of the piece"),
        (0, 123, 0x80, "variance"),
        (0, 127, 0x80, "radius"),
        (0, 144, 1, "frame of a run"),
        (0, 148, 0, "page of a run"),
        (0, 150, 1, "page of a run"),
        (0, 152, 0, "pages of a run"),
        (0, 152, 2, "pages of the piece"),
        (0, 154, 2, "direction"),
        (0, 155, 0, "entries of a page"),
        (0, 155, 9, "entries of a page"),
        (0, 156, 1, "run"),
        (0, 193, 0x7c, "centroid"),
        (1, 104, 0, "entries of a cluster"),
        (1, 104, 2, "entries of the piece"),
        (1, 112, 8, "position"),
        (1, 115, 0xff, "position"),
    ];
    assert_refused(cases);
    let medoid = refused(4, |bytes| {
        let end = bytes.len();
        bytes[end - 8] = 8;
    });
    assert_eq!(medoid.field, "medoid");
}

#[test]
fn a_piece_of_another_version_is_unsupported_whatever_follows() {
    let error = refused(0, |bytes| bytes.fill(2));
    assert_eq!((error.code, error.field), (FormatErrorCode::Unsupported, "directory version"));
}

#[test]
fn a_piece_that_is_cut_or_extended_is_refused() {
    for (layer, mut bytes) in all_pieces() {
        assert!(DirectoryPiece::verify(&bytes, &layout(), layer).is_ok());
        for length in 0..bytes.len() {
            assert!(DirectoryPiece::verify(&bytes[..length], &layout(), layer).is_err(), "cut to {length}");
        }
        bytes.extend([0; 8]);
        assert!(DirectoryPiece::verify(&bytes, &layout(), layer).is_err(), "8 bytes more");
    }
}

#[test]
fn encoders_refuse_pieces_over_their_limits() {
    let fields = DirectoryFields {
        set: 1,
        generation: 1,
        heads: EntryHeads::All,
        method: "m",
        method_version: 1,
        seed: 0,
        tokens: 1 << 20,
        entries: 1 << 20,
        clusters: 1,
        memberships: 1,
        representative: (0, 0),
    };
    let tokens: Vec<u32> = (0..(1 << 18)).collect();
    let error = fields.encode_positions(0, &[&tokens]).expect_err("more than 1 MiB");
    assert_eq!(error.field, "directory bytes");
    assert!(fields.encode_positions(0, &[&tokens[..200_000]]).is_ok());
    let cluster = ClusterParts {
        entries: u32::MAX,
        variance: 0.0,
        radius: 0.0,
        runs: Vec::new(),
        checksums: Vec::new(),
        representatives: Vec::new(),
    };
    let error = fields.encode_clusters(0, &[], &[cluster.clone(), cluster]).expect_err("more than 2^32 entries");
    assert_eq!(error.field, "entries of the piece");
    let long = "m".repeat(256);
    let error = DirectoryFields { method: &long, ..fields }.encode_clusters(0, &[], &[]).expect_err("a long method");
    assert_eq!(error.field, "method bytes");
}

/// The value of a piece, for comparison.
#[derive(Debug, PartialEq)]
struct Contents {
    header: Vec<u8>,
    method: String,
    frames: Vec<u64>,
    clusters: Vec<(Vec<u8>, Vec<ClusterPage>)>,
    representatives: Vec<u8>,
    positions: Vec<Vec<u32>>,
}

/// Reads everything of a piece.
fn contents(piece: &DirectoryPiece<'_>) -> Contents {
    let (header, method) = (piece.header().as_bytes().to_vec(), piece.method().to_owned());
    let none = Contents {
        header,
        method,
        frames: Vec::new(),
        clusters: Vec::new(),
        representatives: Vec::new(),
        positions: Vec::new(),
    };
    match piece.tables() {
        PieceTables::Clusters(table) => {
            // The direction of a run of one page does not show in its pages.
            let of = |cluster: Cluster<'_>| {
                ([cluster.record.as_bytes(), cluster.runs.as_bytes()].concat(), cluster.pages().collect())
            };
            let clusters = table.clusters().map(of);
            Contents {
                frames: table.frames().iter().map(|frame| frame.get()).collect(),
                clusters: clusters.collect(),
                representatives: table.representatives().to_vec(),
                ..none
            }
        }
        PieceTables::Positions(table) => {
            let tokens = |cluster: &[U32]| cluster.iter().map(|token| token.get()).collect();
            Contents { positions: table.clusters().map(tokens).collect(), ..none }
        }
    }
}

fn one_layer(kv_heads: u16, key_dim: u16, value_dim: u16) -> Layout {
    Layout { fingerprint: [0; 32], ..b::layout_of(vec![b::layer(kv_heads, key_dim, value_dim)]) }
}

prop_compose! {
    /// Draws clusters of one layer, some of whose entries have pages.
    fn clusters(geometry: PageGeometry)(
        sizes in proptest::collection::vec((1..40_u32, 0..3_usize, any::<bool>()), 1..12),
        sums in any::<u64>(), variance in 0.0..9.0_f32,
    ) -> Vec<ClusterParts> {
        let mut page = 1;
        sizes.into_iter().map(|(entries, runs, falling)| {
            let (mut left, mut own) = (entries, Vec::new());
            for _ in 0..runs {
                let pages = 1 + left / (2 * geometry.entries as u32).max(1) % 3;
                let last = (left.saturating_sub((pages - 1) * geometry.entries as u32)).min(geometry.entries as u32);
                if last == 0 {
                    break;
                }
                left -= (pages - 1) * geometry.entries as u32 + last;
                own.push(PageRun {
                    frame: U32::new(own.len() as u32),
                    page: U32::new(page),
                    pages: U16::new(pages as u16),
                    direction: u8::from(falling),
                    last_entries: last as u8,
                    reserved: [0; 4],
                });
                page += pages * geometry.disk_pages();
            }
            let pages = own.iter().map(|run| u64::from(run.pages.get())).sum::<u64>();
            ClusterParts {
                entries,
                variance,
                radius: 0.5,
                runs: own,
                checksums: (0..pages).map(|page| sums.wrapping_mul(page + 1)).collect(),
                representatives: Vec::new(),
            }
        }).collect()
    }
}

/// Draws a layer, the heads of its entries, and clusters of it.
fn layer_and_clusters() -> impl Strategy<Value = (Layout, EntryHeads, Vec<ClusterParts>)> {
    (1..4_u16, 1..300_u16, 0..300_u16, any::<bool>()).prop_flat_map(|(kv_heads, key, value, joint)| {
        let layout = one_layer(kv_heads, key, value);
        let heads = if joint { EntryHeads::All } else { EntryHeads::One(kv_heads - 1) };
        let geometry = PageGeometry::new(&layout.layers[0], layout.dtype, heads);
        (Just(layout), Just(heads), clusters(geometry))
    })
}

/// Returns all heads and slots of a page, in the order of their rows.
fn heads_and_slots(geometry: &PageGeometry, slots: usize) -> Vec<(usize, usize)> {
    (0..geometry.heads).flat_map(|head| (0..slots).map(move |slot| (head, slot))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn pieces_round_trip(
        (layout, heads, parts) in layer_and_clusters(),
        kind in 0..3_u16, each in 1..4_u16, seed in any::<u64>(), method in "[a-z:0-9=]{1,40}",
        flip in any::<prop::sample::Index>(), value in any::<u8>(),
    ) {
        let entries: u64 = parts.iter().map(|cluster| u64::from(cluster.entries)).sum();
        let each = if kind == 0 { 0 } else { each };
        let keys = heads.count(&layout.layers[0]) * usize::from(layout.layers[0].key_dim);
        let representative = |nth: usize| match kind {
            1 => half::f16::from_f32(nth as f32).to_le_bytes().repeat(keys * usize::from(each)),
            2 => 0_u64.to_le_bytes().repeat(usize::from(each)),
            _ => Vec::new(),
        };
        let parts: Vec<ClusterParts> = parts.into_iter().enumerate()
            .map(|(nth, part)| ClusterParts { representatives: representative(nth), ..part }).collect();
        let tokens = entries.div_ceil(4) * 4;
        let fields = DirectoryFields {
            set: 9, generation: 2, heads, method: &method, method_version: 4, seed, tokens: 4, entries,
            clusters: parts.len() as u32, memberships: 1024, representative: (kind, each),
        };
        let fields = DirectoryFields { tokens: if tokens > entries { 4 } else { tokens }, ..fields };
        prop_assume!(entries >= fields.tokens);
        let frames: Vec<u64> = (7..10).collect();
        let bytes = fields.encode_clusters(0, &frames, &parts).unwrap();
        let piece = DirectoryPiece::verify(&bytes, &layout, 0).unwrap();
        let read = contents(&piece);
        prop_assert_eq!((&read.method, &read.frames, piece.heads()), (&method, &frames, heads));
        let representatives: Vec<u8> = parts.iter().flat_map(|part| part.representatives.clone()).collect();
        prop_assert_eq!(read.representatives, representatives);
        let PieceTables::Clusters(table) = piece.tables() else { panic!("clusters") };
        for (part, cluster) in parts.iter().zip(table.clusters()) {
            prop_assert_eq!((cluster.record.entries.get(), cluster.runs), (part.entries, &part.runs[..]));
            prop_assert_eq!(cluster.checksums.iter().map(|sum| sum.get()).collect::<Vec<_>>(), part.checksums.clone());
            prop_assert_eq!(f32::from_bits(cluster.record.variance.get()), part.variance);
            let pages: u64 = cluster.pages().map(|page| u64::from(page.valid)).sum();
            prop_assert_eq!(pages, part.runs.iter().map(|run| run.entries(&table.geometry())).sum::<u64>());
        }
        let positions: Vec<Vec<u32>> = parts.iter().map(|part| (0..part.entries).map(|at| at % 4).collect()).collect();
        let lists: Vec<&[u32]> = positions.iter().map(Vec::as_slice).collect();
        let second = fields.encode_positions(0, &lists).unwrap();
        let other = DirectoryPiece::verify(&second, &layout, 0).unwrap();
        prop_assert!(piece.is_of_same_directory(&other));
        prop_assert_eq!(contents(&other).positions, positions);
        // A changed byte is refused, gives another value, or is equal because nothing changed.
        for original in [&bytes, &second] {
            let mut changed = original.clone();
            let at = flip.index(changed.len());
            changed[at] = value;
            if let Ok(read) = DirectoryPiece::verify(&changed, &layout, 0) {
                let before = contents(&DirectoryPiece::verify(original, &layout, 0).unwrap());
                prop_assert_eq!(contents(&read) == before, changed == *original, "byte {}", at);
            }
        }
    }

    /// Changes a few bytes of a piece. The result is an error, or a piece that can be read completely.
    #[test]
    fn mutated_pieces_are_refused_or_consistent(
        nth in 0..9_usize, changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
    ) {
        let (layer, mut bytes) = all_pieces().remove(nth);
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(piece) = DirectoryPiece::verify(&bytes, &layout(), layer) {
            let header = *piece.header();
            let read = contents(&piece);
            let entries: usize = read.positions.iter().map(Vec::len).sum();
            prop_assert!(entries == 0 || entries as u32 == header.piece_entries.get());
            prop_assert_eq!(read.clusters.len().max(read.positions.len()) as u32, header.count.get());
            prop_assert!(read.positions.iter().flatten().all(|token| u64::from(*token) < header.tokens.get()));
            for (_, pages) in &read.clusters {
                for &ClusterPage { frame, page, valid, .. } in pages {
                    prop_assert!(frame < read.frames.len() && page > 0 && page < 65_536 && (1..=128).contains(&valid));
                }
            }
        }
    }

    #[test]
    fn rows_of_a_page_neither_overlap_nor_leave_it(
        kv in 1..9_u16, key in 1..1025_u16, value in 0..1025_u16, joint in any::<bool>(), wide in any::<bool>(),
        valid in any::<prop::sample::Index>(),
    ) {
        let layout = one_layer(kv, key, value);
        let heads = if joint { EntryHeads::All } else { EntryHeads::One(0) };
        let dtype = if wide { DType::F32 } else { DType::F16 };
        let geometry = PageGeometry::new(&layout.layers[0], dtype, heads);
        prop_assert!((1..=128).contains(&geometry.entries) && geometry.page_bytes.is_multiple_of(PAGE_BYTES));
        prop_assert!(geometry.page_bytes == PAGE_BYTES || geometry.entries == 1);
        let mut end = 0;
        for plane in 0..2 {
            for (head, slot) in heads_and_slots(&geometry, geometry.entries) {
                let row = geometry.row(plane, head, slot);
                prop_assert_eq!(row.start, end);
                end = row.end;
            }
        }
        prop_assert!(end <= geometry.page_bytes && geometry.page_bytes - end < PAGE_BYTES);
        // A stray byte is found in the rows of slots that are not valid, and behind the rows.
        let valid = valid.index(geometry.entries) + 1;
        let mut page = vec![0_u8; geometry.page_bytes];
        for plane in 0..2 {
            for (head, slot) in heads_and_slots(&geometry, valid) {
                page[geometry.row(plane, head, slot)].fill(1);
            }
        }
        prop_assert_eq!(geometry.first_stray(&page, valid), None);
        if let Some(free) = page.iter().rposition(|byte| *byte == 0) {
            page[free] = 7;
            prop_assert_eq!(geometry.first_stray(&page, valid), Some(free));
        }
    }
}

#[test]
fn a_pool_may_have_pages_that_were_not_written() {
    for written in 0..=4 {
        let changed = read_changed(|frame| {
            let pools = frame.descriptors.iter_mut().filter(|d| d.kind.get() == KIND_POOL);
            pools.for_each(|d| d.tokens = U32::new(written.min(d.pieces.get())));
        });
        assert_eq!(changed, Ok(()));
    }
}
