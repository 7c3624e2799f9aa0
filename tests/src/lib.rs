//! Black-box tests of stratakv live in `tests/`.
