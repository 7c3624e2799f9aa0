//! The subcommands of `kvrun`: they connect the command line with the library and print results.

mod calibrate;
mod chat;
mod cluster;
mod compare;
mod convert;
mod generate;
mod profile;
mod recall;
mod shared;

pub(crate) use calibrate::calibrate;
pub(crate) use chat::chat;
pub(crate) use cluster::cluster;
pub(crate) use compare::compare;
pub(crate) use convert::convert;
pub(crate) use generate::generate;
pub(crate) use profile::profile;
pub(crate) use recall::recall;
