//! The contents of the golden store `v0.2/store-retrieval`.
//!
//! Sequence 1 holds an adapter of two layers in two frames. Sequence 2 holds two groups of two layers, with a section
//! of every summary kind above min/max.

use crate::builder::{
    self as b, ADAPTER_SEQUENCE, Extent, GoldenFile, GoldenFrame, RecordList, TOKEN_SEQUENCE, commit, create,
    descriptor, f16, lay_out, single_plane,
};
use stratakv_format::checksum::crc64;
use stratakv_format::features::Features;
use stratakv_format::frame;
use stratakv_format::layout::Layout;
use stratakv_format::manifest::{self as m, Kind};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Returns a layout with groups of four tokens: two layers of two KV heads of 8, and a layer without KV between them.
pub(crate) fn layout() -> Layout {
    b::layout_of(vec![b::layer(2, 8, 8), b::layer(0, 0, 0), b::layer(2, 8, 8)])
}

/// Returns numbers of 4 bytes: `words`, then `floats`.
fn numbers(words: &[u32], floats: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let words = words.iter().flat_map(|word| word.to_le_bytes());
    words.chain(floats.into_iter().flat_map(f32::to_le_bytes)).collect()
}

/// Returns the adapter of layer 0: a low-rank matrix `[16, 2]`.
fn low_rank() -> Vec<u8> {
    numbers(&[1, 16, 2], (0..32).map(|i| (i % 5) as f32 * 0.5 - 1.0))
}

/// Returns the adapter of layer 2: codes of three dimensions in two bytes.
fn codes() -> Vec<u8> {
    let mut bytes = numbers(&[2, 16, 3, 2], [0.25]);
    bytes.extend(numbers(&[], (0..16).map(|i| i as f32 * 0.125)));
    bytes.extend(numbers(&[], (0..48).map(|i| (i % 7) as f32 * 0.25 - 0.5)));
    bytes.extend(numbers(&[], (0..48).map(|i| (i % 3) as f32)));
    bytes.extend(numbers(&[2], [-1.0, 1.0]));
    bytes.extend(numbers(&[4], [-1.5, -0.5, 0.5, 1.5]));
    bytes.extend(numbers(&[2], [0.0, 3.0]));
    bytes.extend(numbers(&[2, 0, 1, 1, 2], []));
    bytes
}

pub(crate) fn adapter_record() -> m::AdapterDefined {
    let whole = [low_rank(), codes()].concat();
    m::AdapterDefined {
        sequence: U64::new(ADAPTER_SEQUENCE),
        checksum: U64::new(crc64(&whole)),
        bytes: U64::new(whole.len() as u64),
        version: U32::new(3),
        name_bytes: U16::new(6),
        reserved: U16::new(0),
    }
}

/// Returns bytes of the adapter of a layer, from its byte `first` on.
fn adapter_extent(layer: u16, first: u64, bytes: &[u8]) -> Extent {
    single_plane(descriptor(frame::KIND_ADAPTER, layer, first, bytes.len() as u32, 1), bytes.to_vec())
}

/// Returns the element of all keys of a group. The mean of the keys is therefore the key itself.
fn key(group: usize) -> f32 {
    [1.0, -0.5][group]
}

/// Returns the joint key `[16]` with these elements times a matrix `[16, columns]`.
fn times(matrix: &[u8], columns: usize, element: impl Fn(usize) -> f32) -> Vec<f32> {
    let at = |i: usize| f32::from_le_bytes(matrix[i * 4..i * 4 + 4].try_into().expect("four bytes"));
    (0..columns).map(|j| (0..16).map(|i| element(i) * at(i * columns + j)).sum()).collect()
}

/// Returns a summary record of layer 0: two numbers per token.
fn low_rank_record(group: usize) -> Vec<u8> {
    let token: Vec<u8> = times(&low_rank()[12..], 2, |_| key(group)).into_iter().flat_map(f16).collect();
    token.repeat(4)
}

/// Returns a summary record of layer 2: two bytes per token. The first has 1 and 2 bits, the second has 1 bit.
fn codes_record(group: usize) -> Vec<u8> {
    let bytes = codes();
    let y = times(&bytes[20 + 64..], 3, |i| key(group) - i as f32 * 0.125);
    let nearest = |levels: &[f32], y: f32| levels.windows(2).take_while(|w| y > (w[0] + w[1]) / 2.0).count() as u8;
    let [first, second, third] =
        [nearest(&[-1.0, 1.0], y[0]), nearest(&[-1.5, -0.5, 0.5, 1.5], y[1]), nearest(&[0.0, 3.0], y[2])];
    [first | second << 1, third].repeat(4)
}

/// Returns the mean key and the lowest cosine, which is 1 because every key is the mean.
fn landmark_record(group: usize) -> Vec<u8> {
    let mut record: Vec<u8> = (0..16).flat_map(|_| f16(key(group))).collect();
    record.extend(1.0_f32.to_le_bytes());
    record
}

