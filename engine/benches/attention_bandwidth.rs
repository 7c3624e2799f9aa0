//! Measures the bandwidth of the attention executor from DRAM, against plain reads of the same memory by one core.
//!
//! `cargo bench -p stratakv --bench attention_bandwidth -- [MiB of KV, default 1024] [rounds, default 7] [filter]`
//!
//! 1. Fill the memory with keys and values of a dtype.
//! 2. In each round, read the memory once by plain loads and once by attention. Noise of the machine then affects both.
//!    Report medians.
//! 3. Repeat for every kernel of this processor, group size and order of groups.
//!
//! `scattered` visits the groups in an order that no hardware prefetcher predicts, as after a sparse selection.
//! A filter such as `avx2/f16/8/` keeps matching rows only. `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` puts the memory in
//! transparent huge pages, like the engine's read buffers. The shape is that of LLaMA-3-8B: 8 KV heads, 32 query heads,
//! head dimension 128.
//!
//! It is a program of its own, without a benchmark library, because such a library measures one function at a time.

use std::hint::black_box;
use std::time::Instant;
use stratakv::attention::{AttentionShape, HeadMask, Kernel, KvBlock, Partial, Query, Workspace};
use stratakv::{DType, Result};

const KV_HEADS: usize = 8;
const Q_HEADS: usize = 32;
const DIM: usize = 128;
/// Bytes of keys and values that one partial result covers, as in the read path.
const CHUNK: usize = 256 << 10;
/// Group sizes in tokens, and whether the groups are visited in scattered order.
const ORDERS: [(usize, bool); 5] = [(4, false), (8, false), (8, true), (16, false), (64, false)];

/// The command line.
struct BenchArgs {
    mib: usize,
    rounds: usize,
    filter: String,
}

impl BenchArgs {
    fn parse() -> Self {
        // Cargo passes `--bench`.
        let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
        let number = |i: usize, default| args.get(i).and_then(|a| a.parse().ok()).filter(|n| *n > 0).unwrap_or(default);
        Self { mib: number(0, 1024), rounds: number(1, 7), filter: args.get(2).cloned().unwrap_or_default() }
    }
}

/// One row of the table.
struct BenchCase {
    kernel: &'static Kernel,
    dtype: DType,
    group_tokens: usize,
    scattered: bool,
}

impl BenchCase {
    fn order(&self) -> &'static str {
        if self.scattered { "scattered" } else { "linear" }
    }

    /// Returns whether the case is measured. The portable kernel is slow and has one case only.
    fn is_measured(&self, filter: &str) -> bool {
        let (kernel, dtype, group) = (self.kernel.name(), self.dtype.name(), self.group_tokens);
        let wanted = format!("{kernel}/{dtype}/{group}/{}", self.order()).contains(filter);
        wanted && (!self.is_slow() || (self.dtype == DType::F16 && group == 8))
    }

    fn is_slow(&self) -> bool {
        self.kernel.name() == "portable"
    }

    /// Measures the case and prints its row.
    fn run(&self, words: &[u64], bytes: &[u8], query: &[f32], rounds: usize) -> Result<()> {
        let shape = AttentionShape::new(Q_HEADS, KV_HEADS, DIM, DIM, self.dtype)?;
        let query = Query::new(&shape, query)?;
        let mut parts = [Partial::new(&shape), Partial::new(&shape)];
        let mut workspace = Workspace::with_kernel(self.kernel);
        let mut blocks = blocks(&shape, bytes, self.group_tokens);
        if self.scattered {
            shuffle(&mut blocks);
        }
        let (mut attention, mut read) = (Vec::new(), Vec::new());
        for _ in 0..if self.is_slow() { 1 } else { rounds } {
            let start = Instant::now();
            black_box(read_all(black_box(words)));
            read.push(start.elapsed().as_secs_f64());
            let start = Instant::now();
            black_box(attend(&query, &blocks, &mut parts, &mut workspace)?);
            attention.push(start.elapsed().as_secs_f64());
        }
        let gb = bytes.len() as f64 / 1e9;
        let (attention, read) = (gb / median(attention), gb / median(read));
        println!(
            "{:9} {:5} {:3}   {:9}  {attention:14.2}  {read:9.2}  {:5.2}",
            self.kernel.name(),
            self.dtype.name(),
            self.group_tokens,
            self.order(),
            attention / read
        );
        Ok(())
    }
}

