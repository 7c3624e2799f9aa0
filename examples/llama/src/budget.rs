//! The number of tokens that a decode step may attend to.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail, ensure};

/// Attended tokens per step and layer: a share of the context (`1/13`) or a number of tokens (`400t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// `numerator / denominator` of the context's tokens, rounded down, at least 1.
    Share {
        /// The numerator, at least 1.
        numerator: u32,
        /// The denominator, at least the numerator.
        denominator: u32,
    },
    /// A number of tokens, at least 1.
    Tokens(u32),
}

impl Budget {
    /// Returns the tokens allowed for a context of `present` tokens, at least 1.
    #[must_use]
    pub fn tokens(self, present: usize) -> usize {
        match self {
            Self::Share { numerator, denominator } => {
                let share = present as u128 * u128::from(numerator) / u128::from(denominator.max(1));
                usize::try_from(share).unwrap_or(usize::MAX).max(1)
            }
            Self::Tokens(n) => (n as usize).max(1),
        }
    }
}

impl FromStr for Budget {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        const FORMS: &str = "give a share of the context such as 1/13, or a number of tokens such as 400t";
        if let Some(tokens) = text.strip_suffix('t') {
            let Ok(n) = tokens.parse::<u32>() else { bail!("budget {text:?} is not a number of tokens: {FORMS}") };
            ensure!(n > 0, "budget {text:?} attends to no token: {FORMS}");
            return Ok(Self::Tokens(n));
        }
        let (a, b) = text.split_once('/').unwrap_or((text, "1"));
        let (Ok(numerator), Ok(denominator)) = (a.trim().parse::<u32>(), b.trim().parse::<u32>()) else {
            bail!("budget {text:?} is neither a share nor a number of tokens: {FORMS}")
        };
        ensure!(denominator > 0, "budget {text:?} divides by zero: {FORMS}");
        ensure!(numerator > 0, "budget {text:?} attends to no token: {FORMS}");
        ensure!(numerator <= denominator, "budget {text:?} is more than the whole context: {FORMS}");
        Ok(Self::Share { numerator, denominator })
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Share { numerator: 1, denominator: 1 } => write!(f, "1"),
            Self::Share { numerator, denominator } => write!(f, "{numerator}/{denominator}"),
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
        {
            let budget: Budget = text.parse().unwrap();
            assert_eq!(budget.tokens(present), tokens, "{text}");
            assert_eq!(budget.to_string(), text);
        }
    }

    #[test]
    fn budgets_of_no_token_and_nonsense_are_errors() {
        for text in ["0", "0t", "0/5", "1/0", "14/13", "-1t", "t", "", "0.5", "1/13t", "99999999999t", "1/2/3"] {
            let error = text.parse::<Budget>().unwrap_err().to_string();
            assert!(error.contains("1/13") && error.contains("400t"), "{text:?}: {error}");
        }
    }
}
