//! What the frames of a sequence leave of one layer, laid over each other in the order of their LSNs.

/// A layer while frames are laid over it. All places are tokens but for `groups`.
#[derive(Debug)]
pub(crate) struct Overlay {
    group_tokens: u64,
    /// Whole groups, from the first one on.
    groups: u64,
    /// Tokens by themselves: of tails, and of groups that were cut.
    loose: Vec<(u64, u64)>,
}

impl Overlay {
    pub(crate) fn new(group_tokens: u64) -> Self {
        Self { group_tokens: group_tokens.max(1), groups: 0, loose: Vec::new() }
    }

    /// Whole groups from the first one on.
    pub(crate) fn groups(&self) -> u64 {
        self.groups
    }

    /// Lays the groups from token `first` to `end`, of which only the tokens below `clip` count.
    ///
    /// # Errors
    /// They begin behind the end of what was there, which is given in groups.
    pub(crate) fn lay_groups(&mut self, first: u64, end: u64, clip: u64) -> Result<(), u64> {
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

    /// Lays single tokens: no group that they touch counts as a whole any more, nor one behind it.
    pub(crate) fn lay_tail(&mut self, first: u64, end: u64, clip: u64) {
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

    /// The first tokens below `end` that nothing holds.
    pub(crate) fn missing(mut self, end: u64) -> Option<(u64, u64)> {
        let whole = self.groups.saturating_mul(self.group_tokens);
        self.loose.sort_unstable();
        let spans = std::iter::once((0, whole)).chain(self.loose);
        gap(spans, end)
    }
}

/// The first places below `end` that no span covers. `spans` is sorted.
pub(crate) fn gap(spans: impl IntoIterator<Item = (u64, u64)>, end: u64) -> Option<(u64, u64)> {
    let mut covered = 0;
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
    fn gaps_are_found_at_front_middle_and_end() {
        let spans = [(0, 4), (2, 8), (10, 12)];
        assert_eq!(gap(spans, 8), None);
        assert_eq!(gap(spans, 9), Some((8, 9)));
        assert_eq!(gap(spans, 12), Some((8, 10)));
        assert_eq!(gap([(0, 4), (2, 8)], 20), Some((8, 20)));
        assert_eq!(gap([], 1), Some((0, 1)));
        assert_eq!(gap([], 0), None);
    }

    #[test]
    fn a_tail_hides_the_groups_behind_it_until_they_are_written_again() {
        let mut layer = Overlay::new(8);
        layer.lay_groups(0, 32, 32).unwrap();
        layer.lay_tail(12, 13, 99);
        assert_eq!(layer.groups(), 1);
        assert_eq!(layer.missing(20), Some((13, 20)));

        let mut layer = Overlay::new(8);
        layer.lay_groups(0, 32, 32).unwrap();
        layer.lay_tail(12, 13, 99);
        layer.lay_groups(8, 16, 99).unwrap();
        assert_eq!(layer.groups(), 2);
        assert_eq!(layer.missing(17), Some((16, 17)));
    }

    #[test]
    fn a_cut_group_holds_its_first_tokens() {
        let mut layer = Overlay::new(8);
        layer.lay_groups(0, 32, 13).unwrap();
        assert_eq!(layer.groups(), 1);
        layer.lay_tail(13, 15, 99);
        assert_eq!(layer.missing(16), Some((15, 16)));
    }

    #[test]
    fn groups_behind_the_end_are_told() {
        let mut layer = Overlay::new(8);
        layer.lay_groups(0, 16, 99).unwrap();
        assert_eq!(layer.lay_groups(24, 32, 99), Err(2));
        // Of groups that only the clip keeps from counting nothing is asked.
        layer.lay_groups(24, 32, 24).unwrap();
        assert_eq!(layer.missing(16), None);
    }
}
