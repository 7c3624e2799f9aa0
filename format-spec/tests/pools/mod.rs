//! The golden store `v0.4/store-pools`: a derived frame with pools and directories of clusters.
//!
//! The bytes of directories and pages are put together here, field by field. The encoder of the crate must give the
//! same, and its reader must read them.

use crate::builder::{
    self as b, Extent, ExtentPlane, GoldenFile, GoldenFrame, StoredPlane, TOKEN_SEQUENCE, descriptor, lay_out,
};
use std::fs;
use std::path::PathBuf;
use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity};
use stratakv_format::features::Features;
use stratakv_format::frame::{
    Descriptor, FramePlace, FrameView, HeaderBuilder, KIND_CLUSTER_DELTA, KIND_CLUSTER_DIRECTORY, KIND_GROUPS,
    KIND_POOL, KIND_TAIL,
};
use stratakv_format::ids::{FrameId, LayoutId, SequenceId};
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::manifest::{self as m, FLAG_DERIVED, Kind, ManifestPage};
use stratakv_format::pool::{
    ClusterParts, DirectoryFields, DirectoryPiece, EntryHeads, HEADS_ALL, PageGeometry, PageRun, PieceTables,
};
use stratakv_format::segment::{self, SegmentPage};
use stratakv_format::{DType, DeviceIndex, Location, PAGE_BYTES, SegmentId, Unverified};
use zerocopy::FromBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// The tokens of the sequence, and those that clusters cover.
const TOKENS: u64 = 9;
const COVERED: u64 = 8;
/// The fork of the sequence, and its tokens.
const FORK_SEQUENCE: u64 = 3;
const FORK_TOKENS: u64 = 6;
const POOL_SEGMENT: u32 = 2;
const POOL_SEGMENT_NONCE: u64 = 0x7365_676d_656e_7432;
pub(crate) const POOL_FRAME: u64 = 2;
const POOL_NONCE: u64 = 0x706f_6f6c_6672_616d;
/// The front of the derived frame in pages: its header, and one page of directories.
const FRONT_PAGES: u32 = 2;

fn directory() -> PathBuf {
    b::golden_directory("v0.4/store-pools")
}

/// Returns a layout with groups of four tokens: two KV heads, none, and one head without V.
pub(crate) fn layout() -> Layout {
    let layer = |kv_heads, key_dim, value_dim| LayerGeometry {
        kv_heads,
        key_dim,
        value_dim,
        window: None,
        rope: None,
        codecs: RAW_PLANES,
    };
    Layout {
        dtype: DType::F16,
        group_tokens: 4,
        padded_planes: false,
        fingerprint: b::FINGERPRINT,
        layers: vec![layer(2, 128, 128), layer(0, 0, 0), layer(1, 96, 0)],
    }
}

/// Returns the f16 elements of a token's key (plane 0) or value (plane 1) of one head.
fn row(layer: u16, plane: usize, head: usize, token: u64) -> Vec<u8> {
    let geometry = layout().layers[usize::from(layer)];
    let dims = usize::from([geometry.key_dim, geometry.value_dim][plane]);
    let first = usize::from(layer) * 211 + plane * 97 + token as usize * 7 + head * 31;
    (0..dims).flat_map(|dim| (0x3c00 | ((first + dim * 3) % 1024) as u16).to_le_bytes()).collect()
}

/// Returns a plane `[kv_heads, tokens, dims]` of consecutive tokens.
fn plane(layer: u16, plane: usize, tokens: std::ops::Range<u64>) -> Vec<u8> {
    let heads = usize::from(layout().layers[usize::from(layer)].kv_heads);
    (0..heads).flat_map(|head| tokens.clone().flat_map(move |token| row(layer, plane, head, token))).collect()
}

fn groups(layer: u16) -> Extent {
    let layout = layout();
    let geometry = layout.layers[usize::from(layer)];
    let block = layout.block(&geometry);
    let of = |group: u64, index: usize| ExtentPlane {
        first_token: group * 4,
        tokens: 4,
        plane: index as u16,
        offset: block.block_offset(group as usize) + block.plane(index).0,
        bytes: plane(layer, index, group * 4..group * 4 + 4),
    };
    let planes = (0..2).flat_map(|group| (0..geometry.planes()).map(move |index| (group, index)));
    let planes = planes.map(|(group, index)| of(group, index)).collect();
    Extent { descriptor: descriptor(KIND_GROUPS, layer, 0, 8, 2), planes, bytes: block.extent_bytes(2) as u64 }
}

