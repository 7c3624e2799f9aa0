//! The units that queries retrieve: clusters, or groups of consecutive tokens, by the entries that a query activated.
//!
//! A unit's score is the number of its activated entries. Units are taken by falling score while their distinct entries
//! fit the budget. A unit that does not fit is passed over, and smaller ones are tried. Units without an activated
//! entry are never taken. The choice is therefore as good as a chooser can be that knows the activated entries.

use stratakv::retrieval::clusters::ClusterLists;

/// Units that may be retrieved, and the units of each entry.
pub(super) struct RetrievableUnits<'a> {
    lists: &'a ClusterLists,
    units_of: Vec<Vec<u32>>,
}

/// The units of one retrieval, in rising order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct UnitRetrieval {
    pub(super) units: Vec<u32>,
    /// Distinct entries of the units.
    pub(super) entries: usize,
    /// Activated entries among them.
    pub(super) activated: usize,
}

impl<'a> RetrievableUnits<'a> {
    /// Returns units over `entries` entries. Members of other entries are left out.
    pub(super) fn new(lists: &'a ClusterLists, entries: usize) -> Self {
        let mut units_of = vec![Vec::new(); entries];
        for (unit, members) in (0..).zip(lists.iter()) {
            for member in members {
                if let Some(units) = units_of.get_mut(*member as usize) {
                    units.push(unit);
                }
            }
        }
        Self { lists, units_of }
    }

    /// Returns what a query with these activated entries retrieves of at most `budget` distinct entries.
    pub(super) fn retrieve(&self, activated: &[u32], budget: usize) -> UnitRetrieval {
        let mut scores = vec![0_u32; self.lists.len()];
        for entry in activated {
            self.units_of[*entry as usize].iter().for_each(|unit| scores[*unit as usize] += 1);
        }
        let mut order: Vec<u32> = (0..scores.len() as u32).filter(|unit| scores[*unit as usize] > 0).collect();
        order.sort_by_key(|unit| std::cmp::Reverse(scores[*unit as usize]));
        let mut is_taken = vec![false; self.units_of.len()];
        let mut found = UnitRetrieval::default();
        for unit in order {
            let members = self.lists.members(unit as usize).unwrap_or_default();
            let fresh = members.iter().filter(|member| !is_taken[**member as usize]).count();
            if found.entries + fresh > budget {
                continue;
            }
            members.iter().for_each(|member| is_taken[*member as usize] = true);
            found.entries += fresh;
            found.units.push(unit);
        }
        found.activated = activated.iter().filter(|entry| is_taken[**entry as usize]).count();
        found.units.sort_unstable();
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_taken_by_activated_entries_while_they_fit() {
        let mut lists = ClusterLists::new();
        for members in [&[0, 1, 2][..], &[3, 4, 5, 6], &[2, 7], &[8, 9]] {
            lists.push(members);
        }
        let units = RetrievableUnits::new(&lists, 10);
        // Unit 1 has three activated entries, unit 0 two, unit 2 one. Entry 2 is in units 0 and 2.
        let activated = [1, 2, 3, 4, 5];
        let found = |budget| units.retrieve(&activated, budget);
        assert_eq!(found(10), UnitRetrieval { units: vec![0, 1, 2], entries: 8, activated: 5 });
        assert_eq!(found(7), UnitRetrieval { units: vec![0, 1], entries: 7, activated: 5 });
        assert_eq!(found(6), UnitRetrieval { units: vec![1, 2], entries: 6, activated: 4 });
        assert_eq!(found(3), UnitRetrieval { units: vec![0], entries: 3, activated: 2 });
        assert_eq!(units.retrieve(&[], 10), UnitRetrieval::default());
    }
}
