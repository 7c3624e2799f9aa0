//! The settings of a check.

/// The settings of a check.
#[derive(Clone, Debug)]
pub struct Options {
    /// True if findings name the keys of sequences. Keys are private data, so the default is `false`.
    pub show_keys: bool,
    /// The number of findings that a report keeps. Further findings are only counted.
    pub findings_max: usize,
    /// True if summaries are computed again from the keys of their groups, and every entry of a cluster is compared
    /// with the group or tail that holds its token. This reads these groups again for each summary and directory.
    pub full: bool,
    /// The number of threads that read segments, at least 1. The threads mostly wait for the devices.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { show_keys: false, findings_max: 10_000, full: false, threads: 4 }
    }
}
