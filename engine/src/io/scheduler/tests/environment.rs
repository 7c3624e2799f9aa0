//! Shards in hostile environments: resource limits, full disks, and system calls that the kernel refuses.
//!
//! A limit or a refused call holds for a whole process. A test that needs one runs in a child process: [`child`] starts
//! this binary again with an environment variable that selects the child's part of the test.

use super::*;
use crate::error::ErrorKind;
use crate::io::tests::sandbox;

#[test]
fn one_system_call_per_batch_and_slice() {
    let rig = Rig::new(DriverKind::Uring);
    let file = rig.dir.create_file("f", 16 << 20).expect("made");
    rig.write(&file, 0, &Random(3).bytes(16 << 20)).expect("written");
    let mut calls = Vec::new();
    for _ in 0..20 {
        let mut leases: Vec<Lease> = (0..64).map(|_| rig.lease(64 << 10)).collect();
        let reads = leases.iter_mut().zip(0..).map(|(lease, i)| read_into(&file, i * (256 << 10), lease, i)).collect();
        let (start, before) = (Instant::now(), rig.counters.snapshot().submissions);
        rig.shard.run(reads, Priority::Demand).expect("read");
        // The call in which the shard sleeps again may be counted already.
        let made = rig.counters.snapshot().submissions - before;
        // On a slow device a slice may end early, but no earlier than after two milliseconds.
        let early = start.elapsed().as_millis() as u64 / 2;
        assert!(made <= 1 + 64 / 16 + early, "{made} calls in {:?}", start.elapsed());
        calls.push(made);
    }
    println!("system calls per batch of 64: {calls:?}");
}

#[test]
fn forbidden_io_uring_falls_back_and_says_so() {
    if std::env::var_os("STRATAKV_TEST_NO_FILES").is_none() {
        return child("forbidden_io_uring_falls_back_and_says_so", "STRATAKV_TEST_NO_FILES");
    }
    sandbox::deny(libc::SYS_io_uring_setup, libc::EPERM);
    let rig = Rig::new(DriverKind::Auto);
    let status = rig.shard.status();
    println!("{status:?}");
    assert_eq!(status.name, "posix");
    assert!(status.notes.iter().any(|n| n.contains("seccomp") && n.contains("os error 1")), "{status:?}");
    let file = rig.dir.create_file("f", 8192).expect("made");
    rig.write(&file, 0, &[4; 8192]).expect("written");
    assert_eq!(rig.read(&file, 4096, 4096).expect("read"), [4; 4096]);
    let threads = ShardThreads::new(DriverKind::Uring, rig.arena.clone(), None, Affinity::default(), None);
    let forced = threads.serve("t", rig.dir.clone(), Arc::default());
    assert_eq!(forced.map(|_| ()).expect_err("forced").kind(), ErrorKind::Configuration);
}

#[test]
fn a_kernel_without_io_uring_falls_back_and_says_so() {
    if std::env::var_os("STRATAKV_TEST_NO_URING").is_none() {
        return child("a_kernel_without_io_uring_falls_back_and_says_so", "STRATAKV_TEST_NO_URING");
    }
    sandbox::deny(libc::SYS_io_uring_setup, libc::ENOSYS);
    let rig = Rig::new(DriverKind::Auto);
    let status = rig.shard.status();
    assert_eq!(status.name, "posix");
    assert!(status.notes.iter().any(|n| n.contains("kernel") && n.contains("os error 38")), "{status:?}");
    let file = rig.dir.create_file("f", 8192).expect("made");
    rig.write(&file, 0, &[4; 8192]).expect("written");
    assert_eq!(rig.read(&file, 4096, 4096).expect("read"), [4; 4096]);
}

#[test]
fn a_file_system_without_fallocate_sets_the_length_only() {
    if std::env::var_os("STRATAKV_TEST_NO_FALLOCATE").is_none() {
        return child("a_file_system_without_fallocate_sets_the_length_only", "STRATAKV_TEST_NO_FALLOCATE");
    }
    sandbox::deny(libc::SYS_fallocate, libc::EOPNOTSUPP);
    let rig = Rig::new(DriverKind::Auto);
    let file = rig.dir.create_file("f", 1 << 20).expect("made");
    assert!(!file.is_preallocated());
    assert_eq!(file.len().expect("its length"), 1 << 20, "its length all the same");
    rig.dir.grow_file(&file, 2 << 20).expect("longer");
    assert!(!file.is_preallocated());
    rig.write(&file, (2 << 20) - 4096, &[4; 4096]).expect("written");
    assert_eq!(rig.read(&file, (2 << 20) - 4096, 4096).expect("read"), [4; 4096]);
}

