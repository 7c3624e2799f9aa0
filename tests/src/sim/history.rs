//! Histories kept as files: minimised cases that once found something. They stay what they are when the generator
//! changes.

use super::case::Case;
use super::coverage::Coverage;
use super::mutants::{named, with_mutant};
use super::run::{Failure, run};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Ways of the devices that are tried with one history: what they do depends on everything the engine asks of them.
const WAYS: u64 = 200;

/// A history with what it is about.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct History {
    /// What it found.
    pub why: String,
    /// The planted fault that it must find, by name; without one it only must pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mutant: Option<String>,
    /// What happens.
    pub case: Case,
}

impl History {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read or is none.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// As text for a file.
    #[must_use]
    pub fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default() + "\n"
    }

    fn way(&self, way: u64) -> Case {
        Case { seed: self.case.seed.wrapping_add(way.wrapping_mul(0x9e37_79b9)), ..self.case.clone() }
    }

    /// Runs it with devices that behave in many ways: it must pass in all, and fail in one with its fault planted.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), String> {
        let fails = |way| -> Option<Failure> { run(&self.way(way), &mut Coverage::default()).err() };
        if let Some(failure) = (0..WAYS).find_map(fails) {
            return Err(failure.to_string());
        }
        let Some(name) = &self.mutant else { return Ok(()) };
        let mutant = named(name).ok_or_else(|| format!("there is no planted fault {name}"))?;
        match with_mutant(mutant, || (0..WAYS).find_map(fails)) {
            Some(_) => Ok(()),
            None => Err(format!("does not find {name} any more")),
        }
    }
}