fn tail(layer: u16) -> Extent {
    let geometry = layout().layers[usize::from(layer)];
    let (mut planes, mut end) = (Vec::new(), 0);
    for index in 0..geometry.planes() {
        let bytes = plane(layer, index, COVERED..TOKENS);
        planes.push(ExtentPlane { first_token: COVERED, tokens: 1, plane: index as u16, offset: end, bytes });
        end += planes[index].bytes.len();
    }
    Extent { descriptor: descriptor(KIND_TAIL, layer, COVERED, 1, 1), planes, bytes: end as u64 }
}

/// Returns a delta of opaque bytes.
fn delta() -> Extent {
    let bytes = b"changes of clusters, v?".to_vec();
    let mut descriptor = descriptor(KIND_CLUSTER_DELTA, 0, 0, COVERED as u32, 1);
    descriptor.record_bytes = U32::new(bytes.len() as u32);
    let len = bytes.len() as u64;
    let planes = vec![ExtentPlane { first_token: 0, tokens: COVERED as u32, plane: 0, offset: 0, bytes }];
    Extent { descriptor, planes, bytes: len }
}

/// Returns the frame with the tokens. Its first extent is the delta.
pub(crate) fn token_frame() -> GoldenFrame {
    lay_out(&layout(), 1, TOKEN_SEQUENCE, (0, 1), vec![delta(), tail(0), tail(2), groups(0), groups(2)])
}

/// A cluster of the golden sets: its tokens in the order of its pages, and its run in the derived frame.
struct GoldenCluster {
    tokens: &'static [u32],
    page: u32,
    pages: u16,
    falling: bool,
}

/// A directory of the golden sets.
struct GoldenDirectory {
    set: u64,
    layer: u16,
    head: u16,
    method: &'static str,
    memberships: u16,
    /// Centroids if false.
    medoids: bool,
    clusters: [GoldenCluster; 2],
    /// True if each cluster has its positions in a piece of its own.
    split_positions: bool,
}

/// The pools of the derived frame: layer, pages, and pages that were written with the frame.
const POOLS: [(u16, u32, u32); 3] = [(0, 4, 4), (0, 4, 3), (2, 2, 2)];

fn golden_directories() -> Vec<GoldenDirectory> {
    let one = |tokens, page| GoldenCluster { tokens, page, pages: 1, falling: false };
    let (heads, joint, single) = (FRONT_PAGES, FRONT_PAGES + 4, FRONT_PAGES + 8);
    let per_head = |head, clusters| GoldenDirectory {
        set: 1,
        layer: 0,
        head,
        method: "dynakv:raw",
        memberships: 1,
        medoids: false,
        clusters,
        split_positions: false,
    };
    let swarm = |layer, clusters, split_positions| GoldenDirectory {
        set: 2,
        layer,
        head: HEADS_ALL,
        method: "swarm:members",
        memberships: 2,
        medoids: true,
        clusters,
        split_positions,
    };
    // Two pages. The first four entries are in the second page of the run.
    let falling = GoldenCluster { tokens: &[5, 3, 4, 6, 7], page: joint + 1, pages: 2, falling: true };
    vec![
        per_head(0, [one(&[0, 3, 5], heads), one(&[1, 2, 4, 6, 7], heads + 1)]),
        per_head(1, [one(&[7, 6], heads + 2), one(&[0, 1, 2, 3, 4, 5], heads + 3)]),
        swarm(0, [one(&[0, 1, 2, 5], joint), falling], false),
        swarm(2, [one(&[0, 1, 2, 3, 5], single), one(&[5, 4, 6, 7], single + 1)], true),
    ]
}

