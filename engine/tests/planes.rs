//! Values that are read without keys: half the bytes, with checksums of their own, never taken for whole blocks.

use stratakv::options::CacheOptions;
use stratakv::{
    Budget, ByteSize, CreateOptions, Durability, ErrorKind, KvLayout, OpenSequence, PlaneSet, SelectOptions,
    SelectRequest, Sequence, StoredSummary, TensorView, attend,
};
use stratakv_testing::rng::noise;
use stratakv_testing::{TestStore, medium, read_bytes};

const HEADS: usize = 2;
const DIM: usize = 128;
const GROUP: usize = 8;
/// The bytes of a plane in f16: one page.
const PLANE: usize = HEADS * DIM * GROUP * 2;

fn layout(separate: bool) -> KvLayout {
    let layout = KvLayout::builder().layers(2).kv_heads(HEADS as u16).head_dim(DIM as u16).separate_planes(separate);
    layout.group_tokens(GROUP as u16).build().unwrap()
}

fn append(sequence: &mut Sequence, tokens: std::ops::Range<usize>, key_dim: usize, value_dim: usize) {
    for layer in 0..2 {
        let rows = |plane: usize, dim: usize| -> Vec<f32> {
            tokens.clone().flat_map(|t| noise((layer * 2 + plane) * 100_000 + t, HEADS * dim)).collect()
        };
        let (keys, values) = (rows(0, key_dim), rows(1, value_dim));
        let keys = TensorView::token_major(&keys, tokens.len(), HEADS, key_dim);
        let values = TensorView::token_major(&values, tokens.len(), HEADS, value_dim);
        sequence.append(layer, keys, values).unwrap();
    }
}

#[test]
fn values_alone_are_half_the_bytes_and_the_same_values() {
    for separate in [false, true] {
        let mut store = TestStore::new(medium());
        let mut sequence = store.create_sequence(&layout(separate), CreateOptions::new().key("a")).unwrap();
        append(&mut sequence, 0..203, DIM, DIM);
        sequence.commit(Durability::Sync).unwrap();
        drop(sequence);
        store.reopen();
        let sequence = store.open_sequence("a", OpenSequence::new()).unwrap();
        let groups = [0, 1, 2, 7, 11, 12, 24];
        for layer in 0..2 {
            let whole = sequence.select(layer, SelectRequest::groups(&groups)).unwrap();
            let values = sequence.select(layer, SelectRequest::groups(&groups).planes(PlaneSet::ValuesOnly)).unwrap();
            let before = read_bytes(&store);
            let ticket = store.read(&[&whole]).submit().unwrap();
            assert_eq!(ticket.device_bytes(), (2 * PLANE * groups.len()) as u64);
            let all = ticket.wait().unwrap();
            let between = read_bytes(&store);
            let ticket = store.read(&[&values]).submit().unwrap();
            assert_eq!(ticket.device_bytes(), (PLANE * groups.len()) as u64, "separate planes: {separate}");
            assert_eq!(ticket.selected_bytes(), ticket.device_bytes());
            let alone = ticket.wait().unwrap();
            let after = read_bytes(&store);
            assert_eq!((after - between) * 2, between - before);
            for nth in 0..groups.len() {
                let (k, v) = alone.get(0).unwrap().group(nth).unwrap();
                assert!(k.is_empty() && v == all.get(0).unwrap().group(nth).unwrap().1, "group {nth}");
            }
            let mut out = vec![0.0; 2 * HEADS * DIM];
            let query = noise(1, 2 * HEADS * DIM);
            let refused = attend(&query, &values, alone.get(0).unwrap(), &mut out).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{refused}");
        }
    }
}

#[test]
fn what_is_still_in_memory_gives_values_alone_too() {
    let store = TestStore::new(medium());
    let mut sequence =
        store.create_sequence(&layout(false), CreateOptions::new().store_summary(StoredSummary::MinMax)).unwrap();
    append(&mut sequence, 0..43, DIM, DIM);
    let query = noise(1, 2 * HEADS * DIM);
    let select = SelectOptions::new(Budget::tokens(30)).planes(PlaneSet::ValuesOnly);
    let view = sequence.select(1, SelectRequest::query(&query).options(select)).unwrap();
    let groups: Vec<u64> = view.groups().collect();
    assert_eq!(groups.len(), 3, "and a tail of three tokens");
    let whole = sequence.select(1, SelectRequest::groups(&groups)).unwrap();
    let batch = store.read(&[&view, &whole]).submit().unwrap().wait().unwrap();
    for nth in 0..groups.len() {
        let (k, v) = batch.get(0).unwrap().group(nth).unwrap();
        assert!(k.is_empty() && v == batch.get(1).unwrap().group(nth).unwrap().1);
    }
}

