//! Sequences against the frames they refer to: is every committed token there?

use crate::devices::Devices;
use crate::finding::{Code, Finding, Sink};
use crate::frames::{FrameInfo, Holds};
use crate::overlay::{Overlay, gap};
use crate::replay::{Sequence, State};
use std::collections::HashMap;
use stratakv_format::frame::SUMMARY_MIN_MAX;
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
        // Frames that are damaged or on a missing device were reported: what they held is not known.
        let known = |(&frame, &end): (&u64, &u64)| Some(Part { frame, token_end: end, info: frames.get(&frame)? });
        let mut parts: Vec<Part<'_>> = sequence.refs.iter().filter_map(known).collect();
        parts.sort_unstable_by_key(|part| state.frames.get(&part.frame).map(|frame| frame.record.lsn.get()));
        for Part { frame, info, .. } in parts.iter().filter(|part| part.info.layout != sequence.layout) {
            let text = format!("frame {frame} has layout {}, its sequence {}", info.layout, sequence.layout);
            sink.push(Finding::damage(Code::FrameHeader, text).sequence(id).frame(*frame));
        }
        if parts.len() == sequence.refs.len() {
            for (layer, _) in layout.layers.iter().enumerate().filter(|(_, layer)| layer.has_kv()) {
                let (layer, group) = (layer as u16, u64::from(layout.group_tokens));
                for finding in check_layer(sequence, &parts, layer, group) {
                    sink.push(finding.sequence(id).layer(layer));
                }
            }
            if let Some((first, end)) = gap(spans(&parts, Holds::TokenIds), sequence.token_ids) {
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

/// A frame that a sequence refers to.
struct Part<'a> {
    frame: u64,
    /// Only tokens below this one.
    token_end: u64,
    info: &'a FrameInfo,
}

/// Where frames hold something, up to where they count, in rising order.
fn spans(parts: &[Part<'_>], holds: Holds) -> Vec<(u64, u64)> {
    let clipped = |part: &Part<'_>| {
        let end = part.token_end;
        let of_it = part.info.spans.iter().filter(move |(other, ..)| *other == holds);
        of_it.map(move |&(_, first, last)| (first, last.min(end))).filter(|(first, last)| first < last).collect()
    };
    let mut spans: Vec<(u64, u64)> = parts.iter().flat_map(|part: &Part<'_>| -> Vec<_> { clipped(part) }).collect();
    spans.sort_unstable();
    spans
}

/// Is every committed token of a layer there, and, where the sequence has them, the minima and maxima of every group? `parts`
/// rise in their LSNs.
fn check_layer(sequence: &Sequence, parts: &[Part<'_>], layer: u16, group: u64) -> Vec<Finding> {
    let (committed, mut findings) = (sequence.committed, Vec::new());
    let mut overlay = Overlay::new(group);
    for Part { frame, token_end, info } in parts {
        let clip = committed.min(*token_end);
        for &(_, first, end) in info.spans.iter().filter(|(holds, ..)| *holds == Holds::Groups(layer)) {
            if let Err(there) = overlay.lay_groups(first, end, clip) {
                let text = format!("groups begin behind the {there} that frames of lower LSN leave");
                findings.push(Finding::damage(Code::Overlay, text).frame(*frame).tokens(first, end));
                return findings;
            }
        }
        for &(_, first, end) in info.spans.iter().filter(|(holds, ..)| *holds == Holds::Tail(layer)) {
            overlay.lay_tail(first, end, clip);
        }
    }
    if sequence.summaries & 1 << (SUMMARY_MIN_MAX - 1) != 0 {
        let grouped = overlay.groups().min(committed / group) * group;
        if let Some((first, end)) = gap(spans(parts, Holds::MinMax(layer)), grouped) {
            let text = "no frame holds the minima and maxima of these groups";
            findings.push(Finding::damage(Code::Summary, text).tokens(first, end).plane("summary"));
        }
    }
    if let Some((first, end)) = overlay.missing(committed) {
        let text = format!("committed through token {committed}, and no frame that counts holds these");
        findings.push(Finding::damage(Code::Coverage, text).tokens(first, end));
    }
    findings
}
