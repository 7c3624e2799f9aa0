//! Stores on a scratch directory, and their files.

use crate::model::{Model, Shape, append};
use std::path::PathBuf;
use stratakv::options::CacheOptions;
use stratakv::{ByteSize, CreateOptions, Durability, Store, StoredSummary};
use stratakv_tests::damage::Image;
use stratakv_tests::disk::{device_dirs, fast_scratch, files, small_options};

pub(crate) fn open(dirs: &[PathBuf], cache: bool) -> Store {
    let options = small_options(dirs).segment_bytes(ByteSize::mib(1));
    let options = if cache { options.cache(CacheOptions::new(ByteSize::mib(2))) } else { options };
    options.open().expect("a store")
}

pub(crate) fn features(dirs: &[PathBuf]) -> Vec<u64> {
    let slot = |dir: &PathBuf| {
        let bytes = std::fs::read(dir.join("superblock")).expect("a superblock");
        stratakv_format::superblock::newest(&bytes).expect("a slot").features.incompat.get()
    };
    dirs.iter().map(slot).collect()
}

/// Writes and closes a store with one committed sequence `a` of `tokens` tokens.
pub(crate) fn stored(shape: &Shape, tokens: u64) -> (tempfile::TempDir, Vec<PathBuf>, Model) {
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), 1);
    let store = open(&dirs, false);
    let options = CreateOptions::new().key("a").store_summary(StoredSummary::MinMax);
    let mut sequence = store.create_sequence(&shape.layout(), options).expect("created");
    let mut model = Model::new(shape);
    let seeds: Vec<u64> = (0..tokens).collect();
    append(&mut sequence, shape, &seeds);
    seeds.iter().for_each(|seed| model.push(*seed));
    sequence.commit(Durability::Sync).expect("committed");
    drop(sequence);
    store.close().expect("closed");
    (scratch, dirs, model)
}

pub(crate) fn image_of(dirs: &[PathBuf]) -> Image {
    let mut image = Image { devices: dirs.len(), ..Image::base(1) };
    image.files.clear();
    for (device, dir) in dirs.iter().enumerate() {
        for file in files(dir) {
            let bytes = std::fs::read(dir.join(&file)).expect("a file");
            image.files.push((device, file.to_string_lossy().into_owned(), bytes));
        }
    }
    image
}
