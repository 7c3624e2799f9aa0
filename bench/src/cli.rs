//! The command line.

use crate::selectors::Kept;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use stratakv::{ByteSize, ChecksumChoice, DriverChoice, PlaneCodec};

const EXAMPLES: &str = "Examples:
  kvbench read --device /nvme0 --block 4KiB,16KiB,64KiB,128KiB --fio --bare --json
  kvbench drivers --device /nvme0 --block 64KiB
  kvbench ingest --device /nvme0 --size 8GiB --fio
  kvbench commit --device /nvme0
  kvbench churn --device /nvme0 --capacity 4GiB --json
  kvbench select --tokens 32768,131072

Results go to stdout, progress to stderr. With --json each result is one object on a line of its own. Everything kvbench
writes lies in a directory of its own below --device, which is removed at the end and on Ctrl-C.";

/// Measures stratakv: reads, ingest, commits and selection.
#[derive(Parser, Debug)]
#[command(name = "kvbench", version, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Batches of random blocks, checksums verified, beside a bare io_uring loop and fio.
    Read(ReadArgs),
    /// The same batches through every driver that was built in, taking turns.
    Drivers(DriversArgs),
    /// Prefill-sized appends and a commit, beside fio's sequential writes.
    Ingest(IngestArgs),
    /// Durable commits of one decode step, beside the same bytes written by plain calls.
    Commit(CommitArgs),
    /// Sequences of mixed lengths that come and go in a store kept nearly full: what the devices take for it.
    Churn(ChurnArgs),
    /// Bytes that the devices take for a prefill, and for decodes committed at some pace.
    Written(WrittenArgs),
    /// Opening and forking a long sequence, by how it was written.
    Open(OpenArgs),
    /// Opening a store of many sequences and sparse segments, which is made for it.
    Start(StartArgs),
    /// Min/max selection, beside the memory bandwidth of one core.
    Select(SelectArgs),
    /// Batches over 1, 2 and 4 throttled devices, a skewed selection and a slow device, with copies and without. Takes root.
    Scale(ScaleArgs),
    /// Decode steps with resident blocks and reads ahead, beside the same without.
    Decode(DecodeArgs),
    /// What a sequence holds in memory during decode, by method, beside what the process takes.
    Resident(ResidentArgs),
    /// Codecs on keys and values of a real model, and the share of a transfer to compress.
    Codec(CodecArgs),
    /// Makes disks of a known speed out of files, and takes them away again. Takes root.
    #[command(subcommand)]
    Devices(DevicesCommand),
}

