//! Codecs in layouts, and the feature bit of stores with such layouts.

use crate::stores::{features, image_of, open};
use stratakv::export::ImportOptions;
use stratakv::layout::PlaneCodec;
use stratakv::{CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, TensorView};
use stratakv_tests::damage::seal;
use stratakv_tests::disk::{assert_clean, check, device_dirs, fast_scratch, small_options};

#[test]
fn impossible_codecs_are_refused_by_name() {
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), 1);
    let store = open(&dirs, false);
    let layout = |codec, dtype| {
        let builder = KvLayout::builder().layers(4).kv_heads(1).head_dim(64).dtype(dtype).codec(codec);
        builder.group_tokens(8).codec_share(0.5).build().expect("a layout")
    };
    let (plain, int8) = (layout(PlaneCodec::Raw, DType::F32), layout(PlaneCodec::Int8, DType::F32));
    // A share of 0.5 encodes every second layer.
    let coded: Vec<bool> = (0..4).map(|at| int8.codecs(at).expect("a layer") == [PlaneCodec::Int8; 2]).collect();
    assert_eq!(coded, [false, true, false, true]);
    let share = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).codec_share(1.5).build().unwrap_err();
    assert_eq!((share.kind(), share.to_string().contains("codec")), (ErrorKind::InvalidArgument, true), "{share}");

    let mut sequence = store.create_sequence(&int8, CreateOptions::new().key("a")).expect("created");
    let mut rows = vec![0.5_f32; 3 * 64];
    rows[70] = 1e38;
    let view = TensorView::token_major(&rows, 3, 1, 64);
    sequence.append(0, view, view).expect("a layer without a codec takes it");
    let refused = sequence.append(1, view, view).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    assert!(refused.to_string().contains("token 1") && refused.to_string().contains("codec"), "{refused}");
    assert_eq!(sequence.layer_len(1).expect("a layer"), 0);
    drop(sequence);

    let mut sequence = store.create_sequence(&int8, CreateOptions::new().key("a")).expect("created");
    let rows = vec![0.5_f32; 20 * 64];
    for layer in 0..4 {
        let view = TensorView::token_major(&rows, 20, 1, 64);
        sequence.append(layer, view, view).expect("appended");
    }
    sequence.commit(Durability::Sync).expect("committed");
    let mut file = Vec::new();
    sequence.export(&mut file).expect("exported");
    drop(sequence);
    let mismatch = store.open_sequence("a", OpenSequence::new().layout(&plain)).unwrap_err();
    assert_eq!(
        (mismatch.kind(), mismatch.to_string().contains("codec")),
        (ErrorKind::LayoutMismatch, true),
        "{mismatch}"
    );
    let mismatch = store.import(&file[..], &plain, ImportOptions::new().key("b")).unwrap_err();
    assert_eq!(
        (mismatch.kind(), mismatch.to_string().contains("codec")),
        (ErrorKind::LayoutMismatch, true),
        "{mismatch}"
    );
}

/// The feature bit is set with the first layout that needs it and stays set. Other stores do not have it.
#[test]
fn the_feature_is_named_from_the_first_codec_on() {
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), 2);
    let store = open(&dirs, false);
    let layout = |codec| KvLayout::builder().layers(1).kv_heads(1).head_dim(64).codec(codec).build().expect("a layout");
    let rows = vec![0.25_f32; 30 * 64];
    let view = TensorView::token_major(&rows, 30, 1, 64);
    let commit = |key: &str, codec| {
        let mut sequence = store.create_sequence(&layout(codec), CreateOptions::new().key(key)).expect("created");
        sequence.append(0, view, view).expect("appended");
        sequence.commit(Durability::Sync).expect("committed");
    };
    commit("a", PlaneCodec::Raw);
    assert_eq!(features(&dirs), [1, 1]);
    commit("b", PlaneCodec::Int4);
    assert_eq!(features(&dirs), [5, 5]);
    assert!(
        store.open_sequence("b", OpenSequence::new()).and_then(|sequence| sequence.delete(Durability::Sync)).is_ok()
    );
    store.close().expect("closed");
    assert_clean(&dirs, "after codecs");
    let store = open(&dirs, false);
    assert_eq!(features(&dirs), [5, 5]);
    store.close().expect("closed");
    // Both readers report such a layout as damage if the bit is missing.
    let mut image = image_of(&dirs);
    for (_, name, bytes) in &mut image.files {
        if name.starts_with("manifest/") {
            bytes[8 + 24] &= !4;
        }
    }
    seal(&mut image);
    let root = fast_scratch();
    let dirs = image.write(root.path()).expect("written");
    let error = small_options(&dirs).open().map(|_| ()).unwrap_err();
    assert!(error.kind() == ErrorKind::Corruption && error.to_string().contains("codecs"), "{error}");
    let report = check(&dirs);
    assert!(report.to_text().contains("without the feature of codecs"), "{}", report.to_text());
}