impl GoldenDirectory {
    /// Returns the entries of a page. An entry has 1024 bytes over both heads of layer 0, 512 for one head, and 192 in
    /// layer 2.
    fn page_entries(&self) -> usize {
        match (self.layer, self.head) {
            (0, HEADS_ALL) => 4,
            (0, _) => 8,
            _ => 21,
        }
    }

    /// Returns each page of a cluster in the order of its entries: the page in the frame, and its tokens.
    fn pages(&self, cluster: &GoldenCluster) -> Vec<(u32, &'static [u32])> {
        let tokens = cluster.tokens.chunks(self.page_entries());
        let last = u32::from(cluster.pages) - 1;
        let place = |nth: u32| cluster.page + if cluster.falling { last - nth } else { nth };
        tokens.zip(0..).map(|(tokens, nth)| (place(nth), tokens)).collect()
    }

    /// Returns the bytes of a page with these entries.
    fn page(&self, tokens: &[u32]) -> Vec<u8> {
        let geometry = layout().layers[usize::from(self.layer)];
        let heads = if self.head == HEADS_ALL { 0..geometry.kv_heads } else { self.head..self.head + 1 };
        let mut bytes = Vec::new();
        for plane in 0..geometry.planes() {
            let dims = usize::from([geometry.key_dim, geometry.value_dim][plane]);
            for head in heads.clone() {
                let rows = tokens.iter().flat_map(|token| row(self.layer, plane, usize::from(head), u64::from(*token)));
                bytes.extend(rows);
                bytes.resize(bytes.len() + (self.page_entries() - tokens.len()) * dims * 2, 0);
            }
        }
        bytes.resize(PAGE_BYTES, 0);
        bytes
    }

    /// Returns the identity of a page.
    fn identity(&self, page: u32, valid: usize) -> PlaneIdentity {
        let sequence = SequenceId(TOKEN_SEQUENCE);
        PlaneIdentity::new(POOL_NONCE, sequence, 12, self.layer, u64::from(page), valid as u32).with_plane(self.head)
    }

    /// Returns the checksums of the pages of a cluster.
    fn checksums(&self, cluster: &GoldenCluster) -> Vec<u64> {
        let sum = |(page, tokens): (u32, &[u32])| {
            PayloadChecksum::Crc64Nvme.compute(&self.identity(page, tokens.len()), &self.page(tokens))
        };
        self.pages(cluster).into_iter().map(sum).collect()
    }

    /// Returns the representatives of cluster `nth`: a mean key that counts up, or one medoid.
    fn representatives(&self, nth: usize) -> Vec<u8> {
        if self.medoids {
            return [1_u64, 4][nth].to_le_bytes().to_vec();
        }
        (0..128).flat_map(|dim| half::f16::from_f32(dim as f32 / 16.0 - nth as f32).to_le_bytes()).collect()
    }

    fn entries(&self) -> u64 {
        self.clusters.iter().map(|cluster| cluster.tokens.len() as u64).sum()
    }

    /// Returns the bytes of a piece: the header and its tables.
    fn piece(&self, part: u16, first: u32, clusters: &[GoldenCluster], tables: &[Vec<u8>]) -> Vec<u8> {
        let entries: usize = clusters.iter().map(|cluster| cluster.tokens.len()).sum();
        let pages: usize = clusters.iter().map(|cluster| usize::from(cluster.pages)).sum();
        let mut out = Vec::new();
        let representative: [u16; 2] = if self.medoids { [2, 1] } else { [1, 1] };
        let counts: [u32; 3] = if part == 1 { [1, clusters.len() as u32, pages as u32] } else { [0; 3] };
        for word in [1, part, self.head, self.method.len() as u16] {
            out.extend(word.to_le_bytes());
        }
        for long in [self.set, 3, 0x5eed, COVERED, self.entries()] {
            out.extend(long.to_le_bytes());
        }
        out.extend(2_u32.to_le_bytes());
        out.extend(7_u32.to_le_bytes());
        for word in [self.memberships, representative[0], representative[1], 0] {
            out.extend(word.to_le_bytes());
        }
        for number in [first, clusters.len() as u32, entries as u32, counts[0], counts[1], counts[2]] {
            out.extend(number.to_le_bytes());
        }
        assert_eq!(out.len(), 88);
        for table in [&[self.method.as_bytes().to_vec()], tables].concat() {
            out.extend(&table);
            out.resize(out.len().next_multiple_of(8), 0);
        }
        out
    }

