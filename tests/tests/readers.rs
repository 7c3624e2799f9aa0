//! Readers of a sequence that has a writer. A reader shows the content of the time when it was made until it is
//! dropped.
//!
//! - The writer may append, truncate, delete or close meanwhile.
//! - The memory and the segments that only a reader needs are accounted for, and freed with it.
//! - A reader can attach selectors of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use stratakv::retrieval::{Quest, Selector, SelectorId, ShadowKv, SignBits};
use stratakv::{
    Budget, ByteSize, CreateOptions, DType, Durability, ErrorKind, OpenSequence, SelectRequest, Selection, Sequence,
    SequenceReader, Store, StoredSummary,
};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::count_from_env;
use stratakv_tests::disk::{assert_clean, device_dirs, fast_scratch, small_options};
use stratakv_tests::rng::{Rng, mix};

fn shape() -> SequenceShape {
    let layers = vec![LayerShape::full(2, 16), LayerShape { window: Some(40), ..LayerShape::full(1, 24) }];
    SequenceShape { layers, dtype: DType::F16, group: 4 }
}

fn append(shape: &SequenceShape, sequence: &mut Sequence, seeds: &mut Vec<u64>, more: usize, rng: &mut Rng) {
    let new: Vec<u64> = (0..more).map(|_| rng.next_u64()).collect();
    for layer in shape.kv_layers() {
        shape.append(sequence, layer, &new, Order::nth(rng.below(3))).unwrap();
    }
    seeds.extend(new);
}

/// Compares everything that a reader shows with the seeds of its tokens.
fn check(shape: &SequenceShape, store: &Store, reader: &SequenceReader, seeds: &[u64]) {
    assert_eq!(reader.len(), seeds.len() as u64);
    assert_eq!(reader.caller_state().unwrap_or_default(), reader.token_ids().len().to_le_bytes());
    let layers: Vec<usize> = shape.kv_layers().collect();
    let views: Vec<Selection> =
        layers.iter().filter_map(|layer| reader.select(*layer, SelectRequest::all()).ok()).collect();
    assert_eq!(views.len(), if seeds.is_empty() { 0 } else { layers.len() });
    let batch = store.read(&views.iter().collect::<Vec<_>>()).submit().unwrap().wait().unwrap();
    for (at, view) in views.iter().enumerate() {
        assert_eq!(view.length(), seeds.len() as u64);
        shape.check_blocks(layers[at], seeds, view, batch.get(at).unwrap());
    }
    if seeds.len() > 12 {
        let view =
            reader.select(0, SelectRequest::query(&shape.query(0, 3)).options(stratakv::Budget::tokens(8))).unwrap();
        let batch = store.read(&[&view]).submit().unwrap().wait().unwrap();
        shape.check_blocks(0, seeds, &view, batch.get(0).unwrap());
    }
}

fn commit(sequence: &mut Sequence, durability: Durability) {
    let state = sequence.token_ids().len().to_le_bytes();
    sequence.commit_with(&state, durability).unwrap();
}

fn sequence(store: &Store, shape: &SequenceShape, key: &str) -> Sequence {
    let options = CreateOptions::new().key(key).store_summary(StoredSummary::MinMax);
    store.create_sequence(&shape.layout().unwrap(), options).unwrap()
}

