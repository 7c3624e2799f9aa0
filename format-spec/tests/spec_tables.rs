//! Holds the tables of SPEC.md against the types and constants of the crate: every structure, field, offset, size and type,
//! every code, every limit, and the worked examples.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::{offset_of, size_of};
use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity};
use stratakv_format::codec::{self, PlaneShape};
use stratakv_format::ids::RawLocation;
use stratakv_format::layout::{self, LayerGeometry, Layout, RawCodecs, RawLayer, RawLayoutHeader};
use stratakv_format::manifest::{self as m, Kind};
use stratakv_format::rope::{self, RawRope};
use stratakv_format::{DType, SequenceId, export, features as f, frame, ids, page, segment, superblock};

const SPEC: &str = include_str!("../SPEC.md");

/// Name of a field type as SPEC.md writes it.
trait SpecType {
    fn name() -> String;
}

macro_rules! spec_type {
    ($($ty:ty = $name:literal),* $(,)?) => { $(impl SpecType for $ty { fn name() -> String { $name.into() } })* };
}

spec_type! {
    u8 = "u8",
    zerocopy::little_endian::U16 = "u16",
    zerocopy::little_endian::U32 = "u32",
    zerocopy::little_endian::U64 = "u64",
    RawLocation = "RawLocation",
    f::Features = "Features",
}

impl<const N: usize> SpecType for [u8; N] {
    fn name() -> String {
        format!("[u8; {N}]")
    }
}

fn type_of<S, T: SpecType>(_: impl Fn(&S) -> &T) -> (usize, String) {
    (size_of::<T>(), T::name())
}

#[derive(Debug, PartialEq, Eq)]
struct Row {
    offset: usize,
    size: usize,
    field: String,
    ty: String,
}

/// The structure's size and rows. The pattern without `..` refuses to compile when a field is missing from the list.
macro_rules! structs {
    ($($name:ident: $ty:path { $($field:ident),* $(,)? })*) => {{
        let mut all = BTreeMap::new();
        $({
            fn every_field_is_listed(value: $ty) {
                let $ty { $($field: _),* } = value;
            }
            let _ = every_field_is_listed;
            let rows = vec![$({
                let (size, ty) = type_of(|s: &$ty| &s.$field);
                Row { offset: offset_of!($ty, $field), size, field: stringify!($field).into(), ty }
            }),*];
            all.insert(stringify!($name).to_string(), (size_of::<$ty>(), rows));
        })*
        all
    }};
}

