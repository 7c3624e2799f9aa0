//! Members and sequences, compared with what the frame headers say.
//!
//! 1. Each device that was given must be an active member of the store.
//! 2. Every frame that a sequence refers to must have its layout.
//! 3. For each layer with KV, the frames must hold every committed token. A frame must hold the min/max summaries of
//!    its own groups.
//! 4. The frames must hold every committed token id, and the caller state where the last commit says.
//!
//! Tokens and token ids of a sequence are not checked if one of its frames is damaged or on a missing device. The frame
//! or the device was reported, and the content of the frame is unknown.

use crate::devices::Devices;
use crate::finding::{Code, Finding, Sink};
use crate::frames::{ExtentContent, FrameInfo};
use crate::overlay::{Overlay, first_gap};
use crate::replay::{Sequence, State};
use std::collections::HashMap;
use std::ops::Range;
use stratakv_format::frame::SUMMARY_MIN_MAX;
use stratakv_format::layout::Layout;
use stratakv_format::manifest::{MEMBER_ACTIVE, MEMBER_DRAINING, MEMBER_LOST};

/// Checks members and sequences. `frames` holds the frames whose header is valid.
pub(crate) fn check(devices: &Devices, state: &State, frames: &HashMap<u64, FrameInfo>, sink: &Sink) {
    check_members(devices, state, sink);
    for (&id, sequence) in state.sequences() {
        let Some(layout) = state.layouts.get(&sequence.layout) else { continue };
        check_tokens(id, sequence, layout, state, frames, sink);
        if let Some(text) = state_frame_defect(sequence, state, frames) {
            let finding = Finding::damage(Code::CallerState, text).sequence(id).frame(sequence.state_frame);
            sink.push(finding.plane("caller-state"));
        }
    }
}

/// Reports devices that were given and are not active members.
fn check_members(devices: &Devices, state: &State, sink: &Sink) {
    for device in &devices.devices {
        let (code, text) = match state.members.get(&device.index) {
            None => (Code::ManifestRecord, "the manifest does not name this device"),
            Some(member) if member.device_id != device.newest.device_id => {
                (Code::ForeignDevice, "the manifest names another device with this index")
            }
            Some(member) => match member.state {
                MEMBER_ACTIVE | MEMBER_DRAINING => continue,
                MEMBER_LOST => (Code::StaleDevice, "the store has declared this device lost and ignores what it holds"),
                _ => (Code::StaleDevice, "the store has removed this device and ignores what it holds"),
            },
        };
        sink.push(Finding::damage(code, text).in_directory(Some(device.index), &device.path));
    }
}

/// A frame that a sequence refers to.
struct ReferencedFrame<'a> {
    id: u64,
    /// Only tokens below this one belong to the sequence.
    token_end: u64,
    info: &'a FrameInfo,
}

/// Reports the layers, groups and token ids that the frames of a sequence do not hold.
fn check_tokens(
    id: u64,
    sequence: &Sequence,
    layout: &Layout,
    state: &State,
    frames: &HashMap<u64, FrameInfo>,
    sink: &Sink,
) {
    // Derived frames hold no token.
    let needed = || sequence.refs.iter().filter(|(id, _)| !state.is_derived(**id));
    let known = |(&id, &token_end): (&u64, &u64)| Some(ReferencedFrame { id, token_end, info: frames.get(&id)? });
    let mut referenced: Vec<ReferencedFrame<'_>> = needed().filter_map(known).collect();
    referenced.sort_unstable_by_key(|frame| state.frames().get(&frame.id).map(|frame| frame.record.lsn.get()));
    for frame in referenced.iter().filter(|frame| frame.info.layout != sequence.layout) {
        let text = format!("the frame has layout {}, its sequence layout {}", frame.info.layout, sequence.layout);
        sink.push(Finding::damage(Code::FrameHeader, text).sequence(id).frame(frame.id));
    }
    if referenced.len() < needed().count() {
        return;
    }
    for (layer, _) in layout.layers.iter().enumerate().filter(|(_, layer)| layer.has_kv()) {
        let (layer, group) = (layer as u16, u64::from(layout.group_tokens));
        for finding in check_layer(sequence, &referenced, layer, group) {
            sink.push(finding.sequence(id).layer(layer));
        }
    }
    if let Some((first, end)) = first_gap(spans(&referenced, ExtentContent::TokenIds), 0..sequence.token_ids) {
        let text = format!("{} token ids are committed, but no frame holds these", sequence.token_ids);
        sink.push(Finding::damage(Code::TokenIds, text).sequence(id).tokens(first, end));
    }
}

