//! Records -> state: every record must fit those before it.

use crate::finding::{Code, FilePlace, Finding, Sink};
use std::collections::{BTreeMap, HashMap, HashSet};
use stratakv_format::Location;
use stratakv_format::error::FormatError;
use stratakv_format::frame::TOTAL_PAGES_MAX;
use stratakv_format::layout::Layout;
use stratakv_format::manifest::{self as m, Batch, KEY_BYTES_MAX, Record};
use stratakv_format::segment::{KIND_LOG, KIND_POOL};

/// The most references of sequences to frames that are held.
const REFERENCES_MAX: u64 = 1 << 26;

/// What the manifest says.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) members: BTreeMap<u16, m::Member>,
    pub(crate) layouts: BTreeMap<u32, Layout>,
    pub(crate) sequences: BTreeMap<u64, Sequence>,
    /// Frames that sequences refer to, and those that none referred to yet.
    pub(crate) frames: HashMap<u64, Frame>,
    pub(crate) segments: BTreeMap<(u16, u32), Segment>,
    pub(crate) superseded: Option<(u64, u64)>,
    pub(crate) records: u64,
}

/// A sequence.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) layout: u32,
    pub(crate) key: Vec<u8>,
    pub(crate) summaries: u32,
    pub(crate) committed: u64,
    pub(crate) token_ids: u64,
    pub(crate) state_frame: u64,
    /// The adapter that it holds.
    pub(crate) adapter: Option<Adapter>,
    /// Frame -> only tokens below this one.
    pub(crate) refs: BTreeMap<u64, u64>,
}

/// An adapter by its record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adapter {
    pub(crate) bytes: u64,
    pub(crate) checksum: u64,
}

/// A frame.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) record: m::Frame,
    pub(crate) location: Location,
    pub(crate) header_crc: u32,
    /// Its other copies.
    replicas: Vec<Replica>,
    refs: u64,
}

#[derive(Clone, Copy, Debug)]
struct Replica {
    generation: u64,
    location: Location,
    header_crc: u32,
}

/// Copies that a frame has at most.
const COPIES_MAX: usize = 3;

/// A segment.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) generation: u64,
    pub(crate) nonce: u64,
    pub(crate) pages: u32,
    pub(crate) free: bool,
    pub(crate) removed: bool,
    /// Sealed: pages in use.
    pub(crate) sealed: Option<u32>,
    live: u64,
}

/// The bounds of this store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) devices: u16,
    pub(crate) segment_pages: u64,
    pub(crate) generation: u64,
    /// The manifest has the feature of copies.
    pub(crate) replicas: bool,
    /// The manifest has the feature of codecs.
    pub(crate) codecs: bool,
}

/// Applies batches in order.
pub(crate) struct Replay<'a> {
    pub(crate) state: State,
    bounds: Bounds,
    sink: &'a Sink,
    keys: HashMap<Vec<u8>, u64>,
    deleted: HashSet<u64>,
    /// Layout, name and version -> the sequence that holds it.
    adapters: HashMap<(u32, Vec<u8>, u32), u64>,
    references: u64,
    counters: Option<m::Counters>,
    counters_in_run: bool,
    /// One past the highest frame, sequence, LSN and layout seen.
    ends: [u64; 4],
    checkpoint_done: bool,
}

type Applied = Result<(), String>;

fn check(condition: bool, text: impl FnOnce() -> String) -> Applied {
    if condition { Ok(()) } else { Err(text()) }
}

impl Frame {
    /// Whether a sequence refers to it.
    pub(crate) fn is_referenced(&self) -> bool {
        self.refs > 0
    }

    /// The frame, and then the same where each of its copies is.
    pub(crate) fn copies(&self) -> impl Iterator<Item = Self> + '_ {
        let at = |replica: &Replica| Self {
            location: replica.location,
            header_crc: replica.header_crc,
            replicas: Vec::new(),
            ..self.clone()
        };
        std::iter::once(self.clone()).chain(self.replicas.iter().map(at))
    }
}

