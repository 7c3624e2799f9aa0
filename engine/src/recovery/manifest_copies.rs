//! Reading the copies of one manifest generation, with their header pages verified.
//!
//! Invariants:
//! - A copy that cannot be read is named, and the others are used.
//! - Equal copies share one buffer.
//! - At most `memory` bytes of the manifest are held at a time.

use crate::error::{Corruption, Error, ErrorKind, Result};
use crate::io::file::device_file::DeviceFile;
use crate::io::file::directory::{Access, Directory};
use std::sync::Arc;
use stratakv_format::error::FormatErrorCode;
use stratakv_format::features::Features;
use stratakv_format::manifest::{self as m, ManifestPage};
use stratakv_format::{DeviceIndex, PAGE_BYTES, Unverified};

/// The bytes of one read.
const CHUNK_BYTES: usize = 4 << 20;

/// The devices of a store: index, directory, and the number of manifest copies there.
pub(super) type ManifestDevice = (DeviceIndex, Arc<dyn Directory>, u8);

/// The device and number of a copy.
pub(super) type CopyName = (DeviceIndex, u8);

/// A copy of the manifest that was read.
pub(super) struct ManifestCopy {
    pub(super) device: DeviceIndex,
    pub(super) file: String,
    /// The content without zeros at the end; the header page reads as zeros. Equal copies share it, to save memory.
    pub(super) bytes: Arc<Vec<u8>>,
    /// The length of the file in bytes, in whole pages.
    pub(super) len: usize,
    /// The feature bits of the header.
    pub(super) features: Features,
}

/// Reads every copy. Returns the readable ones, the number of the first batch, and the names of the unreadable ones.
pub(super) fn read_copies(
    devices: &[ManifestDevice],
    store_id: [u8; 16],
    (generation, nonce): (u64, u64),
    mut memory: usize,
) -> Result<(Vec<ManifestCopy>, u64, Vec<CopyName>)> {
    let mut copies = Vec::new();
    let mut first_batch = None;
    let mut unread = Vec::new();
    let mut error = None;
    for (device, directory, copies_there) in devices {
        for copy in 0..*copies_there {
            let name = m::file_name(generation, copy);
            let wanted = (store_id, generation, nonce);
            let like = copies.first().map(|copy: &ManifestCopy| &copy.bytes);
            match read_copy(&**directory, (*device, copy), &name, wanted, like, memory) {
                Ok((read, first)) => {
                    if !like.is_some_and(|like| Arc::ptr_eq(like, &read.bytes)) {
                        memory = memory.saturating_sub(read.bytes.len());
                    }
                    first_batch = first_batch.or(Some(first));
                    copies.push(read);
                }
                // An unreadable copy counts as damaged.
                Err(e) if matches!(e.kind(), ErrorKind::Corruption | ErrorKind::NotFound | ErrorKind::Io) => {
                    unread.push((*device, copy));
                    // The error of an existing copy that cannot be read says more than that of a missing one.
                    if error.as_ref().is_none_or(|before: &Error| before.kind() != ErrorKind::Io) {
                        error = Some(e);
                    }
                }
                Err(e) => return Err(e),
            }
        }
    }
    match (first_batch, error) {
        (Some(first), _) => Ok((copies, first, unread)),
        (None, Some(e)) => {
            let kind = if e.kind() == ErrorKind::Io { ErrorKind::Io } else { ErrorKind::Corruption };
            Err(e.with_kind(kind).during("every copy of the manifest is unusable"))
        }
        (None, None) => Err(Error::new(ErrorKind::Corruption, "open: no device holds a manifest; see kvfsck check")),
    }
}

