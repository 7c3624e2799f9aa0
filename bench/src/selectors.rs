//! Selectors of the measurements: what they keep costs the same whatever the keys say.

use crate::work::TOKEN_LAYER_BYTES;
use anyhow::Result;
use clap::ValueEnum;
use std::sync::Arc;
use stratakv::KvLayout;
use stratakv::retrieval::{Adapter, KvSwap, LayerAdapter, LowRankAdapter, Selector, ShadowKv, SignBits};

/// Joint key dimensions over the rank of the low-rank keys.
const SIGMA: usize = 32;

/// A selector by what it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kept {
    /// Sign bits.
    Signs,
    /// Mean keys of groups.
    Landmarks,
    /// Low-rank keys, of a 32nd of the dimensions.
    LowRank,
}

impl Kept {
    pub(crate) fn selector(self, layout: &KvLayout) -> Result<Arc<dyn Selector>> {
        Ok(match self {
            Self::Signs => Arc::new(SignBits),
            Self::Landmarks => Arc::new(ShadowKv::default()),
            Self::LowRank => {
                // Every one of the kept numbers is a sum of so many dimensions.
                let layer = |_| -> Result<LayerAdapter> {
                    // Keys and values of 16 bits.
                    let width = TOKEN_LAYER_BYTES as usize / 4;
                    let rank = (width / SIGMA).max(1);
                    let matrix = (0..width * rank).map(|i| f32::from(u8::from(i / rank % rank == i % rank))).collect();
                    Ok(LowRankAdapter::new(width, rank, matrix)?.into())
                };
                let layers = (0..layout.layers()).map(layer).collect::<Result<_>>()?;
                Arc::new(KvSwap::new(Arc::new(Adapter::new("bench", 1, layers)?)))
            }
        })
    }
}
