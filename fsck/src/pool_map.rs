//! The map of pools: segments and frames for pools, and the directories of clusters in force.

use crate::frames::FrameInfo;
use crate::named_pages::NamedPages;
use crate::segments::SegmentJob;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use stratakv_format::PAGE_BYTES;
use stratakv_format::segment::KIND_POOL;

/// Segments and frames for pools, and what they store.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PoolMap {
    /// The segments for pools that are in use, by device and segment.
    pub segments: Vec<PoolSegment>,
    /// The live frames with pools, by device, segment and page. A frame with a damaged header is left out.
    pub frames: Vec<PoolFrame>,
    /// The directories in force, by the sequence that wrote them, set, layer and head.
    pub directories: Vec<StoredDirectory>,
}

/// A segment for pools.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolSegment {
    /// The device.
    pub device: u16,
    /// The segment.
    pub segment: u32,
    /// Bytes of the segment.
    pub bytes: u64,
    /// Live frames.
    pub frames: u64,
    /// Bytes of live frames: headers, directories and pools.
    pub live_bytes: u64,
    /// Bytes of pages that directories in force name.
    pub named_bytes: u64,
    /// Bytes of dead pages in live frames.
    pub dead_bytes: u64,
    /// Bytes of free pages in live frames.
    pub free_bytes: u64,
}

/// A live frame with pools.
///
/// A page counts once, whatever its bytes. `pages` is the sum of named, dead and free pages.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PoolFrame {
    /// The device.
    pub device: u16,
    /// The segment.
    pub segment: u32,
    /// The frame.
    pub frame: u64,
    /// The sequence that wrote the frame.
    pub origin: u64,
    /// Pages of its pools.
    pub pages: u64,
    /// Pages that a directory in force names.
    pub named_pages: u64,
    /// Pages that were written with the frame, and that no directory in force names.
    pub dead_pages: u64,
    /// Pages that were not written with the frame, and that no directory in force names. The format does not record
    /// whether a writer has written such a page later.
    pub free_pages: u64,
    /// Bytes of the named pages.
    pub named_bytes: u64,
    /// Bytes of the dead pages.
    pub dead_bytes: u64,
    /// Bytes of the free pages.
    pub free_bytes: u64,
    /// Valid entries of the named pages.
    pub entries: u64,
    /// Entries that the named pages can hold.
    pub slots: u64,
    /// Runs of the named pages. A run has consecutive pages of one cluster.
    pub runs: u64,
    /// Pages of a run, on average. 0 without a run.
    pub mean_run_pages: f64,
    /// Pages of the longest run.
    pub longest_run_pages: u64,
}

/// A directory in force: the clusters of one set, layer and head.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoredDirectory {
    /// The sequence that wrote the directory.
    pub origin: u64,
    /// The sequences that refer to its frame. A fork shares the directory with its parent.
    pub sequences: Vec<u64>,
    /// The frame that holds the directory.
    pub frame: u64,
    /// The set.
    pub set: u64,
    /// The layer.
    pub layer: u16,
    /// The KV head of the entries. `None` if an entry holds all heads.
    pub head: Option<u16>,
    /// The method, as the writer describes it.
    pub method: String,
    /// The directory covers the tokens from 0 up to this one.
    pub covered_tokens: u64,
    /// Clusters.
    pub clusters: u64,
    /// Entries of all clusters. An entry counts once per cluster.
    pub entries: u64,
    /// Pages that the clusters name.
    pub pages: u64,
    /// Runs of these pages.
    pub runs: u64,
    /// Bytes of these pages.
    pub page_bytes: u64,
    /// Bytes of the directory.
    pub directory_bytes: u64,
}

/// Returns the share of `part` in `whole`, or 0 if there is no whole.
pub(crate) fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

impl PoolFrame {
    /// Returns the entry of a frame in the map, or `None` if it has no pools.
    fn new(job: &SegmentJob<'_>, id: u64, origin: u64, info: &FrameInfo, named: &NamedPages) -> Option<Self> {
        if info.pools.is_empty() {
            return None;
        }
        let own = named.of(id);
        // Named, dead and free.
        let (mut pages, mut bytes) = ([0; 3], [0; 3]);
        for pool in &info.pools {
            let count = |range| own.map_or(0, |own| own.count(pool, range));
            let (early, late) = (count(0..pool.written), count(pool.written..pool.pages));
            let dead = u64::from(pool.written) - early;
            let free = u64::from(pool.pages - pool.written) - late;
            for (nth, count) in [early + late, dead, free].into_iter().enumerate() {
                pages[nth] += count;
                bytes[nth] += count * u64::from(pool.page_bytes);
            }
        }
        let runs = own.map_or(0, |own| own.runs);
        Some(Self {
            device: job.device.index,
            segment: job.id,
            frame: id,
            origin,
            pages: pages.iter().sum(),
            named_pages: pages[0],
            dead_pages: pages[1],
            free_pages: pages[2],
            named_bytes: bytes[0],
            dead_bytes: bytes[1],
            free_bytes: bytes[2],
            entries: own.map_or(0, |own| own.entries),
            slots: own.map_or(0, |own| own.slots),
            runs,
            mean_run_pages: share(pages[0], runs),
            longest_run_pages: own.map_or(0, |own| own.longest_run),
        })
    }

