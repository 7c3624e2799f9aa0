//! The attention executor compared with a naive softmax attention in f64, for every kernel that this CPU can run.
//!
//! - Property tests cover shapes, dtypes, masks, extreme scores and merged partial results.
//! - Bounds are relative to the largest |V| and to the magnitude of the scores.
//! - Inputs that are not finite are refused with their place.

use half::{bf16, f16};
use proptest::prelude::*;
use stratakv::attention::{AttentionShape, HeadMask, Kernel, KvBlock, Partial, Query, TokenMask, Workspace};
use stratakv::{DType, ErrorKind};

/// A small generator, because proptest would spend its shrinking on large tensors.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// Returns a number that is uniform in -1..1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

fn encode(x: f32, dtype: DType, to: &mut Vec<u8>) {
    match dtype {
        DType::F32 => to.extend(x.to_le_bytes()),
        DType::F16 => to.extend(f16::from_f32(x).to_le_bytes()),
        DType::Bf16 => to.extend(bf16::from_f32(x).to_le_bytes()),
    }
}

fn rounded(x: f32, dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(x),
        DType::F16 => f16::from_f32(x).to_f64(),
        DType::Bf16 => bf16::from_f32(x).to_f64(),
    }
}

/// A block with its tensors before rounding. Its bytes are not aligned.
struct Block {
    k: Vec<f32>,
    v: Vec<f32>,
    k_bytes: Vec<u8>,
    v_bytes: Vec<u8>,
    group_tokens: usize,
    tokens: usize,
    heads: HeadMask,
    positions: Option<TokenMask>,
}

impl Block {
    /// Makes a block. Slots beyond the valid tokens hold NaN, because they must never be used.
    fn new(shape: &AttentionShape, group_tokens: usize, tokens: usize, k_range: f32, random: &mut Random) -> Self {
        let plane = |dims: usize, range: f32, random: &mut Random| -> Vec<f32> {
            (0..shape.kv_heads() * group_tokens * dims)
                .map(|i| if i / dims % group_tokens < tokens { random.unit() * range } else { f32::NAN })
                .collect()
        };
        let mut block = Self {
            k: plane(shape.dk(), k_range, random),
            v: plane(shape.dv(), 3.0, random),
            k_bytes: Vec::new(),
            v_bytes: Vec::new(),
            group_tokens,
            tokens,
            heads: HeadMask::all(shape.kv_heads()),
            positions: None,
        };
        block.encode(shape.dtype());
        block
    }

    fn encode(&mut self, dtype: DType) {
        for (from, to) in [(&self.k, &mut self.k_bytes), (&self.v, &mut self.v_bytes)] {
            to.clear();
            to.push(0xff);
            from.iter().for_each(|x| encode(*x, dtype, to));
        }
    }

    fn kv_block(&self) -> KvBlock<'_> {
        KvBlock {
            k: &self.k_bytes[1..],
            v: &self.v_bytes[1..],
            group_tokens: self.group_tokens,
            tokens: self.tokens,
            heads: self.heads,
            positions: self.positions,
            one_head: false,
        }
    }
}

/// The result of a naive softmax attention in f64.
struct Naive {
    out: Vec<f64>,
    /// The largest |V|.
    max_v: f64,
    /// The largest scaled sum of |q k| over the dims of a token. The rounding error of f32 scores is proportional to
    /// it.
    magnitude: f64,
}

fn naive(shape: &AttentionShape, query: &[f32], blocks: &[Block], element: impl Fn(f32) -> f64) -> Naive {
    let (dk, dims, group) = (shape.dk(), shape.value_dims(), shape.group_heads());
    let mut all = Naive { out: vec![0.0; shape.output_len()], max_v: 0.0, magnitude: 0.0 };
    for head in 0..shape.q_heads() {
        let q = &query[head * dk..][..dk];
        let mut tokens: Vec<(f64, Vec<f64>)> = Vec::new();
        for block in blocks.iter().filter(|b| b.heads.contains(head / group)) {
            for t in (0..block.tokens).filter(|t| block.positions.is_none_or(|p| p.contains(*t))) {
                let row = head / group * block.group_tokens + t;
                let k = &block.k[row * dk..][..dk];
                let products = || q.iter().zip(k).map(|(q, k)| f64::from(*q) * element(*k) * f64::from(shape.scale()));
                all.magnitude = all.magnitude.max(products().map(f64::abs).sum());
                let v = if shape.dv() == 0 { &k[..dims] } else { &block.v[row * dims..][..dims] };
                tokens.push((products().sum(), v.iter().map(|v| element(*v)).collect()));
            }
        }
        let max = tokens.iter().fold(f64::NEG_INFINITY, |m, (s, _)| m.max(*s));
        let sum: f64 = tokens.iter().map(|(s, _)| (s - max).exp()).sum();
        for (score, v) in &tokens {
            for (out, v) in all.out[head * dims..].iter_mut().zip(v) {
                *out += (score - max).exp() / sum * v;
                all.max_v = all.max_v.max(v.abs());
            }
        }
    }
    all
}

