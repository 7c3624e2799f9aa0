//! Frames and their copies: announced, moved and released.

use super::{Applied, COPIES_MAX, Catalog};
use crate::catalog::derived_refs::DerivedRef;
use crate::catalog::meta::{CopyMeta, FrameMeta, SegmentKey, SegmentState};
use crate::io::planted;
use std::collections::BTreeMap;
use stratakv_format::manifest as m;
use stratakv_format::segment::KIND_POOL;
use stratakv_format::{DeviceIndex, FrameId, Location, SequenceId};

impl Catalog {
    /// Removes one reference to a frame. The last one removes the frame.
    pub(super) fn release(&mut self, id: FrameId) {
        let Some(frame) = self.frames.get_mut(&id) else { return };
        frame.refs = frame.refs.saturating_sub(1);
        if frame.refs == 0
            && let Some(frame) = self.frames.remove(&id)
        {
            frame.locations().for_each(|location| self.remove_live_pages(location));
        }
    }

    /// Subtracts the pages of a copy that was deleted or moved away.
    pub(super) fn remove_live_pages(&mut self, location: Location) {
        let key = (location.device, location.segment);
        if let Some(segment) = self.segments.get_mut(&key) {
            segment.live_pages = segment.live_pages.saturating_sub(u64::from(location.pages));
            if segment.live_pages == 0 && segment.state == SegmentState::Sealed {
                self.idle.insert(key);
            }
        }
    }

    /// Adds the pages of a copy to its segment.
    pub(super) fn add_live_pages(&mut self, id: FrameId, location: Location, (lsn, derived): (u64, bool)) -> Applied {
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
    pub(super) fn copy(&mut self, copy: &m::Replica) -> Applied {
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

    pub(super) fn frame(&mut self, frame: &m::Frame) -> Applied {
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
    pub(super) fn require_not_removed(&self, device: DeviceIndex) -> Applied {
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

    pub(super) fn moved(&mut self, moved: &m::FrameMoved) -> Applied {
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
}