#[test]
fn damaged_keys_do_not_matter_to_values() {
    let mut store = TestStore::new(medium());
    let mut sequence = store.create_sequence(&layout(false), CreateOptions::new().key("a")).unwrap();
    append(&mut sequence, 0..64, DIM, DIM);
    sequence.commit(Durability::Sync).unwrap();
    let whole = sequence.select(0, SelectRequest::groups(&[3])).unwrap();
    let batch = store.read(&[&whole]).submit().unwrap().wait().unwrap();
    let planes = batch.get(0).unwrap().group(0).map(|(k, v)| [k.to_vec(), v.to_vec()]).unwrap();
    drop((batch, whole, sequence));
    store.close().unwrap();
    for (damaged, plane) in planes.iter().enumerate() {
        let files = std::fs::read_dir(store.dirs()[0].join("segments")).unwrap().map(|file| file.unwrap().path());
        let found = files.filter_map(|path| {
            let bytes = std::fs::read(&path).unwrap();
            let at = bytes.chunks(PLANE).position(|page| page == plane)?;
            Some((path, bytes, at * PLANE))
        });
        let [(path, intact, at)] = found.collect::<Vec<_>>().try_into().unwrap();
        let mut bytes = intact.clone();
        bytes[at + 77] ^= 4;
        std::fs::write(&path, &bytes).unwrap();
        store.reopen();
        let sequence = store.open_sequence("a", OpenSequence::new()).unwrap();
        let whole = sequence.select(0, SelectRequest::groups(&[3])).unwrap();
        let values = sequence.select(0, SelectRequest::groups(&[3]).planes(PlaneSet::ValuesOnly)).unwrap();
        let batch = store.read(&[&whole, &values]).submit().unwrap().wait().unwrap();
        let bad = batch.get(0).map(|_| ()).unwrap_err();
        let place = bad.corruption().unwrap();
        assert_eq!((place.code, place.offset, place.len), ("payload-checksum", at as u64, PLANE as u64));
        match damaged {
            0 => assert_eq!(batch.get(1).unwrap().group(0).unwrap().1, planes[1]),
            _ => {
                let bad = batch.get(1).map(|_| ()).unwrap_err();
                assert_eq!(bad.corruption().unwrap().offset, at as u64);
            }
        }
        drop((batch, whole, values, sequence));
        store.close().unwrap();
        std::fs::write(&path, intact).unwrap();
    }
}

#[test]
fn resident_values_and_resident_blocks_are_told_apart() {
    let cache = CacheOptions::new(ByteSize::mib(8));
    let store = TestStore::new(medium().cache(cache));
    let mut sequence = store.create_sequence(&layout(false), CreateOptions::new()).unwrap();
    append(&mut sequence, 0..160, DIM, DIM);
    sequence.commit(Durability::Sync).unwrap();
    let groups = [1, 2, 9, 14];
    let whole = sequence.select(0, SelectRequest::groups(&groups)).unwrap();
    let values = sequence.select(0, SelectRequest::groups(&groups).planes(PlaneSet::ValuesOnly)).unwrap();
    let mut seen = Vec::new();
    for (view, expected) in [(&values, 1), (&whole, 2), (&values, 0), (&whole, 0)] {
        let ticket = store.read(&[view]).submit().unwrap();
        assert_eq!(ticket.device_bytes(), (expected * PLANE * groups.len()) as u64);
        let batch = ticket.wait().unwrap();
        let planes = |nth| batch.get(0).unwrap().group(nth).map(|(k, v)| (k.to_vec(), v.to_vec())).unwrap();
        seen.push((0..groups.len()).map(planes).collect::<Vec<_>>());
    }
    assert!(seen[0] == seen[2] && seen[1] == seen[3]);
    assert!(seen[0].iter().zip(&seen[1]).all(|(alone, whole)| alone.1 == whole.1 && !whole.0.is_empty()));
}

#[test]
fn layers_without_a_v_plane_refuse() {
    let store = TestStore::new(medium());
    let layout = KvLayout::builder().layers(2).kv_heads(HEADS as u16).head_dim(DIM as u16).value_dim(0);
    let layout = layout.group_tokens(GROUP as u16).build().unwrap();
    let mut sequence = store.create_sequence(&layout, CreateOptions::new()).unwrap();
    for layer in 0..2 {
        let keys = noise(layer, 20 * HEADS * DIM);
        sequence.append(layer, TensorView::token_major(&keys, 20, HEADS, DIM), TensorView::empty(20)).unwrap();
    }
    let refused = sequence.select(0, SelectRequest::groups(&[1]).planes(PlaneSet::ValuesOnly)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    assert!(refused.to_string().contains("no V plane"), "{refused}");
    let select = SelectOptions::new(Budget::All).planes(PlaneSet::ValuesOnly);
    assert!(sequence.select(0, SelectRequest::query(&noise(2, 2 * HEADS * DIM)).options(select)).is_err());
}

#[test]
fn values_of_other_dims_and_small_blocks() {
    // K has 24 and V has 40 elements. Their planes of 384 and 640 bytes share a page with others.
    let store = TestStore::new(medium());
    let layout = KvLayout::builder().layers(2).kv_heads(HEADS as u16).head_dim(24).value_dim(40).group_tokens(4);
    let mut sequence = store.create_sequence(&layout.build().unwrap(), CreateOptions::new()).unwrap();
    append(&mut sequence, 0..90, 24, 40);
    sequence.commit(Durability::Sync).unwrap();
    let groups: Vec<u64> = (0..22).step_by(3).collect();
    let whole = sequence.select(1, SelectRequest::groups(&groups)).unwrap();
    let values = sequence.select(1, SelectRequest::groups(&groups).planes(PlaneSet::ValuesOnly)).unwrap();
    let ticket = store.read(&[&values, &whole]).submit().unwrap();
    assert_eq!(ticket.selected_bytes(), groups.len() as u64 * (640 + 1024));
    let batch = ticket.wait().unwrap();
    for nth in 0..groups.len() {
        let (k, v) = batch.get(0).unwrap().group(nth).unwrap();
        assert!(k.is_empty() && v.len() == 640 && v == batch.get(1).unwrap().group(nth).unwrap().1);
    }
}
