//! [`StoredList`]: where the entries of one head, or of all heads, are in pages.
//!
//! A directory is checked in two steps. `DirectoryPiece` checks each piece by itself. [`StoredList::read`] checks that
//! the pieces are complete and agree with each other. A directory that breaks a rule is dropped as a whole.

use stratakv_format::FrameId;
use stratakv_format::layout::LayerGeometry;
use stratakv_format::pool::{
    Cluster, ClusterPage, ClusterTable, DirectoryPiece, EntryHeads, PAGE_ENTRIES_MAX, PageGeometry, PieceTables,
};

/// The bits of a place that count slots. The others count pages.
const SLOT_BITS: u32 = (PAGE_ENTRIES_MAX as u32).trailing_zeros();
/// The most pages of a list.
const PAGES_MAX: usize = 1 << (u32::BITS - SLOT_BITS);

/// A page of stored clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoredPage {
    /// The index of its frame among those of the layer.
    pub(crate) frame: u32,
    /// Counted in pages of 4096 bytes from the start of the frame.
    pub(crate) page: u32,
    /// The valid entries, which are part of the identity of the checksum.
    pub(crate) valid: u32,
    pub(crate) checksum: u64,
}

/// The pages of one directory, and where each token is in them.
#[derive(Debug)]
pub(crate) struct StoredList {
    pub(super) heads: EntryHeads,
    pub(super) geometry: PageGeometry,
    /// In the order of storage.
    pub(super) pages: Vec<StoredPage>,
    /// The index in `places` of the first place of each token, and the end.
    starts: Vec<u32>,
    /// Page and slot of each entry, token after token.
    places: Vec<u32>,
    /// True if some token has several places.
    pub(super) has_replicas: bool,
}

/// The frames of a layer that directories name. A frame that is gone, or that the sequence does not refer to, is left
/// out.
pub(super) struct FrameTable<'a> {
    pub(super) frames: Vec<FrameId>,
    /// Returns the pages of 4096 bytes of a derived frame of the sequence, and the end of its tokens.
    known: &'a dyn Fn(FrameId) -> Option<(u32, u64)>,
    /// The frame that was looked up last. Neighbouring pages are often in one frame.
    last: Option<(FrameId, Option<NamedFrame>)>,
}

/// A frame of a [`FrameTable`].
#[derive(Clone, Copy)]
struct NamedFrame {
    /// Its index in the table.
    index: u32,
    /// Its pages of 4096 bytes.
    pages: u32,
    token_end: u64,
}

impl<'a> FrameTable<'a> {
    /// Returns a table that begins with `frames`.
    pub(super) fn new(frames: Vec<FrameId>, known: &'a dyn Fn(FrameId) -> Option<(u32, u64)>) -> Self {
        Self { frames, known, last: None }
    }

    fn find(&mut self, frame: FrameId) -> Option<NamedFrame> {
        if let Some((_, found)) = self.last.filter(|(last, _)| *last == frame) {
            return found;
        }
        let found = (self.known)(frame).map(|(pages, token_end)| {
            let index = self.frames.iter().rposition(|known| *known == frame).unwrap_or_else(|| {
                self.frames.push(frame);
                self.frames.len() - 1
            });
            NamedFrame { index: index as u32, pages, token_end }
        });
        self.last = Some((frame, found));
        found
    }
}

/// A page of a cluster with the tokens of its entries.
type PageEntries<'a> = (ClusterPage, FrameId, &'a [u32]);

