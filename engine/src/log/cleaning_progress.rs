//! The progress of cleaning: it tells rounds that gain segments from rounds that only move frames.
//!
//! Frames do not span segments. Frames of 6 pages leave 4 pages of each segment of 10 unused, before and after they
//! move. The dead pages of three such segments are more than a segment, yet moving their frames gains nothing.
//!
//! 1. Each round tells how many segments it emptied, and how many it opened for the moved frames.
//! 2. If as many segments as there are candidates were emptied without a gain, every frame has moved once for nothing.
//!    Cleaning stops.
//! 3. It starts again when a segment's worth of pages has died since. If an append or a caller waits for space, it
//!    starts again when any page has died: one more dead frame may be what a gain lacks.

/// The progress of cleaning. It is not stored: a store that was opened tries once.
#[derive(Debug, Default)]
pub(crate) struct CleaningProgress {
    /// Segments emptied since one was gained.
    emptied: u64,
    /// The fewest dead pages since cleaning was given up, if it is.
    given_up: Option<u64>,
}

impl CleaningProgress {
    /// Returns whether cleaning may gain a segment. `dead` are the dead pages of all sealed segments, `usable` the
    /// pages of one. It is urgent if an append or a caller waits for space.
    pub(crate) fn may_gain(&mut self, dead: u64, usable: u64, urgent: bool) -> bool {
        let Some(fewest) = self.given_up else { return true };
        let needed = if urgent { 1 } else { usable };
        if dead < fewest.saturating_add(needed) {
            self.given_up = Some(fewest.min(dead));
            return false;
        }
        *self = Self::default();
        true
    }

    /// Takes note of a round that began with `candidates` segments to clean and `dead` pages.
    pub(crate) fn add_round(&mut self, (emptied, opened): (u64, u64), candidates: u64, dead: u64) {
        if emptied > opened {
            self.emptied = 0;
            return;
        }
        self.emptied += emptied;
        if self.emptied > 0 && self.emptied >= candidates {
            self.given_up = Some(dead);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cleaning_is_given_up_after_every_candidate_moved_for_nothing() {
        let mut progress = CleaningProgress::default();
        for _ in 0..3 {
            assert!(progress.may_gain(36, 10, false));
            progress.add_round((3, 3), 9, 36);
        }
        assert!(!progress.may_gain(36, 10, false) && !progress.may_gain(45, 10, false));
        assert!(progress.may_gain(46, 10, false), "a segment's worth of pages died since");
        progress.add_round((3, 3), 9, 46);
        assert!(progress.may_gain(46, 10, false), "the count starts again");
    }

    #[test]
    fn a_gain_starts_the_count_again() {
        let mut progress = CleaningProgress::default();
        progress.add_round((2, 2), 3, 20);
        progress.add_round((1, 0), 3, 20);
        progress.add_round((2, 2), 3, 20);
        assert!(progress.may_gain(20, 10, false));
        progress.add_round((1, 1), 3, 20);
        assert!(!progress.may_gain(20, 10, false));
    }

    #[test]
    fn pages_that_died_count_from_the_fewest() {
        let mut progress = CleaningProgress::default();
        progress.add_round((4, 4), 4, 40);
        assert!(!progress.may_gain(15, 10, false), "whole segments became free");
        assert!(!progress.may_gain(24, 10, false) && progress.may_gain(25, 10, false));
    }

    #[test]
    fn an_append_that_waits_needs_one_page_that_died() {
        let mut progress = CleaningProgress::default();
        progress.add_round((4, 4), 4, 40);
        assert!(!progress.may_gain(40, 10, true) && !progress.may_gain(41, 10, false));
        assert!(progress.may_gain(41, 10, true));
    }

    #[test]
    fn a_round_that_emptied_nothing_gives_nothing_up() {
        let mut progress = CleaningProgress::default();
        progress.add_round((0, 1), 0, 40);
        assert!(progress.may_gain(40, 10, false));
    }
}
