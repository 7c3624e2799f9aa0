//! Bandwidth of the attention executor from DRAM, against plain reads of the same memory by one core.
//!
//! `cargo run --release -p stratakv --example attention_bandwidth -- [MiB of KV, default 1024] [rounds, default 7] [filter]`
//!
//! `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` puts the memory in transparent huge pages, as the read arena has them.
//! Reads and attention take turns in every round; figures are medians over the rounds. 8 KV heads, 32 query heads,
//! dk = dv = 128. A filter such as `avx2/f16/8/` keeps matching rows only. `scattered` visits the blocks in an order
//! that no hardware prefetcher foresees, as after a sparse selection.

use std::hint::black_box;
use std::time::Instant;
use stratakv::attention::{AttentionShape, HeadMask, Kernel, KvBlock, Partial, Query, Workspace};
use stratakv::{DType, Result};

const KV_HEADS: usize = 8;
const Q_HEADS: usize = 32;
const DIM: usize = 128;
/// Bytes of one partial, as in the read path.
const CHUNK: usize = 256 << 10;

/// Adds up all bytes as u64 in 32 independent sums, so that the loads are the limit even without wide vectors.
fn read_all(words: &[u64]) -> u64 {
    let mut sums = [0u64; 32];
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

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default| args.get(i).and_then(|a| a.parse().ok()).filter(|n| *n > 0).unwrap_or(default);
    let (mib, rounds) = (number(0, 1024), number(1, 7));
    let filter = args.get(2).map_or("", String::as_str);
    let mut words = vec![0u64; mib << 17];
    let query: Vec<f32> = (0..Q_HEADS * DIM).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    println!("{mib} MiB of KV, {Q_HEADS} query heads, {KV_HEADS} KV heads, dk = dv = {DIM}, medians of {rounds}");
    println!("kernel    dtype  G    order      attention GB/s  read GB/s  ratio");
    for dtype in [DType::F16, DType::Bf16, DType::F32] {
        fill(&mut words, dtype);
        // The words as bytes, without unsafe code: a copy would double the memory, so it is made once per dtype.
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        for kernel in Kernel::available() {
            for (group_tokens, scattered) in [(4, false), (8, false), (8, true), (16, false), (64, false)] {
                let order = if scattered { "scattered" } else { "linear" };
                if !format!("{}/{}/{group_tokens}/{order}", kernel.name(), dtype.name()).contains(filter) {
                    continue;
                }
                let slow = kernel.name() == "portable";
                if slow && (dtype != DType::F16 || group_tokens != 8) {
                    continue;
                }
                let shape = AttentionShape::new(Q_HEADS, KV_HEADS, DIM, DIM, dtype)?;
                let query = Query::new(&shape, &query)?;
                let mut parts = [Partial::new(&shape), Partial::new(&shape)];
                let mut workspace = Workspace::with_kernel(kernel);
                let mut blocks: Vec<KvBlock<'_>> = bytes
                    .chunks_exact(shape.k_plane_bytes(group_tokens) + shape.v_plane_bytes(group_tokens))
                    .map(|block| {
                        let (k, v) = block.split_at(shape.k_plane_bytes(group_tokens));
                        let heads = HeadMask::all(KV_HEADS);
                        KvBlock { k, v, group_tokens, tokens: group_tokens, heads, positions: None }
                    })
                    .collect();
                if scattered {
                    let n = blocks.len();
                    let mut state = 1usize;
                    for i in (1..n).rev() {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        blocks.swap(i, (state >> 33) % (i + 1));
                    }
                }
                let (mut attention, mut read) = (Vec::new(), Vec::new());
                for _ in 0..if slow { 1 } else { rounds } {
                    let start = Instant::now();
                    black_box(read_all(black_box(&words)));
                    read.push(start.elapsed().as_secs_f64());
                    let start = Instant::now();
                    black_box(attend(&query, &blocks, &mut parts, &mut workspace)?);
                    attention.push(start.elapsed().as_secs_f64());
                }
                let gb = bytes.len() as f64 / 1e9;
                let (attention, read) = (gb / median(attention), gb / median(read));
                println!(
                    "{:9} {:5} {group_tokens:3}   {order:9}  {attention:14.2}  {read:9.2}  {:5.2}",
                    kernel.name(),
                    dtype.name(),
                    attention / read
                );
            }
        }
    }
    Ok(())
}

/// Small finite values of the dtype in every element.
fn fill(words: &mut [u64], dtype: DType) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for word in words {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // Keep sign and mantissa, force the exponent to values of magnitude 0.5 to 2.
        *word = match dtype {
            DType::F16 => state & 0x83ff_83ff_83ff_83ff | 0x3800_3800_3800_3800,
            DType::Bf16 => state & 0x807f_807f_807f_807f | 0x3f00_3f00_3f00_3f00,
            DType::F32 => state & 0x807f_ffff_807f_ffff | 0x3f00_0000_3f00_0000,
        };
    }
}
