//! The tables of docs/internals/recovery.md, row by row.
//!
//! 1. A store is written and killed, and its superblock slots and manifest copies are taken apart.
//! 2. Every combination of slots, copies and manifest ends is written, and opened twice read-only.
//! 3. The outcome must be the one of the table: the keys of the store and the number of damaged pieces, or a refusal.
//! 4. kvfsck must agree. A share of the combinations is also recovered for writing, after which nothing is damaged.
//!
//! A second test does the same for two devices.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use stratakv::{
    CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, Result, Store, StoreOptions, TensorView,
};
use stratakv_format::manifest::{self as m, Batch, BatchPlace, Kind, ManifestPage, encode_batch, encode_record};
use stratakv_format::superblock::Slot;
use stratakv_format::{PAGE_BYTES, Unverified};
use stratakv_tests::count_from_env;
use stratakv_tests::disk::{assert_clean, check, copy_devices, device_dirs, fast_scratch, small_options};
use stratakv_tests::rng::{Rng, mix};

/// The pages that a manifest file of an image is truncated to. The rest is zeros.
const MANIFEST_PAGES: usize = 40;

fn options(dirs: &[PathBuf]) -> StoreOptions {
    small_options(dirs).segment_bytes(stratakv::ByteSize::kib(64))
}

fn commit(store: &Store, key: &str) {
    let layout =
        KvLayout::builder().layers(1).kv_heads(1).head_dim(8).dtype(DType::F16).group_tokens(4).build().unwrap();
    let mut sequence = store.create_sequence(&layout, CreateOptions::new().key(key)).unwrap();
    let elements: Vec<f32> = (0..6 * 8).map(|i| i as f32).collect();
    let tensor = TensorView::token_major(&elements, 6, 1, 8);
    sequence.append(0, tensor, tensor).unwrap();
    sequence.commit(Durability::Sync).unwrap();
}