#[test]
fn a_reader_keeps_what_it_saw() {
    let (shape, scratch) = (shape(), fast_scratch());
    let dirs = device_dirs(scratch.path(), 2);
    let histories = count_from_env("STRATAKV_TEST_READERS", 30) as u64;
    for seed in 0..histories {
        let mut rng = Rng(mix(seed));
        let store =
            small_options(&dirs).segment_bytes(ByteSize::kib(64)).frame_bytes(ByteSize::kib(64)).open().unwrap();
        let mut writer = sequence(&store, &shape, &format!("s{seed}"));
        let (mut seeds, mut readers) = (Vec::new(), Vec::<(SequenceReader, Vec<u64>)>::new());
        writer.commit_with(&0_usize.to_le_bytes(), Durability::None).unwrap();
        for _ in 0..40 {
            match rng.below(8) {
                0..=2 => {
                    let more = 1 + rng.below(60);
                    append(&shape, &mut writer, &mut seeds, more, &mut rng);
                }
                3 => commit(&mut writer, [Durability::Sync, Durability::Lazy, Durability::None][rng.below(3)]),
                4 => {
                    let kept = rng.below(seeds.len() + 1);
                    seeds.truncate(kept);
                    writer.truncate(kept as u64).unwrap();
                    commit(&mut writer, Durability::Lazy);
                }
                5 if readers.len() < 6 => readers.push((writer.reader().unwrap(), seeds.clone())),
                6 if !readers.is_empty() => drop(readers.swap_remove(rng.below(readers.len()))),
                // A short-lived sequence uses the freed space.
                _ => {
                    let mut other = sequence(&store, &shape, "other");
                    append(&shape, &mut other, &mut Vec::new(), 200, &mut rng);
                    other.commit(Durability::Sync).unwrap();
                    other.delete(Durability::Sync).unwrap();
                }
            }
            for (reader, seeds) in &readers {
                check(&shape, &store, reader, seeds);
            }
        }
        // The readers outlive the sequence.
        commit(&mut writer, Durability::Sync);
        readers.push((writer.reader().unwrap(), seeds.clone()));
        let mut file = Vec::new();
        writer.export(&mut file).unwrap();
        writer.delete(Durability::Sync).unwrap();
        let mut other = sequence(&store, &shape, "other");
        append(&shape, &mut other, &mut Vec::new(), 600, &mut rng);
        other.commit(Durability::Sync).unwrap();
        other.delete(Durability::Sync).unwrap();
        for (reader, seeds) in &readers {
            check(&shape, &store, reader, seeds);
        }
        let (last, _) = readers.last().unwrap();
        let mut again = Vec::new();
        last.export(&mut again).unwrap();
        // The files differ only in the first page and the headers of the pieces, which contain the nonce.
        assert_eq!(again.len(), file.len());
        // A store with readers refuses to close.
        assert_eq!(store.clone().close().unwrap_err().kind(), ErrorKind::InUse);
        drop(readers);
        store.flush().unwrap();
        store.close().unwrap();
        assert_clean(&dirs, "after readers");
    }
}

#[test]
fn a_reader_made_in_the_middle_of_a_step_sees_whole_tokens() {
    let (shape, scratch) = (shape(), fast_scratch());
    let store = small_options(&device_dirs(scratch.path(), 1)).open().unwrap();
    for (tokens, ahead) in [(7, 1), (7, 9), (8, 3), (0, 5), (64, 300)] {
        for committed in [false, true] {
            let mut writer = sequence(&store, &shape, "");
            let (mut seeds, mut rng) = (Vec::new(), Rng(tokens as u64));
            append(&shape, &mut writer, &mut seeds, tokens, &mut rng);
            // Layer 0 has more tokens than layer 1.
            let more: Vec<u64> = (0..ahead).map(|_| rng.next_u64()).collect();
            shape.append(&mut writer, 0, &more, Order::TokenMajor).unwrap();
            writer
                .commit_with(&0_usize.to_le_bytes(), if committed { Durability::Sync } else { Durability::None })
                .unwrap();
            let reader = writer.reader().unwrap();
            shape.append(&mut writer, 1, &more, Order::TokenMajor).unwrap();
            check(&shape, &store, &reader, &seeds);
            let later = writer.reader().unwrap();
            check(&shape, &store, &later, &[seeds, more].concat());
        }
    }
}

