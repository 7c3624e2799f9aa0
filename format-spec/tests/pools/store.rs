//! The contents of the golden store `v0.4/store-pools`, and how its files are built.
//!
//! The bytes of directories and pages are put together here, field by field.

use crate::builder::{
    self as b, Extent, FrameParts, GoldenFile, GoldenFrame, StoredPlane, TOKEN_SEQUENCE, descriptor, f16, lay_out,
};
use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity};
use stratakv_format::features::Features;
use stratakv_format::frame::{Descriptor, KIND_CLUSTER_DELTA, KIND_CLUSTER_DIRECTORY, KIND_POOL};
use stratakv_format::ids::SequenceId;
use stratakv_format::layout::Layout;
use stratakv_format::manifest::{self as m, FLAG_DERIVED, Kind};
use stratakv_format::pool::{ClusterParts, DirectoryFields, EntryHeads, HEADS_ALL, PageRun};
use stratakv_format::segment::{self, SegmentPage};
use stratakv_format::{DeviceIndex, Location, PAGE_BYTES, SegmentId};
use zerocopy::little_endian::{U16, U32, U64};

/// The tokens of the sequence, and those that clusters cover.
const TOKENS: u64 = 9;
pub(crate) const COVERED: u64 = 8;
/// The fork of the sequence, and its tokens.
const FORK_SEQUENCE: u64 = 3;
const FORK_TOKENS: u64 = 6;
const POOL_SEGMENT: u32 = 2;
const POOL_SEGMENT_NONCE: u64 = 0x7365_676d_656e_7432;
pub(crate) const POOL_FRAME: u64 = 2;
const POOL_NONCE: u64 = 0x706f_6f6c_6672_616d;
/// The front of the derived frame in pages: its header, and one page of directories.
pub(crate) const FRONT_PAGES: u32 = 2;

/// Returns a layout with groups of four tokens: two KV heads, none, and one head without V.
pub(crate) fn layout() -> Layout {
    b::layout_of(vec![b::layer(2, 128, 128), b::layer(0, 0, 0), b::layer(1, 96, 0)])
}

/// Returns the f16 elements of a token's key (plane 0) or value (plane 1) of one head.
pub(crate) fn row(layer: u16, plane: usize, head: usize, token: u64) -> Vec<u8> {
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
    b::two_groups(&layout(), layer, |group, index| plane(layer, index, group as u64 * 4..group as u64 * 4 + 4))
}

fn tail(layer: u16) -> Extent {
    let planes = layout().layers[usize::from(layer)].planes();
    b::tail_of(layer, COVERED, 1, (0..planes).map(|index| plane(layer, index, COVERED..TOKENS)).collect())
}

/// Returns a delta of opaque bytes.
fn delta() -> Extent {
    let bytes = b"changes of clusters, v?".to_vec();
    let mut descriptor = descriptor(KIND_CLUSTER_DELTA, 0, 0, COVERED as u32, 1);
    descriptor.record_bytes = U32::new(bytes.len() as u32);
    b::single_plane(descriptor, bytes)
}

/// Returns the frame with the tokens. Its first extent is the delta.
pub(crate) fn token_frame() -> GoldenFrame {
    lay_out(&layout(), 1, TOKEN_SEQUENCE, (0, 1), vec![delta(), tail(0), tail(2), groups(0), groups(2)])
}

/// A cluster of the golden sets: its tokens in the order of its pages, and its run in the derived frame.
pub(crate) struct GoldenCluster {
    pub(crate) tokens: &'static [u32],
    page: u32,
    pages: u16,
    falling: bool,
}

/// A directory of the golden sets.
pub(crate) struct GoldenDirectory {
    pub(crate) set: u64,
    pub(crate) layer: u16,
    pub(crate) head: u16,
    pub(crate) method: &'static str,
    memberships: u16,
    /// Centroids if false.
    medoids: bool,
    pub(crate) clusters: [GoldenCluster; 2],
    /// True if each cluster has its positions in a piece of its own.
    split_positions: bool,
}

/// The pools of the derived frame: layer, pages, and pages that were written with the frame.
const POOLS: [(u16, u32, u32); 3] = [(0, 4, 4), (0, 4, 3), (2, 2, 2)];

pub(crate) fn golden_directories() -> Vec<GoldenDirectory> {
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
    pub(crate) fn representatives(&self, nth: usize) -> Vec<u8> {
        if self.medoids {
            return [1_u64, 4][nth].to_le_bytes().to_vec();
        }
        (0..128).flat_map(|dim| f16(dim as f32 / 16.0 - nth as f32)).collect()
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
    pub(crate) fn pieces(&self) -> Vec<Vec<u8>> {
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
    pub(crate) fn encoded(&self) -> Vec<Vec<u8>> {
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
    let parts = FrameParts {
        id: POOL_FRAME,
        lsn: 202,
        nonce: POOL_NONCE,
        sequence: TOKEN_SEQUENCE,
        key: b::KEY,
        summaries: 0,
        location,
        front_pages: FRONT_PAGES,
        descriptors,
        checksums,
        planes,
    };
    parts.frame_over(&layout(), POOL_SEGMENT_NONCE, bytes)
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

/// Returns every file of the store.
pub(crate) fn files() -> Vec<GoldenFile> {
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

/// Returns all pieces of the golden directories with their layers.
pub(crate) fn all_pieces() -> Vec<(u16, Vec<u8>)> {
    let with_layer = |layer: u16| move |piece: Vec<u8>| (layer, piece);
    let of = |golden: &GoldenDirectory| golden.pieces().into_iter().map(with_layer(golden.layer)).collect::<Vec<_>>();
    golden_directories().iter().flat_map(of).collect()
}