fn in_code() -> BTreeMap<String, (usize, Vec<Row>)> {
    structs! {
        Features: f::Features { major, minor, reserved, compat, ro_compat, incompat }
        Slot: superblock::Slot {
            magic, features, sequence, store_id, device_id, epoch, manifest_generation, manifest_nonce, synced_through,
            created_unix_s, segment_bytes, device_index, device_count, payload_checksum, state, manifest_copies, reserved,
        }
        ManifestPage: m::ManifestPage {
            magic, features, store_id, generation, nonce, previous_generation, first_batch, created_unix_s, device, copy,
            reserved,
        }
        BatchHeader: m::BatchHeader {
            magic, crc, sequence, synced_through, generation, epoch, pages, records_bytes, record_count, flags, reserved,
        }
        RecordHeader: m::RecordHeader { kind, flags, bytes }
        RawLocation: RawLocation { segment, page, pages, device, reserved }
        Member: m::Member { epoch, device_id, device, state, manifest_copies, weight, bytes_limit }
        LayoutDefined: m::LayoutDefined { layout, reserved }
        SequenceCreate: m::SequenceCreate {
            sequence, parent, parent_tokens, created_unix_ms, ttl_ms, layout, summaries, replicas, evictable, key_bytes,
            reserved,
        }
        Fork: m::Fork { sequence, parent, tokens, created_unix_ms, key_bytes, reserved }
        SequenceTruncate: m::SequenceTruncate { sequence, tokens }
        SequenceDelete: m::SequenceDelete { sequence }
        Frame: m::Frame {
            frame, origin, lsn, nonce, location, header_crc, header_pages, front_pages, reserved,
        }
        FrameRef: m::FrameRef { sequence, frame, token_end }
        FrameRelease: m::FrameRelease { sequence, frame }
        FrameMoved: m::FrameMoved { frame, location, header_crc, reserved }
        Replica: m::Replica { frame, generation, location, header_crc, reserved }
        SegmentOpen: m::SegmentOpen { generation, nonce, segment, pages, device, kind, reserved }
        SegmentSeal: m::SegmentSeal { segment, used_pages, device, reserved }
        SegmentFree: m::SegmentFree { generation, segment, device, removed, reserved }
        PoolAllocation: m::PoolAllocation { sequence, location, layer, kv_head, allocated, reserved }
        SequenceCommit: m::SequenceCommit { sequence, tokens, state_frame, token_ids, committed_unix_ms }
        Counters: m::Counters { next_frame, next_sequence, next_lsn, lifetime_bytes, next_layout, reserved }
        AdapterDefined: m::AdapterDefined { sequence, checksum, bytes, version, name_bytes, reserved }
        CheckpointEnd: m::CheckpointEnd { records }
        Superseded: m::Superseded { generation, nonce }
        RawLayoutHeader: RawLayoutHeader { bytes, layers, group_tokens, dtype, flags, ropes, reserved, fingerprint }
        RawLayer: RawLayer { kv_heads, key_dim, value_dim, kind, rope, window }
        RawCodecs: RawCodecs { keys, values }
        RawRope: RawRope { first, dims, pairing, scaling, reserved, theta, factor, low, high, original }
        SegmentPage: segment::SegmentPage {
            magic, features, store_id, generation, nonce, created_unix_s, segment, pages, device, kind, position, reserved,
        }
        FrameHeader: frame::FrameHeader {
            magic, crc, header_pages, total_pages, frame, lsn, location, store_id, segment_generation, nonce, sequence,
            parent, parent_tokens, created_unix_ms, layout, layout_bytes, key_bytes, descriptors, checksums, front_pages,
            summaries, reserved,
        }
        Descriptor: frame::Descriptor {
            kind, layer, codec, summary, first_token, tokens, pieces, offset, bytes, checksum_first, checksum_count,
            element, cipher, key, record_bytes,
        }
        SummaryHeader: frame::SummaryHeader { version, parameter, adapter, adapter_checksum, reserved }
        ExportPage: export::ExportPage {
            magic, features, store_id, sequence, nonce, tokens, token_ids, created_unix_ms, exported_unix_ms, ttl_ms,
            layout_bytes, key_bytes, state_bytes, summaries, has_state, evictable, reserved,
        }
        PieceHeader: export::PieceHeader {
            magic, crc, index, checksum, first, tokens, bytes, kind, layer, summary, element, reserved,
        }
        ExportEnd: export::ExportEnd { pieces, file_bytes }
        PlaneIdentity: PlaneIdentity { nonce, sequence, first_token, tokens, layer, kind, plane, reserved }
    }
}

/// The tables under headings `#### KIND NAME`: heading -> rows of cells, without the two lines of the table's head.
fn tables(spec: &str) -> Vec<(String, Vec<Vec<String>>)> {
    let mut tables = Vec::new();
    let mut lines = spec.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(heading) = line.strip_prefix("#### ") else { continue };
        let mut rows = Vec::new();
        while let Some(row) = lines.next_if(|l| l.starts_with('|')) {
            let cells = row.trim_matches('|').split('|').map(|cell| cell.trim().to_string());
            rows.push(cells.collect::<Vec<_>>());
        }
        assert!(rows.len() > 2, "no table under {heading}");
        assert!(rows[1].iter().all(|cell| cell == "---"), "no head under {heading}");
        rows.drain(..2);
        tables.push((heading.to_string(), rows));
    }
    tables
}

/// Every difference between the structure tables of `spec` and the code.
fn struct_differences(spec: &str) -> Vec<String> {
    let mut differences = Vec::new();
    let mut code = in_code();
    for (heading, rows) in tables(spec) {
        let Some(rest) = heading.strip_prefix("struct ") else { continue };
        let (name, size) = rest.split_once(" (").expect("a size");
        let size: usize = size.strip_suffix(" bytes)").expect("bytes").parse().expect("a number");
        let Some((code_size, code_rows)) = code.remove(name) else {
            differences.push(format!("{name}: not in the code, or twice in SPEC.md"));
            continue;
        };
        if size != code_size {
            differences.push(format!("{name}: {size} bytes, in the code {code_size}"));
        }
        let rows: Vec<Row> = rows
            .into_iter()
            .map(|cells| Row {
                offset: cells[0].parse().expect("an offset"),
                size: cells[1].parse().expect("a size"),
                field: cells[2].clone(),
                ty: cells[3].clone(),
            })
            .collect();
        if rows != code_rows {
            differences.push(format!("{name}: {rows:?}, in the code {code_rows:?}"));
        }
        let mut end = 0;
        for row in &rows {
            if row.offset != end {
                differences.push(format!("{name}.{}: a gap or overlap at {end}", row.field));
            }
            end = row.offset + row.size;
        }
        if end != size {
            differences.push(format!("{name}: fields end at {end} of {size}"));
        }
    }
    differences.extend(code.keys().map(|name| format!("{name}: no table in SPEC.md")));
    differences
}

