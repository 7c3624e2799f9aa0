//! The manifest: all copies of a generation, compared side by side (SPEC.md sections 6 and 13).
//!
//! 1. The superblocks name a generation and its nonce ([`named_by_superblocks`]).
//! 2. Every device opens its copies of that generation. Each header page is checked ([`walk`]).
//! 3. The batches are compared place by place over all copies (`batches`).
//! 4. Files that no generation in force owns are reported as notes (`leftovers`).
//!
//! The caller replays the batches, and walks the next generation if the last record names one.

mod batches;
mod generation;
mod leftovers;

pub(crate) use generation::{Generation, Manifest};
pub(crate) use leftovers::report_leftovers;

use crate::devices::{Device, Devices};
use crate::finding::{Code, Finding, Sink};
use crate::io::{self, StoreFile};
use stratakv_format::manifest::{FILE_BYTES_MAX, ManifestPage, file_name};
use stratakv_format::{PAGE_BYTES, Unverified};

const PAGE: u64 = PAGE_BYTES as u64;

/// Returns the highest generation that a newest superblock slot names.
pub(crate) fn named_by_superblocks(devices: &Devices, sink: &Sink) -> Generation {
    let mut named = Generation { number: 0, nonce: 0 };
    for device in &devices.devices {
        let (number, nonce) = (device.newest.manifest_generation.get(), device.newest.manifest_nonce.get());
        if number > named.number {
            named = Generation { number, nonce };
        } else if number == named.number && nonce != named.nonce {
            let text =
                format!("the superblock names another nonce of manifest generation {number} than an earlier device");
            let finding = Finding::damage(Code::SuperblockMismatch, text).values(named.nonce, nonce);
            sink.push(finding.in_directory(Some(device.index), &device.path));
        }
    }
    named
}

/// Compares all copies of a generation from front to end.
///
/// `previous` is the generation whose last record names this one.
/// Returns `None` if no copy can be opened.
pub(crate) fn walk(devices: &Devices, generation: Generation, previous: Option<u64>, sink: &Sink) -> Option<Manifest> {
    let (copies, batches) = (Vec::new(), Vec::new());
    let mut manifest = Manifest {
        generation,
        copies,
        batches,
        replicas: false,
        codecs: false,
        pools: false,
        complete: false,
        bytes: 0,
    };
    let mut headers = HeaderCheck { devices, generation, previous, sink, first: None };
    for device in &devices.devices {
        for copy in 0..device.newest.manifest_copies {
            let name = file_name(generation.number, copy);
            let Some(mut file) = io::open(&device.directory, Some(device.index), &device.path, &name, sink) else {
                continue;
            };
            if file.bytes / PAGE * PAGE > FILE_BYTES_MAX {
                let text = format!("the file has {} bytes, above the maximum of {FILE_BYTES_MAX}", file.bytes);
                let finding = Finding::damage(Code::ManifestPage, text).values(FILE_BYTES_MAX, file.bytes);
                sink.push(finding.at(&file.place, FILE_BYTES_MAX, file.bytes - FILE_BYTES_MAX));
                continue;
            }
            headers.check(device, copy, &file);
            // A batch takes whole pages, so a reader ignores the part of a page at the end.
            file.bytes = file.bytes / PAGE * PAGE;
            manifest.bytes += PAGE;
            manifest.copies.push(file);
        }
    }
    if manifest.copies.is_empty() {
        let text = format!("no copy of manifest generation {} can be opened", generation.number);
        sink.push(Finding::damage(Code::MissingFile, text));
        return None;
    }
    let header = headers.first;
    manifest.replicas = header.is_none_or(|page| page.features.has_copies());
    manifest.codecs = header.is_none_or(|page| page.features.has_codecs());
    manifest.pools = header.is_none_or(|page| page.features.has_pools());
    let first = match header {
        Some(page) => page.first_batch.get(),
        // Every header page is damaged. The first batch names its own sequence number.
        None => manifest.copies.iter().find_map(|file| batches::first_sequence(file, generation, sink)).unwrap_or(1),
    };
    batches::walk(&mut manifest, devices, first, sink);
    Some(manifest)
}

/// The check of the header pages of one generation.
struct HeaderCheck<'a> {
    devices: &'a Devices,
    generation: Generation,
    previous: Option<u64>,
    sink: &'a Sink,
    /// The first header page that belongs to the generation. The others are compared with it.
    first: Option<ManifestPage>,
}

impl HeaderCheck<'_> {
    fn check(&mut self, device: &Device, copy: u8, file: &StoreFile) {
        let mut bytes = vec![0; PAGE_BYTES];
        if !file.read(0, &mut bytes, self.sink).is_empty() {
            return;
        }
        let damage = |text: &str| self.sink.push(Finding::damage(Code::ManifestPage, text).at(&file.place, 0, PAGE));
        let page = match Unverified::<ManifestPage>::at_front(&bytes, "manifest page").and_then(|page| page.verify()) {
            Ok(page) => page.into_inner(),
            Err(error) => return self.sink.push(Finding::format(Code::ManifestPage, &error).at(&file.place, 0, PAGE)),
        };
        if page.store_id != self.devices.store_id {
            return damage("the page belongs to another store");
        }
        if (page.generation.get(), page.nonce.get()) != (self.generation.number, self.generation.nonce) {
            return damage("the page belongs to another manifest generation");
        }
        if page.device.get() != device.index || page.copy != copy {
            damage("the page belongs to another device or copy");
        }
        if self.previous.is_some_and(|previous| page.previous_generation.get() != previous) {
            damage("the page does not name the generation before it as its predecessor");
        }
        if !page.features.writable() {
            self.sink.push(Finding::read_only_features(&file.place, 0));
        }
        match &self.first {
            None => self.first = Some(page),
            Some(other) => {
                let same = (other.previous_generation, other.first_batch, other.created_unix_s)
                    == (page.previous_generation, page.first_batch, page.created_unix_s);
                if !same {
                    damage("the page contradicts the header page of the first copy");
                }
            }
        }
    }
}
