//! Threads that read the blocks of a batch for one caller, for stores with synchronous reads.

use super::peer::BatchReader;
use anyhow::{Context, Result, bail};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;

/// Reads and consumes one block. Returns its bytes.
pub(super) type BlockRead = Box<dyn FnMut(u64) -> Result<u64> + Send>;

/// The batch that the threads work on.
#[derive(Default)]
struct SharedBatch {
    numbers: RwLock<Vec<u64>>,
    next: AtomicUsize,
    outcome: Mutex<(u64, Option<anyhow::Error>)>,
}

/// Threads that share every batch. Each takes the next block as soon as it has finished one.
pub(super) struct Workers {
    batch: Arc<SharedBatch>,
    /// All threads and the caller meet here before and after each batch. An empty batch ends the threads.
    meeting: Arc<Barrier>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts one thread for each of the given ways to read a block.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn new(reads: Vec<BlockRead>) -> Result<Self> {
        let (batch, meeting) = (Arc::<SharedBatch>::default(), Arc::new(Barrier::new(reads.len() + 1)));
        let start = |read| {
            let (batch, meeting) = (Arc::clone(&batch), Arc::clone(&meeting));
            std::thread::Builder::new().name("peer".to_owned()).spawn(move || work(&batch, &meeting, read))
        };
        let threads = reads.into_iter().map(start).collect::<std::io::Result<Vec<_>>>().context("start a thread")?;
        Ok(Self { batch, meeting, threads })
    }
}

/// Reads blocks of each batch until an empty batch comes.
fn work(batch: &SharedBatch, meeting: &Barrier, mut read: BlockRead) {
    loop {
        meeting.wait();
        let numbers = batch.numbers.read().unwrap_or_else(PoisonError::into_inner);
        if numbers.is_empty() {
            return;
        }
        let mut outcome = Ok(0);
        while let (Ok(bytes), Some(&number)) = (&outcome, numbers.get(batch.next.fetch_add(1, Ordering::Relaxed))) {
            outcome = read(number).map(|own| bytes + own);
        }
        drop(numbers);
        let mut total = batch.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Ok(bytes) => total.0 += bytes,
            Err(e) => total.1 = Some(e),
        }
        drop(total);
        meeting.wait();
    }
}

impl BatchReader for Workers {
    fn read(&mut self, numbers: &[u64]) -> Result<u64> {
        if numbers.is_empty() {
            bail!("a batch has at least one block");
        }
        {
            let mut shared = self.batch.numbers.write().unwrap_or_else(PoisonError::into_inner);
            shared.clear();
            shared.extend_from_slice(numbers);
        }
        self.batch.next.store(0, Ordering::Relaxed);
        self.meeting.wait();
        self.meeting.wait();
        let (bytes, failed) = std::mem::take(&mut *self.batch.outcome.lock().unwrap_or_else(PoisonError::into_inner));
        failed.map_or(Ok(bytes), Err)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.batch.numbers.write().unwrap_or_else(PoisonError::into_inner).clear();
        self.meeting.wait();
        for thread in self.threads.drain(..) {
            // A thread that panicked has nothing more to give back.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_a_batch_and_report_a_failed_block() {
        let read =
            || -> BlockRead { Box::new(|number| if number == 13 { bail!("block 13 is missing") } else { Ok(number) }) };
        let mut workers = Workers::new((0..4).map(|_| read()).collect()).expect("threads");
        for _ in 0..50 {
            assert_eq!(workers.read(&[1, 2, 3, 4, 5, 6, 7]).expect("read"), 28);
        }
        assert!(workers.read(&[12, 13, 14]).is_err());
        assert_eq!(workers.read(&[10]).expect("the threads still work"), 10);
        assert!(workers.read(&[]).is_err());
    }
}
