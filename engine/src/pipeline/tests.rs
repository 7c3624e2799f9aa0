//! The share of the reading time that a pipeline reports as hidden, on a device whose reads take a set time.

use super::{Pipeline, PipelineReport};
use crate::io::driver::posix::{
    THREADS,
    trouble::{self, Trouble},
};
use crate::metrics::lock;
use crate::options::Budget;
use crate::plan::{SelectRequest, Selection};
use crate::read::AttendOptions;
use crate::store::tests::{ALONE, DIM, filled};
use std::time::{Duration, Instant};

/// The duration of one read of the device.
const READ: Duration = Duration::from_millis(10);
/// Reads of a layer: two in a row for each I/O thread of the device.
const READS: u64 = 2 * THREADS as u64;
const LAYERS: u64 = 12;
const TRIES: usize = 5;

/// Runs layers that compute for this long. Each layer is prefetched as soon as the layer before it is read.
fn decoded(compute: Duration) -> (PipelineReport, Duration) {
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path(), 1);
    let selection = |layer: u64| -> Vec<Selection> {
        let groups: Vec<u64> = (0..READS).map(|at| at * 20 + layer).collect();
        vec![sequence.select(0, SelectRequest::groups(&groups)).unwrap()]
    };
    let mut pipeline = Pipeline::new(&store, Budget::All);
    let trouble = trouble::set(dir.path(), &[("stratakv-0-", Trouble::Late(READ))]);
    let start = Instant::now();
    for layer in 0..LAYERS {
        let now = usize::try_from(layer).unwrap();
        pipeline.read(now, &selection(layer)).unwrap();
        if layer + 1 < LAYERS {
            pipeline.predict(now + 1, &selection(layer + 1)).unwrap();
        }
        pipeline.attend(now, &[&[0.5; DIM]], &AttendOptions::default(), &mut [&mut [0.0; DIM]]).unwrap();
        std::thread::sleep(compute);
    }
    let elapsed = start.elapsed();
    drop(trouble);
    (pipeline.take_report(), elapsed)
}

#[test]
fn a_pipeline_hides_reads_behind_computation() {
    let _alone = lock(&ALONE);
    let (report, elapsed) = decoded(Duration::ZERO);
    assert_eq!((report.prefetched, report.dropped_reads), ((LAYERS - 1) * READS, 0), "{report:?}");
    assert!(report.device_time >= 2 * READ * (LAYERS as u32 - 1) && report.device_time <= elapsed, "{report:?}");
    // On a busy machine a thread may wake late, which moves the share. Several tries find the share of the pipeline.
    let share = |compute: Duration| {
        let (report, elapsed) = decoded(compute);
        assert!(report.device_time <= elapsed, "{report:?}");
        report.hidden_share()
    };
    let least = (0..TRIES).map(|_| share(Duration::ZERO)).find(|share| *share < 0.2);
    assert!(least.is_some(), "without computation a fifth of the reads is hidden in each of {TRIES} tries");
    // All reads are hidden except the reads of the first layer.
    let most = (0..TRIES).map(|_| share(6 * READ)).find(|share| *share > 0.6);
    assert!(most.is_some(), "computation hides less than 0.6 of the reads in each of {TRIES} tries");
}
