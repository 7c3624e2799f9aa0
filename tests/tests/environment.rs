//! Stores on file systems that are full, become read-only, or lose their device.
//!
//! The tests need root for loop devices and mounts. Without it, they print what they skip.

use std::fs;
use std::io::Write;
use std::path::Path;
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, ErrorKind, OpenSequence, SelectRequest, Sequence, Store, StoreOptions,
    StoredSummary,
};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::disk::{assert_clean, device_dirs, skipped, small_options};
use stratakv_tests::real::SmallFileSystem;
use stratakv_tests::rng::mix;

const MIB: u64 = 1 << 20;

fn shape() -> SequenceShape {
    SequenceShape { layers: vec![LayerShape::full(2, 64), LayerShape::full(2, 64)], dtype: DType::F16, group: 8 }
}

fn seeds(name: u64, tokens: usize) -> Vec<u64> {
    (0..tokens).map(|token| mix(mix(name) ^ token as u64)).collect()
}

/// Creates and commits a sequence of this name.
fn write(store: &Store, name: u64, tokens: usize) -> stratakv::Result<()> {
    let options = CreateOptions::new().key(name.to_string()).store_summary(StoredSummary::MinMax);
    let mut sequence = store.create_sequence(&shape().layout()?, options)?;
    for layer in 0..2 {
        shape().append(&mut sequence, layer, &seeds(name, tokens), Order::TokenMajor)?;
    }
    sequence.commit(Durability::Sync)
}

/// Reads a whole sequence and compares it.
fn check(store: &Store, name: u64, tokens: usize) {
    let sequence = store.open_sequence(&name.to_string(), OpenSequence::new()).expect("a sequence");
    assert_eq!(sequence.len(), tokens as u64, "sequence {name}");
    shape().check_all(store, &sequence, |_| seeds(name, tokens));
}

fn small(file_system: &str, bytes: u64) -> Option<SmallFileSystem> {
    SmallFileSystem::new(file_system, bytes).inspect_err(|why| skipped(why)).ok()
}

/// Fills the file system with a foreign file.
fn take_the_rest(at: &Path) {
    let mut file = fs::File::create(at.join("foreign")).expect("a file");
    for size in [1 << 20, 64 << 10, 4096] {
        while file.write_all(&vec![7; size]).and_then(|()| file.sync_data()).is_ok() {}
    }
}

#[test]
fn a_full_file_system_gives_back_what_is_deleted() {
    const TOKENS: usize = 400;
    for (file_system, bytes) in [("ext4", 64 * MIB), ("xfs", 320 * MIB)] {
        let Some(small) = small(file_system, bytes) else { continue };
        let dirs = device_dirs(&small.at(), 1);
        // Both file systems keep space for a few segments, whatever smallest size their tools need.
        let filler = small.at().join("filler");
        let file = fs::File::create(&filler).expect("a file");
        let free = rustix::fs::statvfs(small.at()).map(|s| s.f_bavail * s.f_frsize).expect("its space");
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, free - 28 * MIB).expect("room");
        let open = || small_options(&dirs).open().expect("a store");
        let store = open();
        let mut there = Vec::new();
        let refused = loop {
            match write(&store, there.len() as u64, TOKENS) {
                Ok(()) => there.push(there.len() as u64),
                Err(e) => break e,
            }
        };
        assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused:?}");
        assert!(there.len() > 10, "{}", there.len());
        take_the_rest(&small.at());
        // Without a free byte, sequences can still be read and deleted.
        there.iter().for_each(|name| check(&store, *name, TOKENS));
        let gone: Vec<u64> = there.extract_if(.., |name| *name % 2 == 0).collect();
        for name in &gone {
            let deleted = store
                .open_sequence(&name.to_string(), OpenSequence::new())
                .and_then(|one| one.delete(Durability::Sync));
            deleted.unwrap_or_else(|e| panic!("{file_system}: {e:?} {:#?}", store.usage()));
        }
        store.clean().expect("cleaning");
        for name in gone.iter().take(gone.len() / 2) {
            write(&store, *name, TOKENS).unwrap_or_else(|e| panic!("{file_system}: {e:?} {:#?}", store.usage()));
            there.push(*name);
        }
        // More commits than the manifest has room for, so that it needs a new generation without free space.
        let mut parent = store.open_sequence("1", OpenSequence::new()).expect("a sequence");
        let mut refused = 0;
        for step in 0..1_200_u32 {
            let committed = parent.commit_with(&step.to_le_bytes(), Durability::Sync);
            let Err(e) = committed else { continue };
            assert_eq!(e.kind(), ErrorKind::NoSpace, "{e:?}");
            refused += 1;
            if refused > 20 {
                break;
            }
        }
        println!("{file_system}: {} sequences, {refused} commits refused", there.len());
        drop(parent);
        assert!(store.health().read_only.is_none(), "{:#?}", store.health());
        fs::remove_file(small.at().join("foreign")).expect("room again");
        write(&store, 1_000, 8).expect("room again");
        there.iter().for_each(|name| check(&store, *name, TOKENS));
        store.close().expect("the store closes");
        assert_clean(&dirs, "after the file system was full");
        let store = open();
        there.iter().for_each(|name| check(&store, *name, TOKENS));
        check(&store, 1_000, 8);
    }
}

