//! The fixed parts of the records of the manifest.
//!
//! The kinds of records, and which of them have a variable part, are in `record`. The ranges of fields are in `check`.

use crate::ids::RawLocation;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The most bytes of the key of a sequence.
pub const KEY_BYTES_MAX: usize = 512;
/// The most copies of a frame, the first copy included.
pub const REPLICAS_MAX: u8 = 3;
/// The most bytes of the name of an adapter.
pub const ADAPTER_NAME_BYTES_MAX: usize = 255;
/// The most bytes of an adapter.
pub const ADAPTER_BYTES_MAX: u64 = 1 << 32;

/// Frame flag: the frame is derived. It holds no token that counts, and may be released at any time.
pub const FLAG_DERIVED: u32 = 1;

/// Member state: the device takes part.
pub const MEMBER_ACTIVE: u8 = 1;
/// Member state: the device takes no new frames and is being emptied.
pub const MEMBER_DRAINING: u8 = 2;
/// Member state: the device failed or disappeared.
pub const MEMBER_LOST: u8 = 3;
/// Member state: the device was emptied and left the store.
pub const MEMBER_REMOVED: u8 = 4;

macro_rules! body {
    ($(#[$doc:meta])* $name:ident, $bytes:literal { $($(#[$fdoc:meta])* $field:ident: $ty:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        pub struct $name { $($(#[$fdoc])* pub $field: $ty),* }
        const _: () = assert!(size_of::<$name>() == $bytes);
    };
}

body!(
    /// A device of the store and its state.
    Member, 40 {
        /// The membership epoch from which this record applies.
        epoch: U64,
        /// The id of the device.
        device_id: [u8; 16],
        /// The index of the device.
        device: U16,
        /// [`MEMBER_ACTIVE`], [`MEMBER_DRAINING`], [`MEMBER_LOST`] or [`MEMBER_REMOVED`].
        state: u8,
        /// The copies of the manifest that the device should hold, 0 to 2. Its superblock has the real number.
        manifest_copies: u8,
        /// The placement weight, 0 = by size.
        weight: U32,
        /// The limit of the bytes stored on the device, 0 = none.
        bytes_limit: U64,
    }
);
body!(
    /// A layout. The variable part is the encoded layout.
    LayoutDefined, 8 {
        /// The number by which sequences name the layout.
        layout: U32,
        /// Zero.
        reserved: U32,
    }
);
body!(
    /// A new, empty sequence. The variable part is its key.
    SequenceCreate, 56 {
        /// The id of the sequence.
        sequence: U64,
        /// The sequence that it was forked from, 0 = none. It describes the ancestry and gives no frame.
        parent: U64,
        /// The number of tokens inherited from the parent.
        parent_tokens: U64,
        /// The creation time, milliseconds since 1970.
        created_unix_ms: U64,
        /// The time to live in milliseconds, 0 = forever.
        ttl_ms: U64,
        /// The number of its layout.
        layout: U32,
        /// The summaries that the sequence carries: bit `1 << (kind - 1)` per summary kind.
        summaries: U32,
        /// The copies of its frames on distinct devices, first copies included.
        replicas: u8,
        /// The eviction priority, 0 = never evicted.
        evictable: u8,
        /// Bytes of the key.
        key_bytes: U16,
        /// Zero.
        reserved: U32,
    }
);
body!(
    /// A new sequence that starts with the tokens of another. The variable part is its key.
    ///
    /// It has the parent's layout and, at the moment of this record, the parent's frames up to `tokens`.
    Fork, 40 {
        /// The id of the new sequence.
        sequence: U64,
        /// The sequence that it is forked from.
        parent: U64,
        /// The number of tokens inherited.
        tokens: U64,
        /// The creation time, milliseconds since 1970.
        created_unix_ms: U64,
        /// Bytes of the key.
        key_bytes: U16,
        /// Zero.
        reserved: [u8; 6],
    }
);
body!(
    /// A cut of a sequence to its first tokens.
    SequenceTruncate, 16 {
        /// The id of the sequence.
        sequence: U64,
        /// The number of tokens kept.
        tokens: U64,
    }
);
body!(
    /// The deletion of a sequence and its references.
    SequenceDelete, 8 {
        /// The id of the sequence.
        sequence: U64,
    }
);
body!(
    /// A frame that exists.
    Frame, 64 {
        /// The id of the frame.
        frame: U64,
        /// The sequence that wrote it.
        origin: U64,
        /// The log sequence number.
        lsn: U64,
        /// The nonce of the frame. It seeds its payload checksums.
        nonce: U64,
        /// The location of the frame.
        location: RawLocation,
        /// The CRC of its header.
        header_crc: U32,
        /// The pages of its header.
        header_pages: U32,
        /// The pages of its front.
        front_pages: U32,
        /// [`FLAG_DERIVED`].
        flags: U32,
    }
);
body!(
    /// A reference of a sequence to a frame.
    FrameRef, 24 {
        /// The id of the sequence.
        sequence: U64,
        /// The id of the frame.
        frame: U64,
        /// The end of the tokens of the frame that belong to the sequence.
        token_end: U64,
    }
);
body!(
    /// The end of a sequence's reference to a frame, because other frames hold its tokens.
    FrameRelease, 16 {
        /// The id of the sequence.
        sequence: U64,
        /// The id of the frame.
        frame: U64,
    }
);
body!(
    /// The new location of a frame.
    FrameMoved, 32 {
        /// The id of the frame.
        frame: U64,
        /// The new location.
        location: RawLocation,
        /// The CRC of its header there.
        header_crc: U32,
        /// Zero.
        reserved: U32,
    }
);
body!(
    /// Another copy of a frame.
    Replica, 40 {
        /// The id of the frame.
        frame: U64,
        /// The number of the copy. On one device a greater one replaces a smaller one.
        generation: U64,
        /// The location of the copy.
        location: RawLocation,
        /// The CRC of the header of the copy.
        header_crc: U32,
        /// Zero.
        reserved: U32,
    }
);
body!(
    /// The start of a life of a segment.
    SegmentOpen, 32 {
        /// The generation of the segment.
        generation: U64,
        /// The nonce of this life.
        nonce: U64,
        /// The segment id.
        segment: U32,
        /// The pages of its file.
        pages: U32,
        /// The device index.
        device: U16,
        /// The segment kind.
        kind: u8,
        /// Zero.
        reserved: [u8; 5],
    }
);
body!(
    /// A segment that takes no more frames.
    SegmentSeal, 16 {
        /// The segment id.
        segment: U32,
        /// The pages in use, header included.
        used_pages: U32,
        /// The device index.
        device: U16,
        /// Zero.
        reserved: [u8; 6],
    }
);
body!(
    /// The end of a life of a segment. No frame in it is live, and its file may be used for another life.
    SegmentFree, 16 {
        /// The generation that ended.
        generation: U64,
        /// The segment id.
        segment: U32,
        /// The device index.
        device: U16,
        /// 1 = the file was removed.
        removed: u8,
        /// Zero.
        reserved: u8,
    }
);
body!(
    /// Reserved: the allocation of a pool of a pool segment.
    PoolAllocation, 32 {
        /// The id of the sequence.
        sequence: U64,
        /// The location of the pool.
        location: RawLocation,
        /// The layer.
        layer: U16,
        /// The KV head.
        kv_head: U16,
        /// 1 = allocated, 0 = taken back.
        allocated: u8,
        /// Zero.
        reserved: [u8; 3],
    }
);
body!(
    /// The committed length of a sequence.
    SequenceCommit, 40 {
        /// The id of the sequence.
        sequence: U64,
        /// The committed length: the minimum over its layers.
        tokens: U64,
        /// The frame that holds the caller state, 0 = none.
        state_frame: U64,
        /// The number of committed token ids, from the first token of the sequence.
        token_ids: U64,
        /// The time of the commit, milliseconds since 1970.
        committed_unix_ms: U64,
    }
);
body!(
    /// Numbers that only grow.
    Counters, 40 {
        /// All frame ids given out are below this one.
        next_frame: U64,
        /// All sequence ids given out are below this one.
        next_sequence: U64,
        /// All LSNs given out are below this one.
        next_lsn: U64,
        /// Bytes written to the devices over the life of the store.
        lifetime_bytes: U64,
        /// All layout ids given out are below this one.
        next_layout: U32,
        /// Zero.
        reserved: U32,
    }
);
body!(
    /// The last record of a checkpoint.
    CheckpointEnd, 8 {
        /// The records of the checkpoint before this one.
        records: U64,
    }
);
body!(
    /// The last record of a generation. The next generation is complete and durable.
    Superseded, 16 {
        /// The next generation.
        generation: U64,
        /// The nonce of that generation.
        nonce: U64,
    }
);

body!(
    /// An adapter that a sequence without tokens holds. The variable part is its name.
    AdapterDefined, 32 {
        /// The id of the sequence.
        sequence: U64,
        /// CRC-64/NVME of the bytes of the adapter, layer after layer.
        checksum: U64,
        /// Bytes of the adapter, all layers together.
        bytes: U64,
        /// The version of the adapter.
        version: U32,
        /// Bytes of the name.
        name_bytes: U16,
        /// Zero.
        reserved: U16,
    }
);
