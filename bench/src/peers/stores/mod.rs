//! The peers, one file each.

pub(super) mod engine;
pub(super) mod files;
pub(super) mod raw;

#[cfg(feature = "peers")]
pub(super) mod fjall;
#[cfg(feature = "peers")]
pub(super) mod foyer;
#[cfg(feature = "peers")]
pub(super) mod lmdb;
#[cfg(feature = "peers")]
pub(super) mod redb;
#[cfg(feature = "peers")]
pub(super) mod rocks;

#[cfg(feature = "peers")]
use super::source::BlockSource;

/// Bytes that a store with a cache of its own may keep: less than a thirtieth of 2 GiB, so that reads are cold.
#[cfg(feature = "peers")]
const CACHE_BYTES: usize = 64 << 20;

/// Returns the key of a block: its number, so that blocks are stored in their order.
#[cfg(feature = "peers")]
fn key(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}

/// Returns whole blocks from `first` on, in a buffer that the next call reuses.
#[cfg(feature = "peers")]
fn blocks<'a>(
    source: &BlockSource,
    buffer: &'a mut Vec<u16>,
    first: u64,
    count: usize,
) -> impl Iterator<Item = (u64, &'a [u8])> {
    use zerocopy::IntoBytes;
    buffer.resize(count * source.block_bytes() / 2, 0);
    source.fill_all(first, buffer);
    (first..).zip(buffer.as_bytes().chunks_exact(source.block_bytes()))
}
