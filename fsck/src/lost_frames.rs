//! Frames that a sequence needs and that only devices held which left the store.
//!
//! A store without such a device opens. A sequence with such a frame does not.

use crate::devices::Devices;
use crate::finding::{Code, Finding, Sink};
use crate::replay::{Sequence, State};
use stratakv_format::Location;

/// Reports each sequence that needs frames of which every copy is on a device that left the store.
///
/// A copy on a device that was given is not lost, because it can be read. Derived frames are never needed.
pub(crate) fn check(devices: &Devices, state: &State, sink: &Sink) {
    let is_gone = |location: Location| devices.get(location.device.0).is_none() && state.has_left(location.device.0);
    for (&id, sequence) in state.sequences() {
        lost_of(id, sequence, state, &is_gone).into_iter().for_each(|finding| sink.push(finding));
    }
}

/// Returns one finding for all lost frames of a sequence, because a device may have held many.
fn lost_of(id: u64, sequence: &Sequence, state: &State, is_gone: &dyn Fn(Location) -> bool) -> Option<Finding> {
    let needed = sequence.refs.keys().filter_map(|frame| Some((*frame, state.frames().get(frame)?)));
    let mut lost = needed.filter(|(_, frame)| !frame.is_derived() && frame.locations().all(is_gone));
    let (first, frame) = lost.next()?;
    let text = match lost.count() {
        0 => "every copy of this frame is on a device that left the store".to_owned(),
        more => format!("every copy of this frame and of {more} more is on a device that left the store"),
    };
    let mut finding = Finding::damage(Code::MissingDevice, text).sequence(id).frame(first);
    finding.device = Some(frame.location.device.0);
    Some(finding)
}
