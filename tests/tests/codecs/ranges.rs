//! Ranges and tails with numbers that a codec cannot have, under valid checksums, in stores and in exports.

use crate::model::{Layer, Shape, bytes_of, element};
use crate::stores::{image_of, open, stored};
use half::{bf16, f16};
use std::path::Path;
use stratakv::codec::{Codec, encode};
use stratakv::export::ImportOptions;
use stratakv::layout::PlaneCodec;
use stratakv::{DType, ErrorKind, OpenSequence, SelectRequest, TensorView};
use stratakv_tests::damage::seal;
use stratakv_tests::disk::{check, fast_scratch};

/// Both readers report ranges that are not finite, under valid checksums, as damage with a place.
#[test]
fn ranges_that_are_not_finite_are_damage_with_a_place() {
    use stratakv_format::checksum::PlaneIdentity;
    use stratakv_format::frame::{FrameHeader, KIND_GROUPS};
    use zerocopy::FromBytes;
    let layer = Layer { heads: 2, key_dim: 64, value_dim: 64, window: None, codecs: [PlaneCodec::Int8; 2] };
    let shape = Shape { layers: vec![layer], dtype: DType::F16, group: 8, separate: false };
    let (_scratch, dirs, model) = stored(&shape, 64);
    // Block 3 is a K plane of 2 * (4 * 64 + 8 * 64) bytes, then V.
    for (plane, bits) in [(0_usize, f16::INFINITY), (1, f16::NAN)] {
        let codec = [Codec::Int8; 2][plane];
        let (mut wanted, geometry) = (Vec::new(), shape.plane(0, plane));
        let exact: Vec<u8> = (0..2 * 8 * 64)
            .flat_map(|at| {
                let (head, token, i) = (at / 512, at / 64 % 8, at % 64);
                bytes_of(element(24 + token as u64, 0, plane, head * 64 + i), DType::F16)
            })
            .collect();
        assert_eq!(encode(codec, &geometry, &exact, &mut wanted).expect("a plane"), codec);
        let mut image = image_of(&dirs);
        let (mut found, mut place) = (0, 0);
        for (_, name, bytes) in &mut image.files {
            if !name.starts_with("segments/") {
                continue;
            }
            let Some(at) = bytes.windows(wanted.len()).position(|window| window == wanted) else { continue };
            (found, place) = (found + 1, at);
            // The header of the frame that contains the block.
            let header = (0..at / 4096).rev().map(|page| page * 4096).find(|at| bytes[*at..].starts_with(b"SKFR"));
            let header_at = header.expect("a header");
            let header = *FrameHeader::ref_from_prefix(&bytes[header_at..]).expect("a header").0;
            let identity = |plane: &[u8], nth: u16| {
                let sequence = stratakv::SequenceId(header.sequence.get());
                let identity = PlaneIdentity::new(header.nonce.get(), sequence, KIND_GROUPS, 0, 24, 8).with_plane(nth);
                stratakv_format::PayloadChecksum::Crc64Nvme.compute(&identity, plane).to_le_bytes()
            };
            let before = identity(&wanted, plane as u16);
            bytes[at + 2..at + 4].copy_from_slice(&bits.to_le_bytes());
            let after = identity(&bytes[at..at + wanted.len()], plane as u16);
            let pages = header.header_pages.get() as usize * 4096;
            let table = &mut bytes[header_at..header_at + pages];
            let sum = table.windows(8).position(|window| window == before).expect("its checksum");
            table[sum..sum + 8].copy_from_slice(&after);
        }
        assert_eq!(found, 1);
        seal(&mut image);
        let root = fast_scratch();
        let broken = image.write(root.path()).expect("written");
        let report = check(&broken);
        let codes: Vec<&str> = report.findings.iter().map(|finding| finding.code.as_str()).collect();
        assert_eq!(codes, ["payload-codec"], "{}", report.to_text());
        assert!(report.to_text().contains(&format!("{}", place + 2)), "{}", report.to_text());

        let store = open(&broken, plane == 0);
        let mut sequence = store.open_sequence("a", OpenSequence::new()).expect("nothing of its groups is read");
        let view = sequence.select(0, SelectRequest::all()).expect("a view");
        let failed =
            store.read(&[&view]).submit().and_then(|ticket| ticket.wait()).and_then(|batch| batch.get(0).map(|_| ()));
        let error = failed.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
        let corruption = error.corruption().expect("a place");
        assert_eq!((corruption.code, corruption.offset), ("payload-codec", place as u64 + 2));
        // Reads that the sequence makes for itself.
        let cut = sequence.truncate(27).unwrap_err();
        assert!(cut.kind() == ErrorKind::Corruption && cut.corruption().is_some(), "{cut}");
        assert_eq!(sequence.export(&mut Vec::new()).unwrap_err().kind(), ErrorKind::Corruption);
        // Other groups can be read.
        let good = sequence.select(0, SelectRequest::groups(&[1, 2, 4, 5])).expect("a view");
        let batch = store.read(&[&good]).submit().and_then(|ticket| ticket.wait()).expect("read");
        for (nth, group) in [1, 2, 4, 5].into_iter().enumerate() {
            assert!(batch.get(0).and_then(|b| b.group(nth)).expect("a group").0 == model.block(0, group, 0));
        }
        drop((view, good, batch, sequence));
        store.close().expect("closed");
    }
}