fn attend(kernel: &'static Kernel, shape: &AttentionShape, query: &[f32], blocks: &[Block]) -> Vec<f32> {
    let query = Query::new(shape, query).unwrap();
    let mut partial = Partial::new(shape);
    let mut workspace = Workspace::with_kernel(kernel);
    let kv_blocks: Vec<KvBlock<'_>> = blocks.iter().map(Block::kv_block).collect();
    partial.add_all(&query, &kv_blocks, &mut workspace).unwrap();
    let mut out = vec![f32::NAN; shape.output_len()];
    partial.finish(&mut out).unwrap();
    out
}

/// Returns the largest difference relative to the largest |V|, or infinity if an output is not finite.
fn error(out: &[f32], naive: &Naive) -> f64 {
    if out.iter().any(|x| !x.is_finite()) {
        return f64::INFINITY;
    }
    let worst = out.iter().zip(&naive.out).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
    worst / naive.max_v.max(1e-30)
}

/// Returns the error bound. f32 scores have an error of a few 2^-24 of the sum of |q k|, which is a relative error of
/// the weights.
fn bound(stored: &Naive) -> f64 {
    1e-5 + 4.0 * 2f64.powi(-24) * stored.magnitude
}

fn query_for(shape: &AttentionShape, range: f32, random: &mut Random) -> Vec<f32> {
    (0..shape.query_len()).map(|_| random.unit() * range).collect()
}

const DIMS: [usize; 14] = [1, 2, 3, 7, 8, 15, 17, 24, 64, 80, 96, 128, 256, 576];

