//! The description of a retrieval method, by which tools name it, parse its parameter and make its selector.

use crate::error::{Error, ErrorKind, Result};
use crate::retrieval::adapter::Adapter;
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
    /// Makes its selector with an adapter.
    pub(crate) make: MakeSelector,
}

/// Makes the selector of a method with the adapter it needs, if any.
type MakeSelector = fn(Option<Arc<Adapter>>) -> Result<Arc<dyn Selector>>;

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
pub(crate) fn without_adapter<S: Selector + Default + 'static>(_: Option<Arc<Adapter>>) -> Result<Arc<dyn Selector>> {
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
