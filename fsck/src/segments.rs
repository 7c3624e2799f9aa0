//! Segments: the header and trailer pages, the places of their frames, and files that no segment owns.
//!
//! Each segment in use becomes a [`SegmentJob`], so that several threads can read segments at the same time.

use crate::devices::{Device, Devices};
use crate::finding::{Code, FilePlace, Finding, Sink};
use crate::io::{self, StoreFile};
use crate::replay::{Frame, Segment, State};
use std::collections::{BTreeMap, HashSet};
use stratakv_format::segment::{DIRECTORY, POSITION_HEADER, POSITION_TRAILER, SegmentPage, file_name, parse_file_name};
use stratakv_format::{PAGE_BYTES, SegmentId, Unverified};

const PAGE: u64 = PAGE_BYTES as u64;

/// A segment to read: one that is in use on a device that was given.
pub(crate) struct SegmentJob<'a> {
    pub(crate) device: &'a Device,
    pub(crate) id: u32,
    pub(crate) segment: &'a Segment,
    /// The ids of the live frames and the frames themselves, ordered by page. Copies of other frames are included.
    pub(crate) frames: Vec<(u64, Frame)>,
}

/// Orders the live frames by their place. Reports frames that overlap, share an LSN, or end past the sealed pages.
pub(crate) fn plan_jobs<'a>(devices: &'a Devices, state: &'a State, sink: &Sink) -> Vec<SegmentJob<'a>> {
    let mut by_segment: BTreeMap<(u16, u32), Vec<(u64, Frame)>> = BTreeMap::new();
    let mut lsns = Vec::new();
    let state_frames: HashSet<u64> = state.sequences().values().map(|sequence| sequence.state_frame).collect();
    let is_live = |id: &u64, frame: &Frame| frame.is_referenced() || state_frames.contains(id);
    for (&id, frame) in state.frames().iter().filter(|(id, frame)| is_live(id, frame)) {
        for copy in frame.copies() {
            let key = (copy.location.device.0, copy.location.segment.0);
            by_segment.entry(key).or_default().push((id, copy));
        }
        lsns.push((frame.record.lsn.get(), id));
    }
    lsns.sort_unstable();
    for pair in lsns.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
        let text = format!("frames {} and {} have the same LSN {}", pair[0].1, pair[1].1, pair[0].0);
        sink.push(Finding::damage(Code::ManifestRecord, text).frame(pair[1].1));
    }
    let mut jobs = Vec::new();
    for (&(device, id), segment) in state.segments().iter().filter(|(_, segment)| !segment.free) {
        let mut frames = by_segment.remove(&(device, id)).unwrap_or_default();
        frames.sort_unstable_by_key(|(id, frame)| (frame.location.page, *id));
        let Some(device) = devices.get(device) else { continue };
        let job = SegmentJob { device, id, segment, frames };
        job.check_places(sink);
        jobs.push(job);
    }
    jobs
}

