//! Low-rank keys (KVSwap section 3.2; InfiniGen): the joint keys of all KV heads times an adapter.

pub(crate) mod infinigen;
pub(crate) mod kvswap;
pub(crate) mod summary;
