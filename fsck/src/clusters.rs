//! Clusters in derived frames: directories, the pages that they name, and the tokens that they cover (SPEC.md chapter
//! 11).
//!
//! 1. Read the pieces of each live derived frame that matched their checksum, and put directories together. Pieces of
//!    states are left to `cluster_states`.
//! 2. Compare the directories with the pools, and with each other: no page is named twice.
//! 3. Compare each page with its checksum, and the bytes outside its entries with zero.
//! 4. Compare each entry with the group or tail that holds its token, if that is asked for.
//! 5. Count the clusters of each covered token.
//!
//! Only directories in force are compared with pages. They have the highest generation per origin, set, layer and head.
//! A frame that a directory names may be gone, because derived frames are never needed.

use crate::cluster_entries::LayerRows;
use crate::cluster_states::FoundStates;
use crate::devices::Devices;
use crate::finding::{Code, Finding, Sink};
use crate::frames::{DirectoryExtent, FrameInfo};
use crate::io::{self, StoreFile};
use crate::named_pages::{NamedPage, NamedPages};
use crate::options::Depth;
use crate::pool_map::StoredDirectory;
use crate::replay::{Frame, State};
use crate::report::ClusterTotals;
use std::collections::{BTreeMap, HashMap, HashSet};
use stratakv_format::error::FormatErrorCode;
use stratakv_format::layout::Layout;
use stratakv_format::pool::{
    ClusterPage, ClusterTable, DirectoryPiece, EntryHeads, PageGeometry, PieceTables, StatePiece,
};
use stratakv_format::{Location, PAGE_BYTES, PlaneIdentity, SegmentId, SequenceId, segment};

/// The identity of a directory: origin, set, layer and head. The head is its code on disk.
type DirectoryKey = (u64, u64, u16, u16);

/// A directory in force: its generation, the LSN of its frame, the frame, and its number there.
type InForce = (u64, u64, u64, usize);

/// The clusters of a store.
pub(crate) struct FoundClusters {
    pub(crate) totals: ClusterTotals,
    /// The directories in force.
    pub(crate) directories: Vec<StoredDirectory>,
    /// The pages that directories in force name.
    pub(crate) named: NamedPages,
}

/// Checks the clusters of all live derived frames. `infos` holds the frames whose header is valid.
///
/// With [`Depth::Headers`], it reads no page. With [`Depth::Full`], it compares every entry with its token.
pub(crate) fn check(
    devices: &Devices,
    state: &State,
    infos: &HashMap<u64, FrameInfo>,
    depth: Depth,
    sink: &Sink,
) -> FoundClusters {
    let quiet = Sink::new(0);
    let mut checker = ClusterChecker {
        devices,
        state,
        infos,
        depth,
        sink,
        files: HashMap::new(),
        named: NamedPages::default(),
        found: Vec::new(),
        states: FoundStates::default(),
        totals: ClusterTotals::default(),
    };
    let mut frames: Vec<u64> = infos.keys().copied().filter(|id| state.is_derived(*id)).collect();
    frames.sort_unstable();
    let mut in_force: BTreeMap<DirectoryKey, InForce> = BTreeMap::new();
    for id in &frames {
        let Some((frame, info)) = checker.frame(*id) else { continue };
        checker.totals.frames += 1;
        checker.totals.pool_pages += info.pools.iter().map(|pool| u64::from(pool.pages)).sum::<u64>();
        let bytes = checker.pieces(frame, info);
        checker.states(*id, frame, info, &bytes);
        for (nth, directory) in checker.directories(*id, frame, info, &bytes).into_iter().enumerate() {
            let header = directory.pieces[0].header();
            let key = (frame.record.origin.get(), header.set.get(), directory.layer, header.head.get());
            let found = (header.generation.get(), frame.record.lsn.get(), *id, nth);
            let newest = in_force.entry(key).or_insert(found);
            *newest = (*newest).max(found);
        }
    }
    let in_force: HashSet<(u64, usize)> = in_force.into_values().map(|(_, _, frame, nth)| (frame, nth)).collect();
    for id in &frames {
        let Some((frame, info)) = checker.frame(*id) else { continue };
        // The first pass has reported what is wrong with the pieces.
        checker.sink = &quiet;
        let bytes = checker.pieces(frame, info);
        let directories = checker.directories(*id, frame, info, &bytes);
        checker.sink = sink;
        for (nth, directory) in directories.iter().enumerate() {
            if in_force.contains(&(*id, nth)) {
                checker.check_directory(*id, frame, directory);
            }
        }
    }
    let ClusterChecker { mut totals, mut found, named, states, .. } = checker;
    (totals.states, totals.state_bytes) = states.whole();
    found.sort_by_key(|own| (own.origin, own.set, own.layer, own.head));
    FoundClusters { totals, directories: found, named }
}