impl<'a> Replay<'a> {
    pub(crate) fn new(bounds: Bounds, sink: &'a Sink) -> Self {
        Self {
            state: State::default(),
            bounds,
            sink,
            keys: HashMap::new(),
            deleted: HashSet::new(),
            adapters: HashMap::new(),
            references: 0,
            counters: None,
            counters_in_run: false,
            ends: [1; 4],
            checkpoint_done: false,
        }
    }

    /// Applies the records of a batch that stands at `offset` of `file`. `last`: no batch stands behind it.
    pub(crate) fn batch(&mut self, batch: &Batch<'_>, file: &FilePlace, offset: u64, bytes: u64, last: bool) {
        let report = |text: String| self.sink.push(Finding::damage(Code::ManifestRecord, text).at(file, offset, bytes));
        if batch.is_checkpoint() == self.checkpoint_done {
            report(
                if self.checkpoint_done {
                    "a checkpoint batch behind the checkpoint"
                } else {
                    "no checkpoint at the front"
                }
                .into(),
            );
        }
        let count = batch.header().record_count.get();
        for (index, record) in batch.records().enumerate() {
            let at_end = index as u64 + 1 == u64::from(count) && !batch.has_more();
            let applied = match &record {
                Ok(record) => self.apply(record, at_end, last),
                Err(error) => {
                    self.sink.push(Finding::format(Code::ManifestRecord, error).at(file, offset, bytes));
                    continue;
                }
            };
            self.state.records += 1;
            if let Err(text) = applied {
                let text = format!("record {index} of batch {}: {text}", batch.header().sequence.get());
                let code = if matches!(record, Ok(Record::PoolAllocation(_))) {
                    Code::Unsupported
                } else {
                    Code::ManifestRecord
                };
                self.sink.push(Finding::damage(code, text).at(file, offset, bytes));
            }
        }
        if !batch.has_more()
            && std::mem::take(&mut self.counters_in_run)
            && let Some(counters) = &self.counters
        {
            let given = [
                counters.next_frame.get(),
                counters.next_sequence.get(),
                counters.next_lsn.get(),
                u64::from(counters.next_layout.get()),
            ];
            for (what, (given, end)) in ["frame", "sequence", "LSN", "layout"].iter().zip(given.iter().zip(self.ends)) {
                if *given < end {
                    let text = format!("the next {what} is {given}, yet {} exists", end - 1);
                    self.sink
                        .push(Finding::damage(Code::ManifestRecord, text).at(file, offset, bytes).values(end, *given));
                }
            }
        }
    }

