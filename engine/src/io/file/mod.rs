//! Files: device directories and the files in them.
//!
//! A device is a directory. [`directory::Directory`] is the interface to its names and small reads and writes, and a
//! seam: the simulator implements it too. Queued I/O on its files belongs to the drivers.
//!
//! | Type | What it is | File |
//! |---|---|---|
//! | [`directory::Directory`] | the interface | `directory.rs` |
//! | [`os_directory::OsDirectory`] | a directory of the operating system | `os_directory.rs` |
//! | [`instrumented::InstrumentedDirectory`] | counts the failures of another directory | `instrumented.rs` |
//! | [`open_roots::OpenRoots`] | the directories that stores of this process have open | `open_roots.rs` |
//! | [`device_file::DeviceFile`] | an open file | `device_file.rs` |
//! | [`cached_file::CachedFile`] | a file that is opened when it is needed | `cached_file.rs` |
//! | [`poison::Poison`] | the mark of a failed sync | `poison.rs` |
//!
//! Nothing outside of a device directory is opened, and no symbolic link is followed: see `open_beneath.rs`.

pub(crate) mod cached_file;
pub(crate) mod device_file;
pub(crate) mod directory;
pub(crate) mod instrumented;
pub(in crate::io) mod open_beneath;
pub(crate) mod open_roots;
pub(crate) mod os_directory;
pub(crate) mod poison;
pub(crate) mod probe;
