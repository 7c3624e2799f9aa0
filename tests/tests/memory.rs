//! Memory that `memory_limit` does not give: each error says what helps, and nothing committed is lost.

use stratakv::options::CacheOptions;
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, Sequence, SequenceId, Store,
    StoreOptions, TensorView,
};
use stratakv_tests::disk::{assert_clean, device_dirs, fast_scratch, small_options};

fn layout(layers: u16) -> KvLayout {
    let layout = KvLayout::builder().layers(layers).kv_heads(1).head_dim(8).dtype(DType::F16).group_tokens(4);
    layout.build().expect("a layout")
}

/// Creates a sequence with a long key and commits 6 tokens of it.
fn write(store: &Store, name: usize) -> stratakv::Result<Sequence> {
    let key = format!("{name:0500}");
    let mut sequence = store.create_sequence(&layout(1), CreateOptions::new().key(key))?;
    let elements: Vec<f32> = (0..6 * 8).map(|i| (i + name) as f32).collect();
    let tensor = TensorView::token_major(&elements, 6, 1, 8);
    sequence.append(0, tensor, tensor)?;
    sequence.commit(Durability::None)?;
    Ok(sequence)
}

#[test]
fn a_cache_larger_than_the_memory_limit_is_refused() {
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), 1);
    let options = || small_options(&dirs).memory_limit(ByteSize::mib(16));
    let error = options().cache(CacheOptions::new(ByteSize::mib(64))).open().map(drop).expect_err("too large");
    assert_eq!(error.kind(), ErrorKind::MemoryLimit, "{error}");
    assert!(error.to_string().contains("memory_limit"), "{error}");
    write(&options().open().expect("a store"), 1).expect("a sequence");
    assert_clean(&dirs, "after the refusal");
}

#[test]
fn a_layout_whose_header_fills_a_segment_is_refused() {
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), 1);
    let store = small_options(&dirs).segment_bytes(ByteSize::kib(32)).open().expect("a store");
    let error = store.create_sequence(&layout(1024), CreateOptions::new()).map(drop).expect_err("too many layers");
    assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
    assert!(error.to_string().contains("segments are too small for the header of this layout"), "{error}");
    assert!(store.sequences().is_empty());
}

/// Opens a store whose cache leaves about 256 KiB of memory to the catalog and to tails.
fn open_full(options: impl Fn() -> StoreOptions) -> Store {
    let open = |kib: u64| options().cache(CacheOptions::new(ByteSize::kib(kib))).open();
    let most = (1..=256).rev().map(|nth| 64 * nth).find(|kib| open(*kib).is_ok()).expect("a cache fits");
    open(most - 256).expect("a smaller cache fits")
}

#[test]
fn a_catalog_that_outgrows_the_memory_takes_no_sequence_until_some_are_deleted() {
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), 1);
    let options = || small_options(&dirs).memory_limit(ByteSize::mib(16));
    drop(options().open().expect("a store"));
    let store = open_full(options);
    let (mut written, mut refused) = (0, None);
    while refused.is_none() && written < 20_000 {
        match write(&store, written) {
            Ok(_) => written += 1,
            Err(e) => refused = Some(e),
        }
    }
    let error = refused.expect("the catalog cannot grow without end");
    assert_eq!(error.kind(), ErrorKind::MemoryLimit, "{error}");
    assert!(error.to_string().contains("the catalog has outgrown memory_limit"), "{error}");
    let find = |store: &Store, name: usize| store.open_sequence(&format!("{name:0500}"), OpenSequence::new());
    store.flush().expect("a flush");
    assert_eq!(store.sequences().len(), written);
    // A deletion by id needs no memory.
    for info in &store.sequences()[..written / 2] {
        store.delete_sequence_id(SequenceId(info.id), Durability::None).expect("a deletion");
    }
    write(&store, written).expect("the catalog has memory again");
    drop(store);
    let store = options().open().expect("a store");
    assert_eq!(store.sequences().len(), written - written / 2 + 1);
    for name in [written / 2, written] {
        assert_eq!(find(&store, name).expect("a committed sequence").len(), 6);
    }
    store.close().expect("close");
    assert_clean(&dirs, "after the refusal");
}