#[derive(Args, Debug)]
#[command(
    after_help = "Examples: kvbench scale --dir /nvme0 --json\n          kvbench scale --dir /nvme0 --shard-threads 1,2 --json"
)]
pub(crate) struct ScaleArgs {
    /// Directory for the images of the devices.
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    pub(crate) dir: PathBuf,
    /// Bytes per second of each device.
    #[arg(long, default_value = "250000000", value_parser = size)]
    pub(crate) bps: ByteSize,
    /// Bytes of a block: a multiple of 4 KiB up to 512 KiB.
    #[arg(long, default_value = "64KiB", value_parser = size)]
    pub(crate) block: ByteSize,
    /// Blocks of a batch.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(8..=1024))]
    pub(crate) batch: u32,
    /// Batches on their way at the same time.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) in_flight: u32,
    /// Bytes of keys and values in each store.
    #[arg(long, default_value = "512MiB", value_parser = size)]
    pub(crate) size: ByteSize,
    /// Seconds of each turn.
    #[arg(long, default_value_t = 3.0)]
    pub(crate) seconds: f64,
    /// Turns; figures are medians.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: u32,
    /// In place of the other tests: four devices, with and without limits, served by so many threads beside one for each, turn by turn.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=4))]
    pub(crate) shard_threads: Vec<u32>,
    /// How the engine moves bytes.
    #[arg(long, value_enum, default_value_t = Driver::Auto)]
    pub(crate) driver: Driver,
    /// One JSON object per result instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Subcommand, Debug)]
pub(crate) enum DevicesCommand {
    /// Image files, loop devices, ext4, limits of bytes per second (cgroup v1).
    Up(UpArgs),
    /// Unmounts, detaches and removes them, half-made ones too.
    Down(DownArgs),
}

#[derive(Args, Debug)]
#[command(
    after_help = "Example: kvbench devices up --dir /nvme0 --count 4 --size 2GiB --read-bps 250M --write-bps 250M --slow 3:60M"
)]
pub(crate) struct UpArgs {
    /// Directory for the images and mount points.
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Devices.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) count: u32,
    /// Bytes of each.
    #[arg(long, default_value = "1GiB", value_parser = size)]
    pub(crate) size: ByteSize,
    /// Bytes per second that each may read. No limit without.
    #[arg(long, value_parser = size)]
    pub(crate) read_bps: Option<ByteSize>,
    /// Bytes per second that each may write. No limit without.
    #[arg(long, value_parser = size)]
    pub(crate) write_bps: Option<ByteSize>,
    /// A device that is slower: its number, from 0, and its bytes per second, for reads and writes.
    #[arg(long, value_name = "K:BPS", value_parser = slow)]
    pub(crate) slow: Option<(u32, u64)>,
    /// One JSON object per device instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct DownArgs {
    /// The directory given to `up`.
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Why it was skipped, as a JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What every subcommand knows.
#[derive(Args, Debug)]
pub(crate) struct Common {
    /// Directory on the device to measure; what is written lies in a directory below it and is removed.
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    pub(crate) device: PathBuf,
    /// Times that each side takes its turn; figures are medians.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,
    /// How the engine moves bytes.
    #[arg(long, value_enum, default_value_t = Driver::Auto)]
    pub(crate) driver: Driver,
    /// Payload checksum of the store.
    #[arg(long, value_enum, default_value_t = Checksum::Crc64)]
    pub(crate) checksum: Checksum,
    /// One JSON object per result instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench read --device /nvme0 --block 16KiB,64KiB --fio --bare --json")]
pub(crate) struct ReadArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Bytes of a block, several with commas: multiples of 4 KiB up to 512 KiB.
    #[arg(long, value_delimiter = ',', default_value = "4KiB,16KiB,64KiB,128KiB", value_parser = size)]
    pub(crate) block: Vec<ByteSize>,
    /// Blocks of a batch.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) batch: u32,
    /// Batches of the engine on their way at the same time.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) in_flight: u32,
    /// By tickets, through the shard's thread, where a single batch is in flight too.
    #[arg(long)]
    pub(crate) tickets: bool,
    /// Seconds of each turn.
    #[arg(long, default_value_t = 2.0)]
    pub(crate) seconds: f64,
    /// Bytes of keys and values to read from.
    #[arg(long, default_value = "1GiB", value_parser = size)]
    pub(crate) size: ByteSize,
    /// Beside fio, with the same batches.
    #[arg(long)]
    pub(crate) fio: bool,
    /// Beside a bare io_uring loop.
    #[arg(long)]
    pub(crate) bare: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench drivers --device /nvme0 --block 16KiB,64KiB --json
glommio and tokio-uring take part when built with --features glommio,tokio-uring.")]
pub(crate) struct DriversArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Bytes of a block, several with commas: multiples of 4 KiB up to 512 KiB.
    #[arg(long, value_delimiter = ',', default_value = "4KiB,16KiB,64KiB,128KiB", value_parser = size)]
    pub(crate) block: Vec<ByteSize>,
    /// Blocks of a batch.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) batch: u32,
    /// Batches on their way at the same time.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) in_flight: u32,
    /// Seconds of each turn.
    #[arg(long, default_value_t = 2.0)]
    pub(crate) seconds: f64,
    /// Bytes of keys and values to read from.
    #[arg(long, default_value = "1GiB", value_parser = size)]
    pub(crate) size: ByteSize,
}