#[test]
fn every_structure_has_its_table() {
    assert_eq!(struct_differences(SPEC), Vec::<String>::new());
}

#[test]
fn a_changed_table_is_noticed() {
    let row = "| 16 | 8 | token_end | u64 |";
    assert!(SPEC.contains(row));
    let changed = |with: &str| struct_differences(&SPEC.replacen(row, with, 1)).len();
    assert!(changed("| 15 | 8 | token_end | u64 |") > 0);
    assert!(changed("| 16 | 4 | token_end | u64 |") > 0);
    assert!(changed("| 16 | 8 | token_stop | u64 |") > 0);
    assert!(changed("| 16 | 8 | token_end | u32 |") > 0);
    assert!(changed("| 16 | 8 | token_end | u64 | x |\n| 24 | 8 | more | u64 |") > 0);
    assert!(struct_differences(&SPEC.replacen("#### struct FrameRef (24", "#### struct FrameRef (32", 1)).len() == 2);
    assert!(!struct_differences(&SPEC.replacen("#### struct FrameRef", "#### other", 1)).is_empty());
}

fn codes(heading: &str) -> Vec<(u64, String)> {
    let (_, rows) = tables(SPEC).into_iter().find(|(h, _)| h == heading).unwrap_or_else(|| panic!("no {heading}"));
    rows.iter().map(|row| (number(&row[0]), row[1].clone())).collect()
}

fn number(text: &str) -> u64 {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).expect("a number"),
        None => text.parse().expect("a number"),
    }
}

macro_rules! names {
    ($($module:ident::$name:ident),* $(,)?) => { vec![$((u64::from($module::$name), stringify!($name).to_string())),*] };
}

#[test]
fn codes_are_those_of_the_code() {
    let expected: Vec<(&str, Vec<(u64, String)>)> = vec![
        (
            "codes incompat",
            names![
                f::INCOMPAT_EXPERIMENTAL,
                f::INCOMPAT_POOLS,
                f::INCOMPAT_CODECS,
                f::INCOMPAT_REPLICAS,
                f::INCOMPAT_KEYED,
                f::INCOMPAT_ENCRYPTION
            ],
        ),
        ("codes state", names![superblock::STATE_OPEN, superblock::STATE_CLOSED]),
        ("codes batch flags", names![m::FLAG_CHECKPOINT, m::FLAG_MORE]),
        ("codes Member", names![m::MEMBER_ACTIVE, m::MEMBER_DRAINING, m::MEMBER_LOST, m::MEMBER_REMOVED]),
        ("codes layer kind", names![layout::LAYER_NONE, layout::LAYER_FULL, layout::LAYER_SLIDING]),
        ("codes pairing", names![rope::PAIRING_HALVES, rope::PAIRING_INTERLEAVED]),
        ("codes scaling", names![rope::SCALING_NONE, rope::SCALING_LINEAR, rope::SCALING_LLAMA3]),
        ("codes codec", names![codec::CODEC_RAW, codec::CODEC_INT8, codec::CODEC_INT4]),
        ("codes segment kind", names![segment::KIND_LOG, segment::KIND_POOL]),
        ("codes segment position", names![segment::POSITION_HEADER, segment::POSITION_TRAILER]),
        (
            "codes descriptor kind",
            names![
                frame::KIND_GROUPS,
                frame::KIND_SUMMARY,
                frame::KIND_TAIL,
                frame::KIND_TOKEN_IDS,
                frame::KIND_CALLER_STATE,
                frame::KIND_LOW_RANK_BASIS,
                frame::KIND_CLUSTER_DELTA,
                frame::KIND_CLUSTER_DIRECTORY,
                frame::KIND_REPLICA,
                frame::KIND_KEYED_OBJECT,
                frame::KIND_ADAPTER
            ],
        ),
        (
            "codes summary kind",
            names![
                frame::SUMMARY_MIN_MAX,
                frame::SUMMARY_LOW_RANK,
                frame::SUMMARY_CODES,
                frame::SUMMARY_LANDMARKS,
                frame::SUMMARY_SIGNS
            ],
        ),
        (
            "codes piece kind",
            names![
                export::PIECE_LAYOUT,
                export::PIECE_KEY,
                export::PIECE_STATE,
                export::PIECE_TOKEN_IDS,
                export::PIECE_GROUPS,
                export::PIECE_SUMMARY,
                export::PIECE_TAIL,
                export::PIECE_END
            ],
        ),
    ];
    for (heading, expected) in &expected {
        assert_eq!(&codes(heading), expected, "{heading}");
    }

    // Enumerations: every code from 0 to 65535 that the code knows, and no other.
    let kinds = (0..=u16::MAX).filter_map(|c| Some((u64::from(c), format!("{:?}", Kind::from_code(c)?))));
    assert_eq!(codes("codes Kind"), kinds.collect::<Vec<_>>());
    let dtypes = (0..=u8::MAX).filter_map(|c| Some((u64::from(c), format!("{:?}", DType::from_code(c)?))));
    assert_eq!(codes("codes DType"), dtypes.collect::<Vec<_>>());
    let sums = (0..=u8::MAX).filter_map(|c| Some((u64::from(c), format!("{:?}", PayloadChecksum::from_code(c)?))));
    assert_eq!(codes("codes PayloadChecksum"), sums.collect::<Vec<_>>());

    let known: BTreeSet<&str> = expected.iter().map(|(heading, _)| *heading).collect();
    for (heading, _) in tables(SPEC) {
        let others = ["codes Kind", "codes DType", "codes PayloadChecksum"];
        let held = known.contains(&*heading) || others.contains(&&*heading);
        assert!(held || !heading.starts_with("codes "), "no test holds {heading}");
    }
    assert_eq!(
        (m::FLAG_IGNORABLE, layout::FLAG_PADDED_PLANES, layout::FLAG_ROPE, layout::FLAG_CODECS, frame::SUMMARY_MIN_MAX),
        (1, 1, 2, 4, 1)
    );
    assert_eq!((f::VERSION_MAJOR, f::VERSION_MINOR, page::PAGE_CRC_OFFSET), (0, 1, 508));
}

