//! Low-rank keys (KVSwap section 3.2; InfiniGen): the joint keys of all KV heads times an adapter.

pub(crate) mod infinigen;
pub(crate) mod kvswap;
pub(crate) mod summary;

use crate::retrieval::low_rank::infinigen::InfiniGen;
use crate::retrieval::low_rank::kvswap::KvSwap;
use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodParameter, with_adapter};

/// The method of KVSwap, section 3.2.
pub(crate) const KVSWAP: Method = Method {
    name: "kvswap",
    alias: "",
    about: "KVSwap: low-rank keys of all KV heads together; the number is the rank ratio",
    parameter: MethodParameter::Default(8),
    adapter: AdapterFit::LowRank,
    reconstructs_keys: false,
    unit: ChosenUnit::Groups,
    make: |_, adapter| with_adapter("kvswap", adapter, KvSwap::new),
};

/// The method after InfiniGen.
pub(crate) const INFINIGEN: Method = Method {
    name: "infinigen",
    about: "InfiniGen: every KV head ranks tokens by low-rank keys of its own; the number is the rank ratio",
    adapter: AdapterFit::PerHead,
    unit: ChosenUnit::Groups,
    make: |_, adapter| with_adapter("infinigen", adapter, InfiniGen::new),
    ..KVSWAP
};
