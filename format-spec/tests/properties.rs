//! Properties of encoding and decoding.
//!
//! - Structures that are written are read back unchanged.
//! - Damaged structures are refused.
//! - Hostile bytes cause an error or a consistent structure, never a panic.

#[allow(dead_code, unused_imports, unused_macros, reason = "the golden tests use the rest")]
mod builder;
#[allow(dead_code, reason = "the golden tests use the rest")]
mod golden_store;

use builder as b;
use golden_store as g;
use proptest::prelude::*;
use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity};
use stratakv_format::error::FormatErrorCode;
use stratakv_format::features::Features;
use stratakv_format::frame::{Descriptor, FramePlace, FrameView, HeaderBuilder, KIND_GROUPS, header_bytes};
use stratakv_format::ids::{FrameId, LayoutId, NUMBER_MAX, RawLocation, SequenceId};
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::manifest::{self as m, Batch, BatchPlace, Kind, ManifestPage, Record, Records, encode_record};
use stratakv_format::rope::{Rope, RopeScaling};
use stratakv_format::segment::{self, SegmentPage};
use stratakv_format::superblock::{self, SLOTS, Slot};
use stratakv_format::{DType, DeviceIndex, FormatError, Location, PAGE_BYTES, PlaneCodec, SegmentId, Unverified};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

fn dtype() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)]
}

/// Generates few different rotations, so that layers share them.
fn rope() -> impl Strategy<Value = Option<Rope>> {
    let scaling = prop_oneof![
        Just(RopeScaling::None),
        Just(RopeScaling::Linear { factor: 4.0 }),
        Just(RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 }),
    ];
    let rope =
        (1..3_u16, 0..3_u16, any::<bool>(), scaling, 0..2_u8).prop_map(|(pairs, first, halves, scaling, theta)| {
            let rope = Rope::new(2 * pairs, [10_000.0, 5e5][usize::from(theta)]).starting_at(first).scaled(scaling);
            if halves { rope } else { rope.interleaved() }
        });
    proptest::option::of(rope)
}

fn layer() -> impl Strategy<Value = LayerGeometry> {
    let with_kv = (1..=16_u16, 1..=256_u16, 0..=256_u16, proptest::option::of(1..=u32::MAX), rope()).prop_map(
        |(kv_heads, key_dim, value_dim, window, rope)| {
            let rope = rope.filter(|rope| rope.first() + rope.dims() <= usize::from(key_dim));
            LayerGeometry { kv_heads, key_dim, value_dim, window, rope, codecs: RAW_PLANES }
        },
    );
    let without =
        Just(LayerGeometry { kv_heads: 0, key_dim: 0, value_dim: 0, window: None, rope: None, codecs: RAW_PLANES });
    prop_oneof![4 => with_kv, 1 => without]
}

/// Generates layouts that pass their check. The first layer always has KV, and blocks over the limit are reduced.
fn layout() -> impl Strategy<Value = Layout> {
    let layers = proptest::collection::vec(layer(), 0..8);
    let codecs = proptest::option::of(any::<[[u8; 2]; 8]>());
    (dtype(), 1..=128_u16, any::<bool>(), any::<[u8; 32]>(), layers, codecs).prop_map(
        |(dtype, group_tokens, padded_planes, fingerprint, mut layers, codecs)| {
            layers.insert(
                0,
                LayerGeometry { kv_heads: 2, key_dim: 64, value_dim: 64, window: None, rope: None, codecs: RAW_PLANES },
            );
            let mut layout = Layout { dtype, group_tokens, padded_planes, fingerprint, layers };
            while layout.check().is_err() {
                layout.group_tokens /= 2;
            }
            for (at, codecs) in codecs.iter().flatten().enumerate().take(layout.layers.len()) {
                for (plane, code) in codecs.iter().enumerate() {
                    let shape = layout.plane_shape(&layout.layers[at], plane);
                    let codec = PlaneCodec::from_code(code % 3).unwrap_or_default();
                    layout.layers[at].codecs[plane] = if codec.suits(&shape) { codec } else { PlaneCodec::Raw };
                }
            }
            layout
        },
    )
}

fn code(result: Result<impl Sized, FormatError>) -> Option<FormatErrorCode> {
    result.err().map(|e| e.code)
}

