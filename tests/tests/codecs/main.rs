//! Sequences with plane codecs.
//!
//! - `histories`: after any history, a group equals its tokens encoded and decoded by the public coder. Tokens of the
//!   tail are exact until a group includes them. A truncation keeps decoded values.
//! - `blocks`: blocks have the size and the error bound that the layout documents.
//! - `layouts`: a layout names its codecs, and a store names the feature.
//! - `ranges`: invalid ranges and tails under valid checksums are damage with a place.

mod blocks;
mod histories;
mod layouts;
mod model;
mod ranges;
mod stores;