/// The pieces of a directory, in the order of their frame, and its layer.
struct Directory<'a> {
    layer: u16,
    pieces: Vec<DirectoryPiece<'a>>,
    /// Bytes of the pieces.
    bytes: u64,
}

/// The result of a check of a directory. The error is the message of a finding.
type Checked = Result<(), String>;

fn require(condition: bool, text: impl FnOnce() -> String) -> Checked {
    if condition { Ok(()) } else { Err(text()) }
}

impl Directory<'_> {
    /// Checks that its pieces are complete and agree with each other.
    fn check_pieces(&self) -> Checked {
        let header = self.pieces[0].header();
        let (mut clusters, mut entries) = ([0, 0], [0, 0]);
        let mut sizes: [Vec<u32>; 2] = [Vec::new(), Vec::new()];
        for piece in &self.pieces {
            let part = match piece.tables() {
                PieceTables::Clusters(table) => {
                    require(clusters[1] == 0, || "a piece with clusters follows one with positions".into())?;
                    sizes[0].extend(table.clusters().map(|cluster| cluster.record.entries.get()));
                    0
                }
                PieceTables::Positions(table) => {
                    sizes[1].extend(table.clusters().map(|tokens| tokens.len() as u32));
                    1
                }
            };
            let (first, next) = (piece.header().first_cluster.get(), clusters[part]);
            require(first == next, || format!("a piece starts with cluster {first}, not {next}"))?;
            clusters[part] += piece.header().count.get();
            entries[part] += u64::from(piece.header().piece_entries.get());
        }
        let (known, stated) = (header.clusters.get(), header.entries.get());
        require(clusters == [known; 2], || format!("its parts hold {clusters:?} of {known} clusters"))?;
        require(entries == [stated; 2], || format!("its parts hold {entries:?} of {stated} entries"))?;
        require(sizes[0] == sizes[1], || "its parts state different numbers of entries of a cluster".into())
    }

    /// Returns the tokens of the entries of each cluster.
    fn positions(&self) -> impl Iterator<Item = Vec<u32>> + '_ {
        let tables = self.pieces.iter().filter_map(|piece| match piece.tables() {
            PieceTables::Positions(table) => Some(table),
            PieceTables::Clusters(_) => None,
        });
        tables.flat_map(|table| table.clusters().map(|tokens| tokens.iter().map(|token| token.get()).collect()))
    }

    /// Checks that every covered token is in as many clusters as the directory allows, and once in each.
    ///
    /// [`check_pieces`](Self::check_pieces) has accepted the directory, so its positions are as many as its entries.
    fn check_coverage(&self) -> Result<(), (u64, String)> {
        let header = self.pieces[0].header();
        let tokens = header.tokens.get() as usize;
        let mut clusters = vec![0_u16; tokens];
        // One more than the last cluster of each token.
        let mut last = vec![0_u32; tokens];
        let mut number = 0;
        for piece in &self.pieces {
            let PieceTables::Positions(table) = piece.tables() else { continue };
            for cluster in table.clusters() {
                number += 1;
                for token in cluster.iter().map(|token| token.get() as usize) {
                    if last[token] == number {
                        return Err((token as u64, format!("cluster {} holds the token twice", number - 1)));
                    }
                    last[token] = number;
                    clusters[token] = clusters[token].saturating_add(1);
                }
            }
        }
        let most = header.memberships.get();
        match clusters.iter().position(|count| *count == 0 || *count > most) {
            None => Ok(()),
            Some(token) => {
                let count = clusters[token];
                Err((token as u64, format!("the token is in {count} clusters, the directory allows 1 to {most}")))
            }
        }
    }
}