impl SegmentJob<'_> {
    /// Reports frames that overlap, or end past the used pages of a sealed segment.
    fn check_places(&self, sink: &Sink) {
        let device = self.device;
        let file = file_name(SegmentId(self.id)).into();
        let place = FilePlace { device: Some(device.index), path: device.path.clone(), file };
        let mut end = 0;
        for (frame_id, frame) in &self.frames {
            let location = &frame.location;
            let own_end = u64::from(location.page) + u64::from(location.pages);
            let text = match self.segment.sealed {
                _ if u64::from(location.page) < end => Some("the frame overlaps the one before it".to_owned()),
                Some(used) if own_end > u64::from(used) => {
                    Some(format!("the frame ends at page {own_end} of a segment sealed with {used} pages in use"))
                }
                _ => None,
            };
            end = end.max(own_end);
            if let Some(text) = text {
                let finding = Finding::damage(Code::FrameLocation, text).frame(*frame_id);
                sink.push(finding.at(&place, location.offset(), location.bytes()));
            }
        }
    }

    /// Opens the segment file and checks its length, header page and trailer page.
    pub(crate) fn open(&self, devices: &Devices, sink: &Sink) -> Option<StoreFile> {
        let name = file_name(SegmentId(self.id));
        let mut file = io::open(&self.device.directory, Some(self.device.index), &self.device.path, &name, sink)?;
        file.read_in_order(&self.device.directory);
        let whole = u64::from(self.segment.pages) * PAGE;
        if file.bytes < whole {
            let text = format!("the file has {} bytes, its segment {whole}", file.bytes);
            let finding = Finding::damage(Code::SegmentLength, text).values(whole, file.bytes);
            sink.push(finding.at(&file.place, file.bytes, whole - file.bytes));
        } else if file.bytes > whole {
            let text = "the file extends past the end of its segment";
            sink.push(Finding::note(Code::Leftover, text).at(&file.place, whole, file.bytes - whole));
        }
        self.check_page(devices, &file, POSITION_HEADER, sink);
        if file.bytes >= whole {
            self.check_page(devices, &file, POSITION_TRAILER, sink);
        }
        Some(file)
    }

    /// Checks the header page or the trailer page against the manifest.
    fn check_page(&self, devices: &Devices, file: &StoreFile, position: u8, sink: &Sink) {
        let (code, offset) = match position {
            POSITION_HEADER => (Code::SegmentHeader, 0),
            _ => (Code::SegmentTrailer, (u64::from(self.segment.pages) - 1) * PAGE),
        };
        let mut bytes = vec![0; PAGE_BYTES];
        if !file.read(offset, &mut bytes, sink).is_empty() {
            return;
        }
        let page = match Unverified::<SegmentPage>::at_front(&bytes, "segment page").and_then(|page| page.verify()) {
            Ok(page) => page.into_inner(),
            Err(error) => return sink.push(Finding::format(code, &error).at(&file.place, offset, PAGE)),
        };
        if page.store_id != devices.store_id {
            let finding = Finding::damage(code, "the segment belongs to another store");
            return sink.push(finding.at(&file.place, offset, PAGE));
        }
        let fields = [
            ("device", u64::from(self.device.index), u64::from(page.device.get())),
            ("segment", u64::from(self.id), u64::from(page.segment.get())),
            ("generation", self.segment.generation, page.generation.get()),
            ("nonce", self.segment.nonce, page.nonce.get()),
            ("pages", u64::from(self.segment.pages), u64::from(page.pages.get())),
            ("kind", u64::from(self.segment.kind), u64::from(page.kind)),
            ("position", u64::from(position), u64::from(page.position)),
        ];
        for (field, expected, found) in fields.into_iter().filter(|(_, expected, found)| expected != found) {
            let text = format!("{field} is {found:#x}, but the manifest says {expected:#x}");
            sink.push(Finding::damage(code, text).values(expected, found).at(&file.place, offset, PAGE));
        }
    }
}

/// Reports the files in the segment directories that no segment owns.
pub(crate) fn report_leftovers(devices: &Devices, state: &State, sink: &Sink) {
    for device in &devices.devices {
        let Ok(directory) = io::open_directory(&device.directory, DIRECTORY) else { continue };
        for name in io::names(&directory).unwrap_or_default() {
            let text = match parse_file_name(&name).map(|id| state.segments().get(&(device.index, id.0))) {
                Some(Some(segment)) if !segment.removed => continue,
                Some(Some(_)) => "the segment was removed from the store",
                Some(None) => "the manifest does not name this segment",
                None => "the file is not part of the store",
            };
            let place = FilePlace {
                device: Some(device.index),
                path: device.path.clone(),
                file: format!("{DIRECTORY}/{name}").into(),
            };
            sink.push(Finding::note(Code::Leftover, text).in_file(&place));
        }
    }
}