/// Returns what is wrong with the frame that the last commit names for the caller state.
fn state_frame_defect(sequence: &Sequence, state: &State, frames: &HashMap<u64, FrameInfo>) -> Option<&'static str> {
    let frame = sequence.state_frame;
    if frame == 0 {
        return None;
    }
    match (state.frames().contains_key(&frame), frames.get(&frame)) {
        (false, _) => Some("the commit names a frame for the caller state that does not exist"),
        (true, _) if !sequence.refs.contains_key(&frame) => {
            Some("the commit names a frame for the caller state that the sequence does not refer to")
        }
        (true, Some(info)) if !info.has_state => {
            Some("the commit names a frame for the caller state that holds no caller state")
        }
        _ => None,
    }
}

/// Returns the ranges of tokens that frames hold of one content, sorted. References clip them.
fn spans(frames: &[ReferencedFrame<'_>], content: ExtentContent) -> Vec<(u64, u64)> {
    let clipped = |frame: &ReferencedFrame<'_>| -> Vec<(u64, u64)> {
        let own = frame.info.spans.iter().filter(|(other, ..)| *other == content);
        own.map(|&(_, first, end)| (first, end.min(frame.token_end))).filter(|(first, end)| first < end).collect()
    };
    let mut spans: Vec<(u64, u64)> = frames.iter().flat_map(clipped).collect();
    spans.sort_unstable();
    spans
}

/// Returns the first of these tokens of a layer whose min/max summaries the frame does not hold.
fn first_without_min_max(info: &FrameInfo, layer: u16, tokens: Range<u64>) -> Option<(u64, u64)> {
    let own = info.spans.iter().filter(|(content, ..)| *content == ExtentContent::MinMax(layer));
    let mut spans: Vec<(u64, u64)> = own.map(|&(_, first, end)| (first, end)).collect();
    spans.sort_unstable();
    first_gap(spans, tokens)
}

/// Returns what is missing of one layer: committed tokens, and min/max summaries if the sequence has them.
///
/// `frames` are ordered by LSN. Their groups must continue each other, as SPEC.md chapter 13 step 10 demands.
fn check_layer(sequence: &Sequence, frames: &[ReferencedFrame<'_>], layer: u16, group: u64) -> Vec<Finding> {
    let (committed, mut findings) = (sequence.committed, Vec::new());
    let has_min_max = sequence.summaries & 1 << (SUMMARY_MIN_MAX - 1) != 0;
    let mut overlay = Overlay::new(group);
    for ReferencedFrame { id, token_end, info } in frames {
        let clip = committed.min(*token_end);
        for &(_, first, end) in info.spans.iter().filter(|(content, ..)| *content == ExtentContent::Groups(layer)) {
            let whole = end.min(clip / group * group);
            if has_min_max && let Some((first, end)) = first_without_min_max(info, layer, first..whole) {
                let text = "the frame of these groups holds no min/max summaries of them";
                let finding = Finding::damage(Code::Summary, text).frame(*id).tokens(first, end);
                findings.push(finding.plane("summary"));
            }
            if let Err(groups) = overlay.add_groups(first, end, clip) {
                let text = format!("the groups begin past the {groups} groups that frames of lower LSNs hold");
                findings.push(Finding::damage(Code::Overlay, text).frame(*id).tokens(first, end));
                return findings;
            }
        }
        for &(_, first, end) in info.spans.iter().filter(|(content, ..)| *content == ExtentContent::Tail(layer)) {
            overlay.add_tail(first, end, clip);
        }
    }
    if let Some((first, end)) = overlay.missing(committed) {
        let text = format!("{committed} tokens are committed, but no frame holds these");
        findings.push(Finding::damage(Code::Coverage, text).tokens(first, end));
    }
    findings
}
