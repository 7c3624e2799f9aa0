//! A model's fingerprint, which sessions and adapters in a store belong to.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use anyhow::{Context, Result};

use super::{files, mapping};
use crate::gguf::GgufHeader;

/// Bytes of a piece of a tensor that is hashed.
const PIECE_BYTES: usize = 4096;
/// Pieces of a tensor that are hashed, from its beginning to its end.
const PIECES: usize = 4;

/// Returns a BLAKE3 hash that identifies the model in a directory or in a GGUF file. Models with the same hash compute
/// the same keys and values.
///
/// - Of a directory it covers `config.json` and every byte of the weights.
/// - Of a GGUF file it covers the header, the length, and four pieces of 4 KiB of each tensor. Hashing all bytes would
///   read the whole model before the first token.
///
/// # Errors
/// Fails if a file is missing, malformed or cannot be read.
pub fn fingerprint(model: &Path) -> Result<[u8; 32]> {
    if model.is_file() { of_gguf(model) } else { of_directory(model) }
}

fn of_directory(dir: &Path) -> Result<[u8; 32]> {
    let mut hasher = blake3::Hasher::new();
    for path in std::iter::once(dir.join("config.json")).chain(files(dir)?.0) {
        let mut file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        // Each file's length is hashed before it, so that bytes cannot move from one file to the next.
        hasher.update(&file.metadata()?.len().to_le_bytes());
        std::io::copy(&mut file, &mut hasher).with_context(|| format!("cannot read {}", path.display()))?;
    }
    Ok(*hasher.finalize().as_bytes())
}

fn of_gguf(path: &Path) -> Result<[u8; 32]> {
    let place = || format!("cannot read weights from {}", path.display());
    let bytes = mapping::map(path)?;
    let header = GgufHeader::parse(&bytes).with_context(place)?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(bytes.len() as u64).to_le_bytes()).update(&bytes[..header.data_start()]);
    // Reads of the mapping would bring the pages around each piece into memory.
    let mut file = File::open(path).with_context(place)?;
    let mut piece = vec![0; PIECE_BYTES];
    for tensor in header.tensors().values() {
        let last = tensor.bytes.len().saturating_sub(PIECE_BYTES);
        for index in 0..PIECES {
            let begin = tensor.bytes.start + last / (PIECES - 1) * index;
            let piece = &mut piece[..PIECE_BYTES.min(tensor.bytes.end - begin)];
            file.seek(SeekFrom::Start(begin as u64)).with_context(place)?;
            file.read_exact(piece).with_context(place)?;
            hasher.update(piece);
        }
    }
    Ok(*hasher.finalize().as_bytes())
}