fn shapes() -> impl Strategy<Value = AttentionShape> {
    let dims = || prop::sample::select(&DIMS[..]);
    let dtype = prop::sample::select(vec![DType::F32, DType::F16, DType::Bf16]);
    let dv = prop_oneof![4 => dims(), 1 => Just(0)];
    (1usize..=8, 1usize..=8, dims(), dv, dtype, 0.0..1.0f64).prop_map(|(kv_heads, ratio, dk, dv, dtype, part)| {
        let shape = AttentionShape::new(kv_heads * ratio, kv_heads, dk, dv, dtype).unwrap();
        if dv > 0 { shape } else { shape.with_value_dims(1 + (part * dk as f64) as usize).unwrap() }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn equals_naive_attention(
        shape in shapes(),
        seed in any::<u64>(),
        group_tokens in 1usize..=20,
        n in 1usize..=5,
        masks in any::<bool>(),
        peaked in prop::bool::weighted(0.3),
    ) {
        let mut random = Random(seed);
        let range = if peaked { 12.0 } else { 1.5 };
        let query = query_for(&shape, range, &mut random);
        let blocks: Vec<Block> = (0..n)
            .map(|_| {
                let tokens = 1 + random.below(group_tokens);
                let mut block = Block::new(&shape, group_tokens, tokens, range, &mut random);
                if masks {
                    // The masks select some heads and positions, sometimes none.
                    let mut bits = || u128::from(random.next());
                    block.heads = HeadMask::from_bits(bits()).intersection(HeadMask::all(shape.kv_heads()));
                    block.positions = Some(TokenMask::from_bits(bits()).intersection(TokenMask::all(tokens)));
                }
                block
            })
            .collect();
        let stored = naive(&shape, &query, &blocks, |x| rounded(x, shape.dtype()));
        for kernel in Kernel::available() {
            let error = error(&attend(kernel, &shape, &query, &blocks), &stored);
            prop_assert!(error <= bound(&stored), "{kernel:?}: {error:e} of at most {:e}", bound(&stored));
        }
    }

    #[test]
    fn extreme_scores(
        shape in shapes(),
        seed in any::<u64>(),
        span in prop::sample::select(vec![1.0f32, 100.0, 1e4]),
        offset in prop::sample::select(vec![0.0f32, -1e4, 1e4]),
        kind in 0..3,
    ) {
        // Only the first dim of a key counts, with a factor of 16. The score is one product, exact in f32, so the plain
        // bound holds at any magnitude. Scores are spread, all equal, or one dominates.
        let shape = shape.with_scale(1.0).unwrap();
        let mut random = Random(seed);
        let mut query = vec![0.0; shape.query_len()];
        query.iter_mut().step_by(shape.dk()).for_each(|q| *q = 16.0);
        let blocks: Vec<Block> = (0..3)
            .map(|b| {
                let mut block = Block::new(&shape, 7, 7, 1.0, &mut random);
                for (row, k) in block.k.iter_mut().step_by(shape.dk()).enumerate() {
                    let above = match kind {
                        0 => span * random.unit(),
                        1 if b == 1 && row % 7 == 3 => span,
                        _ => 0.0,
                    };
                    *k = (offset + above) / 16.0;
                }
                block.encode(shape.dtype());
                block
            })
            .collect();
        let stored = naive(&shape, &query, &blocks, |x| rounded(x, shape.dtype()));
        for kernel in Kernel::available() {
            let error = error(&attend(kernel, &shape, &query, &blocks), &stored);
            prop_assert!(error <= 1e-5, "{kernel:?}: {error:e}");
        }
    }

    #[test]
    fn chunked_partials_merge_to_the_same(
        shape in shapes(),
        seed in any::<u64>(),
        cuts in prop::collection::vec(0usize..=24, 0..6),
    ) {
        let mut random = Random(seed);
        let query = query_for(&shape, 2.0, &mut random);
        let blocks: Vec<Block> =
            (0..24).map(|_| { let n = 1 + random.below(4); Block::new(&shape, 4, n, 2.0, &mut random) }).collect();
        let kv_blocks: Vec<KvBlock<'_>> = blocks.iter().map(Block::kv_block).collect();
        let mut cuts = cuts;
        cuts.extend([0, 24]);
        cuts.sort_unstable();
        let prepared = Query::new(&shape, &query).unwrap();

        let run = |backwards: bool, workspace: &mut Workspace| {
            let chunks: Vec<&[KvBlock<'_>]> = cuts.windows(2).map(|w| &kv_blocks[w[0]..w[1]]).collect();
            let mut parts = vec![Partial::new(&shape); chunks.len()];
            let mut order: Vec<usize> = (0..chunks.len()).collect();
            if backwards {
                order.reverse();
            }
            order.iter().for_each(|&i| parts[i].add_all(&prepared, chunks[i], workspace).unwrap());
            let mut total = Partial::new(&shape);
            parts.iter().for_each(|part| total.merge(part).unwrap());
            let mut out = vec![0.0; shape.output_len()];
            total.finish(&mut out).unwrap();
            out
        };
        let mut workspace = Workspace::new();
        let merged = run(false, &mut workspace);
        let stored = naive(&shape, &query, &blocks, |x| rounded(x, shape.dtype()));
        prop_assert!(error(&merged, &stored) <= bound(&stored));
        // The order of the chunks, a used workspace, and another thread change no bit.
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&run(true, &mut workspace)), bits(&merged));
        let elsewhere = std::thread::scope(|s| s.spawn(|| run(false, &mut Workspace::new())).join().unwrap());
        prop_assert_eq!(bits(&elsewhere), bits(&merged));
    }
}

#[test]
fn within_the_stated_error_of_unrounded_inputs() {
    // Scores have the range of a model. K and V are compared before rounding to the stored dtype.
    for (dtype, bound) in [(DType::F32, 1e-5), (DType::F16, 2e-3), (DType::Bf16, 1e-2)] {
        for (q_heads, kv_heads, dk, dv) in [(32, 8, 128, 128), (4, 4, 64, 64), (14, 2, 64, 64), (16, 1, 576, 0)] {
            let shape = AttentionShape::new(q_heads, kv_heads, dk, dv, dtype).unwrap();
            let mut random = Random(7);
            let query = query_for(&shape, 1.7, &mut random);
            let blocks: Vec<Block> = (0..64).map(|_| Block::new(&shape, 8, 8, 1.7, &mut random)).collect();
            let exact = naive(&shape, &query, &blocks, f64::from);
            for kernel in Kernel::available() {
                let error = error(&attend(kernel, &shape, &query, &blocks), &exact);
                assert!(error <= bound, "{kernel:?} {shape:?}: {error:e}");
            }
        }
    }
}

#[test]
fn one_token_is_its_value() {
    for kernel in Kernel::available() {
        let shape = AttentionShape::new(6, 2, 5, 3, DType::F32).unwrap();
        let mut random = Random(3);
        let block = Block::new(&shape, 4, 1, 100.0, &mut random);
        let query = query_for(&shape, 100.0, &mut random);
        let out = attend(kernel, &shape, &query, std::slice::from_ref(&block));
        for head in 0..6 {
            let row = head / 3 * 4 * 3;
            assert_eq!(out[head * 3..][..3], block.v[row..row + 3]);
        }
    }
}

#[test]
fn empty_selections_give_zeros() {
    let shape = AttentionShape::new(4, 2, 8, 8, DType::F16).unwrap();
    let block = Block::new(&shape, 4, 3, 1.0, &mut Random(1));
    let query = Query::new(&shape, &[1.0; 32]).unwrap();
    let mut workspace = Workspace::new();
    let mut partial = Partial::new(&shape);
    let mut out = [f32::NAN; 32];
    partial.finish(&mut out).unwrap();
    assert_eq!(out, [0.0; 32]);
    partial.add_all(&query, &[], &mut workspace).unwrap();
    partial.add(&query, &KvBlock { heads: HeadMask::EMPTY, ..block.kv_block() }, &mut workspace).unwrap();
    partial.add(&query, &KvBlock { positions: Some(TokenMask::EMPTY), ..block.kv_block() }, &mut workspace).unwrap();
    partial.add(&query, &KvBlock { tokens: 0, ..block.kv_block() }, &mut workspace).unwrap();
    partial.merge(&Partial::new(&shape)).unwrap();
    assert!((0..5).all(|head| !partial.has_tokens(head)));
    partial.add(&query, &KvBlock { heads: HeadMask::one(1), ..block.kv_block() }, &mut workspace).unwrap();
    partial.finish(&mut out).unwrap();
    assert_eq!(out[..16], [0.0; 16]);
    assert!(out[16..].iter().any(|x| *x != 0.0));
    assert_eq!([0, 1, 2, 3, 4].map(|head| partial.has_tokens(head)), [false, false, true, true, false]);
    partial.reset();
    partial.finish(&mut out).unwrap();
    assert_eq!(out, [0.0; 32]);
}

fn assert_invalid<T: std::fmt::Debug>(result: stratakv::Result<T>, words: &[&str]) {
    let error = result.expect_err("must be refused");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let text = error.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{text:?} lacks one of {words:?}");
}

#[test]
fn bad_numbers_are_refused_by_place() {
    let shape = AttentionShape::new(4, 2, 24, 8, DType::F32).unwrap();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut query = vec![0.5; shape.query_len()];
        query[2 * 24 + 23] = bad;
        assert_invalid(Query::new(&shape, &query), &["head 2", "index 23"]);
    }
    let large = shape.with_scale(1e30).unwrap();
    assert_invalid(Query::new(&large, &[1e30; 96]), &["head 0", "index 0"]);

    let good = Block::new(&shape, 8, 8, 1.0, &mut Random(5));
    let query = Query::new(&shape, &[9.0; 96]).unwrap();
    let other = Query::new(&shape.with_scale(4.0).unwrap(), &[1.0; 96]).unwrap();
    for kernel in Kernel::available() {
        let mut workspace = Workspace::with_kernel(kernel);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38] {
            // Token 5 of KV head 1 (query heads 2 and 3) is NaN, infinite, or finite with a product that overflows.
            let mut block = Block::new(&shape, 8, 8, 1.0, &mut Random(5));
            let row = (8 + 5) * 24;
            block.k[row + 20..row + 23].fill(bad);
            block.encode(shape.dtype());
            let mut partial = Partial::new(&shape);
            partial.add(&query, &good.kv_block(), &mut workspace).unwrap();
            let mut before = [0.0; 32];
            partial.finish(&mut before).unwrap();
            assert_invalid(partial.add(&other, &block.kv_block(), &mut workspace), &["shape"]);
            assert_invalid(partial.add(&query, &block.kv_block(), &mut workspace), &["query head 2", "token 5"]);
            let mut after = [0.0; 32];
            partial.finish(&mut after).unwrap();
            assert_eq!(before, after, "a refused block must leave nothing");
            let words = ["block 1", "query head 2", "token 5"];
            assert_invalid(partial.add_all(&query, &[good.kv_block(), block.kv_block()], &mut workspace), &words);
            // The block is accepted without that head or that token.
            partial.add(&query, &KvBlock { heads: HeadMask::one(0), ..block.kv_block() }, &mut workspace).unwrap();
            let positions = Some(TokenMask::all(8).difference(TokenMask::one(5)));
            partial.add(&query, &KvBlock { positions, ..block.kv_block() }, &mut workspace).unwrap();
            partial.finish(&mut after).unwrap();
        }
        for bad in [f32::NAN, f32::INFINITY] {
            let mut block = Block::new(&shape, 8, 8, 1.0, &mut Random(5));
            block.v[(8 + 5) * 8 + 3] = bad;
            block.encode(shape.dtype());
            let mut partial = Partial::new(&shape);
            partial.add(&query, &block.kv_block(), &mut workspace).unwrap();
            assert_invalid(partial.finish(&mut [0.0; 32]), &["query head 2", "index 3"]);
        }
    }
}

