//! The newest queries of each layer, which some methods make their clusters of.

use std::collections::VecDeque;

/// The queries that a profile takes unless more are asked for: as many as SWARM records.
pub const PROFILE_QUERIES: usize = 128;

/// The newest queries of each layer.
#[derive(Clone, Debug, Default)]
pub struct RecordedQueries {
    layers: Vec<VecDeque<Vec<f32>>>,
    limit: usize,
}

impl RecordedQueries {
    /// Returns a record of at most `limit` queries per layer.
    #[must_use]
    pub fn new(layers: usize, limit: usize) -> Self {
        Self { layers: vec![VecDeque::new(); layers], limit }
    }

    /// Takes the queries `[tokens, query_heads * head_dim]` of a layer, whose rows have `row` elements.
    pub fn add(&mut self, layer: usize, queries: &[f32], row: usize) {
        let Some(recorded) = self.layers.get_mut(layer) else { return };
        let rows = queries.len() / row.max(1);
        for query in queries.chunks_exact(row.max(1)).skip(rows.saturating_sub(self.limit)) {
            recorded.push_back(query.to_vec());
            if recorded.len() > self.limit {
                recorded.pop_front();
            }
        }
    }

    /// Returns the queries of a layer, from the oldest to the newest.
    #[must_use]
    pub fn of(&self, layer: usize) -> Vec<&[f32]> {
        self.layers.get(layer).into_iter().flatten().map(Vec::as_slice).collect()
    }

    /// Returns the number of queries of the first layer. After a step, every layer has as many.
    #[must_use]
    pub fn count(&self) -> usize {
        self.layers.first().map_or(0, VecDeque::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_queries_of_each_layer_are_kept() {
        let mut recorded = RecordedQueries::new(2, 3);
        recorded.add(0, &[1.0, 1.0, 2.0, 2.0], 2);
        recorded.add(0, &[3.0, 3.0, 4.0, 4.0, 5.0, 5.0, 6.0, 6.0], 2);
        recorded.add(9, &[7.0, 7.0], 2);
        assert_eq!(recorded.of(0), [[4.0, 4.0], [5.0, 5.0], [6.0, 6.0]]);
        assert!(recorded.of(1).is_empty() && recorded.of(9).is_empty() && recorded.count() == 3);
        let mut none = RecordedQueries::new(1, 0);
        none.add(0, &[1.0; 4], 2);
        assert_eq!(none.count(), 0);
    }
}
