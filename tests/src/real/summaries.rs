//! Summaries of the sequences of a worker: a handle that streams them selects as one that keeps them in memory.

use super::worker;
use std::sync::Arc;
use stratakv::retrieval::{Quest, Selector, SignBits};
use stratakv::{Budget, OpenSequence, Result, SelectRequest, Sequence, Store, SummaryResidency};

/// The layer without a window.
const LAYER: usize = 0;
/// The query heads and the head dim of that layer in both shapes.
const WIDTH: usize = 2 * 32;

/// Returns the groups that min/max records and sign bits choose, by method; none of a sequence without tokens.
///
/// # Panics
/// A method cannot be attached, or a selection fails.
pub(super) fn chosen(sequence: &mut Sequence) -> Vec<Vec<u64>> {
    if sequence.is_empty() {
        return Vec::new();
    }
    let query: Vec<f32> = (0..WIDTH).map(|i| ((i * 7) % 5) as f32 - 2.0).collect();
    let budget = Budget::tokens(sequence.len() as usize / 3 + 1);
    let methods: [Arc<dyn Selector>; 2] = [Arc::new(Quest), Arc::new(SignBits)];
    let choose = |method| -> Result<Vec<u64>> {
        let id = sequence.attach(method)?;
        let request = SelectRequest::query(&query).budget(budget).selector(id);
        let groups = sequence.select(LAYER, request).map(|selection| selection.groups().collect());
        sequence.detach(id)?;
        groups
    };
    methods.map(choose).map(|groups| groups.expect("a selection")).into()
}

/// Compares what a handle with streamed summaries selects with `expected`.
///
/// # Panics
/// It selects other groups, or fails.
pub(super) fn check_streamed(store: &Store, name: u64, expected: &[Vec<u64>]) {
    let options = OpenSequence::new().summary_residency(SummaryResidency::Streamed);
    let mut sequence = store.open_sequence(&worker::key(name), options).expect("a sequence that was just open");
    assert_eq!(chosen(&mut sequence), expected, "{name}: streamed summaries select other groups");
}
