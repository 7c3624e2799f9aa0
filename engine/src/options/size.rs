//! Sizes in bytes, as people write them.

use crate::error::{Error, ErrorKind, Result};
use serde::de::{Deserializer, Visitor};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A size in bytes. It is serialised as a number. Formats for people also read it from text, as [`FromStr`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// Returns `n` KiB.
    #[must_use]
    pub const fn kib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 10))
    }

    /// Returns `n` MiB.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 20))
    }

    /// Returns `n` GiB.
    #[must_use]
    pub const fn gib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 30))
    }

    /// Returns the bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1_u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        for (unit, name) in units {
            if self.0 >= unit {
                return write!(f, "{:.1} {name}", self.0 as f64 / unit as f64);
            }
        }
        write!(f, "{} B", self.0)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        match deserializer.is_human_readable() {
            true => deserializer.deserialize_any(SizeVisitor),
            false => u64::deserialize(deserializer).map(Self),
        }
    }
}

/// Reads a number of bytes, or a text.
struct SizeVisitor;

impl Visitor<'_> for SizeVisitor {
    type Value = ByteSize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of bytes, or a text such as 64KiB")
    }

    fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> std::result::Result<ByteSize, E> {
        Ok(ByteSize(bytes))
    }

    fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> std::result::Result<ByteSize, E> {
        let wrong = |_| E::invalid_value(serde::de::Unexpected::Signed(bytes), &self);
        u64::try_from(bytes).map(ByteSize).map_err(wrong)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<ByteSize, E> {
        text.parse().map_err(E::custom)
    }
}

impl FromStr for ByteSize {
    type Err = Error;

    /// Parses `4096`, `64KiB`, `512M`, `1.5 GiB`: binary multiples. The letters after K, M, G, T are optional.
    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::new(ErrorKind::InvalidArgument, format!("size {text:?} cannot be read; write 64KiB, 512MiB or 2GiB"))
        };
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let number: f64 = trimmed[..digits].parse().map_err(|_| wrong())?;
        let shift = match trimmed[digits..].trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(wrong()),
        };
        let bytes = number * (1_u64 << shift) as f64;
        if !bytes.is_finite() || bytes >= u64::MAX as f64 { Err(wrong()) } else { Ok(Self(bytes as u64)) }
    }
}
