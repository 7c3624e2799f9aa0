//! The state that the manifest describes.
//!
//! - Recovery builds it from the records on disk.
//! - A commit applies the same records that it made durable.
//! - A checkpoint writes it as records again (`checkpoint`).
//! - Calls that list sequences see those that can be opened (`listing`).
//!
//! Invariants:
//! - A frame is removed with its last reference.
//! - `live_pages` of a segment is the number of pages of the copies in it.
//! - `idle` holds exactly the sealed segments without live pages.
//! - The references of a sequence are in order of LSN.
//! - A derived frame has one copy, in a segment for pools. Other frames are in segments for the log.
//!
//! A record that contradicts the state is an error. On disk that is corruption.

mod checkpoint;
mod listing;

use super::derived_refs::DerivedRef;
use super::meta::{
    AdapterMeta, CopyMeta, Counters, FrameMeta, SegmentKey, SegmentMeta, SegmentState, SequenceMeta,
    adapter_record_bytes,
};
use crate::io::planted;
use crate::layout::KvLayout;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use stratakv_format::manifest::{self as m, Record};
use stratakv_format::segment::KIND_POOL;
use stratakv_format::{DeviceIndex, FrameId, LayoutId, Location, SegmentId, SequenceId};

/// The maximum number of copies of a frame.
pub(crate) const COPIES_MAX: usize = m::REPLICAS_MAX as usize;

/// The committed state of a store.
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
    /// The sealed segments without live pages. They are freed once no reader holds them.
    pub(crate) idle: BTreeSet<SegmentKey>,
    /// The frames placed in each segment since it was opened. Some may have been deleted or moved since.
    placed: HashMap<SegmentKey, Vec<FrameId>>,
    /// The number of references of all sequences.
    refs: u64,
    /// The bytes of all keys.
    key_bytes: u64,
    /// The bytes of the records of all adapters.
    adapter_bytes: u64,
    /// The latest use of any sequence, in milliseconds since 1970.
    used_unix_ms: u64,
    /// The sequences and adapters whose deletion is queued. They are not part of the state on disk.
    queued_deletions: HashSet<SequenceId>,
    /// The generation and nonce of the manifest that replaces this one, if its last record names one.
    pub(crate) superseded: Option<(u64, u64)>,
}

type Applied = std::result::Result<(), String>;

