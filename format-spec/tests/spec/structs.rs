//! The on-disk structures of the crate as rows of a table, for comparison with SPEC.md.

use std::collections::BTreeMap;
use std::mem::{offset_of, size_of};
use stratakv_format::checksum::PlaneIdentity;
use stratakv_format::ids::RawLocation;
use stratakv_format::layout::{RawCodecs, RawLayer, RawLayoutHeader};
use stratakv_format::manifest as m;
use stratakv_format::rope::RawRope;
use stratakv_format::{export, features as f, frame, pool, segment, superblock};

/// A type that a field may have.
trait SpecType {
    /// Returns the name that SPEC.md uses.
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

/// A field of a structure.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FieldRow {
    pub(crate) offset: usize,
    pub(crate) size: usize,
    pub(crate) field: String,
    pub(crate) ty: String,
}

/// Lists size and fields of each structure. The pattern has no `..`, so that a field missing from the list does not
/// compile.
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
                FieldRow { offset: offset_of!($ty, $field), size, field: stringify!($field).into(), ty }
            }),*];
            all.insert(stringify!($name).to_string(), (size_of::<$ty>(), rows));
        })*
        all
    }};
}

/// Size and fields of structures, by name.
type Structures = BTreeMap<String, (usize, Vec<FieldRow>)>;

/// Returns size and fields of every on-disk structure of the crate, by name.
pub(crate) fn in_code() -> Structures {
    let mut all = pages_and_headers();
    all.extend(records());
    all.extend(layouts_and_frames());
    all
}

/// Returns the structures of superblocks and manifest files.
fn pages_and_headers() -> Structures {
    structs! {
        Features: f::Features { major, minor, reserved, compat, ro_compat, incompat }
        Slot: superblock::Slot {
            magic, features, sequence, store_id, device_id, epoch, manifest_generation, manifest_nonce, synced_through,
            created_unix_s, segment_bytes, device_index, device_count, payload_checksum, state,
            manifest_copies, reserved,
        }
        ManifestPage: m::ManifestPage {
            magic, features, store_id, generation, nonce, previous_generation, first_batch, created_unix_s,
            device, copy,
            reserved,
        }
        BatchHeader: m::BatchHeader {
            magic, crc, sequence, synced_through, generation, epoch, pages, records_bytes, record_count,
            flags, reserved,
        }
    }
}

/// Returns the structures of records.
fn records() -> Structures {
    structs! {
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
            frame, origin, lsn, nonce, location, header_crc, header_pages, front_pages, flags,
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
    }
}

/// Returns the structures of layouts, segments, frames and exported sequences.
fn layouts_and_frames() -> Structures {
    structs! {
        RawLayoutHeader: RawLayoutHeader { bytes, layers, group_tokens, dtype, flags, ropes, reserved, fingerprint }
        RawLayer: RawLayer { kv_heads, key_dim, value_dim, kind, rope, window }
        RawCodecs: RawCodecs { keys, values }
        RawRope: RawRope { first, dims, pairing, scaling, reserved, theta, factor, low, high, original }
        SegmentPage: segment::SegmentPage {
            magic, features, store_id, generation, nonce, created_unix_s, segment, pages, device, kind,
            position, reserved,
        }
        FrameHeader: frame::FrameHeader {
            magic, crc, header_pages, total_pages, frame, lsn, location, store_id, segment_generation, nonce, sequence,
            parent, parent_tokens, created_unix_ms, layout, layout_bytes, key_bytes, descriptors, checksums,
            front_pages,
            summaries, reserved,
        }
        Descriptor: frame::Descriptor {
            kind, layer, codec, summary, first_token, tokens, pieces, offset, bytes, checksum_first, checksum_count,
            element, cipher, key, record_bytes,
        }
        DirectoryHeader: pool::DirectoryHeader {
            version, part, head, method_bytes, set, generation, seed, tokens, entries, clusters, method_version,
            memberships, representative, representatives, reserved, first_cluster, count, piece_entries, frames, runs,
            pages,
        }
        ClusterRecord: pool::ClusterRecord { entries, runs, variance, radius }
        StateHeader: pool::StateHeader {
            version, part, reserved, method_bytes, set, generation, number, tokens, state_bytes, first_byte, count,
            encoding,
        }
        PageRun: pool::PageRun { frame, page, pages, direction, last_entries, reserved }
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
