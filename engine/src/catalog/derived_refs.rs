//! References to derived frames, and which of them a cut takes.
//!
//! 1. A cut takes each reference whose tokens end beyond it.
//! 2. If it takes directories, it takes all frames that were written before them: pages are no use without directories.
//! 3. States end at or beyond the end of the directories. A cut between the two takes the states alone.
//!
//! Frames with directories and frames with states have no pool. All directories of a sequence end at the same token,
//! so a frame without a pool that ends later has states. If clusters have grown beyond a state that stayed, the
//! directories end later. A cut between the two then takes the directories, and leaves older pages until clusters are
//! stored again or space is short.

use crate::io::planted;
use stratakv_format::FrameId;

/// A reference of a sequence to a derived frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DerivedRef {
    pub(crate) frame: FrameId,
    /// The end of its tokens.
    pub(crate) end: u64,
    /// False if the frame holds directories or states.
    pub(crate) has_pool: bool,
}

impl DerivedRef {
    /// Returns whether the frame is known to hold states. `directories` is the end of the directories.
    fn has_states(&self, directories: Option<u64>) -> bool {
        !self.has_pool && Some(self.end) > directories
    }
}

/// Returns the end of the tokens of directories, if there is a frame without a pool.
fn directory_end(refs: &[DerivedRef]) -> Option<u64> {
    refs.iter().filter(|own| !own.has_pool).map(|own| own.end).min()
}

/// Returns the frames, those with states before all others.
pub(crate) fn states_first(refs: &[DerivedRef]) -> Vec<FrameId> {
    let directories = directory_end(refs);
    let (states, others): (Vec<&DerivedRef>, Vec<_>) = refs.iter().partition(|own| own.has_states(directories));
    states.into_iter().chain(others).map(|own| own.frame).collect()
}

/// Returns the references that are left after a cut that makes some of them stale.
pub(crate) fn without_stale(refs: Vec<DerivedRef>, is_stale: impl Fn(&DerivedRef) -> bool) -> Vec<DerivedRef> {
    let directories = directory_end(&refs);
    let is_stale = |own: &DerivedRef| is_stale(own) && !(own.has_states(directories) && planted!(StaleStateKept));
    let newest = refs.iter().filter(|own| is_stale(own) && !own.has_states(directories)).map(|own| own.frame).max();
    refs.into_iter().filter(|own| !is_stale(own) && newest.is_none_or(|newest| own.frame > newest)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_behind_the_directories_takes_states_alone() {
        let own = |(frame, end, has_pool)| DerivedRef { frame: FrameId(frame), end, has_pool };
        let refs = [(1, 16, true), (2, 32, true), (3, 32, false), (4, 32, false), (5, 40, false), (6, 40, false)];
        let left = |cut: u64| {
            let left = without_stale(refs.map(own).to_vec(), |own| own.end > cut);
            left.iter().map(|own| own.frame.0).collect::<Vec<_>>()
        };
        assert_eq!((left(40), left(39), left(32)), (vec![1, 2, 3, 4, 5, 6], vec![1, 2, 3, 4], vec![1, 2, 3, 4]));
        assert_eq!((left(31), left(16), left(0)), (vec![], vec![], vec![]));
        assert_eq!(states_first(&refs.map(own)), [5, 6, 1, 2, 3, 4].map(FrameId));
        // Frames that were written after the newest stale one stay.
        let left = without_stale(refs.map(own).to_vec(), |own| own.frame < FrameId(3));
        assert_eq!(left.len(), 4);
    }
}
