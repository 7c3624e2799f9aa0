//! [`LengthTimes`]: the times of steps over the length of a sequence, compared with a line.

use crate::cluster::decode::result::{ClusterDecodeResult, LengthKey};
use crate::support::report::{print, rounded};
use anyhow::Result;
use serde::Serialize;

/// The times of steps by length, for each side, budget, batch and device.
#[derive(Debug, Default)]
pub(super) struct LengthTimes {
    /// In the order in which they were measured first, each with its lengths and times.
    of: Vec<(LengthKey, Vec<(usize, f64)>)>,
}

/// The times of one side over the length.
#[derive(Debug, Serialize)]
struct LengthResult<'a> {
    #[serde(flatten)]
    key: &'a LengthKey,
    lengths: Vec<usize>,
    step_us: Vec<f64>,
    /// The line: the time at length 0, and what 1024 tokens add.
    fixed_us: f64,
    us_per_1k: f64,
    /// The largest distance of a time from the line, over the line. None for fewer than three lengths.
    off_line: Option<f64>,
}

impl LengthTimes {
    /// Adds the time of a step, if the run has several lengths.
    pub(super) fn add(&mut self, result: &ClusterDecodeResult<'_>, length: usize, step_us: f64) {
        let key = result.length_key();
        match self.of.iter_mut().find(|(own, _)| *own == key) {
            Some((_, times)) => times.push((length, step_us)),
            None => self.of.push((key, vec![(length, step_us)])),
        }
    }

    /// Prints a result for each side.
    ///
    /// # Errors
    /// Output fails.
    pub(super) fn print(&self, json: bool) -> Result<()> {
        for (key, times) in &self.of {
            let (fixed, per_token) = line(times);
            let result = LengthResult {
                key,
                lengths: times.iter().map(|(length, _)| *length).collect(),
                step_us: times.iter().map(|(_, time)| *time).collect(),
                fixed_us: rounded(fixed),
                us_per_1k: rounded(per_token * 1024.0),
                off_line: (times.len() > 2).then(|| rounded(off_line(times, (fixed, per_token)))),
            };
            print(json, &format!("step time over the length: {key}"), &result)?;
        }
        Ok(())
    }
}

/// Returns the line `a + b * length` that is nearest to the times, with distances as shares of the times.
fn line(times: &[(usize, f64)]) -> (f64, f64) {
    // Weighted least squares: the weight of a time is its inverse square.
    let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
        times
            .iter()
            .filter(|(_, time)| *time > 0.0)
            .map(|(length, time)| of(*length as f64, *time) / (time * time))
            .sum()
    };
    let (one, x, xx) = (sum(&|_, _| 1.0), sum(&|x, _| x), sum(&|x, _| x * x));
    let (y, xy) = (sum(&|_, y| y), sum(&|x, y| x * y));
    let divisor = one * xx - x * x;
    if divisor <= 1e-9 * one * xx {
        return (if one > 0.0 { y / one } else { 0.0 }, 0.0);
    }
    ((xx * y - x * xy) / divisor, (one * xy - x * y) / divisor)
}

/// Returns the largest distance of a time from a line, over the line.
fn off_line(times: &[(usize, f64)], (fixed, per_token): (f64, f64)) -> f64 {
    let off = |(length, time): &(usize, f64)| {
        let expected = fixed + per_token * *length as f64;
        (time - expected).abs() / expected.abs().max(f64::MIN_POSITIVE)
    };
    times.iter().map(off).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_on_a_line_are_not_off_it() {
        let times: Vec<(usize, f64)> =
            (0..5).map(|at| 1024 << at).map(|length| (length, 50.0 + length as f64 / 8.0)).collect();
        let (fixed, per_token) = line(&times);
        assert!((fixed - 50.0).abs() < 1e-6 && (per_token - 0.125).abs() < 1e-9, "{fixed} {per_token}");
        assert!(off_line(&times, (fixed, per_token)) < 1e-9);
        // A square is far off any line.
        let squares: Vec<(usize, f64)> = times.iter().map(|(length, _)| (*length, (length * length) as f64)).collect();
        assert!(off_line(&squares, line(&squares)) > 0.3);
    }

    #[test]
    fn one_length_has_a_line_without_slope() {
        assert_eq!(line(&[(1024, 3.0)]), (3.0, 0.0));
        assert_eq!(line(&[(1024, 3.0), (1024, 3.0)]), (3.0, 0.0));
        assert_eq!(line(&[]), (0.0, 0.0));
    }
}