/// A commit without space keeps its tokens in memory, and a manifest without space refuses to grow. Both work again
/// after a deletion.
#[test]
fn commits_and_checkpoints_without_space_fail_and_recover() {
    const TOKENS: usize = 400;
    for (file_system, bytes) in [("ext4", 64 * MIB), ("xfs", 320 * MIB)] {
        let Some(small) = small(file_system, bytes) else { continue };
        let dirs = device_dirs(&small.at(), 1);
        let file = fs::File::create(small.at().join("filler")).expect("a file");
        let free = rustix::fs::statvfs(small.at()).map(|s| s.f_bavail * s.f_frsize).expect("its space");
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, free - 24 * MIB).expect("room");
        // The memory suffices for more forks than the manifest has room for.
        let store = small_options(&dirs).memory_limit(ByteSize::mib(256)).open().expect("a store");
        (0..6).for_each(|name| write(&store, name, TOKENS).expect("a sequence"));
        take_the_rest(&small.at());
        // Few tokens at a time stay in memory until the commit.
        let mut grown = store.create_sequence(&shape().layout().expect("a layout"), CreateOptions::new().key("1000"));
        let grown = grown.as_mut().expect("a sequence");
        let all = seeds(1000, 100_000);
        let mut tokens = 0;
        let refused = loop {
            let more = &all[tokens..tokens + 40];
            (0..2).for_each(|layer| shape().append(grown, layer, more, Order::TokenMajor).expect("in memory"));
            tokens += more.len();
            if let Err(e) = grown.commit(Durability::Sync) {
                break e;
            }
        };
        assert_eq!(refused.kind(), ErrorKind::NoSpace, "{file_system}: {refused:?}");
        assert_eq!((grown.len(), grown.committed()), (tokens as u64, tokens as u64 - 40), "{file_system}");
        shape().check_all(&store, grown, |_| all[..tokens].to_vec());
        assert!(store.health().read_only.is_none(), "{:#?}", store.health());
        store.open_sequence("0", OpenSequence::new()).and_then(|one| one.delete(Durability::Sync)).expect("deleted");
        store.open_sequence("1", OpenSequence::new()).and_then(|one| one.delete(Durability::Sync)).expect("deleted");
        grown.commit(Durability::Sync).expect("room again");
        // Forks need no data, only records in the manifest.
        let mut forks = Vec::new();
        let refused = (0..100_000).find_map(|at| {
            let made = grown.fork_as(&format!("{}{at}", "x".repeat(500))).and_then(|mut fork| {
                fork.commit(Durability::Sync)?;
                Ok(fork)
            });
            made.map(|fork| forks.push(fork)).err()
        });
        let refused = refused.expect("a manifest of some size");
        assert_eq!(refused.kind(), ErrorKind::NoSpace, "{file_system}: {refused:?}");
        println!("{file_system}: {tokens} tokens, {} forks", forks.len());
        assert!(store.health().read_only.is_none(), "{:#?}", store.health());
        let gone = forks.split_off(forks.len() / 2);
        gone.into_iter().for_each(|fork| fork.delete(Durability::Lazy).expect("deleted"));
        store.flush().expect("durable");
        let there = forks.len();
        drop(forks);
        let mut last = grown.fork_as("last").expect("a fork");
        last.commit(Durability::Sync).expect("room again");
        drop(last);
        (2..6).for_each(|name| check(&store, name, TOKENS));
        assert_eq!(store.sequences().len(), there + 6);
    }
}

