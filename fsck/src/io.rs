//! Reading the files of a device directory.
//!
//! - No file is opened for writing, and no symbolic link is followed.
//! - A page that cannot be read is reported and read as zeros. The check continues with the next page.

use crate::finding::{Code, FilePlace, Finding, Sink};
use crate::window::DirectFile;
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use stratakv_format::PAGE_BYTES;

/// The number of bytes that a check reads at once.
pub(crate) const WINDOW_BYTES: usize = 1 << 20;

/// An open file of a device directory.
#[derive(Debug)]
pub(crate) struct StoreFile {
    file: File,
    /// The same file, opened to bypass the page cache.
    direct: Option<DirectFile>,
    pub(crate) bytes: u64,
    pub(crate) place: FilePlace,
}

/// Opens a directory inside a directory. A symbolic link is an error.
pub(crate) fn open_directory(parent: &File, name: &str) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::openat(parent, name, flags, Mode::empty())?))
}

/// Returns the sorted names inside a directory, without `.` and `..`.
pub(crate) fn names(directory: &File) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy();
        if name != "." && name != ".." {
            names.push(name.into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Opens `file` (a name, or a directory and a name) inside `directory`.
///
/// Reports a missing file, a symbolic link, another file type or an error of the operating system, and returns `None`.
pub(crate) fn open(
    directory: &File,
    device: Option<u16>,
    path: &Arc<Path>,
    file: &str,
    sink: &Sink,
) -> Option<StoreFile> {
    let place = FilePlace { device, path: Arc::clone(path), file: Arc::from(file) };
    match try_open(directory, file) {
        Ok((file, bytes)) => Some(StoreFile { file, direct: None, bytes, place }),
        Err(error) => {
            let kinds = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory, io::ErrorKind::InvalidData];
            let is_link = error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error());
            let missing = is_link || kinds.contains(&error.kind());
            let code = if missing { Code::MissingFile } else { Code::IoError };
            sink.push(Finding::damage(code, format!("open failed: {error}")).in_file(&place));
            None
        }
    }
}

/// Splits `file` into its inner directory, if `file` names one, and its name there.
fn split<'a>(directory: &File, file: &'a str) -> io::Result<(Option<File>, &'a str)> {
    match file.split_once('/') {
        None => Ok((None, file)),
        Some((inner, name)) => Ok((Some(open_directory(directory, inner)?), name)),
    }
}

fn try_open(directory: &File, file: &str) -> io::Result<(File, u64)> {
    let (inner, name) = split(directory, file)?;
    let directory = inner.as_ref().unwrap_or(directory);
    // O_NONBLOCK, because opening a FIFO would block without it.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::openat(directory, name, flags, Mode::empty())?);
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a regular file"));
    }
    Ok((file, metadata.len()))
}

impl StoreFile {
    /// Makes later reads bypass the page cache where the file system allows it. The caller reads from front to back.
    ///
    /// `directory` is the directory that was given to [`open`].
    pub(crate) fn read_in_order(&mut self, directory: &File) {
        self.direct = split(directory, &self.place.file)
            .ok()
            .and_then(|(inner, name)| DirectFile::open(inner.as_ref().unwrap_or(directory), name));
    }

    /// Fills `buffer` with the bytes from `offset` on. Bytes past the end of the file are zero.
    ///
    /// Returns the ranges that could not be read. They are zero in the buffer and already reported.
    pub(crate) fn read(&self, offset: u64, buffer: &mut [u8], sink: &Sink) -> Vec<Range<u64>> {
        if self.read_once(offset, buffer).is_ok() {
            return Vec::new();
        }
        // Page by page, so that only the unreadable pages are lost and named.
        let mut bad: Vec<(Range<u64>, io::Error)> = Vec::new();
        for (index, page) in buffer.chunks_mut(PAGE_BYTES).enumerate() {
            let start = offset + (index * PAGE_BYTES) as u64;
            let end = start + page.len() as u64;
            if let Err(error) = self.read_once(start, page) {
                page.fill(0);
                match bad.last_mut() {
                    Some((range, _)) if range.end == start => range.end = end,
                    _ => bad.push((start..end, error)),
                }
            }
        }
        bad.into_iter()
            .map(|(range, error)| {
                let finding = Finding::damage(Code::IoError, format!("read failed: {error}"));
                sink.push(finding.at(&self.place, range.start, range.end - range.start));
                range
            })
            .collect()
    }

    fn read_some(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        match self.direct.as_ref().map(|direct| direct.read_at(buffer, at)) {
            // EINVAL means that the file system has no direct reads. Any other error is an error of the read.
            Some(Err(error)) if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {}
            Some(outcome) => return outcome,
            None => {}
        }
        self.file.read_at(buffer, at)
    }

    fn read_once(&self, offset: u64, mut buffer: &mut [u8]) -> io::Result<()> {
        let mut at = offset;
        while !buffer.is_empty() {
            match self.read_some(buffer, at) {
                Ok(0) => {
                    buffer.fill(0);
                    return Ok(());
                }
                Ok(n) => {
                    buffer = &mut buffer[n..];
                    at += n as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Returns whether every byte is zero. It folds chunks, because the compiler vectorises that and padding can be large.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(256).all(|chunk| chunk.iter().fold(0, |all, &byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A file that is open for writing only stands for a device whose reads fail.
    #[test]
    fn pages_that_cannot_be_read_are_zeros_and_reported_once() {
        let root = tempfile::tempdir().expect("a directory");
        let file = File::create(root.path().join("f")).expect("a file");
        let path: Arc<Path> = Arc::from(PathBuf::from("/device"));
        let place = FilePlace { device: Some(3), path, file: Arc::from("f") };
        let bytes = 8 * PAGE_BYTES as u64;
        let file = StoreFile { file, direct: None, bytes, place };
        let sink = Sink::new(9);
        let mut buffer = vec![7; 2 * PAGE_BYTES + 100];
        let bad = file.read(PAGE_BYTES as u64, &mut buffer, &sink);
        let end = (3 * PAGE_BYTES + 100) as u64;
        let places: Vec<_> = bad.iter().map(|range| (range.start, range.end)).collect();
        assert_eq!(places, [(PAGE_BYTES as u64, end)]);
        assert!(is_zero(&buffer));
        let findings = sink.into_findings();
        let [finding] = &findings.list[..] else { panic!("{:?}", findings.list) };
        assert_eq!((finding.code, finding.device, finding.file.as_deref()), (Code::IoError, Some(3), Some("f")));
        assert_eq!((finding.offset, finding.length), (Some(PAGE_BYTES as u64), Some(end - PAGE_BYTES as u64)));
        assert!(finding.message.starts_with("read failed: "), "{}", finding.message);
    }
}
