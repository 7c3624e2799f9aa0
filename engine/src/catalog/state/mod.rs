//! The state that the manifest describes. Recovery builds it from the records on disk; a commit applies the very records it
//! made durable; a checkpoint writes it out as records again.

use super::meta::{
    AdapterMeta, Counters, FrameMeta, ReplicaMeta, SegmentMeta, SegmentState, SequenceMeta, adapter_record_bytes,
    free_record, open_record, ref_record, seal_record,
};
use super::records::RecordBuffer;
use crate::io::planted;
use crate::layout::KvLayout;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use stratakv_format::manifest::{self as m, Kind, Record};
use stratakv_format::{DeviceIndex, FrameId, LayoutId, Location, SegmentId, SequenceId};
use zerocopy::little_endian::{U32, U64};

/// Copies that a frame has at most.
pub(crate) const COPIES_MAX: usize = m::REPLICAS_MAX as usize;

/// A segment of a device.
pub(crate) type SegmentKey = (DeviceIndex, SegmentId);

/// Everything that exists.
#[derive(Clone, Debug, Default)]
pub(crate) struct Catalog {
    pub(crate) members: BTreeMap<DeviceIndex, m::Member>,
    pub(crate) layouts: BTreeMap<LayoutId, KvLayout>,
    pub(crate) sequences: BTreeMap<SequenceId, SequenceMeta>,
    pub(crate) keys: HashMap<String, SequenceId>,
    /// Adapters by layout, name and version.
    pub(crate) adapters: BTreeMap<(LayoutId, String, u32), SequenceId>,
    pub(crate) frames: HashMap<FrameId, FrameMeta>,
    pub(crate) segments: BTreeMap<SegmentKey, SegmentMeta>,
    pub(crate) counters: Counters,
    /// Sealed segments with nothing live, which may be freed once nobody holds them.
    pub(crate) idle: BTreeSet<SegmentKey>,
    /// Frames that were ever laid into a segment in its present life: most are there still.
    laid: HashMap<SegmentKey, Vec<FrameId>>,
    /// References of all sequences.
    refs: u64,
    /// Bytes of all keys.
    key_bytes: u64,
    /// Bytes of the records of all adapters.
    adapter_bytes: u64,
    /// The generation that replaces this manifest, once its last record said so.
    pub(crate) superseded: Option<(u64, u64)>,
}

type Applied = std::result::Result<(), String>;

impl Catalog {
    /// Applies one record.
    ///
    /// # Errors
    /// What does not fit: the record contradicts those before it.
    pub(crate) fn apply(&mut self, record: &Record<'_>) -> Applied {
        match record {
            Record::Member(member) => self.member(member)?,
            Record::Layout(defined, bytes) => {
                let layout = stratakv_format::layout::Layout::decode(bytes).map_err(|e| e.to_string())?;
                let layout = KvLayout::new(layout).map_err(|e| e.to_string())?;
                let id = defined.layout.get();
                self.counters.layout = self.counters.layout.max(id.saturating_add(1));
                if self.layouts.insert(LayoutId(id), layout).is_some() {
                    return Err(format!("layout {id} exists already"));
                }
            }
            Record::SequenceCreate(create, key) => self.create(create, key)?,
            Record::Adapter(adapter, name) => self.adapter(adapter, name)?,
            Record::Fork(fork, key) => self.fork(fork, key)?,
            Record::SequenceTruncate(cut) => self.truncate(SequenceId(cut.sequence.get()), cut.tokens.get())?,
            Record::SequenceDelete(delete) => self.delete(SequenceId(delete.sequence.get()))?,
            Record::Frame(frame) => self.frame(frame)?,
            Record::FrameRef(r) => {
                self.reference(SequenceId(r.sequence.get()), FrameId(r.frame.get()), r.token_end.get())?;
            }
            Record::FrameRelease(r) => {
                let frame = FrameId(r.frame.get());
                let sequence = self.sequence_mut(SequenceId(r.sequence.get()))?;
                let before = sequence.refs.len();
                sequence.refs.retain(|(id, _)| *id != frame);
                if sequence.refs.len() == before {
                    return Err(format!("release of frame {frame}, which the sequence does not refer to"));
                }
                self.refs -= 1;
                self.release(frame);
            }
            Record::FrameMoved(moved) => self.moved(moved)?,
            Record::Replica(replica) => self.replica(replica)?,
            Record::SegmentOpen(open) => self.segment_open(open)?,
            Record::SegmentSeal(seal) => {
                let key = (DeviceIndex(seal.device.get()), SegmentId(seal.segment.get()));
                let segment = self.segment_mut(key)?;
                segment.state = SegmentState::Sealed;
                // Frames that no commit has named yet may lie in it.
                segment.used_pages = segment.used_pages.max(seal.used_pages.get());
                if segment.live_pages == 0 {
                    self.idle.insert(key);
                }
            }
            Record::SegmentFree(free) => self.segment_free(free)?,
            Record::SequenceCommit(commit) => {
                let state = commit.state_frame.get();
                let sequence = self.sequence_mut(SequenceId(commit.sequence.get()))?;
                sequence.tokens = commit.tokens.get();
                sequence.token_ids = commit.token_ids.get();
                sequence.state_frame = (state != 0).then_some(FrameId(state));
                sequence.committed_unix_ms = commit.committed_unix_ms.get();
                sequence.used_unix_ms = sequence.used_unix_ms.max(sequence.committed_unix_ms);
            }
            Record::Counters(c) => {
                let own = &mut self.counters;
                own.frame = own.frame.max(c.next_frame.get());
                own.sequence = own.sequence.max(c.next_sequence.get());
                own.lsn = own.lsn.max(c.next_lsn.get());
                own.layout = own.layout.max(c.next_layout.get());
                own.lifetime_bytes = own.lifetime_bytes.max(c.lifetime_bytes.get());
            }
            Record::Superseded(next) => self.superseded = Some((next.generation.get(), next.nonce.get())),
            Record::CheckpointEnd(_) | Record::Unknown(_) => {}
            Record::PoolAllocation(_) => {
                return Err("a record of a feature that this store does not have".into());
            }
        }
        Ok(())
    }

