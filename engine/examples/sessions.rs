//! Forks a conversation, takes a turn back, and resumes both branches after a restart.
//!
//! `cargo run --release -p stratakv --example sessions`

use stratakv::{CreateOptions, Durability, KvLayout, OpenSequence, Sequence, Store, TensorView};

const LAYERS: usize = 2;
const HEADS: usize = 2;
const DIM: usize = 64;

/// Appends one turn: keys and values of all layers, and the token ids.
fn append_turn(sequence: &mut Sequence, ids: &[u32]) -> stratakv::Result<()> {
    let kv: Vec<f32> = ids.iter().flat_map(|id| (0..HEADS * DIM).map(move |i| (*id as f32 + i as f32).sin())).collect();
    for layer in 0..LAYERS {
        let view = TensorView::token_major(&kv, ids.len(), HEADS, DIM);
        sequence.append(layer, view, view)?;
    }
    sequence.append_token_ids(ids)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = tempfile::tempdir()?;
    let store = Store::options().device(directory.path()).open()?;
    let layout = KvLayout::builder().layers(LAYERS as u16).kv_heads(HEADS as u16).head_dim(DIM as u16);
    let layout = layout.group_tokens(8).build()?;

    let mut chat = store.create_sequence(&layout, CreateOptions::new().key("chat"))?;
    append_turn(&mut chat, &(0..100).collect::<Vec<_>>())?;
    chat.commit_with(b"turn 1", Durability::Sync)?;

    // A fork shares what is on disk. From here on the two are independent.
    let mut branch = chat.fork_as("branch")?;
    append_turn(&mut branch, &[500, 501, 502])?;
    branch.commit_with(b"turn 2 of the branch", Durability::Sync)?;

    // The last ten tokens are taken back, and another answer is appended.
    chat.truncate(90)?;
    append_turn(&mut chat, &[700, 701])?;
    chat.commit_with(b"turn 2", Durability::Sync)?;

    // A draft that is truncated again leaves no trace.
    append_turn(&mut chat, &[999])?;
    chat.truncate(92)?;
    drop((chat, branch));
    store.close()?;

    let store = Store::options().device(directory.path()).open()?;
    for info in store.sequences() {
        println!("{:>8}: {} tokens", info.key, info.tokens);
    }
    assert_eq!(store.sequences().len(), 2);
    let (chat, branch) =
        (store.open_sequence("chat", OpenSequence::new())?, store.open_sequence("branch", OpenSequence::new())?);
    assert_eq!((chat.len(), chat.caller_state()), (92, Some(&b"turn 2"[..])));
    assert_eq!(chat.token_ids()[88..], [88, 89, 700, 701]);
    assert_eq!((branch.len(), branch.caller_state()), (103, Some(&b"turn 2 of the branch"[..])));
    assert_eq!(branch.token_ids()[98..], [98, 99, 500, 501, 502]);
    Ok(())
}
