//! [`StoredSet`]: the stored clusters of one method, read from the directories of a sequence.
//!
//! 1. [`find_pieces`] checks the front of a derived frame: its header, and each piece of a directory in it.
//! 2. [`StoredSet::read`] puts the directories of the method together. Each list is in force once.
//!
//! Nothing here is an error of the sequence. What does not verify is left out and counted.

use super::stored_list::{FrameTable, StoredList, bytes_for};
use crate::catalog::FrameMeta;
use crate::io::planted::{covered, planted};
use crate::layout::KvLayout;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use stratakv_format::checksum::PayloadChecksum;
use stratakv_format::frame::{FramePlace, FrameView, KIND_CLUSTER_DIRECTORY};
use stratakv_format::ids::NUMBER_MAX;
use stratakv_format::pool::DirectoryPiece;
use stratakv_format::{FrameId, PlaneIdentity, SequenceId};

/// The front of a derived frame, as it was read.
pub(crate) struct DirectoryFront {
    pub(crate) frame: FrameId,
    pub(crate) meta: FrameMeta,
    /// The end of the tokens of the reference to the frame.
    pub(crate) token_end: u64,
    pub(crate) bytes: Vec<u8>,
    /// The pieces of directories whose checksum matched: layer, and range in `bytes`.
    pub(crate) pieces: Vec<(u16, Range<usize>)>,
}

/// Finds the pieces of directories in the front of a derived frame. Returns whether all of them matched their checksum.
pub(crate) fn find_pieces(front: &mut DirectoryFront, place: &FramePlace, checksum: PayloadChecksum) -> bool {
    let Ok(view) = FrameView::verify(&front.bytes, place) else { return false };
    let header = view.header();
    let is_meant = header.crc.get() == front.meta.header_crc
        && header.frame.get() == front.frame.0
        && header.nonce.get() == front.meta.nonce
        && header.sequence.get() == front.meta.origin.0;
    let mut pieces = Vec::new();
    let mut are_good = is_meant;
    for descriptor in view.descriptors().iter().filter(|d| is_meant && d.kind.get() == KIND_CLUSTER_DIRECTORY) {
        let start = descriptor.offset.get() as usize;
        let range = start..start.saturating_add(descriptor.bytes.get() as usize);
        let (layer, number) = (descriptor.layer.get(), descriptor.first_token.get());
        let tokens = descriptor.tokens.get();
        let (nonce, origin) = (front.meta.nonce, front.meta.origin);
        let identity = PlaneIdentity::new(nonce, origin, KIND_CLUSTER_DIRECTORY, layer, number, tokens);
        let stored = view.checksums(descriptor).first().map(|checksum| checksum.get());
        let found = front.bytes.get(range.clone()).map(|bytes| checksum.compute(&identity, covered(bytes)));
        match found.is_some() && (found == stored || planted!(DirectoryChecksumIgnored)) {
            true => pieces.push((layer, range)),
            false => are_good = false,
        }
    }
    front.pieces = pieces;
    are_good
}

/// The stored clusters of one layer.
#[derive(Debug)]
pub(crate) struct StoredLayer {
    /// One list per head, or one for all heads. A list whose directory does not verify is missing.
    pub(super) lists: Vec<StoredList>,
    /// The frames of the pages.
    pub(crate) frames: Vec<FrameId>,
}

/// The stored clusters of one method.
#[derive(Debug, Default)]
pub(crate) struct StoredSet {
    layers: BTreeMap<usize, StoredLayer>,
    /// The end of the covered tokens.
    pub(crate) tokens: u64,
    /// Directories that do not verify.
    pub(crate) dropped: usize,
    /// The number and the generation of the set, if all of its directories have the same.
    pub(crate) version: Option<(u64, u64)>,
}

/// A directory of the wanted method.
struct FoundDirectory<'a> {
    /// Its generation, and the LSN of its frame. Of one set, the highest is in force.
    order: (u64, u64),
    /// Entries at or beyond this token are passed over.
    end: u64,
    pieces: Vec<DirectoryPiece<'a>>,
}

impl StoredSet {
    /// Returns the most bytes of memory that reading these directories takes.
    pub(crate) fn bytes_for(fronts: &[DirectoryFront], layout: &KvLayout) -> u64 {
        let pieces =
            fronts.iter().flat_map(|front| front.pieces.iter().map(move |(layer, range)| (front, layer, range)));
        let bytes = pieces.filter_map(|(front, layer, range)| {
            let piece = DirectoryPiece::verify(front.bytes.get(range.clone())?, layout.raw(), *layer).ok()?;
            let header = piece.header();
            let tokens = if header.first_cluster.get() == 0 { header.tokens.get() } else { 0 };
            Some(bytes_for(u64::from(header.piece_entries.get()), tokens))
        });
        bytes.sum()
    }