/// Returns the CPU time of the threads of lazy commits, in ticks.
fn lazy_ticks() -> u64 {
    let tasks = fs::read_dir("/proc/self/task").expect("threads").flatten();
    let of = |stat: String| {
        let (front, rest) = stat.rsplit_once(')')?;
        let own = front.ends_with("(stratakv-lazy");
        let field = |nth: usize| rest.split_whitespace().nth(nth)?.parse::<u64>().ok();
        own.then(|| Some(field(11)? + field(12)?))?
    };
    tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok()).filter_map(of).sum()
}

/// The thread of lazy commits does not retry a permanent failure and uses no CPU time for it.
#[test]
fn lazy_commits_end_with_the_first_that_fails() {
    let Some(small) = small("ext4", 64 * MIB) else { return };
    let dirs = device_dirs(&small.at(), 1);
    let delay = std::time::Duration::from_millis(50);
    let store = small_options(&dirs).lazy_delay(delay).open().expect("a store");
    write(&store, 1, 100).expect("a sequence");
    let mut open = store.open_sequence("1", OpenSequence::new()).expect("a sequence");
    if let Err(why) = small.abort() {
        skipped(why);
        return;
    }
    let lazily = |open: &mut Sequence, from| grow(open, from, from + 8).and_then(|()| open.commit(Durability::Lazy));
    // Each commit is queued, or refused at once because its frame cannot be written.
    let mut from = 100;
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while store.health().read_only.is_none() && lazily(&mut open, from).is_ok() {
        from += 8;
        assert!(std::time::Instant::now() < deadline, "nothing fails on a read-only file system");
        std::thread::sleep(delay);
    }
    let state = store.create_sequence(&shape().layout().expect("a layout"), CreateOptions::new().key("empty"));
    let queued = state.and_then(|mut one| one.commit(Durability::Lazy));
    std::thread::sleep(4 * delay);
    // Later commits fail, and the thread sleeps.
    let error = store.flush().and_then(|()| write(&store, 2, 8)).expect_err("a read-only file system");
    println!("{queued:?}; {error}");
    let before = lazy_ticks();
    std::thread::sleep(std::time::Duration::from_secs(1));
    let spent = lazy_ticks().saturating_sub(before);
    // A tick is a hundredth of a second. Other stores of this process have such threads too, but they sleep.
    assert!(spent <= 20, "{spent} ticks in a second");
    drop(open);
    let _ = store.close();
}

#[test]
fn a_file_system_that_goes_read_only_loses_nothing_acknowledged() {
    let Some(mut small) = small("ext4", 64 * MIB) else { return };
    let dirs = device_dirs(&small.at(), 1);
    let store = small_options(&dirs).open().expect("a store");
    write(&store, 1, 300).expect("a sequence");
    let mut open = store.open_sequence("1", OpenSequence::new()).expect("a sequence");
    if let Err(why) = small.abort() {
        skipped(why);
        return;
    }
    let grown = grow(&mut open, 300, 500).and_then(|()| open.commit(Durability::Sync));
    let error = grown.expect_err("a read-only file system");
    assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::Indeterminate | ErrorKind::Poisoned), "{error:?}");
    println!("{error}");
    // Acknowledged tokens can be read, and no write reports success.
    let again = write(&store, 2, 300).expect_err("a read-only file system");
    assert!(matches!(again.kind(), ErrorKind::Io | ErrorKind::Indeterminate | ErrorKind::Poisoned), "{again:?}");
    drop(open);
    check(&store, 1, 300);
    assert!(!store.health().is_well(), "{:?}", store.health());
    let _ = store.close();
    small.mount().expect("mounted again");
    let store = small_options(&dirs).open().expect("the store opens");
    let sequence = store.open_sequence("1", OpenSequence::new()).expect("a sequence");
    let tokens = sequence.len() as usize;
    assert!(tokens == 300 || tokens == 500, "{tokens}");
    drop(sequence);
    check(&store, 1, tokens);
    write(&store, 3, 300).expect("writable again");
}

fn grow(sequence: &mut Sequence, from: usize, to: usize) -> stratakv::Result<()> {
    let all = seeds(1, to);
    (0..2).try_for_each(|layer| shape().append(sequence, layer, &all[from..], Order::TokenMajor))
}