/// The check of all derived frames.
struct ClusterChecker<'a> {
    devices: &'a Devices,
    state: &'a State,
    infos: &'a HashMap<u64, FrameInfo>,
    depth: Depth,
    sink: &'a Sink,
    /// The segment files that were opened, by device and segment. A file that cannot be opened was reported.
    files: HashMap<(u16, u32), Option<StoreFile>>,
    /// The pages that directories in force name.
    named: NamedPages,
    found: Vec<StoredDirectory>,
    states: FoundStates,
    totals: ClusterTotals,
}

impl<'a> ClusterChecker<'a> {
    fn frame(&self, id: u64) -> Option<(&'a Frame, &'a FrameInfo)> {
        Some((self.state.frames().get(&id)?, self.infos.get(&id)?))
    }

    /// Returns the file of the segment that holds a location.
    fn file(&mut self, location: &Location) -> Option<&StoreFile> {
        let (devices, sink) = (self.devices, self.sink);
        let key = (location.device.0, location.segment.0);
        let opened = self.files.entry(key).or_insert_with(|| {
            let own = devices.get(key.0)?;
            io::open(&own.directory, Some(own.index), &own.path, &segment::file_name(SegmentId(key.1)), sink)
        });
        opened.as_ref()
    }

    /// Returns the bytes of each piece of a frame, or `None` for one that was reported.
    fn pieces(&mut self, frame: &Frame, info: &FrameInfo) -> Vec<Option<Vec<u8>>> {
        let sink = self.sink;
        let Some(file) = self.file(&frame.location) else { return vec![None; info.directories.len()] };
        let read = |extent: &DirectoryExtent| {
            let mut bytes = vec![0; extent.bytes as usize];
            (extent.good && file.read(extent.offset, &mut bytes, sink).is_empty()).then_some(bytes)
        };
        info.directories.iter().map(read).collect()
    }

    /// Checks the pieces of states of a frame.
    fn states(&mut self, id: u64, frame: &Frame, info: &FrameInfo, bytes: &[Option<Vec<u8>>]) {
        let state = self.state;
        let Some(layout) = state.layouts.get(&info.layout) else { return };
        let known = info.directories.iter().zip(bytes).filter_map(|(extent, bytes)| Some((extent, bytes.as_deref()?)));
        let (pieces, others): (Vec<_>, Vec<_>) = known.partition(|(_, bytes)| StatePiece::is_meant(bytes));
        let holds_more = !others.is_empty() || !info.pools.is_empty();
        if !pieces.is_empty() && holds_more {
            let text = "the frame holds states of methods beside pools or directories";
            let place = (frame.location.offset(), frame.location.bytes());
            self.push(Finding::damage(Code::ClusterState, text), (id, frame), place);
        }
        for (finding, place) in self.states.add(state, (id, frame), pieces.into_iter(), layout) {
            self.push(finding, (id, frame), place);
        }
    }

