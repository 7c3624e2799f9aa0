//! Buffers in huge pages that the operator reserved. The test prints that it is skipped if there are none and this
//! process may not reserve any.

use std::os::unix::fs::DirBuilderExt;
use stratakv::{ByteSize, CreateOptions, Durability, KvLayout, SelectRequest, Store, TensorView};
use stratakv_testing::scratch::skipped;

const RESERVED: &str = "/proc/sys/vm/nr_hugepages";
/// The slabs of the store, and some for other processes.
const WANTED: u64 = 16 + 8;

fn number(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn free() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = meminfo.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    if field("Hugepagesize:") == Some(2048) { field("HugePages_Free:").unwrap_or(0) } else { 0 }
}

/// Restores the number of reserved pages when dropped.
struct PutBack(u64);

impl Drop for PutBack {
    fn drop(&mut self) {
        if let Err(e) = std::fs::write(RESERVED, self.0.to_string()) {
            eprintln!("{RESERVED} stays as it is: {e}");
        }
    }
}

#[test]
fn reserved_huge_pages_are_used() {
    let before = number(RESERVED).unwrap_or(0);
    let mut put_back = None;
    if free() < WANTED {
        if let Err(e) = std::fs::write(RESERVED, (before + WANTED).to_string()) {
            skipped(format!("{} reserved huge pages are free, and no more can be reserved: {e}", free()));
            return;
        }
        put_back = Some(PutBack(before));
    }
    let there = free();
    if there < WANTED {
        skipped(format!("memory is too scattered for {WANTED} huge pages: {there}"));
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let device = dir.path().join("0");
    std::fs::DirBuilder::new().mode(0o700).create(&device).unwrap();
    let store = Store::options().device(&device).memory_limit(ByteSize::mib(32)).open().unwrap();
    let layout = KvLayout::builder().layers(1).kv_heads(2).head_dim(64).group_tokens(8).build().unwrap();
    let mut sequence = store.create_sequence(&layout, CreateOptions::new().key("s")).unwrap();
    let row = |group: usize| vec![group as f32; 8 * 2 * 64];
    for group in 0..1000 {
        let row = row(group);
        let view = TensorView::token_major(&row, 8, 2, 64);
        sequence.append(0, view, view).unwrap();
    }
    sequence.commit(Durability::Sync).unwrap();
    let view = sequence.select(0, SelectRequest::all()).unwrap();
    let batch = store.read(&[&view]).submit().unwrap().wait().unwrap();
    let blocks = batch.get(0).unwrap();
    for (nth, group) in view.groups().enumerate() {
        let wanted = half::f16::from_f32(group as f32).to_le_bytes();
        let (keys, values) = blocks.group(nth).unwrap();
        assert!(keys.chunks(2).chain(values.chunks(2)).all(|element| element == wanted), "group {group}");
    }
    assert_eq!(store.status().pages.as_deref(), Some("explicit"), "{:?}", store.status());
    assert!(free() < there, "{} of {there} are free", free());
    drop((batch, view, sequence));
    store.close().unwrap();
    // All pages are free again once the kernel has closed the rings that registered them.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while free() != there {
        assert!(std::time::Instant::now() < until, "{} of {there} are free", free());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(put_back);
}
