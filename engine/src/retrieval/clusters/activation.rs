//! Which entries a query activates.
//!
//! Source: SWARM (section 2.3, and step 1 of section 5.1) counts entries that are "activated together", the few
//! tokens that dominate the output of attention. The paper's top 10 % is mostly noise, because 3 to 12 entries hold
//! 95 % of the weight. The rule here is therefore a share of weight, with a limit on the entries.
//!
//! 1. Each query head has its softmax over all entries. The weight of an entry is the sum over the heads.
//! 2. Sinks and the window are left out, because they would join every cluster.
//! 3. The other entries are taken by falling weight, ties by age. Enough are taken if they hold `weight` of the weight
//!    of all others, or are `share` of the entries.
//!
//! Invariants:
//! - An activated entry has a weight above 0.
//! - The result depends on the scores alone.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::add_softmax;
use crate::retrieval::top_k::{highest, score_order};

/// The rule for which entries a query activates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActivationRule {
    /// The share of the attention weight that the activated entries hold together, from above 0 to 1.
    pub weight: f64,
    /// The largest share of the entries that is activated, from above 0 to 1. At least one entry may be activated.
    pub share: f64,
    /// The first entries, which are never activated.
    pub sinks: usize,
    /// The newest entries, which are never activated.
    pub window: usize,
}

impl Default for ActivationRule {
    fn default() -> Self {
        Self { weight: 0.95, share: 1.0 / 34.0, sinks: 0, window: 0 }
    }
}

impl ActivationRule {
    /// Returns the activated entries, in rising order, from the scores `[q_heads, entries]` of a query.
    ///
    /// A score is `q . k`, and `scale` is its factor in the softmax.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the scores are not whole rows, a score or the scale is not finite, or the rule
    /// is out of range.
    pub fn activated_by_scores(&self, scores: &[f32], q_heads: usize, scale: f32) -> Result<Vec<u32>> {
        if q_heads == 0 || !scores.len().is_multiple_of(q_heads) {
            return Err(invalid(format!("activation: {} scores are not a multiple of {q_heads} heads", scores.len())));
        }
        if let Some(at) = scores.iter().position(|x| !(x * scale).is_finite()) {
            return Err(invalid(format!("activation: score {at} times scale {scale} is not finite")));
        }
        let entries = scores.len() / q_heads;
        let (mut weights, mut exponentials) = (vec![0.0; entries], vec![0.0; entries]);
        for row in scores.chunks_exact(entries.max(1)) {
            add_softmax(row, scale, &mut exponentials, &mut weights);
        }
        self.activated(&weights)
    }

    /// Returns the activated entries, in rising order, from the attention weight of each entry.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a weight is negative or not finite, or the rule is out of range.
    pub fn activated(&self, weights: &[f32]) -> Result<Vec<u32>> {
        self.check()?;
        if let Some(at) = weights.iter().position(|x| !(x.is_finite() && *x >= 0.0)) {
            return Err(invalid(format!("activation: weight {at} is {}, not a finite number from 0 on", weights[at])));
        }
        let start = self.sinks.min(weights.len());
        let end = weights.len().saturating_sub(self.window).max(start);
        let others = &weights[start..end];
        let most = ((self.share * weights.len() as f64) as usize).max(1);
        let mut best = highest(others, most, |at| others[at] > 0.0);
        best.sort_unstable_by(|a, b| score_order(*a, *b));
        let needed = self.weight * others.iter().map(|x| f64::from(*x)).sum::<f64>();
        let mut held = 0.0;
        let taken = best.iter().take_while(|(weight, _)| {
            let takes = held < needed;
            held += f64::from(*weight);
            takes
        });
        let mut activated: Vec<u32> = taken.map(|(_, at)| (start as u64 + at) as u32).collect();
        activated.sort_unstable();
        Ok(activated)
    }

    /// Returns the bytes of scratch that a call with scores of `entries` entries allocates.
    #[must_use]
    pub fn bytes_for(&self, entries: usize) -> usize {
        let most = (self.share * entries as f64) as usize;
        entries.saturating_mul(2 * size_of::<f32>()).saturating_add(most.saturating_mul(32))
    }