#[test]
fn scores_at_the_ends_of_the_range() {
    // The difference of scores near +f32::MAX and -f32::MAX is infinite, so the weights are 1 and 0.
    let shape = AttentionShape::new(1, 1, 1, 1, DType::F32).unwrap().with_scale(1.0).unwrap();
    let query = Query::new(&shape, &[1.0]).unwrap();
    for kernel in Kernel::available() {
        let mut workspace = Workspace::with_kernel(kernel);
        let mut partial = Partial::new(&shape);
        for (k, v, expected) in [(-f32::MAX, 7.0f32, 7.0), (f32::MAX, 3.0, 3.0), (-f32::MAX, 9.0, 3.0)] {
            let (k, v) = (k.to_le_bytes(), v.to_le_bytes());
            let kv_block = KvBlock {
                k: &k,
                v: &v,
                group_tokens: 1,
                tokens: 1,
                heads: HeadMask::all(1),
                positions: None,
                one_head: false,
            };
            partial.add(&query, &kv_block, &mut workspace).unwrap();
            let mut out = [0.0];
            partial.finish(&mut out).unwrap();
            assert_eq!(out, [expected]);
            let mut merged = Partial::new(&shape);
            merged.merge(&partial).unwrap();
            merged.merge(&partial).unwrap();
            merged.finish(&mut out).unwrap();
            assert_eq!(out, [expected]);
        }
    }
}

