//! A process that is killed at any moment: acknowledged commits survive with exactly their bytes, commits are atomic,
//! deleted sequences stay deleted, and kvfsck finds nothing before and after the store is opened again.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use stratakv::{DType, Durability, ErrorKind, Sequence, SequenceOptions, Store, Summary};
use stratakv_tests::content::{LayerShape, Order, Shape};
use stratakv_tests::count_from_env;
use stratakv_tests::disk::{assert_clean, device_dirs, small_options};
use stratakv_tests::rng::{Rng, mix};

const CHILD: &str = "STRATAKV_TEST_KILL_CHILD";
const LIVE_MAX: usize = 4;

fn shape() -> Shape {
    let window = LayerShape { window: Some(50), ..LayerShape::full(1, 24) };
    Shape { layers: vec![LayerShape::full(2, 32), window], dtype: DType::F16, group: 6 }
}

fn seeds(name: u64, tokens: std::ops::Range<usize>) -> Vec<u64> {
    tokens.map(|t| mix(mix(name) ^ t as u64)).collect()
}

fn open(dirs: &[PathBuf]) -> Store {
    small_options(dirs).lazy_delay(Duration::from_millis(7)).open().expect("the store opens")
}

fn key(name: u64) -> String {
    format!("n{name}")
}

/// Length, token ids and state say the same, and every byte is what was appended.
fn verify(store: &Store, sequence: &Sequence, name: u64) -> usize {
    let tokens = sequence.len() as usize;
    assert!(sequence.token_ids().iter().copied().eq((0..tokens as u32).map(|t| t ^ name as u32)), "{name}: token ids");
    let state = sequence.state().expect("every commit carries a state");
    assert_eq!(state, tokens.to_le_bytes(), "{name}: the state of another commit");
    shape().check_all(store, sequence, |_| seeds(name, 0..tokens));
    tokens
}

fn report(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("\n!{line}\n").as_bytes()).and_then(|()| out.flush()).expect("the pipe");
}

/// Not a test of its own: the process that is killed. Works until then.
#[test]
fn child_that_is_killed() {
    let Ok(spec) = std::env::var(CHILD) else { return };
    let parts: Vec<&str> = spec.splitn(4, ' ').collect();
    let (seed, mut next, devices) = (
        parts[0].parse().expect("a seed"),
        parts[1].parse::<u64>().expect("a name"),
        parts[2].parse().expect("a count"),
    );
    let dirs = device_dirs(Path::new(parts[3]), devices);
    let store = open(&dirs);
    let mut rng = Rng(seed);
    let mut live: Vec<(u64, Sequence)> = Vec::new();
    for info in store.sequences() {
        let name = info.key[1..].parse().expect("a name");
        let sequence = store.open_sequence(&info.key).expect("a stored sequence");
        verify(&store, &sequence, name);
        live.push((name, sequence));
    }
    let shape = shape();
    loop {
        if live.is_empty() || (live.len() < LIVE_MAX && rng.below(12) == 0) {
            let options = SequenceOptions::new().key(key(next)).summary(Summary::MinMax);
            let layout = shape.layout().expect("a layout");
            live.push((next, store.create_sequence(&layout, options).expect("a sequence")));
            next += 1;
        }
        let at = rng.below(live.len());
        if live.len() > 1 && rng.below(15) == 0 {
            let (name, sequence) = live.swap_remove(at);
            report(&format!("deleting {name}"));
            let level = [Durability::Sync, Durability::Lazy][rng.below(2)];
            sequence.delete(level).expect("a delete");
            if level == Durability::Sync {
                report(&format!("deleted {name}"));
            }
            continue;
        }
        let (name, sequence) = &mut live[at];
        for step in 0..1 + rng.below(3) {
            let from = sequence.len() as usize;
            let count = if rng.below(4) == 0 { 30 + rng.below(300) } else { 1 + rng.below(8) };
            for layer in shape.kv_layers() {
                let new = seeds(*name, from..from + count);
                shape.append(sequence, layer, &new, Order::nth(step + layer)).expect("an append");
            }
            let ids: Vec<u32> = (from..from + count).map(|t| t as u32 ^ *name as u32).collect();
            sequence.push_token_ids(&ids).expect("token ids");
        }
        let tokens = sequence.len() as usize;
        let level = [Durability::Sync, Durability::Sync, Durability::Lazy, Durability::None][rng.below(4)];
        report(&format!("committing {name} {tokens}"));
        sequence.commit_with(&tokens.to_le_bytes(), level).expect("a commit");
        if level == Durability::Sync {
            report(&format!("committed {name} {tokens}"));
        }
    }
}

