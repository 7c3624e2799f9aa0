//! Methods that need the prompt: adapters that are fitted to it, and clusters that are made of its queries.

use std::path::{Path, PathBuf};

use stratakv::Durability;
use stratakv::options::CachePolicy;
use stratakv_llama::kv::backend::{KvOptions, open};
use stratakv_llama::kv::{KvCache, KvDType};
use stratakv_llama::model::{LogitPositions, Model};
use stratakv_llama::recall;

fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/recall-tiny")
}

fn options(policy: &str, device: &Path) -> KvOptions {
    KvOptions {
        policy: policy.parse().unwrap(),
        adapters: None,
        dense_layers: 0,
        cache_mib: 0,
        cache_policy: CachePolicy::COST_EFFECTIVE,
        summaries: stratakv::SummaryResidency::Resident,
        budget: "1/4".parse().unwrap(),
        group_tokens: 4,
        codec: stratakv::layout::PlaneCodec::Raw,
        devices: vec![device.to_path_buf()],
        memory_limit: Some(32 << 20),
        read_ahead: false,
        durability: Durability::Sync,
        profile_queries: 128,
        read_only: false,
        calibrate: true,
        store_clusters: false,
    }
}

fn prompt(task: &str) -> recall::Prompt {
    let tasks = [task.to_owned()];
    recall::load(&fixture().join("prompts.jsonl.gz"), &tasks, &[1024], 1).unwrap().remove(0)
}

#[test]
fn an_adapter_is_fitted_to_the_first_prompt_and_found_in_the_store_later() {
    let (dir, model) = (tempfile::tempdir().unwrap(), Model::load(&fixture()).unwrap());
    let options = options("tck:64", dir.path());
    for (task, session) in [("MK", "a"), ("MKD", "b")] {
        let prompt = prompt(task);
        let (ids, first) = (&prompt.prompt[..prompt.query_start], session == "a");
        let backend = open(&options, model.kv_geometry(KvDType::F16), [7; 32]).unwrap();
        let mut cache = backend.session(session, &|_, _| panic!("no clusters")).unwrap();
        assert_eq!(cache.wants_queries(), first);
        model.prefill(ids, &mut [&mut cache], LogitPositions::Last, &|_| ()).unwrap();
        cache.commit(ids, b"state").unwrap();
        let note = cache.method_note().map(str::to_owned);
        assert_eq!(note.is_some_and(|note| note.starts_with("tck-64 was fitted to 1019 tokens")), first);
        assert!(!cache.own_drift().unwrap().is_empty(), "codes of keys are in use");
        Box::new(cache).finish(true).unwrap();
        backend.close().unwrap();

        // Another process finds the adapter, and answers from fewer tokens than there are.
        let backend = open(&options, model.kv_geometry(KvDType::F16), [7; 32]).unwrap();
        let mut cache = backend.session(session, &|_, _| panic!("no clusters")).unwrap();
        let answers = recall::answer(&model, &prompt, &mut cache).unwrap();
        assert!(!answers.predicted.is_empty());
        assert!(!first || prompt.item_accuracy(&answers.predicted) == 1.0, "{:?}", answers.predicted);
        assert!(cache.method_note().is_none() && cache.stats().bytes_read_per_step() > 0);
        drop(cache);
        backend.close().unwrap();
    }
}

