//! Decodes through a [`Pipeline`], which reads the next layer's groups while the current layer computes.
//!
//! `cargo run --release -p stratakv --example decode_loop`
//!
//! A wrong prediction costs bytes, never accuracy: the same tokens are decoded with and without predictions.

use stratakv::pipeline::{DecodeModel, Pipeline, PipelineReport};
use stratakv::{Budget, CreateOptions, Durability, KvLayout, Result, Sequence, Store, StoredSummary, TensorView};

const LAYERS: u16 = 4;
const HEADS: usize = 2;
const DIM: usize = 64;
const PROMPT: usize = 2048;
const STEPS: usize = 16;

/// A model that keeps one hidden state `[HEADS * DIM]` per sequence of the batch.
struct Model {
    hidden: Vec<Vec<f32>>,
    predicts: bool,
}

impl DecodeModel for Model {
    /// Appends the keys and values of the new token and returns the queries. A real model applies norm, Wq, Wk, Wv,
    /// RoPE.
    fn project(&mut self, layer: usize, sequences: &mut [&mut Sequence]) -> Result<Vec<Vec<f32>>> {
        for (sequence, hidden) in sequences.iter_mut().zip(&self.hidden) {
            let token = TensorView::token_major(hidden, 1, HEADS, DIM);
            sequence.append(layer, token, token)?;
        }
        Ok(self.hidden.clone())
    }

    /// Predicts the queries of the next layer from the input of this one.
    fn predict(&mut self, _next: usize) -> Option<Vec<Vec<f32>>> {
        self.predicts.then(|| self.hidden.clone())
    }

    /// Takes the attention output. A real model applies Wo, the residual and the feed-forward network.
    fn finish(&mut self, _layer: usize, attended: &[Vec<f32>]) -> Result<()> {
        for (hidden, attended) in self.hidden.iter_mut().zip(attended) {
            hidden.iter_mut().zip(attended).for_each(|(h, a)| *h = (*h + 0.5 * a).tanh());
        }
        Ok(())
    }
}

/// Decodes [`STEPS`] tokens of two sequences. Returns their hidden states and the report of the pipeline.
fn decode(store: &Store, predicts: bool) -> Result<(Vec<Vec<f32>>, PipelineReport)> {
    let layout = KvLayout::builder().layers(LAYERS).kv_heads(HEADS as u16).head_dim(DIM as u16);
    let layout = layout.group_tokens(8).build()?;
    let create = |phase: f32| -> Result<Sequence> {
        let mut sequence = store.create_sequence(&layout, CreateOptions::new().store_summary(StoredSummary::MinMax))?;
        let prompt: Vec<f32> = (0..PROMPT * HEADS * DIM).map(|i| (i as f32 * 0.37 + phase).sin()).collect();
        for layer in 0..usize::from(LAYERS) {
            let view = TensorView::token_major(&prompt, PROMPT, HEADS, DIM);
            sequence.append(layer, view, view)?;
        }
        sequence.commit(Durability::Sync)?;
        Ok(sequence)
    };
    let (mut one, mut two) = (create(0.0)?, create(1.0)?);
    let mut model = Model { hidden: vec![vec![0.5; HEADS * DIM], vec![-0.25; HEADS * DIM]], predicts };
    let mut pipeline = Pipeline::new(store, Budget::tokens(256));
    for _ in 0..STEPS {
        pipeline.decode(&mut [&mut one, &mut two], &mut model)?;
    }
    Ok((model.hidden, *pipeline.report()))
}

fn main() -> Result<()> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let store = Store::options().device(directory.path()).open()?;
    let (hidden, report) = decode(&store, true)?;
    let (expected, _) = decode(&store, false)?;
    assert_eq!(hidden, expected);
    assert!(report.predicted > 0 && report.selected > 0);
    println!("{} of {} selected blocks were predicted", report.predicted, report.selected);
    println!("{:.0} % of the read time was hidden; the outputs are equal bit for bit", 100.0 * report.hidden_share());
    Ok(())
}