#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench ingest --device /nvme0 --size 8GiB --fio --json")]
pub(crate) struct IngestArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Bytes of keys and values to append in each round.
    #[arg(long, default_value = "1GiB", value_parser = size)]
    pub(crate) size: ByteSize,
    /// Tokens of one append.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) chunk: u32,
    /// Without min/max summaries.
    #[arg(long)]
    pub(crate) no_summary: bool,
    /// Beside fio, sequential.
    #[arg(long)]
    pub(crate) fio: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench commit --device /nvme0 --commits 200 --json")]
pub(crate) struct CommitArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Commits in all.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) commits: u32,
    /// Tokens of a step.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) step: u32,
    /// Also so many sequences that commit together, each on a thread of its own; 1: none.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) sequences: u32,
}

#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench churn --device /nvme0 --capacity 4GiB --full 0.8 --json")]
pub(crate) struct ChurnArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Bytes of all files of the store.
    #[arg(long, default_value = "4GiB", value_parser = size)]
    pub(crate) capacity: ByteSize,
    /// Bytes of a segment; as the engine chooses by the capacity when left out.
    #[arg(long, value_parser = size)]
    pub(crate) segment: Option<ByteSize>,
    /// The share of the capacity that lives.
    #[arg(long, default_value_t = 0.8)]
    pub(crate) full: f64,
    /// Tokens of the shortest sequence, of 16 KiB each.
    #[arg(long, default_value_t = 64)]
    pub(crate) shortest: u64,
    /// Tokens of the longest; every magnitude in between is as frequent as the others.
    #[arg(long, default_value_t = 8192)]
    pub(crate) longest: u64,
    /// How often all that lives is written anew.
    #[arg(long, default_value_t = 3.0)]
    pub(crate) turnover: f64,
    /// Decides which sequences come and go.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Without min/max summaries.
    #[arg(long)]
    pub(crate) no_summary: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench written --device /nvme0 --per 0,64,1 --json")]
pub(crate) struct WrittenArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Tokens.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) tokens: u32,
    /// Tokens from one commit to the next, several with commas; 0: one commit behind everything.
    #[arg(long, value_delimiter = ',', default_value = "0,64,1")]
    pub(crate) per: Vec<u32>,
    /// Layers, of 4 KiB a token each.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=128))]
    pub(crate) layers: u16,
    /// Tokens of a group.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=128))]
    pub(crate) group: u16,
    /// Without min/max summaries.
    #[arg(long)]
    pub(crate) no_summary: bool,
    /// With a selector whose summaries are written with the groups.
    #[arg(long, value_enum)]
    pub(crate) selector: Option<Kept>,
}

#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench open --device /nvme0 --tokens 32768 --per 0,1 --json")]
pub(crate) struct OpenArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Tokens of the sequence.
    #[arg(long, default_value_t = 32_768, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) tokens: u32,
    /// Tokens from one commit to the next, several with commas; 0: one commit behind everything.
    #[arg(long, value_delimiter = ',', default_value = "0,1")]
    pub(crate) per: Vec<u32>,
    /// Layers, of 4 KiB a token each.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=128))]
    pub(crate) layers: u16,
    /// Tokens of a group.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=128))]
    pub(crate) group: u16,
    /// With min/max summaries, which are read when it is opened.
    #[arg(long)]
    pub(crate) summary: bool,
    /// Attaches this selector after opening, and measures that.
    #[arg(long, value_enum)]
    pub(crate) selector: Option<Kept>,
    /// What the selector keeps was written with the groups.
    #[arg(long, requires = "selector")]
    pub(crate) stored: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench start --device /nvme0 --sequences 100000 --stored 1TiB --json")]
pub(crate) struct StartArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Sequences, of two frames each.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) sequences: u64,
    /// Bytes of the segment files, which are sparse.
    #[arg(long, default_value = "1TiB", value_parser = size)]
    pub(crate) stored: ByteSize,
}