    fn apply(&mut self, record: &Record<'_>, at_end: bool, last: bool) -> Applied {
        check(self.state.superseded.is_none(), || "it stands behind the record that ends this generation".into())?;
        match record {
            Record::Member(member) => self.member(member),
            Record::Layout(defined, bytes) => self.layout(defined, bytes),
            Record::SequenceCreate(create, key) => self.create(create, key),
            Record::Adapter(adapter, name) => self.adapter(adapter, name),
            Record::Fork(fork, key) => self.fork(fork, key),
            Record::SequenceTruncate(cut) => {
                let tokens = cut.tokens.get();
                let sequence = self.sequence(cut.sequence.get())?;
                sequence.committed = sequence.committed.min(tokens);
                sequence.token_ids = sequence.token_ids.min(tokens);
                sequence.refs.values_mut().for_each(|end| *end = (*end).min(tokens));
                Ok(())
            }
            Record::SequenceDelete(delete) => {
                let id = delete.sequence.get();
                let sequence = self.state.sequences.remove(&id).ok_or_else(|| unknown_sequence(id))?;
                self.keys.remove(&sequence.key);
                self.adapters.retain(|_, holder| *holder != id);
                self.deleted.insert(id);
                sequence.refs.keys().for_each(|&frame| self.release(frame));
                Ok(())
            }
            Record::Frame(frame) => self.frame(frame),
            Record::FrameRef(r) => self.reference(r.sequence.get(), r.frame.get(), r.token_end.get()),
            Record::FrameRelease(r) => {
                let (id, frame) = (r.sequence.get(), r.frame.get());
                let removed = self.sequence(id)?.refs.remove(&frame);
                check(removed.is_some(), || format!("sequence {id} does not refer to frame {frame}"))?;
                self.release(frame);
                Ok(())
            }
            Record::FrameMoved(moved) => self.moved(moved),
            Record::SegmentOpen(open) => self.segment_open(open),
            Record::SegmentSeal(seal) => {
                let used = seal.used_pages.get();
                let segment = self.segment(seal.device.get(), seal.segment.get())?;
                check(seal.reserved == [0; 6], reserved)?;
                check(!segment.free, || "a free segment is sealed".into())?;
                check((1..segment.pages).contains(&used), || format!("{used} pages in use of {}", segment.pages))?;
                segment.sealed = Some(used);
                Ok(())
            }
            Record::SegmentFree(free) => self.segment_free(free),
            Record::SequenceCommit(commit) => {
                let sequence = self.sequence(commit.sequence.get())?;
                sequence.committed = commit.tokens.get();
                sequence.token_ids = commit.token_ids.get();
                sequence.state_frame = commit.state_frame.get();
                Ok(())
            }
            Record::Counters(counters) => self.set_counters(counters),
            Record::CheckpointEnd(end) => {
                let before = self.state.records;
                check(!self.checkpoint_done, || "a second end of the checkpoint".into())?;
                self.checkpoint_done = true;
                check(at_end, || "the end of the checkpoint is not its last record".into())?;
                check(end.records.get() == before, || {
                    format!("{} records announced, {before} found", end.records.get())
                })
            }
            Record::Superseded(next) => {
                let (generation, own) = (next.generation.get(), self.bounds.generation);
                check(generation > own, || format!("generation {own} names {generation} as its successor"))?;
                self.state.superseded = Some((generation, next.nonce.get()));
                check(at_end && last, || "a generation goes on behind its end".into())
            }
            Record::Replica(replica) => self.replica(replica),
            Record::PoolAllocation(_) => Err("a record of a feature this store does not have".into()),
            Record::Unknown(_) => Ok(()),
        }
    }

    /// Whether the checkpoint at the front was complete.
    pub(crate) fn has_checkpoint(&self) -> bool {
        self.checkpoint_done
    }

    fn sequence(&mut self, id: u64) -> Result<&mut Sequence, String> {
        self.state.sequences.get_mut(&id).ok_or_else(|| unknown_sequence(id))
    }

    fn segment(&mut self, device: u16, segment: u32) -> Result<&mut Segment, String> {
        let found = self.state.segments.get_mut(&(device, segment));
        found.ok_or_else(|| format!("segment {segment:08x} of device {device} does not exist"))
    }

    fn saw(&mut self, counter: usize, id: u64) {
        self.ends[counter] = self.ends[counter].max(id.saturating_add(1));
    }

    fn member(&mut self, member: &m::Member) -> Applied {
        let device = member.device.get();
        check(device < self.bounds.devices, || format!("device {device} of {}", self.bounds.devices))?;
        check((m::MEMBER_ACTIVE..=m::MEMBER_REMOVED).contains(&member.state), || {
            format!("device {device} has the unknown state {}", member.state)
        })?;
        if member.state == m::MEMBER_REMOVED {
            let left = self.state.frames.iter().find(|(_, frame)| frame.location.device.0 == device);
            check(left.is_none(), || format!("device {device} is removed with frames on it"))?;
            for frame in self.state.frames.values_mut() {
                frame.replicas.retain(|replica| replica.location.device.0 != device);
            }
            self.state.segments.retain(|(own, _), _| *own != device);
        }
        self.state.members.insert(device, *member);
        Ok(())
    }

    fn layout(&mut self, defined: &m::LayoutDefined, bytes: &[u8]) -> Applied {
        let id = defined.layout.get();
        check(defined.reserved.get() == 0, reserved)?;
        let layout = Layout::decode(bytes).map_err(|e: FormatError| e.to_string())?;
        check(layout.encoded_bytes() == bytes.len(), || format!("layout {id} has bytes behind its end"))?;
        check(self.bounds.codecs || !layout.is_encoded(), || {
            format!("layout {id} has codecs in a store without the feature of codecs")
        })?;
        self.saw(3, u64::from(id));
        check(self.state.layouts.insert(id, layout).is_none(), || format!("layout {id} exists already"))
    }

