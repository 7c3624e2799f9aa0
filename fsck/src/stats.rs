//! Statistics of a store: sequences, bytes on each device by what they hold, and clusters.
//!
//! Invariant: the parts of a device sum up to the bytes of its superblock, its manifest files and its segments. Damage
//! that makes frames overlap, or segment files shorter than their segments, breaks it.

use crate::devices::{Device, Devices};
use crate::finding::Sink;
use crate::frames::FrameInfo;
use crate::io;
use crate::pool_map::{PoolMap, share};
use crate::replay::{Frame, State};
use crate::segments::SegmentJob;
use serde::Serialize;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Write as _;
use stratakv_format::{PAGE_BYTES, manifest, superblock};

const PAGE: u64 = PAGE_BYTES as u64;

/// Statistics of a store.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StoreStats {
    /// Sequences that hold no adapter.
    pub sequences: u64,
    /// Committed tokens of these sequences. A token that forks share counts once per fork.
    pub tokens: u64,
    /// Adapters.
    pub adapters: u64,
    /// Live frames. A frame with copies counts once.
    pub frames: u64,
    /// Live derived frames, which `frames` includes.
    pub derived_frames: u64,
    /// The devices that were given, by index.
    pub devices: Vec<DeviceStats>,
    /// Stored clusters.
    pub clusters: ClusterStats,
}

/// The bytes of one device, by what they hold. Every copy of a frame counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceStats {
    /// The device.
    pub device: u16,
    /// Segments in use.
    pub segments: u64,
    /// Free segments whose files are kept.
    pub free_segments: u64,
    /// Live frames, and copies of live frames.
    pub frames: u64,
    /// The sum of all fields below.
    pub file_bytes: u64,
    /// Groups and tails.
    pub keys_values_bytes: u64,
    /// Summaries of groups.
    pub summary_bytes: u64,
    /// Token ids.
    pub token_id_bytes: u64,
    /// Caller states. A commit uses the newest one of its sequence.
    pub caller_state_bytes: u64,
    /// Adapters.
    pub adapter_bytes: u64,
    /// Pages of pools that a directory in force names.
    pub named_page_bytes: u64,
    /// Pages of pools that were written with their frame, and that no directory in force names.
    pub dead_page_bytes: u64,
    /// Pages of pools that were not written with their frame, and that no directory in force names.
    pub free_page_bytes: u64,
    /// Directories of clusters, and deltas.
    pub directory_bytes: u64,
    /// States of methods.
    pub state_bytes: u64,
    /// Headers of live frames, and the padding around extents.
    pub header_bytes: u64,
    /// Live frames whose header is damaged in every copy.
    pub unknown_bytes: u64,
    /// Frames that no sequence refers to, gaps between frames, and unused pages of sealed segments. Cleaning makes them
    /// free.
    pub dead_bytes: u64,
    /// Free segments, and the pages behind the last live frame of segments that are not sealed.
    pub free_bytes: u64,
    /// The superblock, manifest files, and header and trailer pages of segments in use.
    pub metadata_bytes: u64,
}

/// The clusters of directories in force, and the live frames with pools.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ClusterStats {
    /// Sets.
    pub sets: u64,
    /// Directories: one per set, layer and head.
    pub directories: u64,
    /// Clusters.
    pub clusters: u64,
    /// Entries of all clusters. An entry counts once per cluster.
    pub entries: u64,
    /// Live frames with pools.
    pub pool_frames: u64,
    /// Pages of these pools.
    pub pages: u64,
    /// Pages that a directory in force names.
    pub named_pages: u64,
    /// Pages that were written with their frame, and that no directory in force names.
    pub dead_pages: u64,
    /// Pages that were not written with their frame, and that no directory in force names.
    pub free_pages: u64,
    /// Dead pages over all pages.
    pub dead_share: f64,
    /// Valid entries of the named pages.
    pub page_entries: u64,
    /// Entries of a named page, on average.
    pub entries_per_page: f64,
    /// Entries of the named pages over the entries that they can hold.
    pub fill: f64,
    /// Runs of the named pages. A run has consecutive pages of one cluster.
    pub runs: u64,
    /// Pages of a run, on average.
    pub mean_run_pages: f64,
    /// Pages of the longest run.
    pub longest_run_pages: u64,
}

