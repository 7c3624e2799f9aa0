//! Exports to and imports from files of the file system.

use super::{Exported, ImportOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::KvLayout;
use crate::sequence::{Sequence, SequenceReader};
use crate::store::Store;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

fn failed(doing: &str, path: &Path, e: std::io::Error) -> Error {
    let kind = e.kind();
    let error = Error::io(format!("{doing} {}", path.display()), e);
    match kind {
        std::io::ErrorKind::AlreadyExists => error.with_kind(ErrorKind::AlreadyExists),
        std::io::ErrorKind::NotFound => error.with_kind(ErrorKind::NotFound),
        _ => error,
    }
}

impl Sequence {
    /// Exports to a new file of mode 0600, which is durable when this returns. A failed export leaves no file.
    ///
    /// # Errors
    /// The errors of [`Sequence::export`]. [`ErrorKind::AlreadyExists`]: `path` exists.
    pub fn export_file(&mut self, path: impl AsRef<Path>) -> Result<Exported> {
        self.reader()?.export_file(path)
    }
}

impl SequenceReader {
    /// Exports what this reader sees, as [`Sequence::export_file`] does.
    ///
    /// # Errors
    /// The errors of [`Sequence::export_file`].
    pub fn export_file(&self, path: impl AsRef<Path>) -> Result<Exported> {
        let path = path.as_ref();
        let flags = OFlags::NOFOLLOW.bits() as i32;
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).custom_flags(flags).open(path);
        let file = file.map_err(|e| failed("create", path, e))?;
        let exported = self.write_file(&file, path);
        if exported.is_err() {
            let _ = std::fs::remove_file(path);
        }
        exported
    }

    fn write_file(&self, file: &File, path: &Path) -> Result<Exported> {
        // The umask may have removed bits of the mode.
        file.set_permissions(Permissions::from_mode(0o600)).map_err(|e| failed("set the mode of", path, e))?;
        let exported = self.export(file)?;
        file.sync_all().map_err(|e| failed("sync", path, e))?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(parent).and_then(|dir| dir.sync_all()).map_err(|e| failed("sync", parent, e))?;
        Ok(exported)
    }
}

impl Store {
    /// Imports from a file.
    ///
    /// # Errors
    /// The errors of [`Store::import`]. [`ErrorKind::NotFound`]: there is no file. [`ErrorKind::InvalidArgument`]: it
    /// is not a regular file.
    pub fn import_file(&self, path: impl AsRef<Path>, layout: &KvLayout, options: ImportOptions) -> Result<Sequence> {
        let path = path.as_ref();
        // Non-blocking, so that a pipe without a writer does not hang the open.
        let flags = OFlags::NONBLOCK.bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = file.map_err(|e| failed("open", path, e))?;
        if !file.metadata().map_err(|e| failed("stat", path, e))?.is_file() {
            let text = format!("{} is no regular file; use import for streams", path.display());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        self.import(file, layout, options).map_err(|e| e.during(path.display()))
    }
}
