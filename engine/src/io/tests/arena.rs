use std::time::{Duration, Instant};

use crate::error::ErrorKind;
use crate::io::PageBacking;
use crate::io::buffer::PAGE_BYTES;
use crate::io::buffer::SLAB_BYTES;
use crate::io::buffer::arena::{Arena, LeaseError};
use crate::io::buffer::lease::Lease;
use crate::io::buffer::pages;
use crate::metrics::{Category, MemoryBudget};

fn arena(slabs: usize) -> Arena {
    Arena::new(MemoryBudget::new(slabs * SLAB_BYTES), usize::MAX)
}

fn range(lease: &Lease) -> std::ops::Range<usize> {
    let start = lease.bytes().expect("idle").as_ptr().addr();
    start..start + lease.capacity()
}

#[test]
fn slabs_are_mapped_on_demand_and_trimmed_when_idle() {
    let budget = MemoryBudget::new(10 * SLAB_BYTES + 5);
    let arena = Arena::new(budget.clone(), usize::MAX);
    assert_eq!((arena.usage().slabs, arena.usage().backing, budget.used()), (0, None, 0));
    let small = arena.lease(1).expect("fits");
    assert_eq!((small.len(), small.capacity(), arena.usage().slabs), (1, PAGE_BYTES, 1));
    let big = arena.lease(SLAB_BYTES).expect("fits");
    assert_eq!((arena.usage().slabs, budget.used()), (2, 2 * SLAB_BYTES));
    assert_eq!(arena.usage().leased_bytes, SLAB_BYTES + PAGE_BYTES);
    drop(big);
    assert_eq!(arena.trim(), 1);
    assert_eq!((arena.usage().slabs, budget.used()), (1, SLAB_BYTES));
    drop(arena);
    assert!(small.bytes().is_some_and(|b| b.len() == 1), "a lease outlives its arena");
    drop(small);
    assert_eq!(budget.used(), 0);
    assert_eq!(budget.usage().categories[Category::Arena as usize].peak_bytes, 2 * SLAB_BYTES);
}

#[test]
fn leases_are_aligned_and_disjoint() {
    let arena = arena(3);
    let mut leases: Vec<Lease> = Vec::new();
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..3000 {
        let r = random.usize(..1 << 31);
        if r.is_multiple_of(3) && !leases.is_empty() {
            drop(leases.swap_remove(r % leases.len()));
            continue;
        }
        let len = if r % 50 == 1 { SLAB_BYTES } else { r % (40 * PAGE_BYTES) };
        match arena.lease(len) {
            Ok(mut lease) => {
                assert_eq!(range(&lease).start % PAGE_BYTES, 0);
                lease.bytes_mut().expect("idle").fill(round as u8);
                leases.push(lease);
            }
            Err(why) => {
                assert_eq!(why, LeaseError::Now);
                drop(leases.swap_remove(r % leases.len()));
            }
        }
    }
    let mut ranges: Vec<_> = leases.iter().map(range).collect();
    ranges.sort_by_key(|r| r.start);
    assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start));
    for lease in &leases {
        let bytes = lease.bytes().expect("idle");
        assert!(bytes.windows(2).all(|w| w[0] == w[1]), "another lease wrote here");
    }
    leases.clear();
    assert_eq!(arena.usage().leased_bytes, 0);
    assert_eq!(arena.trim(), 3);
}

#[test]
fn exhaustion_is_reported_and_returned_leases_are_announced() {
    let arena = arena(1);
    assert_eq!(arena.lease(SLAB_BYTES + 1).err(), Some(LeaseError::Never));
    assert_eq!(self::arena(0).lease(1).err(), Some(LeaseError::Never));
    let held = arena.lease(SLAB_BYTES).expect("fits");
    let seen = arena.returned().epoch();
    assert_eq!(arena.lease(1).err(), Some(LeaseError::Now));
    assert_eq!(crate::error::Error::from(LeaseError::Now).kind(), ErrorKind::Busy);
    let waiter = {
        let arena = arena.clone();
        std::thread::spawn(move || {
            let told = arena.returned().wait_past(seen, Some(Instant::now() + Duration::from_secs(20)));
            told && arena.lease(PAGE_BYTES).is_ok()
        })
    };
    std::thread::sleep(Duration::from_millis(20));
    drop(held);
    assert!(waiter.join().expect("no panic"));
}

