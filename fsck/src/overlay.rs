//! The tokens of one layer that the frames of a sequence hold together (SPEC.md chapter 13, step 10).
//!
//! The caller adds the extents of all frames in the order of their LSNs:
//! - A groups extent extends the full groups from token 0 on. It must not begin past their end.
//! - A tail hides the group it overlaps and all later groups, because its tokens are newer. The tokens of that group
//!   before the tail still count.
//! - A group that a token limit cuts counts as single tokens.

use std::ops::Range;

/// The tokens that the frames added so far hold of one layer.
#[derive(Debug)]
pub(crate) struct Overlay {
    group_tokens: u64,
    /// The number of full groups from token 0 on.
    groups: u64,
    /// Ranges of single tokens: of tails, and of groups that were cut.
    loose: Vec<(u64, u64)>,
}

impl Overlay {
    pub(crate) fn new(group_tokens: u64) -> Self {
        Self { group_tokens: group_tokens.max(1), groups: 0, loose: Vec::new() }
    }

    /// Adds the groups of tokens `first..end`. Only tokens below `clip` count.
    ///
    /// # Errors
    /// Returns the number of full groups so far if the new groups begin past them.
    pub(crate) fn add_groups(&mut self, first: u64, end: u64, clip: u64) -> Result<(), u64> {
        let counts = end.min(clip);
        let whole = counts / self.group_tokens * self.group_tokens;
        if whole < counts && first < counts {
            self.loose.push((whole.max(first), counts));
        }
        if whole <= first {
            return Ok(());
        }
        if first / self.group_tokens > self.groups {
            return Err(self.groups);
        }
        self.loose.retain(|&(from, to)| from < first || to > whole);
        self.groups = self.groups.max(whole / self.group_tokens);
        Ok(())
    }

    /// Adds the single tokens `first..end`. Only tokens below `clip` count.
    pub(crate) fn add_tail(&mut self, first: u64, end: u64, clip: u64) {
        let end = end.min(clip);
        if end <= first {
            return;
        }
        let group = first / self.group_tokens;
        if self.groups > group {
            self.groups = group;
            self.loose.push((group * self.group_tokens, first));
        }
        self.loose.push((first, end));
    }

    /// Returns the first range of tokens below `end` that no frame holds.
    pub(crate) fn missing(mut self, end: u64) -> Option<(u64, u64)> {
        let whole = self.groups.saturating_mul(self.group_tokens);
        self.loose.sort_unstable();
        let spans = std::iter::once((0, whole)).chain(self.loose);
        first_gap(spans, 0..end)
    }
}

/// Returns the first range of `tokens` that no span covers. `spans` is sorted.
pub(crate) fn first_gap(spans: impl IntoIterator<Item = (u64, u64)>, tokens: Range<u64>) -> Option<(u64, u64)> {
    let Range { start: mut covered, end } = tokens;
    for (first, last) in spans {
        if first > covered {
            return (covered < end).then(|| (covered, first.min(end)));
        }
        covered = covered.max(last);
    }
    (covered < end).then_some((covered, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_gap_is_found_at_the_front_the_middle_and_the_end() {
        let spans = [(0, 4), (2, 8), (10, 12)];
        assert_eq!(first_gap(spans, 0..8), None);
        assert_eq!(first_gap(spans, 0..9), Some((8, 9)));
        assert_eq!(first_gap(spans, 0..12), Some((8, 10)));
        assert_eq!(first_gap(spans, 5..12), Some((8, 10)));
        assert_eq!(first_gap([(6, 8)], 4..8), Some((4, 6)));
        assert_eq!(first_gap([(0, 4), (2, 8)], 0..20), Some((8, 20)));
        assert_eq!(first_gap([], 0..1), Some((0, 1)));
        assert_eq!(first_gap([], 0..0), None);
    }

    #[test]
    fn tail_hides_later_groups_until_they_are_written_again() {
        let mut layer = Overlay::new(8);
        layer.add_groups(0, 32, 32).unwrap();
        layer.add_tail(12, 13, 99);
        assert_eq!(layer.groups, 1);
        assert_eq!(layer.missing(20), Some((13, 20)));

        let mut layer = Overlay::new(8);
        layer.add_groups(0, 32, 32).unwrap();
        layer.add_tail(12, 13, 99);
        layer.add_groups(8, 16, 99).unwrap();
        assert_eq!(layer.groups, 2);
        assert_eq!(layer.missing(17), Some((16, 17)));
    }

    #[test]
    fn cut_group_holds_its_first_tokens() {
        let mut layer = Overlay::new(8);
        layer.add_groups(0, 32, 13).unwrap();
        assert_eq!(layer.groups, 1);
        layer.add_tail(13, 15, 99);
        assert_eq!(layer.missing(16), Some((15, 16)));
    }

    #[test]
    fn groups_past_the_end_are_an_error_unless_the_clip_excludes_them() {
        let mut layer = Overlay::new(8);
        layer.add_groups(0, 16, 99).unwrap();
        assert_eq!(layer.add_groups(24, 32, 99), Err(2));
        layer.add_groups(24, 32, 24).unwrap();
        assert_eq!(layer.missing(16), None);
    }
}
