//! Records of the manifest.

use crate::error::{FormatError, FormatErrorCode};
use crate::ids::RawLocation;
use alloc::vec::Vec;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Record flag: a reader that does not know the kind passes over the record.
pub const FLAG_IGNORABLE: u16 = 1;
/// The longest key of a sequence in bytes.
pub const KEY_BYTES_MAX: usize = 512;
/// The most copies of the frames of a sequence.
pub const REPLICAS_MAX: u8 = 3;
/// The longest name of an adapter in bytes.
pub const ADAPTER_NAME_BYTES_MAX: usize = 255;
/// The most bytes of an adapter.
pub const ADAPTER_BYTES_MAX: u64 = 1 << 32;

/// Member state: takes part.
pub const MEMBER_ACTIVE: u8 = 1;
/// Member state: being emptied.
pub const MEMBER_DRAINING: u8 = 2;
/// Member state: gone without notice.
pub const MEMBER_LOST: u8 = 3;
/// Member state: emptied and gone.
pub const MEMBER_REMOVED: u8 = 4;

/// Front of every record. Records start on multiples of 8 from the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RecordHeader {
    /// [`Kind`].
    pub kind: U16,
    /// [`FLAG_IGNORABLE`].
    pub flags: U16,
    /// Bytes of the body, without the zeros that pad it to a multiple of 8.
    pub bytes: U32,
}

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
    /// A device of the store.
    Member, 40 {
        /// Membership epoch from which this holds.
        epoch: U64,
        /// The device's own id.
        device_id: [u8; 16],
        /// Index.
        device: U16,
        /// [`MEMBER_ACTIVE`], ...
        state: u8,
        /// Copies of the manifest it holds, 0 to 2.
        manifest_copies: u8,
        /// Placement weight, 0 = by size.
        weight: U32,
        /// The most bytes it may take, 0 = no limit of its own.
        bytes_limit: U64,
    }
);
body!(
    /// A layout; the encoded layout follows.
    LayoutDefined, 8 {
        /// Number by which sequences name it.
        layout: U32,
        /// Zero.
        reserved: U32,
    }
);
body!(
    /// A new sequence; its key follows.
    SequenceCreate, 56 {
        /// Its id.
        sequence: U64,
        /// The sequence it was forked from, 0 = none (in checkpoints; a fork itself is a [`Fork`] record).
        parent: U64,
        /// Tokens inherited from the parent.
        parent_tokens: U64,
        /// When, milliseconds since 1970.
        created_unix_ms: U64,
        /// Time to live in milliseconds, 0 = forever.
        ttl_ms: U64,
        /// Its layout.
        layout: U32,
        /// Summaries it carries: bit `1 << (kind - 1)` per summary kind.
        summaries: U32,
        /// Copies of its blocks on distinct devices.
        replicas: u8,
        /// Eviction priority: 0 = never evicted.
        evictable: u8,
        /// Bytes of the key.
        key_bytes: U16,
        /// Zero.
        reserved: U32,
    }
);
body!(
    /// A sequence that starts with the tokens of another; its key follows. It has the parent's layout and, at the moment
    /// of this record, the parent's frames up to `tokens`.
    Fork, 40 {
        /// Its id.
        sequence: U64,
        /// The sequence it was forked from.
        parent: U64,
        /// Tokens inherited.
        tokens: U64,
        /// When, milliseconds since 1970.
        created_unix_ms: U64,
        /// Bytes of the key.
        key_bytes: U16,
        /// Zero.
        reserved: [u8; 6],
    }
);
body!(
    /// A sequence is cut to its first tokens.
    SequenceTruncate, 16 {
        /// The sequence.
        sequence: U64,
        /// Tokens kept.
        tokens: U64,
    }
);
body!(
    /// A sequence is gone.
    SequenceDelete, 8 {
        /// The sequence.
        sequence: U64,
    }
);
body!(
    /// A frame exists.
    Frame, 64 {
        /// Its id.
        frame: U64,
        /// The sequence that wrote it.
        origin: U64,
        /// Log sequence number.
        lsn: U64,
        /// Its nonce, which seeds its payload checksums.
        nonce: U64,
        /// Where it is.
        location: RawLocation,
        /// CRC of its header.
        header_crc: U32,
        /// Pages of its header.
        header_pages: U32,
        /// Pages before its first groups extent.
        front_pages: U32,
        /// Zero.
        reserved: U32,
    }
);
body!(
    /// A sequence refers to a frame.
    FrameRef, 24 {
        /// The sequence.
        sequence: U64,
        /// The frame.
        frame: U64,
        /// Only tokens below this one belong to the sequence.
        token_end: U64,
    }
);
body!(
    /// A sequence refers to a frame no longer: others took over its tokens.
    FrameRelease, 16 {
        /// The sequence.
        sequence: U64,
        /// The frame.
        frame: U64,
    }
);
body!(
    /// A frame lies elsewhere from now on.
    FrameMoved, 32 {
        /// The frame.
        frame: U64,
        /// Where it is now.
        location: RawLocation,
        /// CRC of its header there.
        header_crc: U32,
        /// Zero.
        reserved: U32,
    }
);
body!(
    /// Another copy of a frame.
    Replica, 40 {
        /// The frame.
        frame: U64,
        /// Counts the copies made; a later one replaces an earlier one on the same device.
        generation: U64,
        /// Where the copy is.
        location: RawLocation,
        /// CRC of the copy's header.
        header_crc: U32,
        /// Zero.
        reserved: U32,
    }
);
body!(
    /// A segment begins a life.
    SegmentOpen, 32 {
        /// Generation.
        generation: U64,
        /// Nonce.
        nonce: U64,
        /// Segment.
        segment: U32,
        /// Pages of its file.
        pages: U32,
        /// Device.
        device: U16,
        /// Segment kind.
        kind: u8,
        /// Zero.
        reserved: [u8; 5],
    }
);
body!(
    /// A segment takes no more frames.
    SegmentSeal, 16 {
        /// Segment.
        segment: U32,
        /// Pages in use, header included.
        used_pages: U32,
        /// Device.
        device: U16,
        /// Zero.
        reserved: [u8; 6],
    }
);
body!(
    /// A segment is free: nothing in it is live, its file may be used for another life.
    SegmentFree, 16 {
        /// Generation that ended.
        generation: U64,
        /// Segment.
        segment: U32,
        /// Device.
        device: U16,
        /// 1: the file was removed.
        removed: u8,
        /// Zero.
        reserved: u8,
    }
);
body!(
    /// A pool of a pool segment is given to a cluster pair, or taken back (room kept; needs the pool feature).
    PoolAllocation, 32 {
        /// The sequence.
        sequence: U64,
        /// Where.
        location: RawLocation,
        /// Layer.
        layer: U16,
        /// KV head.
        kv_head: U16,
        /// 1 = given, 0 = taken back.
        allocated: u8,
        /// Zero.
        reserved: [u8; 3],
    }
);
body!(
    /// The tokens of a sequence up to `tokens` are committed.
    SequenceCommit, 40 {
        /// The sequence.
        sequence: U64,
        /// Committed tokens: the minimum over its layers.
        tokens: U64,
        /// Frame that holds the caller's state, 0 = none.
        state_frame: U64,
        /// Token ids committed with it, counted from the first token of the sequence.
        token_ids: U64,
        /// When, milliseconds since 1970.
        committed_unix_ms: U64,
    }
);
body!(
    /// Numbers that never go back.
    Counters, 40 {
        /// Frame ids below this one were given out.
        next_frame: U64,
        /// Sequence ids below this one were given out.
        next_sequence: U64,
        /// Log sequence numbers below this one were given out.
        next_lsn: U64,
        /// Bytes written to the devices over the life of the store.
        lifetime_bytes: U64,
        /// Layout ids below this one were given out.
        next_layout: U32,
        /// Zero.
        reserved: U32,
    }
);
body!(
    /// The last record of a checkpoint.
    CheckpointEnd, 8 {
        /// Records of the checkpoint before this one.
        records: U64,
    }
);
body!(
    /// The last record of a generation: the next one is complete and durable.
    Superseded, 16 {
        /// The next generation.
        generation: U64,
        /// Its nonce.
        nonce: U64,
    }
);

