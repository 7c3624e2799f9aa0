//! Eight and four bits per element, in even steps over the range of a group of elements.
//!
//! The quantised form has, per head, the parameters of its ranges and then its rows:
//! - A range has two parameters in the dtype of the plane: the least value, and the step, rounded up. So
//!   `least + levels * step` is never below the greatest value.
//! - The step of a range of different elements has a finite inverse. So every plane of finite elements up to
//!   [`ENCODED_ELEMENT_MAX`](stratakv_format::codec::ENCODED_ELEMENT_MAX) can be encoded.
//! - A row of `dims` levels takes `dims` bytes, or half as many with two levels in a byte. The lower half of the row
//!   is in the low four bits.
//!
//! Loops work on [`VALUE_RANGE_CHANNELS`](stratakv_format::codec::VALUE_RANGE_CHANNELS) elements of fixed length,
//! because the compiler then uses vector instructions.

mod decode;
mod encode;
mod ranges;

pub(crate) use decode::{DequantiseError, dequantise_4, dequantise_8};
pub(crate) use encode::{quantise_4, quantise_8};
pub(crate) use ranges::QuantisedShape;