#[test]
fn bad_shapes_and_blocks_are_refused() {
    let new = |q, kv, dk, dv| AttentionShape::new(q, kv, dk, dv, DType::F16);
    for (q, kv, dk, dv) in [(0, 1, 8, 8), (4, 0, 8, 8), (4, 3, 8, 8), (129, 129, 8, 8), (2048, 1, 8, 8)] {
        assert_invalid(new(q, kv, dk, dv), &["heads"]);
    }
    for (dk, dv) in [(0, 8), (1025, 8), (8, 1025)] {
        assert_invalid(new(4, 4, dk, dv), &["dk"]);
    }
    let shape = new(4, 2, 8, 4).unwrap();
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_invalid(shape.with_scale(scale), &["scale"]);
    }
    assert_invalid(shape.with_value_dims(3), &["value dims"]);
    assert_invalid(new(4, 2, 8, 0).unwrap().with_value_dims(9), &["value dims"]);
    assert_invalid(new(4, 2, 8, 0).unwrap().with_value_dims(0), &["value dims"]);
    assert_invalid(Query::new(&shape, &[0.0; 31]), &["31"]);

    let block = Block::new(&shape, 4, 4, 1.0, &mut Random(2));
    let query = Query::new(&shape, &[1.0; 32]).unwrap();
    let good = block.kv_block();
    let bad = [
        KvBlock { k: &good.k[1..], ..good },
        KvBlock { v: &good.v[1..], ..good },
        KvBlock { group_tokens: 0, tokens: 0, ..good },
        KvBlock { group_tokens: 129, ..good },
        KvBlock { group_tokens: usize::MAX, tokens: usize::MAX, ..good },
        KvBlock { tokens: 5, ..good },
        KvBlock { heads: HeadMask::all(3), ..good },
        KvBlock { heads: HeadMask::one(127), ..good },
        KvBlock { positions: Some(TokenMask::one(4)), ..good },
    ];
    let mut workspace = Workspace::new();
    let mut partial = Partial::new(&shape);
    for kv_block in bad {
        assert_invalid(partial.add(&query, &kv_block, &mut workspace), &["block"]);
        assert_invalid(partial.add_all(&query, &[good, kv_block], &mut workspace), &["block 1"]);
    }
    assert_invalid(partial.finish(&mut [0.0; 15]), &["15"]);
    assert_invalid(partial.merge(&Partial::new(&shape.with_scale(2.0).unwrap())), &["shape"]);
}