/// Forms of a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Form {
    /// The sum over query heads.
    Raw,
    /// Softmax per query head, then the sum.
    Softmax,
    /// Softmax over groups per query head, each with its best token, then the sum.
    GroupSoftmax,
}

impl From<Form> for stratakv::retrieval::HeadAggregation {
    fn from(form: Form) -> Self {
        match form {
            Form::Raw => Self::Sum,
            Form::Softmax => Self::Softmax,
            Form::GroupSoftmax => Self::GroupSoftmax,
        }
    }
}

#[derive(Args, Debug)]
#[command(
    after_help = "Example: kvbench select --tokens 32768,131072 --method records,tck:64,kvswap:8 --form raw,softmax --json

Methods take turns over the layers of one sequence. `records` are a sequence's own min/max records, always raw; the others are
selectors: quest, leoam, shadowkv, signs, oracle, kvswap:SIGMA, infinigen:SIGMA, tck:BITS. Adapters are fitted to random keys,
which changes what is chosen but not what it costs."
)]
pub(crate) struct SelectArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Tokens of the context, several with commas.
    #[arg(long, value_delimiter = ',', default_value = "32768,131072", value_parser = clap::value_parser!(u32).range(64..=1 << 24))]
    pub(crate) tokens: Vec<u32>,
    /// Tokens to select.
    #[arg(long, default_value_t = 400)]
    pub(crate) budget: u32,
    /// Methods, several with commas.
    #[arg(long, value_delimiter = ',', default_value = "records")]
    pub(crate) method: Vec<String>,
    /// How selectors add up query heads, several with commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "raw")]
    pub(crate) form: Vec<Form>,
    /// Min/max records to hold in memory, in all: more than the caches hold, for the layers of a step are scanned in turn.
    #[arg(long, default_value = "256MiB", value_parser = size)]
    pub(crate) working_set: ByteSize,
}

#[derive(Args, Debug)]
#[command(
    after_help = "Examples: kvbench decode --device /nvme0 --read-bps 250M --policy none,lru --pipeline off,on --json
          kvbench decode --device /nvme0 --policy none --codec int4 --codec-share auto --json

The same context and compute time is measured for every policy with every setting of --pipeline; `speedup` is the step time of
the first of them over each. With --read-bps the store lies on a disk of that speed made of a file (root only).

With --codec-share auto the store is first written without a codec, then all under the codec, and each is read by a few steps that
do not compute; what they take, the speed of the codec and --layer-compute-us give theta: the fewest layers under the codec with
which a step, whose reads go one layer ahead, takes as long as with the best number of them. The store is written anew with these.
`theta` and what it was solved from (`theta_...`) stand in the result. --policy and --layer-compute-us each have one of their own."
)]
pub(crate) struct DecodeArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Tokens of each sequence, several with commas.
    #[arg(long, value_delimiter = ',', default_value = "32768", value_parser = clap::value_parser!(u32).range(64..=1 << 24))]
    pub(crate) context: Vec<u32>,
    /// Sequences.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) batch: u32,
    /// Layers.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=128))]
    pub(crate) layers: u16,
    /// Tokens of a group.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=128))]
    pub(crate) group: u16,
    /// How groups are stored.
    #[arg(long, value_enum, default_value = "raw")]
    pub(crate) codec: DecodeCodec,
    /// Share of the layers whose groups are stored under that codec; `auto` measures and solves for LeoAM's theta, which needs
    /// a codec and reads that go ahead.
    #[arg(long, value_name = "SHARE|auto", default_value = "1", value_parser = codec_share)]
    pub(crate) codec_share: CodecShare,
    /// Tokens selected per layer and sequence.
    #[arg(long, default_value_t = 400)]
    pub(crate) budget: u32,
    /// Which resident blocks go when others come, several with commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "none,lru")]
    pub(crate) policy: Vec<DecodePolicy>,
    /// Whether the next layer's reads go ahead, several with commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "on")]
    pub(crate) pipeline: Vec<Switch>,
    /// Share of a step's selection that the next step keeps.
    #[arg(long, default_value_t = 0.78, value_parser = share)]
    pub(crate) overlap: f64,
    /// Share of a layer's selection that its prediction names; the rest is read on demand. KVSwap attends to what was
    /// predicted, which is 1.
    #[arg(long, default_value_t = 1.0, value_parser = share)]
    pub(crate) recall: f64,
    /// Each step also scores every token of every sequence and layer by these methods, several with commas, as `kvbench select`
    /// names them, with `:raw` for raw scores; `none` leaves it out. What is read follows the trace all the same.
    #[arg(long, value_name = "METHOD", value_delimiter = ',', default_value = "none")]
    pub(crate) select: Vec<String>,
    /// Threads that score, each some of the sequences, where the step waits for it; it is one beside other work.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(crate) select_threads: u8,
    /// Microseconds that a layer computes, attention included, for the whole batch, several with commas; what attention leaves of
    /// it passes as if it were computed elsewhere.
    #[arg(long, value_delimiter = ',', default_value = "5000")]
    pub(crate) layer_compute_us: Vec<u64>,
    /// MiB of the cache for all sequences; `auto` is 1.25 times what a step selects.
    #[arg(long, value_name = "N|auto", default_value = "auto", value_parser = cache_mib)]
    pub(crate) cache_mib: CacheMib,
    /// Bytes per second that the device may read. The device as it is without.
    #[arg(long, value_parser = size)]
    pub(crate) read_bps: Option<ByteSize>,
    /// Steps that count, after those that fill the caches.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) steps: u32,
    /// Bytes of keys and values on the device at most: longer contexts select from what is stored.
    #[arg(long, default_value = "8GiB", value_parser = size)]
    pub(crate) stored: ByteSize,
    /// Seed of the selections.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

