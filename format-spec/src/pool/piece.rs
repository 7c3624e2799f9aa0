//! A piece of a directory that was checked.
//!
//! A piece is checked in this order:
//!
//! 1. Version and part. They come first, because they give the other fields their meaning.
//! 2. The fields of the header, against the layer and against each other.
//! 3. The lengths of all tables, which must add up to the length of the piece.
//! 4. Every cluster, run, representative and position.
//!
//! Nothing is allocated, and no number from the bytes is used before it was compared with its bound.

use super::directory::{
    CLUSTER_PIECE_BYTES_MAX, CLUSTERS_MAX, ClusterRecord, DIRECTION_FALLING, DIRECTORY_VERSION, DirectoryHeader,
    MEMBERSHIPS_MAX, METHOD_BYTES_MAX, PART_CLUSTERS, PART_POSITIONS, PageRun, REPRESENTATIVE_CENTROIDS,
    REPRESENTATIVE_MEDOIDS, REPRESENTATIVE_NONE, REPRESENTATIVES_MAX, SET_TOKENS_MAX,
};
use super::page::{EntryHeads, PageGeometry};
use crate::error::FormatError;
use crate::frame::TOTAL_PAGES_MAX;
use crate::ids::NUMBER_MAX;
use crate::layout::{LayerGeometry, Layout};
use crate::verify::check_zeros;
use core::mem::offset_of;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// A piece of a directory that was checked.
#[derive(Clone, Copy, Debug)]
pub struct DirectoryPiece<'a> {
    header: &'a DirectoryHeader,
    heads: EntryHeads,
    method: &'a str,
    tables: PieceTables<'a>,
}

/// The tables of a piece.
#[derive(Clone, Copy, Debug)]
pub enum PieceTables<'a> {
    /// Of [`PART_CLUSTERS`].
    Clusters(ClusterTable<'a>),
    /// Of [`PART_POSITIONS`].
    Positions(PositionTable<'a>),
}

/// The clusters of a piece.
#[derive(Clone, Copy, Debug)]
pub struct ClusterTable<'a> {
    frames: &'a [U64],
    clusters: &'a [ClusterRecord],
    runs: &'a [PageRun],
    checksums: &'a [U64],
    representatives: &'a [u8],
    geometry: PageGeometry,
}

/// The positions of the entries of a piece.
#[derive(Clone, Copy, Debug)]
pub struct PositionTable<'a> {
    sizes: &'a [U32],
    positions: &'a [U32],
}

/// A cluster of a piece.
#[derive(Clone, Copy, Debug)]
pub struct Cluster<'a> {
    /// Its size and statistics.
    pub record: &'a ClusterRecord,
    /// Its runs, in the order of its entries.
    pub runs: &'a [PageRun],
    /// The checksums of its pages, in the order of its entries.
    pub checksums: &'a [U64],
    geometry: PageGeometry,
}

/// A page of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterPage {
    /// The index of its frame in the piece's table of frames.
    pub frame: usize,
    /// The page in that frame, in pages of 4096 bytes.
    pub page: u32,
    /// The valid entries.
    pub valid: u32,
    /// The stored checksum.
    pub checksum: u64,
}

type Checked = Result<(), FormatError>;

fn within(field: &'static str, offset: usize, value: u64, low: u64, high: u64) -> Checked {
    let bound = if value < low { low } else { high };
    if value < low || value > high { Err(FormatError::range(field, offset, bound, value)) } else { Ok(()) }
}

