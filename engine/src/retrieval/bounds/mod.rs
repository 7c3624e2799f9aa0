//! Element-wise minima and maxima of each group (Quest; LeoAM section 4): an upper bound of every `q . k` in the group.

pub(crate) mod layer_records;
pub(crate) mod leoam;
pub(crate) mod min_max;
pub(crate) mod query;
pub(crate) mod records;
pub(crate) mod summary;

use crate::retrieval::bounds::leoam::LeoAm;
use crate::retrieval::bounds::min_max::Quest;
use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodParameter, without_adapter};

/// Quest (Tang et al. 2024).
pub(crate) const MIN_MAX: Method = Method {
    name: "minmax",
    alias: "quest",
    about: "Quest: the upper bound of q . k in a group, from element-wise minima and maxima of its keys",
    parameter: MethodParameter::None,
    adapter: AdapterFit::None,
    reconstructs_keys: false,
    unit: ChosenUnit::Groups,
    make: without_adapter::<Quest>,
};

/// LeoAM, section 4.
pub(crate) const LEOAM: Method = Method {
    name: "leoam",
    about: "LeoAM: a tree of bounds, which is descended only where a better group may be",
    alias: "",
    unit: ChosenUnit::Groups,
    make: without_adapter::<LeoAm>,
    ..MIN_MAX
};
