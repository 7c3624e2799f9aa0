//! Imported sequences equal the exported ones.

use crate::files::{Step, export, history, kvfsck_says, open, pieces, shapes, step};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::os::unix::fs::PermissionsExt;
use stratakv::export::ImportOptions;
use stratakv::layout::PlaneCodec;
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, SelectRequest, TensorView,
};
use stratakv_format::export::{PIECE_KEY, Piece};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::count_from_env;
use stratakv_tests::disk::{assert_clean, device_dirs, fast_scratch, small_options};
use stratakv_tests::rng::mix;

#[test]
fn an_imported_sequence_is_the_exported_one() {
    let cases = count_from_env("STRATAKV_TEST_EXPORTS", 64) as u32;
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let input = (0_usize..6, any::<bool>(), 1_usize..4, 1_usize..4, 0_usize..3, prop::collection::vec(step(), 1..12));
    let outcome = runner.run(&input, |(shape, summary, from, to, frames, steps)| {
        let shape = &shapes()[shape];
        let scratch = fast_scratch();
        let (a, b) = (device_dirs(&scratch.path().join("a"), from), device_dirs(&scratch.path().join("b"), to));
        let source = open(&a);
        let (mut sequence, seeds) = history(&source, shape, "session", summary, &steps);
        let file = export(&mut sequence);
        shape.check_all(&source, &sequence, |_| seeds.clone());
        let report = kvfsck_says(&file);
        prop_assert!(report.clean, "{}", report.to_text());
        prop_assert_eq!(report.export.tokens, seeds.len() as u64);

        // The target has other frame and segment sizes than the source.
        let sizes = [
            (ByteSize::kib(64), ByteSize::mib(2)),
            (ByteSize::kib(128), ByteSize::mib(1)),
            (ByteSize::mib(1), ByteSize::mib(4)),
        ];
        let options = small_options(&b).frame_bytes(sizes[frames].0).segment_bytes(sizes[frames].1);
        let store = options.clone().open().unwrap();
        let layout = shape.layout().unwrap();
        let imported = store.import(&file[..], &layout, ImportOptions::new()).unwrap();
        prop_assert_eq!(imported.committed(), seeds.len() as u64);
        drop(imported);
        store.close().unwrap();
        assert_clean(&b, "after an import");
        let store = options.open().unwrap();
        let mut imported = store.open_sequence("session", OpenSequence::new().layout(&layout)).unwrap();
        prop_assert_eq!(
            (imported.caller_state(), imported.token_ids()),
            (sequence.caller_state(), sequence.token_ids())
        );
        shape.check_all(&store, &imported, |_| seeds.clone());
        // A second export has the same blocks, tails, summaries, ids and state.
        let again = export(&mut imported);
        prop_assert_eq!(again.len(), file.len());
        prop_assert!(pieces(&again) == pieces(&file));
        // The imported sequence grows like any other.
        let more: Vec<u64> = (0..40).map(|at| mix(1 << 40 | at)).collect();
        for layer in shape.kv_layers() {
            shape.append(&mut imported, layer, &more, Order::TokenMajor).unwrap();
        }
        imported.commit(Durability::Sync).unwrap();
        let all = [seeds, more].concat();
        shape.check_all(&store, &imported, |_| all.clone());
        Ok(())
    });
    if let Err(e) = outcome {
        panic!("{e}");
    }
}

#[test]
fn a_store_with_little_memory_moves_a_long_sequence() {
    let shape = SequenceShape { layers: vec![LayerShape::full(4, 64); 3], dtype: DType::F16, group: 8 };
    let scratch = fast_scratch();
    let tight = |name: &str| {
        let dirs = device_dirs(&scratch.path().join(name), 1);
        let options = small_options(&dirs).memory_limit(ByteSize::mib(6)).segment_bytes(ByteSize::mib(2));
        options.open().unwrap()
    };
    let (source, target) = (tight("from"), tight("to"));
    // A token has 3 KiB, so the sequence has twice the memory limit.
    let steps = [Step::Append(2000, 0), Step::Commit(None), Step::Append(2100, 1), Step::Commit(None)];
    let (mut sequence, seeds) = history(&source, &shape, "session", false, &steps);
    assert!(sequence.kv_bytes() > 12 << 20);
    let path = scratch.path().join("session.skv");
    let exported = sequence.export_file(&path).unwrap();
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!((metadata.len(), metadata.permissions().mode() & 0o777), (exported.bytes, 0o600));
    assert_eq!(sequence.export_file(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), exported.bytes, "an existing file is not overwritten");
    let report = kvfsck::check_export(&path, &kvfsck::Options::default(), &()).unwrap();
    assert!(report.clean, "{}", report.to_text());
    let imported = target.import_file(&path, &shape.layout().unwrap(), ImportOptions::new()).unwrap();
    for store in [&source, &target] {
        let memory = store.status().memory;
        assert!(memory.peak_bytes <= memory.limit_bytes);
    }
    for layer in shape.kv_layers() {
        for first in (0..seeds.len() / 8 - 64).step_by(64) {
            let view = imported
                .select(layer, SelectRequest::groups(&(first as u64..first as u64 + 64).collect::<Vec<_>>()))
                .unwrap();
            let batch = target.read(&[&view]).submit().unwrap().wait().unwrap();
            let mut seen = seeds.clone();
            seen.truncate(view.length() as usize);
            for (nth, group) in view.groups().enumerate() {
                let [keys, values] = shape.block(layer, &seen[group as usize * 8..][..8]);
                assert_eq!(batch.get(0).unwrap().group(nth).unwrap(), (keys[..].into(), values[..].into()));
            }
        }
    }
    let nothing = target.import_file(scratch.path().join("none"), imported.layout(), ImportOptions::new());
    assert_eq!(nothing.unwrap_err().kind(), ErrorKind::NotFound);
    let directory = target.import_file(scratch.path(), imported.layout(), ImportOptions::new());
    assert_eq!(directory.unwrap_err().kind(), ErrorKind::InvalidArgument);
}

