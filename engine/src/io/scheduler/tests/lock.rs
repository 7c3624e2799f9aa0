//! The lock of a device outlives a killed process as long as the writes of the process do.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use super::*;
use crate::error::ErrorKind;

#[test]
fn ring_holds_the_lock() {
    for neighbours in [0, 2] {
        ring_holds_the_locks(On { kind: DriverKind::Uring, neighbours });
    }
}

fn ring_holds_the_locks(on: On) {
    let rig = Rig::new(on);
    let fds = std::fs::read_dir("/proc/self/fdinfo").expect("procfs").flatten();
    let rings: Vec<String> = fds
        .filter_map(|fd| std::fs::read_to_string(fd.path()).ok())
        .filter(|info| info.contains("SqMask") && info.contains("UserFiles"))
        .collect();
    if rings.is_empty() {
        crate::io::tests::skipped("the kernel does not report the files of rings");
        return;
    }
    // Each ring of this process lists the files that it holds, the locks first. Other tests have rings too.
    let dirs = rig.shard.neighbours.iter().map(|(_, dir, _)| dir).chain([&rig.dir]);
    let paths: Vec<String> = dirs.map(|dir| dir.path().display().to_string()).collect();
    let holds = |ring: &String, path: &String| {
        let files = ring.lines().filter_map(|line| line.trim().split_once(": "));
        files
            .take_while(|(slot, _)| slot.parse() != Ok(paths.len()))
            .any(|(_, file)| path.ends_with(file) && file.len() > 1)
    };
    assert!(rings.iter().any(|ring| paths.iter().all(|path| holds(ring, path))), "{paths:?} {rings:?}");
}

#[test]
fn killed_writer_frees_the_lock() {
    if let Some(path) = std::env::var_os("STRATAKV_TEST_VICTIM") {
        return write_for_ever(std::path::Path::new(&path));
    }
    for neighbours in [0, 1, 0, 3, 0] {
        let tmp = tempfile::tempdir().expect("temporary directory");
        let path = tmp.path().join("d");
        let mut victim = Command::new(std::env::current_exe().expect("this binary"))
            .args(["io::scheduler::tests::lock::killed_writer_frees_the_lock", "--exact", "--nocapture"])
            .env("STRATAKV_TEST_VICTIM", &path)
            .env("STRATAKV_TEST_NEIGHBOURS", neighbours.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let mut lines = BufReader::new(victim.stdout.take().expect("piped")).lines();
        assert!(lines.any(|line| line.is_ok_and(|l| l.contains("writing"))));
        let busy = OsDirectory::open(&path, OPTIONS).map(|_| ()).expect_err("held");
        assert_eq!(busy.kind(), ErrorKind::InUse);
        victim.kill().expect("killed");
        victim.wait().expect("reaped");
        let reaped = Instant::now();
        let dir = OsDirectory::open(&path, OsDirectoryOptions { lock_wait: Duration::from_secs(20), ..OPTIONS })
            .expect("free");
        println!("free {:?} after the process was reaped", reaped.elapsed());
        assert_eq!(dir.list(".").expect("listed").len(), 1);
    }
}

fn write_for_ever(path: &std::path::Path) {
    let dir: Arc<dyn Directory> = OsDirectory::open(path, OPTIONS).expect("opened");
    let arena = Arena::new(MemoryBudget::new(8 * SLAB_BYTES), usize::MAX);
    let neighbours = std::env::var("STRATAKV_TEST_NEIGHBOURS").expect("set").parse().expect("a number");
    let shard = Shards::new("victim", On { kind: DriverKind::Uring, neighbours }, &dir, &arena, &Arc::default());
    let file = dir.create_file("f", 64 << 20).expect("made");
    let sink = Arc::new(Outcomes::default());
    for i in 0..100_000u64 {
        let lease = arena.lease_zeroed(1 << 20).expect("room");
        shard.submit_wait(batch(vec![write_of(&file, (i % 64) << 20, &lease, i)], Priority::Write, &sink));
        if i == 10 {
            println!("writing");
        }
        drop(sink.wait_for((i as usize).saturating_sub(4)));
    }
}