impl StoredList {
    /// Reads a directory. `pieces` are all of its pieces, in the order of their frame. Entries at or beyond `end` are
    /// passed over.
    ///
    /// # Errors
    /// What is wrong with the directory.
    pub(super) fn read(
        pieces: &[DirectoryPiece<'_>],
        layer: &LayerGeometry,
        (dtype, end): (stratakv_format::DType, u64),
        frames: &mut FrameTable<'_>,
    ) -> Result<Self, String> {
        let Some(first) = pieces.first() else { return Err("a directory without pieces".into()) };
        check(pieces)?;
        let geometry = PageGeometry::new(layer, dtype, first.heads());
        let tokens: Vec<u32> = positions(pieces).flatten().map(|token| token.get()).collect();
        let sizes = positions(pieces).map(<[_]>::len);
        let mut list = Self {
            heads: first.heads(),
            geometry,
            pages: Vec::new(),
            starts: Vec::new(),
            places: Vec::new(),
            has_replicas: false,
        };
        let mut found: Vec<(u32, u32)> = Vec::with_capacity(tokens.len());
        let mut left = &tokens[..];
        for ((table, cluster), size) in clusters(pieces).zip(sizes) {
            let (own, rest) = left.split_at(size);
            left = rest;
            for page in with_entries(table, &cluster, own) {
                list.add(page, end, frames, &mut found)?;
            }
        }
        list.index(&found, first.header().tokens.get().min(end));
        Ok(list)
    }

    /// Adds a page and the places of its entries.
    fn add(
        &mut self,
        (page, frame, tokens): PageEntries<'_>,
        end: u64,
        frames: &mut FrameTable<'_>,
        found: &mut Vec<(u32, u32)>,
    ) -> Result<(), String> {
        let Some(NamedFrame { index, pages, token_end }) = frames.find(frame) else { return Ok(()) };
        if page.page + self.geometry.disk_pages() > pages {
            return Err(format!("page {} of frame {frame}, which has {pages} pages", page.page));
        }
        let number = self.pages.len();
        if number >= PAGES_MAX {
            return Err(format!("more than {PAGES_MAX} pages"));
        }
        let own = (0..).zip(tokens).filter(|(_, token)| u64::from(**token) < end.min(token_end));
        found.extend(own.map(|(slot, token): (u32, _)| (*token, (number as u32) << SLOT_BITS | slot)));
        let ClusterPage { page, valid, checksum, .. } = page;
        self.pages.push(StoredPage { frame: index, page, valid, checksum });
        Ok(())
    }

    /// Sorts places by token. `found` has them in the order of pages and slots.
    fn index(&mut self, found: &[(u32, u32)], tokens: u64) {
        let tokens = tokens as usize;
        let known = || found.iter().filter(|(token, _)| (*token as usize) < tokens);
        self.starts = vec![0; tokens + 1];
        known().for_each(|(token, _)| self.starts[*token as usize + 1] += 1);
        self.has_replicas = self.starts.iter().any(|count| *count > 1);
        (0..tokens).for_each(|at| self.starts[at + 1] += self.starts[at]);
        self.places = vec![0; self.starts[tokens] as usize];
        let mut next = self.starts.clone();
        for (token, place) in known() {
            let at = &mut next[*token as usize];
            self.places[*at as usize] = *place;
            *at += 1;
        }
        self.pages.shrink_to_fit();
    }

    /// Returns the pages and slots that hold a token.
    pub(super) fn places(&self, token: u32) -> impl ExactSizeIterator<Item = (u32, u8)> + '_ {
        let at = token as usize;
        let range = match (self.starts.get(at), self.starts.get(at + 1)) {
            (Some(start), Some(end)) => *start as usize..*end as usize,
            _ => 0..0,
        };
        let slot = (1 << SLOT_BITS) - 1;
        self.places[range].iter().map(move |place| (place >> SLOT_BITS, (place & slot) as u8))
    }

    /// Returns the end of the tokens that it covers.
    pub(super) fn tokens(&self) -> u32 {
        self.starts.len().saturating_sub(1) as u32
    }

    /// Returns the number of entries in pages.
    pub(super) fn entries(&self) -> usize {
        self.places.len()
    }

    /// Returns the bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        self.pages.len() * size_of::<StoredPage>() + (self.starts.len() + self.places.len()) * size_of::<u32>()
    }
}

