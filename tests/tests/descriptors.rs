//! Stores in a process that may open few files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, Store, StoreOptions, TensorView,
};
use stratakv_tests::disk::{assert_clean, device_dirs, fast_scratch};

/// Runs `doing` in a process of its own that may open this many files.
fn limited(test: &str, files: u64, doing: impl FnOnce()) {
    const CHILD: &str = "STRATAKV_TEST_DESCRIPTORS";
    if std::env::var_os(CHILD).is_some() {
        allow(files);
        doing();
        return;
    }
    let mut command = std::process::Command::new(std::env::current_exe().expect("this program"));
    let out = command.args(["--exact", test, "--test-threads=1"]).env(CHILD, "1").output().expect("a child");
    assert!(out.status.success(), "{}\n{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
}

fn allow(files: u64) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(files), maximum }).expect("a limit of descriptors");
}

fn options(dirs: &[std::path::PathBuf]) -> StoreOptions {
    let options = dirs.iter().fold(Store::options(), |options, dir| options.device(dir));
    options.memory_limit(ByteSize::mib(16)).segment_bytes(ByteSize::kib(256)).frame_bytes(ByteSize::kib(64))
}

const DIM: usize = 64;

fn layout() -> KvLayout {
    let builder = KvLayout::builder().layers(1).kv_heads(1).head_dim(DIM as u16).dtype(DType::F16).group_tokens(16);
    builder.build().expect("a layout")
}

fn rows(first: usize, tokens: usize) -> Vec<f32> {
    (first * DIM..(first + tokens) * DIM).map(|at| (at % 1009) as f32 / 64.0).collect()
}

/// Segments with frames that no commit has named do not keep their files open.
#[test]
fn an_append_without_a_commit_fills_more_segments_than_the_process_may_open_files() {
    const TOKENS: usize = 120_000;
    const TEST: &str = "an_append_without_a_commit_fills_more_segments_than_the_process_may_open_files";
    limited(TEST, 64, || {
        let root = fast_scratch();
        for copies in 1..=2 {
            let dirs = device_dirs(&root.path().join(copies.to_string()), usize::from(copies));
            let store = options(&dirs).open().expect("a store");
            let mut sequence =
                store.create_sequence(&layout(), CreateOptions::new().key("long").copies(copies)).expect("a sequence");
            for first in (0..TOKENS).step_by(1000) {
                let part = rows(first, 1000);
                let view = TensorView::token_major(&part, 1000, 1, DIM);
                sequence.append(0, view, view).unwrap_or_else(|e| panic!("token {first}: {e}"));
            }
            sequence.commit(Durability::Sync).expect("a commit");
            let segments = std::fs::read_dir(dirs[0].join("segments")).expect("segments").count();
            assert!(segments > 100, "{segments} segments");
            drop(sequence);
            store.close().expect("closed");
            assert_clean(&dirs, "after a long append");
            let store = options(&dirs).open().expect("a store");
            let sequence = store.open_sequence("long", OpenSequence::new()).expect("the sequence");
            assert_eq!(sequence.len(), TOKENS as u64);
        }
    });
}

/// A checkpoint that finds no descriptor changes nothing. The store goes on once there is one.
#[test]
fn a_checkpoint_without_descriptors_leaves_a_store_that_works() {
    limited("a_checkpoint_without_descriptors_leaves_a_store_that_works", 256, || {
        let root = fast_scratch();
        let dirs = device_dirs(root.path(), 1);
        let store = options(&dirs).open().expect("a store");
        let mut sequence = store.create_sequence(&layout(), CreateOptions::new().key("a")).expect("a sequence");
        let row = rows(0, 1);
        let view = TensorView::token_major(&row, 1, 1, DIM);
        // Every file that may be opened is open.
        let all: Vec<std::fs::File> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        assert!(all.len() > 50, "{} files", all.len());
        let (mut tokens, mut failed) = (0, None);
        for _ in 0..5000 {
            sequence.append(0, view, view).expect("an append to memory");
            tokens += 1;
            if let Err(e) = sequence.commit_with(&[7; 3000], Durability::Sync) {
                failed = Some(e);
                break;
            }
        }
        let failed = failed.expect("a checkpoint or a new segment needs a file");
        assert!(!matches!(failed.kind(), ErrorKind::Indeterminate | ErrorKind::Poisoned), "{failed:?}");
        assert_eq!(store.health().read_only, None, "{failed}");
        drop(all);
        sequence.commit(Durability::Sync).expect("a commit with descriptors");
        drop(sequence);
        store.close().expect("closed");
        assert_clean(&dirs, "after a lack of descriptors");
        let store = options(&dirs).open().expect("a store");
        assert_eq!(store.open_sequence("a", OpenSequence::new()).expect("the sequence").len(), tokens);
    });
}