impl ClusterStats {
    fn new(pools: &PoolMap) -> Self {
        let sets: BTreeSet<_> = pools.directories.iter().map(|own| (own.origin, own.set)).collect();
        let mut stats = Self {
            sets: sets.len() as u64,
            directories: pools.directories.len() as u64,
            clusters: pools.directories.iter().map(|own| own.clusters).sum(),
            entries: pools.directories.iter().map(|own| own.entries).sum(),
            pool_frames: pools.frames.len() as u64,
            ..Self::default()
        };
        for own in &pools.frames {
            stats.pages += own.pages;
            stats.named_pages += own.named_pages;
            stats.dead_pages += own.dead_pages;
            stats.free_pages += own.free_pages;
            stats.page_entries += own.entries;
            stats.runs += own.runs;
            stats.longest_run_pages = stats.longest_run_pages.max(own.longest_run_pages);
        }
        stats.dead_share = share(stats.dead_pages, stats.pages);
        stats.entries_per_page = share(stats.page_entries, stats.named_pages);
        stats.fill = share(stats.page_entries, pools.frames.iter().map(|own| own.slots).sum());
        stats.mean_run_pages = share(stats.named_pages, stats.runs);
        stats
    }
}

impl DeviceStats {
    /// Returns the bytes of a device. Its pages of pools are added by [`StoreStats::new`].
    fn new(device: &Device, state: &State) -> Self {
        let own = state.segments().range((device.index, 0)..=(device.index, u32::MAX)).map(|(_, segment)| segment);
        let free = own.filter(|segment| segment.free && !segment.removed);
        let (free_segments, free_bytes) =
            free.fold((0, 0), |(count, bytes), segment| (count + 1, bytes + u64::from(segment.pages) * PAGE));
        let metadata_bytes = file_bytes(device, superblock::FILE) + manifest_bytes(device);
        Self { device: device.index, free_segments, free_bytes, metadata_bytes, ..Self::default() }
    }

    /// Adds a segment in use and its live frames.
    fn add_segment(&mut self, job: &SegmentJob<'_>, infos: &HashMap<u64, FrameInfo>) {
        self.segments += 1;
        self.frames += job.frames.len() as u64;
        for (id, frame) in &job.frames {
            self.add_frame(frame, infos.get(id));
        }
        let pages = u64::from(job.segment.pages);
        // The header page and the trailer page.
        self.metadata_bytes += 2 * PAGE;
        let live: u64 = job.frames.iter().map(|(_, frame)| u64::from(frame.location.pages)).sum();
        let last =
            job.frames.last().map_or(1, |(_, frame)| u64::from(frame.location.page) + u64::from(frame.location.pages));
        let end = if job.segment.sealed.is_some() { pages.saturating_sub(1) } else { last };
        self.dead_bytes += end.saturating_sub(1 + live) * PAGE;
        self.free_bytes += pages.saturating_sub(1 + end) * PAGE;
    }

    fn add_frame(&mut self, frame: &Frame, info: Option<&FrameInfo>) {
        let whole = frame.location.bytes();
        let Some(info) = info else {
            self.unknown_bytes += whole;
            return;
        };
        let own = &info.bytes;
        let pieces = |is_state: bool| info.directories.iter().filter(move |own| own.is_state == is_state);
        let (directories, states) = (
            own.deltas + pieces(false).map(|piece| piece.bytes).sum::<u64>(),
            pieces(true).map(|piece| piece.bytes).sum::<u64>(),
        );
        let pools: u64 = info.pools.iter().map(|pool| u64::from(pool.pages) * u64::from(pool.page_bytes)).sum();
        self.keys_values_bytes += own.keys_values;
        self.summary_bytes += own.summaries;
        self.token_id_bytes += own.token_ids;
        self.caller_state_bytes += own.caller_state;
        self.adapter_bytes += own.adapters;
        self.directory_bytes += directories;
        self.state_bytes += states;
        let small = own.summaries + own.token_ids + own.caller_state + own.adapters;
        self.header_bytes += whole.saturating_sub(own.keys_values + small + directories + states + pools);
    }

