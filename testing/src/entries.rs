//! Layers of clustered keys, for tests of methods that choose entries.
//!
//! - [`EntryShape`] makes keys, queries and an adapter of codes. It checks what a selection attends to.
//! - [`EntrySequence`] is a sequence of such a layer in a store of its own.

use crate::store::TestStore;
use fastrand::Rng;
use std::collections::BTreeSet;
use std::sync::Arc;
use stratakv::retrieval::{Adapter, Codebook, HeadAggregation, KeyShape, MethodSpec, Selector, SelectorId};
use stratakv::{
    Budget, CreateOptions, DType, KvLayout, Result, SelectOptions, SelectRequest, Selection, Sequence, Store,
    StoreOptions, TensorView, attend,
};

/// The geometry of the only layer of a sequence, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryShape {
    /// The KV heads.
    pub kv_heads: usize,
    /// The query heads, a multiple of the KV heads.
    pub q_heads: usize,
    /// The head dim of keys and values.
    pub dim: usize,
    /// The tokens of a group.
    pub group: usize,
}

impl EntryShape {
    /// Builds the layout.
    ///
    /// # Panics
    /// The layout is invalid.
    #[must_use]
    pub fn layout(&self) -> KvLayout {
        let layout = KvLayout::builder().layers(1).kv_heads(self.kv_heads as u16).head_dim(self.dim as u16);
        layout.group_tokens(self.group as u16).dtype(DType::F32).build().expect("a layout")
    }

    /// Returns the shape of the keys, as summaries take it.
    #[must_use]
    pub const fn keys(&self) -> KeyShape {
        KeyShape { kv_heads: self.kv_heads, key_dim: self.dim, group_tokens: self.group, dtype: DType::F32 }
    }

    /// Returns the elements of the key of a token.
    #[must_use]
    pub const fn width(&self) -> usize {
        self.kv_heads * self.dim
    }