    fn line(&self) -> String {
        format!(
            "pool frame {} of sequence {} segment {:08x} device {}: {} pages, {} named, {} dead, {} free; {} runs, \
             mean {:.1} pages, longest {}",
            self.frame,
            self.origin,
            self.segment,
            self.device,
            self.pages,
            self.named_pages,
            self.dead_pages,
            self.free_pages,
            self.runs,
            self.mean_run_pages,
            self.longest_run_pages,
        )
    }
}

impl PoolSegment {
    /// Returns the entry of a segment in the map. `frames` are the entries of its frames.
    fn new(job: &SegmentJob<'_>, frames: &[PoolFrame]) -> Self {
        let sum = |bytes: fn(&PoolFrame) -> u64| frames.iter().map(bytes).sum();
        Self {
            device: job.device.index,
            segment: job.id,
            bytes: u64::from(job.segment.pages) * PAGE_BYTES as u64,
            frames: job.frames.len() as u64,
            live_bytes: job.frames.iter().map(|(_, frame)| frame.location.bytes()).sum(),
            named_bytes: sum(|own| own.named_bytes),
            dead_bytes: sum(|own| own.dead_bytes),
            free_bytes: sum(|own| own.free_bytes),
        }
    }

    fn line(&self) -> String {
        let percent = |bytes: u64| 100.0 * share(bytes, self.bytes);
        format!(
            "pool segment {:08x} device {}: {} bytes, {} frames, {:.1} % live; {:.1} % named, {:.1} % dead, {:.1} % \
             free pages",
            self.segment,
            self.device,
            self.bytes,
            self.frames,
            percent(self.live_bytes),
            percent(self.named_bytes),
            percent(self.dead_bytes),
            percent(self.free_bytes),
        )
    }
}

impl PoolMap {
    /// Returns the map of a store whose clusters were checked. `named` has the pages that directories in force name.
    pub(crate) fn new(
        jobs: &[SegmentJob<'_>],
        infos: &HashMap<u64, FrameInfo>,
        named: &NamedPages,
        directories: Vec<StoredDirectory>,
    ) -> Self {
        let (mut segments, mut frames) = (Vec::new(), Vec::new());
        for job in jobs.iter().filter(|job| job.segment.kind == KIND_POOL) {
            let first = frames.len();
            frames.extend(job.frames.iter().filter_map(|(id, frame)| {
                let (origin, info) = (frame.record.origin.get(), infos.get(id)?);
                PoolFrame::new(job, *id, origin, info, named)
            }));
            segments.push(PoolSegment::new(job, &frames[first..]));
        }
        Self { segments, frames, directories }
    }

    /// Returns the map for a person: a line per segment and its frames, per directory and per sequence.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let mut frames = self.frames.iter().peekable();
        for segment in &self.segments {
            let _ = writeln!(text, "{}", segment.line());
            let is_inside = |own: &&PoolFrame| (own.device, own.segment) == (segment.device, segment.segment);
            while let Some(frame) = frames.next_if(is_inside) {
                let _ = writeln!(text, "{}", frame.line());
            }
        }
        let mut sequences: BTreeMap<u64, [u64; 4]> = BTreeMap::new();
        for own in &self.directories {
            let head = own.head.map_or_else(|| "all".to_owned(), |head| head.to_string());
            let _ = writeln!(
                text,
                "clusters of sequence {} set {} layer {} head {head}: {} covers tokens 0..{} with {} entries in {} \
                 clusters, {} pages in {} runs, {} bytes",
                own.origin,
                own.set,
                own.layer,
                own.method,
                own.covered_tokens,
                own.entries,
                own.clusters,
                own.pages,
                own.runs,
                own.page_bytes + own.directory_bytes,
            );
            for sequence in &own.sequences {
                let sums = sequences.entry(*sequence).or_default();
                let values = [1, own.clusters, own.pages, own.page_bytes + own.directory_bytes];
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
        }
        for (sequence, [directories, clusters, pages, bytes]) in sequences {
            let _ = writeln!(
                text,
                "sequence {sequence}: {directories} directories, {clusters} clusters, {pages} pages, {bytes} bytes"
            );
        }
        text
    }
}
