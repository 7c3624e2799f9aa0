//! What the sequences of a worker hold. Every commit carries a [`Content`] as the caller's state, so that a check
//! knows the tokens of whatever commit it finds.
//!
//! A sequence with an odd name has raw groups, and its bytes are compared exactly. The others have groups of 8 bits
//! per element, and their tokens are compared within the rounding of the codec.

use crate::content::{LayerShape, Order, SequenceShape};
use crate::rng::mix;
use crate::sim::content::{CaseShape, Token};
use std::ops::Range;
use std::sync::LazyLock;
use stratakv::{DType, KvLayout, Result, SelectRequest, Sequence, Store};

/// The tokens of a group, in both shapes.
pub(super) const GROUP_TOKENS: usize = 6;
/// The cuts after which a sequence is not cut any more. Each may round the tokens of a group once more.
const CUTS_MAX: usize = 12;

/// The shape of sequences with raw groups.
static RAW: LazyLock<SequenceShape> = LazyLock::new(|| {
    let window = LayerShape { window: Some(50), ..LayerShape::full(1, 24) };
    SequenceShape { layers: vec![LayerShape::full(2, 32), window], dtype: DType::F16, group: GROUP_TOKENS }
});
/// The shape of sequences under a codec.
static ENCODED: LazyLock<CaseShape> = LazyLock::new(|| {
    CaseShape::of((2, 2, 32, GROUP_TOKENS as u16), DType::F16, (8, 1.0)).expect("a shape that the engine takes")
});

/// Returns whether the groups of the sequence of this name are under a codec.
pub(super) const fn is_encoded(name: u64) -> bool {
    name.is_multiple_of(2)
}

/// Returns the layout of the sequence of this name.
///
/// # Errors
/// The engine refuses the layout.
pub(super) fn layout(name: u64) -> Result<KvLayout> {
    if is_encoded(name) { Ok(ENCODED.layout.clone()) } else { RAW.layout() }
}

/// The tokens of a sequence: runs, each of which ends where the next begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Content {
    /// The number of the commit that carries this state. No two commits share one.
    pub(super) version: u64,
    /// The tokens.
    pub(super) tokens: usize,
    /// The first token of each run, and the salt of its elements.
    runs: Vec<(usize, u64)>,
}

impl Content {
    pub(super) fn new(salt: u64) -> Self {
        Self { version: 0, tokens: 0, runs: vec![(0, salt)] }
    }

    /// Returns whether [`Self::cut`] may be called once more.
    pub(super) fn may_be_cut(&self) -> bool {
        self.runs.len() <= CUTS_MAX
    }

    /// Keeps the first `tokens` tokens. Later ones have another salt than those that were cut off.
    pub(super) fn cut(&mut self, tokens: usize, salt: u64) {
        self.tokens = self.tokens.min(tokens);
        // A run without tokens stays, because the number of runs counts the cuts.
        self.runs.iter_mut().for_each(|(from, _)| *from = (*from).min(tokens));
        self.runs.push((self.tokens, salt));
    }

    fn seeds(&self, tokens: Range<usize>) -> Vec<u64> {
        let salt = |token| self.runs[self.runs.partition_point(|(from, _)| *from <= token) - 1].1;
        tokens.map(|token| mix(mix(salt(token)) ^ token as u64)).collect()
    }

    fn ids(&self, tokens: Range<usize>) -> Vec<u32> {
        self.seeds(tokens).into_iter().map(|seed| seed as u32 >> 1).collect()
    }

    /// Appends `count` tokens to all layers of the sequence of this name.
    ///
    /// # Errors
    /// The append fails, as in [`Sequence::append`].
    pub(super) fn append(&mut self, name: u64, sequence: &mut Sequence, count: usize, order: usize) -> Result<()> {
        let added = self.tokens..self.tokens + count;
        let seeds = self.seeds(added.clone());
        if is_encoded(name) {
            let tokens: Vec<Token> = seeds.iter().map(|seed| Token::rounded(*seed, 0)).collect();
            (0..ENCODED.layers).try_for_each(|layer| ENCODED.append(sequence, layer, &tokens))?;
        } else {
            RAW.kv_layers().try_for_each(|layer| RAW.append(sequence, layer, &seeds, Order::nth(order + layer)))?;
        }
        self.tokens = added.end;
        sequence.append_token_ids(&self.ids(added))
    }

    /// Returns the state that a commit carries.
    pub(super) fn encode(&self) -> Vec<u8> {
        let numbers = [self.version, self.tokens as u64].into_iter();
        let runs = self.runs.iter().flat_map(|(from, salt)| [*from as u64, *salt]);
        numbers.chain(runs).flat_map(u64::to_le_bytes).collect()
    }

    /// Reads the state of a commit.
    pub(super) fn decode(state: &[u8]) -> Option<Self> {
        let (numbers, rest) = state.as_chunks::<8>();
        let numbers: Vec<u64> = numbers.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let (&[version, tokens], runs) = numbers.split_first_chunk::<2>()?;
        let (runs, odd) = runs.as_chunks::<2>();
        let whole = rest.is_empty() && odd.is_empty() && runs.first().is_some_and(|[from, _]| *from == 0);
        let runs = runs.iter().map(|[from, salt]| (*from as usize, *salt)).collect();
        whole.then_some(Self { version, tokens: tokens as usize, runs })
    }

    /// Compares all tokens of a sequence with this content.
    ///
    /// # Panics
    /// A length, a token id or an element is different, or a read fails.
    pub(super) fn check(&self, name: u64, store: &Store, sequence: &Sequence) {
        assert_eq!(sequence.len(), self.tokens as u64, "{name}: the state of another commit");
        assert!(sequence.token_ids().iter().copied().eq(self.ids(0..self.tokens)), "{name}: token ids");
        let seeds = self.seeds(0..self.tokens);
        if !is_encoded(name) {
            RAW.check_all(store, sequence, |_| seeds.clone());
            return;
        }
        let roundings = self.runs.len() as u8 - 1;
        let tokens: Vec<Token> = seeds.into_iter().map(|seed| Token::rounded(seed, roundings)).collect();
        let whole = |layer| sequence.select(layer, SelectRequest::all());
        for layer in 0..ENCODED.layers {
            match ENCODED.check(store, whole, layer, &tokens) {
                Ok(Ok(())) => {}
                Ok(Err(e)) => panic!("{name}: {e:?}"),
                Err(e) => panic!("{name}: {e}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_returns_the_content_and_a_torn_one_does_not() {
        let mut content = Content { version: 7, tokens: 20, ..Content::new(3) };
        content.cut(9, 4);
        content.tokens = 15;
        content.cut(5, 6);
        assert_eq!((content.tokens, &content.runs[..]), (5, &[(0, 3), (5, 4), (5, 6)][..]));
        let state = content.encode();
        assert_eq!(Content::decode(&state), Some(content));
        assert!((0..state.len()).all(|end| end == 32 || end == 48 || Content::decode(&state[..end]).is_none()));
    }

    #[test]
    fn tokens_after_a_cut_differ_from_those_before() {
        let mut content = Content { tokens: 20, ..Content::new(3) };
        let before = content.seeds(0..20);
        content.cut(9, 4);
        content.tokens = 20;
        let after = content.seeds(0..20);
        assert_eq!(before[..9], after[..9]);
        assert!(before[9..].iter().zip(&after[9..]).all(|(before, after)| before != after));
    }
}