    /// Returns `[tokens, kv_heads, dim]` elements around one of a few centres, of the tokens from `first` on.
    #[must_use]
    pub fn rows(&self, first: usize, tokens: usize, seed: u64) -> Vec<f32> {
        let hash =
            |i: u64| (i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let unit = |i: u64| (hash(i) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        let element = |token: u64, at: u64| unit((hash(token) >> 60) * 1000 + at) * 3.0 + unit(token * 100 + at);
        let width = self.width() as u64;
        (first as u64..(first + tokens) as u64).flat_map(|token| (0..width).map(move |at| element(token, at))).collect()
    }

    /// Returns the row `[kv_heads, dim]` of a token in a plane, around one of a few centres. No two tokens have equal
    /// rows.
    #[must_use]
    pub fn row(&self, token: u64, plane: u64) -> Vec<f32> {
        let mut own = Rng::with_seed(2 * token + plane);
        let mut centre = Rng::with_seed(own.u64(0..9));
        (0..self.width()).map(|_| 2.0 * (centre.f32() - 0.5) + own.f32() - 0.5).collect()
    }

    /// Returns a query `[q_heads, dim]` like the keys of [`Self::rows`].
    #[must_use]
    pub fn query(&self, seed: u64) -> Vec<f32> {
        self.rows(seed as usize * 31, self.q_heads / self.kv_heads, 1)
    }

    /// Returns codes of 16 levels for each element of a key, without a transform.
    ///
    /// # Panics
    /// The geometry has an odd number of elements.
    #[must_use]
    pub fn codes(&self) -> Arc<Adapter> {
        let width = self.width();
        let identity: Vec<f32> = (0..width * width).map(|at| f32::from(u8::from(at % (width + 1) == 0))).collect();
        let packing = (0..width as u32 / 2).map(|byte| vec![2 * byte, 2 * byte + 1]).collect();
        let levels = vec![(0..16).map(|level| level as f32 / 2.0 - 3.75).collect(); width];
        let book = Codebook::new(vec![0.0; width], identity.clone(), identity, packing, levels, 0.0).expect("a book");
        Arc::new(Adapter::new("codes", 1, vec![book.into()]).expect("an adapter"))
    }

    /// Makes the selector of a method name, with [`Self::codes`] if it needs an adapter.
    ///
    /// # Panics
    /// There is no such method.
    #[must_use]
    pub fn selector(&self, method: &str) -> Arc<dyn Selector> {
        let spec: MethodSpec = method.parse().expect("a method");
        spec.selector(spec.adapter_name().map(|_| self.codes())).expect("a selector")
    }

    /// Appends tokens with these keys and values, `[tokens, kv_heads, dim]` each.
    ///
    /// # Errors
    /// The append fails, as in [`Sequence::append`].
    pub fn append(&self, sequence: &mut Sequence, keys: &[f32], values: &[f32]) -> Result<()> {
        let tokens = keys.len() / self.width();
        let view = |rows| TensorView::token_major(rows, tokens, self.kv_heads, self.dim);
        sequence.append(0, view(keys), view(values))
    }

    /// Reads a selection and attends to it.
    ///
    /// # Errors
    /// The read fails.
    pub fn output(&self, store: &Store, query: &[f32], selection: &Selection) -> Result<Vec<f32>> {
        let mut out = vec![0.0; self.q_heads * self.dim];
        let batch = store.read(&[selection]).wait()?;
        attend(query, selection, batch.get(0)?, &mut out)?;
        Ok(out)
    }

    /// Returns the tokens that each KV head attends to, after a check that each is there once and exists.
    ///
    /// # Panics
    /// A head attends to a token twice, or to one that does not exist.
    #[must_use]
    pub fn entries(&self, selection: &Selection) -> Vec<Vec<u64>> {
        let entries: Vec<Vec<u64>> = (0..self.kv_heads).map(|head| selection.entries(head).collect()).collect();
        for own in &entries {
            let distinct: BTreeSet<u64> = own.iter().copied().collect();
            let exist = own.iter().all(|token| *token < selection.length());
            assert!(distinct.len() == own.len() && exist, "of {} tokens: {own:?}", selection.length());
        }
        entries
    }

    /// Returns the attention `[q_heads, dim]` of a query over the tokens of each KV head, naively in f64.
    /// `row(token, plane)` is `[kv_heads, dim]`.
    #[must_use]
    pub fn attention(&self, query: &[f32], entries: &[Vec<u64>], row: impl Fn(u64, u64) -> Vec<f32>) -> Vec<f64> {
        let mut out = Vec::with_capacity(query.len());
        for (q_head, q) in query.chunks(self.dim).enumerate() {
            let head = q_head * self.kv_heads / self.q_heads;
            let own = |token: u64, plane| row(token, plane)[head * self.dim..][..self.dim].to_vec();
            let logit = |token: &u64| {
                let dot: f64 = own(*token, 0).iter().zip(q).map(|(k, q)| f64::from(k * q)).sum();
                dot / (self.dim as f64).sqrt()
            };
            let weights: Vec<f64> = entries[head].iter().map(|token| logit(token).exp()).collect();
            let (sum, mut mean) = (weights.iter().sum::<f64>(), vec![0.0; self.dim]);
            for (token, weight) in entries[head].iter().zip(&weights) {
                mean.iter_mut().zip(own(*token, 1)).for_each(|(mean, x)| *mean += weight * f64::from(x) / sum);
            }
            out.extend(mean);
        }
        out
    }
}

/// A sequence of one layer in a store of its own, on one device.
#[derive(Debug)]
pub struct EntrySequence {
    /// The sequence. Declared first, because it is dropped before its store.
    pub sequence: Sequence,
    /// The store.
    pub store: TestStore,
    /// The geometry.
    pub shape: EntryShape,
}

impl EntrySequence {
    /// Opens a store with these options, and creates an empty sequence.
    ///
    /// # Panics
    /// The store does not open.
    #[must_use]
    pub fn new(shape: EntryShape, options: StoreOptions) -> Self {
        let store = TestStore::new(options);
        let sequence = store.create_sequence(&shape.layout(), CreateOptions::new()).expect("a sequence");
        Self { sequence, store, shape }
    }

    /// Appends the next tokens of [`EntryShape::rows`].
    ///
    /// # Panics
    /// The append fails.
    pub fn append(&mut self, tokens: usize, seed: u64) {
        let first = self.sequence.len() as usize;
        let (keys, values) = (self.shape.rows(first, tokens, seed), self.shape.rows(first, tokens, seed ^ 77));
        self.shape.append(&mut self.sequence, &keys, &values).expect("an append");
    }

    /// Attaches the method of this name, with the codes of the shape if it needs an adapter.
    ///
    /// # Panics
    /// The sequence refuses it.
    pub fn attach(&mut self, method: &str) -> SelectorId {
        self.sequence.attach(self.shape.selector(method)).expect("a selector that is attached")
    }

    /// Profiles a selector with 40 queries.
    ///
    /// # Panics
    /// The sequence refuses it.
    pub fn profile(&mut self, selector: SelectorId) {
        let queries: Vec<Vec<f32>> = (0..40).map(|seed| self.shape.query(seed)).collect();
        let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
        self.sequence.profile(selector, 0, &queries, None).expect("a profile");
    }

    /// Selects with a softmax over the clusters and the newest 16 tokens.
    ///
    /// # Panics
    /// The selection fails.
    #[must_use]
    pub fn select(&self, selector: SelectorId, query: &[f32], budget: usize) -> Selection {
        self.try_select(selector, query, budget, HeadAggregation::Softmax).expect("a selection")
    }

    /// Selects with the newest 16 tokens.
    ///
    /// # Errors
    /// The selection fails, as in [`Sequence::select`].
    pub fn try_select(
        &self,
        selector: SelectorId,
        query: &[f32],
        budget: usize,
        heads: HeadAggregation,
    ) -> Result<Selection> {
        let options = SelectOptions::new(Budget::tokens(budget)).aggregation(heads).recent(16);
        self.sequence.select(0, SelectRequest::query(query).options(options).selector(selector))
    }

    /// Reads a selection and attends to it.
    ///
    /// # Panics
    /// The read fails.
    #[must_use]
    pub fn output(&self, query: &[f32], selection: &Selection) -> Vec<f32> {
        self.shape.output(&self.store, query, selection).expect("a read")
    }
}
