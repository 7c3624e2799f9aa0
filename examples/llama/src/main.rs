//! `kvrun`.
fn main() {}
