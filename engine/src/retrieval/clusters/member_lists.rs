//! [`MemberLists`]: the members of clusters that change, in one piece of memory.
//!
//! 1. A list has room for its members, rounded up to a multiple of four. New members are written there.
//! 2. A list without room for more moves behind all others. Its old place stays unused.
//! 3. If there is no room behind the others, all lists are copied to new memory, without the unused places. A sixteenth
//!    of the new memory is free.
//!
//! Invariants:
//! - The places of two lists have no number in common.
//! - New memory has at most a sixteenth more than the lists and the list that grows take.

use super::lists::ClusterLists;

/// The members that a list gains room for at a time.
const STEP: usize = 4;
/// Full memory grows by this part of itself.
const GROWTH: usize = 16;

/// The members of clusters, each in its list.
#[derive(Clone, Debug)]
pub(super) struct MemberLists {
    members: Vec<u32>,
    places: Vec<Place>,
    /// The members of all lists.
    stored: usize,
    /// The most members that a list ever had.
    longest: usize,
}

/// The place of a list.
#[derive(Clone, Copy, Debug)]
struct Place {
    start: u32,
    len: u32,
}

impl Place {
    /// Returns the numbers that the list has room for.
    fn room(self) -> usize {
        room(self.len as usize)
    }
}

/// Returns the room of a list of `len` members.
fn room(len: usize) -> usize {
    len.next_multiple_of(STEP)
}

impl MemberLists {
    /// Returns these lists.
    pub(super) fn new(lists: &ClusterLists) -> Self {
        let room = lists.iter().map(|list| room(list.len())).sum();
        let (mut members, mut places) = (Vec::with_capacity(room), Vec::with_capacity(lists.len()));
        for list in lists.iter() {
            places.push(put(&mut members, list));
        }
        Self { members, places, stored: lists.stored(), longest: lists.iter().map(<[u32]>::len).max().unwrap_or(0) }
    }

    /// Returns the most bytes of new lists with this many members in all.
    pub(super) fn bytes_for(clusters: usize, stored: usize) -> usize {
        let places = clusters.saturating_mul(size_of::<Place>());
        let room = stored.saturating_add(clusters.saturating_mul(STEP - 1));
        places.saturating_add(room.saturating_mul(size_of::<u32>()))
    }

    /// Returns the bytes that it takes in memory.
    pub(super) fn bytes(&self) -> usize {
        self.members.capacity() * size_of::<u32>() + self.places.capacity() * size_of::<Place>()
    }

    /// Returns the most bytes that it takes once there are `clusters` lists and `more` more members. No list has then
    /// more than `longest` members, unless it has them already.
    pub(super) fn bytes_once(&self, clusters: usize, more: usize, longest: usize) -> usize {
        let lists = self.stored + more + clusters.max(self.len()) * (STEP - 1);
        // The list that moves is counted at both places.
        let room = lists + room(self.longest.max(longest.min(self.stored + more)) + 1);
        let members = if more == 0 && clusters <= self.len() { 0 } else { room + room / GROWTH };
        let places = if clusters <= self.len() { clusters } else { clusters + clusters / GROWTH + 1 };
        self.members.capacity().max(members) * size_of::<u32>()
            + self.places.capacity().max(places) * size_of::<Place>()
    }

    /// Returns the number of lists.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns the members of a cluster, if there is such a cluster.
    pub(super) fn get(&self, cluster: usize) -> Option<&[u32]> {
        let Place { start, len } = *self.places.get(cluster)?;
        Some(&self.members[start as usize..][..len as usize])
    }

    /// Returns the members of a cluster that exists.
    pub(super) fn list(&self, cluster: usize) -> &[u32] {
        let Place { start, len } = self.places[cluster];
        &self.members[start as usize..][..len as usize]
    }

    /// Adds a list without members.
    pub(super) fn open(&mut self) {
        if self.places.len() == self.places.capacity() {
            self.places.reserve_exact(1 + self.places.len() / GROWTH);
        }
        self.places.push(Place { start: 0, len: 0 });
    }

    /// Adds a member to a list.
    pub(super) fn push(&mut self, cluster: usize, member: u32) {
        let Place { start, len } = self.places[cluster];
        let at = if len as usize == self.places[cluster].room() { self.move_behind(cluster) } else { start as usize };
        self.members[at + len as usize] = member;
        self.places[cluster].len = len + 1;
        self.stored += 1;
        self.longest = self.longest.max(len as usize + 1);
    }

