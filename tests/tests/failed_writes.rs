//! Writes that fail between attempts to commit. Everything that is finally acknowledged must be there.

use stratakv::sim::{Faults, Simulation};
use stratakv::{ByteSize, CreateOptions, DType, Durability, Error, ErrorKind, OpenSequence, Store, StoreOptions};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::disk::{MANIFEST_PAGES, small_geometry};
use stratakv_tests::rng::mix;

const SEGMENT: u64 = 64 << 10;
const SEGMENTS: u64 = 24;
/// Token ids of a frame. They take more than half a segment, so that each frame needs its own.
const IDS: usize = 6000;

fn shape() -> SequenceShape {
    SequenceShape { layers: vec![LayerShape::full(2, 128)], dtype: DType::F32, group: 8 }
}

fn options() -> StoreOptions {
    let options = Store::options().memory_limit(ByteSize::mib(8)).segment_bytes(ByteSize(SEGMENT));
    let capacity = SEGMENTS * SEGMENT + 8192 + 4 * MANIFEST_PAGES * 4096;
    options.capacity(ByteSize(capacity)).frame_bytes(ByteSize::kib(64))
}

/// Returns whether the operation failed. An error of the device sets `io`, and no other error is allowed.
fn failed(outcome: Result<(), Error>, io: &mut bool) -> bool {
    let Err(e) = outcome else { return false };
    assert!(matches!(e.kind(), ErrorKind::Io | ErrorKind::NoSpace), "{e:?}");
    *io |= e.kind() == ErrorKind::Io;
    true
}

/// Commits several small frames of which only some fit. Then frees space, appends more and commits until that succeeds.
/// Write number `write` fails. Returns whether the first commit lacked space and a later attempt met the failed write.
fn commit_in_parts(fillers: usize, write: u64) -> bool {
    let simulation = Simulation::new(&small_geometry(1), 5);
    let store = simulation.open(options()).expect("a store");
    let layout = shape().layout().expect("a layout");
    for at in 0..fillers {
        let options = CreateOptions::new().key(format!("filler {at}"));
        let mut filler = store.create_sequence(&layout, options).expect("a sequence");
        filler.append_token_ids(&[7; IDS]).expect("memory");
        if filler.commit(Durability::Sync).is_err() {
            break;
        }
    }
    let mut sequence = store.create_sequence(&layout, CreateOptions::new().key("s")).expect("a sequence");
    let ids: Vec<u32> = (0..3 * IDS as u32).collect();
    sequence.append_token_ids(&ids).expect("memory");
    simulation.set_faults(Faults { write: Some(write), ..Faults::default() });
    let (mut short, mut io) = (false, false);
    match sequence.commit(Durability::Sync) {
        Err(e) if e.kind() == ErrorKind::NoSpace => short = true,
        // The failed write was one of the manifest, so the store accepts no more commits.
        Err(e) if matches!(e.kind(), ErrorKind::Indeterminate | ErrorKind::Poisoned) => return false,
        other => {
            failed(other, &mut io);
            io = false;
        }
    }
    for at in 0..fillers {
        match store
            .open_sequence(&format!("filler {at}"), OpenSequence::new())
            .and_then(|filler| filler.delete(Durability::Lazy))
        {
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) if matches!(e.kind(), ErrorKind::Indeterminate | ErrorKind::Poisoned) => return false,
            other => drop(failed(other, &mut io)),
        }
    }
    let mut seeds: Vec<u64> = Vec::new();
    for attempt in 0.. {
        assert!(attempt < 40, "it never succeeds");
        if seeds.len() < 160 {
            let more: Vec<u64> = (seeds.len()..seeds.len() + 8).map(|at| mix(at as u64)).collect();
            if !failed(shape().append(&mut sequence, 0, &more, Order::TokenMajor), &mut io) {
                seeds.extend(more);
            }
            continue;
        }
        match sequence.commit(Durability::Sync) {
            Ok(()) => break,
            Err(e) if matches!(e.kind(), ErrorKind::Indeterminate | ErrorKind::Poisoned) => return false,
            other => drop(failed(other, &mut io)),
        }
    }
    drop((sequence, store));
    simulation.set_faults(Faults::default());
    simulation.crash();
    simulation.restart();
    let store = simulation.open(options()).expect("the store opens");
    let sequence = store
        .open_sequence("s", OpenSequence::new())
        .unwrap_or_else(|e| panic!("{fillers} fillers, write {write}: {e:?}"));
    assert_eq!(sequence.len(), seeds.len() as u64);
    assert_eq!(sequence.token_ids(), ids);
    shape().check_all(&store, &sequence, |_| seeds.clone());
    short && io
}

#[test]
fn frames_after_an_unnoticed_failed_write_are_committed() {
    let mut met = 0;
    for fillers in 16..=24 {
        for write in 0..12 {
            met += usize::from(commit_in_parts(fillers, write));
        }
    }
    assert!(met > 0, "no commit was cut short and then met the failed write");
}