/// An element of a tail is not finite or too large for the codec, under valid checksums.
#[test]
fn tails_that_cannot_be_encoded_are_damage_with_a_place() {
    use stratakv_format::checksum::PlaneIdentity;
    use stratakv_format::frame::{FrameHeader, KIND_TAIL};
    use zerocopy::FromBytes;
    let layer = Layer { heads: 1, key_dim: 64, value_dim: 64, window: None, codecs: [PlaneCodec::Int8; 2] };
    let shape = Shape { layers: vec![layer], dtype: DType::Bf16, group: 8, separate: false };
    let (_scratch, dirs, _) = stored(&shape, 50);
    // The limit is 2^126, whose upper half is 0x7e80.
    for (plane, bits, is_damage) in
        [(0_usize, 0x7fc0_u16, true), (1, 0xff7f, true), (1, 0x7e81, true), (1, 0x7e80, false)]
    {
        let wanted: Vec<u8> = (0..2 * 64)
            .flat_map(|at| bytes_of(element(48 + at / 64, 0, plane, at as usize % 64), DType::Bf16))
            .collect();
        let mut image = image_of(&dirs);
        let mut places = Vec::new();
        for (_, name, bytes) in &mut image.files {
            if !name.starts_with("segments/") {
                continue;
            }
            let Some(at) = bytes.windows(wanted.len()).position(|window| window == wanted) else { continue };
            places.push(at + 6);
            let header = (0..at / 4096).rev().map(|page| page * 4096).find(|at| bytes[*at..].starts_with(b"SKFR"));
            let header_at = header.expect("a header");
            let header = *FrameHeader::ref_from_prefix(&bytes[header_at..]).expect("a header").0;
            let checksum = |elements: &[u8]| {
                let sequence = stratakv::SequenceId(header.sequence.get());
                let identity = PlaneIdentity::new(header.nonce.get(), sequence, KIND_TAIL, 0, 48, 2);
                let identity = identity.with_plane(plane as u16);
                stratakv_format::PayloadChecksum::Crc64Nvme.compute(&identity, elements).to_le_bytes()
            };
            let before = checksum(&wanted);
            bytes[at + 6..at + 8].copy_from_slice(&bits.to_le_bytes());
            let after = checksum(&bytes[at..at + wanted.len()]);
            let pages = header.header_pages.get() as usize * 4096;
            let table = &mut bytes[header_at..header_at + pages];
            let sum = table.windows(8).position(|window| window == before).expect("its checksum");
            table[sum..sum + 8].copy_from_slice(&after);
        }
        assert_eq!(places.len(), 1);
        seal(&mut image);
        let root = fast_scratch();
        let broken = image.write(root.path()).expect("written");
        let report = check(&broken);
        let found: Vec<_> = report.findings.iter().map(|f| (f.code.as_str(), f.offset, f.tokens)).collect();
        let expected = ("payload-codec", Some(places[0] as u64), Some([48, 50]));
        assert_eq!(found, if is_damage { vec![expected] } else { vec![] }, "{bits:#x}: {}", report.to_text());
        if bits == 0x7fc0 {
            let store = open(&broken, false);
            let mut sequence = store.open_sequence("a", OpenSequence::new()).expect("its group is not complete");
            let rows = vec![0.5_f32; 6 * 64];
            let view = TensorView::token_major(&rows, 6, 1, 64);
            assert_eq!(sequence.append(0, view, view).unwrap_err().kind(), ErrorKind::Corruption);
        }
    }
}

/// Every checksum of the file is valid, but a range is not finite.
#[test]
fn exports_with_ranges_that_are_not_finite_are_refused() {
    use stratakv_format::export::{PIECE_GROUPS, PieceHeader};
    use stratakv_format::{PAGE_BYTES, Unverified};
    use zerocopy::IntoBytes;
    let layer = Layer { heads: 1, key_dim: 64, value_dim: 64, window: None, codecs: [PlaneCodec::Int4; 2] };
    let shape = Shape { layers: vec![layer], dtype: DType::Bf16, group: 8, separate: false };
    let (_scratch, dirs, _) = stored(&shape, 50);
    let store = open(&dirs, false);
    let mut file = Vec::new();
    store
        .open_sequence("a", OpenSequence::new())
        .and_then(|mut sequence| sequence.export(&mut file))
        .expect("an export");
    let nonce = u64::from_le_bytes(file[64..72].try_into().expect("8 bytes"));
    let (mut at, mut index) = (PAGE_BYTES, 0);
    while at < file.len() {
        let header = Unverified::<PieceHeader>::at_front(&file[at..], "piece").expect("a header");
        let header = *header.verify(index, nonce).expect("a valid header");
        let body = at + size_of::<PieceHeader>();
        if header.kind.get() == PIECE_GROUPS {
            // The step of a range of the second group's values.
            let block = 64 * 4 + 8 * 32 + 16 * 4 + 8 * 32;
            file[body + block + 64 * 4 + 8 * 32 + 16 * 2..][..2].copy_from_slice(&bf16::NEG_INFINITY.to_le_bytes());
            let bytes = &file[body..body + header.bytes.get() as usize];
            let sealed = PieceHeader::new(&header.piece(), index, nonce, bytes);
            file[at..body].copy_from_slice(sealed.as_bytes());
        }
        at = body + header.padded_bytes();
        index += 1;
    }
    let path = Path::new("session.skv");
    let report = kvfsck::check_reader(&file[..], file.len() as u64, path, &kvfsck::Options::default(), &());
    assert!(!report.clean && report.to_text().contains("not a finite number"), "{}", report.to_text());
    let refused = store.import(&file[..], &shape.layout(), ImportOptions::new().key("b")).unwrap_err();
    assert!(refused.kind() == ErrorKind::Corruption && refused.to_string().contains("finite"), "{refused}");
    assert!(store.open_sequence("b", OpenSequence::new()).is_err());
}