impl<'a> DirectoryPiece<'a> {
    /// Checks a piece of the directory of a layer. `bytes` are all bytes of its extent.
    ///
    /// # Errors
    /// The version is unknown, or a field or table contradicts the layer or the other fields.
    pub fn verify(bytes: &'a [u8], layout: &Layout, layer: u16) -> Result<Self, FormatError> {
        let Ok((header, rest)) = DirectoryHeader::ref_from_prefix(bytes) else {
            return Err(FormatError::truncated("directory piece", size_of::<DirectoryHeader>(), bytes.len()));
        };
        let version = u64::from(header.version.get());
        if version != u64::from(DIRECTORY_VERSION) {
            return Err(FormatError::unsupported("directory version", 0, u64::from(DIRECTORY_VERSION), version));
        }
        within("directory bytes", 0, bytes.len() as u64, 0, u64::from(CLUSTER_PIECE_BYTES_MAX))?;
        let geometry = layout.layers.get(usize::from(layer)).filter(|layer| layer.has_kv() && layer.window.is_none());
        let Some(geometry) = geometry else {
            return Err(FormatError::range("directory layer", 0, layout.layers.len() as u64, u64::from(layer)));
        };
        let Some(heads) = EntryHeads::from_code(header.head.get(), geometry) else {
            return Err(FormatError::range("head", 4, u64::from(geometry.kv_heads), u64::from(header.head.get())));
        };
        header.check(u64::from(layout.group_tokens))?;
        let mut reader = PieceReader { rest, base: size_of::<DirectoryHeader>() };
        header.check_lengths(geometry, heads, bytes.len())?;
        let method = reader.bytes(u64::from(header.method_bytes.get()))?;
        let method =
            core::str::from_utf8(method).map_err(|_| FormatError::range("method", 88, 0, method.len() as u64))?;
        let tables = if header.part.get() == PART_CLUSTERS {
            let page = PageGeometry::new(geometry, layout.dtype, heads);
            let each = header.representative_bytes(geometry, heads);
            PieceTables::Clusters(ClusterTable::read(header, &mut reader, page, each)?)
        } else {
            PieceTables::Positions(PositionTable::read(header, &mut reader)?)
        };
        Ok(Self { header, heads, method, tables })
    }

    /// Returns the header.
    #[must_use]
    pub fn header(&self) -> &'a DirectoryHeader {
        self.header
    }

    /// Returns the heads of its entries.
    #[must_use]
    pub fn heads(&self) -> EntryHeads {
        self.heads
    }

    /// Returns the description of the method.
    #[must_use]
    pub fn method(&self) -> &'a str {
        self.method
    }

    /// Returns the tables.
    #[must_use]
    pub fn tables(&self) -> &PieceTables<'a> {
        &self.tables
    }

    /// Returns whether two pieces of one layer are of the same directory: all fields that a piece repeats are equal.
    #[must_use]
    pub fn is_of_same_directory(&self, other: &Self) -> bool {
        let own = |piece: &Self| {
            let h = piece.header;
            let numbers = (h.set, h.generation, h.seed, h.tokens, h.entries, h.clusters, h.method_version);
            (numbers, h.memberships, h.representative, h.representatives, h.head)
        };
        own(self) == own(other) && self.method == other.method
    }
}

impl DirectoryHeader {
    /// Checks the fields against their limits and against each other.
    fn check(&self, group_tokens: u64) -> Checked {
        let part = self.part.get();
        within("part", 2, u64::from(part), u64::from(PART_CLUSTERS), u64::from(PART_POSITIONS))?;
        let method_bytes = u64::from(self.method_bytes.get());
        within("method bytes", offset_of!(Self, method_bytes), method_bytes, 1, METHOD_BYTES_MAX as u64)?;
        within("set", offset_of!(Self, set), self.set.get(), 1, NUMBER_MAX)?;
        within("directory generation", offset_of!(Self, generation), self.generation.get(), 1, NUMBER_MAX)?;
        let tokens = self.tokens.get();
        within("covered tokens", offset_of!(Self, tokens), tokens, 1, SET_TOKENS_MAX)?;
        if !tokens.is_multiple_of(group_tokens) {
            return Err(FormatError::range("covered tokens", offset_of!(Self, tokens), group_tokens, tokens));
        }
        let memberships = u64::from(self.memberships.get());
        within("memberships", offset_of!(Self, memberships), memberships, 1, u64::from(MEMBERSHIPS_MAX))?;
        within("entries", offset_of!(Self, entries), self.entries.get(), tokens, tokens * memberships)?;
        let (clusters, entries) = (u64::from(self.clusters.get()), self.entries.get());
        within("clusters", offset_of!(Self, clusters), clusters, 1, entries.min(u64::from(CLUSTERS_MAX)))?;
        let (kind, each) = (self.representative.get(), self.representatives.get());
        let most = if kind == REPRESENTATIVE_NONE { 0 } else { REPRESENTATIVES_MAX };
        within("representative", offset_of!(Self, representative), u64::from(kind), 0, 2)?;
        let least = u64::from(kind != REPRESENTATIVE_NONE);
        within("representatives", offset_of!(Self, representatives), u64::from(each), least, u64::from(most))?;
        check_zeros(&self.reserved.get().to_le_bytes(), "directory piece", offset_of!(Self, reserved))?;
        let (first, count) = (u64::from(self.first_cluster.get()), u64::from(self.count.get()));
        within("clusters of the piece", offset_of!(Self, count), count, 1, clusters.saturating_sub(first))?;
        let own = u64::from(self.piece_entries.get());
        within("entries of the piece", offset_of!(Self, piece_entries), own, count, entries)?;
        if part == PART_POSITIONS {
            let tables = [self.frames, self.runs, self.pages].map(|field| u64::from(field.get()));
            let other = tables.into_iter().find(|count| *count != 0).unwrap_or(0);
            return within("tables of positions", offset_of!(Self, frames), other, 0, 0);
        }
        Ok(())
    }