    /// Replaces the members of a list.
    pub(super) fn replace(&mut self, cluster: usize, members: impl ExactSizeIterator<Item = u32>) {
        let len = members.len();
        self.stored = self.stored - self.places[cluster].len as usize + len;
        self.longest = self.longest.max(len);
        if room(len) > self.places[cluster].room() {
            self.places[cluster].len = 0;
            self.reserve(room(len));
            self.places[cluster].start = self.members.len() as u32;
            self.members.resize(self.members.len() + room(len), 0);
        }
        let place = &mut self.places[cluster];
        place.len = len as u32;
        self.members[place.start as usize..].iter_mut().zip(members).for_each(|(to, member)| *to = member);
    }

    /// Removes the members from `entries` on. Calls `each` with every list and the number of members that it has left.
    pub(super) fn truncate(&mut self, entries: u32, mut each: impl FnMut(usize, u32)) {
        self.stored = 0;
        for (cluster, place) in self.places.iter_mut().enumerate() {
            let list = &mut self.members[place.start as usize..][..place.len as usize];
            let mut left = 0;
            for at in 0..list.len() {
                if list[at] < entries {
                    list[left] = list[at];
                    left += 1;
                }
            }
            place.len = left as u32;
            self.stored += left;
            each(cluster, place.len);
        }
    }

    /// Moves a full list behind all others, with room for more members. Returns where it begins.
    fn move_behind(&mut self, cluster: usize) -> usize {
        self.reserve(room(self.places[cluster].len as usize + 1));
        let (Place { start, len }, end) = (self.places[cluster], self.members.len());
        self.members.extend_from_within(start as usize..(start + len) as usize);
        self.members.resize(end + room(len as usize + 1), 0);
        self.places[cluster].start = end as u32;
        end
    }

    /// Makes room for `more` numbers behind all lists.
    fn reserve(&mut self, more: usize) {
        if self.members.len() + more <= self.members.capacity() {
            return;
        }
        let room = self.places.iter().map(|place| place.room()).sum::<usize>() + more;
        let mut members = Vec::with_capacity(room + room / GROWTH);
        for place in &mut self.places {
            *place = put(&mut members, &self.members[place.start as usize..][..place.len as usize]);
        }
        self.members = members;
    }
}

/// Appends a list with its room.
fn put(members: &mut Vec<u32>, list: &[u32]) -> Place {
    let start = members.len();
    members.extend_from_slice(list);
    members.resize(start + room(list.len()), 0);
    Place { start: start as u32, len: list.len() as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lists_are_those_of_a_plain_model_within_their_bytes(
            first in prop::collection::vec(prop::collection::vec(0_u32..90, 0..9), 1..9),
            steps in prop::collection::vec((0_u8..10, any::<u16>(), prop::collection::vec(0_u32..90, 0..20)), 0..120),
        ) {
            let mut model = first;
            let mut lists = MemberLists::new(&ClusterLists::of_clusters(model.iter()));
            let stored = model.iter().map(Vec::len).sum();
            prop_assert!(lists.bytes() <= MemberLists::bytes_for(model.len(), stored));
            for (kind, pick, members) in steps {
                let cluster = usize::from(pick) % model.len();
                let most = match kind {
                    0..6 => lists.bytes_once(model.len(), 1, 0),
                    6..8 => lists.bytes_once(model.len(), members.len(), members.len()),
                    8 => lists.bytes_once(model.len() + 1, 0, 0),
                    _ => lists.bytes_once(model.len(), 0, 0),
                };
                match kind {
                    0..6 => {
                        lists.push(cluster, u32::from(pick));
                        model[cluster].push(u32::from(pick));
                    }
                    6..8 => {
                        lists.replace(cluster, members.iter().copied());
                        model[cluster] = members;
                    }
                    8 => {
                        lists.open();
                        model.push(Vec::new());
                    }
                    _ => {
                        let cut = u32::from(pick % 300);
                        model.iter_mut().for_each(|list| list.retain(|member| *member < cut));
                        lists.truncate(cut, |cluster, left| assert_eq!(left as usize, model[cluster].len()));
                    }
                }
                prop_assert!(lists.bytes() <= most, "{} of {most} after {kind}", lists.bytes());
                prop_assert_eq!(lists.len(), model.len());
                let is_equal = |at: usize| lists.list(at) == model[at] && lists.get(at) == Some(&model[at]);
                prop_assert!((0..model.len()).all(is_equal));
            }
            prop_assert_eq!(lists.get(model.len()), None);
        }
    }
}
