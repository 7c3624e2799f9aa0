//! Reads selected groups into memory of the embedder, such as memory pinned for a GPU.
//!
//! `cargo run --release -p stratakv --example read_into_region`

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use stratakv::read::ReadRegion;
use stratakv::{CreateOptions, Durability, KvLayout, SelectRequest, Store, TensorView};

const HEADS: usize = 2;
const DIM: usize = 64;
const GROUP: usize = 8;

/// Page-aligned memory. A runtime would map or pin it.
struct Memory(NonNull<u8>, Layout);

// SAFETY: the pointer is used only to free the memory, once, in `drop`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(bytes: usize) -> Result<Self, Box<dyn std::error::Error>> {
        let layout = Layout::from_size_align(bytes, 4096)?;
        // SAFETY: callers ask for more than 0 bytes.
        Ok(Self(NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or("out of memory")?, layout))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.0.as_ptr(), self.1) }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let memory = Arc::new(Memory::new(2 * ReadRegion::SLAB_BYTES)?);
    let (start, bytes) = (memory.0, memory.1.size());
    let owner: Arc<dyn Any + Send + Sync> = memory;
    // SAFETY: the region owns the memory, and this program writes none of it.
    let region = unsafe { ReadRegion::from_raw(start, bytes, owner) }?;

    let directory = tempfile::tempdir()?;
    let store = Store::options().device(directory.path()).open()?;
    let layout = KvLayout::builder().layers(1).kv_heads(HEADS as u16).head_dim(DIM as u16).group_tokens(GROUP as u16);
    let mut sequence = store.create_sequence(&layout.build()?, CreateOptions::new())?;
    let keys: Vec<f32> = (0..1024 * HEADS * DIM).map(|i| (i / (HEADS * DIM)) as f32).collect(); // the token's index
    let view = TensorView::token_major(&keys, 1024, HEADS, DIM);
    sequence.append(0, view, view)?;
    sequence.commit(Durability::Sync)?;

    let groups = [3, 40, 41, 90];
    let selection = sequence.select(0, SelectRequest::groups(&groups))?;
    let batch = store.read(&[&selection]).into_region(&region).wait()?;
    for (nth, group) in groups.iter().enumerate() {
        // The K plane is `[HEADS, GROUP, DIM]` in f16, and a device wrote it straight into the region.
        let (keys, _) = batch.get(0)?.group(nth)?;
        let offset = region.offset_of(&keys).ok_or("the block is not in the region")?;
        let first = half::f16::from_le_bytes([keys[0], keys[1]]).to_f32();
        println!("group {group} is at byte {offset} of the region; its first token is {first}");
        assert_eq!(first, *group as f32 * GROUP as f32);
    }
    assert!(region.in_use() > 0);
    drop(batch);
    assert_eq!(region.in_use(), 0);
    Ok(())
}
