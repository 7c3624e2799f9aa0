//! Shares and sizes on the command line.

use anyhow::{Context, Result, ensure};

/// Parses a share above 0 and at most 1, such as `1/34` or `0.95`.
pub(super) fn parse_share(text: &str) -> Result<f64> {
    let (above, below) = text.split_once('/').unwrap_or((text, "1"));
    let share = above.trim().parse::<f64>().ok().zip(below.trim().parse::<f64>().ok()).map(|(a, b)| a / b);
    let share = share.with_context(|| format!("{text:?} is not a share such as 1/34 or 0.95"))?;
    ensure!(share > 0.0 && share <= 1.0, "the share {text} must be above 0 and at most 1");
    Ok(share)
}

/// Parses a size such as `64MiB`, `64M`, `64MB` or `65536`. Units are powers of 1024, except `kB`, `MB` and `GB`.
pub(super) fn parse_size(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        other => anyhow::bail!("{other:?} is not a unit of size; give bytes, or KiB, MiB, GiB"),
    };
    let number: u64 = digits.trim().parse().with_context(|| format!("{text:?} is not a size such as 64MiB"))?;
    ensure!(number > 0, "the size must be at least 1 byte");
    number.checked_mul(unit).with_context(|| format!("{text:?} does not fit into 64 bits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_with_their_units() {
        assert_eq!(parse_size("64MiB").unwrap(), 64 << 20);
        assert_eq!(parse_size("1 GB").unwrap(), 1_000_000_000);
        assert_eq!(parse_size("4096").unwrap(), 4096);
        for bad in ["", "MiB", "-1", "0", "1XB", "99999999999GiB"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
