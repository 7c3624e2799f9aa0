//! The cache in a store equals the cache in memory, reads as little as promised, and counts what the devices read.

use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use stratakv::Durability;
use stratakv::options::CachePolicy;
use stratakv_llama::kv::backend::{Backend, KvOptions, open};
use stratakv_llama::kv::memory::MemoryPolicy;
use stratakv_llama::kv::store::StoreKv;
use stratakv_llama::kv::{KvCache, KvDType, KvGeometry, KvStats, LayerGeometry, MemoryKv, Predict};
use stratakv_llama::model::{LogitPositions, Model};
use stratakv_llama::recall::{self, ProfileSource, RecallRun};

fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/recall-tiny")
}

fn options(policy: &str, devices: &[&Path]) -> KvOptions {
    KvOptions {
        policy: policy.parse().unwrap(),
        adapters: None,
        dense_layers: 0,
        cache_mib: 0,
        cache_policy: CachePolicy::COST_EFFECTIVE,
        summaries: stratakv::SummaryResidency::Resident,
        budget: "1/13".parse().unwrap(),
        group_tokens: 4,
        codec: stratakv::layout::PlaneCodec::Raw,
        devices: devices.iter().map(|d| d.to_path_buf()).collect(),
        memory_limit: Some(16 << 20),
        read_ahead: false,
        durability: Durability::Sync,
        profile_queries: 128,
        read_only: false,
        calibrate: false,
        store_clusters: false,
    }
}

fn recall_with(options: &KvOptions, dtype: KvDType, limit: usize) -> (recall::Report, Vec<String>) {
    let model = Model::load(&fixture()).unwrap();
    let prompts = recall::load(&fixture().join("prompts.jsonl.gz"), &[], &[1024], limit).unwrap();
    let backend = open(options, model.kv_geometry(dtype), [7; 32]).unwrap();
    let bar = ProgressBar::hidden();
    let run = RecallRun {
        model: &model,
        prompts: &prompts,
        policy: (options.policy.name(), "1/13"),
        prefill: None,
        questions: None,
        profile: backend.needs_queries().then_some(ProfileSource::Last(128)),
        bar: &bar,
    };
    let report = run
        .run(
            || backend.in_memory(),
            |prompt| backend.create(&prompt.id),
            |cache| backend.fork(cache),
            |_, cache| {
                let (completed, planned) = (cache.stats().bytes_read, cache.asked_bytes());
                // Clusters are built from all keys, which are read when the selector is attached.
                let is_planned = completed == planned || backend.needs_queries() && completed > planned;
                assert!(is_planned, "{completed} bytes completed, {planned} planned");
                Box::new(cache).finish(false)
            },
        )
        .unwrap();
    let notes = backend.notes(report.steps());
    backend.close().unwrap();
    // Deletions are durable when the store is closed.
    let again = open(options, model.kv_geometry(dtype), [7; 32]).unwrap();
    assert_eq!(again.status().sequences, 0);
    (report, notes)
}

#[test]
fn clusters_are_built_once_the_prompt_is_committed() {
    let dir = tempfile::tempdir().unwrap();
    let (report, _) = recall_with(&options("dynakv:4", &[dir.path()]), KvDType::F16, 2);
    let items: f64 = report.cells.iter().map(|cell| cell.accuracy).sum::<f64>() / report.cells.len() as f64;
    // A window of the same budget answers 6 % of the items.
    assert!(items > 0.5, "{items}");
    for cell in &report.cells {
        assert!(cell.kv_bytes_read_per_step < cell.kv_bytes_total, "{}", cell.task);
    }
}

#[test]
fn full_attention_through_the_store_is_full_attention() {
    for dtype in [KvDType::F32, KvDType::F16, KvDType::Bf16] {
        let dir = tempfile::tempdir().unwrap();
        let (report, notes) = recall_with(&options("full", &[dir.path()]), dtype, 2);
        assert_eq!(report.cells.iter().map(|c| c.n).sum::<usize>(), 10);
        for cell in &report.cells {
            assert_eq!(cell.same_answers, cell.n, "{} at {dtype:?}", cell.task);
            assert_eq!(cell.logit_difference_max, 0.0, "{} at {dtype:?}", cell.task);
            let share = cell.kv_bytes_read_per_step as f64 / cell.kv_bytes_total as f64;
            assert!(share > 0.9 && share < 1.0, "{share} of the KV read per step");
        }
        assert!(notes.iter().any(|n| n.contains("driver")) && notes.iter().any(|n| n.contains("/proc/self/io")));
    }
}