#[test]
fn lease_all_leases_everything_or_nothing() {
    let arena = arena(2);
    let half = SLAB_BYTES / 2;
    let three = arena.lease_all(&[half, SLAB_BYTES, half]).expect("fits");
    assert_eq!(three.iter().map(Lease::len).collect::<Vec<_>>(), [half, SLAB_BYTES, half]);
    assert_eq!(arena.usage().leased_bytes, 2 * SLAB_BYTES);
    drop(three);
    let held = arena.lease(half).expect("fits");
    let seen = arena.returned().epoch();
    assert_eq!(arena.lease_all(&[half, 1, SLAB_BYTES]).err(), Some(LeaseError::Now));
    assert_eq!(arena.lease_all(&[1, SLAB_BYTES + 1]).err(), Some(LeaseError::Never));
    assert_eq!(arena.returned().epoch(), seen, "waiters were notified although no memory became free");
    assert_eq!(arena.usage().leased_bytes, half);
    assert_eq!(arena.lease_all(&[SLAB_BYTES, half]).map(|leases| leases.len()), Ok(2));
    assert_eq!(self::arena(0).lease_all(&[]).map(|leases| leases.len()), Ok(0));
    drop(held);
}

#[test]
fn bytes_are_out_of_reach_while_io_is_in_flight() {
    let arena = arena(1);
    let mut lease = arena.lease_zeroed(3 * PAGE_BYTES).expect("fits");
    let first = lease.read_target(0..PAGE_BYTES).expect("in range");
    let second = lease.read_target(PAGE_BYTES..2 * PAGE_BYTES).expect("in range");
    assert!(lease.bytes().is_none() && lease.bytes_mut().is_none());
    assert_eq!(lease.write_source(0..PAGE_BYTES).err().map(|e| e.kind()), Some(ErrorKind::Busy));
    drop(first);
    assert!(lease.bytes().is_none());
    drop(second);
    assert!(lease.bytes_mut().is_some());
    let source = lease.write_source(0..PAGE_BYTES).expect("in range");
    assert!(lease.bytes().is_some() && lease.bytes_mut().is_none());
    assert_eq!(lease.read_target(0..1).err().map(|e| e.kind()), Some(ErrorKind::Busy));
    // The lease is dropped first. Its pages stay taken until the source is dropped.
    drop(lease);
    assert_eq!((arena.usage().leased_bytes, arena.trim()), (3 * PAGE_BYTES, 0));
    drop(source);
    assert_eq!(arena.usage().leased_bytes, 0);
    let mut lease = arena.lease(10).expect("fits");
    assert!(lease.read_target(0..PAGE_BYTES).is_ok(), "whole pages may be read");
    for bad in [0..PAGE_BYTES + 1, 5000..5001, usize::MAX - 1..usize::MAX] {
        assert_eq!(lease.read_target(bad).err().map(|e| e.kind()), Some(ErrorKind::InvalidArgument));
    }
}

#[test]
fn zeroed_leases_show_no_old_bytes() {
    let arena = arena(1);
    arena.lease(SLAB_BYTES).expect("fits").bytes_mut().expect("idle").fill(0xee);
    let lease = arena.lease_zeroed(SLAB_BYTES).expect("fits");
    assert!(lease.bytes().expect("idle").iter().all(|&b| b == 0));
}

#[test]
fn backing_is_reported_as_the_kernel_sees_it() {
    let arena = arena(2);
    let lease = arena.lease(SLAB_BYTES).expect("fits");
    let backing = arena.usage().backing.expect("a slab");
    let thp = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    println!("backing {backing:?}, transparent huge pages: {}", thp.trim());
    let start = range(&lease).start;
    let ways = [pages::scan(start, SLAB_BYTES), pages::read_smaps(start, SLAB_BYTES)];
    println!("huge by PAGEMAP_SCAN and by smaps: {ways:?}");
    if backing != PageBacking::Explicit {
        assert!(ways.iter().flatten().all(|&huge| huge == (backing == PageBacking::Transparent)), "{ways:?}");
    }
    // Ordinary memory is not reported as huge pages.
    let plain = crate::io::buffer::aligned::AlignedBuf::zeroed(64 << 10);
    assert_ne!(pages::scan(plain.bytes().as_ptr().addr(), 64 << 10), Some(true));
    if thp.contains("[never]") {
        assert_ne!(backing, PageBacking::Transparent);
    }
}