    /// Checks that the tables take exactly `bytes` together with the header.
    fn check_lengths(&self, layer: &LayerGeometry, heads: EntryHeads, bytes: usize) -> Checked {
        let own = |field: U32, size: usize| (u64::from(field.get()) * size as u64).next_multiple_of(8);
        let tables = if self.part.get() == PART_CLUSTERS {
            let representatives = u64::from(self.count.get()) * self.representative_bytes(layer, heads);
            own(self.frames, size_of::<U64>())
                + own(self.count, size_of::<ClusterRecord>())
                + own(self.runs, size_of::<PageRun>())
                + own(self.pages, size_of::<U64>())
                + representatives.next_multiple_of(8)
        } else {
            own(self.count, size_of::<U32>()) + own(self.piece_entries, size_of::<U32>())
        };
        let method = u64::from(self.method_bytes.get()).next_multiple_of(8);
        let expected = size_of::<Self>() as u64 + method + tables;
        if expected != bytes as u64 {
            return Err(FormatError::range("directory tables", 0, expected, bytes as u64));
        }
        Ok(())
    }

    /// Returns the bytes of the representatives of a cluster.
    #[must_use]
    pub fn representative_bytes(&self, layer: &LayerGeometry, heads: EntryHeads) -> u64 {
        let each = match self.representative.get() {
            REPRESENTATIVE_CENTROIDS => heads.count(layer) as u64 * u64::from(layer.key_dim) * 2,
            REPRESENTATIVE_MEDOIDS => 8,
            _ => 0,
        };
        u64::from(self.representatives.get()) * each
    }
}

/// Reads tables that are padded with zeros to a multiple of 8. `base` is the offset of `rest` in the piece.
struct PieceReader<'a> {
    rest: &'a [u8],
    base: usize,
}

impl<'a> PieceReader<'a> {
    /// Returns a table of `bytes` bytes.
    fn bytes(&mut self, bytes: u64) -> Result<&'a [u8], FormatError> {
        // A length that does not fit is larger than what is left.
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX / 2);
        let padded = bytes.next_multiple_of(8);
        let Some((table, rest)) = self.rest.split_at_checked(padded) else {
            return Err(FormatError::truncated("directory table", padded, self.rest.len()));
        };
        check_zeros(&table[bytes..], "directory table", self.base + bytes)?;
        self.rest = rest;
        self.base += padded;
        Ok(&table[..bytes])
    }

    /// Returns a table of `count` structures.
    fn table<T>(&mut self, count: U32) -> Result<&'a [T], FormatError>
    where
        T: FromBytes + KnownLayout + Immutable + Unaligned,
    {
        let bytes = self.bytes(u64::from(count.get()) * size_of::<T>() as u64)?;
        <[T]>::ref_from_bytes(bytes).map_err(|_| FormatError::truncated("directory table", 0, bytes.len()))
    }
}