body!(
    /// A sequence without tokens holds an adapter; its name follows.
    AdapterDefined, 32 {
        /// The sequence.
        sequence: U64,
        /// CRC-64/NVME of its bytes, layer after layer.
        checksum: U64,
        /// Its bytes, all layers together.
        bytes: U64,
        /// Version.
        version: U32,
        /// Bytes of the name.
        name_bytes: U16,
        /// Zero.
        reserved: U16,
    }
);

macro_rules! records {
    ($($kind:ident = $code:literal, $name:ident $(, $tail:ident)?;)*) => {
        /// Kinds of records.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum Kind { $(#[doc = concat!("[`", stringify!($name), "`]")] $kind = $code),* }

        impl Kind {
            /// The kind with this code.
            #[must_use]
            pub const fn from_code(code: u16) -> Option<Self> {
                match code { $($code => Some(Self::$kind),)* _ => None }
            }
        }

        /// A record; those with bytes of their own behind the fixed part carry them as a slice.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Record<'a> {
            $(#[doc = concat!("[`", stringify!($name), "`]")]
            $kind(&'a $name $(, records!(@tail $tail 'a))?),)*
            /// An ignorable record of a kind this code does not know.
            Unknown(u16),
        }

        fn parse<'a>(kind: Kind, body: &'a [u8], base: usize) -> Result<Record<'a>, FormatError> {
            match kind {
                $(Kind::$kind => {
                    let Ok((fixed, tail)) = $name::ref_from_prefix(body) else {
                        return Err(FormatError::truncated(stringify!($name), size_of::<$name>(), body.len()));
                    };
                    records!(@make $kind fixed tail base $($tail)?)
                })*
            }
        }
    };
    (@tail $tail:ident $life:lifetime) => { &$life [u8] };
    (@make $kind:ident $fixed:ident $body_tail:ident $base:ident $tail:ident) => { Ok(Record::$kind($fixed, $body_tail)) };
    (@make $kind:ident $fixed:ident $body_tail:ident $base:ident) => {
        if $body_tail.is_empty() {
            Ok(Record::$kind($fixed))
        } else {
            Err(FormatError::range(stringify!($kind), $base, 0, $body_tail.len() as u64))
        }
    };
}

