//! Stored clusters of the sequences of a worker. A worker that is cut short may leave any part of them.

use stratakv::retrieval::{MethodSpec, SelectorId};
use stratakv::{Budget, ErrorKind, Result, SelectRequest, Sequence, Store};

/// The layer without a window, whose clusters are stored: KV heads, elements of a key, and bytes of an element.
const LAYER: usize = 0;
const HEADS: usize = 2;
const DIM: usize = 32;
const ELEMENT: usize = 2;
/// The fewest tokens of a layer with a profile. Without one, the method refuses to choose.
const PROFILED: u64 = 12;
/// The fewest tokens of a layer that DynaKV clusters: 256, and the newest 64.
const CLUSTERED: u64 = 328;

fn query(at: usize) -> Vec<f32> {
    (0..HEADS * DIM).map(|i| ((i * 5 + at * 3) % 7) as f32 - 3.0).collect()
}

/// Attaches a method: DynaKV, whose clusters split and whose state is stored, to a long sequence, otherwise blocks with
/// a profile if the layer has a group.
fn attach(sequence: &mut Sequence) -> Result<SelectorId> {
    let tokens = sequence.layer_len(LAYER)?;
    let spec: MethodSpec = if tokens >= CLUSTERED { "dynakv:8" } else { "infllm:6" }.parse()?;
    let id = sequence.attach(spec.selector(None)?)?;
    let queries = [query(0), query(1)];
    let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
    if (PROFILED..CLUSTERED).contains(&tokens) {
        sequence.profile(id, LAYER, &queries, None)?;
    }
    Ok(id)
}

/// Stores the clusters of a sequence, if it has committed groups in clusters.
pub(super) fn store(sequence: &mut Sequence) -> Result<()> {
    let id = attach(sequence)?;
    let stored = sequence.store_clusters(id);
    sequence.detach(id)?;
    match stored {
        Err(e) if e.kind() != ErrorKind::InvalidArgument => Err(e),
        _ => Ok(()),
    }
}

/// Compares what a selection reads, from pages or groups, with the groups themselves.
///
/// # Panics
/// A row is different, or a read fails.
pub(super) fn check(store: &Store, sequence: &mut Sequence) {
    if sequence.layer_len(LAYER).expect("a layer") < PROFILED {
        return;
    }
    let id = attach(sequence).expect("a method of clusters");
    let (query, budget) = (query(2), Budget::tokens(sequence.len() as usize / 2 + 1));
    let chosen = sequence.select(LAYER, SelectRequest::query(&query).budget(budget).selector(id)).expect("a selection");
    let all = sequence.select(LAYER, SelectRequest::all()).expect("a selection");
    let batch = store.read(&[&chosen, &all]).submit().and_then(stratakv::read::ReadTicket::wait).expect("a read");
    let (own, whole) = (batch.get(0).expect("blocks"), batch.get(1).expect("blocks"));
    let group_tokens = super::content::GROUP_TOKENS;
    for (nth, group) in chosen.groups().enumerate() {
        let at = all.groups().position(|other| other == group).expect("a group of the sequence");
        let (found, expected) = (own.group(nth).expect("planes"), whole.group(at).expect("planes"));
        for head in 0..HEADS {
            for token in chosen.entries(head).filter(|token| token / group_tokens as u64 == group) {
                let row = (head * group_tokens + token as usize % group_tokens) * DIM * ELEMENT;
                let row = row..row + DIM * ELEMENT;
                let same = found.0[row.clone()] == expected.0[row.clone()] && found.1[row.clone()] == expected.1[row];
                assert!(same, "entry {token} of head {head} has other bytes than its group");
            }
        }
    }
    sequence.detach(id).expect("a selector");
}
