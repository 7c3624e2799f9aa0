//! The speed of a shard against a bare io_uring loop.
//!
//! Run it alone and in release: `cargo test --release -p stratakv --lib speed -- --ignored --nocapture`. The variable
//! `STRATAKV_TEST_NO_THP=1` runs it on plain pages.

use super::*;
use crate::io::tests::bare;

const FILE_BYTES: u64 = 1 << 30;
const BATCHES: usize = 120;
const PER_BATCH: usize = 64;

/// Returns the seconds elapsed and the seconds of CPU time of the whole process.
fn timed(work: impl FnOnce()) -> (f64, f64) {
    let cpu = || cpu_ns("") as f64 / 1e9;
    let (wall, before) = (Instant::now(), cpu());
    work();
    (wall.elapsed().as_secs_f64(), cpu() - before)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[test]
#[ignore = "a measurement: writes a file of 1 GiB"]
fn batches_against_a_bare_loop() {
    if std::env::var_os("STRATAKV_TEST_NO_THP").is_some() {
        crate::io::tests::sandbox::deny_huge_pages();
    }
    let rig = Rig::new(DriverKind::Uring);
    let posix = Rig::new(DriverKind::Posix);
    let file = rig.dir.create_file("f", FILE_BYTES).expect("made");
    let chunk = Random(5).bytes(SLAB_BYTES);
    for at in (0..FILE_BYTES).step_by(SLAB_BYTES) {
        rig.write(&file, at, &chunk).expect("written");
    }
    rig.shard.run(vec![sync_of(&file, 0)], Priority::Write).expect("synced");
    let mut random = Random(6);
    println!("{:?}, direct {}", rig.arena.usage().backing, file.is_direct());
    for block in [4 << 10, 16 << 10, 64 << 10, 128 << 10] {
        let batches: Vec<Vec<u64>> = (0..BATCHES)
            .map(|_| (0..PER_BATCH).map(|_| (random.below(FILE_BYTES as usize / block) * block) as u64).collect())
            .collect();
        let gigabytes = (BATCHES * PER_BATCH * block) as f64 / 1e9;
        let mut figures: [Vec<(f64, f64)>; 3] = Default::default();
        let mut calls = 0;
        for _ in 0..5 {
            figures[0].push(timed(|| bare::read_batches(&file, block, &batches)));
            let before = rig.counters.snapshot().submissions;
            figures[1].push(timed(|| through(&rig, &file, block, &batches)));
            calls = rig.counters.snapshot().submissions - before;
            figures[2].push(timed(|| through(&posix, &file, block, &batches)));
        }
        let show = |name: &str, runs: &[(f64, f64)]| {
            let rate = gigabytes / median(runs.iter().map(|r| r.0).collect());
            let cpu = median(runs.iter().map(|r| r.1).collect()) / gigabytes;
            println!("{:>4} KiB {name:>6}: {rate:.2} GB/s, {cpu:.4} CPU s/GB", block >> 10);
        };
        show("bare", &figures[0]);
        show("uring", &figures[1]);
        show("posix", &figures[2]);
        println!("         calls per batch {:.2}", calls as f64 / BATCHES as f64);
    }
}

fn through(rig: &Rig, file: &Arc<DeviceFile>, block: usize, batches: &[Vec<u64>]) {
    for batch in batches {
        let mut leases: Vec<Lease> = batch.iter().map(|_| rig.lease(block)).collect();
        let reads = batch.iter().zip(&mut leases).map(|(&offset, lease)| read_into(file, offset, lease, 0)).collect();
        rig.shard.run(reads, Priority::Demand).expect("read");
    }
}
