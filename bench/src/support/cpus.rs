//! The CPUs of this process: measurements on one core and on two run on the same machine, in one process.

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// The CPUs that the process may use. They are given back when it is dropped.
pub(crate) struct ProcessCpus {
    all: CpuSet,
}

impl ProcessCpus {
    /// Returns the CPUs that the process may use now.
    ///
    /// # Errors
    /// The kernel does not say.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { all: sched_getaffinity(None).context("sched_getaffinity")? })
    }

    /// Returns how many there are.
    pub(crate) fn count(&self) -> usize {
        self.all.count() as usize
    }

    /// Restricts all threads of the process, and threads that they start, to the first `count` CPUs.
    ///
    /// # Errors
    /// The threads cannot be listed, or the kernel refuses.
    pub(crate) fn restrict(&self, count: usize) -> Result<()> {
        let mut some = CpuSet::new();
        let own = (0..CpuSet::MAX_CPU).filter(|cpu| self.all.is_set(*cpu));
        own.take(count).for_each(|cpu| some.set(cpu));
        for thread in std::fs::read_dir("/proc/self/task").context("list /proc/self/task")? {
            let name = thread?.file_name();
            let id = name.to_str().and_then(|id| id.parse().ok()).and_then(Pid::from_raw);
            let set = sched_setaffinity(id, &some);
            // A thread may have ended since it was listed.
            if !matches!(set, Err(rustix::io::Errno::SRCH)) {
                set.context("sched_setaffinity")?;
            }
        }
        Ok(())
    }
}

impl Drop for ProcessCpus {
    fn drop(&mut self) {
        let _ = self.restrict(usize::MAX);
    }
}
