//! Segments and the devices that hold them: opened, sealed and freed.

use super::{Applied, Catalog};
use crate::catalog::meta::{SegmentKey, SegmentMeta, SegmentState};
use stratakv_format::manifest as m;
use stratakv_format::{DeviceIndex, SegmentId};

impl Catalog {
    pub(super) fn segment_mut(&mut self, key: SegmentKey) -> std::result::Result<&mut SegmentMeta, String> {
        let (device, segment) = key;
        self.segments.get_mut(&key).ok_or_else(|| format!("segment {segment} of device {device} does not exist"))
    }

    /// Sets the state of a member. Removing a device also removes its copies and segments.
    pub(super) fn member(&mut self, member: &m::Member) -> Applied {
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

    pub(super) fn segment_open(&mut self, open: &m::SegmentOpen) -> Applied {
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

    pub(super) fn segment_seal(&mut self, seal: &m::SegmentSeal) -> Applied {
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

    pub(super) fn segment_free(&mut self, free: &m::SegmentFree) -> Applied {
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
}
