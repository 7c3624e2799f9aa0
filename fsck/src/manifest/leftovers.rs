//! Files in the manifest directories that no generation in force owns. They are notes, because no reader opens them.

use crate::devices::{Device, Devices};
use crate::finding::{Code, FilePlace, Finding, Sink};
use crate::io;
use std::collections::BTreeSet;
use stratakv_format::manifest::{DIRECTORY, ManifestPage, parse_file_name};
use stratakv_format::{PAGE_BYTES, Unverified};

/// Reports the files in the manifest directories that are neither a copy of a generation in force nor a usable reserve.
///
/// The generations in force are the one that the superblocks name and its successors. A store also reserves the files
/// of the next generation, so that a checkpoint finds space on a full device.
pub(crate) fn report_leftovers(devices: &Devices, in_force: &BTreeSet<u64>, sink: &Sink) {
    for device in &devices.devices {
        let Ok(directory) = io::open_directory(&device.directory, DIRECTORY) else { continue };
        for name in io::names(&directory).unwrap_or_default() {
            let text = match parse_file_name(&name) {
                Some((generation, copy)) if in_force.contains(&generation) && copy < device.newest.manifest_copies => {
                    continue;
                }
                Some((generation, copy))
                    if generation.checked_sub(1).is_some_and(|before| in_force.last() == Some(&before))
                        && copy < device.newest.manifest_copies =>
                {
                    match reserve_defect(devices, device, &name, (generation, copy), sink) {
                        Some(text) => text,
                        None => continue,
                    }
                }
                Some((generation, _)) if in_force.contains(&generation) => {
                    "the device does not hold this manifest copy"
                }
                Some(_) => "the manifest generation is not in force",
                None => "the file is not part of the store",
            };
            let place = FilePlace {
                device: Some(device.index),
                path: device.path.clone(),
                file: format!("{DIRECTORY}/{name}").into(),
            };
            sink.push(Finding::note(Code::Leftover, text).in_file(&place));
        }
    }
}

/// Returns why a file cannot be a reserve for the next generation, or `None` if it can.
///
/// A reserve holds zeros, an older generation of the same copy, or the beginning of the generation it is named for.
fn reserve_defect(
    devices: &Devices,
    device: &Device,
    name: &str,
    (generation, copy): (u64, u8),
    sink: &Sink,
) -> Option<&'static str> {
    let path = format!("{DIRECTORY}/{name}");
    let file = io::open(&device.directory, Some(device.index), &device.path, &path, sink)?;
    if !file.bytes.is_multiple_of(PAGE_BYTES as u64) {
        return Some("the file reserved for the next generation does not have whole pages");
    }
    let mut bytes = vec![0; PAGE_BYTES];
    if !file.read(0, &mut bytes, sink).is_empty() {
        return None;
    }
    let page = Unverified::<ManifestPage>::at_front(&bytes, "manifest page").and_then(|page| page.verify()).ok()?;
    let own = page.store_id == devices.store_id && (page.device.get(), page.copy) == (device.index, copy);
    let foreign = !own || page.generation.get() > generation;
    foreign.then_some("the file reserved for the next generation holds the manifest of another store, device or copy")
}
