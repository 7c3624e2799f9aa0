//! Measures attention of one decode step over keys and values in memory: the engine's and candle's, on one core.
//!
//! `cargo bench -p stratakv-llama --bench attention_beside_candle -- [MiB of KV] [rounds] [--dtype=f16]`
//!
//! The defaults are 128 MiB, 5 rounds and all dtypes. Each round measures every way once, and prints a line of JSON
//! per way. `docs/measurements/attention_peers.py` runs this program beside PyTorch and ggml.
//!
//! The shape is that of LLaMA-3-8B: 8 KV heads, 32 query heads, head dimension 128. The engine attends to groups of 8
//! tokens in place, in order or scattered. candle gets contiguous keys and values, `[KV heads, tokens, 128]`, whose
//! gathering is not measured. Pin the process to one core.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;
use candle_core::{D, Device, Tensor};
use half::{bf16, f16};
use stratakv::DType;
use stratakv::attention::{AttentionShape, HeadMask, KvBlock, Partial, Query, Workspace};

const KV_HEADS: usize = 8;
const Q_HEADS: usize = 32;
const DIM: usize = 128;
/// Tokens of a group.
const GROUP: usize = 8;
/// Bytes of keys and values that one partial result covers, as in the read path.
const CHUNK: usize = 256 << 10;

fn main() -> Result<()> {
    // Cargo passes `--bench`.
    let (options, args): (Vec<_>, Vec<_>) = std::env::args().skip(1).partition(|arg| arg.starts_with("--"));
    let wanted = options.iter().find_map(|option| option.strip_prefix("--dtype="));
    let number = |i: usize, default| args.get(i).and_then(|a| a.parse().ok()).filter(|n| *n > 0).unwrap_or(default);
    let (mib, rounds) = (number(0, 128), number(1, 5));
    let query: Vec<f32> = (0..Q_HEADS * DIM).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let dtypes = [DType::F16, DType::Bf16, DType::F32].into_iter();
    for dtype in dtypes.filter(|dtype| wanted.is_none_or(|wanted| wanted == dtype.name())) {
        let engine = Engine::new(dtype, mib << 20, &query)?;
        let candle = Candle::new(dtype, mib << 20, &query)?;
        for _ in 0..rounds {
            for order in [&engine.in_order, &engine.scattered] {
                let name = if order.is_sorted() { "engine, in order" } else { "engine, scattered" };
                report(name, dtype, engine.bytes.len(), || engine.attend(order))?;
            }
            report("candle", dtype, engine.bytes.len(), || candle.attend())?;
        }
    }
    Ok(())
}

/// Measures one way once. A way that fails has no bandwidth.
fn report(name: &str, dtype: DType, bytes: usize, attend: impl Fn() -> Result<f32>) -> Result<()> {
    let start = Instant::now();
    let outcome = black_box(attend());
    let gb_per_s = bytes as f64 / 1e9 / start.elapsed().as_secs_f64();
    let line = match outcome {
        Ok(_) => serde_json::json!({"way": name, "dtype": dtype.name(), "gb_per_s": gb_per_s}),
        Err(error) => serde_json::json!({"way": name, "dtype": dtype.name(), "failed": error.to_string()}),
    };
    println!("{line}");
    Ok(())
}

/// The engine's attention, over groups of `[K plane, V plane]`.
struct Engine {
    shape: AttentionShape,
    query: Query,
    bytes: Vec<u8>,
    in_order: Vec<usize>,
    scattered: Vec<usize>,
}

impl Engine {
    fn new(dtype: DType, bytes: usize, query: &[f32]) -> Result<Self> {
        let shape = AttentionShape::new(Q_HEADS, KV_HEADS, DIM, DIM, dtype)?;
        let group = shape.k_plane_bytes(GROUP) + shape.v_plane_bytes(GROUP);
        let in_order: Vec<usize> = (0..bytes / group).collect();
        let mut scattered = in_order.clone();
        fastrand::Rng::with_seed(1).shuffle(&mut scattered);
        let bytes = match dtype {
            DType::F16 => elements(bytes / 2).flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
            DType::Bf16 => elements(bytes / 2).flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
            DType::F32 => elements(bytes / 4).flat_map(f32::to_le_bytes).collect(),
        };
        Ok(Self { query: Query::new(&shape, query)?, shape, bytes, in_order, scattered })
    }

    fn attend(&self, order: &[usize]) -> Result<f32> {
        let (k_bytes, v_bytes) = (self.shape.k_plane_bytes(GROUP), self.shape.v_plane_bytes(GROUP));
        let block = |&at: &usize| {
            let (k, v) = self.bytes[at * (k_bytes + v_bytes)..][..k_bytes + v_bytes].split_at(k_bytes);
            let heads = HeadMask::all(KV_HEADS);
            KvBlock { k, v, group_tokens: GROUP, tokens: GROUP, heads, positions: None, one_head: false }
        };
        let blocks: Vec<_> = order.iter().map(block).collect();
        let (mut total, mut part) = (Partial::new(&self.shape), Partial::new(&self.shape));
        let mut workspace = Workspace::new();
        for chunk in blocks.chunks((CHUNK / (k_bytes + v_bytes)).max(1)) {
            part.reset();
            part.add_all(&self.query, chunk, &mut workspace)?;
            total.merge(&part)?;
        }
        let mut out = [0.0; Q_HEADS * DIM];
        total.finish(&mut out)?;
        Ok(out[0])
    }
}

/// candle's attention: two batched matrix products and a softmax. The four query heads of a KV head are the rows.
struct Candle {
    query: Tensor,
    keys: Tensor,
    values: Tensor,
}

impl Candle {
    fn new(dtype: DType, bytes: usize, query: &[f32]) -> Result<Self> {
        let dtype = match dtype {
            DType::F16 => candle_core::DType::F16,
            DType::Bf16 => candle_core::DType::BF16,
            DType::F32 => candle_core::DType::F32,
        };
        let tokens = bytes / (2 * KV_HEADS * DIM * dtype.size_in_bytes());
        let plane = || {
            let plane: Vec<f32> = elements(KV_HEADS * tokens * DIM).collect();
            Tensor::from_vec(plane, (KV_HEADS, tokens, DIM), &Device::Cpu)?.to_dtype(dtype)
        };
        let scaled: Vec<f32> = query.iter().map(|x| x / (DIM as f32).sqrt()).collect();
        let query = Tensor::from_vec(scaled, (KV_HEADS, Q_HEADS / KV_HEADS, DIM), &Device::Cpu)?.to_dtype(dtype)?;
        Ok(Self { query, keys: plane()?, values: plane()? })
    }

    fn attend(&self) -> Result<f32> {
        let scores = self.query.matmul(&self.keys.t()?)?.to_dtype(candle_core::DType::F32)?;
        let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
        let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        let out = weights.to_dtype(self.values.dtype())?.matmul(&self.values)?;
        Ok(out.to_dtype(candle_core::DType::F32)?.flatten_all()?.get(0)?.to_scalar()?)
    }
}

/// Returns elements of magnitudes from 0.5 to 2.
fn elements(count: usize) -> impl Iterator<Item = f32> {
    let mut random = fastrand::Rng::with_seed(1);
    (0..count).map(move |_| (0.5 + 1.5 * random.f32()) * if random.bool() { 1.0 } else { -1.0 })
}
