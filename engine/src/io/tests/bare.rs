//! The least code that reads blocks with io_uring. The driver is measured against it.

use std::os::fd::AsRawFd;

use io_uring::types::Fixed;
use io_uring::{IoUring, opcode};

use crate::io::buffer::SLAB_BYTES;
use crate::io::buffer::slab::Slab;
use crate::io::file::device_file::DeviceFile;
use crate::metrics::{Category, MemoryBudget};

/// Reads batches of blocks at these offsets, 16 completions per wait, into registered slabs.
pub(crate) fn read_batches(file: &DeviceFile, block: usize, batches: &[Vec<u64>]) {
    let per_batch = batches[0].len();
    let budget = MemoryBudget::new(usize::MAX);
    let per_slab = SLAB_BYTES / block;
    let slabs: Vec<Slab> = (0..per_batch.div_ceil(per_slab))
        .map(|_| Slab::map(budget.try_reserve(SLAB_BYTES, Category::Arena).expect("unlimited")).expect("memory"))
        .collect();
    let mut ring: IoUring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(256).expect("ring");
    ring.submitter().register_files(&[file.fd().as_raw_fd()]).expect("registered");
    let ranges: Vec<libc::iovec> =
        slabs.iter().map(|s| libc::iovec { iov_base: s.start().as_ptr().cast(), iov_len: SLAB_BYTES }).collect();
    // SAFETY: the slabs outlive the ring's last request: every batch is waited for.
    unsafe { ring.submitter().register_buffers(&ranges) }.expect("registered");
    for batch in batches {
        for (i, &offset) in batch.iter().enumerate() {
            let (slab, at) = (i / per_slab, i % per_slab * block);
            // SAFETY: inside the slab.
            let address = unsafe { slabs[slab].start().as_ptr().add(at) };
            let entry = opcode::ReadFixed::new(Fixed(0), address, block as u32, slab as u16).offset(offset).build();
            // SAFETY: as above.
            unsafe { ring.submission().push(&entry) }.expect("room");
        }
        let mut left = batch.len();
        while left > 0 {
            ring.submit_and_wait(left.min(16)).expect("entered");
            for completion in ring.completion() {
                assert_eq!(completion.result(), block as i32);
                left -= 1;
            }
        }
    }
}