    fn sequence_mut(&mut self, id: SequenceId) -> std::result::Result<&mut SequenceMeta, String> {
        self.sequences.get_mut(&id).ok_or_else(|| format!("sequence {id} does not exist"))
    }

    fn segment_mut(&mut self, key: SegmentKey) -> std::result::Result<&mut SegmentMeta, String> {
        let (device, segment) = key;
        self.segments.get_mut(&key).ok_or_else(|| format!("segment {segment} of device {device} does not exist"))
    }

    fn insert_sequence(&mut self, id: SequenceId, key: &[u8], meta: SequenceMeta) -> Applied {
        if self.sequences.contains_key(&id) {
            return Err(format!("sequence {id} exists already"));
        }
        if !key.is_empty() && self.keys.insert(meta.key.clone(), id).is_some() {
            return Err("two sequences have one key".into());
        }
        self.counters.sequence = self.counters.sequence.max(id.0.saturating_add(1));
        self.refs += meta.refs.len() as u64;
        self.key_bytes += meta.key.len() as u64;
        self.sequences.insert(id, meta);
        Ok(())
    }

    fn create(&mut self, create: &m::SequenceCreate, key: &[u8]) -> Applied {
        let layout = LayoutId(create.layout.get());
        if !self.layouts.contains_key(&layout) {
            return Err(format!("layout {layout} does not exist"));
        }
        let parent = create.parent.get();
        let meta = SequenceMeta {
            key: key_text(key, create.key_bytes.get())?,
            layout,
            summaries: create.summaries.get(),
            created_unix_ms: create.created_unix_ms.get(),
            ttl_ms: create.ttl_ms.get(),
            replicas: create.replicas,
            evictable: create.evictable,
            parent: (parent != 0).then_some((SequenceId(parent), create.parent_tokens.get())),
            tokens: 0,
            token_ids: 0,
            state_frame: None,
            committed_unix_ms: create.created_unix_ms.get(),
            used_unix_ms: create.created_unix_ms.get(),
            adapter: None,
            refs: Vec::new(),
        };
        self.insert_sequence(SequenceId(create.sequence.get()), key, meta)
    }