/// Returns the most bytes that a directory with these entries and tokens takes while it is read, and later.
pub(super) fn bytes_for(entries: u64, tokens: u64) -> u64 {
    entries.saturating_mul(24).saturating_add(tokens.saturating_mul(8))
}

/// Returns the clusters of all pieces, each with its table.
fn clusters<'a>(pieces: &'a [DirectoryPiece<'a>]) -> impl Iterator<Item = (&'a ClusterTable<'a>, Cluster<'a>)> {
    let tables = pieces.iter().filter_map(|piece| match piece.tables() {
        PieceTables::Clusters(table) => Some(table),
        PieceTables::Positions(_) => None,
    });
    tables.flat_map(|table| table.clusters().map(move |cluster| (table, cluster)))
}

/// Returns the tokens of the entries of each cluster.
fn positions<'a>(
    pieces: &'a [DirectoryPiece<'a>],
) -> impl Iterator<Item = &'a [zerocopy::little_endian::U32]> + use<'a> {
    let tables = pieces.iter().filter_map(|piece| match piece.tables() {
        PieceTables::Positions(table) => Some(table),
        PieceTables::Clusters(_) => None,
    });
    tables.flat_map(|table| table.clusters())
}

/// Returns the pages of a cluster, each with the tokens of its entries. The last tokens may be in no page.
fn with_entries<'a>(
    table: &'a ClusterTable<'a>,
    cluster: &Cluster<'a>,
    mut tokens: &'a [u32],
) -> impl Iterator<Item = PageEntries<'a>> {
    cluster.pages().map(move |page| {
        let (own, rest) = tokens.split_at(tokens.len().min(page.valid as usize));
        tokens = rest;
        // The piece was checked, so the index is in its table.
        let frame = table.frames().get(page.frame).map_or(0, |frame| frame.get());
        (page, FrameId(frame), own)
    })
}

/// Checks that the pieces of a directory are complete and agree with each other.
fn check(pieces: &[DirectoryPiece<'_>]) -> Result<(), String> {
    let header = pieces[0].header();
    let (mut clusters, mut entries) = ([0_u32; 2], [0_u64; 2]);
    let mut sizes: [Vec<usize>; 2] = [Vec::new(), Vec::new()];
    for piece in pieces {
        let part = match piece.tables() {
            PieceTables::Clusters(_) if clusters[1] > 0 => return Err("clusters follow positions".into()),
            PieceTables::Clusters(table) => {
                sizes[0].extend(table.clusters().map(|cluster| cluster.record.entries.get() as usize));
                0
            }
            PieceTables::Positions(table) => {
                sizes[1].extend(table.clusters().map(<[_]>::len));
                1
            }
        };
        let (first, next) = (piece.header().first_cluster.get(), clusters[part]);
        if first != next {
            return Err(format!("a piece starts with cluster {first}, not {next}"));
        }
        clusters[part] += piece.header().count.get();
        entries[part] += u64::from(piece.header().piece_entries.get());
    }
    if clusters != [header.clusters.get(); 2] || entries != [header.entries.get(); 2] || sizes[0] != sizes[1] {
        return Err(format!("its parts have {clusters:?} clusters and {entries:?} entries"));
    }
    Ok(())
}

#[cfg(test)]
impl StoredList {
    /// Returns the list of these pages, each with the tokens of its slots.
    pub(super) fn of_pages(
        (heads, geometry): (EntryHeads, PageGeometry),
        pages: &[(StoredPage, Vec<u32>)],
        tokens: u64,
    ) -> Self {
        let places = pages.iter().zip(0_u32..).flat_map(|((_, own), page)| {
            own.iter().zip(0..).map(move |(token, slot): (&u32, u32)| (*token, page << SLOT_BITS | slot))
        });
        let found: Vec<(u32, u32)> = places.collect();
        let pages = pages.iter().map(|(page, _)| *page).collect();
        let mut list = Self { heads, geometry, pages, starts: Vec::new(), places: Vec::new(), has_replicas: false };
        list.index(&found, tokens);
        list
    }
}