/// Answers one prompt in groups of 8 tokens, whose blocks fill 4 KiB pages. Returns the logits and the costs.
fn answers(policy: &str, dense_layers: usize, read_ahead: bool) -> (Vec<Vec<f32>>, KvStats) {
    answers_in_groups(8, policy, dense_layers, read_ahead)
}

/// Answers one prompt in groups of `group_tokens`.
fn answers_in_groups(
    group_tokens: usize,
    policy: &str,
    dense_layers: usize,
    read_ahead: bool,
) -> (Vec<Vec<f32>>, KvStats) {
    let memory_limit = Some(32 << 20);
    answers_with(KvOptions { dense_layers, group_tokens, memory_limit, read_ahead, ..options(policy, &[]) })
}

/// Answers one prompt with these options, in a directory of its own.
fn answers_with(options: KvOptions) -> (Vec<Vec<f32>>, KvStats) {
    let dir = tempfile::tempdir().unwrap();
    let options = KvOptions { devices: vec![dir.path().to_path_buf()], ..options };
    let resident = options.summaries == stratakv::SummaryResidency::Resident;
    let model = Model::load(&fixture()).unwrap();
    let prompts = recall::load(&fixture().join("prompts.jsonl.gz"), &[], &[1024], 1).unwrap();
    let rope = options.policy.rank().map(|_| model.config().rope().unwrap());
    let geometry = KvGeometry { rope, ..model.kv_geometry(KvDType::F16) };
    let backend = open(&options, geometry, [7; 32]).unwrap();
    let (mut logits, mut all) = (Vec::new(), KvStats::default());
    for prompt in prompts.iter().take(1) {
        let mut cache = backend.create(&prompt.id).unwrap();
        let ids = &prompt.prompt[..prompt.query_start];
        model.prefill(ids, &mut [&mut cache], LogitPositions::Nothing, &|_| {}).unwrap();
        cache.commit(ids, b"").unwrap();
        let before = cache.stats().bytes_read;
        logits.extend(recall::answer(&model, prompt, &mut cache).unwrap().logits);
        let stats = cache.stats();
        all.bytes_read += stats.bytes_read - before;
        if let Some(report) = stats.pipeline {
            assert_eq!(report.layers, stats.steps * 4);
            // The report does not count summaries that were read on demand.
            let (read, reported) = (stats.bytes_read - before, report.read_bytes + report.record_bytes);
            assert!(read == reported || !resident && read > reported, "plan and completions: {read}, {report:?}");
            *all.pipeline.get_or_insert_default() += report;
        }
        Box::new(cache).finish(false).unwrap();
    }
    (logits, all)
}

#[test]
fn prefetching_gives_the_same_logits_and_accounts_for_every_byte() {
    for (policy, dense) in
        [("full", 0), ("window", 0), ("minmax:raw", 1), ("signs", 0), ("leoam:raw", 0), ("oracle", 2)]
    {
        let (plain, off) = answers(policy, dense, false);
        let (ahead, on) = answers(policy, dense, true);
        let case = format!("{policy}: {:?}", on.pipeline);
        assert!(!plain.is_empty() && plain == ahead, "{case}");
        let (report, none) = (on.pipeline.unwrap(), off.pipeline);
        assert!(none.is_none() && report.recall() > 0.0 && report.recall() <= 1.0, "{case}");
        assert!(report.prefetched > 0 && report.hidden_share() <= 1.0, "{case}");
        // Each selected block is read once, by prefetch or on demand. All other reads were wasted.
        assert_eq!(on.bytes_read, off.bytes_read + report.wasted_bytes, "{case}");
        if policy == "full" {
            assert_eq!((report.recall(), report.wasted_bytes), (1.0, 0), "{case}");
        }
    }
}

/// The place of the bounds and the cache of blocks change the bytes that are read, and no logit.
#[test]
fn bounds_on_disk_and_blocks_in_memory_change_no_logit() {
    for policy in ["minmax:raw", "leoam:raw"] {
        let plain =
            KvOptions { dense_layers: 1, group_tokens: 8, memory_limit: Some(32 << 20), ..options(policy, &[]) };
        let (expected, read) = answers_with(plain.clone());
        for read_ahead in [false, true] {
            let streamed = KvOptions { summaries: stratakv::SummaryResidency::Streamed, read_ahead, ..plain.clone() };
            let (logits, stats) = answers_with(streamed);
            assert!(!logits.is_empty() && logits == expected, "{policy}");
            assert!(stats.bytes_read > read.bytes_read, "bounds are read from disk");
            assert!(stats.pipeline.is_none_or(|report| report.record_bytes > 0), "{:?}", stats.pipeline);
        }
        let (logits, stats) = answers_with(KvOptions { cache_mib: 8, ..plain });
        assert!(logits == expected && stats.bytes_read < read.bytes_read / 2, "{} bytes", stats.bytes_read);
    }
}

