//! Adapters in a store: they are found again, moved, counted and deleted. Damaged adapters are refused.

use std::path::Path;
use stratakv::retrieval::{Adapter, Codebook, LayerAdapter, LowRankAdapter};
use stratakv::{ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, Store};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::disk::{assert_clean, check, copy_devices, device_dirs, fast_scratch, files, small_options};
use stratakv_tests::rng::Rng;

fn shape() -> SequenceShape {
    SequenceShape { layers: vec![LayerShape::full(2, 32), LayerShape::full(1, 64)], dtype: DType::F16, group: 4 }
}

fn low_rank(rank: usize, salt: f32) -> LayerAdapter {
    let numbers = (0..64 * rank).map(|i| (i % 97) as f32 * 0.25 - salt).collect();
    LowRankAdapter::new(64, rank, numbers).expect("a matrix").into()
}

fn codes() -> LayerAdapter {
    let packing = vec![vec![0, 1], vec![2]];
    let levels = vec![vec![-1.0, 1.0], vec![-1.0, -0.5, 0.5, 1.0], vec![0.0, 3.0]];
    let book = Codebook::new(vec![0.5; 64], vec![1.0; 192], vec![2.0; 192], packing, levels, 0.25);
    book.expect("a codebook").into()
}

fn adapter(name: &str, version: u32, rank: usize) -> Adapter {
    Adapter::new(name, version, vec![low_rank(rank, version as f32), codes()]).expect("an adapter")
}

fn layout() -> KvLayout {
    shape().layout().expect("a layout")
}

