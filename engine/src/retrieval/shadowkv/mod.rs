//! ShadowKV: mean keys choose chunks, and keys of a low rank are reconstructed in memory instead of being read.

pub(crate) mod reconstructed;
pub(crate) mod selector;
pub(crate) mod summary;

use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodParameter, without_adapter};
use crate::retrieval::shadowkv::selector::ShadowKv;

/// ShadowKV.
pub(crate) const SHADOWKV: Method = Method {
    name: "shadowkv",
    alias: "",
    about: "ShadowKV: mean keys and outliers; the number is the rank of keys that are reconstructed instead of read",
    parameter: MethodParameter::Optional,
    adapter: AdapterFit::None,
    reconstructs_keys: true,
    unit: ChosenUnit::Groups,
    make: without_adapter::<ShadowKv>,
};