    /// Returns all pieces of the directory.
    fn pieces(&self) -> Vec<Vec<u8>> {
        let (mut records, mut runs, mut sums, mut representatives) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (nth, cluster) in self.clusters.iter().enumerate() {
            let radius: f32 = if self.medoids { 1.5 } else { 0.0 };
            for number in [cluster.tokens.len() as u32, 1, 0.5_f32.to_bits(), radius.to_bits()] {
                records.extend(number.to_le_bytes());
            }
            let last = (cluster.tokens.len() - 1) % self.page_entries() + 1;
            runs.extend(0_u32.to_le_bytes());
            runs.extend(cluster.page.to_le_bytes());
            runs.extend(cluster.pages.to_le_bytes());
            runs.extend([u8::from(cluster.falling), last as u8, 0, 0, 0, 0]);
            sums.extend(self.checksums(cluster).into_iter().flat_map(u64::to_le_bytes));
            representatives.extend(self.representatives(nth));
        }
        let frames = POOL_FRAME.to_le_bytes().to_vec();
        let mut pieces = vec![self.piece(1, 0, &self.clusters, &[frames, records, runs, sums, representatives])];
        let positions = |clusters: &[GoldenCluster]| {
            let sizes = clusters.iter().flat_map(|cluster| (cluster.tokens.len() as u32).to_le_bytes()).collect();
            let tokens = clusters.iter().flat_map(|cluster| cluster.tokens).flat_map(|token| token.to_le_bytes());
            [sizes, tokens.collect::<Vec<u8>>()]
        };
        let each = if self.split_positions { 1 } else { 2 };
        for (nth, clusters) in self.clusters.chunks(each).enumerate() {
            pieces.push(self.piece(2, (nth * each) as u32, clusters, &positions(clusters)));
        }
        pieces
    }

    /// Returns the pieces as the encoder of the crate writes them.
    fn encoded(&self) -> Vec<Vec<u8>> {
        let geometry = layout().layers[usize::from(self.layer)];
        let fields = DirectoryFields {
            set: self.set,
            generation: 3,
            heads: EntryHeads::from_code(self.head, &geometry).expect("a head"),
            method: self.method,
            method_version: 7,
            seed: 0x5eed,
            tokens: COVERED,
            entries: self.entries(),
            clusters: 2,
            memberships: self.memberships,
            representative: if self.medoids { (2, 1) } else { (1, 1) },
        };
        let part = |(nth, cluster): (usize, &GoldenCluster)| ClusterParts {
            entries: cluster.tokens.len() as u32,
            variance: 0.5,
            radius: if self.medoids { 1.5 } else { 0.0 },
            runs: vec![PageRun {
                frame: U32::new(0),
                page: U32::new(cluster.page),
                pages: U16::new(cluster.pages),
                direction: u8::from(cluster.falling),
                last_entries: ((cluster.tokens.len() - 1) % self.page_entries() + 1) as u8,
                reserved: [0; 4],
            }],
            checksums: self.checksums(cluster),
            representatives: self.representatives(nth),
        };
        let parts: Vec<ClusterParts> = self.clusters.iter().enumerate().map(part).collect();
        let mut pieces = vec![fields.encode_clusters(0, &[POOL_FRAME], &parts).expect("a piece")];
        let each = if self.split_positions { 1 } else { 2 };
        for (nth, clusters) in self.clusters.chunks(each).enumerate() {
            let tokens: Vec<&[u32]> = clusters.iter().map(|cluster| cluster.tokens).collect();
            pieces.push(fields.encode_positions((nth * each) as u32, &tokens).expect("a piece"));
        }
        pieces
    }
}

/// The descriptors, checksums and planes of the derived frame.
type PoolExtents = (Vec<Descriptor>, Vec<u64>, Vec<StoredPlane>);

