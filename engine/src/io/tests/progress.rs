use std::sync::Arc;

use crate::error::ErrorKind;
use crate::io::buffer::SLAB_BYTES;
use crate::io::buffer::arena::Arena;
use crate::io::buffer::lease::Lease;
use crate::io::driver::interface::Op;
use crate::io::driver::progress::{InFlight, Step};
use crate::io::file::device_file::DeviceFile;
use crate::metrics::{DeviceCounters, MemoryBudget};

const LEN: usize = 16384;

fn lease() -> Lease {
    Arena::new(MemoryBudget::new(SLAB_BYTES), usize::MAX).lease(LEN).expect("fits")
}

fn file(direct: bool) -> Arc<DeviceFile> {
    let null = std::fs::File::open("/dev/null").expect("exists");
    Arc::new(DeviceFile::new(null.into(), "segments/7", direct, false))
}

fn read(direct: bool) -> InFlight {
    let into = lease().read_target(0..LEN).expect("in range");
    InFlight::new(Op::Read { file: file(direct), offset: 4096, into })
}

fn rest(flight: &InFlight) -> (u64, usize) {
    flight.rest().map(|(offset, memory)| (offset, memory.len)).expect("not a sync")
}

#[test]
fn short_completions_continue_where_they_stopped() {
    let counters = DeviceCounters::default();
    let mut buffered = read(false);
    assert_eq!(rest(&buffered), (4096, LEN));
    assert!(matches!(buffered.on_result(5000, &counters), Step::Continue));
    assert_eq!(rest(&buffered), (9096, LEN - 5000));
    assert!(matches!(buffered.on_result((LEN - 5000) as i32, &counters), Step::Done(Ok(()))));
    // A direct file continues at the last whole page, and bytes moved twice count once.
    let mut direct = read(true);
    assert!(matches!(direct.on_result(5000, &counters), Step::Continue));
    assert_eq!(rest(&direct), (8192, LEN - 4096));
    assert!(matches!(direct.on_result((LEN - 4096) as i32, &counters), Step::Done(Ok(()))));
    let counted = counters.snapshot();
    assert_eq!((counted.reads, counted.read_bytes, counted.short_completions), (2, 2 * LEN as u64, 2));
}

#[test]
fn a_continuation_without_progress_is_the_end_of_the_file() {
    let counters = DeviceCounters::default();
    for direct in [false, true] {
        let mut flight = read(direct);
        assert!(matches!(flight.on_result(5000, &counters), Step::Continue));
        // The direct file reads the bytes after the last whole page again, and no more.
        let Step::Done(Err(error)) = flight.on_result(if direct { 904 } else { 0 }, &counters) else {
            panic!("an end of file taken for progress");
        };
        let text = error.to_string();
        assert!(
            error.kind() == ErrorKind::Io && text.contains("after 5000 bytes") && text.contains("segments/7"),
            "{text}"
        );
    }
    assert_eq!(counters.snapshot().errors, 2);
}

#[test]
fn interruptions_are_retried_within_a_limit_and_syncs_never() {
    let counters = DeviceCounters::default();
    let mut flight = read(true);
    let mut retries = 0;
    let error = loop {
        match flight.on_result(if retries % 2 == 0 { -libc::EINTR } else { -libc::EAGAIN }, &counters) {
            Step::Later(_) => retries += 1,
            Step::Done(Err(e)) => break e,
            _ => panic!("neither a retry nor an end"),
        }
        assert!(retries < 100);
    };
    assert_eq!((retries, counters.snapshot().retries), (15, 15));
    assert!(error.raw_os_error().is_some());
    for errno in [libc::EINTR, libc::EAGAIN, libc::EIO] {
        let mut sync = InFlight::new(Op::Sync { file: file(false) });
        assert!(sync.rest().is_none());
        assert!(matches!(sync.on_result(-errno, &counters), Step::Done(Err(_))));
    }
}

#[test]
fn errors_name_the_file_and_the_offset() {
    let counters = DeviceCounters::default();
    let from = lease().write_source(0..LEN).expect("in range");
    let mut write = InFlight::new(Op::Write { file: file(true), offset: 8192, from });
    let Step::Done(Err(error)) = write.on_result(-libc::ENOSPC, &counters) else { panic!("not an error") };
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    let text = error.to_string();
    assert!(["write", "16384", "8192", "segments/7"].iter().all(|part| text.contains(part)), "{text}");
    // A result above the request is an error.
    assert!(matches!(read(true).on_result(LEN as i32 + 1, &counters), Step::Done(Err(_))));
}