records! {
    Member = 1, Member;
    Layout = 2, LayoutDefined, bytes;
    SequenceCreate = 3, SequenceCreate, bytes;
    Fork = 4, Fork, bytes;
    SequenceTruncate = 5, SequenceTruncate;
    SequenceDelete = 6, SequenceDelete;
    Frame = 7, Frame;
    FrameMoved = 8, FrameMoved;
    Replica = 9, Replica;
    SegmentOpen = 10, SegmentOpen;
    SegmentSeal = 11, SegmentSeal;
    SegmentFree = 12, SegmentFree;
    PoolAllocation = 13, PoolAllocation;
    SequenceCommit = 14, SequenceCommit;
    Counters = 15, Counters;
    CheckpointEnd = 16, CheckpointEnd;
    Superseded = 17, Superseded;
    FrameRef = 18, FrameRef;
    FrameRelease = 19, FrameRelease;
    Adapter = 20, AdapterDefined, bytes;
}

/// The records of a batch, in order.
#[derive(Clone, Copy, Debug)]
pub struct Records<'a> {
    bytes: &'a [u8],
    at: usize,
    left: u32,
}

impl<'a> Records<'a> {
    /// `count` records in `bytes`, as [`encode_record`] wrote them.
    #[must_use]
    pub fn new(bytes: &'a [u8], count: u32) -> Self {
        Self { bytes, at: 0, left: count }
    }

    fn take(&mut self) -> Result<Record<'a>, FormatError> {
        let rest = &self.bytes[self.at..];
        let Ok((header, rest)) = RecordHeader::ref_from_prefix(rest) else {
            return Err(FormatError::truncated("record header", size_of::<RecordHeader>(), rest.len()));
        };
        let bytes = header.bytes.get() as usize;
        let padded = bytes.next_multiple_of(8);
        let Some((body, padding)) = rest.get(..padded).map(|b| b.split_at(bytes)) else {
            return Err(FormatError::truncated("record body", padded, rest.len()));
        };
        crate::verify::check_zeros(padding, "record padding", self.at + size_of::<RecordHeader>() + bytes)?;
        let base = self.at;
        self.at += size_of::<RecordHeader>() + padded;
        let flags = header.flags.get();
        if flags & !FLAG_IGNORABLE != 0 {
            return Err(FormatError::new(FormatErrorCode::Unsupported, "record flags", base + 2, 1, u64::from(flags)));
        }
        match Kind::from_code(header.kind.get()) {
            Some(kind) => {
                let record = parse(kind, body, base)?;
                super::check::check(&record, base)?;
                Ok(record)
            }
            None if flags & FLAG_IGNORABLE != 0 => Ok(Record::Unknown(header.kind.get())),
            None => Err(FormatError::new(
                FormatErrorCode::Unsupported,
                "record kind",
                base,
                20,
                u64::from(header.kind.get()),
            )),
        }
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<Record<'a>, FormatError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            if self.at == self.bytes.len() {
                return None;
            }
            let extra = self.bytes.len() - self.at;
            self.at = self.bytes.len();
            return Some(Err(FormatError::range("records bytes", self.bytes.len() - extra, 0, extra as u64)));
        }
        self.left -= 1;
        let record = self.take();
        if record.is_err() {
            self.left = 0;
            self.at = self.bytes.len();
        }
        Some(record)
    }
}

/// Appends one record: header, fixed part, tail, padding.
pub fn encode_record(out: &mut Vec<u8>, kind: Kind, body: &(impl IntoBytes + Immutable), tail: &[u8]) {
    let body = body.as_bytes();
    let bytes = body.len() + tail.len();
    let header = RecordHeader { kind: U16::new(kind as u16), flags: U16::new(0), bytes: U32::new(bytes as u32) };
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(body);
    out.extend_from_slice(tail);
    out.resize(out.len().next_multiple_of(8), 0);
}