fn keys(store: &Store) -> BTreeSet<String> {
    for info in store.sequences() {
        assert_eq!(store.open_sequence(&info.key, OpenSequence::new()).unwrap().len(), 6);
    }
    store.sequences().into_iter().map(|info| info.key).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotIs {
    Good,
    Torn,
    /// It names an earlier generation, whose files are deleted.
    Stale,
    /// It belongs to another store.
    Foreign,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyIs {
    Good,
    /// Its header page is damaged.
    NoPage,
    /// A batch that is known to be durable is damaged.
    Damaged,
    /// It ends before the last two commits.
    Short,
    Missing,
}

/// The end of the manifest, in every copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Whole,
    /// The last commit is torn, and nothing records it as durable.
    LastTorn,
    /// The commit before the last is damaged, although the last records it as durable.
    BelowSynced,
    /// The last two commits are torn.
    TwoTorn,
    /// The next generation supersedes it and is whole, but the superblocks do not name it yet.
    Superseded,
    /// The record that supersedes it is torn. The next generation is whole.
    SupersededTorn,
    /// A generation without files supersedes it.
    SuccessorMissing,
}

const SLOTS: [SlotIs; 4] = [SlotIs::Good, SlotIs::Torn, SlotIs::Stale, SlotIs::Foreign];
const COPIES: [CopyIs; 5] = [CopyIs::Good, CopyIs::NoPage, CopyIs::Damaged, CopyIs::Short, CopyIs::Missing];
const ENDS: [End; 7] = [
    End::Whole,
    End::LastTorn,
    End::BelowSynced,
    End::TwoTorn,
    End::Superseded,
    End::SupersededTorn,
    End::SuccessorMissing,
];

/// A store of one device after a crash, and the pieces that replace its own.
struct Image {
    /// The directory with the segments and the superblock.
    dir: PathBuf,
    slots: [Slot; 2],
    stale: [Slot; 2],
    foreign: [Slot; 2],
    generation: u64,
    nonce: u64,
    /// The copies of the manifest, truncated to [`MANIFEST_PAGES`].
    copies: [Vec<u8>; 2],
    /// The page, number and `synced_through` of every batch.
    batches: Vec<(usize, u64, u64)>,
    next: [Vec<u8>; 2],
    next_nonce: u64,
}

fn slots(dir: &Path) -> [Slot; 2] {
    let bytes = fs::read(dir.join("superblock")).unwrap();
    [0, 1].map(|at| {
        let page = &bytes[at * PAGE_BYTES..(at + 1) * PAGE_BYTES];
        Unverified::<Slot>::at_front(page, "slot").and_then(|slot| slot.verify(at)).unwrap().into_inner()
    })
}

fn manifest(dir: &Path, generation: u64, copy: u8) -> Vec<u8> {
    let mut bytes = fs::read(dir.join(m::file_name(generation, copy))).unwrap();
    assert!(bytes[MANIFEST_PAGES * PAGE_BYTES..].iter().all(|byte| *byte == 0));
    bytes.truncate(MANIFEST_PAGES * PAGE_BYTES);
    bytes
}

fn page_of(file: &[u8]) -> ManifestPage {
    let page = Unverified::<ManifestPage>::at_front(&file[..PAGE_BYTES], "page").and_then(|page| page.verify());
    page.unwrap().into_inner()
}

fn image(root: &Path) -> Image {
    let one = |name: &str| device_dirs(&root.join(name), 1);
    let crashed = |dirs: &[PathBuf], name: &str| copy_devices(dirs, &root.join(name), &mut Rng(1));
    let first = one("first");
    let store = options(&first).open().unwrap();
    let stale = slots(&first[0]);
    commit(&store, "a");
    let second = crashed(&first, "second");
    options(&second).open().unwrap().close().unwrap();
    let store = options(&second).open().unwrap();
    commit(&store, "b");
    commit(&store, "c");
    let image = crashed(&second, "image");
    drop(store);
    let slots_now = slots(&image[0]);
    let (generation, nonce) = (slots_now[0].manifest_generation.get(), slots_now[0].manifest_nonce.get());
    assert!(slots_now.iter().all(|slot| slot.manifest_generation.get() == generation));
    assert!(stale.iter().all(|slot| slot.manifest_generation.get() < generation));
    let copies = [0, 1].map(|copy| manifest(&image[0], generation, copy));
    let mut batches = Vec::new();
    let (mut page, mut sequence) = (1, page_of(&copies[0]).first_batch.get());
    while let Ok(batch) = Batch::verify(&copies[0][page * PAGE_BYTES..], &BatchPlace { generation, nonce, sequence }) {
        batches.push((page, sequence, batch.header().synced_through.get()));
        page += batch.header().pages.get() as usize;
        sequence += 1;
    }
    let last = batches.len() - 1;
    // The other cases assume this.
    assert!(batches[last].2 >= batches[last - 1].1, "the last batch records the one before as durable");
    assert!(slots_now.iter().all(|slot| slot.synced_through.get() < batches[last - 1].1));
    assert!(slots_now.iter().all(|slot| slot.synced_through.get() >= batches[0].1));

    let third = crashed(&image, "third");
    let store = options(&third).open().unwrap();
    let next = [0, 1].map(|copy| manifest(&third[0], generation + 1, copy));
    assert_eq!(keys(&store).len(), 3);
    drop(store);
    let other = one("other");
    drop(options(&other).open().unwrap());
    let mut foreign = slots(&other[0]);
    for (slot, own) in foreign.iter_mut().zip(&slots_now) {
        slot.sequence = own.sequence;
    }
    for file in fs::read_dir(image[0].join("manifest")).unwrap() {
        fs::remove_file(file.unwrap().path()).unwrap();
    }
    let next_nonce = page_of(&next[0]).nonce.get();
    let dir = image[0].clone();
    Image { dir, slots: slots_now, stale, foreign, generation, nonce, copies, batches, next, next_nonce }
}

impl Image {
    fn slot(&self, at: usize, is: SlotIs) -> Option<&Slot> {
        match is {
            SlotIs::Good => Some(&self.slots[at]),
            SlotIs::Torn => None,
            SlotIs::Stale => Some(&self.stale[at]),
            SlotIs::Foreign => Some(&self.foreign[at]),
        }
    }

    /// Returns the batches of a copy, the superseding record included, and whether each is valid.
    fn batches_of(&self, is: CopyIs, end: End) -> Option<Vec<(u64, u64, bool)>> {
        if matches!(is, CopyIs::NoPage | CopyIs::Missing) {
            return None;
        }
        let last = self.batches.len() - 1;
        let mut all: Vec<_> = self.batches.iter().map(|(_, number, synced)| (*number, *synced, true)).collect();
        match end {
            End::Whole => {}
            End::LastTorn => all[last].2 = false,
            End::BelowSynced => all[last - 1].2 = false,
            End::TwoTorn => (all[last].2, all[last - 1].2) = (false, false),
            End::Superseded | End::SupersededTorn | End::SuccessorMissing => {
                all.push((all[last].0 + 1, all[last].0, end != End::SupersededTorn));
            }
        }
        match is {
            CopyIs::Damaged => all[0].2 = false,
            CopyIs::Short => all[last - 1..].iter_mut().for_each(|batch| batch.2 = false),
            _ => {}
        }
        Some(all)
    }

    /// Returns the keys that the table expects, or none if it expects a refusal.
    fn expected(&self, slots: [SlotIs; 2], copies: [CopyIs; 2], end: End) -> Option<&'static str> {
        let valid: Vec<&Slot> = (0..2).filter_map(|at| self.slot(at, slots[at])).collect();
        // The table refuses no valid slot, slots of two stores, and only foreign or stale slots.
        if !valid.iter().any(|slot| slot.store_id == self.slots[0].store_id)
            || valid.iter().any(|slot| slot.store_id != valid[0].store_id)
            || valid.iter().all(|slot| slot.manifest_generation.get() != self.generation)
        {
            return None;
        }
        let named = valid.iter().filter(|slot| slot.manifest_generation.get() == self.generation);
        let synced = named.map(|slot| slot.synced_through.get()).max().unwrap_or(0);
        let copies: Vec<_> = copies.iter().filter_map(|copy| self.batches_of(*copy, end)).collect();
        let length = copies.first()?.len();
        let right = |at: usize| copies.iter().any(|copy| copy[at].2);
        let stop = (0..length).find(|at| !right(*at)).unwrap_or(length);
        if stop < length {
            let number = copies[0][stop].0;
            let word = (stop..length).filter(|at| right(*at)).map(|at| copies[0][at].1).max().unwrap_or(0);
            if word.max(synced) >= number {
                return None;
            }
        }
        let last = self.batches.len() - 1;
        match stop {
            stop if stop > last + 1 => (end != End::SuccessorMissing).then_some("abc"),
            stop if stop == last + 1 => Some("abc"),
            stop if stop == last => Some("ab"),
            stop if stop == last - 1 => Some("a"),
            _ => None,
        }
    }

    /// Returns the number of damaged pieces if the store opens. A short copy counts as torn, unless a later batch of
    /// the other copy records the missing batches as durable.
    fn damaged(&self, slots: [SlotIs; 2], copies: [CopyIs; 2], end: End) -> u64 {
        let goes_on = |copy: CopyIs| matches!(copy, CopyIs::Good | CopyIs::Damaged);
        let known = copies.into_iter().any(goes_on) && !matches!(end, End::LastTorn | End::TwoTorn);
        let bad = |copy: &&CopyIs| **copy == CopyIs::Short && known || !goes_on(**copy) && **copy != CopyIs::Short;
        let damaged = |copy: &&CopyIs| bad(copy) || **copy == CopyIs::Damaged;
        let torn = slots.iter().filter(|slot| **slot != SlotIs::Good).count();
        (torn + copies.iter().filter(damaged).count()) as u64
    }

    fn write(&self, dir: &Path, slots: [SlotIs; 2], copies: [CopyIs; 2], end: End) {
        let mut superblock = Vec::new();
        for (at, is) in slots.into_iter().enumerate() {
            match self.slot(at, is) {
                Some(slot) => superblock.extend(slot.encode()),
                None => {
                    let mut page = self.slots[at].encode();
                    page[70..300].fill(0x5a);
                    superblock.extend(page);
                }
            }
        }
        fs::write(dir.join("superblock"), superblock).unwrap();
        for file in fs::read_dir(dir.join("manifest")).unwrap() {
            fs::remove_file(file.unwrap().path()).unwrap();
        }
        let last = self.batches.len() - 1;
        let page_of = |batch: usize| self.batches[batch].0;
        for (copy, is) in copies.into_iter().enumerate() {
            if is == CopyIs::Missing {
                continue;
            }
            let mut file = self.copies[copy].clone();
            let place =
                BatchPlace { generation: self.generation, nonce: self.nonce, sequence: self.batches[last].1 + 1 };
            // The first sector of a torn batch was written, the others were not.
            let tear = |file: &mut Vec<u8>, page: usize| file[page * PAGE_BYTES + 56..(page + 1) * PAGE_BYTES].fill(0);
            let behind = MANIFEST_PAGES.min(page_of(last) + 1);
            match end {
                End::Whole => {}
                End::LastTorn => tear(&mut file, page_of(last)),
                End::BelowSynced => tear(&mut file, page_of(last - 1)),
                End::TwoTorn => (last - 1..=last).for_each(|batch| tear(&mut file, page_of(batch))),
                End::Superseded | End::SupersededTorn | End::SuccessorMissing => {
                    let mut record = Vec::new();
                    let (generation, nonce) = ((self.generation + 1).into(), self.next_nonce.into());
                    encode_record(&mut record, Kind::Superseded, &m::Superseded { generation, nonce }, &[]);
                    let batch = encode_batch(&place, place.sequence - 1, 1, 0, &record, 1).unwrap();
                    file[behind * PAGE_BYTES..][..batch.len()].copy_from_slice(&batch);
                    if end == End::SupersededTorn {
                        tear(&mut file, behind);
                    }
                }
            }
            match is {
                CopyIs::Good | CopyIs::Missing => {}
                CopyIs::NoPage => file[40] ^= 1,
                CopyIs::Damaged => file[page_of(0) * PAGE_BYTES + 60] ^= 1,
                CopyIs::Short => file.truncate(page_of(last - 1) * PAGE_BYTES),
            }
            fs::write(dir.join(m::file_name(self.generation, copy as u8)), file).unwrap();
        }
        if matches!(end, End::Superseded | End::SupersededTorn) {
            for (copy, file) in self.next.iter().enumerate() {
                fs::write(dir.join(m::file_name(self.generation + 1, copy as u8)), file).unwrap();
            }
        }
        for entry in fs::read_dir(dir.join("manifest")).unwrap() {
            use std::os::unix::fs::PermissionsExt;
            fs::set_permissions(entry.unwrap().path(), fs::Permissions::from_mode(0o600)).unwrap();
        }
    }
}