#[test]
fn reconstructed_keys_of_full_rank_answer_alike_at_half_the_bytes() {
    // Groups of 16 make planes of whole pages, so that values are half of the bytes on any device.
    let (exact, read) = answers_in_groups(16, "shadowkv", 0, false);
    let (rebuilt, half) = answers_in_groups(16, "shadowkv:128", 0, false);
    let furthest = exact.iter().flatten().zip(rebuilt.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(!exact.is_empty() && furthest < 0.5, "logits differ by {furthest}");
    // It is a little less than half, because outliers are not read and new tokens are exact.
    let share = half.bytes_read as f64 / read.bytes_read as f64;
    assert!(share > 0.3 && share <= 0.5, "{share} of {} bytes", read.bytes_read);
    // Prefetching gives the same logits. Wasted reads count only values.
    let (ahead, on) = answers_in_groups(16, "shadowkv:128", 0, true);
    let wasted = on.pipeline.map_or(0, |report| report.wasted_bytes);
    assert!(ahead == rebuilt && on.bytes_read == half.bytes_read + wasted, "{:?}", on.pipeline);
}

#[test]
fn bounds_find_the_answers_and_read_few_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (report, _) = recall_with(&options("minmax:raw", &[dir.path()]), KvDType::F16, 2);
    let (_, accuracy, full) = report.means()[0];
    assert!(full == 1.0 && accuracy >= 0.9, "full {full}, min/max {accuracy}");
    for cell in &report.cells {
        // The bounds of a group of four tokens are two rows of K, a quarter of the group's K and V.
        let summaries = cell.kv_bytes_total / 4;
        assert!(cell.kv_bytes_read_per_step <= cell.kv_bytes_total / 10 + summaries, "{}", cell.task);
        // Two blocks share a page, so a step reads at most twice the budget.
        assert!(cell.kv_bytes_read_per_step <= 2 * cell.kv_bytes_total / 13, "{}", cell.task);
        assert!(cell.resident_bytes_peak <= 16 << 20);
    }
}

#[test]
fn two_devices_share_the_sequence() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut options = options("full", &[one.path(), two.path()]);
    // With little memory frames are small, and they alternate between the devices.
    options.memory_limit = Some(8 << 20);
    let backend = open(&options, geometry(None), [1; 32]).unwrap();
    let mut cache = backend.session("s", &|_, _| Ok(())).unwrap();
    let mut memory = MemoryKv::new(geometry(None), MemoryPolicy::Full);
    let mut grouped = memory.clone().with_groups(options.group_tokens).unwrap();
    fill(&mut [&mut cache, &mut memory, &mut grouped], 0, 6000);
    cache.commit(&vec![1; 6000], b"x").unwrap();
    same(&mut cache, &mut memory);
    within(0.0, &mut cache, &mut grouped);
    for device in backend.status().devices {
        assert!(device.counters.read_bytes > 1 << 20, "{device:?}");
    }
}

fn geometry(window: Option<usize>) -> KvGeometry {
    let layer = |window| LayerGeometry { kv_heads: 2, head_dim: 64, window };
    KvGeometry { layers: vec![layer(None), layer(window)], query_heads: 4, scale: 0.2, dtype: KvDType::F16, rope: None }
}

