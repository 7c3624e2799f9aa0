//! Segments: header and trailer, the places of their frames, and the files that no segment owns.

use crate::devices::{Device, Devices};
use crate::finding::{Code, FilePlace, Finding, Sink};
use crate::io::{self, StoreFile};
use crate::replay::{Frame, Segment, State};
use std::collections::{BTreeMap, HashSet};
use stratakv_format::segment::{
    DIRECTORY, KIND_LOG, POSITION_HEADER, POSITION_TRAILER, SegmentPage, file_name, parse_file_name,
};
use stratakv_format::{PAGE_BYTES, SegmentId, Unverified};

const PAGE: u64 = PAGE_BYTES as u64;

/// A segment of a given device that is not free, with its live frames in the order of their pages.
pub(crate) struct Job<'a> {
    pub(crate) device: &'a Device,
    pub(crate) id: u32,
    pub(crate) segment: &'a Segment,
    pub(crate) frames: Vec<(u64, Frame)>,
}

/// Sorts live frames by place, and finds those that overlap, share an LSN or lie behind the end of a sealed segment.
pub(crate) fn jobs<'a>(devices: &'a Devices, state: &'a State, sink: &Sink) -> Vec<Job<'a>> {
    let mut by_segment: BTreeMap<(u16, u32), Vec<(u64, Frame)>> = BTreeMap::new();
    let mut lsns = Vec::new();
    let states: HashSet<u64> = state.sequences.values().map(|sequence| sequence.state_frame).collect();
    for (&id, frame) in state.frames.iter().filter(|(id, frame)| frame.is_referenced() || states.contains(id)) {
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
    for (&(device, id), segment) in state.segments.iter().filter(|(_, segment)| !segment.free) {
        let mut frames = by_segment.remove(&(device, id)).unwrap_or_default();
        frames.sort_unstable_by_key(|(id, frame)| (frame.location.page, *id));
        let Some(device) = devices.get(device) else { continue };
        let place = place_of(device, id);
        let mut end = 0;
        for (frame_id, frame) in &frames {
            let location = &frame.location;
            let own_end = u64::from(location.page) + u64::from(location.pages);
            let text = if u64::from(location.page) < end {
                "this frame overlaps the one before it"
            } else if segment.sealed.is_some_and(|used| own_end > u64::from(used)) {
                "this frame lies behind the pages in use of its sealed segment"
            } else {
                end = end.max(own_end);
                continue;
            };
            end = end.max(own_end);
            let finding = Finding::damage(Code::FrameLocation, text).frame(*frame_id);
            sink.push(finding.at(&place, location.offset(), location.bytes()));
        }
        jobs.push(Job { device, id, segment, frames });
    }
    jobs
}

fn place_of(device: &Device, id: u32) -> FilePlace {
    FilePlace { device: Some(device.index), path: device.path.clone(), file: file_name(SegmentId(id)).into() }
}

impl Job<'_> {
    /// Opens the file and checks its length, header and trailer.
    pub(crate) fn open(&self, devices: &Devices, sink: &Sink) -> Option<StoreFile> {
        let name = file_name(SegmentId(self.id));
        let mut file = io::open(&self.device.directory, Some(self.device.index), &self.device.path, &name, sink)?;
        file.read_in_order(&self.device.directory);
        let whole = u64::from(self.segment.pages) * PAGE;
        if file.bytes < whole {
            let text = format!("{} bytes where the segment has {whole}", file.bytes);
            let finding = Finding::damage(Code::SegmentLength, text).values(whole, file.bytes);
            sink.push(finding.at(&file.place, file.bytes, whole - file.bytes));
        } else if file.bytes > whole {
            let text = "the file goes on behind the end of its segment";
            sink.push(Finding::note(Code::Leftover, text).at(&file.place, whole, file.bytes - whole));
        }
        self.check_page(devices, &file, POSITION_HEADER, 0, sink);
        if file.bytes >= whole {
            self.check_page(devices, &file, POSITION_TRAILER, whole - PAGE, sink);
        }
        Some(file)
    }

    fn check_page(&self, devices: &Devices, file: &StoreFile, position: u8, offset: u64, sink: &Sink) {
        let code = if position == POSITION_HEADER { Code::SegmentHeader } else { Code::SegmentTrailer };
        let mut bytes = vec![0; PAGE_BYTES];
        if !file.read(offset, &mut bytes, sink).is_empty() {
            return;
        }
        let page = match Unverified::<SegmentPage>::at_front(&bytes, "segment page").and_then(|page| page.verify()) {
            Ok(page) => page.into_inner(),
            Err(error) => return sink.push(Finding::format(code, &error).at(&file.place, offset, PAGE)),
        };
        if page.store_id != devices.store_id {
            return sink.push(Finding::damage(code, "a segment of another store").at(&file.place, offset, PAGE));
        }
        let fields = [
            ("device", u64::from(self.device.index), u64::from(page.device.get())),
            ("segment", u64::from(self.id), u64::from(page.segment.get())),
            ("generation", self.segment.generation, page.generation.get()),
            ("nonce", self.segment.nonce, page.nonce.get()),
            ("pages", u64::from(self.segment.pages), u64::from(page.pages.get())),
            ("kind", u64::from(KIND_LOG), u64::from(page.kind)),
            ("position", u64::from(position), u64::from(page.position)),
        ];
        for (field, expected, found) in fields.into_iter().filter(|(_, expected, found)| expected != found) {
            let text = format!("{field} is {found:#x}, the manifest says {expected:#x}");
            sink.push(Finding::damage(code, text).values(expected, found).at(&file.place, offset, PAGE));
        }
    }
}

/// Notes the files in the segment directories that no segment owns.
pub(crate) fn leftovers(devices: &Devices, state: &State, sink: &Sink) {
    for device in &devices.devices {
        let Ok(directory) = io::open_directory(&device.directory, DIRECTORY) else { continue };
        for name in io::names(&directory).unwrap_or_default() {
            let text = match parse_file_name(&name).map(|id| state.segments.get(&(device.index, id.0))) {
                Some(Some(segment)) if !segment.removed => continue,
                Some(Some(_)) => "a segment that was removed",
                Some(None) => "a segment that the manifest does not know",
                None => "not a file of the store",
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
