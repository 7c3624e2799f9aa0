//! Device directories and their files.

pub(crate) mod cached_file;
pub(crate) mod device_file;
pub(crate) mod directory;
pub(crate) mod instrumented;
pub(in crate::io) mod open_beneath;
pub(crate) mod os_directory;
pub(crate) mod probe;
