//! Golden stores of every version, opened with this engine and checked with this kvfsck.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use stratakv::retrieval::{
    CodeSpec, KeyGroup, KeyShape, LayerAdapter, LowRankSpec, Selector, ShadowKv, SignBits, SummarySpec,
};
use stratakv::{Budget, ByteSize, CreateOptions, Durability, OpenSequence, SelectRequest, Store, TensorView};
use stratakv_tests::disk::{assert_clean, check, device_dirs, fast_scratch, files};

fn golden(name: &str, root: &Path) -> Vec<PathBuf> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../format-spec/golden").join(name);
    let to = device_dirs(root, 1);
    for file in files(&from) {
        let target = to[0].join(&file);
        device_dirs_parent(&target);
        fs::copy(from.join(&file), &target).expect("a copy");
    }
    to
}

/// Copies a golden store of several devices.
fn golden_devices(name: &str, root: &Path, devices: usize) -> Vec<PathBuf> {
    let own = |device: usize| {
        let root = root.join(format!("of-{device}"));
        fs::create_dir(&root).expect("a directory");
        golden(&format!("{name}/device-{device}"), &root).remove(0)
    };
    (0..devices).map(own).collect()
}

fn device_dirs_parent(file: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let parent = file.parent().expect("a parent");
    fs::create_dir_all(parent).expect("a directory");
    fs::set_permissions(parent, fs::Permissions::from_mode(0o700)).expect("permissions");
}

fn open(dirs: &[PathBuf], read_only: bool) -> Store {
    let options = Store::options().device(&dirs[0]).memory_limit(ByteSize::mib(32)).read_only(read_only);
    options.open().expect("a store")
}

#[test]
fn stores_of_the_first_version() {
    for name in ["v0.1/store-crc32", "v0.1/store-crc64"] {
        let root = fast_scratch();
        let dirs = golden(name, root.path());
        assert_clean(&dirs, name);
        for read_only in [true, false] {
            let store = open(&dirs, read_only);
            assert!(store.adapters().is_empty());
            for (key, tokens) in [("golden", 10), ("golden-fork", 6)] {
                let sequence = store.open_sequence(key, OpenSequence::new()).expect("a sequence");
                assert_eq!((sequence.len(), sequence.token_ids().len()), (tokens, tokens as usize), "{name} {key}");
                let query = vec![0.5; 64];
                let view = sequence.select(0, SelectRequest::query(&query).budget(Budget::All)).expect("a view");
                assert_eq!(view.positions().count() as u64, tokens);
                store.read(&[&view]).submit().and_then(|ticket| ticket.wait()).expect("read");
            }
            store.close().expect("closed");
        }
        assert_clean(&dirs, name);
    }
}

