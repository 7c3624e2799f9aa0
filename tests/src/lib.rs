//! Black-box tests of stratakv live in `tests/`.

pub mod sim;
