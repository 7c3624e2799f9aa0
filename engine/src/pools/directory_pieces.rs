//! The directory of one head, or of all heads, as pieces of at most a megabyte.

use super::layer_clusters::HeadClusters;
use crate::error::{Error, ErrorKind, Result};
use stratakv_format::pool::{
    CLUSTER_PIECE_BYTES_MAX, ClusterParts, ClusterRecord, DIRECTION_RISING, DirectoryFields, DirectoryHeader,
    PageGeometry, PageRun,
};
use stratakv_format::{FormatError, FrameId};
use zerocopy::little_endian::{U16, U32};

/// Where a page was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PagePlace {
    pub(super) frame: FrameId,
    /// Counted in pages of 4096 bytes from the start of the frame.
    pub(super) page: u32,
    pub(super) valid: u32,
    pub(super) checksum: u64,
}

/// Returns the pieces of a directory: those with clusters, then those with positions. `pages` are the pages of the
/// clusters, in order.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: the description of the method is too long.
pub(super) fn encode(
    fields: &DirectoryFields<'_>,
    list: &HeadClusters,
    pages: &[PagePlace],
    geometry: &PageGeometry,
) -> Result<Vec<Vec<u8>>> {
    let mut out = Vec::new();
    let mut piece = ClusterPiece::new(fields, 0);
    let mut left = pages;
    for members in list.clusters.iter() {
        let (own, rest) = left.split_at(members.len().div_ceil(geometry.entries).min(left.len()));
        left = rest;
        if !piece.has_room(own) {
            let first = piece.first + piece.clusters.len() as u32;
            out.push(std::mem::replace(&mut piece, ClusterPiece::new(fields, first)).finish()?);
        }
        piece.push(members.len() as u32, own, geometry);
    }
    out.push(piece.finish()?);
    positions(fields, list, &mut out)?;
    Ok(out)
}

/// Appends the pieces with the tokens of the entries.
fn positions(fields: &DirectoryFields<'_>, list: &HeadClusters, out: &mut Vec<Vec<u8>>) -> Result<()> {
    let (mut first, mut bytes) = (0, fixed_bytes(fields));
    let mut own: Vec<&[u32]> = Vec::new();
    for members in list.clusters.iter() {
        let more = (1 + members.len()) * size_of::<u32>();
        if bytes + more > CLUSTER_PIECE_BYTES_MAX as usize && !own.is_empty() {
            out.push(fields.encode_positions(first, &own).map_err(refused)?);
            first += own.len() as u32;
            (own, bytes) = (Vec::new(), fixed_bytes(fields));
        }
        own.push(members);
        bytes += more;
    }
    out.push(fields.encode_positions(first, &own).map_err(refused)?);
    Ok(())
}

/// Returns the most bytes of a piece that do not depend on its clusters: header, method, padding of tables.
fn fixed_bytes(fields: &DirectoryFields<'_>) -> usize {
    size_of::<DirectoryHeader>() + fields.method.len().next_multiple_of(8) + 16
}

fn refused(e: FormatError) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("store clusters: {e}"))
}

/// A piece with clusters that is being filled.
struct ClusterPiece<'a> {
    fields: &'a DirectoryFields<'a>,
    first: u32,
    frames: Vec<u64>,
    clusters: Vec<ClusterParts>,
    bytes: usize,
}

impl<'a> ClusterPiece<'a> {
    fn new(fields: &'a DirectoryFields<'a>, first: u32) -> Self {
        Self { fields, first, frames: Vec::new(), clusters: Vec::new(), bytes: fixed_bytes(fields) }
    }

    /// Returns whether a cluster of these pages fits, in the worst case. The first one always does.
    fn has_room(&self, pages: &[PagePlace]) -> bool {
        let most = most_bytes(pages);
        self.clusters.is_empty() || self.bytes + most <= CLUSTER_PIECE_BYTES_MAX as usize
    }

    fn push(&mut self, entries: u32, pages: &[PagePlace], geometry: &PageGeometry) {
        self.bytes += most_bytes(pages);
        let mut runs: Vec<PageRun> = Vec::new();
        for (nth, page) in pages.iter().enumerate() {
            let frame = self.frame_index(page.frame);
            let before = nth.checked_sub(1).map(|before| pages[before]);
            let continues = before
                .is_some_and(|before| before.frame == page.frame && before.page + geometry.disk_pages() == page.page);
            match runs.last_mut() {
                Some(run) if continues && run.pages.get() < u16::MAX => {
                    run.pages.set(run.pages.get() + 1);
                    run.last_entries = page.valid as u8;
                }
                _ => runs.push(PageRun {
                    frame: U32::new(frame),
                    page: U32::new(page.page),
                    pages: U16::new(1),
                    direction: DIRECTION_RISING,
                    last_entries: page.valid as u8,
                    reserved: [0; 4],
                }),
            }
        }
        self.clusters.push(ClusterParts {
            entries,
            variance: 0.0,
            radius: 0.0,
            runs,
            checksums: pages.iter().map(|page| page.checksum).collect(),
            representatives: Vec::new(),
        });
    }

    /// Returns the index of a frame in the piece's table. Pages of one cluster may be in frames on several devices, so
    /// the frame is among the last ones.
    fn frame_index(&mut self, frame: FrameId) -> u32 {
        let at = self.frames.iter().rposition(|known| *known == frame.0).unwrap_or_else(|| {
            self.frames.push(frame.0);
            self.frames.len() - 1
        });
        at as u32
    }

    fn finish(self) -> Result<Vec<u8>> {
        self.fields.encode_clusters(self.first, &self.frames, &self.clusters).map_err(refused)
    }
}

/// Returns the most bytes that a cluster of these pages takes in a piece. A run ends with a frame, or after 65,535
/// pages, of which a cluster has at most two.
fn most_bytes(pages: &[PagePlace]) -> usize {
    let frames = pages.chunk_by(|one, other| one.frame == other.frame).count();
    let runs = frames + pages.len() / usize::from(u16::MAX);
    size_of::<ClusterRecord>() + runs * size_of::<PageRun>() + (frames + pages.len()) * size_of::<u64>()
}
