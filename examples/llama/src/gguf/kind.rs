//! The element types of GGUF tensors that this runtime computes with.
//!
//! Numbers and names come from `ggml_type` in ggml's `ggml.h`. A known type that is not
//! supported is refused by its name.

use anyhow::{Result, bail};
use candle_core::quantized::GgmlDType;

/// The types that are read, with their numbers and names.
pub const TENSOR_KINDS: [(u32, &str, GgmlDType); 13] = [
    (0, "F32", GgmlDType::F32),
    (1, "F16", GgmlDType::F16),
    (2, "Q4_0", GgmlDType::Q4_0),
    (3, "Q4_1", GgmlDType::Q4_1),
    (6, "Q5_0", GgmlDType::Q5_0),
    (7, "Q5_1", GgmlDType::Q5_1),
    (8, "Q8_0", GgmlDType::Q8_0),
    (10, "Q2_K", GgmlDType::Q2K),
    (11, "Q3_K", GgmlDType::Q3K),
    (12, "Q4_K", GgmlDType::Q4K),
    (13, "Q5_K", GgmlDType::Q5K),
    (14, "Q6_K", GgmlDType::Q6K),
    (30, "BF16", GgmlDType::BF16),
];

/// Types of ggml that are refused, for the error.
const REFUSED: [(u32, &str); 19] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
];

/// Returns the type with this number.
///
/// # Errors
/// Fails if the number is unknown, or if the type is not supported. The error lists the supported types.
pub(super) fn kind_of(number: u32) -> Result<GgmlDType> {
    if let Some((_, _, kind)) = TENSOR_KINDS.iter().find(|(known, _, _)| *known == number) {
        return Ok(*kind);
    }
    let names = TENSOR_KINDS.map(|(_, name, _)| name).join(", ");
    match REFUSED.iter().find(|(known, _)| *known == number) {
        Some((_, name)) => bail!("elements of type {name} are not supported; supported are {names}"),
        None => bail!("element type {number} is unknown; supported are {names}"),
    }
}

/// Returns the number of a type in a file, and its name.
///
/// # Errors
/// Fails if the type is not one of [`TENSOR_KINDS`].
pub fn number_and_name(kind: GgmlDType) -> Result<(u32, &'static str)> {
    match TENSOR_KINDS.iter().find(|(_, _, known)| *known == kind) {
        Some((number, name, _)) => Ok((*number, name)),
        None => bail!("{kind:?} is not a type of weights"),
    }
}
