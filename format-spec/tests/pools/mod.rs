//! The golden store `v0.4/store-pools`: a derived frame with pools and directories of clusters.
//!
//! The encoder of the crate must give the bytes that `store` puts together, and its reader must read them.

pub(crate) mod store;

use crate::builder::{self as b, StoredPlane};
use std::fs;
use std::path::PathBuf;
use store::{
    COVERED, FRONT_PAGES, GoldenDirectory, POOL_FRAME, all_pieces, files, golden_directories, layout, pool_frame, row,
};
use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity};
use stratakv_format::frame::{FrameView, KIND_CLUSTER_DIRECTORY};
use stratakv_format::ids::SequenceId;
use stratakv_format::manifest::ManifestPage;
use stratakv_format::pool::{DirectoryHeader, DirectoryPiece, HEADS_ALL, PageGeometry, PieceTables};
use stratakv_format::{PAGE_BYTES, Unverified};
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

fn directory() -> PathBuf {
    b::golden_directory("v0.4/store-pools")
}

b::golden_file_tests!(directory(), files());

#[test]
fn superblocks_and_manifests_name_the_feature_of_pools() {
    let superblock = fs::read(directory().join("superblock")).expect("a superblock");
    let newest = stratakv_format::superblock::newest(&superblock).expect("valid");
    assert_eq!(newest.features.incompat.get(), 3);
    for copy in 0..2 {
        let file = fs::read(directory().join(format!("manifest/0000000000000003-{copy}"))).expect("a manifest");
        let page = Unverified::<ManifestPage>::at_front(&file[..PAGE_BYTES], "page").and_then(|page| page.verify());
        let features = page.expect("valid").features;
        assert!(features.has_pools() && !features.has_copies() && !features.has_codecs());
    }
}

#[test]
fn the_encoder_gives_the_bytes_of_the_directories() {
    for golden in golden_directories() {
        assert_eq!(golden.encoded(), golden.pieces(), "set {}, head {}", golden.set, golden.head);
    }
}

/// Reads the derived frame from the golden segment, and every entry through its directories.
#[test]
fn the_derived_frame_holds_every_entry_of_its_clusters() {
    let frame = pool_frame();
    let file = fs::read(directory().join("segments/00000002")).expect("a segment");
    let bytes = &file[PAGE_BYTES..PAGE_BYTES + frame.bytes.len()];
    let view = FrameView::verify(bytes, &frame.place).expect("valid");
    assert!(view.is_derived());
    let layout = layout();
    let mut pieces = Vec::new();
    for descriptor in view.descriptors().iter().filter(|d| d.kind.get() == KIND_CLUSTER_DIRECTORY) {
        let start = descriptor.offset.get() as usize;
        let bytes = &bytes[start..start + descriptor.bytes.get() as usize];
        let layer = descriptor.layer.get();
        pieces.push((layer, DirectoryPiece::verify(bytes, &layout, layer).expect("a valid piece")));
    }
    let goldens = golden_directories();
    let is_same = |(layer, a): &(u16, DirectoryPiece<'_>), (other, b): &(u16, DirectoryPiece<'_>)| {
        layer == other && a.is_of_same_directory(b)
    };
    let found: Vec<_> = pieces.chunk_by(is_same).collect();
    assert_eq!((found.len(), pieces.len()), (goldens.len(), 9));
    for (golden, found) in goldens.iter().zip(found) {
        let (layer, first) = &found[0];
        let header = first.header();
        let numbers = (header.set.get(), header.generation.get(), header.seed.get(), header.method_version.get());
        assert_eq!((*layer, first.method(), numbers), (golden.layer, golden.method, (golden.set, 3, 0x5eed, 7)));
        let PieceTables::Clusters(table) = first.tables() else { panic!("the clusters come first") };
        let representatives: Vec<u8> = (0..2).flat_map(|nth| golden.representatives(nth)).collect();
        assert_eq!((table.frames(), table.representatives()), (&[U64::new(POOL_FRAME)][..], &representatives[..]));
        let positions: Vec<Vec<u32>> = found[1..]
            .iter()
            .flat_map(|(_, piece)| match piece.tables() {
                PieceTables::Positions(table) => table.clusters().collect::<Vec<_>>(),
                PieceTables::Clusters(_) => panic!("one piece has the clusters"),
            })
            .map(|tokens| tokens.iter().map(|token| token.get()).collect())
            .collect();
        for ((golden_cluster, cluster), tokens) in golden.clusters.iter().zip(table.clusters()).zip(positions) {
            assert_eq!(tokens, golden_cluster.tokens);
            assert_eq!(f32::from_bits(cluster.record.variance.get()), 0.5);
            let mut left = &tokens[..];
            for page in cluster.pages() {
                let start = page.page as usize * PAGE_BYTES;
                let bytes = &bytes[start..start + table.geometry().page_bytes];
                let identity = PlaneIdentity::of_page(
                    view.header().nonce.get(),
                    SequenceId(view.header().sequence.get()),
                    *layer,
                    first.heads(),
                    page.page,
                    page.valid,
                );
                assert_eq!(PayloadChecksum::Crc64Nvme.compute(&identity, bytes), page.checksum);
                let (own, rest) = left.split_at(page.valid as usize);
                assert_entries(golden, &table.geometry(), bytes, own);
                assert_eq!(table.geometry().first_stray(bytes, own.len()), None);
                left = rest;
            }
            assert!(left.is_empty());
        }
    }
}

