//! The report of a check of one exported sequence.

use crate::finding::{Finding, Severity};
use serde::Serialize;
use std::fmt::Write as _;

/// The content of an exported file, as its export page names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ExportInfo {
    /// The size of the file in bytes.
    pub bytes: u64,
    /// The number of pieces that were read.
    pub pieces: u64,
    /// The number of tokens of every layer with KV.
    pub tokens: u64,
    /// The number of token ids.
    pub token_ids: u64,
    /// The number of layers, including layers without KV.
    pub layers: u64,
    /// The number of tokens of a group.
    pub group_tokens: u64,
    /// The bytes of the caller state. Absent if the sequence has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_bytes: Option<u64>,
    /// The id of the store that wrote the file, in hexadecimal digits.
    pub store_id: String,
    /// The id of the sequence in that store.
    pub sequence: u64,
    /// The key, if [`Options::show_keys`](crate::Options::show_keys) is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The time of the export, in milliseconds since 1970.
    pub exported_unix_ms: u64,
}

/// The result of a check of one exported file.
#[derive(Clone, Debug, Serialize)]
pub struct ExportReport {
    /// True if the file is complete and every byte of it is correct.
    pub clean: bool,
    /// The findings, in the order of the file.
    pub findings: Vec<Finding>,
    /// The content of the file, as far as it could be read.
    pub export: ExportInfo,
    /// The exit code of the program.
    pub exit_code: u8,
}

impl ExportReport {
    /// Returns the report for a person: a line per finding, what the file holds, and the verdict as the last line.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            let _ = writeln!(text, "{finding}");
        }
        let e = &self.export;
        if let Some(key) = &e.key {
            let _ = writeln!(text, "key {key}");
        }
        let _ = writeln!(
            text,
            "sequence {} of store {}: {} tokens of {} layers, {} token ids; {} pieces, {} bytes",
            e.sequence, e.store_id, e.tokens, e.layers, e.token_ids, e.pieces, e.bytes
        );
        let damage = self.findings.iter().filter(|finding| finding.severity == Severity::Damage).count();
        let _ = match self.clean {
            true => writeln!(text, "clean"),
            false => writeln!(text, "not clean: {damage} damage findings"),
        };
        text
    }
}