/// Returns values that f16 holds exactly, different at every position.
fn row(layer: usize, token: usize, plane: usize) -> impl Iterator<Item = f32> {
    (0..128).map(move |i| {
        let x = ((layer * 31 + token * 7 + plane * 3 + i) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((x >> 56) as f32 - 128.0) / 64.0
    })
}

fn fill(caches: &mut [&mut dyn KvCache], first: usize, count: usize) {
    for layer in 0..2 {
        let plane = |plane| (first..first + count).flat_map(|t| row(layer, t, plane)).collect::<Vec<f32>>();
        let (keys, values) = (plane(0), plane(1));
        for cache in caches.iter_mut() {
            cache.append(layer, &keys, &values, count).unwrap();
        }
    }
}

fn same(a: &mut dyn KvCache, b: &mut dyn KvCache) {
    within(1e-4, a, b);
}

fn within(tolerance: f32, a: &mut dyn KvCache, b: &mut dyn KvCache) {
    let queries: Vec<f32> = row(9, 9, 9).chain(row(8, 8, 8)).collect();
    for layer in 0..2 {
        let (mut x, mut y) = (vec![0.0; 256], vec![0.0; 256]);
        a.attend(layer, &queries, &mut x).unwrap();
        b.attend(layer, &queries, &mut y).unwrap();
        for (x, y) in x.iter().zip(&y) {
            assert!((x - y).abs() <= tolerance, "layer {layer}: {x} {y}");
        }
    }
}

#[test]
fn the_window_policy_equals_the_one_in_memory_at_whole_groups() {
    for window in [None, Some(100)] {
        let dir = tempfile::tempdir().unwrap();
        let mut options = options("window", &[dir.path()]);
        options.budget = "64t".parse().unwrap();
        let backend = open(&options, geometry(window), [1; 32]).unwrap();
        let mut cache = backend.create("").unwrap();
        let policy = MemoryPolicy::Window { sinks: 4, budget: options.budget };
        let mut memory = MemoryKv::new(geometry(window), policy);
        fill(&mut [&mut cache, &mut memory], 0, 1000);
        // The budget and the length are whole groups, so both attend to the same tokens.
        same(&mut cache, &mut memory);
        for token in 1000..1004 {
            fill(&mut [&mut cache, &mut memory], token, 1);
        }
        same(&mut cache, &mut memory);
        for budget in ["1t", "3t", "5t", "9t"] {
            options.budget = budget.parse().unwrap();
            let backend = {
                drop(cache);
                backend_again(&options, geometry(window), dir.path())
            };
            cache = backend.create("").unwrap();
            for token in 0..30 {
                fill(&mut [&mut cache], token, 1);
                let mut out = vec![0.0; 256];
                for layer in 0..2 {
                    cache.attend(layer, &[0.1; 256], &mut out).unwrap();
                }
            }
        }
    }
}

/// Opens another store next to the first one.
fn backend_again(options: &KvOptions, geometry: KvGeometry, beside: &Path) -> Backend {
    let dir = beside.with_extension(options.budget.to_string());
    std::fs::create_dir(&dir).unwrap();
    let backend = open(&KvOptions { devices: vec![dir.clone()], ..options.clone() }, geometry, [1; 32]).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    backend
}

#[test]
fn a_session_continues_at_its_last_commit() {
    let dir = tempfile::tempdir().unwrap();
    let options = options("full", &[dir.path()]);
    let mut memory = MemoryKv::new(geometry(Some(50)), MemoryPolicy::Full);
    let mut grouped = memory.clone().with_groups(options.group_tokens).unwrap();
    for round in 0..4_u32 {
        let backend = open(&options, geometry(Some(50)), [1; 32]).unwrap();
        let mut cache = backend.session("a b/c", &|_, _| Ok(())).unwrap();
        let held = cache.len();
        assert_eq!(held, round as usize * 137);
        match cache.committed().unwrap() {
            None => assert_eq!(round, 0),
            Some(committed) => {
                assert_eq!(committed.ids, (0..held as u32).collect::<Vec<_>>());
                assert_eq!(committed.state, round.to_le_bytes());
                same(&mut cache, &mut memory);
                within(0.0, &mut cache, &mut grouped);
            }
        }
        fill(&mut [&mut cache, &mut memory, &mut grouped], held, 137);
        within(0.0, &mut cache, &mut grouped);
        let ids: Vec<u32> = (held as u32..held as u32 + 137).collect();
        assert!(cache.commit(&ids[1..], b"").unwrap_err().to_string().contains("names"));
        cache.commit(&ids, &(round + 1).to_le_bytes()).unwrap();
        fill(&mut [&mut cache], held + 137, 9);
        Box::new(cache).finish(true).unwrap();
        backend.close().unwrap();
    }
    for (geometry, group, print, needle) in [
        (KvGeometry { dtype: KvDType::Bf16, ..geometry(Some(50)) }, 4, 1, "geometry"),
        (geometry(Some(50)), 8, 1, "geometry"),
        (geometry(Some(51)), 4, 1, "geometry"),
        (geometry(Some(50)), 4, 2, "fingerprint"),
    ] {
        let other = KvOptions { group_tokens: group, ..options.clone() };
        let backend = open(&other, geometry, [print; 32]).unwrap();
        let error = format!("{:#}", backend.session("a b/c", &|_, _| Ok(())).map(|_| ()).unwrap_err());
        assert!(error.contains("LayoutMismatch") && error.contains(needle), "{error}");
    }
}

#[test]
fn a_memory_limit_that_is_too_small_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options("full", &[dir.path()]);
    options.memory_limit = Some(1 << 20);
    let error = open(&options, geometry(None), [1; 32]).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("Configuration") && error.contains("memory_limit"), "{error}");
}