#[test]
fn the_store_with_stored_summaries() {
    let root = fast_scratch();
    let dirs = golden("v0.2/store-retrieval", root.path());
    assert_clean(&dirs, "as it is");
    for read_only in [true, false] {
        let store = open(&dirs, read_only);
        let listed = store.adapters();
        assert_eq!((listed.len(), &*listed[0].name, listed[0].version), (1, "golden", 3));
        let layout = layout();
        let adapter = store.adapter(&layout, "golden", None).expect("an adapter");
        let [LayerAdapter::LowRank(matrix), LayerAdapter::None, LayerAdapter::Codes(book)] = adapter.layers() else {
            panic!("{adapter:?}")
        };
        assert_eq!((matrix.rank(), matrix.matrix()[..6].to_vec()), (2, vec![-1.0, -0.5, 0.0, 0.5, 1.0, -1.0]));
        assert_eq!((book.width(), book.dims(), book.code_bytes(), book.distortion()), (16, 3, 2, 0.25));
        let adapter = Arc::new(adapter);
        let low: Arc<dyn SummarySpec> = Arc::new(LowRankSpec::new(Arc::clone(&adapter)));
        let codes: Arc<dyn SummarySpec> = Arc::new(CodeSpec::new(adapter));
        let segment = fs::read(dirs[0].join("segments/00000001")).expect("a segment");
        for (kind, layer) in [(low, 0), (codes, 2)] {
            let records = from_keys(kind.as_ref(), layer);
            assert!(segment.windows(records.len()).any(|bytes| bytes == records), "{}", kind.id());
        }
        let mut sequence = store.open_sequence("golden", OpenSequence::new()).expect("a sequence");
        assert_eq!(sequence.len(), 8);
        // The layers of this adapter have different kinds, so only selectors without an adapter suit all layers.
        let read = || store.status().devices[0].counters.read_bytes;
        for selector in [Arc::new(ShadowKv::default()) as Arc<dyn Selector>, Arc::new(SignBits)] {
            let before = read();
            let id = sequence.attach(Arc::clone(&selector)).expect("attached");
            // Each layer reads one page of frame metadata, but not the keys on the next page.
            assert_eq!(read() - before, 2 * 4096, "{}", selector.name());
            for (index, layer) in [(0, 0), (2, 2)] {
                let found = sequence.selector_summaries(id, index).expect("summaries");
                let mut records = Vec::new();
                found[0].encode(0..2, &mut records);
                assert_eq!(
                    records,
                    from_keys(selector.summaries()[0].as_ref(), layer),
                    "{} of layer {index}",
                    selector.name()
                );
            }
        }
        drop(sequence);
        store.close().expect("closed");
    }
    assert_clean(&dirs, "after it was opened");
}

#[test]
fn the_store_with_copies() {
    // The store opens with both devices, and with each alone.
    for without in [None, Some(0), Some(1)] {
        let root = fast_scratch();
        let mut dirs = golden_devices("v0.2/store-copies", root.path(), 2);
        assert_clean(&dirs, "as it is");
        if let Some(device) = without {
            dirs.remove(device);
        }
        for read_only in [true, false] {
            let options = dirs.iter().fold(Store::options(), |options, dir| options.device(dir));
            let options = options.memory_limit(ByteSize::mib(32)).allow_degraded(without.is_some());
            let store = options.read_only(read_only).open().expect("a store");
            let sequence = store.open_sequence("golden", OpenSequence::new()).expect("a sequence");
            assert_eq!(sequence.len(), 10);
            for layer in [0, 2] {
                let view = sequence.select(layer, SelectRequest::all()).expect("a view");
                let batch = store.read(&[&view]).submit().and_then(|ticket| ticket.wait()).expect("read");
                let blocks = batch.get(0).expect("blocks");
                for (group, bits) in [0x3c00_u16, 0xb800].into_iter().enumerate() {
                    let (keys, values) = blocks.group(group).expect("a group");
                    assert_eq!(keys, bits.to_le_bytes().repeat(64), "without {without:?}, layer {layer}");
                    let value = |i: usize| half::f16::from_f32(i as f32 / 16.0 + group as f32).to_le_bytes();
                    assert_eq!(values, (0..64).flat_map(value).collect::<Vec<u8>>());
                }
            }
            if without.is_none() && !read_only {
                assert_eq!(store.repair().expect("repaired"), stratakv::store::RepairReport::default());
            }
            drop(sequence);
            store.close().expect("closed");
        }
        assert_clean(&dirs, "after it was opened");
    }
}

