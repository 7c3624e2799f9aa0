//! PQCache: single tokens, chosen by product-quantised keys.
//!
//! Source: PQCache, Zhang et al. 2025. How the method works here:
//! 1. When the selector is attached, the halves of the keys of all sealed groups are clustered by k-means, per KV head.
//!    A sequence that is shorter than 256 tokens is clustered when it has that many. The centroids of a half are its
//!    codebook, which never changes.
//! 2. Each token has the number of the nearest centroid of each half.
//! 3. A query is multiplied with the centroids. The score of a token is the sum of the two products that its numbers
//!    name, aggregated over query heads. Each KV head attends to its best tokens.

mod selector;
mod summary;

use crate::error::{Error, ErrorKind};
use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodParameter};
pub use selector::PqCache;
use std::sync::Arc;

/// The most centroids of a codebook: as many as a number of two bytes tells apart.
const CENTROIDS_MAX: usize = 1 << 16;

/// PQCache.
pub(crate) const PQCACHE: Method = Method {
    name: "pqcache",
    alias: "",
    about: "the best tokens of each KV head by product-quantised keys; the number is the centroids of a codebook",
    parameter: MethodParameter::Default(64),
    adapter: AdapterFit::None,
    reconstructs_keys: false,
    unit: ChosenUnit::Tokens,
    make: |choice, _| match choice.parameter {
        Some(centroids) if (1..=CENTROIDS_MAX).contains(&centroids) => Ok(Arc::new(PqCache::new(centroids))),
        centroids => {
            let found = centroids.unwrap_or_default();
            let text = format!("method pqcache:{found}: a codebook has from 1 to {CENTROIDS_MAX} centroids");
            Err(Error::new(ErrorKind::InvalidArgument, text))
        }
    },
};