    /// Returns the name and the bytes of each part, in the order of the fields.
    fn parts(&self) -> [(&'static str, u64); 15] {
        [
            ("keys and values", self.keys_values_bytes),
            ("summaries", self.summary_bytes),
            ("token ids", self.token_id_bytes),
            ("caller states", self.caller_state_bytes),
            ("adapters", self.adapter_bytes),
            ("named pages of pools", self.named_page_bytes),
            ("dead pages of pools", self.dead_page_bytes),
            ("free pages of pools", self.free_page_bytes),
            ("directories of clusters", self.directory_bytes),
            ("states of methods", self.state_bytes),
            ("headers and padding", self.header_bytes),
            ("frames not readable", self.unknown_bytes),
            ("dead", self.dead_bytes),
            ("free", self.free_bytes),
            ("metadata", self.metadata_bytes),
        ]
    }
}

/// Returns the length of a file of a device, or 0 if it cannot be opened, which other checks report.
fn file_bytes(device: &Device, file: &str) -> u64 {
    io::open(&device.directory, Some(device.index), &device.path, file, &Sink::new(0)).map_or(0, |file| file.bytes)
}

/// Returns the bytes of all manifest files of a device, those of the next generation included.
fn manifest_bytes(device: &Device) -> u64 {
    let directory = io::open_directory(&device.directory, manifest::DIRECTORY);
    let names = directory.and_then(|directory| io::names(&directory)).unwrap_or_default();
    names.iter().map(|name| file_bytes(device, &format!("{}/{name}", manifest::DIRECTORY))).sum()
}

impl StoreStats {
    /// Returns the statistics of a store whose frames and clusters were checked.
    pub(crate) fn new(
        devices: &Devices,
        state: &State,
        jobs: &[SegmentJob<'_>],
        infos: &HashMap<u64, FrameInfo>,
        pools: &PoolMap,
    ) -> Self {
        let mut stats = Self { clusters: ClusterStats::new(pools), ..Self::default() };
        for sequence in state.sequences().values() {
            if sequence.adapter.is_some() {
                stats.adapters += 1;
            } else {
                stats.sequences += 1;
                stats.tokens = stats.tokens.saturating_add(sequence.committed);
            }
        }
        let live: HashSet<u64> = jobs.iter().flat_map(|job| job.frames.iter().map(|(id, _)| *id)).collect();
        stats.frames = live.len() as u64;
        stats.derived_frames = live.iter().filter(|id| state.is_derived(**id)).count() as u64;
        for device in &devices.devices {
            let mut own = DeviceStats::new(device, state);
            for job in jobs.iter().filter(|job| job.device.index == device.index) {
                own.add_segment(job, infos);
            }
            for frame in pools.frames.iter().filter(|frame| frame.device == device.index) {
                own.named_page_bytes += frame.named_bytes;
                own.dead_page_bytes += frame.dead_bytes;
                own.free_page_bytes += frame.free_bytes;
            }
            own.file_bytes = own.parts().iter().map(|(_, bytes)| bytes).sum();
            stats.devices.push(own);
        }
        stats
    }

    /// Returns the statistics for a person: the totals, a table of bytes, and the clusters if there are any.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(
            text,
            "{} sequences, {} tokens, {} adapters; {} frames, {} of them derived",
            self.sequences, self.tokens, self.adapters, self.frames, self.derived_frames
        );
        self.write_bytes(&mut text);
        let c = &self.clusters;
        if c.directories > 0 {
            let _ = writeln!(
                text,
                "clusters: {} sets, {} directories, {} clusters of {} entries",
                c.sets, c.directories, c.clusters, c.entries
            );
        }
        if c.pool_frames > 0 {
            let _ = writeln!(
                text,
                "pools: {} frames, {} pages: {} named, {} dead ({:.1} %), {} free",
                c.pool_frames,
                c.pages,
                c.named_pages,
                c.dead_pages,
                100.0 * c.dead_share,
                c.free_pages
            );
            let _ = writeln!(
                text,
                "named pages: {} entries, {:.1} per page, {:.1} % full; {} runs, mean {:.1} pages, longest {}",
                c.page_entries,
                c.entries_per_page,
                100.0 * c.fill,
                c.runs,
                c.mean_run_pages,
                c.longest_run_pages
            );
        }
        text
    }