#[test]
fn the_store_with_planes_apart_and_rotations() {
    use stratakv::layout::{LayerSpec, Rope, RopeScaling};
    use stratakv::{KvLayout, PlaneSet};
    let root = fast_scratch();
    let dirs = golden("v0.2/store-planes", root.path());
    assert_clean(&dirs, "as it is");
    let llama3 = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
    let interleaved = Rope::new(4, 500_000.0).interleaved().starting_at(2).scaled(llama3);
    let halves = LayerSpec::full(2, 8).rope(Rope::new(8, 10_000.0));
    let layers = [halves, LayerSpec::none(), LayerSpec::full(2, 8), LayerSpec::full(2, 8).rope(interleaved)];
    let builder = KvLayout::builder().layer_specs(layers).group_tokens(4).separate_planes(true);
    let layout = builder.fingerprint(*b"fingerprint of the golden model.").build().expect("a layout");
    for read_only in [true, false] {
        let store = open(&dirs, read_only);
        let sequence =
            store.open_sequence("golden", OpenSequence::new().layout(&layout)).expect("a sequence of this layout");
        assert_eq!(sequence.len(), 8);
        for layer in [0, 2, 3] {
            let view =
                sequence.select(layer, SelectRequest::groups(&[0, 1]).planes(PlaneSet::ValuesOnly)).expect("a view");
            let batch = store.read(&[&view]).submit().and_then(|ticket| ticket.wait()).expect("read");
            for group in 0..2_u8 {
                let (keys, values) = batch.get(0).and_then(|b| b.group(group.into())).expect("a group");
                let values = values.as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32());
                assert!(keys.is_empty() && values.eq((0..64).map(|i| i as f32 / 16.0 + f32::from(group))));
            }
        }
        drop(sequence);
        store.close().expect("closed");
    }
    assert_clean(&dirs, "after it was opened");
}

#[test]
fn the_store_with_codecs() {
    use stratakv::KvLayout;
    use stratakv::layout::{LayerSpec, PlaneCodec};
    let root = fast_scratch();
    let dirs = golden("v0.3/store-codecs", root.path());
    assert_clean(&dirs, "as it is");
    let layers = [
        LayerSpec::full(2, 40).codecs(PlaneCodec::Int8, PlaneCodec::Int8),
        LayerSpec::none(),
        LayerSpec::full(2, 33).codecs(PlaneCodec::Int4, PlaneCodec::Int4),
        // The layer has no V plane, so the codec of the V plane is raw whatever the layout asks for.
        LayerSpec::full(2, 64).value_dim(0).codecs(PlaneCodec::Int8, PlaneCodec::Int4),
    ];
    let builder = KvLayout::builder().layer_specs(layers).group_tokens(8);
    let layout = builder.fingerprint(*b"fingerprint of the golden model.").build().expect("a layout");
    for read_only in [true, false] {
        let store = open(&dirs, read_only);
        let sequence =
            store.open_sequence("golden", OpenSequence::new().layout(&layout)).expect("a sequence of this layout");
        assert_eq!(sequence.len(), 19);
        for (layer, dim, levels) in [(0, 40, 256), (2, 33, 16), (3, 64, 256)] {
            let view = sequence.select(layer, SelectRequest::all()).expect("a view");
            let batch = store.read(&[&view]).submit().and_then(|ticket| ticket.wait()).expect("read");
            for group in 0..2 {
                let (keys, values) = batch.get(0).and_then(|b| b.group(group)).expect("a group");
                for (plane, bytes) in [keys, values].into_iter().enumerate() {
                    let runs = dim / 32 + 1;
                    let element = |at: usize| {
                        let (head, token, channel) = (at / (8 * dim), at / dim % 8, at % dim);
                        let level = (channel * 37 + token * 11 + head * 5 + group * 3 + plane) % levels;
                        let range = if plane == 0 { channel } else { token * runs + channel / 32 };
                        half::f16::from_f32(level as f32 / 16.0 - range as f32 / 8.0).to_le_bytes()
                    };
                    let count = if layer == 3 && plane == 1 { 0 } else { 2 * 8 * dim };
                    let wanted = (0..count).flat_map(element).collect::<Vec<u8>>();
                    assert!(bytes == wanted, "layer {layer}, group {group}, plane {plane}");
                }
            }
        }
        drop(sequence);
        store.close().expect("closed");
    }
    assert_clean(&dirs, "after it was opened");
}