/// Reads one copy and verifies its header page. Returns it with the number of its first batch.
fn read_copy(
    directory: &dyn Directory,
    (device, copy): (DeviceIndex, u8),
    name: &str,
    (store_id, generation, nonce): ([u8; 16], u64, u64),
    like: Option<&Arc<Vec<u8>>>,
    memory: usize,
) -> Result<(ManifestCopy, u64)> {
    let file = directory.open_file(name, Access::ReadOnly)?;
    let len = file.len()? / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    if len > m::FILE_BYTES_MAX {
        let text = format!("{name} has {len} bytes, above the maximum of {}", m::FILE_BYTES_MAX);
        return Err(Error::new(ErrorKind::Corruption, text));
    }
    let header = directory.read_small(&file, 0, (len as usize).min(PAGE_BYTES))?;
    let corrupt = |expected: String, found: String| {
        Error::corrupt(Corruption {
            code: "manifest-page",
            device: device.0,
            file: name.into(),
            offset: 0,
            len: PAGE_BYTES as u64,
            expected,
            found,
        })
    };
    let page =
        Unverified::<ManifestPage>::at_front(&header, "manifest page").and_then(|page| page.verify()).map_err(|e| {
            match e.code {
                FormatErrorCode::Unsupported => {
                    Error::new(ErrorKind::Unsupported, format!("{name}: written by another version: {e}"))
                }
                _ => corrupt("a manifest header".into(), e.to_string()),
            }
        })?;
    let found = (page.store_id, page.generation.get(), page.nonce.get(), page.device.get(), page.copy);
    if found != (store_id, generation, nonce, device.0, copy) {
        let text = "the header of another store, generation, device or copy";
        return Err(corrupt(format!("the header of generation {generation}"), text.into()));
    }
    let first = page.first_batch.get();
    if first == 0 {
        return Err(corrupt("a first batch of at least 1".into(), "0".into()));
    }
    let features = page.features;
    let (bytes, len) = read_pages(directory, &file, len as usize, like, memory)?;
    Ok((ManifestCopy { device, file: name.into(), bytes, len, features }, first))
}

/// Reads the pages behind the header of a file of `len` bytes. Returns the bytes and the length of the file.
///
/// If they equal `like`, returns that buffer. Otherwise allocates at most `memory` bytes.
fn read_pages(
    directory: &dyn Directory,
    file: &DeviceFile,
    len: usize,
    like: Option<&Arc<Vec<u8>>>,
    memory: usize,
) -> Result<(Arc<Vec<u8>>, usize)> {
    let known = |from: usize, to: usize| like.and_then(|like| like.get(from.min(like.len())..to.min(like.len())));
    let (mut same, mut own, mut at) = (like.is_some(), Vec::new(), PAGE_BYTES.min(len));
    while at < len {
        let chunk = directory.read_small(file, at as u64, (len - at).min(CHUNK_BYTES))?;
        if chunk.is_empty() {
            break;
        }
        let end = at + chunk.len();
        if same {
            let (there, rest) = chunk.split_at(known(at, end).unwrap_or_default().len());
            same = known(at, end).is_some_and(|known| known == there) && is_zero(rest);
            if !same {
                own = known(0, at).unwrap_or_default().to_vec();
            }
        }
        let used = if same { 0 } else { used_bytes(&chunk) };
        if used > 0 {
            let needed = at + used;
            if needed > memory {
                let text = format!(
                    "open: the manifest needs at least {needed} bytes but memory_limit leaves {memory}; \
                     raise memory_limit"
                );
                return Err(Error::new(ErrorKind::MemoryLimit, text));
            }
            own.resize(at, 0);
            own.extend_from_slice(&chunk[..used]);
        }
        at = end;
    }
    match like {
        Some(like) if same && like.len() <= at => return Ok((Arc::clone(like), at)),
        Some(like) if same => own = like[..at].to_vec(),
        _ => {}
    }
    // A batch may end in zeros, so one batch more is kept behind the last used page.
    let batch = m::BATCH_PAGES_MAX as usize * PAGE_BYTES;
    own.truncate(used_bytes(&own));
    own.resize((own.len().max(PAGE_BYTES) + batch).min(at), 0);
    own.shrink_to_fit();
    Ok((Arc::new(own), at))
}

/// Returns the bytes up to the end of the last page that is not all zero.
fn used_bytes(bytes: &[u8]) -> usize {
    let pages = bytes.chunks(PAGE_BYTES).rposition(|page| !is_zero(page)).map_or(0, |last| last + 1);
    (pages * PAGE_BYTES).min(bytes.len())
}

/// Returns whether all bytes are zero. Folds chunks without branches, because most of a manifest file is zero.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(64).all(|chunk| chunk.iter().fold(0, |or, byte| or | byte) == 0)
}
