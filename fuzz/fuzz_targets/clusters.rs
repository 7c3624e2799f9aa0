//! Pieces of directories of clusters, pages of pools, and states of methods.
//!
//! The first bytes choose a layer, the others are the piece. A piece that verifies can be read completely: its tables
//! have the lengths that its header states, runs name known frames, and positions are below the covered tokens. The
//! bytes are also taken as a page, whose stray bytes are outside its entries.
#![no_main]

use libfuzzer_sys::fuzz_target;
use stratakv::retrieval::{KeyGroup, KeyShape, MethodSpec, StateReader, StateWriter};
use stratakv_format::DType;
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::pool::{
    DirectoryPiece, EntryHeads, PART_STATE, PageGeometry, PieceTables, STATE_VERSION, StatePiece,
};

/// Returns a layout of one layer whose shape the bytes choose.
fn layout([kv_heads, dims, flags]: [u8; 3]) -> Layout {
    let value_dim = if flags & 1 == 0 { u16::from(dims) + 1 } else { 0 };
    let layer = LayerGeometry {
        kv_heads: u16::from(kv_heads % 8) + 1,
        key_dim: u16::from(dims) * if flags & 2 == 0 { 1 } else { 4 } + 1,
        value_dim,
        window: None,
        rope: None,
        codecs: RAW_PLANES,
    };
    let dtype = if flags & 4 == 0 { DType::F16 } else { DType::F32 };
    let group_tokens = 1 << (flags >> 5);
    Layout { dtype, group_tokens, padded_planes: false, fingerprint: [0; 32], layers: vec![layer] }
}

fn walk(bytes: &[u8], layout: &Layout) {
    let Ok(piece) = DirectoryPiece::verify(bytes, layout, 0) else { return };
    let header = piece.header();
    assert!(piece.is_of_same_directory(&piece) && !piece.method().is_empty());
    match piece.tables() {
        PieceTables::Clusters(table) => {
            let (mut clusters, mut entries, mut pages) = (0, 0, 0);
            for cluster in table.clusters() {
                clusters += 1;
                entries += u64::from(cluster.record.entries.get());
                let mut paged = 0;
                for page in cluster.pages() {
                    assert!(page.frame < table.frames().len() && page.page > 0);
                    assert!(page.valid as usize <= table.geometry().entries);
                    paged += u64::from(page.valid);
                    pages += 1;
                }
                assert!(paged <= u64::from(cluster.record.entries.get()));
            }
            assert_eq!((clusters, entries), (header.count.get(), u64::from(header.piece_entries.get())));
            assert_eq!(pages, header.pages.get());
        }
        PieceTables::Positions(table) => {
            let tokens = table.clusters().inspect(|cluster| assert!(!cluster.is_empty()));
            let (clusters, entries) = tokens.fold((0, 0), |(n, all), cluster| {
                assert!(cluster.iter().all(|token| u64::from(token.get()) < header.tokens.get()));
                (n + 1, all + cluster.len())
            });
            assert_eq!((clusters, entries), (header.count.get(), header.piece_entries.get() as usize));
        }
    }
}

/// Takes bytes as a piece of a state, and the bytes of the state as those of each method.
fn walk_state(bytes: &[u8], layout: &Layout) {
    let named = StatePiece::fields(bytes).map(|(header, method)| (*header, method.to_owned()));
    if let Ok(piece) = StatePiece::verify(bytes, layout, 0) {
        let header = piece.header();
        assert!(StatePiece::is_meant(bytes) && piece.is_of_same_state(&piece));
        assert_eq!(named, Some((*header, piece.method().to_owned())));
        assert_eq!(piece.bytes().len(), header.count.get() as usize);
        assert!(header.first_byte.get() + u64::from(header.count.get()) <= header.state_bytes.get());
    }
}

/// Gives bytes to each method with clusters as its state. A method that takes them can go on.
fn take_state(bytes: &[u8]) {
    let shape = KeyShape { kv_heads: 2, key_dim: 2, group_tokens: 8, dtype: DType::F32 };
    let (flags, bytes) = bytes.split_first().unwrap_or((&0, &[]));
    let groups = usize::from(flags % 16) + 1;
    for method in ["balanced:4", "dynakv:4", "dynakv:4:joint", "swarm:4"] {
        let spec: MethodSpec = method.parse().expect("a method");
        for kind in spec.selector(None).expect("a selector").summaries() {
            let mut summary = kind.layer(0, shape).expect("a layer");
            if summary.take_state(&mut StateReader::new(bytes), groups).is_err() {
                continue;
            }
            let plane: Vec<u8> = (0..32).flat_map(|at| (at as f32).to_le_bytes()).collect();
            for group in summary.groups()..groups + 16 {
                summary.push(&KeyGroup::new(shape, &plane, group as u64).expect("a group"));
            }
            for _ in 0..1 << 12 {
                let Ok(wanted) = summary.advance() else { break };
                if wanted.is_empty() {
                    break;
                }
                let supplied = wanted.iter().map(|group| KeyGroup::new(shape, &plane, *group).expect("a group"));
                supplied.for_each(|group| summary.supply(&group));
            }
            let mut again = StateWriter::new();
            summary.put_state(&mut again);
            summary.truncate(groups / 2);
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((shape, bytes)) = data.split_first_chunk::<3>() else { return };
    let layout = layout(*shape);
    walk(bytes, &layout);
    walk_state(bytes, &layout);
    take_state(bytes);
    // The same bytes with a version and a part that are known.
    let mut fixed = bytes.to_vec();
    if let [version, high, part, top, ..] = &mut fixed[..] {
        (*version, *high, *part, *top) = (1, 0, 1 + *part % 2, 0);
    }
    walk(&fixed, &layout);
    if let [version, high, part, top, ..] = &mut fixed[..] {
        ([*version, *high], [*part, *top]) = (STATE_VERSION.to_le_bytes(), PART_STATE.to_le_bytes());
    }
    walk_state(&fixed, &layout);
    for heads in [EntryHeads::One(0), EntryHeads::All] {
        let geometry = PageGeometry::new(&layout.layers[0], layout.dtype, heads);
        let mut page = bytes[..bytes.len().min(geometry.page_bytes)].to_vec();
        page.resize(geometry.page_bytes, 0);
        let valid = usize::from(shape[2]) % geometry.entries + 1;
        if let Some(at) = geometry.first_stray(&page, valid) {
            assert!(page[at] != 0 && at >= geometry.row(0, 0, valid).start.min(page.len() - 1));
        }
    }
});