    fn fork(&mut self, fork: &m::Fork, key: &[u8]) -> Applied {
        let (parent_id, tokens) = (SequenceId(fork.parent.get()), fork.tokens.get());
        let parent = self.sequence_mut(parent_id)?.clone();
        if parent.adapter.is_some() {
            return Err(format!("sequence {parent_id} holds an adapter, and is forked"));
        }
        let refs: Vec<_> = parent.refs.iter().map(|&(frame, end)| (frame, end.min(tokens))).collect();
        for (frame, _) in &refs {
            if let Some(frame) = self.frames.get_mut(frame) {
                frame.refs += 1;
            }
        }
        let meta = SequenceMeta {
            key: key_text(key, fork.key_bytes.get())?,
            created_unix_ms: fork.created_unix_ms.get(),
            committed_unix_ms: fork.created_unix_ms.get(),
            used_unix_ms: fork.created_unix_ms.get(),
            parent: Some((parent_id, tokens)),
            tokens: parent.tokens.min(tokens),
            token_ids: parent.token_ids.min(tokens),
            state_frame: None,
            refs,
            ..parent
        };
        self.insert_sequence(SequenceId(fork.sequence.get()), key, meta)
    }

    fn adapter(&mut self, adapter: &m::AdapterDefined, name: &[u8]) -> Applied {
        let id = SequenceId(adapter.sequence.get());
        let name = std::str::from_utf8(name).map_err(|_| "the name of an adapter is not UTF-8")?;
        let meta = AdapterMeta {
            name: name.to_owned(),
            version: adapter.version.get(),
            bytes: adapter.bytes.get(),
            checksum: adapter.checksum.get(),
        };
        let sequence = self.sequence_mut(id)?;
        if sequence.adapter.is_some() || sequence.tokens > 0 || sequence.token_ids > 0 || !sequence.key.is_empty() {
            return Err(format!("sequence {id} holds something else than the adapter {name:?}"));
        }
        let place = (sequence.layout, meta.name.clone(), meta.version);
        self.adapter_bytes += adapter_record_bytes(&meta);
        self.sequence_mut(id)?.adapter = Some(meta);
        match self.adapters.insert(place, id) {
            None => Ok(()),
            Some(other) => Err(format!("sequences {other} and {id} hold one adapter")),
        }
    }

    /// An adapter of a layout by its name; without a version the latest. Equal layouts may have several numbers.
    pub(crate) fn find_adapter(&self, layout: &KvLayout, name: &str, version: Option<u32>) -> Option<SequenceId> {
        let named = self.adapters.iter().filter(|((id, known, of), _)| {
            known == name && version.is_none_or(|v| v == *of) && self.layouts.get(id) == Some(layout)
        });
        named.max_by_key(|((_, _, version), _)| *version).map(|(_, id)| *id)
    }

    fn truncate(&mut self, id: SequenceId, tokens: u64) -> Applied {
        let sequence = self.sequence_mut(id)?;
        sequence.tokens = sequence.tokens.min(tokens);
        sequence.token_ids = sequence.token_ids.min(tokens);
        for (_, end) in &mut sequence.refs {
            *end = (*end).min(tokens);
        }
        Ok(())
    }

    fn delete(&mut self, id: SequenceId) -> Applied {
        let Some(sequence) = self.sequences.remove(&id) else {
            return Err(format!("sequence {id} does not exist"));
        };
        if !sequence.key.is_empty() {
            self.keys.remove(&sequence.key);
        }
        self.refs -= sequence.refs.len() as u64;
        self.key_bytes -= sequence.key.len() as u64;
        if let Some(adapter) = sequence.adapter {
            self.adapter_bytes -= adapter_record_bytes(&adapter);
            self.adapters.remove(&(sequence.layout, adapter.name, adapter.version));
        }
        for (frame, _) in sequence.refs {
            if planted!(ForkFreedWithParent)
                && let Some(frame) = self.frames.get_mut(&frame)
            {
                frame.refs = 1;
            }
            self.release(frame);
        }
        Ok(())
    }

    /// One reference less; the last one takes the frame away.
    fn release(&mut self, id: FrameId) {
        let Some(frame) = self.frames.get_mut(&id) else { return };
        frame.refs = frame.refs.saturating_sub(1);
        if frame.refs == 0
            && let Some(frame) = self.frames.remove(&id)
        {
            frame.locations().for_each(|location| self.died(location));
        }
    }

    /// Nothing refers to these pages any more.
    fn died(&mut self, location: Location) {
        let key = (location.device, location.segment);
        if let Some(segment) = self.segments.get_mut(&key) {
            segment.live_pages = segment.live_pages.saturating_sub(u64::from(location.pages));
            if segment.live_pages == 0 && segment.state == SegmentState::Sealed {
                self.idle.insert(key);
            }
        }
    }