#[test]
fn readers_are_accounted_for_and_give_everything_back() {
    let (shape, scratch) = (shape(), fast_scratch());
    let dirs = device_dirs(scratch.path(), 1);
    let store = small_options(&dirs).segment_bytes(ByteSize::kib(64)).open().unwrap();
    let mut writer = sequence(&store, &shape, "s");
    let (mut seeds, mut rng) = (Vec::new(), Rng(1));
    append(&shape, &mut writer, &mut seeds, 2000, &mut rng);
    commit(&mut writer, Durability::Sync);
    let before = store.status().memory.used_bytes;
    let readers: Vec<_> = (0..50).map(|_| writer.reader().unwrap()).collect();
    let with = store.status().memory.used_bytes;
    assert!(with > before);
    // Readers share summaries and checksums, so a reader takes less memory than the sequence.
    assert!((with - before) / 50 < before, "{} bytes a reader", (with - before) / 50);
    drop(readers);
    assert_eq!(store.status().memory.used_bytes, before);

    // Memory that only a reader needs stays accounted for, and is freed with it.
    let reader = writer.reader().unwrap();
    writer.truncate(100).unwrap();
    commit(&mut writer, Durability::Sync);
    let shrunk = store.status().memory.used_bytes;
    check(&shape, &store, &reader, &seeds);
    drop(reader);
    assert!(store.status().memory.used_bytes < shrunk);

    // Segments that only a reader needs are freed with it.
    let reader = writer.reader().unwrap();
    let kept = seeds[..100].to_vec();
    writer.delete(Durability::Sync).unwrap();
    let mut most = 0;
    for _ in 0..6 {
        let mut other = sequence(&store, &shape, "other");
        append(&shape, &mut other, &mut Vec::new(), 800, &mut rng);
        other.commit(Durability::Sync).unwrap();
        other.delete(Durability::Sync).unwrap();
        check(&shape, &store, &reader, &kept);
        most = most.max(store.status().file_bytes);
    }
    drop(reader);
    for _ in 0..6 {
        let mut other = sequence(&store, &shape, "other");
        append(&shape, &mut other, &mut Vec::new(), 800, &mut rng);
        other.commit(Durability::Sync).unwrap();
        other.delete(Durability::Sync).unwrap();
    }
    // The background removes free segments beyond the number that it keeps.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while store.status().file_bytes > most && std::time::Instant::now() < end {
        store.run_maintenance().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let now = store.status().file_bytes;
    assert!(now <= most, "space of a reader was not used again: {now} bytes, at most {most} before");
}