    /// Writes a row per part that has bytes, and a column per device. The last rows are sums.
    fn write_bytes(&self, text: &mut String) {
        let mut row = |name: &str, cells: &[String]| {
            let cells: String = cells.iter().map(|cell| format!(" {cell:>12}")).collect();
            let _ = writeln!(text, "{name:<24}{cells}");
        };
        let with_sum = |mut bytes: Vec<u64>| {
            bytes.extend((bytes.len() > 1).then(|| bytes.iter().sum::<u64>()));
            bytes
        };
        let sizes = |bytes: Vec<u64>| with_sum(bytes).into_iter().map(size).collect::<Vec<_>>();
        let mut heads: Vec<String> = self.devices.iter().map(|own| format!("device {}", own.device)).collect();
        heads.extend((heads.len() > 1).then(|| "all".to_owned()));
        row("", &heads);
        for (nth, (name, _)) in DeviceStats::default().parts().into_iter().enumerate() {
            let bytes: Vec<u64> = self.devices.iter().map(|own| own.parts()[nth].1).collect();
            if bytes.iter().any(|bytes| *bytes > 0) {
                row(name, &sizes(bytes));
            }
        }
        row("files", &sizes(self.devices.iter().map(|own| own.file_bytes).collect()));
        let counts = |count: fn(&DeviceStats) -> u64| -> Vec<String> {
            with_sum(self.devices.iter().map(count).collect()).into_iter().map(|count| count.to_string()).collect()
        };
        row("frames", &counts(|own| own.frames));
        row("segments in use", &counts(|own| own.segments));
        row("free segments", &counts(|own| own.free_segments));
    }
}

/// Returns a number of bytes for a person, in the largest unit of which there is one.
fn size(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let power = (bytes.max(1).ilog2() / 10).min(units.len() as u32);
    match power.checked_sub(1) {
        None => format!("{bytes} B"),
        Some(nth) => format!("{:.1} {}", bytes as f64 / (1_u64 << (10 * power)) as f64, units[nth as usize]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_largest_unit_of_which_there_is_one() {
        let sizes = [0, 1023, 1024, 1536, 1 << 20, 5 << 30, 3 << 40, 1 << 62].map(size);
        assert_eq!(sizes[..6], ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "5.0 GiB"]);
        assert_eq!(sizes[6..], ["3.0 TiB", "4194304.0 TiB"]);
    }

    #[test]
    fn a_store_of_several_devices_has_a_column_of_sums() {
        let device =
            |device, dead_bytes| DeviceStats { device, dead_bytes, file_bytes: dead_bytes, ..Default::default() };
        let stats = StoreStats { devices: vec![device(0, 2048), device(3, 1024)], ..StoreStats::default() };
        let text = stats.to_text();
        assert!(text.contains("device 0     device 3          all\n"), "{text}");
        assert!(text.contains("dead                          2.0 KiB      1.0 KiB      3.0 KiB\n"), "{text}");
        assert!(!text.contains("keys and values") && !text.contains("pools"), "{text}");
    }
}
