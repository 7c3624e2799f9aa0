//! Compares SPEC.md with the types and constants of the crate.
//!
//! It covers every structure with the offset, size and type of each field, every byte grid, code, limit and magic, and
//! the worked examples. It also refuses table cells whose first identifier lost its upper-case letter.

mod spec;

use spec::structs::{FieldRow, in_code};
use spec::{SPEC, grids, lower_cased_identifiers, number, table, tables};
use std::collections::BTreeSet;
use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity};
use stratakv_format::codec::{self, PlaneCodec, PlaneShape};
use stratakv_format::layout::{self, LayerGeometry, Layout};
use stratakv_format::manifest::{self as m, Kind};
use stratakv_format::{DType, SequenceId, export, features as f, frame, ids, page, pool, rope, segment, superblock};

/// Returns every difference between the structure tables of `spec` and the code.
fn struct_differences(spec: &str) -> Vec<String> {
    let mut differences = Vec::new();
    let mut code = in_code();
    for table in tables(spec) {
        let Some((name, size)) = structure(&table.heading) else { continue };
        let Some((code_size, code_rows)) = code.remove(name) else {
            differences.push(format!("{name}: not in the code, or twice in SPEC.md"));
            continue;
        };
        if size != code_size {
            differences.push(format!("{name}: {size} bytes, but {code_size} in the code"));
        }
        let rows: Vec<FieldRow> = table.rows.iter().map(|cells| field_row(cells)).collect();
        if rows != code_rows {
            differences.push(format!("{name}: {rows:?}, but {code_rows:?} in the code"));
        }
        let mut end = 0;
        for row in &rows {
            if row.offset != end {
                differences.push(format!("{name}.{}: a gap or overlap at {end}", row.field));
            }
            end = row.offset + row.size;
        }
        if end != size {
            differences.push(format!("{name}: the fields end at {end} of {size}"));
        }
    }
    differences.extend(code.keys().map(|name| format!("{name}: no table in SPEC.md")));
    differences
}

/// Returns name and size of the structure in a heading `struct NAME (N bytes)`.
fn structure(heading: &str) -> Option<(&str, usize)> {
    let (name, size) = heading.strip_prefix("struct ")?.split_once(" (").expect("a size");
    Some((name, size.strip_suffix(" bytes)").expect("bytes").parse().expect("a number")))
}

fn field_row(cells: &[String]) -> FieldRow {
    FieldRow {
        offset: cells[0].parse().expect("an offset"),
        size: cells[1].parse().expect("a size"),
        field: cells[2].clone(),
        ty: cells[3].clone(),
    }
}

#[test]
fn every_structure_has_a_table_that_matches() {
    assert_eq!(struct_differences(SPEC), Vec::<String>::new());
}

