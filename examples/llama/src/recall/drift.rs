//! Drift: how far a prompt's keys are from the keys that codes were calibrated on.

use serde::Serialize;

/// Above this drift the method should be calibrated again, on tokens like the prompt's.
const FAR: f64 = 2.0;

/// The largest drift of each layer over several caches.
///
/// Drift is the mean squared error of the keys' codes, divided by the error at calibration. It is about 1 for similar
/// keys.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Drift {
    layers: Vec<Option<f64>>,
}

impl Drift {
    /// Adds the drifts of one cache by layer. A layer without codes has `None`.
    pub fn add(&mut self, layers: &[Option<f64>]) {
        self.layers.resize(self.layers.len().max(layers.len()), None);
        for (known, new) in self.layers.iter_mut().zip(layers) {
            *known = known.iter().chain(new).copied().reduce(f64::max);
        }
    }

    /// Returns whether no layer has codes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layers.iter().all(Option::is_none)
    }

    /// Returns a line for the end of a report, or `None` for a method without codes.
    #[must_use]
    pub fn line(&self, method: &str) -> Option<String> {
        if self.is_empty() {
            return None;
        }
        let layer = |drift: &Option<f64>| drift.map_or_else(|| "-".to_owned(), |drift| format!("{drift:.2}"));
        let layers: Vec<String> = self.layers.iter().map(layer).collect();
        let far = self.layers.iter().flatten().any(|drift| *drift > FAR);
        let advice = if far { "; above 2, calibrate on tokens like these" } else { "" };
        Some(format!("drift of {method} by layer (1 as at calibration): {}{advice}", layers.join(" ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drift_keeps_the_largest_value_of_each_layer() {
        let mut drift = Drift::default();
        assert_eq!(drift.line("tck:64"), None);
        drift.add(&[None, None]);
        assert!(drift.is_empty());
        drift.add(&[Some(1.25), None]);
        drift.add(&[Some(1.0), None, Some(0.5)]);
        assert_eq!(drift.line("tck:64").unwrap(), "drift of tck:64 by layer (1 as at calibration): 1.25 - 0.50");
        drift.add(&[Some(3.0)]);
        assert!(drift.line("tck:64").unwrap().ends_with("3.00 - 0.50; above 2, calibrate on tokens like these"));
    }
}
