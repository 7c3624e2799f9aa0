//! Reads into memory that the embedder owns.

use std::any::Any;
use std::future::Future;
use std::pin::pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use stratakv::options::DriverChoice;
use stratakv::read::ReadRegion;
use stratakv::{
    ByteSize, CreateOptions, Durability, ErrorKind, KvLayout, SelectRequest, Selection, Sequence, Store, TensorView,
};

const HEADS: usize = 2;
const DIM: usize = 64;
const GROUP: usize = 8;
/// The bytes of a block: two planes of `[heads, group, dim]` in f16.
const BLOCK: usize = 2 * HEADS * GROUP * DIM * 2;
const GROUPS: usize = 1600;

/// Memory of the embedder, as a runtime would pin it.
struct Pinned(NonNull<u8>, usize);

// SAFETY: the pointer is to plain memory that this value owns.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    fn new(len: usize) -> Self {
        let layout = std::alloc::Layout::from_size_align(len, 4096).unwrap();
        // SAFETY: the layout has a size.
        Self(NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap(), len)
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is allocated and initialised, and the test reads it only while no read is in flight.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.1) }
    }

    fn poison(&self) {
        // SAFETY: as above.
        unsafe { self.0.as_ptr().write_bytes(0xa5, self.1) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: the layout it was allocated with.
        unsafe { std::alloc::dealloc(self.0.as_ptr(), std::alloc::Layout::from_size_align(self.1, 4096).unwrap()) }
    }
}

fn region(slabs: usize) -> (ReadRegion, Arc<Pinned>) {
    let memory = Arc::new(Pinned::new(slabs * ReadRegion::SLAB_BYTES));
    let owner = Arc::clone(&memory) as Arc<dyn Any + Send + Sync>;
    // SAFETY: the owner keeps the memory alive, and the test writes it only while no batch or read uses it.
    (unsafe { ReadRegion::from_raw(memory.0, memory.1, owner) }.unwrap(), memory)
}

fn filled(dir: &std::path::Path, driver: DriverChoice) -> (Store, Sequence) {
    // The gap limit is fixed, so that the measured speed of the device does not change the size of reads.
    let options = Store::options().device(dir).memory_limit(ByteSize::mib(48)).driver(driver).gap_limit(ByteSize(0));
    let store = options.segment_bytes(ByteSize::mib(4)).frame_bytes(ByteSize::kib(256)).open().unwrap();
    let layout = KvLayout::builder().layers(1).kv_heads(HEADS as u16).head_dim(DIM as u16).group_tokens(GROUP as u16);
    let mut sequence = store.create_sequence(&layout.build().unwrap(), CreateOptions::new().key("s")).unwrap();
    let tokens = GROUPS * GROUP;
    let data: Vec<f32> = (0..tokens * HEADS * DIM).map(|i| (i % 8191) as f32 / 16.0).collect();
    let view = TensorView::token_major(&data, tokens, HEADS, DIM);
    sequence.append(0, view, view).unwrap();
    sequence.commit(Durability::Lazy).unwrap();
    (store, sequence)
}

fn some(sequence: &Sequence, seed: usize, count: usize) -> Selection {
    let mut groups: Vec<u64> = (0..count).map(|i| ((i * 37 + seed * 101) % GROUPS) as u64).collect();
    groups.sort_unstable();
    groups.dedup();
    sequence.select(0, SelectRequest::groups(&groups)).unwrap()
}

fn blocks_are_in_the_region(driver: DriverChoice) {
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path(), driver);
    let (region, memory) = region(2);
    assert_eq!((region.capacity(), region.in_use()), (2 * ReadRegion::SLAB_BYTES, 0));
    for seed in 0..80 {
        let view = some(&sequence, seed, 60);
        let plain = store.read(&[&view]).submit().unwrap().wait().unwrap();
        let plain = plain.get(0).unwrap();
        let selected = [&view];
        let request = store.read(&selected).into_region(&region);
        let request = if seed % 2 == 0 { request } else { request.prefetch() };
        let batch = request.submit().unwrap().wait().unwrap();
        let blocks = batch.get(0).unwrap();
        for nth in 0..view.groups().count() {
            let (keys, values) = blocks.group(nth).unwrap();
            assert_eq!((keys.clone(), values.clone()), plain.group(nth).unwrap());
            for plane in [keys, values] {
                let at = region.offset_of(&plane).expect("a plane in the region");
                assert!(memory.bytes()[at..at + plane.len()] == *plane);
            }
            assert_eq!(region.offset_of(&plain.group(nth).unwrap().0), None);
        }
        assert!(region.in_use() >= view.groups().count() * BLOCK);
        drop(batch);
        assert_eq!(region.in_use(), 0);
        memory.poison();
    }
    // Reads are cancelled in flight. Reads that are still in flight hold their pages, and free pages stay poisoned.
    for seed in 0..200 {
        drop(store.read(&[&some(&sequence, seed, 60)]).into_region(&region).submit().unwrap());
        while region.in_use() > 0 {
            std::thread::yield_now();
        }
        memory.poison();
        std::thread::yield_now();
        assert!(memory.bytes().iter().all(|&byte| byte == 0xa5), "a late write");
    }
}

