//! Changing where the copies of a frame are, as manifest records.
//!
//! A record can add a copy or move one, but not drop the first. [`CopyChange::push`] builds any change from these.

use crate::catalog::{CopyMeta, FrameMeta, RecordBuffer};
use stratakv_format::manifest::{self as m, Kind};
use stratakv_format::{FrameId, Location};
use zerocopy::little_endian::{U32, U64};

/// A copy: its location, and the CRC of its header there.
pub(crate) type CopyPlace = (Location, u32);

/// New places for the copies of a frame. The change is passed over if the copies have changed since it was decided.
#[derive(Clone, Debug)]
pub(crate) struct CopyChange {
    pub(crate) frame: FrameId,
    /// The copies when the change was decided, the first one in front.
    pub(crate) seen: Vec<CopyPlace>,
    /// The copies that are wanted, each on a device of its own, the first one in front.
    pub(crate) wanted: Vec<CopyPlace>,
}

/// Returns the copies of a frame, the first one in front.
pub(crate) fn places(frame: &FrameMeta) -> Vec<CopyPlace> {
    let others = frame.other_copies.iter().map(|copy| (copy.location, copy.header_crc));
    std::iter::once((frame.location, frame.header_crc)).chain(others).collect()
}

impl CopyChange {
    /// Appends the records, unless the frame has changed.
    pub(crate) fn push(&self, frame: &FrameMeta, out: &mut RecordBuffer) {
        let Some((first, others)) = self.wanted.split_first() else { return };
        if places(frame) != self.seen {
            return;
        }
        let mut own = frame.clone();
        let next = own.other_copies.iter().map(|copy| copy.generation).max().unwrap_or(0) + 1;
        // Copies to drop whose device gets no other. The first copy moves onto them and back, because only a move drops
        // a copy.
        let gone = |place: &CopyPlace| match self.wanted.iter().position(|wanted| wanted.0.device == place.0.device) {
            None => true,
            // The first copy cannot move to a device that holds another copy.
            Some(at) => at == 0 && first.0 != place.0,
        };
        for copy in own.other_copies.clone() {
            let place = (copy.location, copy.header_crc);
            if gone(&place) {
                let back = (own.location, own.header_crc);
                self.move_to(&mut own, place, out);
                self.move_to(&mut own, back, out);
            }
        }
        if *first != (own.location, own.header_crc) {
            self.move_to(&mut own, *first, out);
        }
        for (location, header_crc) in others.iter().copied() {
            if !own.other_copies.iter().any(|copy| copy.location == location) {
                let copy = CopyMeta { generation: next, location, header_crc };
                out.push(Kind::Replica, &copy.record(self.frame), &[]);
            }
        }
    }

    fn move_to(&self, own: &mut FrameMeta, (location, header_crc): CopyPlace, out: &mut RecordBuffer) {
        let record = m::FrameMoved {
            frame: U64::new(self.frame.0),
            location: location.to_raw(),
            header_crc: U32::new(header_crc),
            reserved: U32::new(0),
        };
        out.push(Kind::FrameMoved, &record, &[]);
        own.other_copies.retain(|copy| copy.location != location);
        (own.location, own.header_crc) = (location, header_crc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{Catalog, SegmentMeta, SegmentState};
    use proptest::prelude::*;
    use std::collections::HashSet;
    use stratakv_format::segment::KIND_LOG;
    use stratakv_format::{DeviceIndex, SegmentId, SequenceId};

    fn at(device: u16, page: u32) -> CopyPlace {
        (
            Location { device: DeviceIndex(device), segment: SegmentId(0), page, pages: 2 },
            u32::from(device) * 100 + page,
        )
    }

    fn catalog(copies: &[CopyPlace]) -> Catalog {
        let mut catalog = Catalog::default();
        for device in 0..5 {
            let meta = SegmentMeta {
                generation: 1,
                nonce: 1,
                pages: 64,
                kind: KIND_LOG,
                state: SegmentState::Open,
                used_pages: 1,
                last_lsn: 0,
                live_pages: copies.iter().filter(|(at, _)| at.device.0 == device).count() as u64 * 2,
            };
            catalog.segments.insert((DeviceIndex(device), SegmentId(0)), meta);
        }
        let copy = |(location, header_crc): &CopyPlace| CopyMeta {
            generation: 3,
            location: *location,
            header_crc: *header_crc,
        };
        let frame = FrameMeta {
            origin: SequenceId(1),
            lsn: 1,
            nonce: 1,
            location: copies[0].0,
            header_crc: copies[0].1,
            header_pages: 1,
            front_pages: 1,
            derived: false,
            refs: 1,
            other_copies: copies[1..].iter().map(copy).collect(),
        };
        catalog.frames.insert(FrameId(1), frame);
        catalog
    }

    fn copies() -> impl Strategy<Value = Vec<(u16, u32)>> {
        let devices = prop::sample::subsequence((0_u16..5).collect::<Vec<_>>(), 1..=3).prop_shuffle();
        (devices, prop::collection::vec(1_u32..30, 3))
            .prop_map(|(devices, pages)| devices.into_iter().zip(pages).collect())
    }

    proptest! {
        #[test]
        fn copies_become_what_is_wanted(seen in copies(), wanted in copies()) {
            // Places differ unless a copy stays.
            let seen: Vec<CopyPlace> = seen.into_iter().map(|(device, page)| at(device, page)).collect();
            let wanted: Vec<CopyPlace> = wanted.into_iter().map(|(device, page)| at(device, page)).collect();
            let mut catalog = catalog(&seen);
            let change = CopyChange { frame: FrameId(1), seen: seen.clone(), wanted: wanted.clone() };
            let mut records = RecordBuffer::default();
            change.push(&catalog.frames[&FrameId(1)].clone(), &mut records);
            records.apply(&mut catalog).unwrap();
            let now = places(&catalog.frames[&FrameId(1)]);
            prop_assert_eq!(now[0], wanted[0]);
            prop_assert_eq!(now.iter().collect::<HashSet<_>>(), wanted.iter().collect::<HashSet<_>>());
            for ((device, _), meta) in &catalog.segments {
                let own = wanted.iter().filter(|(at, _)| at.device == *device).count() as u64 * 2;
                prop_assert_eq!(meta.live_pages, own);
            }
            // A frame that has changed is left alone.
            let mut late = RecordBuffer::default();
            let other = CopyChange { seen: vec![at(4, 40)], ..change };
            other.push(&catalog.frames[&FrameId(1)].clone(), &mut late);
            prop_assert!(late.is_empty());
        }
    }
}