#[derive(Args, Debug)]
#[command(
    after_help = "Example: kvbench resident --device /nvme0 --context 32768 --method kvswap:32:raw,tck:64 --limit 120MiB --json"
)]
pub(crate) struct ResidentArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Tokens of the sequence.
    #[arg(long, default_value_t = 32768, value_parser = clap::value_parser!(u32).range(64..=1 << 20))]
    pub(crate) context: u32,
    /// Layers.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=128))]
    pub(crate) layers: u16,
    /// Tokens of a group.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=128))]
    pub(crate) group: u16,
    /// Tokens attended per layer.
    #[arg(long, default_value_t = 400)]
    pub(crate) budget: u32,
    /// Methods, as `kvbench select` names them, with `:raw` for raw scores; `none` attends to the newest tokens,
    /// `records` needs `--summaries streamed`.
    #[arg(
        long,
        value_name = "METHOD",
        value_delimiter = ',',
        default_value = "none,kvswap:32:raw,tck:32:raw,tck:64:raw"
    )]
    pub(crate) method: Vec<String>,
    /// The store's memory limit while it decodes; tried first. A method that does not fit is measured without it.
    #[arg(long, default_value = "120MiB", value_parser = size)]
    pub(crate) limit: ByteSize,
    /// MiB of the cache of resident blocks, within the limit.
    #[arg(long, default_value_t = 16)]
    pub(crate) cache_mib: u64,
    /// Decode steps.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) steps: u32,
    /// Where summaries are. `streamed` writes a sequence that carries min/max records and what the methods know of the keys, and
    /// reads those of a layer for its selections.
    #[arg(long, value_enum, default_value = "resident")]
    pub(crate) summaries: SummaryHome,
    /// Whether what predicted queries select is read ahead. They are random here: all of it is read for nothing.
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) predict: Switch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SummaryHome {
    Resident,
    Streamed,
}

#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench codec --kv tests/fixtures/recall-tiny/reference.safetensors --json

