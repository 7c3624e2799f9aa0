//! Disks that disappear during reads: the backing file of the loop device is truncated, or the directory is unmounted.
//!
//! The tests need root. Without it, they print what they skip.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use stratakv::{ByteSize, CreateOptions, OpenSequence, SelectRequest, Sequence, Store, StoreOptions};
use stratakv_testing::GroupPattern;
use stratakv_tests::disk::skipped;

const PATTERN: GroupPattern = GroupPattern { heads: 2, dim: 128, group: 8 };
const GROUPS: u64 = 2048;
/// The longest time that a read may take when its disk disappears.
const STALL_MAX: Duration = Duration::from_secs(10);

stratakv_tests::on_threads!(a_disk_is_cut_off_in_a_loop_of_reads, a_disk_is_unmounted_in_a_loop_of_reads,);

fn call(program: &str, arguments: &[&str]) -> Result<String, String> {
    let out = Command::new(program).args(arguments).output().map_err(|e| format!("{program}: {e}"))?;
    match out.status.success() {
        true => Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned()),
        false => Err(format!("{program}: {}", String::from_utf8_lossy(&out.stderr).trim())),
    }
}

/// A disk: a mounted file system on a loop device on a file. Dropping it removes all of them.
struct Disk {
    image: PathBuf,
    block: Option<String>,
    mount: PathBuf,
}

impl Disk {
    fn new(root: &Path, index: usize) -> Result<Self, String> {
        let image = root.join(format!("{index}.image"));
        let file = std::fs::File::create(&image).map_err(|e| e.to_string())?;
        file.set_len(192 << 20).map_err(|e| e.to_string())?;
        let mount = root.join(index.to_string());
        std::fs::create_dir(&mount).map_err(|e| e.to_string())?;
        let mut disk = Self { image, block: None, mount };
        let image = disk.image.to_string_lossy().into_owned();
        let block = call("losetup", &["--find", "--show", "--direct-io=on", &image])?;
        disk.block = Some(block.clone());
        call("mkfs.ext4", &["-q", "-F", "-m", "0", &block])?;
        call("mount", &["-o", "noatime", &block, &disk.mount.to_string_lossy()])?;
        std::fs::DirBuilder::new().mode(0o700).create(disk.directory()).map_err(|e| e.to_string())?;
        Ok(disk)
    }

    fn directory(&self) -> PathBuf {
        self.mount.join("store")
    }

    /// Makes every later read an error.
    fn cut(&self) {
        std::fs::OpenOptions::new().write(true).open(&self.image).unwrap().set_len(0).unwrap();
        // The page cache of the mount must not serve reads.
        std::fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
    }

    fn unmount(&self) {
        call("umount", &["--lazy", &self.mount.to_string_lossy()]).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let mount = self.mount.to_string_lossy().into_owned();
        let _ = call("umount", &[&mount]).or_else(|_| call("umount", &["--lazy", &mount]));
        if let Some(block) = &self.block {
            let _ = call("losetup", &["--detach", block]);
        }
    }
}

/// Makes disks, or returns the reason why this machine cannot.
fn disks(root: &Path, count: usize) -> Result<Vec<Disk>, String> {
    if !rustix::process::geteuid().is_root() {
        return Err("needs root for loop devices".into());
    }
    (0..count).map(|index| Disk::new(root, index)).collect()
}

fn options(disks: &[Disk], threads: Option<usize>) -> StoreOptions {
    let options = disks.iter().fold(Store::options(), |options, disk| options.device(disk.directory()));
    let options = options.memory_limit(ByteSize::mib(48)).segment_bytes(ByteSize::mib(2));
    options.frame_bytes(ByteSize::kib(256)).shard_threads(threads)
}

fn filled(store: &Store) -> Sequence {
    PATTERN.write(store, CreateOptions::new().key("s").copies(2), GROUPS)
}

/// Reads some groups and compares every byte. Returns the time that the read took.
fn read(store: &Store, sequence: &Sequence, groups: &[u64]) -> Duration {
    let view = sequence.select(0, SelectRequest::groups(groups)).unwrap();
    let start = Instant::now();
    let batch = store.read(&[&view]).submit().unwrap().wait().unwrap();
    let took = start.elapsed();
    PATTERN.check(&batch, 0, groups);
    took
}

