//! Sign bits of randomly rotated keys: one bit per dimension, no calibration.

pub(crate) mod selector;
pub(crate) mod summary;

use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodParameter, without_adapter};
use crate::retrieval::sign_bits::selector::SignBits;

/// Sign bits of rotated keys.
pub(crate) const SIGN_BITS: Method = Method {
    name: "signs",
    alias: "",
    about: "sign bits of randomly rotated keys: one bit per dimension, no calibration",
    parameter: MethodParameter::None,
    adapter: AdapterFit::None,
    reconstructs_keys: false,
    unit: ChosenUnit::Groups,
    make: without_adapter::<SignBits>,
};