#[test]
fn limits_are_those_of_the_code() {
    let (_, rows) = tables(SPEC).into_iter().find(|(h, _)| h == "limits").expect("limits");
    let found: Vec<(String, u64)> = rows.iter().map(|row| (row[0].clone(), number(&row[1]))).collect();
    let expected = [
        ("PAGE_BYTES", page::PAGE_BYTES as u64),
        ("SECTOR_BYTES", page::SECTOR_BYTES as u64),
        ("SLOTS", superblock::SLOTS as u64),
        ("DEVICES_MAX", u64::from(superblock::DEVICES_MAX)),
        ("SEGMENT_PAGES_MIN", superblock::SEGMENT_PAGES_MIN),
        ("SEGMENT_PAGES_MAX", superblock::SEGMENT_PAGES_MAX),
        ("BATCH_PAGES_MAX", u64::from(m::BATCH_PAGES_MAX)),
        ("RECORDS_BYTES_MAX", m::RECORDS_BYTES_MAX as u64),
        ("MANIFEST_BYTES_MAX", m::FILE_BYTES_MAX),
        ("REPLICAS_MAX", u64::from(m::REPLICAS_MAX)),
        ("KEY_BYTES_MAX", m::KEY_BYTES_MAX as u64),
        ("ADAPTER_NAME_BYTES_MAX", m::ADAPTER_NAME_BYTES_MAX as u64),
        ("ADAPTER_BYTES_MAX", m::ADAPTER_BYTES_MAX),
        ("HEADER_PAGES_MAX", u64::from(frame::HEADER_PAGES_MAX)),
        ("TOTAL_PAGES_MAX", u64::from(frame::TOTAL_PAGES_MAX)),
        ("DESCRIPTORS_MAX", u64::from(frame::DESCRIPTORS_MAX)),
        ("CALLER_STATE_BYTES_MAX", frame::CALLER_STATE_BYTES_MAX as u64),
        ("NUMBER_MAX", ids::NUMBER_MAX),
        ("INDEX_MAX", u64::from(ids::INDEX_MAX)),
        ("TOKENS_MAX", frame::TOKENS_MAX),
        ("LAYERS_MAX", layout::LAYERS_MAX as u64),
        ("KV_HEADS_MAX", u64::from(layout::KV_HEADS_MAX)),
        ("HEAD_DIM_MAX", u64::from(layout::HEAD_DIM_MAX)),
        ("GROUP_TOKENS_MAX", u64::from(layout::GROUP_TOKENS_MAX)),
        ("ROPES_MAX", rope::ROPES_MAX as u64),
        ("BLOCK_BYTES_MAX", layout::BLOCK_BYTES_MAX as u64),
        ("SUMMARY_RECORD_BYTES_MAX", u64::from(frame::SUMMARY_RECORD_BYTES_MAX)),
        ("PIECE_BYTES_MAX", export::PIECE_BYTES_MAX as u64),
    ];
    assert_eq!(found, expected.map(|(name, value)| (name.to_string(), value)));
}