impl<'a> ClusterTable<'a> {
    /// Reads and checks the tables of [`PART_CLUSTERS`] behind the description of the method.
    ///
    /// The representatives of a cluster take `each` bytes.
    fn read(
        header: &DirectoryHeader,
        reader: &mut PieceReader<'a>,
        geometry: PageGeometry,
        each: u64,
    ) -> Result<Self, FormatError> {
        let frames = reader.table(header.frames)?;
        let clusters_at = reader.base;
        let clusters = reader.table(header.count)?;
        let runs_at = reader.base;
        let runs = reader.table(header.runs)?;
        let checksums = reader.table(header.pages)?;
        let representatives_at = reader.base;
        let representatives = reader.bytes(u64::from(header.count.get()) * each)?;
        let table = Self { frames, clusters, runs, checksums, representatives, geometry };
        table.check_runs(runs_at)?;
        table.check_clusters(clusters_at, u64::from(header.piece_entries.get()))?;
        table.check_representatives(header, representatives_at)?;
        Ok(table)
    }

    fn check_runs(&self, base: usize) -> Checked {
        let mut pages = 0;
        for (index, run) in self.runs.iter().enumerate() {
            let at = base + index * size_of::<PageRun>();
            let frames = self.frames.len() as u64;
            if u64::from(run.frame.get()) >= frames {
                return Err(FormatError::range("frame of a run", at, frames, u64::from(run.frame.get())));
            }
            let own = u64::from(run.pages.get());
            let disk_pages = own * u64::from(self.geometry.disk_pages());
            within("pages of a run", at + 8, own, 1, u64::from(TOTAL_PAGES_MAX))?;
            let last = u64::from(TOTAL_PAGES_MAX).saturating_sub(disk_pages);
            within("page of a run", at + 4, u64::from(run.page.get()), 1, last)?;
            within("direction", at + 10, u64::from(run.direction), 0, u64::from(DIRECTION_FALLING))?;
            within("entries of a page", at + 11, u64::from(run.last_entries), 1, self.geometry.entries as u64)?;
            check_zeros(&run.reserved, "run", at + 12)?;
            pages += own;
        }
        let found = self.checksums.len() as u64;
        if pages != found {
            return Err(FormatError::range("pages of the piece", offset_of!(DirectoryHeader, pages), pages, found));
        }
        Ok(())
    }

    fn check_clusters(&self, base: usize, piece_entries: u64) -> Checked {
        let (mut entries, mut left) = (0, self.runs);
        for (index, cluster) in self.clusters.iter().enumerate() {
            let at = base + index * size_of::<ClusterRecord>();
            let (own, runs) = (u64::from(cluster.entries.get()), cluster.runs.get() as usize);
            within("entries of a cluster", at, own, 1, piece_entries)?;
            let Some((runs, rest)) = left.split_at_checked(runs) else {
                return Err(FormatError::range("runs of a cluster", at + 4, left.len() as u64, runs as u64));
            };
            let paged: u64 = runs.iter().map(|run| run.entries(&self.geometry)).sum();
            within("entries in pages", at, paged, 0, own)?;
            for (field, offset, bits) in [("variance", 8, cluster.variance), ("radius", 12, cluster.radius)] {
                let value = f32::from_bits(bits.get());
                if !(value.is_finite() && value >= 0.0 && bits.get() >> 31 == 0) {
                    return Err(FormatError::range(field, at + offset, 0, u64::from(bits.get())));
                }
            }
            entries += own;
            left = rest;
        }
        let offset = offset_of!(DirectoryHeader, runs);
        within("runs of the piece", offset, left.len() as u64, 0, 0)?;
        within("entries of the piece", offset_of!(DirectoryHeader, piece_entries), piece_entries, entries, entries)
    }

    fn check_representatives(&self, header: &DirectoryHeader, base: usize) -> Checked {
        let bytes = self.representatives;
        match header.representative.get() {
            REPRESENTATIVE_CENTROIDS => {
                // The exponent of a number that is not finite is all ones.
                let words = bytes.chunks_exact(2);
                let mut bits = words.map(|word| u16::from_le_bytes([word[0], word[1]]));
                let bad = bits.position(|bits| bits & 0x7c00 == 0x7c00);
                bad.map_or(Ok(()), |at| Err(FormatError::range("centroid", base + at * 2, 0, 1)))
            }
            REPRESENTATIVE_MEDOIDS => {
                let tokens = header.tokens.get();
                let medoids = <[U64]>::ref_from_bytes(bytes).unwrap_or_default();
                let bad = medoids.iter().enumerate().find(|(_, token)| token.get() >= tokens);
                bad.map_or(Ok(()), |(at, token)| Err(FormatError::range("medoid", base + at * 8, tokens, token.get())))
            }
            _ => Ok(()),
        }
    }

