//! Trying the copies of a range, one after the other.

use crate::error::{Error, ErrorKind};
use crate::log::Devices;
use stratakv_format::DeviceIndex;

/// Why a copy did not give a range. It decides what is read next.
pub(crate) enum CopyFault<E = Error> {
    /// The same copy once more, because the transfer may have damaged the bytes. After that, the next copy.
    Reread(E),
    /// The next copy.
    Next(E),
    /// Nothing, because the error is not one of this copy.
    Stop(E),
}

impl CopyFault {
    /// Returns the fault for an error of a read, and counts damage on the device that holds the copy.
    ///
    /// A damaged copy is read once more. A read that found no memory says nothing about the copy, and another copy
    /// needs as much.
    pub(crate) fn counted(devices: &Devices, device: DeviceIndex, e: Error) -> Self {
        devices.count_damage(device, &e);
        match e.kind() {
            ErrorKind::Corruption => Self::Reread(e),
            ErrorKind::MemoryLimit | ErrorKind::Busy => Self::Stop(e),
            _ => Self::Next(e),
        }
    }

    /// Returns whether this copy is done with after the fault: `again` tells that it was read for the second time.
    pub(crate) fn ends_copy(&self, again: bool) -> bool {
        match self {
            Self::Reread(_) => again,
            Self::Next(_) => true,
            Self::Stop(_) => false,
        }
    }
}

/// Reads a range from one copy after the other until one is good.
///
/// `read` takes a copy, and true if it reads that copy for the second time.
///
/// # Errors
/// The last error of the first copy if no copy is good. The error of [`CopyFault::Stop`].
pub(crate) fn first_good<C: Copy, T, E>(
    first: C,
    others: impl IntoIterator<Item = C>,
    mut read: impl FnMut(C, bool) -> Result<T, CopyFault<E>>,
) -> Result<T, E> {
    let mut others = others.into_iter();
    let (mut copy, mut failed) = (first, None);
    loop {
        let mut outcome = read(copy, false);
        if matches!(outcome, Err(CopyFault::Reread(_))) {
            outcome = read(copy, true);
        }
        match outcome {
            Ok(good) => return Ok(good),
            Err(CopyFault::Stop(e)) => return Err(e),
            Err(CopyFault::Reread(e) | CopyFault::Next(e)) => {
                let e = failed.unwrap_or(e);
                let Some(next) = others.next() else { return Err(e) };
                (copy, failed) = (next, Some(e));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the outcome and the copies that were read, if `faults` has the fault of each read in order.
    fn tried(copies: usize, faults: Vec<CopyFault<u8>>) -> (Result<usize, u8>, Vec<(usize, bool)>) {
        let (mut reads, mut faults) = (Vec::new(), faults.into_iter());
        let outcome = first_good(0, 1..copies, |copy, again| {
            reads.push((copy, again));
            faults.next().map_or(Ok(copy), Err)
        });
        (outcome, reads)
    }

    #[test]
    fn first_good_reads_no_copy_behind_a_good_one() {
        assert_eq!(tried(3, vec![]), (Ok(0), vec![(0, false)]));
        assert_eq!(tried(3, vec![CopyFault::Next(7)]), (Ok(1), vec![(0, false), (1, false)]));
    }

    #[test]
    fn first_good_reads_a_damaged_copy_twice() {
        assert_eq!(tried(2, vec![CopyFault::Reread(1)]), (Ok(0), vec![(0, false), (0, true)]));
        let twice = vec![CopyFault::Reread(1), CopyFault::Reread(2)];
        assert_eq!(tried(2, twice), (Ok(1), vec![(0, false), (0, true), (1, false)]));
    }

    #[test]
    fn first_good_returns_the_last_error_of_the_first_copy() {
        let faults = vec![CopyFault::Reread(1), CopyFault::Next(2), CopyFault::Next(3)];
        assert_eq!(tried(2, faults).0, Err(2));
    }

    #[test]
    fn first_good_stops_at_an_error_that_is_not_of_the_copy() {
        let faults = vec![CopyFault::Next(1), CopyFault::Stop(2)];
        assert_eq!(tried(3, faults), (Err(2), vec![(0, false), (1, false)]));
    }
}
