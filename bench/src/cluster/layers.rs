//! The layers to measure: a planted one, or the layers of a file.

use crate::cluster::args::{PlantedArgs, TraceArgs};
use crate::cluster::layer_trace::LayerTrace;
use crate::cluster::profile_file;
use anyhow::Result;
use stratakv::retrieval::clusters::PlantedTopics;

/// The sizes of a planted layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlantedSizes {
    pub(super) entries: usize,
    pub(super) queries: usize,
    pub(super) heads: usize,
    pub(super) dim: usize,
    /// The share of the entries that have a topic, unless an argument says it.
    pub(super) covered: f64,
}

/// Returns the layers to measure. Layers of a file keep their first queries, as many as `sizes` says.
///
/// # Errors
/// The file cannot be read or is no profile, it has no such layer, or an argument is out of range.
pub(super) fn layers(args: &TraceArgs, sizes: PlantedSizes) -> Result<Vec<LayerTrace>> {
    let Some(file) = &args.file else { return Ok(vec![planted(&args.planted, sizes)?]) };
    let mut layers = profile_file::load(file, &args.layer)?;
    layers.iter_mut().for_each(|layer| layer.activated.truncate(sizes.queries));
    Ok(layers)
}

/// Plants topics, and records queries over them.
///
/// # Errors
/// An argument is out of range.
pub(super) fn planted(args: &PlantedArgs, sizes: PlantedSizes) -> Result<LayerTrace> {
    let mut topics = args.topics(sizes.entries, sizes.covered)?;
    let heads = planted_heads(args, sizes)?;
    let activated = (0..sizes.queries).map(|_| topics.next_query()).collect();
    Ok(LayerTrace { name: "planted".into(), entries: sizes.entries, dim: sizes.dim, heads, activated })
}

/// Returns the keys of each head. Each head has topics of its own. The first head has the topics of the queries.
fn planted_heads(args: &PlantedArgs, sizes: PlantedSizes) -> Result<Vec<Vec<f32>>> {
    let topics_of = |head: usize| -> Result<PlantedTopics> {
        let seed = args.seed.wrapping_add(head as u64);
        PlantedArgs { seed, ..*args }.topics(sizes.entries, sizes.covered)
    };
    (0..sizes.heads).map(|head| Ok(topics_of(head)?.keys(sizes.dim, args.spread))).collect()
}
