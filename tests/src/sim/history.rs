//! Histories kept as files: minimised cases that once failed. They stay the same when the generator changes.

use super::case::Case;
use super::coverage::Coverage;
use super::mutants::{named, with_mutant};
use super::run::{Failure, run};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The number of device seeds that are tried with one history, because a change of the engine's requests changes what
/// the devices do with them.
const WAYS: u64 = 200;

/// A kept case and the reason for keeping it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct History {
    /// The failure that it found.
    pub why: String,
    /// The name of the planted fault that it must find. Without one, the case must only pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mutant: Option<String>,
    /// The case.
    pub case: Case,
}

impl History {
    /// Reads a history from a file.
    ///
    /// # Errors
    /// The file cannot be read or is not a history.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// Returns the text of the file.
    #[must_use]
    pub fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default() + "\n"
    }

    fn way(&self, way: u64) -> Case {
        Case { seed: self.case.seed.wrapping_add(way.wrapping_mul(0x9e37_79b9)), ..self.case.clone() }
    }

    /// Runs the case with many device seeds. It must pass with all, and fail with one if its fault is planted.
    ///
    /// # Errors
    /// The first failure, or that the planted fault is not found.
    pub fn check(&self) -> Result<(), String> {
        let fails = |way| -> Option<Failure> { run(&self.way(way), &mut Coverage::default()).err() };
        if let Some(failure) = (0..WAYS).find_map(fails) {
            return Err(failure.to_string());
        }
        let Some(name) = &self.mutant else { return Ok(()) };
        let mutant = named(name).ok_or_else(|| format!("no planted fault is named {name}"))?;
        match with_mutant(mutant, || (0..WAYS).find_map(fails)) {
            Some(_) => Ok(()),
            None => Err(format!("no longer finds {name}")),
        }
    }
}
