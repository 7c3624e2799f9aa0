//! `kvbench`.
fn main() {}