/// The layout of such a sequence is larger than that of any number of layers without codecs.
#[test]
fn a_sequence_of_the_most_layers_with_codecs_is_exported_and_imported() {
    const LAYERS: u16 = 1024;
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let store = small_options(&dirs).segment_bytes(ByteSize::mib(16)).open().expect("a store");
    let builder = KvLayout::builder().layers(LAYERS).kv_heads(1).head_dim(64).dtype(DType::F32).group_tokens(8);
    let layout = builder.codec(PlaneCodec::Int8).build().expect("a layout");
    let mut sequence = store.create_sequence(&layout, CreateOptions::new().key("a")).expect("a sequence");
    for layer in 0..LAYERS {
        let rows: Vec<f32> = (0..9 * 64).map(|i| (mix(u64::from(layer) * 1000 + i) % 100) as f32).collect();
        let view = TensorView::token_major(&rows, 9, 1, 64);
        sequence.append(usize::from(layer), view, view).expect("an append");
    }
    sequence.commit(Durability::Sync).expect("a commit");
    let file = export(&mut sequence);
    let report = kvfsck_says(&file);
    assert!(report.clean, "{}", report.to_text());
    let mut imported = store.import(&file[..], &layout, ImportOptions::new().key("b")).expect("an import");
    assert_eq!(imported.len(), 9);
    // The files differ in ids, times and checksums only.
    let [first, second] = [pieces(&file), pieces(&export(&mut imported))];
    let data = |all: Vec<(Piece, Vec<u8>)>| all.into_iter().filter(|(piece, _)| piece.kind != PIECE_KEY);
    assert!(data(first).eq(data(second)));
}

/// The time to live and the eviction priority are imported and take effect, unless the import sets others.
#[test]
fn expiry_and_eviction_settings_are_imported() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let store = open(&dirs);
    let shape = shapes()[0].clone();
    let layout = shape.layout().expect("a layout");
    let hour = std::time::Duration::from_secs(3600);
    let own = CreateOptions::new().key("a").ttl(hour).evictable(3);
    let mut sequence = store.create_sequence(&layout, own).expect("a sequence");
    for layer in shape.kv_layers() {
        shape.append(&mut sequence, layer, &[1, 2, 3], Order::TokenMajor).expect("an append");
    }
    sequence.commit(Durability::Sync).expect("a commit");
    let file = export(&mut sequence);
    let soon = std::time::Duration::from_millis(300);
    let ways = [
        (ImportOptions::new().key("as it was"), (3_600_000, 3)),
        (ImportOptions::new().key("for good").ttl(None).evictable(0), (0, 0)),
        (ImportOptions::new().key("soon over").ttl(Some(soon)).evictable(9), (300, 9)),
    ];
    for (options, _) in &ways {
        drop(store.import(&file[..], &layout, options.clone()).expect("an import"));
    }
    for (key, (_, ends)) in ["as it was", "for good", "soon over"].into_iter().zip(ways) {
        let info = store.sequences().into_iter().find(|info| info.key == key).expect("listed");
        assert_eq!((info.ttl_ms, info.evictable), ends, "{key}");
        assert_eq!(info.tokens, 3);
    }
    std::thread::sleep(2 * soon);
    store.run_maintenance().expect("maintenance");
    let mut left: Vec<String> = store.sequences().into_iter().map(|info| info.key).collect();
    left.sort();
    assert_eq!(left, ["a", "as it was", "for good"]);
    assert_eq!(store.health().expirations, 1);
}
