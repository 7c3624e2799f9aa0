//! Sequences against the frames they refer to: is every committed token there?

use crate::devices::Devices;
use crate::finding::{Code, Finding, Sink};
use crate::frames::{FrameInfo, Holds};
use crate::replay::State;
use std::collections::HashMap;
use stratakv_format::manifest::{MEMBER_ACTIVE, MEMBER_DRAINING, MEMBER_LOST};

/// Checks members, and each sequence: layouts, tokens per layer, token ids, caller state. `frames` has the frames whose
/// header was good.
pub(crate) fn check(devices: &Devices, state: &State, frames: &HashMap<u64, FrameInfo>, sink: &Sink) {
    for device in &devices.devices {
        let at = |finding: Finding| finding.in_directory(Some(device.index), &device.path);
        match state.members.get(&device.index) {
            None => sink.push(at(Finding::damage(Code::ManifestRecord, "the manifest does not know this device"))),
            Some(member) if member.device_id != device.newest.device_id => {
                sink.push(at(Finding::damage(Code::ForeignDevice, "the manifest has another device of this index")));
            }
            Some(member) if member.state != MEMBER_ACTIVE && member.state != MEMBER_DRAINING => {
                let text = format!(
                    "the store {} this device, and no longer counts on what it holds",
                    match member.state {
                        MEMBER_LOST => "has given up",
                        _ => "has removed",
                    }
                );
                sink.push(at(Finding::damage(Code::StaleDevice, text)));
            }
            Some(_) => {}
        }
    }
    for (&id, sequence) in &state.sequences {
        let Some(layout) = state.layouts.get(&sequence.layout) else { continue };
        let mut spans: Vec<(Holds, u64, u64)> = Vec::new();
        let mut certain = true;
        for (frame, &token_end) in &sequence.refs {
            let Some(info) = frames.get(frame) else {
                // Damaged or on a missing device, and reported: what it held is not known.
                certain = false;
                continue;
            };
            if info.layout != sequence.layout {
                let text = format!("frame {frame} has layout {}, its sequence {}", info.layout, sequence.layout);
                sink.push(Finding::damage(Code::FrameHeader, text).sequence(id).frame(*frame));
            }
            let clipped = info.spans.iter().map(|&(holds, first, end)| (holds, first, end.min(token_end)));
            spans.extend(clipped.filter(|(_, first, end)| first < end));
        }
        if certain {
            spans.sort_unstable();
            for (layer, _) in layout.layers.iter().enumerate().filter(|(_, layer)| layer.has_kv()) {
                let layer = layer as u16;
                if let Some((first, end)) = gap(&spans, Holds::Layer(layer), sequence.committed) {
                    let text = format!("committed through token {}, and no frame holds these", sequence.committed);
                    let finding = Finding::damage(Code::Coverage, text).sequence(id).layer(layer);
                    sink.push(finding.tokens(first, end));
                }
            }
            if let Some((first, end)) = gap(&spans, Holds::TokenIds, sequence.token_ids) {
                let text = format!("{} token ids committed, and no frame holds these", sequence.token_ids);
                sink.push(Finding::damage(Code::TokenIds, text).sequence(id).tokens(first, end));
            }
        }
        if sequence.state_frame != 0 {
            let frame = sequence.state_frame;
            let text = match (state.frames.contains_key(&frame), frames.get(&frame)) {
                (false, _) => "the frame with the caller's state does not exist",
                (true, _) if !sequence.refs.contains_key(&frame) => {
                    "the frame with the caller's state is none that the sequence refers to"
                }
                (true, Some(info)) if !info.has_state => "the frame with the caller's state holds none",
                _ => continue,
            };
            sink.push(Finding::damage(Code::CallerState, text).sequence(id).frame(frame).plane("caller-state"));
        }
    }
}

/// The first tokens below `end` that no span of `holds` covers. `spans` is sorted.
fn gap(spans: &[(Holds, u64, u64)], holds: Holds, end: u64) -> Option<(u64, u64)> {
    let from = spans.partition_point(|(other, ..)| *other < holds);
    let mut covered = 0;
    for &(_, first, last) in spans[from..].iter().take_while(|(other, ..)| *other == holds) {
        if first > covered {
            return (covered < end).then(|| (covered, first.min(end)));
        }
        covered = covered.max(last);
    }
    (covered < end).then_some((covered, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_found_at_front_middle_and_end() {
        let layer = Holds::Layer(1);
        let spans = [(Holds::Layer(0), 0, 99), (layer, 0, 4), (layer, 2, 8), (layer, 10, 12), (Holds::TokenIds, 0, 99)];
        assert_eq!(gap(&spans, layer, 8), None);
        assert_eq!(gap(&spans, layer, 9), Some((8, 9)));
        assert_eq!(gap(&spans, layer, 12), Some((8, 10)));
        assert_eq!(gap(&spans[..3], layer, 20), Some((8, 20)));
        assert_eq!(gap(&spans, Holds::Layer(2), 1), Some((0, 1)));
        assert_eq!(gap(&spans, Holds::Layer(2), 0), None);
    }
}