    fn create(&mut self, create: &m::SequenceCreate, key: &[u8]) -> Applied {
        let (layout, summaries) = (create.layout.get(), create.summaries.get());
        check(create.reserved.get() == 0, reserved)?;
        check(self.state.layouts.contains_key(&layout), || format!("layout {layout} does not exist"))?;
        check(create.replicas <= 1 || self.bounds.replicas, || {
            format!("{} copies in a store without the feature of copies", create.replicas)
        })?;
        let sequence = Sequence {
            layout,
            key: key_of(key, create.key_bytes.get())?,
            summaries,
            committed: 0,
            token_ids: 0,
            state_frame: 0,
            adapter: None,
            refs: BTreeMap::new(),
        };
        self.insert(create.sequence.get(), sequence)
    }

    fn fork(&mut self, fork: &m::Fork, key: &[u8]) -> Applied {
        let tokens = fork.tokens.get();
        check(fork.reserved == [0; 6], reserved)?;
        let parent = self.sequence(fork.parent.get())?;
        check(parent.adapter.is_none(), || "a sequence that holds an adapter is forked".into())?;
        let count = parent.refs.len() as u64;
        check(self.references.saturating_add(count) <= REFERENCES_MAX, too_many)?;
        let parent = self.sequence(fork.parent.get())?;
        let mut child = Sequence {
            key: key_of(key, fork.key_bytes.get())?,
            committed: parent.committed.min(tokens),
            token_ids: parent.token_ids.min(tokens),
            state_frame: 0,
            ..parent.clone()
        };
        child.refs.values_mut().for_each(|end| *end = (*end).min(tokens));
        let frames: Vec<_> = child.refs.keys().copied().collect();
        self.insert(fork.sequence.get(), child)?;
        for frame in frames {
            if let Some(frame) = self.state.frames.get_mut(&frame) {
                frame.refs += 1;
                self.references += 1;
            }
        }
        Ok(())
    }

    fn adapter(&mut self, adapter: &m::AdapterDefined, name: &[u8]) -> Applied {
        let id = adapter.sequence.get();
        let text = std::str::from_utf8(name).map_err(|_| "the name of an adapter is not UTF-8")?;
        let sequence = self.sequence(id)?;
        let empty = sequence.key.is_empty() && sequence.committed == 0 && sequence.token_ids == 0;
        check(empty && sequence.adapter.is_none(), || format!("sequence {id} holds more than the adapter {text:?}"))?;
        sequence.adapter = Some(Adapter { bytes: adapter.bytes.get(), checksum: adapter.checksum.get() });
        let place = (sequence.layout, name.to_vec(), adapter.version.get());
        match self.adapters.insert(place, id) {
            None => Ok(()),
            Some(other) => Err(format!("sequences {other} and {id} hold the same adapter {text:?}")),
        }
    }

    fn insert(&mut self, id: u64, sequence: Sequence) -> Applied {
        check(id != 0, || "sequence 0".into())?;
        check(!self.deleted.contains(&id), || format!("sequence {id} was deleted: ids are never reused"))?;
        check(!self.state.sequences.contains_key(&id), || format!("sequence {id} exists already"))?;
        self.saw(1, id);
        let other = if sequence.key.is_empty() { None } else { self.keys.insert(sequence.key.clone(), id) };
        self.state.sequences.insert(id, sequence);
        check(other.is_none(), || format!("sequences {} and {id} have the same key", other.unwrap_or_default()))
    }

    /// Checks a place and gives the segment.
    fn place(&mut self, location: &Location) -> Result<&mut Segment, String> {
        let segment = self.segment(location.device.0, location.segment.0)?;
        let end = u64::from(location.page) + u64::from(location.pages);
        let inside = location.page >= 1 && location.pages >= 1 && end < u64::from(segment.pages);
        check(inside, || format!("{location} is outside the pages of its segment"))?;
        check(location.pages <= TOTAL_PAGES_MAX, || format!("{} pages are too many for a frame", location.pages))?;
        check(!segment.free, || format!("{location} is in a free segment"))?;
        Ok(segment)
    }