/// Returns the extents of the derived frame, and the number of its pages.
fn pool_extents() -> (PoolExtents, u32) {
    let checksum = PayloadChecksum::Crc64Nvme;
    let (mut descriptors, mut checksums, mut planes) = (Vec::new(), Vec::new(), Vec::new());
    let mut at = PAGE_BYTES;
    for golden in golden_directories() {
        for bytes in golden.pieces() {
            let (number, tokens) = (checksums.len() as u64, bytes.len() as u32);
            let sequence = SequenceId(TOKEN_SEQUENCE);
            let identity = PlaneIdentity::new(POOL_NONCE, sequence, 8, golden.layer, number, tokens);
            checksums.push(checksum.compute(&identity, &bytes));
            descriptors.push(Descriptor {
                offset: U64::new(at as u64),
                bytes: U64::new(bytes.len() as u64),
                checksum_first: U32::new(number as u32),
                checksum_count: U32::new(1),
                ..descriptor(KIND_CLUSTER_DIRECTORY, golden.layer, number, tokens, 1)
            });
            planes.push(StoredPlane { identity, offset: at, bytes });
            at = (at + tokens as usize).next_multiple_of(8);
        }
    }
    assert!(at <= FRONT_PAGES as usize * PAGE_BYTES);
    let mut page = FRONT_PAGES;
    for (layer, pages, written) in POOLS {
        descriptors.push(Descriptor {
            offset: U64::new(u64::from(page) * PAGE_BYTES as u64),
            bytes: U64::new(u64::from(pages) * PAGE_BYTES as u64),
            checksum_first: U32::new(checksums.len() as u32),
            record_bytes: U32::new(PAGE_BYTES as u32),
            ..descriptor(KIND_POOL, layer, 0, written, pages)
        });
        page += pages;
    }
    for golden in golden_directories() {
        for (page, tokens) in golden.clusters.iter().flat_map(|cluster| golden.pages(cluster)) {
            let identity = golden.identity(page, tokens.len());
            planes.push(StoredPlane { identity, offset: page as usize * PAGE_BYTES, bytes: golden.page(tokens) });
        }
    }
    ((descriptors, checksums, planes), page)
}

/// Returns the derived frame. Its planes are the pieces of directories and the pages.
pub(crate) fn pool_frame() -> GoldenFrame {
    let ((descriptors, checksums, planes), page) = pool_extents();
    let location = Location { device: DeviceIndex(0), segment: SegmentId(POOL_SEGMENT), page: 1, pages: page };
    let mut bytes = vec![0; location.bytes() as usize];
    // The page that no directory names holds any bytes.
    let unwritten = (FRONT_PAGES as usize + 7) * PAGE_BYTES;
    bytes[unwritten..unwritten + PAGE_BYTES].fill(0xa5);
    for plane in &planes {
        bytes[plane.offset..plane.offset + plane.bytes.len()].copy_from_slice(&plane.bytes);
    }
    let place = FramePlace {
        store_id: b::STORE_ID,
        location,
        segment_generation: b::SEGMENT_GENERATION,
        segment_nonce: POOL_SEGMENT_NONCE,
    };
    let header = HeaderBuilder {
        frame: FrameId(POOL_FRAME),
        lsn: 202,
        nonce: POOL_NONCE,
        sequence: SequenceId(TOKEN_SEQUENCE),
        parent: None,
        created_unix_ms: 1_700_000_060_002,
        layout_id: LayoutId(1),
        layout: &layout(),
        key: b::KEY,
        summaries: 0,
        descriptors: &descriptors,
        checksums: &checksums,
        front_pages: FRONT_PAGES,
    };
    let crc = header.write(&place, &mut bytes[..PAGE_BYTES]).expect("a header");
    let (frame, lsn, nonce, header_pages, front_pages) = (POOL_FRAME, 202, POOL_NONCE, 1, FRONT_PAGES);
    GoldenFrame { place, frame, lsn, nonce, header_pages, front_pages, descriptors, checksums, planes, bytes, crc }
}