/// Returns the range of a number that only grows.
fn number() -> std::ops::RangeInclusive<u64> {
    0..=NUMBER_MAX
}

fn slot() -> impl Strategy<Value = Slot> {
    let numbers = (any::<[u64; 3]>(), [number(), number(), number()], 1..=NUMBER_MAX, 8..=1_u64 << 24);
    let small = (any::<([u8; 16], [u8; 16])>(), 1..=256_u16, 0..256_u16, 1..=2_u8, 1..=2_u8, 0..=2_u8);
    (numbers, small).prop_map(|((n, grows, generation, pages), (ids, device_count, index, sum, state, copies))| Slot {
        magic: superblock::MAGIC,
        features: Features { compat: U64::new(n[0]), ro_compat: U64::new(n[1]), ..Features::current() },
        sequence: U64::new(grows[0]),
        store_id: ids.0,
        device_id: ids.1,
        epoch: U64::new(grows[1]),
        manifest_generation: U64::new(generation),
        manifest_nonce: U64::new(n[2]),
        synced_through: U64::new(grows[2]),
        created_unix_s: U64::new(n[0] ^ n[1]),
        segment_bytes: U64::new(pages * PAGE_BYTES as u64),
        device_index: U16::new(index % device_count),
        device_count: U16::new(device_count),
        payload_checksum: sum,
        state,
        manifest_copies: copies,
        reserved: 0,
    })
}

fn verify_slot(page: &[u8], index: usize) -> Result<Slot, FormatError> {
    Ok(Unverified::<Slot>::at_front(page, "slot")?.verify(index)?.into_inner())
}

fn verify_segment(page: &[u8]) -> Result<SegmentPage, FormatError> {
    Ok(Unverified::<SegmentPage>::at_front(page, "segment")?.verify()?.into_inner())
}

fn verify_manifest(page: &[u8]) -> Result<ManifestPage, FormatError> {
    Ok(Unverified::<ManifestPage>::at_front(page, "manifest")?.verify()?.into_inner())
}

fn page_with(bytes: &[u8]) -> Vec<u8> {
    let mut page = bytes.to_vec();
    page.resize(PAGE_BYTES, 0);
    let crc = stratakv_format::checksum::page_crc(page.first_chunk().expect("a page"));
    page[508..512].copy_from_slice(&crc.to_le_bytes());
    page
}

fn batch_records() -> impl Strategy<Value = (Vec<u8>, Vec<(u16, Vec<u8>)>)> {
    let record = prop_oneof![
        any::<[u64; 3]>().prop_map(|v| (Kind::FrameRef as u16, v.as_bytes().to_vec())),
        any::<[u64; 2]>().prop_map(|v| (Kind::FrameRelease as u16, v.as_bytes().to_vec())),
        any::<u64>().prop_map(|v| (Kind::SequenceDelete as u16, v.as_bytes().to_vec())),
        (number(), any::<u64>()).prop_map(|(n, nonce)| (Kind::Superseded as u16, [n, nonce].as_bytes().to_vec())),
        ("[a-z]{0,40}", 0..=1_u64 << 48).prop_map(|(key, tokens)| {
            let fork = m::Fork { tokens: U64::new(tokens), key_bytes: U16::new(key.len() as u16), ..g::fork() };
            (Kind::Fork as u16, [fork.as_bytes(), key.as_bytes()].concat())
        }),
    ];
    proptest::collection::vec(record, 0..200).prop_map(|records| {
        let mut bytes = Vec::new();
        for (kind, body) in &records {
            let kind = Kind::from_code(*kind).expect("a kind");
            encode_record(&mut bytes, kind, &[0_u8; 0], body);
        }
        (bytes, records)
    })
}