    fn frame(&mut self, frame: &m::Frame) -> Applied {
        let id = frame.frame.get();
        let (header, front) = (frame.header_pages.get(), frame.front_pages.get());
        let location = Location::from_raw(&frame.location);
        check(id != 0, || "frame 0".into())?;
        check(frame.reserved.get() == 0 && frame.location.reserved.get() == 0, reserved)?;
        self.place(&location)?.live += 1;
        self.saw(0, id);
        self.saw(2, frame.lsn.get());
        let known =
            Frame { record: *frame, location, header_crc: frame.header_crc.get(), replicas: Vec::new(), refs: 0 };
        let other = self.state.frames.insert(id, known);
        check(other.is_none(), || format!("frame {id} exists already"))?;
        check((1..=front).contains(&header) && front <= location.pages, || {
            format!("frame {id} has {header} header and {front} front pages of {}", location.pages)
        })
    }

    fn reference(&mut self, id: u64, frame: u64, token_end: u64) -> Applied {
        check(self.references < REFERENCES_MAX, too_many)?;
        check(self.state.frames.contains_key(&frame), || format!("frame {frame} does not exist"))?;
        let other = self.sequence(id)?.refs.insert(frame, token_end);
        check(other.is_none(), || format!("sequence {id} refers to frame {frame} twice"))?;
        self.references += 1;
        if let Some(frame) = self.state.frames.get_mut(&frame) {
            frame.refs += 1;
        }
        Ok(())
    }

    /// One reference less; the last one takes the frame away.
    fn release(&mut self, id: u64) {
        self.references = self.references.saturating_sub(1);
        let Some(frame) = self.state.frames.get_mut(&id) else { return };
        frame.refs = frame.refs.saturating_sub(1);
        if frame.refs == 0
            && let Some(frame) = self.state.frames.remove(&id)
        {
            self.died(&frame.location);
            frame.replicas.iter().for_each(|replica| self.died(&replica.location));
        }
    }

    /// A copy of a frame is no more.
    fn died(&mut self, location: &Location) {
        if let Ok(segment) = self.segment(location.device.0, location.segment.0) {
            segment.live = segment.live.saturating_sub(1);
        }
    }

    fn replica(&mut self, replica: &m::Replica) -> Applied {
        let id = replica.frame.get();
        let location = Location::from_raw(&replica.location);
        check(self.bounds.replicas, || "a copy in a store without the feature of copies".into())?;
        check(replica.reserved.get() == 0 && replica.location.reserved.get() == 0, reserved)?;
        let frame = self.state.frames.get(&id).ok_or_else(|| format!("frame {id} does not exist"))?;
        let (first, pages) = (frame.location.device, frame.location.pages);
        check(first != location.device, || format!("the copy of frame {id} is on the device of the frame itself"))?;
        check(pages == location.pages, || format!("frame {id} of {pages} pages has {} elsewhere", location.pages))?;
        let old = frame.replicas.iter().position(|old| old.location.device == location.device);
        let new = Replica { generation: replica.generation.get(), location, header_crc: replica.header_crc.get() };
        match old {
            Some(at) => check(frame.replicas[at].generation < new.generation, || {
                format!("the copy of frame {id} of generation {} again", new.generation)
            })?,
            None => check(frame.replicas.len() + 1 < COPIES_MAX, || format!("frame {id} has too many copies"))?,
        }
        self.place(&location)?.live += 1;
        let replicas = self.state.frames.get_mut(&id).map(|frame| &mut frame.replicas);
        let dead = replicas.and_then(|replicas| {
            let dead = old.map(|at| replicas.remove(at).location);
            replicas.push(new);
            dead
        });
        if let Some(dead) = dead {
            self.died(&dead);
        }
        Ok(())
    }