    /// Pages that a frame has been written to.
    fn lives(&mut self, id: FrameId, location: Location, lsn: u64) -> Applied {
        let key = (location.device, location.segment);
        let segment = self.segment_mut(key)?;
        let end = u64::from(location.page) + u64::from(location.pages);
        let fits = location.page >= 1 && location.pages >= 1 && end < u64::from(segment.pages);
        if !fits || segment.state == SegmentState::Free {
            return Err(format!("frame {id} lies at {location}, outside the pages of that segment"));
        }
        segment.used_pages = segment.used_pages.max(end as u32);
        segment.live_pages += u64::from(location.pages);
        segment.last_lsn = segment.last_lsn.max(lsn);
        self.idle.remove(&key);
        self.laid.entry(key).or_default().push(id);
        Ok(())
    }

    /// Another copy, in place of an older one on the same device.
    fn replica(&mut self, replica: &m::Replica) -> Applied {
        let id = FrameId(replica.frame.get());
        let new = ReplicaMeta {
            generation: replica.generation.get(),
            location: Location::from_raw(&replica.location),
            header_crc: replica.header_crc.get(),
        };
        let frame = self.frames.get(&id).ok_or_else(|| format!("frame {id} does not exist"))?;
        let device = new.location.device;
        if frame.location.device == device || frame.location.pages != new.location.pages {
            return Err(format!("the copy of frame {id} at {} does not fit its first one", new.location));
        }
        let old = frame.replicas.iter().position(|old| old.location.device == device);
        match old.and_then(|at| frame.replicas.get(at)) {
            Some(old) if old.generation >= new.generation => {
                return Err(format!("the copy of frame {id} on device {device} is older than the one there"));
            }
            None if frame.copies() >= COPIES_MAX => return Err(format!("frame {id} has too many copies")),
            _ => {}
        }
        let lsn = frame.lsn;
        self.lives(id, new.location, lsn)?;
        let mut dead = None;
        if let Some(frame) = self.frames.get_mut(&id) {
            match old.and_then(|at| frame.replicas.get_mut(at)) {
                Some(place) => dead = Some(std::mem::replace(place, new).location),
                None => frame.replicas.push(new),
            }
        }
        dead.into_iter().for_each(|location| self.died(location));
        Ok(())
    }

    /// A device's state. With one that is gone for good the copies and segments go that it had.
    fn member(&mut self, member: &m::Member) -> Applied {
        let device = DeviceIndex(member.device.get());
        if member.state == m::MEMBER_REMOVED {
            if let Some((id, _)) = self.frames.iter().find(|(_, frame)| frame.location.device == device) {
                return Err(format!("device {device} is removed with frame {id} on it"));
            }
            for frame in self.frames.values_mut() {
                frame.replicas.retain(|replica| replica.location.device != device);
            }
            self.segments.retain(|key, _| key.0 != device);
            self.laid.retain(|key, _| key.0 != device);
            self.idle.retain(|key| key.0 != device);
        }
        self.members.insert(device, *member);
        Ok(())
    }

    fn frame(&mut self, frame: &m::Frame) -> Applied {
        let id = FrameId(frame.frame.get());
        let location = Location::from_raw(&frame.location);
        self.lives(id, location, frame.lsn.get())?;
        self.counters.frame = self.counters.frame.max(id.0.saturating_add(1));
        self.counters.lsn = self.counters.lsn.max(frame.lsn.get().saturating_add(1));
        let meta = FrameMeta {
            origin: SequenceId(frame.origin.get()),
            lsn: frame.lsn.get(),
            nonce: frame.nonce.get(),
            location,
            header_crc: frame.header_crc.get(),
            header_pages: frame.header_pages.get(),
            front_pages: frame.front_pages.get(),
            refs: 0,
            replicas: Vec::new(),
        };
        if self.frames.insert(id, meta).is_some() {
            return Err(format!("frame {id} exists already"));
        }
        Ok(())
    }

    /// Whether this very frame is known, wherever it lies by now.
    pub(crate) fn has_frame(&self, frame: &m::Frame) -> bool {
        let known = self.frames.get(&FrameId(frame.frame.get()));
        known.is_some_and(|known| {
            (known.origin.0, known.lsn, known.nonce) == (frame.origin.get(), frame.lsn.get(), frame.nonce.get())
        })
    }