    /// Puts the pieces of directories of a frame together. Reports pieces and directories that break a rule, and leaves
    /// them out.
    fn directories<'b>(
        &mut self,
        id: u64,
        frame: &Frame,
        info: &FrameInfo,
        bytes: &'b [Option<Vec<u8>>],
    ) -> Vec<Directory<'b>> {
        let state = self.state;
        let layout = state.layouts.get(&info.layout);
        let mut directories: Vec<Directory<'b>> = Vec::new();
        let mut is_whole = true;
        for (extent, bytes) in info.directories.iter().zip(bytes) {
            if bytes.as_deref().is_some_and(StatePiece::is_meant) {
                continue;
            }
            let verify = |(bytes, layout): (&'b Vec<u8>, &Layout)| DirectoryPiece::verify(bytes, layout, extent.layer);
            match bytes.as_ref().zip(layout).map(verify) {
                Some(Ok(piece)) => match directories.last_mut() {
                    Some(last) if last.layer == extent.layer && last.pieces[0].is_of_same_directory(&piece) => {
                        last.pieces.push(piece);
                        last.bytes += extent.bytes;
                    }
                    _ => directories.push(Directory { layer: extent.layer, pieces: vec![piece], bytes: extent.bytes }),
                },
                Some(Err(error)) => {
                    is_whole = false;
                    let finding = match error.code {
                        FormatErrorCode::Unsupported => Finding::note(Code::ClusterDirectory, error.to_string()),
                        _ => Finding::format(Code::ClusterDirectory, &error),
                    };
                    self.push(finding.layer(extent.layer), (id, frame), (extent.offset, extent.bytes));
                }
                None => is_whole = false,
            }
        }
        directories.retain(|directory| match directory.check_pieces() {
            Ok(()) => true,
            Err(text) => {
                // A piece that is missing was reported already.
                if is_whole {
                    let finding = Finding::damage(Code::ClusterDirectory, text).layer(directory.layer);
                    self.push(finding, (id, frame), (frame.location.offset(), frame.location.bytes()));
                }
                false
            }
        });
        directories
    }

    fn push(&mut self, finding: Finding, (id, frame): (u64, &Frame), (offset, bytes): (u64, u64)) {
        let finding = finding.frame(id).sequence(frame.record.origin.get());
        let finding = match self.file(&frame.location) {
            Some(file) => finding.at(&file.place, offset, bytes),
            None => finding,
        };
        self.sink.push(finding);
    }

    /// Returns the entry of a directory in the map of pools, without its pages.
    fn stored(&self, id: u64, frame: &Frame, directory: &Directory<'_>) -> StoredDirectory {
        let (piece, header) = (&directory.pieces[0], directory.pieces[0].header());
        let sequences = self.state.sequences().iter().filter(|(_, own)| own.refs.contains_key(&id));
        StoredDirectory {
            origin: frame.record.origin.get(),
            sequences: sequences.map(|(sequence, _)| *sequence).collect(),
            frame: id,
            set: header.set.get(),
            layer: directory.layer,
            head: match piece.heads() {
                EntryHeads::One(head) => Some(head),
                EntryHeads::All => None,
            },
            method: piece.method().to_owned(),
            covered_tokens: header.tokens.get(),
            clusters: u64::from(header.clusters.get()),
            entries: header.entries.get(),
            pages: 0,
            runs: 0,
            page_bytes: 0,
            directory_bytes: directory.bytes,
        }
    }

    /// Checks the pages and the coverage of a directory in force.
    fn check_directory(&mut self, id: u64, frame: &Frame, directory: &Directory<'_>) {
        let whole = (frame.location.offset(), frame.location.bytes());
        self.totals.directories += 1;
        let layout = self.infos.get(&id).and_then(|info| self.state.layouts.get(&info.layout));
        let origin = frame.record.origin.get();
        let mut rows = layout
            .filter(|_| self.depth == Depth::Full)
            .and_then(|layout| LayerRows::new(self.state, self.infos, (id, origin), (layout, directory.layer)));
        let mut stored = self.stored(id, frame, directory);
        let mut positions = directory.positions();
        for piece in &directory.pieces {
            let PieceTables::Clusters(table) = piece.tables() else { continue };
            for cluster in table.clusters() {
                self.totals.clusters += 1;
                let tokens = positions.next().unwrap_or_default();
                let mut left = &tokens[..];
                let mut pages = cluster.pages();
                for run in cluster.runs {
                    self.totals.runs += 1;
                    stored.runs += 1;
                    for page in pages.by_ref().take(usize::from(run.pages.get())) {
                        self.totals.pages += 1;
                        stored.pages += 1;
                        stored.page_bytes += table.geometry().page_bytes as u64;
                        let (own, others) = left.split_at(left.len().min(page.valid as usize));
                        left = others;
                        let entries = rows.as_mut().map(|rows| (rows, own));
                        if let Err(text) = self.check_page(directory, (piece, table), &page, entries) {
                            let finding = Finding::damage(Code::ClusterDirectory, text).layer(directory.layer);
                            self.push(finding, (id, frame), whole);
                        }
                    }
                }
            }
        }
        self.found.push(stored);
        if let Err((token, text)) = directory.check_coverage() {
            let finding = Finding::damage(Code::ClusterCoverage, text).layer(directory.layer).tokens(token, token + 1);
            self.push(finding, (id, frame), whole);
        }
    }

    /// Checks one page: its place, that no other cluster names it, its checksum, and the bytes outside its entries.
    ///
    /// The page belongs to the run that was counted last.
    fn check_page(
        &mut self,
        directory: &Directory<'_>,
        (piece, table): (&DirectoryPiece<'_>, &ClusterTable<'_>),
        page: &ClusterPage,
        entries: Option<(&mut LayerRows<'a>, &[u32])>,
    ) -> Checked {
        let (geometry, owner) = (table.geometry(), table.frames()[page.frame].get());
        // Without the frame the page is not used. If its header is damaged, that was reported.
        let Some(frame) = self.state.frames().get(&owner) else { return Ok(()) };
        require(frame.is_derived(), || format!("a run names frame {owner}, which is not derived"))?;
        let Some(info) = self.infos.get(&owner) else { return Ok(()) };
        let is_inside = info.pools.iter().any(|pool| pool.has_page(directory.layer, page.page, geometry.page_bytes));
        let number = page.page;
        require(is_inside, || format!("a run names page {number} of frame {owner}, which is in no pool of the layer"))?;
        let is_first = self.named.add(&NamedPage {
            frame: owner,
            page: number,
            run: self.totals.runs,
            entries: u64::from(page.valid),
            slots: geometry.entries as u64,
        });
        require(is_first, || format!("page {number} of frame {owner} is named twice"))?;
        if self.depth == Depth::Headers {
            return Ok(());
        }
        let offset = frame.location.offset() + u64::from(page.page) * PAGE_BYTES as u64;
        let (checksum, sink) = (self.devices.slot().checksum(), self.sink);
        let Some(file) = self.file(&frame.location) else { return Ok(()) };
        let mut bytes = vec![0; geometry.page_bytes];
        if !file.read(offset, &mut bytes, sink).is_empty() {
            return Ok(());
        }
        let (nonce, origin) = (frame.record.nonce.get(), SequenceId(frame.record.origin.get()));
        let identity = PlaneIdentity::of_page(nonce, origin, directory.layer, piece.heads(), page.page, page.valid);
        if let Some(finding) = page_defect(&bytes, &geometry, page, checksum.compute(&identity, &bytes)) {
            self.push(finding.layer(directory.layer).plane("page"), (owner, frame), (offset, bytes.len() as u64));
            return Ok(());
        }
        let Some((rows, tokens)) = entries else { return Ok(()) };
        if let Some(slot) = rows.first_difference(self.devices, (&geometry, piece.heads()), &bytes, tokens) {
            let token = u64::from(tokens[slot]);
            let text = format!("the entry in slot {slot} of the page differs from its token {token}");
            let finding = Finding::damage(Code::ClusterPage, text).layer(directory.layer).tokens(token, token + 1);
            self.push(finding, (owner, frame), (offset, bytes.len() as u64));
        }
        Ok(())
    }
}

