//! The product-quantised keys of one layer.
//!
//! How the summary takes in groups:
//! 1. A pushed group waits with its keys ([`LayerSummary::push`]).
//! 2. [`LayerSummary::advance`] builds the codebooks as soon as there are enough keys, by k-means.
//! 3. It then writes the codes of the waiting tokens, and drops their keys.
//!
//! Invariants:
//! - A codebook never changes. It depends on the tokens and on the moment of attaching.
//! - The code of a token and subspace is the nearest centroid, ties by the lower one.

use crate::error::Result;
use crate::kernels::{lower_distances, multiply_by_lanes};
use crate::retrieval::cluster_choice::{FIRST_ENTRIES, WaitingKeys};
use crate::retrieval::clusters::{KMeans, KMeansOptions};
use crate::retrieval::summary::{KeyGroup, KeyShape, LayerSummary, SummarySpec};
use crate::retrieval::summary_records::Records;
use std::ops::Range;

/// The parts that the elements of a key are divided into.
const SUBSPACES: usize = 2;
/// The seed of all random choices.
const SEED: u64 = 0x0070_7163_6163_6865;

/// The specification of product-quantised keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProductCodeSpec {
    /// The centroids of a codebook, at least 1.
    pub(super) centroids: usize,
}

impl SummarySpec for ProductCodeSpec {
    fn id(&self) -> String {
        format!("product-codes/{}", self.centroids)
    }

    fn layer(&self, _layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        let split = |at: usize| at * shape.key_dim / SUBSPACES;
        let subspaces = (0..SUBSPACES).map(|at| split(at)..split(at + 1)).filter(|range| !range.is_empty()).collect();
        Ok(Box::new(ProductCodes {
            shape,
            centroids: self.centroids,
            subspaces,
            heads: Vec::new(),
            waiting: WaitingKeys::new(shape),
        }))
    }
}

/// The codebooks and codes of one KV head.
pub(super) struct ProductHead {
    /// The centroids `[centroids, elements]` of each subspace.
    pub(super) books: Vec<Vec<f32>>,
    /// `[tokens][subspaces]`, a code of one or two bytes each.
    pub(super) codes: Records<u8>,
}

/// The product-quantised keys of a layer.
pub(super) struct ProductCodes {
    shape: KeyShape,
    /// The centroids of a codebook, or fewer if it was built from fewer tokens.
    centroids: usize,
    /// The elements of a key that each codebook is for. Only a key of one element has a single subspace.
    pub(super) subspaces: Vec<Range<usize>>,
    /// Without any until the codebooks are built.
    pub(super) heads: Vec<ProductHead>,
    /// The keys of groups that have no codes.
    waiting: WaitingKeys,
}

impl ProductCodes {
    /// Returns the number of groups whose tokens have codes.
    pub(super) fn covered(&self) -> usize {
        self.waiting.groups().start
    }

    /// Returns the bytes of a code.
    fn code_bytes(&self) -> usize {
        if self.centroids <= 1 << 8 { 1 } else { 2 }
    }

    /// Returns the bytes of the codes of a token and KV head.
    fn record_bytes(&self) -> usize {
        self.subspaces.len() * self.code_bytes()
    }

    /// Returns the code at a place of a record.
    pub(super) fn code(&self, record: &[u8], at: usize) -> usize {
        match self.code_bytes() {
            1 => usize::from(record[at]),
            _ => usize::from(u16::from_le_bytes([record[2 * at], record[2 * at + 1]])),
        }
    }

