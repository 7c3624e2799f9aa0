//! How much of the time of reads a pipeline says to be hidden, on a device that takes as long as it is told to.

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

/// Of one read of the device.
const READ: Duration = Duration::from_millis(10);
/// Reads of a layer: two after each other for each of its threads.
const READS: u64 = 2 * THREADS as u64;
const LAYERS: u64 = 12;

/// Layers that compute for so long, each read ahead as soon as the one before is asked for.
fn decoded(compute: Duration) -> (PipelineReport, Duration) {
    let dir = tempfile::tempdir().unwrap();
    let (store, sequence) = filled(dir.path(), 1);
    let view = |layer: u64| -> Vec<Selection> {
        let groups: Vec<u64> = (0..READS).map(|at| at * 20 + layer).collect();
        vec![sequence.select(0, SelectRequest::groups(&groups)).unwrap()]
    };
    let mut pipeline = Pipeline::new(&store, Budget::All);
    let trouble = trouble::set(dir.path(), &[("stratakv-0-", Trouble::Late(READ))]);
    let start = Instant::now();
    for layer in 0..LAYERS {
        let now = usize::try_from(layer).unwrap();
        pipeline.read(now, &view(layer)).unwrap();
        if layer + 1 < LAYERS {
            pipeline.predict(now + 1, &view(layer + 1)).unwrap();
        }
        pipeline.attend(now, &[&[0.5; DIM]], &AttendOptions::default(), &mut [&mut [0.0; DIM]]).unwrap();
        std::thread::sleep(compute);
    }
    let elapsed = start.elapsed();
    drop(trouble);
    (pipeline.take_report(), elapsed)
}

#[test]
fn time_is_hidden_where_something_is_computed_meanwhile() {
    let _alone = lock(&ALONE);
    let (report, elapsed) = decoded(Duration::ZERO);
    assert_eq!((report.prefetched, report.dropped_reads), ((LAYERS - 1) * READS, 0), "{report:?}");
    assert!(report.device_time >= 2 * READ * (LAYERS as u32 - 1) && report.device_time <= elapsed, "{report:?}");
    assert!(report.hidden_share() < 0.2, "{} of {report:?}", report.hidden_share());
    // All of the reads but the first, with time to spare.
    let (report, elapsed) = decoded(6 * READ);
    assert!(report.device_time <= elapsed, "{report:?}");
    assert!(report.hidden_share() > 0.6, "{} of {report:?}", report.hidden_share());
}