/// Returns the file of the segment for pools.
fn pool_segment(frame: &GoldenFrame) -> Vec<u8> {
    let page = |position| {
        let (nonce, segment) = (U64::new(POOL_SEGMENT_NONCE), U32::new(POOL_SEGMENT));
        SegmentPage { nonce, segment, kind: segment::KIND_POOL, ..b::segment_page(position) }.encode()
    };
    let mut bytes = page(segment::POSITION_HEADER).to_vec();
    bytes.extend(&frame.bytes);
    bytes.resize((b::SEGMENT_PAGES as usize - 1) * PAGE_BYTES, 0);
    bytes.extend(page(segment::POSITION_TRAILER));
    bytes
}

fn files() -> Vec<GoldenFile> {
    let (tokens, pools) = ([token_frame()], pool_frame());
    let mut records = b::checkpoint_start(&layout(), &tokens);
    let counters = m::Counters {
        next_frame: U64::new(10),
        next_sequence: U64::new(FORK_SEQUENCE + 1),
        next_lsn: U64::new(300),
        ..b::counters()
    };
    records.put(Kind::Counters, &counters, &[]);
    let open = m::SegmentOpen {
        nonce: U64::new(POOL_SEGMENT_NONCE),
        segment: U32::new(POOL_SEGMENT),
        kind: segment::KIND_POOL,
        ..b::segment_open()
    };
    records.put(Kind::SegmentOpen, &open, &[]);
    let derived = m::Frame { flags: U32::new(FLAG_DERIVED), ..b::frame_record(&pools, TOKEN_SEQUENCE) };
    records.put(Kind::Frame, &derived, &[]);
    let reference = |sequence: u64, frame: u64, token_end: u64| m::FrameRef {
        sequence: U64::new(sequence),
        frame: U64::new(frame),
        token_end: U64::new(token_end),
    };
    records.put(Kind::SequenceCreate, &b::create(TOKEN_SEQUENCE, b::KEY), b::KEY);
    records.put_reference(TOKEN_SEQUENCE, &tokens[0]);
    records.put(Kind::FrameRef, &reference(TOKEN_SEQUENCE, POOL_FRAME, COVERED), &[]);
    records.put(Kind::SequenceCommit, &b::commit(TOKEN_SEQUENCE, TOKENS), &[]);
    let fork = m::SequenceCreate {
        parent: U64::new(TOKEN_SEQUENCE),
        parent_tokens: U64::new(FORK_TOKENS),
        ..b::create(FORK_SEQUENCE, b"golden-fork")
    };
    records.put(Kind::SequenceCreate, &fork, b"golden-fork");
    for frame in [1, POOL_FRAME] {
        records.put(Kind::FrameRef, &reference(FORK_SEQUENCE, frame, FORK_TOKENS), &[]);
    }
    records.put(Kind::SequenceCommit, &b::commit(FORK_SEQUENCE, FORK_TOKENS), &[]);
    let mut files = b::store_files(Features::current().with_pools(), &tokens, records);
    files.push((segment::file_name(SegmentId(POOL_SEGMENT)), pool_segment(&pools)));
    files
}

#[test]
#[ignore = "writes golden files that do not exist yet"]
fn generate_writes_the_golden_files() {
    b::write_new_files(&directory(), files());
}

#[test]
fn golden_files_are_built_byte_for_byte() {
    b::assert_same_files(&directory(), &files());
}

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

/// Returns all pieces of the golden directories with their layers, for tests of hostile bytes.
pub(crate) fn all_pieces() -> Vec<(u16, Vec<u8>)> {
    let with_layer = |layer: u16| move |piece: Vec<u8>| (layer, piece);
    let of = |golden: &GoldenDirectory| golden.pieces().into_iter().map(with_layer(golden.layer)).collect::<Vec<_>>();
    golden_directories().iter().flat_map(of).collect()
}

#[test]
fn headers_of_pieces_have_their_fields_at_the_offsets_of_the_specification() {
    use stratakv_format::pool::DirectoryHeader;
    let (_, piece) = &all_pieces()[0];
    let (header, _) = DirectoryHeader::ref_from_prefix(piece).expect("a header");
    assert_eq!((header.tokens.get(), header.entries.get(), header.clusters.get()), (COVERED, 8, 2));
    assert_eq!((header.piece_entries.get(), header.pages.get()), (8, 2));
}
