//! The description of a retrieval method, by which tools name it, parse its parameter and make its selector.

use crate::error::{Error, ErrorKind, Result};
use crate::retrieval::adapter::Adapter;
use crate::retrieval::cluster_choice::{ChosenBy, ClusterOptions, HeadSharing};
use crate::retrieval::selector::Selector;
use std::sync::Arc;

/// One retrieval method of the [registry](super::methods). Its folder defines it as a constant.
#[derive(Debug)]
#[non_exhaustive]
pub struct Method {
    /// The name on command lines, also [`Selector::name`] of its selectors.
    pub name: &'static str,
    /// Another name that is accepted, such as the name of the paper. Empty for none.
    pub alias: &'static str,
    /// One sentence for `--help`.
    pub about: &'static str,
    /// The number behind the name, as in `tck:64`.
    pub parameter: MethodParameter,
    /// The adapter that its selector needs.
    pub adapter: AdapterFit,
    /// True if it can attend to keys that are [reconstructed](crate::Sequence::reconstruct_keys). Its parameter is then
    /// the rank.
    pub reconstructs_keys: bool,
    /// The unit that it chooses.
    pub unit: ChosenUnit,
    /// Makes its selector with an adapter.
    pub(crate) make: MakeSelector,
}

/// Makes the selector of a method from the parts of its name and the adapter it needs, if any.
type MakeSelector = fn(MethodChoice, Option<Arc<Adapter>>) -> Result<Arc<dyn Selector>>;

/// The unit that a method chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChosenUnit {
    /// Groups of consecutive tokens, for all KV heads.
    Groups,
    /// Blocks of consecutive tokens, which are not tied to groups, for all KV heads.
    Blocks,
    /// Single tokens of each KV head.
    Tokens,
    /// Clusters of tokens. The name takes `members`, which scores a cluster by the codes of its members, and behind it
    /// the bits of these codes. It takes `heads` (clusters of each KV head) or `joint` (clusters of all KV heads). It
    /// takes `window` and `single` if the method has them.
    Clusters {
        /// Whose keys a cluster of the paper's method holds.
        paper: HeadSharing,
        /// Whose keys a cluster holds if members are scored.
        members: HeadSharing,
        /// True if the name takes `window`: every head attends to the newest tokens whole, as in the paper. Otherwise
        /// they are chosen one by one.
        has_window: bool,
        /// True if an entry may be in several clusters. The name then takes `single`, which puts it into one.
        has_replicas: bool,
    },
}

/// The parts of a method's name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MethodChoice {
    /// The number behind the name, or the method's default.
    pub(crate) parameter: Option<usize>,
    /// The bits of the codes of members, if the name says them.
    pub(crate) member_bits: Option<usize>,
    /// The part of a cluster that is scored.
    pub(crate) chosen_by: ChosenBy,
    /// Whose keys a cluster holds. None for methods without clusters.
    pub(crate) sharing: Option<HeadSharing>,
    /// True if every head attends to the newest tokens whole.
    pub(crate) whole_window: bool,
    /// True if an entry is in one cluster only.
    pub(crate) single: bool,
}

impl MethodChoice {
    /// Returns the options of a method that chooses clusters.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the name has no mean size of clusters.
    pub(crate) fn clusters(&self, name: &str) -> Result<ClusterOptions> {
        let none = || Error::new(ErrorKind::InvalidArgument, format!("method {name}: it needs the size of clusters"));
        let mean_size = self.parameter.filter(|size| *size > 0).ok_or_else(none)?;
        let sharing = self.sharing.unwrap_or(HeadSharing::PerHead);
        let MethodChoice { chosen_by, whole_window, single, .. } = *self;
        Ok(ClusterOptions { mean_size, chosen_by, sharing, whole_window, single })
    }
}

/// The parameter of a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MethodParameter {
    /// It takes none.
    None,
    /// It may take one.
    Optional,
    /// It takes one, with this default.
    Default(usize),
}

/// The way in which a `Calibrator` (feature `calibrate`) fits the adapter of a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterFit {
    /// It needs none.
    None,
    /// Low-rank keys of all KV heads together. The parameter is the rank ratio: joint key dimensions over the rank.
    LowRank,
    /// Low-rank keys of each KV head. The parameter is the rank ratio over all heads.
    PerHead,
    /// Transform-coded keys. The parameter is the bits of a token's code.
    Codes,
}

/// Makes a selector of a method that needs no adapter.
pub(crate) fn without_adapter<S: Selector + Default + 'static>(
    _: MethodChoice,
    _: Option<Arc<Adapter>>,
) -> Result<Arc<dyn Selector>> {
    Ok(Arc::new(S::default()))
}

/// Makes a selector of a method that needs one.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: no adapter is given.
pub(crate) fn with_adapter<S: Selector + 'static>(
    name: &str,
    adapter: Option<Arc<Adapter>>,
    make: fn(Arc<Adapter>) -> S,
) -> Result<Arc<dyn Selector>> {
    let none =
        || Error::new(ErrorKind::InvalidArgument, format!("method {name}: an adapter is needed and none is given"));
    adapter.map(|adapter| Arc::new(make(adapter)) as _).ok_or_else(none)
}