/// Asserts that a page starts with the rows of these tokens.
fn assert_entries(golden: &GoldenDirectory, geometry: &PageGeometry, page: &[u8], tokens: &[u32]) {
    let first = if golden.head == HEADS_ALL { 0 } else { usize::from(golden.head) };
    let planes = layout().layers[usize::from(golden.layer)].planes();
    for (slot, token) in tokens.iter().enumerate() {
        for (plane, head) in (0..planes).flat_map(|plane| (0..geometry.heads).map(move |head| (plane, head))) {
            let wanted = row(golden.layer, plane, first + head, u64::from(*token));
            assert_eq!(page[geometry.row(plane, head, slot)], wanted, "plane {plane}, head {head}, token {token}");
        }
    }
}

/// Every byte of the derived frame is checked by something: the header, a piece, a page, or the rule of zeros. The page
/// that no directory names is the only exception.
#[test]
fn a_flipped_byte_anywhere_in_the_derived_frame_is_found() {
    let frame = pool_frame();
    let checksum = PayloadChecksum::Crc64Nvme;
    let sums: Vec<u64> = frame.planes.iter().map(|plane| checksum.compute(&plane.identity, &plane.bytes)).collect();
    let unwritten = (FRONT_PAGES as usize + 7) * PAGE_BYTES;
    let mut bytes = frame.bytes.clone();
    for at in 0..bytes.len() {
        bytes[at] ^= 0x10;
        let covers = |plane: &StoredPlane| (plane.offset..plane.offset + plane.bytes.len()).contains(&at);
        let is_found = match frame.planes.iter().position(covers) {
            _ if at < PAGE_BYTES => FrameView::verify(&bytes, &frame.place).is_err(),
            Some(nth) => {
                let plane = &frame.planes[nth];
                let stored = &bytes[plane.offset..plane.offset + plane.bytes.len()];
                checksum.compute(&plane.identity, stored) != sums[nth]
            }
            None => bytes[at] == 0x10,
        };
        assert_eq!(is_found, !(unwritten..unwritten + PAGE_BYTES).contains(&at), "byte {at}");
        bytes[at] ^= 0x10;
    }
}

#[test]
fn headers_of_pieces_have_their_fields_at_the_offsets_of_the_specification() {
    let (_, piece) = &all_pieces()[0];
    let (header, _) = DirectoryHeader::ref_from_prefix(piece).expect("a header");
    assert_eq!((header.tokens.get(), header.entries.get(), header.clusters.get()), (COVERED, 8, 2));
    assert_eq!((header.piece_entries.get(), header.pages.get()), (8, 2));
}