    fn k_means(&self, entries: usize) -> KMeansOptions<'static> {
        KMeansOptions { clusters: self.centroids.min(entries), seed: SEED, metric: None }
    }

    /// Builds the codebooks from the first waiting tokens.
    fn build(&mut self, entries: usize) -> Result<()> {
        let (kv_heads, key_dim) = (self.shape.kv_heads, self.shape.key_dim);
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let mut books = vec![Vec::with_capacity(self.subspaces.len()); kv_heads];
        let mut keys = Vec::new();
        for elements in &self.subspaces {
            let mut rows = vec![Vec::with_capacity(entries * elements.len()); kv_heads];
            for (head, rows) in rows.iter_mut().enumerate() {
                keys.clear();
                keys.reserve_exact(entries * key_dim);
                self.waiting.keys().rows(0..entries, Some(head), &mut keys);
                keys.chunks_exact(key_dim).for_each(|key| rows.extend_from_slice(&key[elements.clone()]));
            }
            let views: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
            let fitted = KMeans::fit_heads(&views, elements.len(), &self.k_means(entries), threads)?;
            books.iter_mut().zip(fitted).for_each(|(books, fitted)| books.push(fitted.centroids().to_vec()));
        }
        let record = self.record_bytes();
        self.heads = books.into_iter().map(|books| ProductHead { books, codes: Records::new(record) }).collect();
        Ok(())
    }

    /// Writes the codes of all waiting tokens.
    fn encode_waiting(&mut self) {
        let (tokens, key_dim, wide) = (self.waiting.tokens(), self.shape.key_dim, self.code_bytes() == 2);
        let (mut key, mut distances) = (Vec::with_capacity(key_dim), Vec::new());
        for (at, head) in self.heads.iter_mut().enumerate() {
            for token in tokens.clone() {
                key.clear();
                self.waiting.keys().rows(token..token + 1, Some(at), &mut key);
                let record = head.codes.add();
                for (subspace, (elements, book)) in self.subspaces.iter().zip(&head.books).enumerate() {
                    let code = nearest(book, &key[elements.clone()], &mut distances);
                    match wide {
                        false => record[subspace] = code as u8,
                        true => record[2 * subspace..][..2].copy_from_slice(&(code as u16).to_le_bytes()),
                    }
                }
            }
        }
    }

    /// Writes the raw scores `[tokens, lanes]` of tokens of one KV head, all of which have codes. The weights are
    /// `[key_dim, lanes]`, with a multiple of 8 lanes. `out` is zero.
    pub(super) fn score_head(
        &self,
        tokens: &Range<usize>,
        head: usize,
        (weights, lanes): (&[f32], usize),
        out: &mut [f32],
    ) {
        let Some(own) = self.heads.get(head) else { return };
        let records = own.codes.slice(tokens.start.min(own.codes.count())..tokens.end.min(own.codes.count()));
        for (subspace, (elements, book)) in self.subspaces.iter().zip(&own.books).enumerate() {
            let weights = &weights[elements.start * lanes..elements.end * lanes];
            let mut table = vec![0.0; book.len() / elements.len() * lanes];
            multiply_by_lanes(book, weights, elements.len(), lanes, &mut table);
            for (record, out) in records.chunks_exact(self.record_bytes()).zip(out.chunks_exact_mut(lanes)) {
                let products = &table[self.code(record, subspace) * lanes..][..lanes];
                out.iter_mut().zip(products).for_each(|(out, product)| *out += product);
            }
        }
    }

    /// Returns the bytes of the products of a codebook with the query heads of a KV head.
    pub(super) fn table_bytes(&self, query_heads: usize) -> usize {
        self.centroids * query_heads.next_multiple_of(16) * size_of::<f32>()
    }

    /// Returns the bytes of the codebooks.
    fn book_bytes(&self) -> usize {
        self.centroids * self.shape.width() * size_of::<f32>()
    }
}

/// Returns the nearest centroid of a codebook, ties by the lower one.
fn nearest(book: &[f32], part: &[f32], distances: &mut Vec<f32>) -> usize {
    distances.clear();
    distances.resize(book.len() / part.len(), f32::INFINITY);
    lower_distances(book, part, distances);
    distances.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(centroid, _)| centroid)
}

impl LayerSummary for ProductCodes {
    fn groups(&self) -> usize {
        self.waiting.groups().end
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        self.waiting.push(group);
    }

    fn truncate(&mut self, groups: usize) {
        if groups < self.covered() {
            self.heads.iter_mut().for_each(|head| head.codes.truncate(groups * self.shape.group_tokens));
        }
        self.waiting.truncate(groups);
        if groups == 0 {
            self.heads.clear();
        }
    }

    fn bytes(&self) -> usize {
        let books = if self.heads.is_empty() { 0 } else { self.book_bytes() };
        self.waiting.bytes() + books + self.heads.iter().map(|head| head.codes.bytes()).sum::<usize>()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        let waiting = self.waiting.tokens_after(groups);
        let held = self.waiting.bytes_for(groups);
        if !self.heads.is_empty() {
            let codes: usize = self.heads.iter().map(|head| head.codes.bytes_for(waiting)).sum();
            return held + self.book_bytes() + codes;
        }
        if waiting < FIRST_ENTRIES {
            return held;
        }
        let codes = Records::<u8>::new(self.record_bytes()).bytes_for(waiting);
        let largest = self.subspaces.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let fit = KMeans::bytes_for(waiting, largest, &self.k_means(waiting));
        let rows = waiting * (self.shape.kv_heads * largest + self.shape.key_dim) * size_of::<f32>();
        held + self.book_bytes() + self.shape.kv_heads * (codes + fit) + rows
    }

    fn has_clusters(&self) -> bool {
        true
    }

    fn attached(&mut self) {
        self.waiting.attached();
    }

    fn advance(&mut self) -> Result<Vec<u64>> {
        if self.heads.is_empty() {
            if let Some(entries) = self.waiting.first_entries() {
                self.build(entries)?;
            }
            self.waiting.built();
        }
        if !self.heads.is_empty() {
            self.encode_waiting();
            self.waiting.clear();
        }
        Ok(Vec::new())
    }
}
