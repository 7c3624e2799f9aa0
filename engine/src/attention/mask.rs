//! Sets of KV heads and of token positions within a group, as 128-bit masks.

/// The indices of the members of a mask, in ascending order.
#[derive(Clone, Debug, Default)]
pub struct MaskIter(u128);

impl Iterator for MaskIter {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let index = self.0.trailing_zeros();
        self.0 &= self.0 - 1;
        Some(index as usize)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let n = self.0.count_ones() as usize;
        (n, Some(n))
    }
}

impl ExactSizeIterator for MaskIter {}

macro_rules! mask {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
        pub struct $name(u128);

        impl $name {
            /// The empty set.
            pub const EMPTY: Self = Self(0);
            /// The largest number of members. Indices are `0..CAPACITY`.
            pub const CAPACITY: usize = 128;

            /// Returns the set `{0, .., n-1}`, or the full set if `n >= CAPACITY`.
            #[must_use]
            pub const fn all(n: usize) -> Self {
                if n >= Self::CAPACITY { Self(u128::MAX) } else { Self((1 << n) - 1) }
            }

            /// Returns the set of one index, or the empty set if `index >= CAPACITY`.
            #[must_use]
            pub const fn one(index: usize) -> Self {
                if index < Self::CAPACITY { Self(1 << index) } else { Self(0) }
            }

            /// Returns the set of the indices whose bits are set.
            #[must_use]
            pub const fn from_bits(bits: u128) -> Self {
                Self(bits)
            }

            /// Returns the set as bits. Bit `i` is set if index `i` is a member.
            #[must_use]
            pub const fn bits(self) -> u128 {
                self.0
            }

            /// Returns whether `index` is a member.
            #[must_use]
            pub const fn contains(self, index: usize) -> bool {
                index < Self::CAPACITY && self.0 >> index & 1 == 1
            }

            /// Adds `index`. Returns false, and changes nothing, if `index >= CAPACITY`.
            pub const fn insert(&mut self, index: usize) -> bool {
                self.0 |= Self::one(index).0;
                index < Self::CAPACITY
            }

            /// Removes `index`.
            pub const fn remove(&mut self, index: usize) {
                self.0 &= !Self::one(index).0;
            }

            /// Returns the number of members.
            #[must_use]
            pub const fn len(self) -> usize {
                self.0.count_ones() as usize
            }

            /// Returns whether there is no member.
            #[must_use]
            pub const fn is_empty(self) -> bool {
                self.0 == 0
            }

            /// Returns the members of either set.
            #[must_use]
            pub const fn union(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// Returns the members of both sets.
            #[must_use]
            pub const fn intersection(self, other: Self) -> Self {
                Self(self.0 & other.0)
            }

            /// Returns the members of `self` that are not in `other`.
            #[must_use]
            pub const fn difference(self, other: Self) -> Self {
                Self(self.0 & !other.0)
            }

            /// Returns an iterator over the members, in ascending order.
            #[must_use]
            pub const fn iter(self) -> MaskIter {
                MaskIter(self.0)
            }
        }

        impl IntoIterator for $name {
            type Item = usize;
            type IntoIter = MaskIter;

            fn into_iter(self) -> MaskIter {
                self.iter()
            }
        }

        /// Collects indices. Drops indices from `CAPACITY` on.
        impl FromIterator<usize> for $name {
            fn from_iter<I: IntoIterator<Item = usize>>(indices: I) -> Self {
                indices.into_iter().fold(Self::EMPTY, |set, index| set.union(Self::one(index)))
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($name))?;
                f.debug_set().entries(self.iter()).finish()
            }
        }
    };
}

mask! {
    /// A set of KV heads of one layer, indices 0 to 127.
    HeadMask
}

mask! {
    /// A set of token positions within one group, indices 0 to 127.
    TokenMask
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_hold_indices_below_their_capacity() {
        assert_eq!(HeadMask::all(0), HeadMask::EMPTY);
        assert_eq!(HeadMask::all(128).len(), 128);
        assert_eq!(HeadMask::all(500).len(), 128);
        let mut mask = TokenMask::EMPTY;
        assert!(mask.insert(127) && mask.insert(3) && mask.insert(3));
        assert!(!mask.insert(128));
        assert!(mask.contains(127) && mask.contains(3) && !mask.contains(4) && !mask.contains(128));
        assert_eq!(mask.iter().collect::<Vec<_>>(), [3, 127]);
        assert_eq!(mask.iter().len(), 2);
        assert_eq!([3, 127, 999].into_iter().collect::<TokenMask>(), mask);
        assert_eq!(format!("{mask:?}"), "TokenMask{3, 127}");
        assert_eq!(mask.difference(TokenMask::one(3)), TokenMask::one(127));
        assert_eq!(mask.intersection(TokenMask::all(64)), TokenMask::one(3));
        mask.remove(127);
        mask.remove(200);
        assert_eq!(mask, TokenMask::one(3));
    }
}