#[test]
fn file_size_limit_is_no_space() {
    if std::env::var_os("STRATAKV_TEST_FSIZE").is_none() {
        return child("file_size_limit_is_no_space", "STRATAKV_TEST_FSIZE");
    }
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = Rlimit { current: Some(64 << 10), maximum: Some(64 << 10) };
    setrlimit(Resource::Fsize, limit).expect("lowered");
    for kind in [DriverKind::Uring, DriverKind::Posix] {
        let rig = Rig::new(kind);
        let file = rig.dir.create_file("f", 64 << 10).expect("within the limit");
        rig.write(&file, 0, &[1; 64 << 10]).expect("within the limit");
        let error = rig.write(&file, 64 << 10, &[1; 4096]).expect_err("beyond");
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
        let error = rig.write(&file, 32 << 10, &[1; 64 << 10]).expect_err("across");
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
        assert_eq!(rig.dir.create_file("g", 1 << 20).map(|_| ()).expect_err("beyond").kind(), ErrorKind::NoSpace);
        assert_eq!(rig.read(&file, 0, 64 << 10).expect("intact"), [1; 64 << 10]);
    }
}

#[test]
fn a_low_memlock_limit_leaves_slabs_unregistered() {
    let Some(at) = std::env::var_os("STRATAKV_TEST_MEMLOCK") else {
        // The parent creates the directory, because the child cannot remove it after it changed the owner.
        let tmp = tempfile::tempdir().expect("temporary directory");
        open_to_all(tmp.path());
        return child_at("a_low_memlock_limit_leaves_slabs_unregistered", "STRATAKV_TEST_MEMLOCK", tmp.path());
    };
    use rustix::process::{Resource, Rlimit, setrlimit};
    setrlimit(Resource::Memlock, Rlimit { current: Some(3 << 20), maximum: Some(3 << 20) }).expect("lowered");
    let tmp = tempfile::tempdir_in(at).expect("temporary directory");
    if rustix::process::geteuid().is_root() {
        // The limit does not hold for root. This thread, and threads that it starts, continue as another user.
        std::os::unix::fs::chown(tmp.path(), Some(54321), None).expect("chown");
        sandbox::become_user(54321);
    }
    let rig = Rig::within(DriverKind::Uring, tmp, 8);
    let file = rig.dir.create_file("f", 8 << 20).expect("made");
    let bytes = Random(4).bytes(8 << 20);
    rig.write(&file, 0, &bytes).expect("written");
    let mut leases: Vec<Lease> = (0..4).map(|_| rig.lease(2 << 20)).collect();
    let reads = leases.iter_mut().zip(0..).map(|(lease, i)| read_into(&file, i * (2 << 20), lease, i)).collect();
    rig.shard.run(reads, Priority::Demand).expect("read");
    assert!(leases.iter().zip(bytes.chunks(2 << 20)).all(|(l, b)| l.bytes() == Some(b)));
    let deadline = Instant::now() + Duration::from_secs(10);
    while !rig.shard.status().notes.iter().any(|n| n.contains("ulimit -l")) {
        assert!(Instant::now() < deadline, "{:?}", rig.shard.status());
        std::thread::sleep(Duration::from_millis(5));
    }
    println!("{:?}", rig.shard.status());
}

fn open_to_all(path: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).expect("set");
}

#[test]
fn plain_pages_are_called_plain() {
    if std::env::var_os("STRATAKV_TEST_NO_THP").is_none() {
        return child("plain_pages_are_called_plain", "STRATAKV_TEST_NO_THP");
    }
    sandbox::deny_huge_pages();
    let rig = Rig::new(DriverKind::Uring);
    let file = rig.dir.create_file("f", 8192).expect("made");
    rig.write(&file, 0, &[8; 8192]).expect("written");
    assert_eq!(rig.read(&file, 0, 8192).expect("read"), [8; 8192]);
    let explicit = std::fs::read_to_string("/proc/sys/vm/nr_hugepages").is_ok_and(|n| n.trim() != "0");
    if explicit {
        crate::io::tests::skipped("this system has huge pages reserved");
    } else {
        assert_eq!(rig.arena.usage().backing, Some(crate::io::PageBacking::Plain));
    }
}

