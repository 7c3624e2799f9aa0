//! The subcommands of `kvbench`. Each area defines the arguments of its own.

use crate::cluster::ClusterCommand;
use crate::codec::CodecArgs;
use crate::decode::DecodeArgs;
use crate::devices::{DevicesCommand, scale};
use crate::ingest::IngestArgs;
use crate::peers::PeersArgs;
use crate::read::{DriversArgs, ReadArgs};
use crate::select::SelectArgs;
use crate::store::{churn, commit, open, resident, start, written};
use crate::{cluster, codec, decode, devices, ingest, peers, read, select};
use anyhow::Result;
use clap::{Parser, Subcommand};

const EXAMPLES: &str = "Examples:
  kvbench read --device /nvme0 --block 4KiB,16KiB,64KiB,128KiB --fio --bare --json
  kvbench drivers --device /nvme0 --block 64KiB
  kvbench ingest --device /nvme0 --size 8GiB --fio
  kvbench peers --device /nvme0 --size 2GiB --cores 1,2
  kvbench commit --device /nvme0
  kvbench churn --device /nvme0 --capacity 4GiB --json
  kvbench select --tokens 32768,131072

Results are printed to stdout, progress to stderr. With --json each result is one object on its own line. kvbench writes
only into a new directory below --device, which it removes at the end and on Ctrl-C.";

/// Measures stratakv: reads, ingest, commits and selection.
#[derive(Parser, Debug)]
#[command(name = "kvbench", version, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// A subcommand with its arguments.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Measures batches of random blocks with checksums verified, against a bare io_uring loop and fio.
    Read(ReadArgs),
    /// Measures the same batches with every driver that was built in.
    Drivers(DriversArgs),
    /// Measures prefill-sized appends and a commit, against fio's sequential writes.
    Ingest(IngestArgs),
    /// Measures ingest and decode batches against other stores, files and a bare loop.
    Peers(PeersArgs),
    /// Measures durable commits of one decode step, against plain calls that write the same bytes.
    Commit(commit::CommitArgs),
    /// Measures the bytes that devices receive while sequences of mixed lengths come and go in a nearly full store.
    Churn(churn::ChurnArgs),
    /// Measures the bytes that devices receive for a prefill, and for decodes that commit at some pace.
    Written(written::WrittenArgs),
    /// Measures opening and forking a long sequence, by the pace of its commits.
    Open(open::OpenArgs),
    /// Measures opening a synthetic store of many sequences in sparse segments.
    Start(start::StartArgs),
    /// Measures selection by any method, against the memory bandwidth of one core.
    Select(SelectArgs),
    /// Measures batches over 1, 2 and 4 limited devices, a skewed selection and a slow device (root only).
    Scale(scale::ScaleArgs),
    /// Measures decode steps with resident blocks and prefetching, and without.
    Decode(DecodeArgs),
    /// Measures the memory of one sequence during decode, by method.
    Resident(resident::ResidentArgs),
    /// Measures codecs on keys and values of a real model, and solves for the share of a transfer to compress.
    Codec(CodecArgs),
    /// Measures the cluster algorithms on planted topics or on a recorded profile, without a store.
    #[command(subcommand, after_help = "Example: kvbench cluster build --entries 32768 --queries 128 --json")]
    Cluster(ClusterCommand),
    /// Makes disks of a known speed out of files, and removes them (root only).
    #[command(subcommand, after_help = "Example: kvbench devices up --dir /nvme0 --count 2 --read-bps 250M --json")]
    Devices(DevicesCommand),
}

impl Command {
    /// Runs the subcommand.
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Self::Read(args) => read::run(args),
            Self::Drivers(args) => read::drivers::run(args),
            Self::Ingest(args) => ingest::run(args),
            Self::Peers(args) => peers::run(args),
            Self::Commit(args) => commit::run(args),
            Self::Churn(args) => churn::run(args),
            Self::Written(args) => written::run(args),
            Self::Open(args) => open::run(args),
            Self::Start(args) => start::run(args),
            Self::Select(args) => select::run(args),
            Self::Scale(args) => scale::run(args),
            Self::Decode(args) => decode::run(args),
            Self::Resident(args) => resident::run(args),
            Self::Codec(args) => codec::run(args),
            Self::Cluster(command) => cluster::run(command),
            Self::Devices(command) => devices::run(command),
        }
    }
}