    /// Returns the ids of the frames that the runs name.
    #[must_use]
    pub fn frames(&self) -> &'a [U64] {
        self.frames
    }

    /// Returns the representatives of all clusters of the piece, cluster after cluster: f16 elements of centroids
    /// `[representatives, heads, key_dim]`, or 8 bytes per medoid.
    #[must_use]
    pub fn representatives(&self) -> &'a [u8] {
        self.representatives
    }

    /// Returns the geometry of the pages.
    #[must_use]
    pub fn geometry(&self) -> PageGeometry {
        self.geometry
    }

    /// Returns the clusters in order.
    pub fn clusters(&self) -> impl Iterator<Item = Cluster<'a>> + use<'a> {
        let (mut runs, mut checksums, geometry) = (self.runs, self.checksums, self.geometry);
        self.clusters.iter().map(move |record| {
            let (own, rest) = runs.split_at(record.runs.get() as usize);
            let pages = own.iter().map(|run| usize::from(run.pages.get())).sum();
            let (sums, others) = checksums.split_at(pages);
            (runs, checksums) = (rest, others);
            Cluster { record, runs: own, checksums: sums, geometry }
        })
    }
}

impl<'a> PositionTable<'a> {
    /// Reads and checks the tables of [`PART_POSITIONS`] behind the description of the method.
    fn read(header: &DirectoryHeader, reader: &mut PieceReader<'a>) -> Result<Self, FormatError> {
        let sizes_at = reader.base;
        let sizes: &[U32] = reader.table(header.count)?;
        let positions_at = reader.base;
        let positions: &[U32] = reader.table(header.piece_entries)?;
        if let Some(at) = sizes.iter().position(|size| size.get() == 0) {
            return Err(FormatError::range("entries of a cluster", sizes_at + at * 4, 1, 0));
        }
        let sum: u64 = sizes.iter().map(|size| u64::from(size.get())).sum();
        let offset = offset_of!(DirectoryHeader, piece_entries);
        within("entries of the piece", offset, positions.len() as u64, sum, sum)?;
        let tokens = header.tokens.get();
        let bad = positions.iter().enumerate().find(|(_, token)| u64::from(token.get()) >= tokens);
        if let Some((at, token)) = bad {
            return Err(FormatError::range("position", positions_at + at * 4, tokens, u64::from(token.get())));
        }
        Ok(Self { sizes, positions })
    }

    /// Returns the tokens of the entries of each cluster, in order.
    pub fn clusters(&self) -> impl Iterator<Item = &'a [U32]> + use<'a> {
        let mut left = self.positions;
        self.sizes.iter().map(move |size| {
            let (own, rest) = left.split_at(size.get() as usize);
            left = rest;
            own
        })
    }
}

impl PageRun {
    /// Returns the entries in its pages.
    #[must_use]
    pub fn entries(&self, geometry: &PageGeometry) -> u64 {
        u64::from(self.pages.get()).saturating_sub(1) * geometry.entries as u64 + u64::from(self.last_entries)
    }
}

impl Cluster<'_> {
    /// Returns its pages, in the order of its entries. Entries without a page have none here.
    pub fn pages(&self) -> impl Iterator<Item = ClusterPage> + '_ {
        let geometry = self.geometry;
        let places = self.runs.iter().flat_map(move |run| {
            let pages = u32::from(run.pages.get());
            (0..pages).map(move |nth| {
                let step = if run.direction == DIRECTION_FALLING { pages - 1 - nth } else { nth };
                let valid = if nth + 1 == pages { u32::from(run.last_entries) } else { geometry.entries as u32 };
                (run.frame.get() as usize, run.page.get() + step * geometry.disk_pages(), valid)
            })
        });
        let sums = self.checksums.iter().map(|sum: &U64| sum.get());
        places.zip(sums).map(|((frame, page, valid), checksum)| ClusterPage { frame, page, valid, checksum })
    }
}