/// What the parent knows of a sequence.
#[derive(Debug, Default)]
struct Known {
    /// Tokens that were acknowledged durably.
    durable: usize,
    /// Lengths that some commit was asked for.
    asked: Vec<usize>,
    delete_asked: bool,
    deleted: bool,
}

fn run_child(dirs_root: &Path, devices: usize, seed: u64, next: u64, life: Duration) -> String {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "child_that_is_killed", "--nocapture", "--test-threads=1"])
        .env(CHILD, format!("{seed} {next} {devices} {}", dirs_root.display()))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a child");
    let mut out = child.stdout.take().expect("its output");
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        out.read_to_string(&mut text).map(|_| text)
    });
    std::thread::sleep(life);
    let ended = child.try_wait().expect("its state");
    child.kill().expect("SIGKILL");
    child.wait().expect("its end");
    let text = reader.join().expect("the reader").expect("its output");
    if let Some(status) = ended {
        let mut errors = String::new();
        let _ = child.stderr.take().map(|mut e| e.read_to_string(&mut errors));
        panic!("the child ended by itself, {status}:\n{text}\n{errors}");
    }
    text
}

fn learn(known: &mut BTreeMap<u64, Known>, text: &str) {
    for line in text.lines().filter_map(|line| line.strip_prefix('!')) {
        let words: Vec<&str> = line.split(' ').collect();
        let Some(entry) = words.get(1).and_then(|name| name.parse().ok()).map(|name| known.entry(name).or_default())
        else {
            continue;
        };
        match (words[0], words.get(2).and_then(|tokens| tokens.parse().ok())) {
            ("committing", Some(tokens)) => entry.asked.push(tokens),
            ("committed", Some(tokens)) => entry.durable = tokens,
            ("deleting", None) => entry.delete_asked = true,
            ("deleted", None) => entry.deleted = true,
            // Cut short by the kill.
            _ => {}
        }
    }
}

fn check_store(store: &Store, known: &mut BTreeMap<u64, Known>, when: &str) {
    let stored = store.sequences();
    for info in &stored {
        let name: u64 = info.key[1..].parse().expect("a name");
        assert!(known.contains_key(&name), "{when}: {name} was never committed");
    }
    for (name, known) in known.iter_mut() {
        let sequence = match store.open_sequence(&key(*name)) {
            Ok(sequence) => sequence,
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::NotFound, "{when}: {name}: {e:?}");
                assert!(known.durable == 0 || known.delete_asked, "{when}: {name} is lost, {known:?}");
                // What is gone once never comes back.
                known.deleted = true;
                continue;
            }
        };
        assert!(!known.deleted, "{when}: {name} was deleted and is back");
        let tokens = verify(store, &sequence, *name);
        assert!(tokens >= known.durable, "{when}: {name} has {tokens} tokens of {}", known.durable);
        assert!(known.asked.contains(&tokens), "{when}: {name} has {tokens} tokens, which no commit asked for");
        // What was found once stays.
        known.durable = tokens;
        known.asked = vec![tokens];
        known.delete_asked = false;
    }
}

#[test]
fn killed_at_any_moment() {
    let cycles = count_from_env("STRATAKV_TEST_KILLS", 50);
    let mut rng = Rng(count_from_env("STRATAKV_TEST_KILL_SEED", 7) as u64);
    let mut commits = 0;
    for devices in [1, 2] {
        let root = tempfile::tempdir().expect("a scratch directory");
        let mut known = BTreeMap::new();
        // The store exists: a creation that is cut short is a test of its own.
        drop(open(&device_dirs(root.path(), devices)));
        for cycle in 0..cycles / 2 {
            let seed = rng.next_u64();
            let next = known.keys().max().map_or(1, |name| name + 100);
            let life = Duration::from_micros(10_000 + rng.below(300_000) as u64);
            let text = run_child(root.path(), devices, seed, next, life);
            commits += text.matches("!committed ").count();
            learn(&mut known, &text);
            let dirs = device_dirs(root.path(), devices);
            let when = format!("cycle {cycle} on {devices} devices, seed {seed}");
            assert_clean(&dirs, &format!("{when}, killed"));
            // Sometimes the next process finds what the last one left.
            if rng.below(4) > 0 {
                let store = open(&dirs);
                check_store(&store, &mut known, &when);
                drop(store);
                assert_clean(&dirs, &format!("{when}, opened again"));
            }
        }
    }
    println!("{cycles} kills, {commits} durable commits acknowledged");
    assert!(commits > cycles / 4, "{commits} commits in {cycles} cycles");
}