/// Returns what is wrong with the bytes of a page whose checksum is `found`.
fn page_defect(bytes: &[u8], geometry: &PageGeometry, page: &ClusterPage, found: u64) -> Option<Finding> {
    if found != page.checksum {
        let text = format!("the checksum of the page is {found:#x}, but its directory says {:#x}", page.checksum);
        return Some(Finding::damage(Code::ClusterPage, text).values(page.checksum, found));
    }
    let at = geometry.first_stray(bytes, page.valid as usize)?;
    let text = format!("byte {at} of the page belongs to none of its {} entries and is not zero", page.valid);
    Some(Finding::damage(Code::ClusterPage, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratakv_format::DType;
    use stratakv_format::layout::{LayerGeometry, RAW_PLANES};
    use stratakv_format::pool::{ClusterParts, DirectoryFields};

    fn layout() -> Layout {
        let layer =
            LayerGeometry { kv_heads: 2, key_dim: 8, value_dim: 8, window: None, rope: None, codecs: RAW_PLANES };
        Layout { dtype: DType::F16, group_tokens: 4, padded_planes: false, fingerprint: [0; 32], layers: vec![layer] }
    }

    /// Returns the pieces of a directory of clusters without pages: one with clusters, and one with positions.
    fn pieces(memberships: u16, clusters: &[&[u32]]) -> Vec<Vec<u8>> {
        let entries = clusters.iter().map(|tokens| tokens.len() as u64).sum();
        let fields = DirectoryFields {
            set: 1,
            generation: 1,
            heads: EntryHeads::All,
            method: "test",
            method_version: 1,
            seed: 0,
            tokens: 8,
            entries,
            clusters: clusters.len() as u32,
            memberships,
            representative: (0, 0),
        };
        let part = |tokens: &&[u32]| ClusterParts {
            entries: tokens.len() as u32,
            variance: 0.0,
            radius: 0.0,
            runs: Vec::new(),
            checksums: Vec::new(),
            representatives: Vec::new(),
        };
        let parts: Vec<ClusterParts> = clusters.iter().map(part).collect();
        vec![
            fields.encode_clusters(0, &[], &parts).expect("a piece"),
            fields.encode_positions(0, clusters).expect("a piece"),
        ]
    }

    fn directory<'a>(pieces: &'a [Vec<u8>], layout: &Layout) -> Directory<'a> {
        let verify = |bytes: &'a Vec<u8>| DirectoryPiece::verify(bytes, layout, 0).expect("a valid piece");
        Directory { layer: 0, pieces: pieces.iter().map(verify).collect(), bytes: 0 }
    }

    #[test]
    fn check_coverage_counts_the_clusters_of_each_token() {
        let layout = layout();
        type Case = (u16, &'static [&'static [u32]], Option<u64>);
        let cases: [Case; 5] = [
            (1, &[&[0, 3, 5], &[1, 2, 4, 6, 7]], None),
            (2, &[&[0, 3, 5, 6], &[1, 2, 4, 6, 7]], None),
            // Token 5 is in no cluster, and token 6 in two of one allowed.
            (2, &[&[0, 3, 6], &[1, 2, 4, 6, 7]], Some(5)),
            (2, &[&[0, 3, 5], &[0, 1, 2, 4, 6, 7], &[0]], Some(0)),
            // A cluster holds token 3 twice.
            (2, &[&[0, 3, 3, 5], &[1, 2, 4, 6, 7]], Some(3)),
        ];
        for (memberships, clusters, wrong) in cases {
            let pieces = pieces(memberships, clusters);
            let found = directory(&pieces, &layout).check_coverage().err();
            assert_eq!(found.map(|(token, _)| token), wrong, "{clusters:?}");
        }
    }

    #[test]
    fn check_pieces_refuses_directories_that_are_incomplete() {
        let layout = layout();
        let pieces = pieces(1, &[&[0, 3, 5], &[1, 2, 4, 6, 7]]);
        assert_eq!(directory(&pieces, &layout).check_pieces(), Ok(()));
        let refused = |order: &[usize]| {
            let some: Vec<Vec<u8>> = order.iter().map(|nth| pieces[*nth].clone()).collect();
            directory(&some, &layout).check_pieces().expect_err("an incomplete directory")
        };
        assert!(refused(&[0]).contains("[2, 0] of 2 clusters"));
        assert!(refused(&[1, 0]).contains("follows one with positions"));
        assert!(refused(&[0, 0, 1]).contains("starts with cluster 0, not 2"));
    }
}
