//! Selects groups by a method of the embedder's own. It keeps the key of largest norm of each group, and scores a group
//! by the largest product of this key with a query head. `cargo run --release -p stratakv --example custom_selector`

use std::sync::Arc;
use stratakv::retrieval::{KeyGroup, KeyShape, LayerSummary, ScoreRequest, Selector, SummarySpec, summary_as};
use stratakv::{Budget, CreateOptions, Durability, KvLayout, Result, SelectRequest, Store, TensorView};

/// The strongest key `[kv_heads * key_dim]` of every group of a layer.
struct StrongestKeys(Vec<Vec<f32>>, usize);

impl LayerSummary for StrongestKeys {
    fn groups(&self) -> usize {
        self.0.len()
    }
    fn push(&mut self, group: &KeyGroup<'_>) {
        let norm = |key: &[f32]| key.iter().map(|x| x * x).sum::<f32>();
        let tokens = group.tokens();
        let strongest = tokens.chunks_exact(self.1).max_by(|a, b| norm(a).total_cmp(&norm(b)));
        self.0.push(strongest.expect("a group has tokens").to_vec());
    }
    fn truncate(&mut self, groups: usize) {
        self.0.truncate(groups);
    }
    fn bytes(&self) -> usize {
        self.bytes_for(0)
    }
    fn bytes_for(&self, groups: usize) -> usize {
        2 * (self.0.len() + groups) * (self.1 * 4 + size_of::<Vec<f32>>()) // a vector may be half empty
    }
}

/// The method: the kind of its summary and its scores.
struct StrongestKey;

impl SummarySpec for StrongestKey {
    fn id(&self) -> String {
        "strongest-key".to_owned()
    }
    fn layer(&self, _layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        Ok(Box::new(StrongestKeys(Vec::new(), shape.width())))
    }
}

impl Selector for StrongestKey {
    fn name(&self) -> &str {
        "strongest-key"
    }
    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::new(StrongestKey)]
    }
    fn score(&self, summaries: &[&dyn LayerSummary], ask: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()> {
        let keys: &StrongestKeys = summary_as(summaries)?;
        let (dim, q_heads) = (ask.shape.key_dim, ask.query.len() / ask.shape.key_dim);
        for (score, key) in scores.iter_mut().zip(&keys.0[ask.groups.clone()]) {
            let own = |h: usize| &key[h * ask.shape.kv_heads / q_heads * dim..][..dim];
            let head = |h: usize| ask.query[h * dim..].iter().zip(own(h)).map(|(q, k)| q * k).sum();
            *score = (0..q_heads).map(head).fold(f32::NEG_INFINITY, f32::max);
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let store = Store::options().device(directory.path()).open()?;
    let layout = KvLayout::builder().layers(1).kv_heads(2).head_dim(64).group_tokens(8).build()?;
    let mut sequence = store.create_sequence(&layout, CreateOptions::new())?;
    let mut keys: Vec<f32> = (0..1024 * 128).map(|i| (i as f32 * 0.37).sin()).collect();
    keys[403 * 128..][..128].fill(2.0); // token 403 is in group 50
    let view = TensorView::token_major(&keys, 1024, 2, 64);
    sequence.append(0, view, view)?;
    sequence.commit(Durability::Sync)?;
    let selector = sequence.attach(Arc::new(StrongestKey))?;
    let selection =
        sequence.select(0, SelectRequest::query(&[0.5; 4 * 64]).budget(Budget::tokens(32)).selector(selector))?;
    let groups: Vec<u64> = selection.groups().collect();
    println!("selected groups {groups:?} from {} bytes of summaries", sequence.selector_bytes(selector)?);
    assert!(groups.len() == 4 && groups.contains(&50));
    Ok(())
}