/// Returns the number of metadata pieces that the open store has found damaged.
fn damaged(store: &Store) -> u64 {
    let health = store.health();
    let damaged = health.devices.iter().map(|device| device.damaged_metadata).sum();
    let well = damaged == 0 && health.read_only.is_none();
    assert_eq!(health.is_well(), well, "{health:?}");
    assert_eq!(health.owed_manifests, 0, "{health:?}");
    damaged
}

/// Returns the keys and the number of damaged pieces. Returns none if the store is refused as damaged or as not
/// belonging together. Fails on any other error.
fn outcome(opened: Result<Store>) -> Option<(BTreeSet<String>, u64)> {
    match opened {
        Ok(store) => {
            let found = (keys(&store), damaged(&store));
            store.close().unwrap();
            Some(found)
        }
        Err(e) => {
            let expected = [ErrorKind::Corruption, ErrorKind::Configuration];
            assert!(expected.contains(&e.kind()), "{:?}: {e}", e.kind());
            None
        }
    }
}

#[test]
fn every_combination_of_one_device_has_the_outcome_of_the_table() {
    let scratch = fast_scratch();
    let image = image(scratch.path());
    let dirs = [image.dir.clone()];
    // A writable recovery writes megabytes, so only one combination in `share` is recovered.
    let share = count_from_env("STRATAKV_TEST_RECOVERIES", 9) as u64;
    let (mut opened, mut refused, mut recovered) = (0, 0, 0);
    for (number, first) in SLOTS.iter().enumerate() {
        for second in SLOTS {
            for copy in COPIES {
                for other in COPIES {
                    for end in ENDS {
                        let (slots, copies) = ([*first, second], [copy, other]);
                        let what = format!("{slots:?}, {copies:?}, {end:?}");
                        let expected = image.expected(slots, copies, end);
                        let expected: Option<BTreeSet<String>> =
                            expected.map(|keys| keys.chars().map(String::from).collect());
                        image.write(&dirs[0], slots, copies, end);
                        let report = check(&dirs);
                        let bad = image.damaged(slots, copies, end);
                        let expected = expected.map(|keys| (keys, bad));
                        // Two read-only opens must have the same outcome.
                        for _ in 0..2 {
                            let found = outcome(options(&dirs).read_only(true).open());
                            assert_eq!(found, expected, "{what}\n{}", report.to_text());
                            let told = found.is_none_or(|(_, damaged)| (damaged > 0) != report.clean);
                            assert!(told, "{what}: {bad} damaged\n{}", report.to_text());
                        }
                        let case = mix(number as u64 * 1_000_003 + opened * 7 + refused);
                        if expected.is_none() {
                            refused += 1;
                            assert!(!report.clean, "{what}: refused, but kvfsck finds nothing");
                            assert_eq!(outcome(options(&dirs).open()), None, "{what}");
                            continue;
                        }
                        opened += 1;
                        if !case.is_multiple_of(share) {
                            continue;
                        }
                        recovered += 1;
                        let target = scratch.path().join("recovered");
                        let dirs = copy_devices(&dirs, &target, &mut Rng(case));
                        assert_eq!(outcome(options(&dirs).open()), expected, "{what}, recovered");
                        // The recovery repaired all damage.
                        let expected = expected.map(|(keys, _)| (keys, 0));
                        assert_eq!(outcome(options(&dirs).open()), expected, "{what}, recovered and opened again");
                        assert_clean(&dirs, &what);
                        fs::remove_dir_all(target).unwrap();
                    }
                }
            }
        }
    }
    println!("{opened} combinations open, {refused} are refused, {recovered} of the former were recovered for writing");
    assert_eq!(opened + refused, 4 * 4 * 5 * 5 * 7);
    assert!(opened > 150 && recovered > 10);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceIs {
    Good,
    /// The device is not given.
    Missing,
    /// The device of the same index of another store.
    Foreign,
    /// Both slots are torn.
    NoSuperblock,
    /// One slot is torn.
    OneSlot,
    /// Its copy of the manifest is deleted.
    NoManifest,
    /// The directory is empty.
    Empty,
    /// A copy of the other device.
    Doubled,
}

const DEVICES: [DeviceIs; 8] = [
    DeviceIs::Good,
    DeviceIs::Missing,
    DeviceIs::Foreign,
    DeviceIs::NoSuperblock,
    DeviceIs::OneSlot,
    DeviceIs::NoManifest,
    DeviceIs::Empty,
    DeviceIs::Doubled,
];

/// Makes device `at` below `root` from the devices of both stores. A missing device has no directory.
fn make_device(is: DeviceIs, at: usize, (own, foreign): (&[PathBuf], &[PathBuf]), root: &Path) -> Option<PathBuf> {
    let from = match is {
        DeviceIs::Missing => return None,
        DeviceIs::Foreign => &foreign[at],
        DeviceIs::Doubled => &own[1 - at],
        _ => &own[at],
    };
    let dir = copy_devices(std::slice::from_ref(from), &root.join(at.to_string()), &mut Rng(2)).remove(0);
    let superblock = dir.join("superblock");
    match is {
        DeviceIs::NoSuperblock => fs::write(superblock, vec![0x5a; 2 * PAGE_BYTES]).unwrap(),
        DeviceIs::OneSlot => {
            let bytes = [slots(&dir)[0].encode().to_vec(), vec![0x5a; PAGE_BYTES]].concat();
            fs::write(superblock, bytes).unwrap();
        }
        DeviceIs::NoManifest => {
            for file in fs::read_dir(dir.join("manifest")).unwrap() {
                fs::remove_file(file.unwrap().path()).unwrap();
            }
        }
        DeviceIs::Empty => {
            fs::remove_dir_all(&dir).unwrap();
            let _ = device_dirs(&root.join(at.to_string()), 1);
        }
        _ => {}
    }
    Some(dir)
}

#[test]
fn every_combination_of_two_devices_has_the_outcome_of_the_table() {
    let scratch = fast_scratch();
    let make = |name: &str| {
        let dirs = device_dirs(&scratch.path().join(name), 2);
        let store = options(&dirs).open().unwrap();
        commit(&store, "a");
        commit(&store, "b");
        copy_devices(&dirs, &scratch.path().join(format!("{name}-crashed")), &mut Rng(1))
    };
    let (own, foreign) = (make("own"), make("foreign"));
    let mut opened = 0;
    for first in DEVICES {
        for second in DEVICES {
            let what = format!("{first:?}, {second:?}");
            let root = scratch.path().join("case");
            fs::create_dir_all(&root).unwrap();
            let mut dirs = Vec::new();
            for (at, is) in [first, second].into_iter().enumerate() {
                dirs.extend(make_device(is, at, (&own, &foreign), &root));
            }
            let whole = [DeviceIs::Good, DeviceIs::OneSlot, DeviceIs::NoManifest];
            let both = [DeviceIs::Foreign, DeviceIs::Doubled];
            // Two devices of the other store make that store, and swapping a pair does not change it.
            let other_store = both.contains(&first) && second == first;
            let fits = whole.contains(&first) && whole.contains(&second) || other_store;
            let lost = first == DeviceIs::NoManifest && second == DeviceIs::NoManifest;
            let expected = fits && !lost;
            let created = [first, second].iter().all(|is| matches!(is, DeviceIs::Empty | DeviceIs::Missing));
            if !dirs.is_empty() && !created {
                let report = kvfsck::check(&dirs, &kvfsck::Options::default(), &());
                let clean = report.as_ref().is_ok_and(|report| report.clean);
                assert!(expected || !clean, "{what}: refused, but kvfsck finds nothing");
            }
            let bad =
                [first, second].iter().filter(|is| matches!(is, DeviceIs::OneSlot | DeviceIs::NoManifest)).count();
            // The third open is writable and repairs the damage.
            for (write, bad) in [(false, bad), (false, bad), (true, bad), (true, 0)] {
                let found = outcome(options(&dirs).read_only(!write).create(false).open());
                assert_eq!(found.is_some(), expected, "{what}");
                if let Some((keys, damaged)) = found {
                    opened += 1;
                    assert_eq!(damaged, bad as u64, "{what}");
                    assert_eq!(keys.len(), 2, "{what}");
                }
            }
            if expected {
                assert_clean(&dirs, &what);
            }
            fs::remove_dir_all(root).unwrap();
        }
    }
    assert_eq!(opened, 4 * (3 * 3 - 1 + 2));
}