#[test]
fn blocks_are_in_the_region_with_io_uring() {
    blocks_are_in_the_region(DriverChoice::Auto);
}

#[test]
fn blocks_are_in_the_region_with_threads() {
    blocks_are_in_the_region(DriverChoice::Posix);
}

#[test]
fn a_region_that_is_full_is_waited_for_and_one_that_is_too_small_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path(), DriverChoice::Auto);
    let (region, _memory) = region(1);
    let large = sequence.select(0, SelectRequest::all()).unwrap();
    let refused = store.read(&[&large]).into_region(&region).submit().map(|_| ()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::MemoryLimit);
    assert!(refused.to_string().contains("the region"), "{refused}");
    // Each read takes three quarters of the region.
    let half = |seed| some(&sequence, seed, 3 * ReadRegion::SLAB_BYTES / 4 / BLOCK);
    let first = store.read(&[&half(1)]).into_region(&region).submit().unwrap().wait().unwrap();
    let second = store.read(&[&half(2)]).into_region(&region).submit().unwrap();
    assert!(!second.is_done());
    let late = store.read(&[&half(3)]).into_region(&region).submit().unwrap();
    let soon = std::time::Instant::now() + std::time::Duration::from_millis(20);
    assert_eq!(late.wait_deadline(Some(soon)).map(|_| ()).unwrap_err().kind(), ErrorKind::Deadline);
    let releasing = std::thread::spawn(move || drop(first));
    let batch = second.wait().unwrap();
    releasing.join().unwrap();
    assert!(region.offset_of(&batch.get(0).unwrap().group(0).unwrap().0).is_some());
}

/// A waker that counts its wakes.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn polling_for_memory_that_the_caller_holds_returns_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path(), DriverChoice::Auto);
    let (region, _memory) = region(1);
    // Each read takes six of the eight parts, so only two parts of the second would fit.
    let most = |seed| some(&sequence, seed, 3 * ReadRegion::SLAB_BYTES / 4 / BLOCK);
    let held = store.read(&[&most(1)]).into_region(&region).submit().unwrap().wait().unwrap();
    let mut ticket = pin!(store.read(&[&most(2)]).into_region(&region).submit().unwrap());
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    for _ in 0..3 {
        assert!(ticket.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        assert_eq!(woken.0.load(Ordering::SeqCst), 0, "told of its own attempt");
    }
    drop(held);
    assert_eq!(woken.0.load(Ordering::SeqCst), 1, "one task, polled three times");
    let batch = loop {
        match ticket.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(batch) => break batch.unwrap(),
            Poll::Pending => std::thread::yield_now(),
        }
    };
    assert!(batch.get(0).unwrap().group(0).is_ok());
}

#[test]
fn the_memory_lives_as_long_as_anything_in_it() {
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path(), DriverChoice::Auto);
    let (region, memory) = region(1);
    let view = some(&sequence, 5, 8);
    let batch = store.read(&[&view]).into_region(&region).submit().unwrap().wait().unwrap();
    drop(region);
    assert!(Arc::strong_count(&memory) > 1, "the batch holds it");
    assert!(batch.get(0).unwrap().group(7).is_ok());
    drop(batch);
    drop(sequence);
    store.close().unwrap();
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn odd_memory_is_refused() {
    let memory = Arc::new(Pinned::new(2 * ReadRegion::SLAB_BYTES));
    let make = |skip: usize, len| {
        let owner = Arc::clone(&memory) as Arc<dyn Any + Send + Sync>;
        // SAFETY: the range is inside the memory that the owner keeps alive.
        unsafe { ReadRegion::from_raw(memory.0.add(skip), len, owner) }.map(|_| ()).unwrap_err().kind()
    };
    for (skip, len) in [(1, ReadRegion::SLAB_BYTES), (0, 0), (0, 4096), (512, ReadRegion::SLAB_BYTES)] {
        assert_eq!(make(skip, len), ErrorKind::InvalidArgument);
    }
    assert_eq!(Arc::strong_count(&memory), 1);
}