#[test]
fn struct_differences_reports_a_changed_table() {
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

/// Returns every difference between the byte grids of `spec` and the code.
fn grid_differences(spec: &str) -> Vec<String> {
    let code = in_code();
    let mut differences = Vec::new();
    for grid in grids(spec) {
        let Some((size, rows)) = code.get(&grid.name) else {
            differences.push(format!("{}: not in the code", grid.name));
            continue;
        };
        let fields: Vec<(usize, String)> = rows.iter().map(|row| (row.offset, row.field.clone())).collect();
        if (grid.size, &grid.fields) != (*size, &fields) {
            differences.push(format!("{}: {} bytes {:?}, but {size} {fields:?}", grid.name, grid.size, grid.fields));
        }
    }
    differences
}

#[test]
fn byte_grids_show_the_fields_at_their_offsets() {
    assert_eq!(grid_differences(SPEC), Vec::<String>::new());
    let names: Vec<String> = grids(SPEC).into_iter().map(|grid| grid.name).collect();
    assert_eq!(names, ["BatchHeader", "RecordHeader", "SegmentPage", "FrameHeader"]);
}

#[test]
fn grid_differences_reports_a_changed_grid() {
    let row = "| header_pages                                  | total_pages ";
    assert!(SPEC.contains(row));
    let swapped = SPEC.replacen(row, "| total_pages                                   | header_pages", 1);
    assert_eq!(grid_differences(&swapped).len(), 1);
}

#[test]
fn table_cells_hold_no_lower_cased_identifier() {
    assert_eq!(lower_cased_identifiers(SPEC), Vec::<String>::new());
}

#[test]
fn lower_cased_identifiers_finds_every_kind_of_them() {
    let wrong =
        ["fLAG_CHECKPOINT, FLAG_MORE", "sTATE_OPEN or STATE_CLOSED", "cRC of its header", "kV heads", "`dType`"];
    for cell in wrong {
        let row = format!("| 52 | 2 | flags | u16 | {cell} |");
        assert_eq!(lower_cased_identifiers(&row), [cell]);
    }
    let right =
        "| 8 | 2 | first_token | u64 | FLAG_MORE, CRC-32, KV heads, DType, bf16, llama3, 1 MiB, 2^48, theta^(-2 i) |";
    assert!(lower_cased_identifiers(right).is_empty());
}

/// Returns code and name of each row of a table of codes.
fn codes(heading: &str) -> Vec<(u64, String)> {
    table(heading).iter().map(|row| (number(&row[0]), row[1].clone())).collect()
}

/// Lists value and name of constants.
macro_rules! names {
    ($($module:ident::$name:ident),* $(,)?) => {
        vec![$((u64::from($module::$name), stringify!($name).to_string())),*]
    };
}

type CodeTable = (&'static str, Vec<(u64, String)>);

/// Returns the tables of codes of the superblock, the manifest and layouts, as the constants of the crate have them.
fn codes_of_store_and_layout() -> Vec<CodeTable> {
    vec![
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
        ("codes frame flags", names![m::FLAG_DERIVED]),
        ("codes Member", names![m::MEMBER_ACTIVE, m::MEMBER_DRAINING, m::MEMBER_LOST, m::MEMBER_REMOVED]),
        ("codes layer kind", names![layout::LAYER_NONE, layout::LAYER_FULL, layout::LAYER_SLIDING]),
        ("codes pairing", names![rope::PAIRING_HALVES, rope::PAIRING_INTERLEAVED]),
        ("codes scaling", names![rope::SCALING_NONE, rope::SCALING_LINEAR, rope::SCALING_LLAMA3]),
        ("codes codec", names![codec::CODEC_RAW, codec::CODEC_INT8, codec::CODEC_INT4]),
    ]
}

/// Returns the tables of codes of segments, frames and exported sequences, as the constants of the crate have them.
fn codes_of_segment_frame_and_export() -> Vec<CodeTable> {
    vec![
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
                frame::KIND_ADAPTER,
                frame::KIND_POOL
            ],
        ),
        ("codes directory part", names![pool::PART_CLUSTERS, pool::PART_POSITIONS, pool::PART_STATE]),
        (
            "codes representative",
            names![pool::REPRESENTATIVE_NONE, pool::REPRESENTATIVE_CENTROIDS, pool::REPRESENTATIVE_MEDOIDS],
        ),
        ("codes direction", names![pool::DIRECTION_RISING, pool::DIRECTION_FALLING]),
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
    ]
}

/// Returns the tables of codes of enumerations: every code from 0 to 65535 that the crate knows, and no other.
fn codes_of_enumerations() -> Vec<CodeTable> {
    let kinds = (0..=u16::MAX).filter_map(|code| Some((u64::from(code), format!("{:?}", Kind::from_code(code)?))));
    let dtypes = (0..=u8::MAX).filter_map(|code| Some((u64::from(code), format!("{:?}", DType::from_code(code)?))));
    let checksums =
        (0..=u8::MAX).filter_map(|code| Some((u64::from(code), format!("{:?}", PayloadChecksum::from_code(code)?))));
    vec![
        ("codes Kind", kinds.collect()),
        ("codes DType", dtypes.collect()),
        ("codes PayloadChecksum", checksums.collect()),
    ]
}