#[test]
fn tokens_that_follow_others_attend_as_in_decode_steps() {
    let model = Model::load(&fixture()).unwrap();
    let geometry = model.kv_geometry(KvDType::F16);
    let ids: Vec<u32> = (0..400).map(|at| 3 + (at * at * 7 + at) % 240).collect();
    let (prompt, more) = ids.split_at(310);
    let logits = |cache: &mut dyn KvCache, at_once: bool| {
        model.prefill(prompt, &mut [&mut *cache], LogitPositions::Nothing, &|_| ()).unwrap();
        cache.commit(prompt, b"a state").unwrap();
        let logits = if at_once {
            let passed = std::cell::Cell::new(0);
            let logits = model.extend(more, cache, &|tokens| passed.set(passed.get() + tokens)).unwrap();
            assert_eq!(passed.get(), more.len() * model.config().layers());
            logits
        } else {
            more.iter().map(|&id| model.decode(id, cache).unwrap()).last().unwrap()
        };
        assert_eq!(cache.len(), ids.len());
        cache.commit(more, b"another state").unwrap();
        assert_eq!(cache.committed().unwrap().unwrap().ids, ids);
        logits
    };
    let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-2);
    let memory = |at_once| logits(&mut MemoryKv::new(geometry.clone(), MemoryPolicy::Full), at_once);
    assert!(close(&memory(true), &memory(false)));
    for policy in ["full", "minmax", "signs"] {
        let stored = |at_once| {
            let dir = tempfile::tempdir().unwrap();
            let backend = open(&options(policy, &[dir.path()]), geometry.clone(), [7; 32]).unwrap();
            let mut cache = backend.create("s").unwrap();
            let logits = logits(&mut cache, at_once);
            Box::new(cache).finish(true).unwrap();
            backend.close().unwrap();
            logits
        };
        assert!(close(&stored(true), &stored(false)), "{policy}");
    }
    let mut full = MemoryKv::new(geometry, MemoryPolicy::Full);
    assert!(model.extend(&[], &mut full, &|_| ()).is_err());
    assert!(model.extend(&[999], &mut full, &|_| ()).is_err());
}

#[test]
fn tokens_of_a_prompt_that_goes_on_are_no_steps_of_the_trial_of_predictions() {
    let directory = tempfile::tempdir().unwrap();
    let layer = LayerGeometry { kv_heads: 2, head_dim: 64, window: None };
    let dtype = KvDType::F16;
    let geometry = KvGeometry { layers: vec![layer; 2], query_heads: 4, scale: 0.125, dtype, rope: None };
    let options = KvOptions { read_ahead: true, ..options("minmax", &[directory.path()]) };
    let backend = open(&options, geometry, [7; 32]).unwrap();
    let mut cache = backend.create("s").unwrap();
    let (rows, query, mut out) = ([0.5; 2 * 64], [0.5; 4 * 64], [0.0; 4 * 64]);
    // More tokens than the trial measures steps of one kind.
    for layer in 0..2 {
        for _ in 0..40 {
            cache.append(layer, &rows, &rows, 1).unwrap();
            cache.attend(layer, &query, &mut out).unwrap();
        }
    }
    let predicted = |cache: &StoreKv| cache.stats().pipeline.unwrap().predicted_layers;
    for step in 0..10 {
        let before = predicted(&cache);
        for layer in 0..2 {
            cache.append(layer, &rows, &rows, 1).unwrap();
            let next = || Ok(query.to_vec());
            let predict: Option<&Predict<'_>> = if layer == 0 { Some(&next) } else { None };
            cache.prepare(layer, &query, predict).unwrap();
            cache.attend(layer, &query, &mut out).unwrap();
        }
        assert_eq!(predicted(&cache) - before, u64::from(step < 8), "step {step}");
    }
    Box::new(cache).finish(false).unwrap();
    backend.close().unwrap();
}
