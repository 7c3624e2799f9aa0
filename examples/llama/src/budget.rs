//! The number of tokens that a decode step may attend to.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail, ensure};

/// Attended tokens per step and layer: a share of the context (`1/13`) or a number of tokens (`400t`).
///
/// A share may have a floor: `1/13:512t` is at least 512 tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// `numerator / denominator` of the context's tokens, rounded down, and at least `least`.
    Share {
        /// The numerator, at least 1.
        numerator: u32,
        /// The denominator, at least the numerator.
        denominator: u32,
        /// Tokens that every step may attend to, at least 1.
        least: u32,
    },
    /// A number of tokens, at least 1.
    Tokens(u32),
}

impl Budget {
    /// The budget of text: a short context is attended as a whole.
    pub const TEXT: Self = Self::Share { numerator: 1, denominator: 13, least: 512 };

    /// The budget of recall prompts.
    pub const RECALL: Self = Self::Share { numerator: 1, denominator: 13, least: 1 };

    /// Returns the tokens allowed for a context of `present` tokens, at least 1.
    #[must_use]
    pub fn tokens(self, present: usize) -> usize {
        match self {
            Self::Share { numerator, denominator, least } => {
                let share = present as u128 * u128::from(numerator) / u128::from(denominator.max(1));
                usize::try_from(share).unwrap_or(usize::MAX).max(least.max(1) as usize)
            }
            Self::Tokens(n) => (n as usize).max(1),
        }
    }
}

impl FromStr for Budget {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        const FORMS: &str =
            "give a share of the context such as 1/13, a number of tokens such as 400t, or both such as 1/13:512t";
        let tokens = |part: &str| {
            let Ok(n) = part.parse::<u32>() else { bail!("budget {text:?} is not a number of tokens: {FORMS}") };
            ensure!(n > 0, "budget {text:?} attends to no token: {FORMS}");
            Ok(n)
        };
        let (share, least) = match text.split_once(':') {
            Some((share, least)) => (share, least.strip_suffix('t').map_or_else(|| tokens("none"), tokens)?),
            None => match text.strip_suffix('t') {
                Some(part) => return Ok(Self::Tokens(tokens(part)?)),
                None => (text, 1),
            },
        };
        let (a, b) = share.split_once('/').unwrap_or((share, "1"));
        let (Ok(numerator), Ok(denominator)) = (a.trim().parse::<u32>(), b.trim().parse::<u32>()) else {
            bail!("budget {text:?} is neither a share nor a number of tokens: {FORMS}")
        };
        ensure!(denominator > 0, "budget {text:?} divides by zero: {FORMS}");
        ensure!(numerator > 0, "budget {text:?} attends to no token: {FORMS}");
        ensure!(numerator <= denominator, "budget {text:?} is more than the whole context: {FORMS}");
        Ok(Self::Share { numerator, denominator, least })
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Share { numerator: 1, denominator: 1, least: 1 } => write!(f, "1"),
            Self::Share { numerator, denominator, least: 1 } => write!(f, "{numerator}/{denominator}"),
            Self::Share { numerator, denominator, least } => write!(f, "{numerator}/{denominator}:{least}t"),
            Self::Tokens(n) => write!(f, "{n}t"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_numbers_parse_print_and_round_down() {
        for (text, present, tokens) in
            [("1/13", 4096, 315), ("1", 77, 77), ("400t", 10, 400), ("1/13", 5, 1), ("2/3", 300, 200), ("1t", 9, 1)]
                .into_iter()
                .chain([("1/13:512t", 1024, 512), ("1/13:512t", 13_000, 1000), ("1/1:2t", 1, 2)])
        {
            let budget: Budget = text.parse().unwrap();
            assert_eq!(budget.tokens(present), tokens, "{text}");
            assert_eq!(budget.to_string(), text);
        }
    }

    #[test]
    fn budgets_of_no_token_and_nonsense_are_errors() {
        for text in [
            "0",
            "0t",
            "0/5",
            "1/0",
            "14/13",
            "-1t",
            "t",
            "",
            "0.5",
            "1/13t",
            "99999999999t",
            "1/2/3",
            "1/13:5",
            "1/13:0t",
            ":5t",
            "5t:5t",
            "1/13:",
        ] {
            let error = text.parse::<Budget>().unwrap_err().to_string();
            assert!(error.contains("1/13") && error.contains("400t"), "{text:?}: {error}");
        }
    }
}
