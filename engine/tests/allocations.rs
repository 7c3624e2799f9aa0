//! The number of allocations of a read does not grow with its requests.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use stratakv::{ByteSize, CreateOptions, Durability, KvLayout, SelectRequest, Store, TensorView};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `GlobalAlloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn allocations_do_not_grow_with_requests() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::options().device(dir.path()).memory_limit(ByteSize::mib(32)).open().unwrap();
    let layout = KvLayout::builder().layers(1).kv_heads(2).head_dim(128).group_tokens(1).build().unwrap();
    let mut sequence = store.create_sequence(&layout, CreateOptions::new().key("k")).unwrap();
    let data = vec![1.0_f32; 1024 * 256];
    let rows = TensorView::token_major(&data, 1024, 2, 128);
    (0..10).for_each(|_| sequence.append(0, rows, rows).unwrap());
    sequence.commit(Durability::Sync).unwrap();
    for now in [true, false] {
        // The groups are so far apart that each is a request of its own, and so few that they fit into one part.
        let per_batch = |count: u64| {
            let groups: Vec<u64> = (0..count).map(|at| at * 80).collect();
            let view = sequence.select(0, SelectRequest::groups(&groups)).unwrap();
            let read = || match now {
                true => drop(store.read(&[&view]).wait().unwrap()),
                false => {
                    let ticket = store.read(&[&view]).submit().unwrap();
                    assert_eq!(ticket.requests(), count as usize);
                    drop(ticket.wait().unwrap());
                }
            };
            (0..20).for_each(|_| read());
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            (0..50).for_each(|_| read());
            (ALLOCATIONS.load(Ordering::Relaxed) - before) as f64 / 50.0
        };
        let (few, many) = (per_batch(16), per_batch(128));
        // Tables that double their size make a few more allocations.
        assert!(many - few < 14.0, "blocking {now}: {few} allocations for 16 requests, {many} for 128");
    }
}