/// Returns a byte of signs per head and token, then the lengths of the keys.
fn signs_record(group: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut x = [key(group); 8];
    for x in &mut x {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *x = if state >> 40 & 1 == 1 { -*x } else { *x };
    }
    // Element i of the transform is the sum over j of x[j]. x[j] is negated if i and j share an odd number of bits.
    let sum = |i: usize| -> f32 {
        x.iter().enumerate().map(|(j, x)| if (i & j).count_ones() % 2 == 1 { -x } else { *x }).sum()
    };
    let bits = (0..8).fold(0, |bits, i| bits | u8::from(sum(i) > 0.0) << i);
    let mut record = vec![bits; 8];
    (0..8).for_each(|_| record.extend(f16((8.0 * key(group) * key(group)).sqrt())));
    record
}

/// Returns the section of two groups of a layer.
fn section(kind: u16, layer: u16, parameter: u32, record: fn(usize) -> Vec<u8>) -> Extent {
    let has_adapter = frame::has_adapter(kind);
    let header = frame::SummaryHeader {
        version: U32::new(frame::SUMMARY_VERSION),
        parameter: U32::new(parameter),
        adapter: U64::new(if has_adapter { ADAPTER_SEQUENCE } else { 0 }),
        adapter_checksum: if has_adapter { adapter_record().checksum } else { U64::new(0) },
        reserved: U64::new(0),
    };
    let mut descriptor = descriptor(frame::KIND_SUMMARY, layer, 0, 8, 2);
    descriptor.summary = U16::new(kind);
    descriptor.record_bytes = U32::new(record(0).len() as u32);
    single_plane(descriptor, [header.as_bytes(), &record(0), &record(1)].concat())
}

/// Returns tokens of a layer outside groups.
pub(crate) fn tail(layer: u16, first_token: u64, tokens: u32) -> Extent {
    let elements = 16 * tokens as usize;
    let plane = |start: f32| -> Vec<u8> { (0..elements).flat_map(|i| f16(start + i as f32 / 32.0)).collect() };
    b::tail_of(layer, first_token, tokens, vec![plane(0.5), plane(-2.0)])
}

/// Returns two groups of a layer.
pub(crate) fn groups(layer: u16) -> Extent {
    let element = |group: usize, plane: usize, i: usize| match plane {
        0 => key(group),
        _ => i as f32 / 16.0 + group as f32,
    };
    b::two_groups(&layout(), layer, |group, plane| (0..64).flat_map(|i| f16(element(group, plane, i))).collect())
}

/// Returns two frames of the adapter, with the codes cut between them, and a frame of two groups with their sections.
pub(crate) fn frames() -> Vec<GoldenFrame> {
    let codes = codes();
    let first = vec![adapter_extent(0, 0, &low_rank()), adapter_extent(2, 0, &codes[..100])];
    let second = vec![adapter_extent(2, 100, &codes[100..])];
    let tokens = vec![
        section(frame::SUMMARY_LOW_RANK, 0, 2, low_rank_record),
        section(frame::SUMMARY_LANDMARKS, 0, 0, landmark_record),
        section(frame::SUMMARY_SIGNS, 0, 8, signs_record),
        section(frame::SUMMARY_CODES, 2, 2, codes_record),
        section(frame::SUMMARY_LANDMARKS, 2, 0, landmark_record),
        section(frame::SUMMARY_SIGNS, 2, 8, signs_record),
        groups(0),
        groups(2),
    ];
    vec![
        lay_out(&layout(), 1, ADAPTER_SEQUENCE, (0, 1), first),
        lay_out(&layout(), 2, ADAPTER_SEQUENCE, (0, 3), second),
        lay_out(&layout(), 3, TOKEN_SEQUENCE, (0, 5), tokens),
    ]
}

/// Returns the records of the checkpoint, which is the whole manifest.
fn checkpoint() -> RecordList {
    let frames = frames();
    let mut records = b::checkpoint_start(&layout(), &frames);
    records.put(Kind::SequenceCreate, &create(ADAPTER_SEQUENCE, b""), &[]);
    records.put(Kind::Adapter, &adapter_record(), b"golden");
    frames[..2].iter().for_each(|frame| records.put_reference(ADAPTER_SEQUENCE, frame));
    records.put(Kind::SequenceCommit, &commit(ADAPTER_SEQUENCE, 0), &[]);
    records.put(Kind::SequenceCreate, &create(TOKEN_SEQUENCE, b::KEY), b::KEY);
    records.put_reference(TOKEN_SEQUENCE, &frames[2]);
    records.put(Kind::SequenceCommit, &commit(TOKEN_SEQUENCE, 8), &[]);
    records
}

/// Returns every file of the store.
pub(crate) fn files() -> Vec<GoldenFile> {
    b::store_files(Features::current(), &frames(), checkpoint())
}