    fn check(&self) -> Result<()> {
        for (name, value) in [("weight", self.weight), ("share", self.share)] {
            if !(value > 0.0 && value <= 1.0) {
                return Err(invalid(format!("activation: {name} is {value}, not above 0 and at most 1")));
            }
        }
        Ok(())
    }
}

fn invalid(context: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, context)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Follows the rule word by word.
    fn by_definition(rule: &ActivationRule, weights: &[f32]) -> Vec<u32> {
        let eligible = |at: &usize| *at >= rule.sinks && *at + rule.window < weights.len();
        let mut order: Vec<usize> = (0..weights.len()).filter(eligible).collect();
        let total: f64 = order.iter().map(|at| f64::from(weights[*at])).sum();
        order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]).then(a.cmp(b)));
        let most = ((rule.share * weights.len() as f64) as usize).max(1);
        let (mut chosen, mut held) = (Vec::new(), 0.0);
        for at in order {
            if held >= rule.weight * total || chosen.len() == most || weights[at] == 0.0 {
                break;
            }
            held += f64::from(weights[at]);
            chosen.push(at as u32);
        }
        chosen.sort_unstable();
        chosen
    }

    proptest! {
        #[test]
        fn the_rule_is_kept(
            weights in prop::collection::vec((0_u8..20).prop_map(|x| f32::from(x / 2)), 0..300),
            weight in 0.01_f64..1.0, share in 0.001_f64..1.0, sinks in 0_usize..5, window in 0_usize..20,
        ) {
            let rule = ActivationRule { weight, share, sinks, window };
            prop_assert_eq!(rule.activated(&weights).unwrap(), by_definition(&rule, &weights));
        }

        #[test]
        fn scores_are_softmaxed_per_head_and_summed(
            scores in prop::collection::vec(-9.0_f32..9.0, 24), scale in 0.1_f32..2.0,
        ) {
            let mut weights = [0.0_f32; 8];
            for head in scores.chunks(8) {
                let sum: f32 = head.iter().map(|x| (x * scale).exp()).sum();
                weights.iter_mut().zip(head).for_each(|(weight, x)| *weight += (x * scale).exp() / sum);
            }
            let rule = ActivationRule { weight: 1.0, share: 0.4, ..ActivationRule::default() };
            let found = rule.activated_by_scores(&scores, 3, scale).unwrap();
            prop_assert_eq!(found.len(), 3);
            let least = found.iter().map(|at| weights[*at as usize]).fold(f32::INFINITY, f32::min);
            let others = (0..8).filter(|at| !found.contains(at)).map(|at| weights[at as usize]);
            prop_assert!(others.fold(0.0, f32::max) <= least + 1e-5);
        }
    }

    #[test]
    fn wrong_input_is_refused() {
        let rule = ActivationRule::default();
        let refused = |found: Result<Vec<u32>>| assert_eq!(found.unwrap_err().kind(), ErrorKind::InvalidArgument);
        for share in [0.0, -1.0, 1.1, f64::NAN, f64::INFINITY] {
            refused(ActivationRule { share, ..rule }.activated(&[1.0]));
            refused(ActivationRule { weight: share, ..rule }.activated(&[1.0]));
        }
        for weight in [-1.0, f32::NAN, f32::INFINITY] {
            refused(rule.activated(&[1.0, weight]));
        }
        refused(rule.activated_by_scores(&[1.0; 3], 2, 1.0));
        refused(rule.activated_by_scores(&[1.0; 3], 0, 1.0));
        refused(rule.activated_by_scores(&[1.0, f32::NAN], 1, 1.0));
        refused(rule.activated_by_scores(&[f32::MAX, 0.0], 1, 2.0));
        assert!(rule.activated(&[]).unwrap().is_empty());
        assert!(rule.activated_by_scores(&[], 4, 1.0).unwrap().is_empty());
        assert!(ActivationRule { window: 9, ..rule }.activated(&[1.0; 4]).unwrap().is_empty());
    }
}