/// The layout of the store with pools, and the bytes of the first `tokens` tokens of a group's plane.
fn pooled_plane(layer: usize, plane: usize, tokens: std::ops::Range<usize>) -> Vec<u8> {
    let (heads, dims) = if layer == 0 { (2, 128) } else { (1, if plane == 0 { 96 } else { 0 }) };
    let element = |head: usize, token: usize, dim: usize| {
        let first = layer * 211 + plane * 97 + token * 7 + head * 31;
        (0x3c00 | ((first + dim * 3) % 1024) as u16).to_le_bytes()
    };
    let rows = |head: usize| tokens.clone().flat_map(move |token| (0..dims).map(move |dim| (head, token, dim)));
    (0..heads).flat_map(rows).flat_map(|(head, token, dim)| element(head, token, dim)).collect()
}

/// Asserts that a sequence of the store with pools has its whole groups.
fn assert_pooled_groups(store: &Store, sequence: &stratakv::Sequence) {
    for layer in [0, 2] {
        let view = sequence.select(layer, SelectRequest::all()).expect("a view");
        let batch = store.read(&[&view]).submit().and_then(|ticket| ticket.wait()).expect("read");
        for group in 0..sequence.len() as usize / 4 {
            let (keys, values) = batch.get(0).and_then(|b| b.group(group)).expect("a group");
            assert_eq!(keys, pooled_plane(layer, 0, group * 4..group * 4 + 4), "layer {layer}, group {group}");
            assert_eq!(values, pooled_plane(layer, 1, group * 4..group * 4 + 4), "layer {layer}, group {group}");
        }
    }
}

/// Returns the live derived frames that kvfsck counts in a clean store.
fn derived_frames(dirs: &[PathBuf], when: &str) -> u64 {
    assert_clean(dirs, when);
    check(dirs).checked.clusters.frames
}

#[test]
fn the_store_with_pools() {
    let root = fast_scratch();
    let dirs = golden("v0.4/store-pools", root.path());
    let clusters = check(&dirs).checked.clusters;
    assert_eq!((clusters.frames, clusters.directories, clusters.clusters), (1, 4, 8));
    assert_eq!((clusters.pages, clusters.runs, clusters.pool_pages), (9, 8, 10));
    for read_only in [true, false] {
        let store = open(&dirs, read_only);
        for (key, tokens) in [("golden", 9), ("golden-fork", 6)] {
            let sequence = store.open_sequence(key, OpenSequence::new()).expect("a sequence");
            assert_eq!(sequence.len(), tokens);
            assert_pooled_groups(&store, &sequence);
        }
        store.close().expect("closed");
        assert_eq!(derived_frames(&dirs, "after it was opened"), 1);
    }
    // A fork of the engine refers to the derived frame, which outlives its origin.
    let store = open(&dirs, false);
    let mut parent = store.open_sequence("golden", OpenSequence::new()).expect("a sequence");
    let mut child = parent.fork_as("child").expect("a fork");
    child.commit(Durability::Sync).expect("committed");
    drop((parent, child));
    for key in ["golden", "golden-fork"] {
        let sequence = store.open_sequence(key, OpenSequence::new()).expect("a sequence");
        sequence.delete(Durability::Sync).expect("deleted");
    }
    store.close().expect("closed");
    assert_eq!(derived_frames(&dirs, "after the origin was deleted"), 1);
    // A cut below the covered tokens releases it, and its segment becomes free.
    let store = open(&dirs, false);
    let mut child = store.open_sequence("child", OpenSequence::new()).expect("a sequence");
    assert_pooled_groups(&store, &child);
    child.truncate(8).expect("cut");
    child.commit(Durability::Sync).expect("committed");
    drop(child);
    store.close().expect("closed");
    assert_eq!(derived_frames(&dirs, "after a cut at the end of the covered tokens"), 1);
    let store = open(&dirs, false);
    let mut child = store.open_sequence("child", OpenSequence::new()).expect("a sequence");
    child.truncate(7).expect("cut");
    // The fork of a cut sequence must not get clusters of the tokens that were cut off.
    let mut late = child.fork_as("late").expect("a fork");
    late.commit(Durability::Sync).expect("committed");
    child.commit(Durability::Sync).expect("committed");
    drop((late, child));
    store.close().expect("closed");
    assert_eq!(derived_frames(&dirs, "after a cut below the covered tokens"), 0);
    // The first commit frees the segment for pools, because nothing in it is live.
    assert_eq!(check(&dirs).checked.segments, 1);
    let store = open(&dirs, false);
    let child = store.open_sequence("child", OpenSequence::new()).expect("a sequence");
    assert_eq!(child.len(), 7);
    assert_pooled_groups(&store, &child);
    drop(child);
    store.close().expect("closed");
    let incompat = |dirs: &[PathBuf]| {
        let bytes = fs::read(dirs[0].join("superblock")).expect("a superblock");
        stratakv_format::superblock::newest(&bytes).expect("a slot").features.incompat.get()
    };
    assert_eq!(incompat(&dirs), 3, "the feature stays in the superblock");
}