    fn moved(&mut self, moved: &m::FrameMoved) -> Applied {
        let id = moved.frame.get();
        let to = Location::from_raw(&moved.location);
        check(moved.reserved.get() == 0 && moved.location.reserved.get() == 0, reserved)?;
        let frame = self.state.frames.get(&id).ok_or_else(|| format!("frame {id} does not exist"))?;
        let (from, replicas) = (frame.location, &frame.replicas);
        check(from.pages == to.pages, || format!("frame {id} of {} pages has {} elsewhere", from.pages, to.pages))?;
        // To the place of a copy: that one becomes the first.
        let promoted = replicas.iter().position(|replica| replica.location == to);
        let beside = replicas.iter().any(|replica| replica.location.device == to.device);
        check(promoted.is_some() || !beside, || format!("frame {id} is moved beside a copy of its own"))?;
        if promoted.is_none() {
            self.place(&to)?.live += 1;
        }
        if let Some(frame) = self.state.frames.get_mut(&id) {
            frame.location = to;
            frame.header_crc = moved.header_crc.get();
            promoted.map(|at| frame.replicas.remove(at));
        }
        self.died(&from);
        Ok(())
    }

    fn segment_open(&mut self, open: &m::SegmentOpen) -> Applied {
        let (device, id, pages) = (open.device.get(), open.segment.get(), open.pages.get());
        check(open.reserved == [0; 5], reserved)?;
        check(device < self.bounds.devices, || format!("device {device} of {}", self.bounds.devices))?;
        check(u64::from(pages) == self.bounds.segment_pages, || {
            format!("segment {id:08x} has {pages} pages where the store's have {}", self.bounds.segment_pages)
        })?;
        check(open.kind == KIND_LOG, || {
            let name = if open.kind == KIND_POOL { "pools, which this store does not have" } else { "an unknown kind" };
            format!("segment {id:08x} is of {name}")
        })?;
        if let Some(old) = self.state.segments.get(&(device, id)) {
            check(old.free, || format!("segment {id:08x} of device {device} is open already"))?;
            check(old.generation < open.generation.get(), || {
                format!("segment {id:08x} of device {device}: generation {} again", open.generation.get())
            })?;
        }
        let segment = Segment {
            generation: open.generation.get(),
            nonce: open.nonce.get(),
            pages,
            free: false,
            removed: false,
            sealed: None,
            live: 0,
        };
        self.state.segments.insert((device, id), segment);
        Ok(())
    }

    fn segment_free(&mut self, free: &m::SegmentFree) -> Applied {
        let (device, id) = (free.device.get(), free.segment.get());
        check(free.reserved == 0, reserved)?;
        check(free.removed <= 1, || format!("removed is {}", free.removed))?;
        let segment = self.segment(device, id)?;
        check(segment.generation == free.generation.get(), || {
            format!("segment {id:08x} is in generation {}, not {}", segment.generation, free.generation.get())
        })?;
        check(segment.live == 0, || format!("segment {id:08x} of device {device} is freed with live frames"))?;
        segment.free = true;
        segment.removed = free.removed == 1;
        Ok(())
    }

    fn set_counters(&mut self, counters: &m::Counters) -> Applied {
        check(counters.reserved.get() == 0, reserved)?;
        let old = self.counters.replace(*counters);
        self.counters_in_run = true;
        let back = old.is_some_and(|old| {
            old.next_frame.get() > counters.next_frame.get()
                || old.next_sequence.get() > counters.next_sequence.get()
                || old.next_lsn.get() > counters.next_lsn.get()
                || old.next_layout.get() > counters.next_layout.get()
        });
        check(!back, || "a counter goes back".into())
    }
}

fn reserved() -> String {
    "a reserved byte is not zero".into()
}

fn too_many() -> String {
    "more references to frames than this program holds".into()
}

fn unknown_sequence(id: u64) -> String {
    format!("sequence {id} does not exist")
}

fn key_of(key: &[u8], bytes: u16) -> Result<Vec<u8>, String> {
    check(key.len() == usize::from(bytes), || format!("a key of {} bytes where {bytes} are announced", key.len()))?;
    check(key.len() <= KEY_BYTES_MAX, || format!("a key of {bytes} bytes"))?;
    Ok(key.to_vec())
}
