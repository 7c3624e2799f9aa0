//! Memory that the system reads into and writes from.

pub(crate) mod aligned;
pub(crate) mod arena;
pub(crate) mod pages;
pub(crate) mod region;
pub(crate) mod slab;
