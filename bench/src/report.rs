//! Medians, percentiles, and results as text or JSON.

use anyhow::Result;
use serde::Serialize;
use std::io::Write;

/// The median; 0 of nothing.
pub(crate) fn median(values: &[f64]) -> f64 {
    percentile(values, 0.5)
}

/// The value below which a share of `values` lies, interpolated between neighbours; 0 of nothing.
pub(crate) fn percentile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let at = share.clamp(0.0, 1.0) * last as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

/// Four significant digits: more would be noise.
pub(crate) fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let scale = 10_f64.powf(3.0 - value.abs().log10().floor());
    (value * scale).round() / scale
}

/// `a / b`, rounded; none when there is nothing to divide by.
pub(crate) fn ratio(a: f64, b: f64) -> Option<f64> {
    (b > 0.0).then(|| rounded(a / b))
}

/// One result to stdout: a JSON object on a line, or its fields as text.
pub(crate) fn print<T: Serialize>(json: bool, name: &str, result: &T) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string(result)?)?;
    } else {
        writeln!(out, "{name}")?;
        if let serde_json::Value::Object(fields) = serde_json::to_value(result)? {
            for (field, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                writeln!(out, "  {field:<24} {text}")?;
            }
        }
    }
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_lie_between_neighbours() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(median(&values), 2.5);
        assert_eq!((percentile(&values, 0.0), percentile(&values, 1.0)), (1.0, 4.0));
        assert_eq!((median(&[]), median(&[7.0])), (0.0, 7.0));
    }

    #[test]
    fn figures_keep_four_digits() {
        assert_eq!(rounded(0.067_891_23), 0.067_89);
        assert_eq!(rounded(123_456.0), 123_500.0);
        assert_eq!((rounded(0.0), ratio(1.0, 0.0), ratio(1.0, 3.0)), (0.0, None, Some(0.3333)));
    }
}
