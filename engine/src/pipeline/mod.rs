//! Decode steps whose reads hide behind the computation (KVSwap section 3.3).
//!
//! 1. While a layer computes, the next layer's query is predicted from this layer's input.
//! 2. The blocks that the predicted query selects are prefetched.
//! 3. When the true query is known, only the blocks that the prediction missed are read on demand.
//!
//! Attention follows the true queries alone. The output therefore has the same bits as without a pipeline.
//!
//! ```
//! use stratakv::pipeline::{DecodeModel, Pipeline};
//! use stratakv::{Budget, CreateOptions, KvLayout, Result, Sequence, Store, StoredSummary, TensorView};
//!
//! /// A model of two layers that keeps its hidden state, one row per sequence.
//! struct Model {
//!     hidden: Vec<Vec<f32>>,
//! }
//!
//! impl DecodeModel for Model {
//!     // Norm, Wq, Wk, Wv, RoPE of this layer: appends the token, gives the queries `[q_heads, head_dim]`.
//!     fn project(&mut self, layer: usize, sequences: &mut [&mut Sequence]) -> Result<Vec<Vec<f32>>> {
//!         for (sequence, hidden) in sequences.iter_mut().zip(&self.hidden) {
//!             let token = TensorView::token_major(hidden, 1, 2, 64);
//!             sequence.append(layer, token, token)?;
//!         }
//!         Ok(self.hidden.clone())
//!     }
//!
//!     // Norm, Wq, RoPE of layer `next`, applied to what this layer got.
//!     fn predict(&mut self, _next: usize) -> Option<Vec<Vec<f32>>> {
//!         Some(self.hidden.clone())
//!     }
//!
//!     // Wo, the residual, the feed-forward network.
//!     fn finish(&mut self, _layer: usize, attended: &[Vec<f32>]) -> Result<()> {
//!         for (hidden, attended) in self.hidden.iter_mut().zip(attended) {
//!             hidden.iter_mut().zip(attended).for_each(|(h, a)| *h += 0.1 * a);
//!         }
//!         Ok(())
//!     }
//! }
//!
//! # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
//! # let dir = std::env::temp_dir().join(format!("stratakv-pipeline-{}", std::process::id()));
//! # std::fs::create_dir(&dir)?;
//! let store = Store::options().device(&dir).open()?;
//! let layout = KvLayout::builder().layers(2).kv_heads(2).head_dim(64).group_tokens(8).build()?;
//! let mut one = store.create_sequence(&layout, CreateOptions::new().store_summary(StoredSummary::MinMax))?;
//! let mut two = store.create_sequence(&layout, CreateOptions::new().store_summary(StoredSummary::MinMax))?;
//!
//! let mut model = Model { hidden: vec![vec![0.5; 128], vec![-0.5; 128]] };
//! let mut pipeline = Pipeline::new(&store, Budget::tokens(400));
//! for _token in 0..20 {
//!     pipeline.decode(&mut [&mut one, &mut two], &mut model)?;
//! }
//! println!("{:.0} % of the reads hidden", 100.0 * pipeline.report().hidden_share());
//! # drop((one, two, pipeline));
//! # store.close()?;
//! # std::fs::remove_dir_all(&dir)?;
//! # Ok(())
//! # }
//! ```
//!
//! Runtimes with a loop of their own use [`Pipeline::read`], [`Pipeline::predict`] and [`Pipeline::attend`].

mod model;
mod report;
mod step;
#[cfg(test)]
mod tests;

pub use model::DecodeModel;
pub use report::PipelineReport;
pub use step::Pipeline;