#[test]
fn derived_frames_are_released_before_a_sequence_is_evicted() {
    let root = fast_scratch();
    let dirs = golden("v0.4/store-pools", root.path());
    let options = Store::options().device(&dirs[0]).memory_limit(ByteSize::mib(32));
    // A few segments of 64 KiB, beside the manifest.
    let store = options.capacity(ByteSize::mib(1)).open().expect("a store");
    let layout = store.open_sequence("golden", OpenSequence::new()).expect("a sequence").layout().clone();
    let mut filler = store.create_sequence(&layout, CreateOptions::new().key("filler")).expect("a sequence");
    let elements = vec![0.5_f32; 8 * 256];
    let mut appended = 0;
    let full = loop {
        let keys = TensorView::token_major(&elements, 8, 2, 128);
        let narrow = TensorView::token_major(&elements[..8 * 96], 8, 1, 96);
        let done = filler.append(0, keys, keys).and_then(|()| filler.append(2, narrow, TensorView::empty(8)));
        match done.and_then(|()| filler.commit(Durability::Sync)) {
            Ok(()) => appended += 1,
            Err(e) => break e,
        }
    };
    assert_eq!(full.kind(), stratakv::ErrorKind::NoSpace, "{full}");
    assert!(appended > 0);
    drop(filler);
    for (key, tokens) in [("golden", 9), ("golden-fork", 6)] {
        let sequence = store.open_sequence(key, OpenSequence::new()).expect("a sequence");
        assert_eq!(sequence.len(), tokens);
        assert_pooled_groups(&store, &sequence);
    }
    store.close().expect("closed");
    assert_eq!(derived_frames(&dirs, "after the store was full"), 0);
}

fn layout() -> stratakv::KvLayout {
    use stratakv::layout::LayerSpec;
    use stratakv::{DType, KvLayout};
    let layers = [LayerSpec::full(2, 8), LayerSpec::none(), LayerSpec::full(2, 8)];
    let builder = KvLayout::builder().layer_specs(layers).dtype(DType::F16).group_tokens(4);
    builder.fingerprint(*b"fingerprint of the golden model.").build().expect("a layout")
}

/// Computes the summary from the keys of the golden store: 1 in the first group, -1/2 in the second.
fn from_keys(kind: &dyn SummarySpec, layer: usize) -> Vec<u8> {
    let shape = KeyShape { kv_heads: 2, key_dim: 8, group_tokens: 4, dtype: stratakv::DType::F16 };
    let mut summary = kind.layer(layer, shape).expect("a summary");
    for (group, bits) in [0x3c00_u16, 0xb800].into_iter().enumerate() {
        let plane = bits.to_le_bytes().repeat(64);
        summary.push(&KeyGroup::new(shape, &plane, group as u64).expect("a group"));
    }
    let mut records = Vec::new();
    summary.encode(0..2, &mut records);
    records
}