#[test]
fn adapters_are_found_again_by_name_version_and_layout() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let layout = layout();
    let store = small_options(&dirs).create(true).open().expect("a store");
    let (first, second) = (adapter("kvswap", 1, 16), adapter("kvswap", 2, 8));
    let id = store.put_adapter(&layout, &first, 1).expect("stored");
    assert_eq!(store.put_adapter(&layout, &first, 1).expect("there already"), id);
    assert_eq!(store.adapters().len(), 1);
    let other = adapter("kvswap", 1, 32);
    assert_eq!(store.put_adapter(&layout, &other, 1).unwrap_err().kind(), ErrorKind::AlreadyExists);
    let second_id = store.put_adapter(&layout, &second, 1).expect("another version");
    assert!(second_id > id);
    // An adapter may lack the first or the last layer.
    let none = LayerAdapter::None;
    for (name, layers) in [("no-first", vec![none.clone(), codes()]), ("no-last", vec![codes(), none.clone()])] {
        let half = Adapter::new(name, 1, layers).unwrap();
        store.put_adapter(&layout, &half, 1).expect("stored");
        assert_eq!(store.adapter(&layout, name, None).expect("read"), half);
    }
    // The same numbers for the other layer are another adapter.
    let turned = Adapter::new("no-first", 1, vec![codes(), none.clone()]).unwrap();
    assert_eq!(store.put_adapter(&layout, &turned, 1).unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!(store.adapter(&layout, "kvswap", Some(1)).expect("read"), first);
    assert_eq!(store.adapter(&layout, "kvswap", None).expect("read"), second);

    for (wrong, kind) in [
        (vec![codes()], ErrorKind::LayoutMismatch),
        (vec![none.clone(), none], ErrorKind::InvalidArgument),
        (vec![codes(), codes(), codes()], ErrorKind::LayoutMismatch),
        (vec![LowRankAdapter::new(32, 1, vec![0.0; 32]).unwrap().into(), codes()], ErrorKind::LayoutMismatch),
    ] {
        let wrong = Adapter::new("wrong", 1, wrong).unwrap();
        assert_eq!(store.put_adapter(&layout, &wrong, 1).unwrap_err().kind(), kind);
    }
    assert_eq!(store.put_adapter(&layout, &first, 2).unwrap_err().kind(), ErrorKind::InvalidArgument);

    // Adapters are not sequences.
    assert!(store.sequences().is_empty() && store.status().sequences == 0);
    let holder = stratakv::SequenceId(id);
    assert_eq!(store.open_sequence(holder, OpenSequence::new()).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(store.delete_sequence_id(holder, Durability::Sync).unwrap_err().kind(), ErrorKind::NotFound);
    let usage = store.usage().expect("usage");
    assert_eq!((usage.namespaces.len(), usage.namespaces[0].sequences, usage.namespaces[0].adapters), (1, 0, 4));
    let disk: u64 = store.adapters().iter().map(|info| info.disk_bytes).sum();
    assert_eq!((usage.namespaces[0].adapter_bytes, usage.live_bytes), (disk, disk));
    assert_eq!(usage.sum_bytes(), usage.capacity_bytes);
    let listed = store.adapters();
    store.close().expect("closed");
    assert_clean(&dirs, "with adapters");
    assert_eq!(check(&dirs).checked.adapters, 4);

    // Another layout of the same geometry has no adapters. Read-only stores have them too.
    for read_only in [true, false] {
        let store = small_options(&dirs).read_only(read_only).open().expect("a store");
        assert_eq!(store.adapters(), listed);
        assert_eq!(store.adapter(&layout, "kvswap", None).expect("read"), second);
        assert_eq!(store.adapter(&layout, "kvswap", Some(1)).expect("read"), first);
        let larger = SequenceShape { group: 8, ..shape() }.layout().expect("a layout");
        for (layout, name, version) in
            [(&larger, "kvswap", None), (&layout, "other", None), (&layout, "kvswap", Some(3))]
        {
            assert_eq!(store.adapter(layout, name, version).unwrap_err().kind(), ErrorKind::NotFound);
        }
        if !read_only {
            store.delete_adapter(&layout, "kvswap", 2).expect("deleted");
            assert_eq!(store.delete_adapter(&layout, "kvswap", 2).unwrap_err().kind(), ErrorKind::NotFound);
            assert_eq!(store.adapter(&layout, "kvswap", None).expect("read"), first);
            let again = store.put_adapter(&layout, &adapter("kvswap", 2, 4), 1).expect("stored again");
            assert!(again > second_id);
        }
        store.close().expect("closed");
    }
    assert_clean(&dirs, "after a deletion");
}

/// An adapter of several frames shares its segments with sequences that are deleted. Cleaning moves it, and devices are
/// removed.
#[test]
fn adapters_survive_cleaning_and_the_end_of_sequences() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 2);
    let (shape, layout) = (shape(), layout());
    let open = || small_options(&dirs).create(true).open().expect("a store");
    let store = open();
    let large = Adapter::new("large", 7, vec![low_rank(900, 1.0), low_rank(700, 2.0)]).unwrap();
    store.put_adapter(&layout, &adapter("small", 1, 4), 2).expect("stored twice");
    for round in 0..4_u64 {
        let mut sequence = store.create_sequence(&layout, CreateOptions::new()).expect("a sequence");
        for layer in 0..2 {
            let salts: Vec<u64> = (0..600).map(|token| round << 32 | token).collect();
            shape.append(&mut sequence, layer, &salts, Order::TokenMajor).expect("appended");
        }
        sequence.commit(Durability::Sync).expect("committed");
        if round == 1 {
            store.put_adapter(&layout, &large, 1).expect("stored");
        }
        sequence.delete(Durability::Sync).expect("deleted");
    }
    let frames_of = |name: &str| {
        let info = store.adapters().into_iter().find(|info| info.name == name).expect("listed");
        info.disk_bytes
    };
    assert!(frames_of("large") > (900 + 700) * 64 * 4, "{}", frames_of("large"));
    let before = store.usage().expect("usage").dead_bytes;
    store.clean().expect("cleaned");
    assert!(store.usage().expect("usage").dead_bytes < before);
    assert_eq!(store.adapter(&layout, "large", None).expect("read"), large);
    store.close().expect("closed");
    assert_clean(&dirs, "after cleaning");
    let store = open();
    assert_eq!(store.adapter(&layout, "large", Some(7)).expect("read"), large);
    assert_eq!(store.adapter(&layout, "small", Some(1)).expect("read"), adapter("small", 1, 4));
    store.delete_adapter(&layout, "large", 7).expect("deleted");
    store.clean().expect("cleaned");
    let usage = store.usage().expect("usage");
    assert_eq!((usage.namespaces[0].adapters, usage.namespaces[0].sequences), (1, 0));
    drop(store);
    // The device with the first copy is damaged everywhere, so the other device provides the adapter.
    for file in files(&dirs[0]).into_iter().filter(|file| file.starts_with("segments")) {
        spoil(&dirs[0].join(file));
    }
    let store = open();
    assert_eq!(store.adapter(&layout, "small", None).expect("read"), adapter("small", 1, 4));
}

