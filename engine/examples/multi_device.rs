//! Spreads a sequence over three devices with two copies of everything, loses one device, and reads on.
//!
//! `cargo run --release -p stratakv --example multi_device`

use std::path::{Path, PathBuf};
use stratakv::{
    Budget, CreateOptions, Durability, KvLayout, OpenSequence, SelectRequest, Store, StoreOptions, StoredSummary,
    TensorView, attend,
};

const HEADS: usize = 4;
const DIM: usize = 128;
const TOKENS: usize = 8192;

/// Attends to 512 tokens of the sequence.
fn step(store: &Store) -> stratakv::Result<Vec<f32>> {
    let sequence = store.open_sequence("shared", OpenSequence::new())?;
    let (query, mut out) = (vec![0.1; 16 * DIM], vec![0.0; 16 * DIM]);
    let selection = sequence.select(0, SelectRequest::query(&query).budget(Budget::tokens(512)))?;
    let batch = store.read(&[&selection]).wait()?;
    attend(&query, &selection, batch.get(0)?, &mut out)?;
    Ok(out)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = tempfile::tempdir()?;
    let paths = ["ssd0", "ssd1", "ssd2"].map(|name| root.path().join(name));
    paths.iter().try_for_each(std::fs::create_dir)?;
    let devices =
        |paths: &[&Path]| paths.iter().fold(Store::options(), |options: StoreOptions, path| options.device(path));

    let store = devices(&[&paths[0], &paths[1], &paths[2]]).open()?;
    let layout = KvLayout::builder().layers(1).kv_heads(HEADS as u16).head_dim(DIM as u16).group_tokens(8).build()?;
    let options = CreateOptions::new().key("shared").copies(2).store_summary(StoredSummary::MinMax);
    let mut sequence = store.create_sequence(&layout, options)?;
    let kv: Vec<f32> = (0..TOKENS * HEADS * DIM).map(|i| (i as f32 * 0.37).sin()).collect();
    let view = TensorView::token_major(&kv, TOKENS, HEADS, DIM);
    sequence.append(0, view, view)?;
    sequence.commit(Durability::Sync)?;
    let copies = sequence.group_devices(0, 7)?;
    println!("group 7 is stored on devices {copies:?}");
    assert_eq!(copies.len(), 2);
    drop(sequence);
    let expected = step(&store)?;
    store.close()?;

    // A disk with a copy is gone. The store opens only if it is told that this is expected.
    let lost = copies[0];
    std::fs::remove_dir_all(&paths[usize::from(lost)])?;
    let left: Vec<&Path> = paths.iter().map(PathBuf::as_path).filter(|path| path.exists()).collect();
    let refused = devices(&left).open().map(|_| ()).expect_err("a device is missing");
    println!("without allow_degraded: {refused}");
    let store = devices(&left).allow_degraded(true).open()?;
    assert_eq!(step(&store)?, expected);
    println!("the other copies give the same output bit for bit");

    // The background stores the lost copies on the devices that are left. `repair` waits for it.
    store.repair()?;
    let copies = store.open_sequence("shared", OpenSequence::new())?.group_devices(0, 7)?;
    println!("after the repair, group 7 is stored on devices {copies:?}");
    assert!(copies.len() == 2 && !copies.contains(&lost));
    Ok(())
}
