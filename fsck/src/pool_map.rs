//! The map of pools: segments for pools, and the directories of clusters in force.

use crate::segments::SegmentJob;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use stratakv_format::PAGE_BYTES;
use stratakv_format::segment::KIND_POOL;

/// Segments for pools, and what they store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PoolMap {
    /// The segments for pools that are in use, by device and segment.
    pub segments: Vec<PoolSegment>,
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
    /// Bytes of these pages.
    pub page_bytes: u64,
    /// Bytes of the directory.
    pub directory_bytes: u64,
}

impl PoolMap {
    /// Returns the map of a store whose clusters were checked. `named` holds the bytes of pages that directories name,
    /// by device and segment.
    pub(crate) fn new(
        jobs: &[SegmentJob<'_>],
        named: &BTreeMap<(u16, u32), u64>,
        directories: Vec<StoredDirectory>,
    ) -> Self {
        let segment = |job: &SegmentJob<'_>| PoolSegment {
            device: job.device.index,
            segment: job.id,
            bytes: u64::from(job.segment.pages) * PAGE_BYTES as u64,
            frames: job.frames.len() as u64,
            live_bytes: job.frames.iter().map(|(_, frame)| frame.location.bytes()).sum(),
            named_bytes: named.get(&(job.device.index, job.id)).copied().unwrap_or(0),
        };
        let segments = jobs.iter().filter(|job| job.segment.kind == KIND_POOL).map(segment).collect();
        Self { segments, directories }
    }

    /// Returns the map for a person: a line per segment, per directory and per sequence.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for own in &self.segments {
            let share = |bytes: u64| 100.0 * bytes as f64 / own.bytes.max(1) as f64;
            let _ = writeln!(
                text,
                "pool segment {:08x} device {}: {} bytes, {} frames, {:.1} % live, {:.1} % named pages",
                own.segment,
                own.device,
                own.bytes,
                own.frames,
                share(own.live_bytes),
                share(own.named_bytes),
            );
        }
        let mut sequences: BTreeMap<u64, [u64; 4]> = BTreeMap::new();
        for own in &self.directories {
            let head = own.head.map_or_else(|| "all".to_owned(), |head| head.to_string());
            let _ = writeln!(
                text,
                "clusters of sequence {} set {} layer {} head {head}: {} covers tokens 0..{} with {} entries in {} \
                 clusters, {} pages, {} bytes",
                own.origin,
                own.set,
                own.layer,
                own.method,
                own.covered_tokens,
                own.entries,
                own.clusters,
                own.pages,
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
