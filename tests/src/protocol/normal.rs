//! Normal forms of closed stores, so that histories that differ in names only meet again.
//!
//! - Frames that no promise names, and manifest files that nothing names, can never be read: they become empty.
//! - Rounds and generations count from the smallest one. Their parity stays, because it decides places.
//! - Lives count from zero, in order, because only their equality matters.

use super::disk::{DeviceBytes, File, Record};
use std::collections::BTreeSet;

/// A number of a device that is renamed.
enum Name<'a> {
    Life(&'a mut u8),
    Commit(&'a mut u8),
    Generation(&'a mut u8),
}

/// Brings the devices of a closed store to their normal form. `promised` are the commits that an open may find. Returns
/// the next life.
pub(super) fn normalise(devices: &mut [DeviceBytes], promised: &mut [u8]) -> u8 {
    forget(devices, promised);
    for device in devices.iter_mut() {
        let least = device.slots.iter().flatten().map(|slot| slot.round).min().unwrap_or(0) & !1;
        device.slots.iter_mut().flatten().for_each(|slot| slot.round -= least);
    }
    let (mut lives, mut least) = (BTreeSet::new(), u8::MAX);
    let mut note = |name: Name<'_>| match name {
        Name::Life(life) => drop(lives.insert(*life)),
        Name::Commit(commit) if *commit != 0 => drop(lives.insert(*commit >> 4)),
        Name::Commit(_) => {}
        Name::Generation(generation) => least = least.min(*generation & !1),
    };
    devices.iter_mut().for_each(|device| visit(device, &mut note));
    promised.iter_mut().for_each(|commit| note(Name::Commit(commit)));
    let lives: Vec<u8> = lives.into_iter().collect();
    let rank = |life: u8| lives.iter().take_while(|known| **known < life).count() as u8;
    let rename = |name: Name<'_>| match name {
        Name::Life(life) => *life = rank(*life),
        Name::Commit(commit) if *commit != 0 => *commit = rank(*commit >> 4) << 4 | *commit & 15,
        Name::Commit(_) => {}
        Name::Generation(generation) => *generation -= least,
    };
    devices.iter_mut().for_each(|device| visit(device, &mut |name| rename(name)));
    promised.iter_mut().for_each(|commit| rename(Name::Commit(commit)));
    lives.len() as u8
}

/// Empties what can never be read.
fn forget(devices: &mut [DeviceBytes], promised: &[u8]) {
    let mut named: BTreeSet<(u8, u8)> =
        devices.iter().flat_map(|device| device.slots).flatten().map(|slot| (slot.generation, slot.life)).collect();
    let is_named = |file: &File, named: &BTreeSet<(u8, u8)>| named.contains(&(file.generation, file.life));
    loop {
        let before = named.len();
        for file in devices.iter().flat_map(|device| device.files).flatten() {
            let batches = file.batches.iter().flatten().filter(|_| is_named(&file, &named));
            let next: Vec<_> = batches
                .filter_map(|batch| match batch.record {
                    Record::Superseded { generation, life } => Some((generation, life)),
                    _ => None,
                })
                .collect();
            named.extend(next);
        }
        if named.len() == before {
            break;
        }
    }
    for device in devices {
        for file in &mut device.files {
            *file = file.filter(|file| is_named(file, &named));
        }
        for commit in device.frames.iter_mut().flatten().filter(|commit| !promised.contains(commit)) {
            *commit = 0;
        }
    }
}

/// Calls `f` on every name of a device.
fn visit(device: &mut DeviceBytes, f: &mut impl FnMut(Name<'_>)) {
    for slot in device.slots.iter_mut().flatten() {
        f(Name::Generation(&mut slot.generation));
        f(Name::Life(&mut slot.life));
    }
    device.frames.iter_mut().flatten().for_each(|commit| f(Name::Commit(commit)));
    for file in device.files.iter_mut().flatten() {
        f(Name::Generation(&mut file.generation));
        f(Name::Life(&mut file.life));
        for batch in file.batches.iter_mut().flatten() {
            match &mut batch.record {
                Record::Checkpoint(catalog) => {
                    catalog.halves.iter_mut().flatten().for_each(|commit| f(Name::Commit(commit)));
                }
                Record::Half { commits, .. } => commits.iter_mut().for_each(|commit| f(Name::Commit(commit))),
                Record::Superseded { generation, life } => {
                    f(Name::Generation(generation));
                    f(Name::Life(life));
                }
                Record::Lost(_) => {}
            }
        }
    }
}