#[test]
fn magics_are_those_of_the_code() {
    for magic in [
        &superblock::MAGIC[..],
        &m::MAGIC,
        &m::BATCH_MAGIC,
        &segment::MAGIC,
        &frame::MAGIC,
        &export::MAGIC,
        &export::PIECE_MAGIC,
    ] {
        let text = std::str::from_utf8(magic).expect("ASCII");
        assert!(SPEC.contains(&format!("`magic` is `{text}`")), "{text}");
    }
}

#[test]
fn block_examples_are_right() {
    let (_, rows) = tables(SPEC).into_iter().find(|(h, _)| h == "examples blocks").expect("examples");
    for row in rows {
        let n = |index: usize| number(&row[index]) as usize;
        let dtype = [DType::F32, DType::F16, DType::Bf16].into_iter().find(|d| d.name() == row[3]).expect("a dtype");
        let layer = LayerGeometry {
            kv_heads: n(0) as u16,
            key_dim: n(1) as u16,
            value_dim: n(2) as u16,
            window: None,
            rope: None,
            codecs: layout::RAW_PLANES,
        };
        let layout = Layout {
            dtype,
            group_tokens: n(4) as u16,
            padded_planes: row[5] == "yes",
            fingerprint: [0; 32],
            layers: vec![layer],
        };
        layout.check().expect("a valid layout");
        let block = layout.block(&layer);
        let found = [block.key_bytes, block.value_offset, block.value_bytes, block.block_bytes, block.blocks_per_page];
        assert_eq!(found, [n(6), n(7), n(8), n(9), n(10)], "{row:?}");
        assert_eq!((block.block_offset(5), block.extent_bytes(6)), (n(11), n(12)), "{row:?}");
    }
}

#[test]
fn codec_examples_are_right() {
    use stratakv_format::PlaneCodec;
    let (_, rows) = tables(SPEC).into_iter().find(|(h, _)| h == "examples codecs").expect("examples");
    for row in rows {
        let n = |index: usize| number(&row[index]) as usize;
        let dtype = [DType::F32, DType::F16, DType::Bf16].into_iter().find(|d| d.name() == row[4]).expect("a dtype");
        let plane = ["K", "V"].iter().position(|plane| *plane == row[0]).expect("a plane");
        let shape = PlaneShape { plane, heads: n(1), tokens: n(2), dims: n(3), dtype };
        for (codec, column) in [(PlaneCodec::Int8, 6), (PlaneCodec::Int4, 7)] {
            assert_eq!((shape.bytes(), codec.bytes(&shape)), (n(5), n(column)), "{row:?}");
            assert_eq!(codec.suits(&shape), row[column + 2] == "yes", "{row:?}");
        }
    }
}

#[test]
fn checksum_example_is_right() {
    let data: Vec<u8> = (0..16).collect();
    let identity =
        |plane| PlaneIdentity::new(0x1122_3344_5566_7788, SequenceId(7), frame::KIND_GROUPS, 3, 16, 4, plane);
    let hex: Vec<String> = zerocopy::IntoBytes::as_bytes(&identity(1)).iter().map(|b| format!("{b:02x}")).collect();
    for line in hex.chunks(20) {
        assert!(SPEC.contains(&line.join(" ")));
    }
    let expected = [
        (PayloadChecksum::Crc32, 1, 0x94aa_2c53_u64),
        (PayloadChecksum::Crc64Nvme, 1, 0xd101_97e3_d4e0_0d8e),
        (PayloadChecksum::Crc32, 0, 0x158f_4974),
        (PayloadChecksum::Crc64Nvme, 0, 0x30e1_2c7e_9137_a9c2),
    ];
    for (kind, plane, value) in expected {
        assert_eq!(kind.compute(&identity(plane), &data), value);
        assert!(SPEC.contains(&format!("{value:#018x}")));
    }
}
