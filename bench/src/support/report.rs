//! Medians, percentiles, rounding, and the output of results as text or JSON.

use anyhow::Result;
use serde::Serialize;
use std::io::Write;

/// Returns the median, and 0 for an empty slice.
pub(crate) fn median(values: &[f64]) -> f64 {
    percentile(values, 0.5)
}

/// Returns the median of `value` over `samples`, and 0 if there are none.
pub(crate) fn median_of<T>(samples: &[T], value: impl Fn(&T) -> f64) -> f64 {
    median(&samples.iter().map(value).collect::<Vec<_>>())
}

/// Returns the median of `value` over `samples`, and none if there are none.
pub(crate) fn median_of_any<T>(samples: &[T], value: impl Fn(&T) -> f64) -> Option<f64> {
    (!samples.is_empty()).then(|| median_of(samples, value))
}

/// Returns the percentile of `values` at `share`, interpolated between neighbours, and 0 for an empty slice.
pub(crate) fn percentile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let at = share.clamp(0.0, 1.0) * last as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

/// Rounds to four significant digits, because more would be noise.
pub(crate) fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let scale = 10_f64.powf(3.0 - value.abs().log10().floor());
    (value * scale).round() / scale
}

/// Returns `a / b`, rounded, and none if `b` is not positive.
pub(crate) fn ratio(a: f64, b: f64) -> Option<f64> {
    (b > 0.0).then(|| rounded(a / b))
}

/// Prints one result to stdout: a JSON object on a line, or `name` and one line of text per field that is not null.
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

/// The reason why a command did nothing.
#[derive(Serialize)]
struct SkippedResult<'a> {
    skipped: &'a str,
}

/// Prints to stdout why a command does nothing on this machine.
pub(crate) fn print_skipped(json: bool, why: &str) -> Result<()> {
    if json {
        return print(true, "", &SkippedResult { skipped: why });
    }
    println!("skipped: {why}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_interpolated_between_neighbours() {
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