#[test]
fn modes_hold_under_any_umask_and_without_openat2() {
    if std::env::var_os("STRATAKV_TEST_UMASK").is_none() {
        return child("modes_hold_under_any_umask_and_without_openat2", "STRATAKV_TEST_UMASK");
    }
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &std::path::Path| std::fs::metadata(path).expect("exists").permissions().mode() & 0o7777;
    for (name, umask) in [("a", 0o777), ("b", 0)] {
        let tmp = tempfile::tempdir().expect("temporary directory");
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(umask));
        let root = tmp.path().join(name);
        let dir = OsDirectory::open(&root, OPTIONS).expect("created");
        dir.mkdir("sub").expect("made");
        let file = dir.create_file("sub/f", 8192).expect("made");
        dir.write_small(&file, 4096, &[6; 4096]).expect("written");
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
        assert_eq!([mode(&root), mode(&root.join("sub")), mode(&root.join("sub/f"))], [0o700, 0o700, 0o600]);
        if umask == 0 {
            // The second round runs without openat2.
            assert!(std::os::unix::fs::symlink("/etc", root.join("link")).is_ok());
            assert!(dir.open_file("link/passwd", Access::ReadOnly).is_err());
            assert!(dir.open_file("sub/f", Access::ReadWrite).is_ok());
            dir.rename("sub/f", "g").expect("renamed");
            assert_eq!(dir.list("sub").expect("listed"), []);
        }
        sandbox::deny(libc::SYS_openat2, libc::ENOSYS);
    }
}

#[test]
fn full_device_is_no_space() {
    // A file system of 1 MiB, if this process may mount one.
    let Ok(tmp) = tempfile::tempdir() else { return };
    let mount = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m,mode=0700", "none"])
        .arg(tmp.path())
        .output();
    if !mount.is_ok_and(|m| m.status.success()) {
        crate::io::tests::skipped("cannot mount a small file system");
        return;
    }
    let at = tmp.path().to_owned();
    let _unmount = Unmount(at.clone());
    for (kind, name) in [(DriverKind::Uring, "u"), (DriverKind::Posix, "p")] {
        let inner = tempfile::Builder::new().prefix(name).tempdir_in(&at).expect("made");
        let rig = Rig::within(kind, inner, 8);
        assert_eq!(rig.dir.create_file("big", 4 << 20).map(|_| ()).expect_err("too big").kind(), ErrorKind::NoSpace);
        let file = rig.dir.create_file("f", 0).expect("made");
        let error = rig.write(&file, 0, &[1; 2 << 20]).expect_err("too big");
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
        rig.dir.remove_file("f").expect("removed");
    }
}

struct Unmount(std::path::PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Runs one test of this binary in a child process, with an environment variable that tells it so.
fn child(test: &str, variable: &str) {
    child_at(test, variable, std::path::Path::new("."));
}

/// Runs one test as [`child`] does. The variable holds `path`.
fn child_at(test: &str, variable: &str, path: &std::path::Path) {
    let name = format!("io::scheduler::tests::environment::{test}");
    let run = std::process::Command::new(std::env::current_exe().expect("this binary"))
        .args([name.as_str(), "--exact", "--nocapture", "--test-threads=1"])
        .env(variable, path)
        .output()
        .expect("started");
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{text}{}", String::from_utf8_lossy(&run.stderr));
    assert!(text.contains("1 passed"), "{text}");
    println!("{text}");
}

/// A seccomp filter answers as a kernel does whose quota is used up.
#[test]
fn a_quota_is_no_space() {
    if std::env::var_os("STRATAKV_TEST_QUOTA").is_none() {
        return child("a_quota_is_no_space", "STRATAKV_TEST_QUOTA");
    }
    let rig = Rig::new(DriverKind::Auto);
    let file = rig.dir.create_file("f", 64 << 10).expect("within the quota");
    sandbox::deny(libc::SYS_fallocate, libc::EDQUOT);
    let error = rig.dir.create_file("g", 1 << 20).map(|_| ()).expect_err("beyond");
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    assert!(error.to_string().contains("quota"), "{error}");
    rig.write(&file, 0, &[1; 64 << 10]).expect("reserved blocks can be written");
    assert_eq!(rig.read(&file, 0, 64 << 10).expect("intact"), [1; 64 << 10]);
    assert!(rig.dir.open_file("g", Access::ReadOnly).is_err(), "nothing is left of it");
}