    /// Reads the directories of `method`. Entries at or beyond `end` are passed over. `known` returns the pages of a
    /// derived frame of the sequence, and the end of its tokens.
    pub(crate) fn read<'a>(
        fronts: &'a [DirectoryFront],
        method: &str,
        (layout, end): (&KvLayout, u64),
        known: &dyn Fn(FrameId) -> Option<(u32, u64)>,
    ) -> Self {
        let mut set = Self::default();
        // By layer and head, then by origin and set.
        let mut in_force: BTreeMap<(u16, u16), BTreeMap<(SequenceId, u64), FoundDirectory<'a>>> = BTreeMap::new();
        for front in fronts {
            for (layer, pieces) in set.directories(front, layout) {
                let header = pieces[0].header();
                if pieces[0].method() != method {
                    continue;
                }
                let own = in_force.entry((layer, header.head.get())).or_default();
                let (key, order) = ((front.meta.origin, header.set.get()), (header.generation.get(), front.meta.lsn));
                if own.get(&key).is_none_or(|other| other.order < order) {
                    let end = end.min(front.token_end);
                    own.insert(key, FoundDirectory { order, end, pieces });
                }
            }
        }
        // A method has one set at a time. If an earlier one is still there, the one that was written last counts.
        let newest = |sets: BTreeMap<_, FoundDirectory<'a>>| sets.into_values().max_by_key(|found| found.order.1);
        let in_force: Vec<(u16, FoundDirectory<'a>)> =
            in_force.into_iter().filter_map(|((layer, _), sets)| newest(sets).map(|found| (layer, found))).collect();
        let header_of = |found: &FoundDirectory<'_>| *found.pieces[0].header();
        let versions: BTreeSet<(u64, u64)> = in_force
            .iter()
            .map(|(_, found)| header_of(found))
            .map(|header| (header.set.get(), header.generation.get()))
            .collect();
        set.version = versions.first().copied().filter(|_| versions.len() == 1);
        for (layer, FoundDirectory { end, pieces, .. }) in in_force {
            let Ok(geometry) = layout.kv_layer(usize::from(layer)) else { continue };
            let empty = || StoredLayer { lists: Vec::new(), frames: Vec::new() };
            let own = set.layers.entry(usize::from(layer)).or_insert_with(empty);
            let mut frames = FrameTable::new(std::mem::take(&mut own.frames), known);
            let read = StoredList::read(&pieces, geometry, (layout.dtype(), end), &mut frames);
            own.frames = frames.frames;
            match read {
                Ok(list) => {
                    set.tokens = set.tokens.max(pieces[0].header().tokens.get());
                    own.lists.push(list);
                }
                Err(_) => set.dropped += 1,
            }
        }
        set
    }

    /// Returns the directories of a frame. Counts pieces that do not verify.
    fn directories<'a>(&mut self, front: &'a DirectoryFront, layout: &KvLayout) -> Vec<(u16, Vec<DirectoryPiece<'a>>)> {
        let mut found: Vec<(u16, Vec<DirectoryPiece<'a>>)> = Vec::new();
        for (layer, range) in &front.pieces {
            let bytes = front.bytes.get(range.clone()).unwrap_or_default();
            let Ok(piece) = DirectoryPiece::verify(bytes, layout.raw(), *layer) else {
                self.dropped += 1;
                continue;
            };
            match found.last_mut() {
                Some((of, pieces)) if of == layer && pieces[0].is_of_same_directory(&piece) => pieces.push(piece),
                _ => found.push((*layer, vec![piece])),
            }
        }
        found
    }

    /// Returns the number and the generation of the set that follows this one with pages of it. None follows a set
    /// whose directories disagree, or one of the largest generation that a directory may have.
    pub(crate) fn next_version(&self) -> Option<(u64, u64)> {
        self.version.filter(|(_, generation)| *generation < NUMBER_MAX).map(|(set, generation)| (set, generation + 1))
    }

    /// Returns whether it has no list.
    pub(crate) fn is_empty(&self) -> bool {
        self.layers.values().all(|layer| layer.lists.is_empty())
    }

    /// Returns the stored clusters of a layer.
    pub(crate) fn layer(&self, layer: usize) -> Option<&StoredLayer> {
        self.layers.get(&layer).filter(|own| !own.lists.is_empty())
    }

    /// Returns the frames of its pages, layer after layer.
    pub(crate) fn frames(&self) -> impl Iterator<Item = &FrameId> {
        self.layers.values().flat_map(|layer| &layer.frames)
    }

    /// Returns the bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        let of =
            |layer: &StoredLayer| layer.lists.iter().map(StoredList::bytes).sum::<usize>() + layer.frames.len() * 8;
        self.layers.values().map(of).sum()
    }
}