fn main() -> Result<()> {
    let BenchArgs { mib, rounds, filter } = BenchArgs::parse();
    let mut words = vec![0_u64; mib << 17];
    let query: Vec<f32> = (0..Q_HEADS * DIM).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    println!("{mib} MiB of KV, {Q_HEADS} query heads, {KV_HEADS} KV heads, dk = dv = {DIM}, medians of {rounds}");
    println!("kernel    dtype  G    order      attention GB/s  read GB/s  ratio");
    for dtype in [DType::F16, DType::Bf16, DType::F32] {
        fill(&mut words, dtype);
        // Safe code cannot view the words as bytes without a crate, so each dtype makes one copy.
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        for kernel in Kernel::available() {
            for (group_tokens, scattered) in ORDERS {
                let case = BenchCase { kernel, dtype, group_tokens, scattered };
                if case.is_measured(&filter) {
                    case.run(&words, &bytes, &query, rounds)?;
                }
            }
        }
    }
    Ok(())
}

/// Splits the bytes into groups.
fn blocks<'a>(shape: &AttentionShape, bytes: &'a [u8], group_tokens: usize) -> Vec<KvBlock<'a>> {
    let (k_bytes, v_bytes) = (shape.k_plane_bytes(group_tokens), shape.v_plane_bytes(group_tokens));
    let group = |block: &'a [u8]| {
        let (k, v) = block.split_at(k_bytes);
        KvBlock {
            k,
            v,
            group_tokens,
            tokens: group_tokens,
            heads: HeadMask::all(KV_HEADS),
            positions: None,
            one_head: false,
        }
    };
    bytes.chunks_exact(k_bytes + v_bytes).map(group).collect()
}

/// Shuffles the groups in the same way in every run.
fn shuffle(blocks: &mut [KvBlock<'_>]) {
    let mut state = 1_usize;
    for i in (1..blocks.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        blocks.swap(i, (state >> 33) % (i + 1));
    }
}

fn attend(query: &Query, blocks: &[KvBlock<'_>], parts: &mut [Partial; 2], workspace: &mut Workspace) -> Result<f32> {
    let [total, part] = parts;
    total.reset();
    let per_chunk = (CHUNK / (blocks[0].k.len() + blocks[0].v.len())).max(1);
    for chunk in blocks.chunks(per_chunk) {
        part.reset();
        part.add_all(query, chunk, workspace)?;
        total.merge(part)?;
    }
    let mut out = [0.0; Q_HEADS * DIM];
    total.finish(&mut out)?;
    Ok(out[0])
}

/// Adds up all words in 32 independent sums, so that loads are the limit even without wide vectors.
fn read_all(words: &[u64]) -> u64 {
    let mut sums = [0_u64; 32];
    let (chunks, rest) = words.as_chunks::<32>();
    for chunk in chunks {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().chain(rest).fold(0, |a, b| a.wrapping_add(*b))
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Fills the words with elements of a dtype whose magnitudes are from 0.5 to 2.
fn fill(words: &mut [u64], dtype: DType) {
    let mut random = fastrand::Rng::with_seed(1);
    for word in words {
        let state = random.u64(..);
        // The masks keep sign and mantissa, and the or sets the exponent.
        *word = match dtype {
            DType::F16 => state & 0x83ff_83ff_83ff_83ff | 0x3800_3800_3800_3800,
            DType::Bf16 => state & 0x807f_807f_807f_807f | 0x3f00_3f00_3f00_3f00,
            DType::F32 => state & 0x807f_ffff_807f_ffff | 0x3f00_0000_3f00_0000,
        };
    }
}