    fn reference(&mut self, sequence: SequenceId, id: FrameId, token_end: u64) -> Applied {
        let Some(frame) = self.frames.get_mut(&id) else {
            return Err(format!("frame {id} does not exist"));
        };
        frame.refs += 1;
        let lsn = frame.lsn;
        let frames = &self.frames;
        let Some(sequence) = self.sequences.get_mut(&sequence) else {
            return Err(format!("sequence {sequence} does not exist"));
        };
        let at = sequence.refs.partition_point(|(other, _)| frames.get(other).is_some_and(|f| f.lsn < lsn));
        // Ordered by LSN: a second reference would stand among those of its LSN.
        let equals =
            sequence.refs[at..].iter().take_while(|(other, _)| frames.get(other).is_some_and(|f| f.lsn == lsn));
        if equals.into_iter().any(|(other, _)| *other == id) {
            return Err(format!("frame {id} is referred to twice by one sequence"));
        }
        sequence.refs.insert(at, (id, token_end));
        self.refs += 1;
        Ok(())
    }

    fn moved(&mut self, moved: &m::FrameMoved) -> Applied {
        let id = FrameId(moved.frame.get());
        let to = Location::from_raw(&moved.location);
        let Some(frame) = self.frames.get_mut(&id) else {
            return Err(format!("frame {id} does not exist"));
        };
        // To the place of another copy: that one takes the place of the first.
        let promoted = frame.replicas.iter().position(|replica| replica.location == to);
        let elsewhere = frame.replicas.iter().any(|replica| replica.location.device == to.device);
        if promoted.is_none() && elsewhere {
            return Err(format!("frame {id} is moved to device {}, which has a copy of it", to.device));
        }
        if let Some(at) = promoted {
            frame.replicas.remove(at);
        }
        let from = std::mem::replace(&mut frame.location, to);
        frame.header_crc = moved.header_crc.get();
        let lsn = frame.lsn;
        if promoted.is_none() {
            self.lives(id, to, lsn)?;
        }
        self.died(from);
        Ok(())
    }

    fn segment_open(&mut self, open: &m::SegmentOpen) -> Applied {
        let key = (DeviceIndex(open.device.get()), SegmentId(open.segment.get()));
        let old = self.segments.get(&key);
        if old.is_some_and(|s| s.state != SegmentState::Free || s.generation >= open.generation.get()) {
            return Err(format!("segment {} of device {} is opened twice", key.1, key.0));
        }
        let meta = SegmentMeta {
            generation: open.generation.get(),
            nonce: open.nonce.get(),
            pages: open.pages.get(),
            kind: open.kind,
            state: SegmentState::Open,
            used_pages: 1,
            live_pages: 0,
            last_lsn: 0,
        };
        self.segments.insert(key, meta);
        Ok(())
    }

    fn segment_free(&mut self, free: &m::SegmentFree) -> Applied {
        let key = (DeviceIndex(free.device.get()), SegmentId(free.segment.get()));
        let segment = self.segment_mut(key)?;
        if segment.live_pages != 0 {
            return Err(format!("segment {} of device {} is freed with live frames", key.1, key.0));
        }
        segment.state = SegmentState::Free;
        self.idle.remove(&key);
        self.laid.remove(&key);
        if free.removed != 0 {
            self.segments.remove(&key);
        }
        Ok(())
    }

    /// Frames that have a copy in a segment. Takes time for what was laid there since it was opened, whatever else there is.
    pub(crate) fn frames_in(&self, key: SegmentKey) -> BTreeMap<FrameId, &FrameMeta> {
        let laid = self.laid.get(&key).into_iter().flatten();
        let known = laid.filter_map(|id| self.frames.get_key_value(id));
        let here = known.filter(|(_, frame)| frame.locations().any(|at| (at.device, at.segment) == key));
        here.map(|(id, frame)| (*id, frame)).collect()
    }

    /// The id of an equal layout.
    pub(crate) fn find_layout(&self, layout: &KvLayout) -> Option<LayoutId> {
        self.layouts.iter().find(|(_, known)| *known == layout).map(|(id, _)| *id)
    }

    /// The counters as a record.
    pub(crate) fn counters_record(counters: &Counters) -> m::Counters {
        m::Counters {
            next_frame: U64::new(counters.frame),
            next_sequence: U64::new(counters.sequence),
            next_lsn: U64::new(counters.lsn),
            lifetime_bytes: U64::new(counters.lifetime_bytes),
            next_layout: U32::new(counters.layout),
            reserved: U32::new(0),
        }
    }

