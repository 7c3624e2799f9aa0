//! Asks the engine and kvfsck about an image.

use super::image::Image;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use stratakv::sim::Simulation;
use stratakv::{
    CreateOptions, Durability, Error, ErrorKind, KvLayout, OpenSequence, SelectRequest, Sequence, SequenceId, Store,
    TensorView, attend,
};

/// The content of a store by sequence id: key, tokens, and a hash of everything that can be read.
pub type StoreContents = BTreeMap<u64, (String, u64, u64)>;

/// The answers of both readers.
#[derive(Debug)]
pub struct Judgement {
    /// The report of kvfsck, or the reason why it has none.
    pub check: Result<kvfsck::Report, kvfsck::CheckError>,
    /// The content that the engine reads, or its first error.
    pub held: Result<StoreContents, Error>,
}

impl Judgement {
    /// Returns whether kvfsck found nothing.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.check.as_ref().is_ok_and(|report| report.clean)
    }
}

/// Hashes everything that can be read of a sequence.
fn read(store: &Store, sequence: &Sequence) -> Result<u64, Error> {
    let mut hash = DefaultHasher::new();
    sequence.caller_state().hash(&mut hash);
    sequence.token_ids().hash(&mut hash);
    for layer in 0..sequence.layout().layers() {
        if sequence.layer_len(layer).unwrap_or(0) == 0 {
            continue;
        }
        let view = sequence.select(layer, SelectRequest::all())?;
        let batch = store.read(&[&view]).submit()?.wait()?;
        let blocks = batch.get(0)?;
        for nth in 0..view.groups().len() {
            blocks.group(nth)?.hash(&mut hash);
        }
        // Only attention shows the tail. An edited layout may have other dimensions than the image had.
        let mut out = [0.0; Image::HEAD_DIM];
        match attend(&[0.5; Image::HEAD_DIM], &view, blocks, &mut out) {
            Ok(()) => out.iter().for_each(|x| x.to_bits().hash(&mut hash)),
            Err(e) if e.kind() == ErrorKind::InvalidArgument => {}
            Err(e) => return Err(e),
        }
    }
    Ok(hash.finish())
}

fn hold(store: &Store) -> Result<StoreContents, Error> {
    let mut held = StoreContents::new();
    for info in store.sequences() {
        let sequence = store.open_sequence(SequenceId(info.id), OpenSequence::new())?;
        held.insert(info.id, (info.key.clone(), sequence.len(), read(store, &sequence)?));
    }
    Ok(held)
}

/// Opens the store on these devices and reads everything. Opens it read-only if it has features of a later version that
/// readers may ignore and writers may not.
///
/// # Errors
/// The first error of the engine.
pub fn recover(simulation: &Simulation) -> Result<StoreContents, Error> {
    let options = Image::options().create(false);
    let store = match simulation.open(options.clone()) {
        Err(e) if e.kind() == ErrorKind::Unsupported => simulation.open(options.read_only(true)).map_err(|_| e)?,
        opened => opened?,
    };
    hold(&store)
}

/// Opens the store and calls most of its operations. Each may fail, but none may panic. A store that closes well opens
/// again.
fn use_up(simulation: &Simulation) {
    let Ok(store) = simulation.open(Image::options().create(false)) else { return };
    let looked = |store: &Store| {
        let _ = (store.usage(), store.health(), store.status(), store.adapters());
    };
    looked(&store);
    for info in store.sequences() {
        let id = SequenceId(info.id);
        let _ = store.open_sequence(id, OpenSequence::new()).and_then(|mut sequence| {
            let fork = sequence.fork_as(&format!("fork of {id}"))?;
            add(&mut sequence)?;
            sequence.truncate(sequence.len() / 2)?;
            sequence.commit_with(b"after", Durability::Sync)?;
            fork.close()
        });
        looked(&store);
        // Sequences with odd ids stay, so that cleaning has frames to move.
        if info.id % 2 == 0 {
            let _ = store.delete_sequence_id(id, Durability::Sync);
        }
    }
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(Image::HEAD_DIM as u16).group_tokens(8);
    let options = CreateOptions::new().key("new").evictable(1);
    let _ = layout.build().and_then(|layout| store.create_sequence(&layout, options)).and_then(|mut sequence| {
        add(&mut sequence)?;
        sequence.commit(Durability::Sync)
    });
    let _ = (store.run_maintenance(), store.clean(), store.repair());
    looked(&store);
    let closed = store.close();
    let again = simulation.open(Image::options().create(false));
    if let (Ok(()), Err(e)) = (closed, &again) {
        let about_bytes = matches!(e.kind(), ErrorKind::Corruption | ErrorKind::Unsupported);
        assert!(!about_bytes, "a store that was opened, changed and closed does not open again: {e:?}");
    }
    drop(again.map(|store| hold(&store)));
}

/// Appends some tokens to every layer.
fn add(sequence: &mut Sequence) -> Result<(), Error> {
    for layer in 0..sequence.layout().layers() {
        let data = [0.25_f32; 10 * Image::HEAD_DIM];
        let view = TensorView::token_major(&data, 10, 1, Image::HEAD_DIM);
        sequence.append(layer, view, view)?;
    }
    Ok(())
}

/// Opens the store, cuts the power at the `operations`-th device operation, and restarts the devices.
pub fn recover_cut(simulation: &Simulation, operations: u64) {
    simulation.crash_in(operations);
    drop(simulation.open(Image::options().create(false)));
    simulation.crash();
    simulation.restart();
}

/// Returns the report of kvfsck on an image.
///
/// # Errors
/// kvfsck has no report.
///
/// # Panics
/// The image cannot be written.
pub fn check(image: &Image) -> Result<kvfsck::Report, kvfsck::CheckError> {
    let memory = Path::new("/dev/shm");
    let place = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
    let root = tempfile::tempdir_in(place).expect("a scratch directory");
    let dirs = image.write(root.path()).expect("the image as files");
    kvfsck::check(&dirs, &kvfsck::Options { threads: 1, ..kvfsck::Options::default() }, &())
}

/// Asks both readers, each with its own copy of the image. Also uses the store if it opens; nothing may panic.
///
/// # Panics
/// The image cannot be written for kvfsck.
#[must_use]
pub fn judge(image: &Image) -> Judgement {
    let check = check(image);
    let held = recover(&image.simulate(11));
    use_up(&image.simulate(12));
    Judgement { check, held }
}