#[test]
fn a_device_that_ends_early_gives_errors_with_their_place() {
    const SEQUENCES: u64 = 24;
    let Some(small) = small("ext4", 64 * MIB) else { return };
    let dirs = device_dirs(&small.at(), 1);
    let store = small_options(&dirs).open().expect("a store");
    (0..SEQUENCES).for_each(|name| write(&store, name, 600).expect("a sequence"));
    let views: Vec<_> = (0..SEQUENCES)
        .map(|name| {
            let sequence = store.open_sequence(&name.to_string(), OpenSequence::new()).expect("a sequence");
            (sequence.select(0, SelectRequest::all()).expect("a view"), sequence)
        })
        .collect();
    let image = fs::OpenOptions::new().write(true).open(small.image()).expect("the image");
    // The image becomes shorter and shorter.
    let found = [40, 24, 12, 6].into_iter().any(|mib| {
        image.set_len(mib * MIB).expect("a shorter image");
        let (mut lost, mut whole) = (0, 0);
        for (view, sequence) in &views {
            let read = store
                .read(&[view])
                .submit()
                .and_then(|ticket| ticket.wait())
                .and_then(|batch| batch.get(0).map(|_| ()));
            match read {
                Ok(()) => {
                    let name = sequence.key().parse().expect("a number");
                    if readable(&store, sequence) {
                        shape().check_all(&store, sequence, |_| seeds(name, 600));
                        whole += 1;
                    }
                }
                Err(e) => {
                    lost += 1;
                    let text = e.to_string();
                    assert!(matches!(e.kind(), ErrorKind::Io | ErrorKind::Corruption), "{e:?}");
                    assert!(text.contains("segments/") && text.contains("byte"), "no place: {text}");
                }
            }
        }
        println!("{mib} MiB left: {whole} whole, {lost} lost");
        lost > 0
    });
    assert!(found, "nothing was lost");
    assert!(!store.health().is_well(), "{:#?}", store.health());
    drop((views, store));
    // kvfsck reports the same device as unreadable, and not as damaged by the store.
    let exit = match kvfsck::check(&dirs, &kvfsck::Options::default(), &()) {
        Ok(report) => report.exit_code,
        Err(error) => error.exit_code(),
    };
    assert_eq!(exit, kvfsck::EXIT_IO);
}

/// Returns whether all layers can be read.
fn readable(store: &Store, sequence: &Sequence) -> bool {
    (0..2).all(|layer| {
        let read = sequence
            .select(layer, SelectRequest::all())
            .and_then(|view| store.read(&[&view]).submit())
            .and_then(|ticket| ticket.wait());
        read.is_ok_and(|batch| batch.get(0).is_ok())
    })
}

#[test]
fn a_limit_of_file_sizes_is_no_space() {
    const CHILD: &str = "STRATAKV_TEST_FILE_LIMIT";
    if std::env::var_os(CHILD).is_none() {
        // The limit applies to a whole process, so the test starts one. A write beyond the limit also raises SIGXFSZ.
        let own = std::env::current_exe().expect("this program");
        let arguments = ["--exact", "a_limit_of_file_sizes_is_no_space", "--nocapture"];
        let out = std::process::Command::new(own).args(arguments).env(CHILD, "1").output().expect("a child");
        assert!(out.status.success(), "{:?}: {}", out.status, String::from_utf8_lossy(&out.stderr));
        return;
    }
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let dir = tempfile::tempdir().expect("a directory");
    let dirs = device_dirs(dir.path(), 1);
    let options: StoreOptions = small_options(&dirs).capacity(ByteSize(64 * MIB));
    let store = options.clone().open().expect("a store");
    (0..4).for_each(|name| write(&store, name, 100).expect("a sequence"));
    let before = getrlimit(Resource::Fsize);
    setrlimit(Resource::Fsize, Rlimit { current: Some(64 << 10), maximum: before.maximum }).expect("lowered");
    let refused = (10..200).find_map(|name| write(&store, name, 400).err()).expect("a limit");
    assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused:?}");
    (0..4).for_each(|name| check(&store, name, 100));
    store.open_sequence("3", OpenSequence::new()).and_then(|one| one.delete(Durability::Sync)).expect("a deletion");
    assert!(store.health().read_only.is_none(), "{:#?}", store.health());
    setrlimit(Resource::Fsize, before).expect("raised");
    write(&store, 500, 400).expect("room again");
    (0..3).for_each(|name| check(&store, name, 100));
    store.close().expect("the store closes");
    assert_clean(&dirs, "after a limit");
    check(&options.open().expect("a store"), 500, 400);
}