/// Changes bytes after the header page of a segment.
fn spoil(path: &Path) {
    let mut bytes = std::fs::read(path).expect("a file");
    let end = bytes.len() - 4096;
    bytes[4096..end].iter_mut().for_each(|byte| *byte ^= 0x40);
    std::fs::write(path, bytes).expect("written");
}

/// With a damaged byte of its frame, the adapter is read unchanged, or the engine and kvfsck report the damage.
#[test]
fn a_damaged_adapter_is_an_error_and_a_finding() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let layout = layout();
    let store = small_options(&dirs).segment_bytes(ByteSize::kib(64)).create(true).open().expect("a store");
    let good = adapter("kvswap", 1, 2);
    store.put_adapter(&layout, &good, 1).expect("stored");
    store.close().expect("closed");
    let segment = files(&dirs[0]).into_iter().find(|file| file.starts_with("segments")).expect("a segment");
    let whole = std::fs::read(dirs[0].join(&segment)).expect("a file");
    let used = whole[4096..60 << 10].iter().rposition(|byte| *byte != 0).expect("a frame") + 4096;
    let mut rng = Rng(5);
    for at in (4096..used).step_by(61) {
        let copy = root.path().join(format!("copy-{at}"));
        let copied = copy_devices(&dirs, &copy, &mut rng);
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        std::fs::write(copied[0].join(&segment), bytes).expect("written");
        assert!(!check(&copied).clean, "byte {at}");
        let store = Store::options().device(&copied[0]).memory_limit(ByteSize::mib(32)).read_only(true).open();
        match store.expect("a store").adapter(&layout, "kvswap", None) {
            Ok(read) => assert_eq!(read, good, "byte {at}"),
            Err(e) => assert_eq!(e.kind(), ErrorKind::Corruption, "byte {at}: {e}"),
        }
        std::fs::remove_dir_all(copy).expect("removed");
    }
}

/// The memory that reading an adapter takes is accounted for.
#[test]
fn an_adapter_beyond_the_memory_is_refused() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let layout = layout();
    let options = |memory| small_options(&dirs).segment_bytes(ByteSize::mib(4)).memory_limit(ByteSize::mib(memory));
    let store = options(64).create(true).open().expect("a store");
    // The low-rank layer alone has 2 MiB of numbers.
    let wide = adapter("wide", 1, 8192);
    store.put_adapter(&layout, &wide, 1).expect("stored");
    store.close().expect("closed");
    let store = options(7).open().expect("a store");
    let before = store.status().memory.used_bytes;
    let error = store.adapter(&layout, "wide", None).expect_err("four times its bytes do not fit");
    assert_eq!(error.kind(), ErrorKind::MemoryLimit, "{error}");
    assert_eq!(store.status().memory.used_bytes, before);
    drop(store);
    let store = options(32).open().expect("a store");
    let before = store.status().memory;
    assert_eq!(store.adapter(&layout, "wide", None).expect("read"), wide);
    let after = store.status().memory;
    assert!(after.peak_bytes >= before.used_bytes + (8 << 20), "{before:?} {after:?}");
}
