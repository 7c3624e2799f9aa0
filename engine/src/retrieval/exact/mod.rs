//! The exact oracle: scores of all keys, kept in memory. For evaluation.

pub(crate) mod selector;
pub(crate) mod summary;

use crate::retrieval::exact::selector::Oracle;
use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodParameter, without_adapter};

/// The exact oracle.
pub(crate) const ORACLE: Method = Method {
    name: "oracle",
    alias: "",
    about: "exact scores of all keys, which stay in memory: for evaluation",
    parameter: MethodParameter::None,
    adapter: AdapterFit::None,
    reconstructs_keys: false,
    unit: ChosenUnit::Groups,
    make: without_adapter::<Oracle>,
};