/// A reader's selectors select among its own tokens, as the writer did when the reader was made. Later writes and the
/// end of the writer do not matter.
#[test]
fn readers_select_by_selectors_of_their_own() {
    let (shape, scratch) = (shape(), fast_scratch());
    let dirs = device_dirs(scratch.path(), 2);
    let store = small_options(&dirs).segment_bytes(ByteSize::kib(64)).open().unwrap();
    let mut writer = sequence(&store, &shape, "s");
    let (mut seeds, mut rng) = (Vec::new(), Rng(7));
    append(&shape, &mut writer, &mut seeds, 901, &mut rng);
    commit(&mut writer, Durability::Sync);
    append(&shape, &mut writer, &mut seeds, 30, &mut rng);

    let methods: [Arc<dyn Selector>; 3] = [Arc::new(Quest), Arc::new(SignBits), Arc::new(ShadowKv::default())];
    let own = methods.clone().map(|method| writer.attach(method).unwrap());
    let mut reader = writer.reader().unwrap();
    let asked = [(0, 1), (0, 2), (1, 3)];
    let budget = Budget::tokens(24);
    let groups = |view: Selection| view.groups().collect::<Vec<u64>>();
    let wanted = own.map(|id| {
        asked.map(|(layer, seed)| {
            groups(
                writer
                    .select(layer, SelectRequest::query(&shape.query(layer, seed)).options(budget).selector(id))
                    .unwrap(),
            )
        })
    });

    // A reader refuses the writer's selectors.
    let refused = reader
        .select(0, SelectRequest::query(&shape.query(0, 1)).options(budget).selector(own[0]))
        .expect_err("the writer's");
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    writer.truncate(50).unwrap();
    append(&shape, &mut writer, &mut seeds.clone(), 300, &mut rng);
    commit(&mut writer, Durability::Sync);

    let before = store.status().memory.used_bytes;
    let ids = methods.clone().map(|method| reader.attach(method).unwrap());
    assert!(store.status().memory.used_bytes > before, "summaries are accounted for");
    let choose = |reader: &SequenceReader, ids: &[SelectorId; 3]| {
        for (id, wanted) in ids.iter().zip(&wanted) {
            for ((layer, seed), wanted) in asked.iter().zip(wanted) {
                let view = reader
                    .select(*layer, SelectRequest::query(&shape.query(*layer, *seed)).options(budget).selector(*id))
                    .unwrap();
                let batch = store.read(&[&view]).submit().unwrap().wait().unwrap();
                shape.check_blocks(*layer, &seeds, &view, batch.get(0).unwrap());
                assert_eq!(&groups(view), wanted, "layer {layer}");
            }
        }
    };
    choose(&reader, &ids);
    for id in ids {
        assert!(reader.selector_bytes(id).unwrap() > 0);
        reader.detach(id).unwrap();
        assert_eq!(reader.detach(id).expect_err("detached already").kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(store.status().memory.used_bytes, before);

    writer.delete(Durability::Sync).unwrap();
    let again = methods.map(|method| reader.attach(method).unwrap());
    choose(&reader, &again);
}

#[test]
fn writers_and_readers_in_parallel() {
    let (shape, scratch) = (shape(), fast_scratch());
    let dirs = device_dirs(scratch.path(), 2);
    let options = small_options(&dirs).segment_bytes(ByteSize::kib(128)).memory_limit(ByteSize::mib(48));
    let rounds = count_from_env("STRATAKV_TEST_READERS", 30);
    let store = options.lazy_delay(std::time::Duration::from_millis(3)).open().unwrap();
    let checks = AtomicU64::new(0);
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for writer in 0..3_u64 {
            let (store, shape, checks, failed) = (&store, &shape, &checks, &failed);
            let (give, take) = sync_channel::<(SequenceReader, Vec<u64>)>(4);
            scope.spawn(move || {
                let mut rng = Rng(writer);
                for round in 0..rounds {
                    let mut own = sequence(store, shape, &format!("{writer}-{round}"));
                    let mut seeds = Vec::new();
                    own.commit_with(&0_usize.to_le_bytes(), Durability::None).unwrap();
                    for _ in 0..6 {
                        let more = 1 + rng.below(90);
                        append(shape, &mut own, &mut seeds, more, &mut rng);
                        if rng.below(3) == 0 {
                            let kept = rng.below(seeds.len() + 1);
                            seeds.truncate(kept);
                            own.truncate(kept as u64).unwrap();
                        }
                        if rng.below(2) == 0 {
                            commit(&mut own, [Durability::Sync, Durability::Lazy][rng.below(2)]);
                        }
                        if failed.load(Ordering::Relaxed) || give.send((own.reader().unwrap(), seeds.clone())).is_err()
                        {
                            return;
                        }
                    }
                    own.delete([Durability::Sync, Durability::Lazy][rng.below(2)]).unwrap();
                }
            });
            scope.spawn(move || {
                let mut rng = Rng(100 + writer);
                let mut held = Vec::new();
                while let Ok(next) = take.recv() {
                    held.push(next);
                    if held.len() > 3 {
                        held.swap_remove(rng.below(held.len()));
                    }
                    let (reader, seeds) = &held[rng.below(held.len())];
                    let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        check(shape, store, reader, seeds);
                    }));
                    if let Err(panic) = checked {
                        failed.store(true, Ordering::Relaxed);
                        std::panic::resume_unwind(panic);
                    }
                    checks.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(checks.load(Ordering::Relaxed), 3 * 6 * rounds as u64);
    store.close().unwrap();
    assert_clean(&dirs, "after writers and readers in parallel");
}

#[test]
fn closing_with_a_read_in_flight_is_refused() {
    let (shape, scratch) = (shape(), fast_scratch());
    let dirs = device_dirs(scratch.path(), 1);
    let store = small_options(&dirs).open().unwrap();
    let mut writer = sequence(&store, &shape, "s");
    append(&shape, &mut writer, &mut Vec::new(), 300, &mut Rng(3));
    writer.commit(Durability::Sync).unwrap();
    let view = writer.select(0, SelectRequest::all()).unwrap();
    let ticket = store.read(&[&view]).submit().unwrap();
    assert_eq!(store.clone().close().unwrap_err().kind(), ErrorKind::InUse);
    drop(writer);
    // Only the read remains. It keeps the directories locked.
    let error = store.close().unwrap_err();
    assert!(error.kind() == ErrorKind::InUse && error.to_string().contains("1 reads"), "{error}");
    let batch = ticket.wait().unwrap();
    assert_eq!(batch.get(0).unwrap().group(0).unwrap().0.len(), 2 * 16 * 4 * 2);
    assert_clean(&dirs, "closed under a read");
    let store = small_options(&dirs).open().unwrap();
    assert_eq!(store.open_sequence("s", OpenSequence::new()).unwrap().len(), 300);
}

fn _readers_move_and_are_shared() {
    fn both<T: Send + Sync>() {}
    both::<SequenceReader>();
}
