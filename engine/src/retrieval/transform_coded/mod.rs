//! Transform-coded keys: a code of a few bytes per token, scored by table look-ups.

pub(crate) mod codebook;
pub(crate) mod selector;
pub(crate) mod summary;

use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodParameter, with_adapter};
use crate::retrieval::transform_coded::selector::TransformCoded;

/// Transform-coded keys.
pub(crate) const TRANSFORM_CODED: Method = Method {
    name: "tck",
    alias: "",
    about: "transform-coded keys: a code per token, scored by table look-ups; the number is the bits of a code",
    parameter: MethodParameter::Default(64),
    adapter: AdapterFit::Codes,
    reconstructs_keys: false,
    unit: ChosenUnit::Groups,
    make: |_, adapter| with_adapter("tck", adapter, TransformCoded::new),
};
