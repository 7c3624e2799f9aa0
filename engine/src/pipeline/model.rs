//! The interface of a model, and the loop over its layers.

use super::step::Pipeline;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::KvLayout;
use crate::plan::{SelectRequest, Selection};
use crate::read::AttendOptions;
use crate::sequence::Sequence;

/// A model during decode. [`Pipeline::decode`] calls `project`, `predict` of the next layer, and `finish`, layer by
/// layer.
///
/// All methods work on every sequence of the batch, in its order. A layer without KV is computed by `finish` of the
/// layer before it, or by `project` of the layer after it.
pub trait DecodeModel {
    /// Appends the newest tokens' keys and values of `layer` to the sequences. Returns the queries, each `[q_heads,
    /// key_dim]`.
    ///
    /// # Errors
    /// The errors of the model. They end the step, and appended tokens stay.
    fn project(&mut self, layer: usize, sequences: &mut [&mut Sequence]) -> Result<Vec<Vec<f32>>>;

    /// Returns the predicted queries of layer `next`: its norm, Wq and RoPE applied to the input of the current layer.
    /// With `None` nothing is prefetched, unless the pipeline [repeats](Pipeline::prefetch_last) the last step.
    fn predict(&mut self, next: usize) -> Option<Vec<Vec<f32>>>;

    /// Takes the attention outputs of `layer`, each `[q_heads, value_dim]`, and computes the rest of the layer.
    ///
    /// # Errors
    /// The errors of the model. They end the step.
    fn finish(&mut self, layer: usize, attended: &[Vec<f32>]) -> Result<()>;

    /// Selects what a sequence attends to in `layer`. Override it to use another
    /// [selector](SelectRequest::selector).
    ///
    /// # Errors
    /// The errors of [`Sequence::select`].
    fn select(&self, sequence: &Sequence, layer: usize, request: SelectRequest<'_>) -> Result<Selection> {
        sequence.select(layer, request)
    }

    /// Returns the options of attention in `layer`.
    fn attend_options(&self, _layer: usize) -> AttendOptions {
        AttendOptions::default()
    }
}

impl Pipeline {
    /// Runs one decode step: the newest token of every sequence, through all layers. The sequences share a layout.
    ///
    /// # Errors
    /// The errors of the model, of selection, of reading and of attention. [`ErrorKind::InvalidArgument`]: the
    /// sequences differ in their layers, or the model returns another number of queries. To repeat the step, cut the
    /// sequences back with [`Sequence::truncate`] first.
    pub fn decode<M: DecodeModel>(&mut self, sequences: &mut [&mut Sequence], model: &mut M) -> Result<()> {
        let Some(first) = sequences.first() else { return Ok(()) };
        let layout = first.layout().clone();
        if sequences.iter().any(|sequence| *sequence.layout() != layout) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "decode: the sequences of a step have different layouts",
            ));
        }
        let layers: Vec<usize> = (0..layout.layers()).filter(|layer| layout.kv_layer(*layer).is_ok()).collect();
        let mut trusted: Option<Vec<Selection>> = None;
        // True if the model did not predict the current layer.
        let mut silent = false;
        for (nth, &layer) in layers.iter().enumerate() {
            let queries = model.project(layer, sequences)?;
            let selections = match trusted.take().map(|predicted| with_newest(sequences, layer, &predicted)) {
                Some(Ok(selections)) => selections,
                // There was no prediction, or a predicted group has left the window.
                _ => self.select(sequences, layer, &queries, model)?,
            };
            let next = layers.get(nth + 1).copied();
            // A model that predicts computes while the blocks are on their way. Without predictions nothing is computed
            // before attention, so that reading and attending can be one call.
            let asked = next.filter(|_| silent).and_then(|next| model.predict(next));
            let refs: Vec<&Sequence> = sequences.iter().map(|sequence| &**sequence).collect();
            let last = next.and_then(|next| self.last_selected(next, &refs));
            let ahead = asked.is_some() || last.is_some();
            let at_once = !ahead && (silent || next.is_none()) && !self.is_prefetched(layer);
            if !at_once {
                self.read(layer, &selections)?;
            }
            if let Some(next) = next {
                self.stream(next, &refs)?;
                let predicted = if silent { asked } else { model.predict(next) };
                silent = predicted.is_none();
                // Without its records in flight, a prediction would wait for buffers that this layer holds.
                let predicted = predicted.filter(|_| refs.iter().all(|sequence| sequence.has_records(next)));
                // A prediction that selects nothing, or a layer without tokens, does not end the step.
                match predicted.map(|queries| self.select(sequences, next, &queries, model)) {
                    Some(Ok(selections)) => {
                        self.predict(next, &selections)?;
                        trusted = self.trusts().then_some(selections);
                    }
                    Some(Err(_)) => (),
                    None => last.map_or(Ok(()), |last| self.predict(next, &last))?,
                }
            }
            // These records are needed one layer later, so they are read while this layer computes. The first layer
            // follows the last, for the next token.
            self.stream(layers[(nth + 2) % layers.len()], &refs)?;
            let options = model.attend_options(layer);
            let mut outputs = outputs(&layout, layer, &options, &queries)?;
            let inputs: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
            let mut slices: Vec<&mut [f32]> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
            match at_once {
                true => self.read_and_attend(layer, &selections, &inputs, &options, &mut slices)?,
                false => self.attend(layer, &inputs, &options, &mut slices)?,
            }
            self.keep_selected(layer, selections);
            model.finish(layer, &outputs)?;
        }
        Ok(())
    }

    fn select<M: DecodeModel>(
        &self,
        sequences: &[&mut Sequence],
        layer: usize,
        queries: &[Vec<f32>],
        model: &M,
    ) -> Result<Vec<Selection>> {
        if queries.len() != sequences.len() {
            let (queries, sequences) = (queries.len(), sequences.len());
            let text =
                format!("decode: the model returned {queries} queries of layer {layer} for {sequences} sequences");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let pairs = sequences.iter().zip(queries);
        let request = |query| SelectRequest::query(query).options(self.select_options());
        pairs.map(|(sequence, query)| model.select(sequence, layer, request(query))).collect()
    }
}

/// Returns outputs of attention in a layer, one per query.
fn outputs(layout: &KvLayout, layer: usize, options: &AttendOptions, queries: &[Vec<f32>]) -> Result<Vec<Vec<f32>>> {
    let geometry = layout.kv_layer(layer)?;
    let key_dim = usize::from(geometry.key_dim);
    let stored = if geometry.value_dim == 0 { key_dim } else { usize::from(geometry.value_dim) };
    let value_dims = options.value_dims.unwrap_or(stored);
    if value_dims > stored {
        let text = format!("decode: attention with {value_dims} value dims in layer {layer}, which has {stored}");
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(queries.iter().map(|query| vec![0.0; query.len() / key_dim * value_dims]).collect())
}

/// Returns selections of groups that were chosen before the newest tokens, with all groups that were sealed since.
/// Every new token is attended.
fn with_newest(sequences: &[&mut Sequence], layer: usize, predicted: &[Selection]) -> Result<Vec<Selection>> {
    let one = |(sequence, predicted): (&&mut Sequence, &Selection)| {
        let group = sequence.layout().group_tokens() as u64;
        let sealed = predicted.length() / group..sequence.layer_len(layer)? / group;
        let groups: Vec<u64> = predicted.groups().chain(sealed).collect();
        sequence.select(layer, SelectRequest::groups(&groups).planes(predicted.inner.planes))
    };
    sequences.iter().zip(predicted).map(one).collect()
}