fn body_of(record: &Record<'_>) -> (u16, Vec<u8>) {
    match record {
        Record::FrameRef(r) => (18, r.as_bytes().to_vec()),
        Record::FrameRelease(r) => (19, r.as_bytes().to_vec()),
        Record::SequenceDelete(r) => (6, r.as_bytes().to_vec()),
        Record::Superseded(r) => (17, r.as_bytes().to_vec()),
        Record::Fork(r, key) => (4, [r.as_bytes(), key].concat()),
        other => panic!("{other:?} was not written"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn slots_round_trip(slot in slot()) {
        let index = (slot.sequence.get() % 2) as usize;
        prop_assert_eq!(verify_slot(&slot.encode(), index), Ok(slot));
        prop_assert_eq!(code(verify_slot(&slot.encode(), 1 - index)), Some(FormatErrorCode::Identity));
    }

    #[test]
    fn numbers_beyond_their_limit_are_refused(slot in slot(), more in NUMBER_MAX + 1..=u64::MAX, which in 0..7_usize) {
        let (mut beyond, mut page, number) = (slot, b::manifest_page(0), U64::new(more));
        match which {
            0 => beyond.sequence = number,
            1 => beyond.epoch = number,
            2 => beyond.manifest_generation = number,
            3 => beyond.synced_through = number,
            4 => page.generation = number,
            5 => page.previous_generation = number,
            _ => page.first_batch = number,
        }
        let found = match which {
            0..=3 => code(verify_slot(&beyond.encode(), (beyond.sequence.get() % 2) as usize)),
            _ => code(verify_manifest(&page.encode())),
        };
        prop_assert_eq!(found, Some(FormatErrorCode::Range));
    }

    #[test]
    fn newest_returns_the_newest_valid_slot(
        a in slot(), b in slot(), damage in any::<[bool; 2]>(), at in 0..PAGE_BYTES,
    ) {
        let mut slots = [a, b];
        for (index, slot) in slots.iter_mut().enumerate() {
            slot.sequence = U64::new((slot.sequence.get() & !1) | index as u64);
        }
        let mut file = [slots[0].encode(), slots[1].encode()].concat();
        for index in (0..SLOTS).filter(|&i| damage[i]) {
            file[index * PAGE_BYTES + at] ^= 0x40;
        }
        let valid = (0..SLOTS).filter(|&i| !damage[i]).max_by_key(|&i| slots[i].sequence.get());
        match (superblock::newest(&file), valid) {
            (Ok(found), Some(index)) => prop_assert_eq!(*found, slots[index]),
            (Err(_), None) => {}
            (found, _) => prop_assert!(false, "{found:?}"),
        }
    }

    #[test]
    fn segment_and_manifest_pages_round_trip(
        n in any::<[u64; 3]>(), (first, previous) in (number(), number()), generation in 1..=NUMBER_MAX,
        id in any::<[u8; 16]>(), pages in 8..=1_u32 << 24,
        kind in 1..=2_u8, position in 0..=1_u8, device in any::<u16>(), segment in any::<u32>(),
    ) {
        let page = SegmentPage {
            store_id: id, generation: U64::new(n[0]), nonce: U64::new(n[1]), created_unix_s: U64::new(n[2]),
            segment: U32::new(segment), pages: U32::new(pages), device: U16::new(device), kind, position,
            ..b::segment_page(0)
        };
        prop_assert_eq!(verify_segment(&page.encode()), Ok(page));
        let page = ManifestPage {
            store_id: id, generation: U64::new(generation), nonce: U64::new(n[1]), first_batch: U64::new(first),
            previous_generation: U64::new(previous), created_unix_s: U64::new(n[2]), device: U16::new(device),
            ..b::manifest_page(position)
        };
        prop_assert_eq!(verify_manifest(&page.encode()), Ok(page));
        let name = segment::file_name(SegmentId(segment));
        prop_assert_eq!(segment::parse_file_name(&name[9..]), Some(SegmentId(segment)));
        let name = m::file_name(generation, position);
        prop_assert_eq!(m::parse_file_name(&name[9..]), Some((generation, position)));
    }

    #[test]
    fn batches_round_trip(
        (bytes, records) in batch_records(), generation in any::<u64>(), nonce in any::<u64>(),
        sequence in 1..=NUMBER_MAX, epoch in number(), flags in 0..=3_u16, flip in any::<prop::sample::Index>(),
    ) {
        let place = BatchPlace { generation, nonce, sequence };
        let encoded = m::encode_batch(&place, sequence - 1, epoch, flags, &bytes, records.len() as u32).unwrap();
        prop_assert_eq!(encoded.len() % PAGE_BYTES, 0);
        prop_assert_eq!(Batch::claimed_pages(&encoded), Some((encoded.len() / PAGE_BYTES) as u32));
        for (sequence, epoch) in [(NUMBER_MAX + sequence, epoch), (sequence, NUMBER_MAX + 1)] {
            let place = BatchPlace { sequence, ..place };
            let beyond = m::encode_batch(&place, sequence - 1, epoch, flags, &bytes, records.len() as u32).unwrap();
            let e = Batch::verify(&beyond, &place).unwrap_err();
            prop_assert!(e.code == FormatErrorCode::Range && !Batch::may_be_torn(&e), "{e:?}");
        }
        let batch = Batch::verify(&encoded, &place).unwrap();
        prop_assert_eq!((batch.header().epoch.get(), batch.header().synced_through.get()), (epoch, sequence - 1));
        prop_assert_eq!((batch.is_checkpoint(), batch.has_more()), (flags & 1 != 0, flags & 2 != 0));
        let read: Vec<_> = batch.records().map(|r| body_of(&r.unwrap())).collect();
        prop_assert_eq!(read, records);
        // A batch does not verify in another place.
        for other in [
            BatchPlace { nonce: nonce ^ 1, ..place },
            BatchPlace { generation: generation ^ 1, ..place },
            BatchPlace { sequence: sequence ^ 2, ..place },
        ] {
            prop_assert!(Batch::verify(&encoded, &other).is_err());
        }
        let mut torn = encoded.clone();
        torn[flip.index(encoded.len())] ^= 1;
        prop_assert!(Batch::verify(&torn, &place).is_err());
        prop_assert!(Batch::verify(&encoded[..encoded.len() - 1], &place).is_err());
    }

    #[test]
    fn layouts_round_trip(layout in layout(), cut in any::<prop::sample::Index>()) {
        let mut bytes = Vec::new();
        layout.encode(&mut bytes);
        prop_assert_eq!(bytes.len(), layout.encoded_bytes());
        prop_assert_eq!(Layout::decode(&bytes), Ok(layout));
        prop_assert!(Layout::decode(&bytes[..cut.index(bytes.len())]).is_err());
    }

    #[test]
    fn hostile_layouts_are_bounded(layout in layout(), at in any::<prop::sample::Index>(), value in any::<u8>(),
                                   random in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut bytes = Vec::new();
        layout.encode(&mut bytes);
        let at = at.index(bytes.len());
        bytes[at] = value;
        for input in [&bytes, &random] {
            if let Ok(read) = Layout::decode(input) {
                prop_assert_eq!(read.check(), Ok(()));
                let mut again = Vec::new();
                read.encode(&mut again);
                prop_assert_eq!(&again[..], &input[..again.len()]);
            }
        }
    }

    #[test]
    fn blocks_neither_overlap_nor_cross_pages(layout in layout(), blocks in 1..60_usize) {
        for layer in layout.layers.iter().filter(|l| l.has_kv()) {
            let b = layout.block(layer);
            let extent = b.extent_bytes(blocks);
            prop_assert_eq!(extent % PAGE_BYTES, 0);
            prop_assert!(b.key_bytes <= b.value_offset && b.value_offset + b.value_bytes == b.block_bytes);
            prop_assert!(!(layout.padded_planes && b.value_bytes > 0) || b.value_offset % PAGE_BYTES == 0);
            let mut end = 0;
            for index in 0..blocks {
                let at = b.block_offset(index);
                prop_assert!(at >= end);
                end = at + b.block_bytes;
                if b.block_bytes < PAGE_BYTES {
                    prop_assert_eq!(at / PAGE_BYTES, (end - 1) / PAGE_BYTES);
                } else {
                    prop_assert_eq!(at % PAGE_BYTES, 0);
                }
            }
            prop_assert!(end <= extent && extent - end < PAGE_BYTES);
            for plane in 0..layer.planes() {
                let (at, bytes) = b.plane(plane);
                prop_assert!(bytes > 0 && at + bytes <= b.block_bytes);
            }
        }
    }

    #[test]
    fn planes_verify_only_as_themselves(
        n in any::<(u64, u64, u16, u16, u64, u32, u16)>(), bits in any::<prop::sample::Index>(),
        data in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let identity = PlaneIdentity::new(n.0, SequenceId(n.1), n.2, n.3, n.4, n.5).with_plane(n.6);
        let mut other = identity;
        let bit = bits.index(34 * 8);
        other.as_mut_bytes()[bit / 8] ^= 1 << (bit % 8);
        for kind in [PayloadChecksum::Crc32, PayloadChecksum::Crc64Nvme] {
            let sum = kind.compute(&identity, &data);
            prop_assert_ne!(sum, kind.compute(&other, &data));
            prop_assert!(kind == PayloadChecksum::Crc64Nvme || sum <= u64::from(u32::MAX));
            if !data.is_empty() {
                let mut wrong = data.clone();
                wrong[bits.index(data.len())] ^= 0x10;
                prop_assert_ne!(sum, kind.compute(&identity, &wrong));
            }
        }
    }

    #[test]
    fn frames_round_trip(
        layout in layout(), key in "[a-z]{0,512}",
        extents in proptest::collection::vec((any::<prop::sample::Index>(), 1..5_u32, 0..9_u64), 0..40),
        n in any::<[u64; 5]>(), sums in any::<u64>(), flip in any::<prop::sample::Index>(),
    ) {
        let with_kv: Vec<usize> = (0..layout.layers.len()).filter(|&l| layout.layers[l].has_kv()).collect();
        let group = u64::from(layout.group_tokens);
        let planes = |layer: usize| layout.layers[layer].planes();
        let layer_of = |i: &prop::sample::Index| with_kv[i.index(with_kv.len())];
        let chosen: Vec<_> = extents.iter().map(|(i, groups, first)| (layer_of(i), *groups, *first)).collect();
        let total: usize = chosen.iter().map(|&(layer, groups, _)| groups as usize * planes(layer)).sum();
        let checksums: Vec<u64> = (0..total as u64).map(|i| sums.wrapping_mul(i + 1)).collect();
        let header = header_bytes(&layout, key.len(), chosen.len(), total);
        let (mut offset, mut first) = (header as u64, 0);
        let mut descriptors = Vec::new();
        for (layer, groups, first_group) in chosen {
            let bytes = layout.block(&layout.layers[layer]).extent_bytes(groups as usize) as u64;
            let count = groups * planes(layer) as u32;
            descriptors.push(Descriptor {
                codec: U16::new(layout.layers[layer].codec_code()),
                offset: U64::new(offset), bytes: U64::new(bytes),
                checksum_first: U32::new(first), checksum_count: U32::new(count),
                ..b::descriptor(KIND_GROUPS, layer as u16, first_group * group, groups * group as u32, groups)
            });
            (offset, first) = (offset + bytes, first + count);
        }
        let pages = (offset / PAGE_BYTES as u64) as u32;
        let (segment, page) = (SegmentId(n[0] as u32), 1 + (n[1] as u32 >> 9));
        let location = Location { device: DeviceIndex(2), segment, page, pages };
        let place = FramePlace {
            store_id: b::STORE_ID, location, segment_generation: n[2], segment_nonce: n[3],
        };
        let builder = HeaderBuilder {
            frame: FrameId(n[0]), lsn: n[1], nonce: n[2], sequence: SequenceId(n[3]),
            parent: Some((SequenceId(n[4]), n[0])), created_unix_ms: n[1], layout_id: LayoutId(n[2] as u32),
            layout: &layout, key: key.as_bytes(), summaries: 0, descriptors: &descriptors, checksums: &checksums,
            front_pages: (header / PAGE_BYTES) as u32,
        };
        let mut bytes = vec![0xaa; header];
        prop_assert!(builder.write(&place, &mut bytes[..header - 1]).is_err());
        let written = builder.write(&place, &mut bytes);
        if pages > stratakv_format::frame::TOTAL_PAGES_MAX {
            prop_assert!(written.is_err());
            return Ok(());
        }
        let crc = written.unwrap();
        let view = FrameView::verify(&bytes, &place).unwrap();
        prop_assert_eq!(FrameView::claimed_header_pages(&bytes), Some((header / PAGE_BYTES) as u32));
        prop_assert_eq!((view.layout(), view.key(), view.descriptors()), (&layout, key.as_bytes(), &descriptors[..]));
        let read: Vec<u64> = view.descriptors().iter().flat_map(|d| view.checksums(d)).map(|c| c.get()).collect();
        prop_assert_eq!(read, checksums.clone());
        let h = view.header();
        prop_assert_eq!([h.frame.get(), h.lsn.get(), h.nonce.get(), h.sequence.get(), h.parent.get()], n);
        prop_assert_eq!((h.crc.get(), h.parent_tokens.get(), h.total_pages.get()), (crc, n[0], pages));
        for other in [
            FramePlace { segment_nonce: n[3] ^ 1, ..place },
            FramePlace { segment_generation: n[2] ^ 1, ..place },
            FramePlace { store_id: [1; 16], ..place },
            FramePlace { location: Location { page: location.page + 1, ..location }, ..place },
            FramePlace { location: Location { segment: SegmentId(location.segment.0 ^ 1), ..location }, ..place },
            FramePlace { location: Location { device: DeviceIndex(3), ..location }, ..place },
        ] {
            prop_assert!(FrameView::verify(&bytes, &other).is_err());
        }
        bytes[flip.index(header)] ^= 0x80;
        prop_assert!(FrameView::verify(&bytes, &place).is_err());
    }

    #[test]
    fn random_bytes_are_refused(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..3 * PAGE_BYTES), cut in any::<prop::sample::Index>(),
    ) {
        let batch_place = b::batch_place(41);
        let frame_place = FramePlace {
            store_id: b::STORE_ID,
            location: Location { device: DeviceIndex(0), segment: SegmentId(1), page: 1, pages: 0 },
            segment_generation: 5, segment_nonce: 6,
        };
        let frame_magic = &stratakv_format::frame::MAGIC;
        for magic in [&superblock::MAGIC[..], &m::MAGIC, &segment::MAGIC, &m::BATCH_MAGIC, frame_magic] {
            let n = magic.len().min(bytes.len());
            bytes[..n].copy_from_slice(&magic[..n]);
            let cut = &bytes[..cut.index(bytes.len() + 1)];
            for input in [&bytes[..], cut] {
                prop_assert!(superblock::newest(input).is_err());
                prop_assert!(verify_segment(input).is_err() && verify_manifest(input).is_err());
                prop_assert!(Batch::verify(input, &batch_place).is_err());
                prop_assert!(FrameView::verify(input, &frame_place).is_err());
                let _ = (Batch::claimed_pages(input), FrameView::claimed_header_pages(input), Layout::decode(input));
                // The iterator ends after the first error.
                let read: Vec<_> = Records::new(input, 1000).collect();
                prop_assert!(read.iter().rev().skip(1).all(Result::is_ok) && read.len() <= 1001);
            }
        }
    }

    #[test]
    fn hostile_records_are_refused_or_in_range(
        kind in 1..=19_u16, body in proptest::collection::vec(any::<u8>(), 0..120),
        zeros in any::<prop::sample::Index>(),
    ) {
        let mut body = body;
        let from = zeros.index(body.len() + 1);
        body[from..].fill(0);
        let mut bytes = Vec::new();
        encode_record(&mut bytes, Kind::from_code(kind).unwrap(), &[0_u8; 0], &body);
        for record in Records::new(&bytes, 1).flatten() {
            match record {
                Record::SequenceCreate(r, key) => prop_assert_eq!(usize::from(r.key_bytes.get()), key.len()),
                Record::Fork(r, key) => {
                    prop_assert_eq!((usize::from(r.key_bytes.get()), r.reserved), (key.len(), [0; 6]));
                }
                Record::Frame(r) => {
                    let end = r.location.page.get().checked_add(r.location.pages.get());
                    prop_assert!(end.is_some_and(|end| end < 1 << 24) && r.location.page.get() > 0);
                    let (header, front) = (r.header_pages.get(), r.front_pages.get());
                    prop_assert!(header <= front && front <= r.location.pages.get());
                }
                Record::Member(r) => prop_assert!((1..=4).contains(&r.state) && r.manifest_copies <= 2),
                Record::SegmentOpen(r) => prop_assert!((8..=1 << 24).contains(&r.pages.get()) && r.reserved == [0; 5]),
                _ => {}
            }
        }
    }
}

/// Each byte of a page, batch or frame header is flipped in three ways, and each is cut to every shorter length.
#[test]
fn every_flipped_byte_is_refused() {
    let checksum = PayloadChecksum::Crc64Nvme;
    let [frame, _] = g::frames(checksum);
    let batch = g::every_record().records;
    let place = b::batch_place(41);
    let batch = m::encode_batch(&place, 40, 1, 0, &batch.bytes, batch.count).expect("a batch");
    type Check<'a> = Box<dyn Fn(&[u8]) -> bool + 'a>;
    let cases: [(&str, Vec<u8>, Check<'_>); 6] = [
        ("slot", b::slot(0, checksum).encode().to_vec(), Box::new(|b| verify_slot(b, 0).is_ok())),
        ("manifest page", b::manifest_page(0).encode().to_vec(), Box::new(|b| verify_manifest(b).is_ok())),
        ("header", b::segment_page(0).encode().to_vec(), Box::new(|b| verify_segment(b).is_ok())),
        ("trailer", b::segment_page(1).encode().to_vec(), Box::new(|b| verify_segment(b).is_ok())),
        ("batch", batch, Box::new(|b| Batch::verify(b, &place).is_ok())),
        ("frame", frame.bytes[..PAGE_BYTES].to_vec(), Box::new(|b| FrameView::verify(b, &frame.place).is_ok())),
    ];
    for (name, mut bytes, valid) in cases {
        assert!(valid(&bytes), "{name}");
        for at in 0..bytes.len() {
            for mask in [0x01, 0x80, 0xff] {
                bytes[at] ^= mask;
                assert!(!valid(&bytes), "{name}: byte {at} ^ {mask:#x}");
                bytes[at] ^= mask;
            }
        }
        for length in 0..bytes.len() {
            assert!(!valid(&bytes[..length]), "{name} cut to {length}");
        }
    }
}

/// A newer version with a correct CRC is unsupported, even if it uses bytes that are zero in this version.
#[test]
fn newer_versions_are_unsupported_not_damaged() {
    let slot = b::slot(1, PayloadChecksum::Crc64Nvme);
    let unsupported = Some(FormatErrorCode::Unsupported);
    for (at, value) in [(8, 1_u8), (10, 2), (32, 0x10), (32, 0x11), (32, 0x21), (39, 0x80)] {
        let mut page = page_with(&slot.encode());
        page[at] = value;
        page[300] = 7;
        let page = page_with(&page);
        assert_eq!(code(verify_slot(&page, 1)), unsupported, "byte {at} = {value}");
        let file = [b::slot(0, PayloadChecksum::Crc64Nvme).encode().to_vec(), page].concat();
        assert_eq!(code(superblock::newest(&file)), unsupported);
    }
    let mut page = slot.encode();
    page[300] = 7;
    assert_eq!(code(verify_slot(&page_with(&page), 1)), Some(FormatErrorCode::Reserved));
    let mut page = slot.encode();
    page[24] = 1;
    let read = verify_slot(&page_with(&page), 1).expect("readable");
    assert!(!read.features.writable() && slot.features.writable());
}

#[test]
fn unknown_records_are_skipped_only_if_ignorable() {
    let body = U64::new(5);
    let mut bytes = Vec::new();
    encode_record(&mut bytes, Kind::SequenceDelete, &body, &[]);
    bytes[..2].copy_from_slice(&777_u16.to_le_bytes());
    assert_eq!(Records::new(&bytes, 1).map(code).collect::<Vec<_>>(), [Some(FormatErrorCode::Unsupported)]);
    bytes[2] = 1;
    assert_eq!(Records::new(&bytes, 1).collect::<Vec<_>>(), [Ok(Record::Unknown(777))]);
    assert_eq!(Records::new(&bytes, 0).map(code).collect::<Vec<_>>(), [Some(FormatErrorCode::Range)]);
    assert_eq!(Records::new(&bytes, 2).filter(Result::is_err).count(), 1);
    // A location with the greatest numbers does not overflow.
    let raw = RawLocation::read_from_bytes(&[0xff; 16]).expect("16 bytes");
    assert!(Location::from_raw(&raw).offset() > 0 && Location::from_raw(&raw).bytes() > 0);
}