#[test]
fn low_rank_adapters_are_fitted_too_and_short_prompts_select_by_sign_bits() {
    let model = Model::load(&fixture()).unwrap();
    let prompt = prompt("MK");
    for (policy, tokens, begins) in [
        ("kvswap:8", 1019, "kvswap-8 was fitted"),
        ("infinigen:8", 1019, "infinigen-8 was fitted"),
        ("tck:64", 500, "sign bits, because tck-64 needs 512 tokens"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(&options(policy, dir.path()), model.kv_geometry(KvDType::F16), [7; 32]).unwrap();
        let mut cache = backend.create("").unwrap();
        let ids = &prompt.prompt[prompt.query_start - tokens..prompt.query_start];
        model.prefill(ids, &mut [&mut cache], LogitPositions::Nothing, &|_| ()).unwrap();
        cache.commit(ids, b"").unwrap();
        assert!(cache.method_note().is_some_and(|note| note.starts_with(begins)), "{:?}", cache.method_note());
        model.decode(5, &mut cache).unwrap();
        let (asked, all) = (cache.asked_bytes(), cache.stats().kv_bytes_total);
        assert!(asked > 0 && asked < all * 3 / 4, "{policy} selects: {asked} of {all}");
        drop(cache);
        backend.close().unwrap();
    }
}

#[test]
fn a_session_that_begins_with_a_short_prompt_gets_codes_once_it_has_enough_tokens() {
    let (dir, model) = (tempfile::tempdir().unwrap(), Model::load(&fixture()).unwrap());
    let prompt = prompt("MK");
    let ids = &prompt.prompt[..prompt.query_start];
    let begin = |cache: &mut stratakv_llama::kv::store::StoreKv| {
        model.prefill(&ids[..200], &mut [&mut *cache], LogitPositions::Last, &|_| ()).unwrap();
        cache.commit(&ids[..200], b"").unwrap();
    };
    let extend = |cache: &mut stratakv_llama::kv::store::StoreKv, tokens: std::ops::Range<usize>| {
        model.extend(&ids[tokens.clone()], cache, &|_| ()).unwrap();
        cache.commit(&ids[tokens], b"").unwrap();
        cache.method_note().unwrap().to_owned()
    };
    let open = || open(&options("tck:64", dir.path()), model.kv_geometry(KvDType::F16), [7; 32]).unwrap();
    let (backend, waits) = (open(), "sign bits, because tck-64 needs 512 tokens");
    let mut cache = backend.session("s", &|_, _| panic!("no clusters")).unwrap();
    begin(&mut cache);
    assert!(cache.method_note().unwrap().starts_with(waits));
    assert!(extend(&mut cache, 200..400).starts_with(waits));
    Box::new(cache).finish(true).unwrap();
    backend.close().unwrap();

    // A sample lasts as long as its process.
    let backend = open();
    let mut cache = backend.session("s", &|_, _| panic!("no clusters")).unwrap();
    assert!(extend(&mut cache, 400..500).starts_with(waits));
    for &id in &ids[500..520] {
        model.decode(id, &mut cache).unwrap();
    }
    cache.commit(&ids[500..520], b"").unwrap();
    assert!(extend(&mut cache, 520..ids.len()).starts_with("tck-64 was fitted to 619 tokens"));
    assert!(!cache.wants_queries() && !cache.own_drift().unwrap().is_empty(), "codes of keys are in use");
    let answers = recall::answer(&model, &prompt, &mut cache).unwrap();
    assert_eq!(prompt.item_accuracy(&answers.predicted), 1.0, "{:?}", answers.predicted);
    Box::new(cache).finish(true).unwrap();
    backend.close().unwrap();

    let backend = open();
    let cache = backend.session("s", &|_, _| panic!("no clusters")).unwrap();
    assert!(!cache.wants_queries() && cache.method_note().is_none(), "the store has the adapter");
    drop(cache);
    backend.close().unwrap();
}

#[test]
fn clusters_of_sessions_are_made_of_queries_before_and_after_a_restart() {
    let (dir, model) = (tempfile::tempdir().unwrap(), Model::load(&fixture()).unwrap());
    let prompt = prompt("MK");
    let ids = &prompt.prompt[..prompt.query_start];
    let options = options("swarm:8", dir.path());
    let backend = open(&options, model.kv_geometry(KvDType::F16), [7; 32]).unwrap();
    let mut cache = backend.session("s", &|_, _| panic!("a new session")).unwrap();
    model.prefill(ids, &mut [&mut cache], LogitPositions::Last, &|_| ()).unwrap();
    cache.commit(ids, b"").unwrap();
    let first = cache.profile_queries().unwrap().clone();
    assert_eq!(first.count(), 128);
    Box::new(cache).finish(true).unwrap();
    backend.close().unwrap();

    let backend = open(&options, model.kv_geometry(KvDType::F16), [7; 32]).unwrap();
    let replay = |ids: &[u32], cache: &mut stratakv_llama::kv::store::StoreKv| -> anyhow::Result<()> {
        assert_eq!((ids.len(), cache.len()), (128, 1019 - 128));
        ids.iter().try_for_each(|&id| model.decode(id, cache).map(drop))
    };
    let cache = backend.session("s", &replay).unwrap();
    let second = cache.profile_queries().unwrap();
    assert_eq!((second.count(), cache.len()), (128, 1019));
    // Selected attention replays the queries nearly as they were. The first layer's depend on no attention.
    let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-3);
    assert!(first.of(0).iter().zip(second.of(0)).all(|(a, b)| close(a, b)));
    drop(cache);
    backend.close().unwrap();
}
