//! Parts of results that several measurements of this area have in common.

use crate::support::report::ratio;
use serde::Serialize;

/// The sequence that is written, and how often it is committed.
#[derive(Debug, Serialize)]
pub(crate) struct SequenceSetup {
    /// Tokens from one commit to the next; 0: one commit at the end.
    pub(crate) per: u32,
    pub(crate) tokens: u32,
    pub(crate) layers: u16,
    pub(crate) group: u16,
}

/// Bytes written to the devices over bytes of data.
#[derive(Debug, Serialize)]
pub(crate) struct WriteAmplification {
    /// Device bytes over the bytes of keys, values, summaries and selector records.
    write_amplification: Option<f64>,
    /// Device bytes over the bytes of keys and values.
    write_amplification_kv: Option<f64>,
}

impl WriteAmplification {
    /// Returns the ratios for `kv_bytes` of keys and values and `other_bytes` of summaries and records.
    pub(crate) fn new(device_bytes: u64, kv_bytes: u64, other_bytes: u64) -> Self {
        Self {
            write_amplification: ratio(device_bytes as f64, (kv_bytes + other_bytes) as f64),
            write_amplification_kv: ratio(device_bytes as f64, kv_bytes as f64),
        }
    }
}
