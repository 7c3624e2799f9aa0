//! A small store on simulated disks, changed by the bytes of a fuzz input, and read by kvfsck and by the engine.
//!
//! The input is a list of changes of 8 bytes: file, page, two bytes of offset, length, value, step, seed.

use crate::{fix_page, fix_seeded};
use std::path::PathBuf;
use stratakv::sim::{Geometry, Simulation};
use stratakv::{ByteSize, DType, Durability, ErrorKind, KvLayout, SequenceOptions, Store, StoreOptions, Summary, TensorView};
use stratakv_format::{PAGE_BYTES, superblock};

const CHANGES_MAX: usize = 24;
const SEGMENT_PAGES: u64 = 12;

fn options() -> StoreOptions {
    Store::options().memory_limit(ByteSize::mib(8)).segment_bytes(ByteSize(SEGMENT_PAGES * 4096))
}

fn fill(store: &Store) -> stratakv::Result<()> {
    let layout = KvLayout::builder().layers(2).kv_heads(2).head_dim(16).group_tokens(4).dtype(DType::F16).build()?;
    for name in ["a", "b", "c"] {
        let mut sequence = store.create_sequence(&layout, SequenceOptions::new().key(name).summary(Summary::MinMax))?;
        for step in 0..3 {
            let tokens = 5 + step;
            let data: Vec<f32> = (0..tokens * 32).map(|i| (i % 61) as f32 / 8.0).collect();
            for layer in 0..2 {
                let view = || TensorView::token_major(&data, tokens, 2, 16);
                sequence.append(layer, view(), view())?;
            }
            sequence.push_token_ids(&[step as u32; 5])?;
            sequence.commit_with(b"state", Durability::Sync)?;
        }
        if name == "b" {
            sequence.delete(Durability::Sync)?;
        }
    }
    Ok(())
}

/// Opens the store and reads every token; the first error.
fn read_all(simulation: &Simulation) -> stratakv::Result<()> {
    let store = simulation.open(options())?;
    for info in store.sequences() {
        let sequence = store.open_sequence_id(stratakv::SequenceId(info.id))?;
        for layer in 0..2 {
            let view = sequence.select_all(layer)?;
            store.read(&[&view])?.wait()?.get(0)?;
        }
    }
    Ok(())
}

/// # Panics
/// kvfsck calls clean what the engine does not read, or either panics.
pub fn check(data: &[u8], fix: bool) {
    let devices = 1 + usize::from(data.first().is_some_and(|byte| byte & 1 == 1));
    let geometry = Geometry { devices, device_bytes: 64 << 20, manifest_pages: 6, batch_bytes: 4000, whole: false };
    let simulation = Simulation::new(&geometry, 7);
    let store = simulation.open(options()).expect("a new store");
    fill(&store).expect("a store to fill");
    if data.first().is_some_and(|byte| byte & 2 == 2) {
        simulation.crash();
        drop(store);
        simulation.restart();
    } else {
        store.close().expect("a store to close");
    }
    let slot = simulation.contents(0, superblock::FILE).expect("a superblock");
    let nonce = superblock::newest(&slot).expect("a slot").manifest_nonce.get();
    for change in data.get(1..).unwrap_or_default().as_chunks::<8>().0.iter().take(CHANGES_MAX) {
        apply(&simulation, devices, *change, fix.then_some(nonce));
    }
    let place = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a scratch directory");
    simulation.dump(place.path()).expect("a dump");
    let dirs: Vec<PathBuf> = (0..devices).map(|device| place.path().join(device.to_string())).collect();
    let report = kvfsck::check(&dirs, &kvfsck::Options { threads: 1, ..kvfsck::Options::default() }, &());
    let read = read_all(&simulation);
    if let (Ok(report), Err(e)) = (&report, &read)
        && report.clean
    {
        // Room and memory are no matter of the bytes being right.
        let about_bytes = !matches!(e.kind(), ErrorKind::NoSpace | ErrorKind::MemoryLimit | ErrorKind::Busy);
        assert!(!about_bytes, "kvfsck finds nothing, the engine says {e:?}\n{}", report.to_text());
    }
}

fn apply(simulation: &Simulation, devices: usize, change: [u8; 8], nonce: Option<u64>) {
    let [file, page, high, low, len, value, step, _] = change;
    let device = usize::from(file) % devices;
    let files = simulation.files(device);
    let Some(path) = files.get(usize::from(file / 2) % files.len().max(1)) else { return };
    let Some(mut bytes) = simulation.contents(device, path) else { return };
    let pages = bytes.len() / PAGE_BYTES;
    if pages == 0 {
        return;
    }
    let page = usize::from(page) % pages;
    let start = page * PAGE_BYTES + (usize::from(high) << 8 | usize::from(low)) % PAGE_BYTES;
    let end = (start + 1 + usize::from(len) % 64).min((page + 1) * PAGE_BYTES);
    for (nth, byte) in bytes[start..end].iter_mut().enumerate() {
        *byte ^= value.wrapping_add((nth as u8).wrapping_mul(step));
    }
    if let Some(nonce) = nonce {
        let own = &mut bytes[page * PAGE_BYTES..];
        if own.starts_with(b"SKMB") {
            fix_seeded(own, 40, nonce);
        } else {
            fix_page(&mut own[..PAGE_BYTES]);
        }
    }
    simulation.replace(device, path, &bytes);
}
