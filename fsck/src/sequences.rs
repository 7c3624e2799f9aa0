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
        let mut adapter = Vec::new();
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
            adapter.extend_from_slice(&info.adapter);
            let clipped = info.spans.iter().map(|&(holds, first, end)| (holds, first, end.min(token_end)));
            spans.extend(clipped.filter(|(_, first, end)| first < end));
        }
        if let Some(text) = certain.then(|| wrong_adapter(sequence.adapter, &mut adapter)).flatten() {
            sink.push(Finding::damage(Code::Adapter, text).sequence(id));
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

/// What is wrong with the pieces of an adapter (layer, first byte, bytes) where a sequence holds one of `bytes` bytes: each layer
/// from its first byte on without gap or overlap, and all of them together.
fn wrong_adapter(bytes: Option<u64>, pieces: &mut [(u16, u64, u64)]) -> Option<String> {
    let Some(bytes) = bytes else {
        return (!pieces.is_empty()).then(|| "a frame holds an adapter, and its sequence none".to_owned());
    };
    pieces.sort_unstable();
    let mut end = (None, 0);
    for &(layer, first, len) in pieces.iter() {
        let expected = if end.0 == Some(layer) { end.1 } else { 0 };
        if first != expected {
            return Some(format!("layer {layer} of the adapter goes on at byte {first}, not at {expected}"));
        }
        end = (Some(layer), first + len);
    }
    let found: u64 = pieces.iter().map(|(.., len)| len).sum();
    (found != bytes).then(|| format!("an adapter of {bytes} bytes has {found} in its frames"))
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
    fn adapters_are_whole_or_not() {
        assert_eq!(wrong_adapter(None, &mut []), None);
        assert!(wrong_adapter(None, &mut [(0, 0, 1)]).is_some());
        assert_eq!(wrong_adapter(Some(7), &mut [(3, 0, 2), (1, 2, 2), (1, 0, 2), (4, 0, 1)]), None);
        assert!(wrong_adapter(Some(6), &mut [(3, 0, 2), (1, 3, 2), (1, 0, 2)]).is_some());
        assert!(wrong_adapter(Some(4), &mut [(1, 2, 4)]).is_some());
        assert!(wrong_adapter(Some(8), &mut [(1, 0, 4)]).is_some());
        assert!(wrong_adapter(Some(8), &mut [(1, 0, 4), (1, 2, 4)]).is_some());
    }

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
