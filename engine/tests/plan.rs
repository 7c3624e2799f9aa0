//! The requests of a read: every selected block once, little else, and exactly the bytes that its ticket reports.

use proptest::prelude::*;
use std::collections::BTreeSet;
use stratakv::{ByteSize, CreateOptions, Durability, OpenSequence, SelectRequest, Sequence, Store};
use stratakv_testing::GroupPattern;

const GROUPS: u64 = 600;
/// The groups that are on devices. Later groups may be in memory, because commits of few tokens gather there.
const ON_DEVICES: u64 = GROUPS - 64;
const PAGE: u64 = 4096;
/// Patterns with blocks of 1, 4 and 24 KiB.
const PATTERNS: [GroupPattern; 3] = [
    GroupPattern { heads: 2, dim: 32, group: 4 },
    GroupPattern { heads: 2, dim: 64, group: 8 },
    GroupPattern { heads: 2, dim: 128, group: 24 },
];

/// Writes a sequence of one layer with commits at the given groups. The sequence is
/// opened again, so that all of it is on devices.
fn filled(store: &Store, pattern: GroupPattern, commits: &BTreeSet<u64>) -> Sequence {
    let mut sequence = store.create_sequence(&pattern.layout(), CreateOptions::new().key("s")).unwrap();
    for nth in 0..GROUPS {
        pattern.append(&mut sequence, nth);
        if commits.contains(&nth) {
            sequence.commit(Durability::Lazy).unwrap();
        }
    }
    sequence.commit(Durability::Sync).unwrap();
    sequence.close().unwrap();
    store.open_sequence("s", OpenSequence::new()).unwrap()
}

/// Returns the requests and bytes read so far, and the widest gap that the planner reads over.
fn read_so_far(store: &Store) -> (u64, u64, u64) {
    store.status().devices.iter().fold((0, 0, 0), |(requests, bytes, gap), device| {
        let counters = &device.counters;
        (requests + counters.reads, bytes + counters.read_bytes, gap.max(device.profile.gap_bytes as u64))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_read_takes_what_was_selected_and_little_else(
        devices in 1_usize..4,
        narrow: bool,
        pattern in prop::sample::select(&PATTERNS[..]),
        commits in prop::collection::btree_set(0..GROUPS, 0..20),
        selections in prop::collection::vec(
            (prop::collection::btree_set(0..ON_DEVICES, 1..200), 0..ON_DEVICES, 0_u64..100), 1..12),
    ) {
        let block = 2 * pattern.plane_bytes() as u64;
        let root = tempfile::tempdir().unwrap();
        let options = Store::options().memory_limit(ByteSize::mib(64)).segment_bytes(ByteSize::mib(4));
        let options = (0..devices).fold(options, |options, nth| {
            let dir = root.path().join(nth.to_string());
            std::fs::create_dir(&dir).unwrap();
            options.device(dir)
        });
        let options = if narrow { options.gap_limit(ByteSize(0)) } else { options };
        let store = options.frame_bytes(ByteSize::kib(512)).open().unwrap();
        let sequence = filled(&store, pattern, &commits);
        for (mut groups, first, run) in selections {
            // Some groups are scattered, some are adjacent.
            groups.extend(first..(first + run).min(ON_DEVICES));
            let groups: Vec<u64> = groups.into_iter().collect();
            let view = sequence.select(0, SelectRequest::groups(&groups)).unwrap();
            let before = read_so_far(&store);
            let ticket = store.read(&[&view]).submit().unwrap();
            let requests = ticket.requests() as u64;
            let (bytes, selected) = (ticket.device_bytes(), ticket.selected_bytes());
            let batch = ticket.wait().unwrap();
            let after = read_so_far(&store);
            prop_assert_eq!((after.0 - before.0, after.1 - before.1), (requests, bytes), "read, and announced");
            prop_assert_eq!(selected, groups.len() as u64 * block, "each block once");
            prop_assert!(requests <= groups.len() as u64, "{} requests for {} blocks", requests, groups.len());
            // Each request is rounded by a page on either side, and may include gaps that cost less than a request.
            let gaps = if narrow { 0 } else { groups.len() as u64 * before.2.max(after.2) };
            let most = selected + requests * 2 * PAGE + gaps;
            prop_assert!((selected..=most).contains(&bytes), "{} bytes for {}", bytes, selected);
            pattern.check(&batch, 0, &groups);
        }
        // Adjacent blocks share a request, up to parts of at most 256 KiB and the ends of frames.
        let all = sequence.select(0, SelectRequest::all()).unwrap();
        let ticket = store.read(&[&all]).submit().unwrap();
        let requests = ticket.requests() as u64;
        ticket.wait().unwrap();
        let frames = store.sequences()[0].frames as u64;
        let parts = (GROUPS * block).div_ceil(128 << 10);
        prop_assert!(requests <= parts + 2 * frames, "{} requests for all of {} frames", requests, frames);
    }
}
