//! The lock of a device outlives a killed process exactly as long as its writes.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use super::*;
use crate::error::ErrorKind;

#[test]
fn ring_holds_the_lock() {
    let rig = Rig::new(DriverKind::Uring);
    let fds = std::fs::read_dir("/proc/self/fdinfo").expect("procfs").flatten();
    let rings: Vec<String> = fds
        .filter_map(|fd| std::fs::read_to_string(fd.path()).ok())
        .filter(|info| info.contains("SqMask") && info.contains("UserFiles"))
        .collect();
    if rings.is_empty() {
        println!("skipped: the kernel does not tell what rings hold");
        return;
    }
    // Each ring of this process (other tests run beside this one) lists the files it holds, the lock first.
    let path = rig.dir.path().display().to_string();
    let holds = |ring: &String| ring.lines().any(|l| l.trim().strip_prefix("0: ").is_some_and(|f| path.ends_with(f)));
    assert!(rings.iter().any(holds), "{rings:?}");
}

#[test]
fn killed_writer_frees_the_lock() {
    if let Some(path) = std::env::var_os("STRATAKV_TEST_VICTIM") {
        return write_for_ever(std::path::Path::new(&path));
    }
    for _ in 0..5 {
        let tmp = tempfile::tempdir().expect("temporary directory");
        let path = tmp.path().join("d");
        let mut victim = Command::new(std::env::current_exe().expect("this binary"))
            .args(["shard::tests::lock::killed_writer_frees_the_lock", "--exact", "--nocapture"])
            .env("STRATAKV_TEST_VICTIM", &path)
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let mut lines = BufReader::new(victim.stdout.take().expect("piped")).lines();
        assert!(lines.any(|line| line.is_ok_and(|l| l.contains("writing"))));
        let busy = DeviceDir::open(&path, OPTIONS).map(|_| ()).expect_err("held");
        assert_eq!(busy.kind(), ErrorKind::InUse);
        victim.kill().expect("killed");
        victim.wait().expect("reaped");
        let reaped = Instant::now();
        let dir = DeviceDir::open(&path, DirOptions { lock_wait: Duration::from_secs(20), ..OPTIONS }).expect("free");
        println!("free {:?} after the process was reaped", reaped.elapsed());
        assert_eq!(dir.list(".").expect("listed").len(), 1);
    }
}

fn write_for_ever(path: &std::path::Path) {
    let dir: Arc<dyn Directory> = DeviceDir::open(path, OPTIONS).expect("opened");
    let arena = Arena::new(MemoryBudget::new(8 * SLAB_BYTES), usize::MAX);
    let shard = ShardHandle::spawn("victim", DriverKind::Uring, Arc::clone(&dir), arena.clone(), Arc::default());
    let shard = shard.expect("shard");
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