Lossy codecs are measured with their errors; planes that a codec cannot make 5 % smaller are kept raw and count so. For theta the
reads are emulated by the clock; decoding is real.")]
pub(crate) struct CodecArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Keys and values: a safetensors file with f32 tensors `k_*` and `v_*` of `[kv_heads, tokens, head_dim]`.
    #[arg(long, value_name = "FILE")]
    pub(crate) kv: PathBuf,
    /// Tokens of a group, several with commas; theta takes the first.
    #[arg(long, value_delimiter = ',', default_value = "8,16,64", value_parser = clap::value_parser!(u16).range(1..=128))]
    pub(crate) group: Vec<u16>,
    /// Seconds of each turn.
    #[arg(long, default_value_t = 0.1)]
    pub(crate) seconds: f64,
    /// Bytes per second to solve theta for, several with commas.
    #[arg(long, value_delimiter = ',', default_value = "250M,500M,1G,2G,4G", value_parser = size)]
    pub(crate) bandwidth: Vec<ByteSize>,
    /// Bytes of keys and values that a layer reads.
    #[arg(long, default_value = "4MiB", value_parser = size)]
    pub(crate) layer_bytes: ByteSize,
    /// Microseconds that a layer computes elsewhere.
    #[arg(long, default_value_t = 2000)]
    pub(crate) compute_us: u64,
    /// Layers of each point of the sweep in each of `--rounds`; the time is the median of all but the first of each.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u32).range(2..=1000))]
    pub(crate) layers: u32,
}

/// None: by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheMib(pub(crate) Option<u64>);

/// Layers under a codec: a share of them, or as many as the device and the computation ask for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CodecShare {
    Given(f64),
    Auto,
}

/// Codecs of `kvbench decode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DecodeCodec {
    Raw,
    Int8,
    Int4,
}

impl From<DecodeCodec> for PlaneCodec {
    fn from(codec: DecodeCodec) -> Self {
        match codec {
            DecodeCodec::Raw => Self::Raw,
            DecodeCodec::Int8 => Self::Int8,
            DecodeCodec::Int4 => Self::Int4,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DecodePolicy {
    /// No cache.
    None,
    /// KVSwap's slots.
    Fifo,
    /// Least recently used.
    Lru,
    /// SWARM's cost-effectiveness.
    Swarm,
    /// A general one.
    S3Fifo,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    Off,
    On,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Driver {
    Auto,
    Uring,
    Posix,
    #[cfg(feature = "glommio")]
    Glommio,
    #[cfg(feature = "tokio-uring")]
    TokioUring,
}

impl From<Driver> for DriverChoice {
    fn from(driver: Driver) -> Self {
        match driver {
            Driver::Auto => Self::Auto,
            Driver::Uring => Self::Uring,
            Driver::Posix => Self::Posix,
            #[cfg(feature = "glommio")]
            Driver::Glommio => Self::Glommio,
            #[cfg(feature = "tokio-uring")]
            Driver::TokioUring => Self::TokioUring,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Checksum {
    Crc64,
    Crc32,
}

impl From<Checksum> for ChecksumChoice {
    fn from(checksum: Checksum) -> Self {
        match checksum {
            Checksum::Crc64 => Self::Crc64Nvme,
            Checksum::Crc32 => Self::Crc32,
        }
    }
}

fn slow(text: &str) -> Result<(u32, u64), String> {
    let wrong = || format!("{text:?} is not K:BPS, a device and its bytes per second (try 3:60M)");
    let (device, bps) = text.split_once(':').ok_or_else(wrong)?;
    Ok((device.parse().map_err(|_| wrong())?, size(bps)?.0))
}

fn share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| format!("{text:?} is no number"))?;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err(format!("{text} is not between 0 and 1")) }
}

fn codec_share(text: &str) -> Result<CodecShare, String> {
    if text == "auto" { Ok(CodecShare::Auto) } else { share(text).map(CodecShare::Given) }
}

fn cache_mib(text: &str) -> Result<CacheMib, String> {
    match text {
        "auto" => Ok(CacheMib(None)),
        _ => text.parse().map(|mib| CacheMib(Some(mib))).map_err(|_| format!("{text:?} is neither MiB nor auto")),
    }
}

fn size(text: &str) -> Result<ByteSize, String> {
    text.parse().map_err(|e: stratakv::Error| e.to_string())
}