impl Catalog {
    /// Applies one record.
    ///
    /// # Errors
    /// The record contradicts the records before it. The text says how.
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
                    return Err(format!("a release of frame {frame}, to which the sequence does not refer"));
                }
                self.refs -= 1;
                self.release(frame);
            }
            Record::FrameMoved(moved) => self.moved(moved)?,
            Record::Replica(copy) => self.copy(copy)?,
            Record::SegmentOpen(open) => self.segment_open(open)?,
            Record::SegmentSeal(seal) => self.segment_seal(seal)?,
            Record::SegmentFree(free) => self.segment_free(free)?,
            Record::SequenceCommit(commit) => {
                let state = commit.state_frame.get();
                let sequence = self.sequence_mut(SequenceId(commit.sequence.get()))?;
                sequence.tokens = commit.tokens.get();
                sequence.token_ids = commit.token_ids.get();
                sequence.state_frame = (state != 0).then_some(FrameId(state));
                sequence.committed_unix_ms = commit.committed_unix_ms.get();
                sequence.used_unix_ms = sequence.used_unix_ms.max(sequence.committed_unix_ms);
                self.used_unix_ms = self.used_unix_ms.max(commit.committed_unix_ms.get());
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
                return Err("a pool allocation, which no feature of this version allows".into());
            }
        }
        Ok(())
    }

    /// Returns the time of a use at `now`. It is later than every use before, even if the clock went back, because
    /// eviction begins with the sequence that was used least recently.
    pub(crate) fn use_at(&mut self, now: u64) -> u64 {
        let is_back = now < self.used_unix_ms;
        self.used_unix_ms = if is_back { self.used_unix_ms.saturating_add(1) } else { now };
        self.used_unix_ms
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
            return Err("two sequences have the same key".into());
        }
        self.counters.sequence = self.counters.sequence.max(id.0.saturating_add(1));
        self.used_unix_ms = self.used_unix_ms.max(meta.used_unix_ms);
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
            copies: create.replicas,
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
            return Err(format!("sequence {parent_id} holds an adapter and cannot be forked"));
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
            return Err(format!("sequence {id} holds other content and cannot take the adapter {name:?}"));
        }
        let place = (sequence.layout, meta.name.clone(), meta.version);
        self.adapter_bytes += adapter_record_bytes(&meta);
        self.sequence_mut(id)?.adapter = Some(meta);
        match self.adapters.insert(place, id) {
            None => Ok(()),
            Some(other) => Err(format!("sequences {other} and {id} hold the same adapter")),
        }
    }

    /// Finds an adapter of a layout by its name. Without a version, finds the latest. Equal layouts may have several
    /// ids.
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
            if !planted!(StaleClustersKept) {
                *end = (*end).min(tokens);
            }
        }
        Ok(())
    }

    fn delete(&mut self, id: SequenceId) -> Applied {
        self.queued_deletions.remove(&id);
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

    /// Removes one reference to a frame. The last one removes the frame.
    fn release(&mut self, id: FrameId) {
        let Some(frame) = self.frames.get_mut(&id) else { return };
        frame.refs = frame.refs.saturating_sub(1);
        if frame.refs == 0
            && let Some(frame) = self.frames.remove(&id)
        {
            frame.locations().for_each(|location| self.remove_live_pages(location));
        }
    }

    /// Subtracts the pages of a copy that was deleted or moved away.
    fn remove_live_pages(&mut self, location: Location) {
        let key = (location.device, location.segment);
        if let Some(segment) = self.segments.get_mut(&key) {
            segment.live_pages = segment.live_pages.saturating_sub(u64::from(location.pages));
            if segment.live_pages == 0 && segment.state == SegmentState::Sealed {
                self.idle.insert(key);
            }
        }
    }

    /// Adds the pages of a copy to its segment.
    fn add_live_pages(&mut self, id: FrameId, location: Location, (lsn, derived): (u64, bool)) -> Applied {
        let key = (location.device, location.segment);
        let segment = self.segment_mut(key)?;
        if derived != (segment.kind == KIND_POOL) {
            return Err(format!("frame {id} is at {location}, in a segment of kind {}", segment.kind));
        }
        let end = u64::from(location.page) + u64::from(location.pages);
        let fits = location.page >= 1 && location.pages >= 1 && end < u64::from(segment.pages);
        if !fits || segment.state == SegmentState::Free {
            return Err(format!("frame {id} is at {location}, outside the usable pages of that segment"));
        }
        segment.used_pages = segment.used_pages.max(end as u32);
        if !(derived && planted!(PoolFreedEarly)) {
            segment.live_pages += u64::from(location.pages);
        }
        segment.last_lsn = segment.last_lsn.max(lsn);
        self.idle.remove(&key);
        self.placed.entry(key).or_default().push(id);
        Ok(())
    }

    /// Adds a copy, or replaces the older copy on the same device.
    fn copy(&mut self, copy: &m::Replica) -> Applied {
        let id = FrameId(copy.frame.get());
        let new = CopyMeta {
            generation: copy.generation.get(),
            location: Location::from_raw(&copy.location),
            header_crc: copy.header_crc.get(),
        };
        let frame = self.frames.get(&id).ok_or_else(|| format!("frame {id} does not exist"))?;
        let device = new.location.device;
        if frame.derived {
            return Err(format!("frame {id} is derived, but has a second copy"));
        }
        if frame.location.device == device || frame.location.pages != new.location.pages {
            return Err(format!("the copy of frame {id} at {} does not match the first copy", new.location));
        }
        let old = frame.other_copies.iter().position(|old| old.location.device == device);
        match old.and_then(|at| frame.other_copies.get(at)) {
            Some(old) if old.generation >= new.generation => {
                return Err(format!("the copy of frame {id} on device {device} is older than the one there"));
            }
            None if frame.copies() >= COPIES_MAX => return Err(format!("frame {id} has too many copies")),
            _ => {}
        }
        let lsn = frame.lsn;
        self.add_live_pages(id, new.location, (lsn, false))?;
        let mut dead = None;
        if let Some(frame) = self.frames.get_mut(&id) {
            match old.and_then(|at| frame.other_copies.get_mut(at)) {
                Some(place) => dead = Some(std::mem::replace(place, new).location),
                None => frame.other_copies.push(new),
            }
        }
        dead.into_iter().for_each(|location| self.remove_live_pages(location));
        Ok(())
    }

    /// Sets the state of a member. Removing a device also removes its copies and segments.
    fn member(&mut self, member: &m::Member) -> Applied {
        let device = DeviceIndex(member.device.get());
        if member.state == m::MEMBER_REMOVED {
            if let Some((id, _)) = self.frames.iter().find(|(_, frame)| frame.location.device == device) {
                return Err(format!("device {device} is removed with frame {id} on it"));
            }
            for frame in self.frames.values_mut() {
                frame.other_copies.retain(|copy| copy.location.device != device);
            }
            self.segments.retain(|key, _| key.0 != device);
            self.placed.retain(|key, _| key.0 != device);
            self.idle.retain(|key| key.0 != device);
        }
        self.members.insert(device, *member);
        Ok(())
    }

    fn frame(&mut self, frame: &m::Frame) -> Applied {
        let id = FrameId(frame.frame.get());
        let location = Location::from_raw(&frame.location);
        let derived = frame.flags.get() & m::FLAG_DERIVED != 0;
        self.require_not_removed(location.device)?;
        self.add_live_pages(id, location, (frame.lsn.get(), derived))?;
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
            derived,
            refs: 0,
            other_copies: Vec::new(),
        };
        if self.frames.insert(id, meta).is_some() {
            return Err(format!("frame {id} exists already"));
        }
        Ok(())
    }

    /// Returns an error if a device was removed. It cannot hold the first copy of a frame.
    fn require_not_removed(&self, device: DeviceIndex) -> Applied {
        match self.members.get(&device) {
            Some(member) if member.state == m::MEMBER_REMOVED => {
                Err(format!("the first copy of a frame is on device {device}, which was removed"))
            }
            _ => Ok(()),
        }
    }

    /// Returns whether the catalog has this frame, at any location.
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
        // The references are in order of LSN, so a duplicate has the same LSN.
        let equals =
            sequence.refs[at..].iter().take_while(|(other, _)| frames.get(other).is_some_and(|f| f.lsn == lsn));
        if equals.into_iter().any(|(other, _)| *other == id) {
            return Err(format!("one sequence refers to frame {id} twice"));
        }
        sequence.refs.insert(at, (id, token_end));
        self.refs += 1;
        Ok(())
    }

    fn moved(&mut self, moved: &m::FrameMoved) -> Applied {
        let id = FrameId(moved.frame.get());
        let to = Location::from_raw(&moved.location);
        self.require_not_removed(to.device)?;
        let Some(frame) = self.frames.get_mut(&id) else {
            return Err(format!("frame {id} does not exist"));
        };
        if frame.derived {
            return Err(format!("frame {id} is derived, but is moved"));
        }
        if frame.location.pages != to.pages {
            return Err(format!("frame {id} of {} pages is moved to {} pages", frame.location.pages, to.pages));
        }
        // A move to the location of another copy makes that copy the first.
        let promoted = frame.other_copies.iter().position(|copy| copy.location == to);
        let elsewhere = frame.other_copies.iter().any(|copy| copy.location.device == to.device);
        if promoted.is_none() && elsewhere {
            return Err(format!("frame {id} is moved to device {}, which has a copy of it", to.device));
        }
        if let Some(at) = promoted {
            frame.other_copies.remove(at);
        }
        let from = std::mem::replace(&mut frame.location, to);
        frame.header_crc = moved.header_crc.get();
        let lsn = frame.lsn;
        if promoted.is_none() {
            self.add_live_pages(id, to, (lsn, false))?;
        }
        self.remove_live_pages(from);
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

    fn segment_seal(&mut self, seal: &m::SegmentSeal) -> Applied {
        let key = (DeviceIndex(seal.device.get()), SegmentId(seal.segment.get()));
        let used = seal.used_pages.get();
        let segment = self.segment_mut(key)?;
        if segment.state == SegmentState::Free {
            return Err(format!("segment {} of device {} is sealed although it is free", key.1, key.0));
        }
        if !(1..segment.pages).contains(&used) {
            return Err(format!("segment {} of device {} is sealed with {used} pages in use", key.1, key.0));
        }
        segment.state = SegmentState::Sealed;
        // The segment may hold frames that no commit has named yet, and the seal counts their pages.
        segment.used_pages = segment.used_pages.max(used);
        if segment.live_pages == 0 {
            self.idle.insert(key);
        }
        Ok(())
    }

    fn segment_free(&mut self, free: &m::SegmentFree) -> Applied {
        let key = (DeviceIndex(free.device.get()), SegmentId(free.segment.get()));
        let segment = self.segment_mut(key)?;
        if segment.generation != free.generation.get() {
            return Err(format!(
                "segment {} of device {} has generation {}, but {} is freed",
                key.1, key.0, segment.generation, free.generation
            ));
        }
        if segment.live_pages != 0 {
            return Err(format!("segment {} of device {} is freed with live frames", key.1, key.0));
        }
        segment.state = SegmentState::Free;
        self.idle.remove(&key);
        self.placed.remove(&key);
        if free.removed != 0 {
            self.segments.remove(&key);
        }
        Ok(())
    }

    /// Returns the frames with a copy in a segment. The time is linear in the frames placed there since it was opened.
    pub(crate) fn frames_in(&self, key: SegmentKey) -> BTreeMap<FrameId, &FrameMeta> {
        let placed = self.placed.get(&key).into_iter().flatten();
        let known = placed.filter_map(|id| self.frames.get_key_value(id));
        let here = known.filter(|(_, frame)| frame.locations().any(|at| (at.device, at.segment) == key));
        here.map(|(id, frame)| (*id, frame)).collect()
    }

    /// Returns the derived frames that a sequence refers to, each with the end of its tokens.
    pub(crate) fn derived_of(&self, sequence: SequenceId) -> impl Iterator<Item = (FrameId, u64)> + '_ {
        let refs = self.sequences.get(&sequence).into_iter().flat_map(|meta| &meta.refs);
        refs.copied().filter(|(frame, _)| self.frames.get(frame).is_some_and(|frame| frame.derived))
    }

    /// Returns the references of a sequence to derived frames.
    pub(crate) fn derived_refs(&self, sequence: SequenceId) -> impl Iterator<Item = DerivedRef> + '_ {
        self.derived_of(sequence).map(|(frame, end)| {
            let has_pool = self.frames.get(&frame).is_some_and(|own| own.location.pages > own.front_pages);
            DerivedRef { frame, end, has_pool }
        })
    }

    /// Returns the id of an equal layout.
    pub(crate) fn find_layout(&self, layout: &KvLayout) -> Option<LayoutId> {
        self.layouts.iter().find(|(_, known)| *known == layout).map(|(id, _)| *id)
    }
}

fn key_text(key: &[u8], bytes: u16) -> std::result::Result<String, String> {
    if key.len() != usize::from(bytes) || key.len() > m::KEY_BYTES_MAX {
        return Err(format!("a key of {} bytes in a record that states {bytes}", key.len()));
    }
    String::from_utf8(key.to_vec()).map_err(|_| "a key that is not UTF-8".into())
}

#[cfg(test)]
mod tests;