fn read_all(store: &Store, sequence: &Sequence) {
    read(store, sequence, &(0..GROUPS).collect::<Vec<_>>());
}

/// Reads in a loop until some turns after `gone` was set. Returns the time of the longest turn.
fn read_loop(store: &Store, sequence: &Sequence, turns: &AtomicUsize, gone: &AtomicBool) -> Duration {
    let (mut after, mut longest) = (0, Duration::ZERO);
    while after < 200 {
        after += usize::from(gone.load(Ordering::SeqCst));
        let turn = turns.fetch_add(1, Ordering::SeqCst) as u64;
        let groups: Vec<u64> = (0..8).map(|nth| (turn * 97 + nth * 251) % GROUPS).collect();
        let mut sorted = groups.clone();
        sorted.sort_unstable();
        sorted.dedup();
        longest = longest.max(read(store, sequence, &sorted));
    }
    longest
}

/// Takes away the first of three disks during a loop of reads. No answer may be wrong or missing.
fn goes(disks: &[Disk], threads: Option<usize>, take: impl FnOnce(&Disk)) -> (Store, Sequence) {
    let store = options(disks, threads).open().unwrap();
    let sequence = filled(&store);
    assert!(store.health().is_well());
    let (turns, gone) = (AtomicUsize::new(0), AtomicBool::new(false));
    let longest = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_loop(&store, &sequence, &turns, &gone));
        while turns.load(Ordering::SeqCst) < 50 && !reader.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        take(&disks[0]);
        gone.store(true, Ordering::SeqCst);
        reader.join().unwrap()
    });
    assert!(longest < STALL_MAX, "a read took {longest:?}");
    read_all(&store, &sequence);
    (store, sequence)
}

/// Declares the first disk lost and repairs. Each of the others then has a copy of everything, so one more may be lost.
fn recovers(disks: &[Disk], threads: Option<usize>, store: Store, sequence: Sequence) {
    store.declare_lost(0).unwrap();
    let repaired = store.repair().unwrap();
    assert_eq!(repaired.left, 0, "{repaired:?}");
    read_all(&store, &sequence);
    drop(sequence);
    store.close().unwrap();
    for left in 1..3 {
        let alone = options(&disks[left..=left], threads).read_only(true).allow_degraded(true).open().unwrap();
        read_all(&alone, &alone.open_sequence("s", OpenSequence::new()).unwrap());
    }
}

fn a_disk_is_cut_off_in_a_loop_of_reads(threads: Option<usize>) {
    let root = tempfile::tempdir().unwrap();
    let disks = match disks(root.path(), 3) {
        Ok(disks) => disks,
        Err(why) => return skipped(why),
    };
    let (store, sequence) = goes(&disks, threads, Disk::cut);
    let health = store.health();
    assert!(!health.is_well() && health.devices.iter().any(|device| device.errors > 0), "{health:?}");
    recovers(&disks, threads, store, sequence);
}

fn a_disk_is_unmounted_in_a_loop_of_reads(threads: Option<usize>) {
    let root = tempfile::tempdir().unwrap();
    let disks = match disks(root.path(), 3) {
        Ok(disks) => disks,
        Err(why) => return skipped(why),
    };
    // The store keeps reading files that it has open. Only later opens miss the disk.
    let (store, sequence) = goes(&disks, threads, Disk::unmount);
    drop(sequence);
    store.close().unwrap();
    assert!(options(&disks[1..], threads).open().is_err(), "a device is missing");
    let store = options(&disks[1..], threads).allow_degraded(true).open().unwrap();
    assert_eq!(store.health().lost, [0]);
    let sequence = store.open_sequence("s", OpenSequence::new()).unwrap();
    read_all(&store, &sequence);
    assert_eq!(store.repair().unwrap().left, 0);
    drop(sequence);
    store.close().unwrap();
    for left in 1..3 {
        let alone = options(&disks[left..=left], threads).read_only(true).allow_degraded(true).open().unwrap();
        read_all(&alone, &alone.open_sequence("s", OpenSequence::new()).unwrap());
    }
}
