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
    /// True if frames are read no further than their headers and the directories of clusters. The check is then quick,
    /// and finds no damage of planes and pages. It takes precedence over `full`.
    pub headers_only: bool,
    /// The number of threads that read segments, at least 1. The threads mostly wait for the devices.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { show_keys: false, findings_max: 10_000, full: false, headers_only: false, threads: 4 }
    }
}

/// How far a check reads frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Depth {
    /// Headers and directories of clusters.
    Headers,
    /// Every byte.
    Payload,
    /// Every byte, and the groups that summaries and entries of clusters repeat.
    Full,
}

impl Options {
    /// Returns how far the check reads frames.
    pub(crate) fn depth(&self) -> Depth {
        match (self.headers_only, self.full) {
            (true, _) => Depth::Headers,
            (false, false) => Depth::Payload,
            (false, true) => Depth::Full,
        }
    }
}