#[test]
fn codes_match_the_code() {
    let expected = [codes_of_store_and_layout(), codes_of_segment_frame_and_export(), codes_of_enumerations()].concat();
    for (heading, expected) in &expected {
        assert_eq!(&codes(heading), expected, "{heading}");
    }
    let known: BTreeSet<&str> = expected.iter().map(|(heading, _)| *heading).collect();
    for table in tables(SPEC).iter().filter(|table| table.heading.starts_with("codes ")) {
        assert!(known.contains(&*table.heading), "no test covers {}", table.heading);
    }
}

#[test]
fn flags_and_offsets_in_the_prose_match_the_code() {
    assert_eq!(
        (m::FLAG_IGNORABLE, layout::FLAG_PADDED_PLANES, layout::FLAG_ROPE, layout::FLAG_CODECS, frame::SUMMARY_MIN_MAX),
        (1, 1, 2, 4, 1)
    );
    assert_eq!(page::PAGE_CRC_OFFSET, 508);
}

#[test]
fn the_title_names_the_version_of_the_code() {
    let title = format!("# The stratakv disk format, version {}.{}\n", f::VERSION_MAJOR, f::VERSION_MINOR);
    assert!(SPEC.starts_with(&title), "{title}");
    assert_eq!((f::VERSION_MAJOR, f::VERSION_MINOR), (0, 1));
}

#[test]
fn limits_match_the_code() {
    let found: Vec<(String, u64)> = table("limits").iter().map(|row| (row[0].clone(), number(&row[1]))).collect();
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
        ("LAYOUT_BYTES_MAX", layout::LAYOUT_BYTES_MAX as u64),
        ("KV_HEADS_MAX", u64::from(layout::KV_HEADS_MAX)),
        ("HEAD_DIM_MAX", u64::from(layout::HEAD_DIM_MAX)),
        ("GROUP_TOKENS_MAX", u64::from(layout::GROUP_TOKENS_MAX)),
        ("ROPES_MAX", rope::ROPES_MAX as u64),
        ("BLOCK_BYTES_MAX", layout::BLOCK_BYTES_MAX as u64),
        ("SUMMARY_RECORD_BYTES_MAX", u64::from(frame::SUMMARY_RECORD_BYTES_MAX)),
        ("PAGE_ENTRIES_MAX", pool::PAGE_ENTRIES_MAX as u64),
        ("CLUSTER_PIECE_BYTES_MAX", u64::from(pool::CLUSTER_PIECE_BYTES_MAX)),
        ("METHOD_BYTES_MAX", pool::METHOD_BYTES_MAX as u64),
        ("STATE_BYTES_MAX", pool::STATE_BYTES_MAX),
        ("CLUSTERS_MAX", u64::from(pool::CLUSTERS_MAX)),
        ("MEMBERSHIPS_MAX", u64::from(pool::MEMBERSHIPS_MAX)),
        ("REPRESENTATIVES_MAX", u64::from(pool::REPRESENTATIVES_MAX)),
        ("SET_TOKENS_MAX", pool::SET_TOKENS_MAX),
        ("PIECE_BYTES_MAX", export::PIECE_BYTES_MAX as u64),
    ];
    assert_eq!(found, expected.map(|(name, value)| (name.to_string(), value)));
}

#[test]
fn magics_match_the_code() {
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
fn block_examples_match_the_code() {
    for row in table("examples blocks") {
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
fn page_examples_match_the_code() {
    for row in table("examples pages") {
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
        let heads = if n(4) == n(0) { pool::EntryHeads::All } else { pool::EntryHeads::One(0) };
        let page = pool::PageGeometry::new(&layer, dtype, heads);
        let entry_bytes = page.heads * (page.key_row + page.value_row);
        assert_eq!([page.heads, entry_bytes, page.entries, page.page_bytes], [n(4), n(5), n(6), n(7)], "{row:?}");
    }
}

#[test]
fn codec_examples_match_the_code() {
    for row in table("examples codecs") {
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
fn checksum_example_matches_the_code() {
    let data: Vec<u8> = (0..16).collect();
    let identity = |plane| {
        PlaneIdentity::new(0x1122_3344_5566_7788, SequenceId(7), frame::KIND_GROUPS, 3, 16, 4).with_plane(plane)
    };
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
