//! Sequences whose deletion is queued: they are neither listed nor counted, and their keys are free.

use stratakv::{CreateOptions, Durability, ErrorKind, KvLayout, OpenSequence, SequenceId, Store, TensorView};
use stratakv_testing::{TestStore, small, uniform_layout};

const TOKENS: usize = 40;

fn layout() -> KvLayout {
    uniform_layout(1, 2, 16, 8)
}

fn write(store: &Store, key: &str) -> SequenceId {
    let mut sequence = store.create_sequence(&layout(), CreateOptions::new().key(key)).unwrap();
    let rows = vec![0.5_f32; TOKENS * 2 * 16];
    let view = TensorView::token_major(&rows, TOKENS, 2, 16);
    sequence.append(0, view, view).unwrap();
    sequence.commit(Durability::Sync).unwrap();
    sequence.id()
}

fn listed(store: &Store) -> Vec<String> {
    store.sequences().into_iter().map(|info| info.key).collect()
}

/// Checks the keys that are listed, and that the counts of status and usage agree with them.
fn assert_listed(store: &Store, keys: &[&str]) {
    assert_eq!(listed(store), keys);
    let usage = store.usage().unwrap();
    let counted: (u64, u64) =
        usage.namespaces.iter().fold((0, 0), |sum, own| (sum.0 + own.sequences, sum.1 + own.tokens));
    assert_eq!((store.status().sequences, counted), (keys.len(), (keys.len() as u64, (keys.len() * TOKENS) as u64)));
    let live: u64 = usage.namespaces.iter().map(|own| own.live_bytes).sum();
    assert_eq!((live, store.status().live_bytes), (usage.live_bytes, usage.live_bytes));
}

#[test]
fn a_sequence_with_a_queued_deletion_is_not_listed() {
    for durability in [Durability::Lazy, Durability::None] {
        // No lazy commit falls due during the test.
        let store = TestStore::new(small());
        let ids = ["a", "b", "c"].map(|key| write(&store, key));
        let live = store.usage().unwrap().live_bytes;
        store.open_sequence("a", OpenSequence::new()).unwrap().delete(durability).unwrap();
        assert_listed(&store, &["b", "c"]);
        assert_eq!(store.usage().unwrap().live_bytes, live, "its frames are live until the commit");
        store.delete_sequence_id(ids[1], durability).unwrap();
        assert_listed(&store, &["c"]);
        // An open commits what is queued, so what is listed can be opened and nothing else.
        assert_eq!(store.open_sequence(ids[1], OpenSequence::new()).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(store.delete_sequence_id(ids[0], durability).unwrap_err().kind(), ErrorKind::NotFound);
        assert!(store.usage().unwrap().live_bytes < live);
        assert_listed(&store, &["c"]);
    }
}

#[test]
fn the_key_of_a_queued_deletion_is_free_and_its_id_is_not_used_again() {
    let mut store = TestStore::new(small());
    let first = write(&store, "a");
    store.delete_sequence_id(first, Durability::Lazy).unwrap();
    let second = write(&store, "a");
    assert_ne!(first, second);
    assert_listed(&store, &["a"]);
    // A sequence that no commit has named is never listed, neither before nor after its deletion.
    let mut new = store.create_sequence(&layout(), CreateOptions::new().key("new")).unwrap();
    new.commit(Durability::Lazy).unwrap();
    assert_listed(&store, &["a"]);
    new.delete(Durability::Lazy).unwrap();
    assert_listed(&store, &["a"]);
    store.flush().unwrap();
    assert_listed(&store, &["a"]);
    store.delete_sequence_id(second, Durability::Lazy).unwrap();
    // A close commits the deletion.
    store.reopen();
    assert_listed(&store, &[]);
    assert!(write(&store, "a").0 > second.0);
}

#[test]
fn a_fork_of_a_deleted_parent_stays_listed() {
    let store = TestStore::new(small());
    let parent = write(&store, "parent");
    let mut sequence = store.open_sequence(parent, OpenSequence::new()).unwrap();
    let mut child = sequence.fork_as("child").unwrap();
    child.commit(Durability::Sync).unwrap();
    drop(child);
    sequence.delete(Durability::Lazy).unwrap();
    assert_listed(&store, &["child"]);
    store.flush().unwrap();
    assert_listed(&store, &["child"]);
    assert_eq!(store.sequences()[0].parent, Some(parent.0));
}
