//! Reading a file from front to back with O_DIRECT, one window at a time.
//!
//! Direct reads leave the page cache to other processes, and check large stores at the speed of their devices.

use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};
use stratakv_format::PAGE_BYTES;

/// The largest number of bytes in a window.
const WINDOW_BYTES: usize = 1 << 20;
/// The largest gap, in bytes, between a window and a read that still counts as sequential. The gap itself is not read.
const GAP_BYTES: u64 = 256 << 10;

/// A file that is read with O_DIRECT.
#[derive(Debug)]
pub(crate) struct DirectFile {
    file: File,
    window: Mutex<ReadWindow>,
}

/// The range of the file that was read last.
#[derive(Debug, Default)]
struct ReadWindow {
    /// The bytes of the window. One page is spare, so that the window can start at a page boundary.
    memory: Vec<u8>,
    start: u64,
    bytes: usize,
}

impl DirectFile {
    /// Opens a file inside `directory`. Returns `None` if the open fails, for example because the file system has no
    /// direct reads.
    pub(crate) fn open(directory: &File, name: &str) -> Option<Self> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::DIRECT;
        let file = File::from(rustix::fs::openat(directory, name, flags, Mode::empty()).ok()?);
        Some(Self { file, window: Mutex::default() })
    }

    /// Copies bytes from `at` on to the front of `buffer`. Returns their number, which is 0 at the end of the file.
    pub(crate) fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        if window.rest(at).is_empty() {
            let sequential = at >= window.start && at <= window.end() + GAP_BYTES;
            let wide = if sequential { window.fill(&self.file, at, WINDOW_BYTES) } else { Ok(()) };
            // The wide read may fail at a page past the bytes that the caller needs.
            if !sequential || wide.is_err() {
                window.fill(&self.file, at, buffer.len())?;
            }
        }
        let rest = window.rest(at);
        let bytes = rest.len().min(buffer.len());
        buffer[..bytes].copy_from_slice(&rest[..bytes]);
        Ok(bytes)
    }
}

impl ReadWindow {
    fn end(&self) -> u64 {
        self.start + self.bytes as u64
    }

    /// Returns the offset of the window in `memory`.
    fn skip(&self) -> usize {
        self.memory.as_ptr().align_offset(PAGE_BYTES).min(PAGE_BYTES)
    }

    /// Returns the bytes that the window holds from offset `at` of the file on.
    fn rest(&self, at: u64) -> &[u8] {
        let from = at.checked_sub(self.start).map_or(usize::MAX, |from| from as usize);
        self.memory[self.skip().min(self.memory.len())..]
            .get(..self.bytes)
            .and_then(|all| all.get(from..))
            .unwrap_or(&[])
    }

    /// Reads the whole pages around the `bytes` bytes at `at`, at most one window.
    fn fill(&mut self, file: &File, at: u64, bytes: usize) -> io::Result<()> {
        self.memory.resize(WINDOW_BYTES + PAGE_BYTES, 0);
        (self.start, self.bytes) = (at - at % PAGE_BYTES as u64, 0);
        let wanted = ((at - self.start) as usize + bytes).next_multiple_of(PAGE_BYTES).min(WINDOW_BYTES);
        let skip = self.skip();
        loop {
            match file.read_at(&mut self.memory[skip..skip + wanted], self.start) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                outcome => {
                    self.bytes = outcome?;
                    return Ok(());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sequential and random reads, up to the end of the file, which is not at a page boundary.
    #[test]
    fn direct_reads_return_the_bytes_of_the_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let bytes: Vec<u8> = (0..3 * WINDOW_BYTES + 777).map(|i| (i * 31 + i / 4096) as u8).collect();
        std::fs::write(dir.path().join("f"), &bytes).expect("written");
        let directory = File::open(dir.path()).expect("opened");
        let Some(file) = DirectFile::open(&directory, "f") else {
            eprintln!("skipped: the file system has no direct reads");
            return;
        };
        assert!(DirectFile::open(&directory, "g").is_none());
        let mut at = 0;
        let places = (0..2000).map(|i: usize| match i % 4 {
            0 => i * 5003 % (bytes.len() + 9000),
            _ => usize::MAX,
        });
        for (i, place) in places.enumerate() {
            at = if place == usize::MAX { at } else { place };
            let mut buffer = vec![0; 1 + i * 97 % 20_000];
            let read = file.read_at(&mut buffer, at as u64).expect("read");
            let there = bytes.get(at..).unwrap_or(&[]);
            assert!(read > 0 || there.is_empty(), "nothing at {at} of {}", bytes.len());
            assert_eq!(buffer[..read], there[..read], "{read} bytes at {at}");
            at += read;
        }
    }
}