    /// Everything as records, a checkpoint.
    pub(crate) fn checkpoint(&self) -> RecordBuffer {
        let mut out = RecordBuffer::default();
        for member in self.members.values() {
            out.push(Kind::Member, member, &[]);
        }
        out.push(Kind::Counters, &Self::counters_record(&self.counters), &[]);
        for (id, layout) in &self.layouts {
            out.push_layout(*id, layout);
        }
        for (key, segment) in &self.segments {
            out.push(Kind::SegmentOpen, &open_record(*key, segment), &[]);
            match segment.state {
                SegmentState::Open => {}
                SegmentState::Sealed => out.push(Kind::SegmentSeal, &seal_record(*key, segment.used_pages), &[]),
                SegmentState::Free => {
                    out.push(Kind::SegmentFree, &free_record(*key, segment.generation, false), &[]);
                }
            }
        }
        let mut frames: Vec<_> = self.frames.iter().collect();
        frames.sort_unstable_by_key(|(_, frame)| frame.lsn);
        for (id, frame) in frames {
            frame.announce(*id, &mut out);
        }
        for (id, sequence) in &self.sequences {
            out.push(Kind::SequenceCreate, &sequence.create_record(*id), sequence.key.as_bytes());
            if let Some(adapter) = &sequence.adapter {
                out.push(Kind::Adapter, &adapter.record(*id), adapter.name.as_bytes());
            }
            for (frame, token_end) in &sequence.refs {
                out.push(Kind::FrameRef, &ref_record(*id, *frame, *token_end), &[]);
            }
            out.push(Kind::SequenceCommit, &sequence.commit_record(*id), &[]);
        }
        let end = m::CheckpointEnd { records: U64::new(out.count() as u64) };
        out.push(Kind::CheckpointEnd, &end, &[]);
        out
    }

    /// Bytes of [`Self::checkpoint`], at most. `replicas`: frames may have copies.
    pub(crate) fn checkpoint_bytes(&self, replicas: bool) -> u64 {
        let record = |body: usize| (size_of::<m::RecordHeader>() + body).next_multiple_of(8) as u64;
        let layouts = self.layouts.values().map(|layout| record(8 + layout.raw().encoded_bytes())).sum::<u64>();
        let copies = if replicas { self.members.len() as u64 } else { 0 };
        let frame = record(size_of::<m::Frame>()) + copies * record(size_of::<m::Replica>());
        let sequence = record(size_of::<m::SequenceCreate>()) + 8 + record(size_of::<m::SequenceCommit>());
        let segment = record(size_of::<m::SegmentOpen>()) + record(size_of::<m::SegmentSeal>());
        layouts
            + record(size_of::<m::Member>()) * self.members.len() as u64
            + record(size_of::<m::Counters>())
            + self.segments.len() as u64 * segment
            + self.frames.len() as u64 * frame
            + self.refs * record(size_of::<m::FrameRef>())
            + self.sequences.len() as u64 * sequence
            + self.key_bytes
            + self.adapter_bytes
            + record(size_of::<m::CheckpointEnd>())
    }

    /// About how much memory the tables take.
    pub(crate) fn memory_bytes(&self) -> usize {
        let refs: usize = self.sequences.values().map(|s| s.refs.capacity() * 16 + s.key.len() * 2).sum();
        self.sequences.len() * (size_of::<SequenceMeta>() + 64)
            + refs
            + self.frames.values().map(|f| f.replicas.capacity() * size_of::<ReplicaMeta>()).sum::<usize>()
            + self.frames.len() * (size_of::<FrameMeta>() + 32)
            + self.laid.values().map(|laid| laid.capacity() * size_of::<FrameId>() + 48).sum::<usize>()
            + self.adapters.keys().map(|(_, name, _)| 2 * name.len() + 96).sum::<usize>()
            + self.segments.len() * (size_of::<SegmentMeta>() + 32)
    }
}

fn key_text(key: &[u8], bytes: u16) -> std::result::Result<String, String> {
    if key.len() != usize::from(bytes) || key.len() > m::KEY_BYTES_MAX {
        return Err(format!("key of {} bytes where {bytes} are announced", key.len()));
    }
    String::from_utf8(key.to_vec()).map_err(|_| "key is not UTF-8".into())
}

#[cfg(test)]
mod tests;
