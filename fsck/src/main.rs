//! `kvfsck`.
fn main() {}
