//! Runs every subcommand of `kvbench cluster` with tiny sizes, and checks the invariants of its JSON.

use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use std::process::{Command, Output};

fn cluster(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbench"));
    command.arg("cluster").args(arguments).output().expect("kvbench starts")
}

fn results(arguments: &[&str]) -> Vec<Value> {
    let output = cluster(&[arguments, &["--json"]].concat());
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {err}");
    out.lines().map(|line| serde_json::from_str(line).expect("a JSON object per line")).collect()
}

fn number(result: &Value, field: &str) -> f64 {
    result[field].as_f64().unwrap_or_else(|| panic!("{field} in {result}"))
}

/// Asserts that two runs gave the same figures, but for times.
fn assert_repeats(arguments: &[&str]) {
    let without_times = |mut found: Vec<Value>| {
        for result in &mut found {
            let fields = result.as_object_mut().expect("an object");
            fields
                .retain(|field, _| !field.ends_with("_s") && !field.ends_with("_us") && !field.starts_with("ratio_t"));
        }
        found
    };
    assert_eq!(without_times(results(arguments)), without_times(results(arguments)), "{arguments:?}");
}

#[test]
fn build_gives_clusters_within_their_limits() {
    let arguments = ["build", "--entries", "3000", "--queries", "96", "--heads", "2", "--dim", "16"];
    let found = results(&[&arguments[..], &["--sweep", "--normalisation", "frequency,jaccard"]].concat());
    let (kmeans, medoids) = found.split_last().expect("results");
    assert_eq!(medoids.len(), 12);
    for result in medoids {
        let limit = |field: &str| result[field].as_f64().unwrap_or(f64::INFINITY);
        assert!(number(result, "largest") <= limit("max_size"), "{result}");
        assert!(number(result, "stored_per_activated") <= limit("memberships"), "{result}");
        assert!(number(result, "stored_per_entry") >= 1.0 && number(result, "never_activated") > 0.0, "{result}");
        // A count of common queries is whole, so a mean size may be out of reach without limits.
        assert!((4.0..20.0).contains(&number(result, "mean_size")), "{result}");
        assert!(number(result, "one_radius_cpu_s") > 0.0 && number(result, "build_bytes") > 0.0, "{result}");
    }
    assert_eq!((number(kmeans, "heads"), number(kmeans, "clusters")), (2.0, 187.0), "{kmeans}");
    assert!((0.9..1.1).contains(&number(kmeans, "ratio_lloyd")), "{kmeans}");
    assert_repeats(&arguments);
}

#[test]
fn select_scores_fewer_rows_than_entries() {
    let arguments = ["select", "--entries", "1000,4000", "--clustered", "2000", "--working-set", "1MiB"];
    let arguments = [&arguments[..], &["--rounds", "2", "--dim", "32", "--queries", "64"]].concat();
    let found = results(&arguments);
    assert_eq!(found.len(), 8);
    for (result, index) in found.iter().zip(["keys", "medoids", "medoids", "centroids"].iter().cycle()) {
        assert_eq!(result["index"], *index);
        let share = number(result, "rows") / number(result, "entries");
        assert!(share == 1.0 || (0.05..0.8).contains(&share), "{result}");
        assert!(number(result, "score_us") > 0.0 && number(result, "index_bytes") == number(result, "rows") * 64.0);
    }
    assert_eq!(number(&found[0], "ratio_time"), 1.0);
    assert_repeats(&arguments);
}

#[test]
fn methods_report_their_time_and_their_memory() {
    let methods = ["dynakv:16", "clusterkv:16", "swarm:8", "pqcache:16"];
    let listed = methods.join(",");
    let arguments = ["methods", "--methods", &listed, "--entries", "640", "--new", "96", "--queries", "32"];
    let arguments = [&arguments[..], &["--working-set", "1MiB"]].concat();
    let found = results(&arguments);
    for (result, method) in found.iter().zip(methods) {
        assert_eq!(result["method"], method);
        assert!(number(result, "select_us") > 0.0 && number(result, "all_layers_token_us") > 0.0, "{result}");
        let (layer, all) = (number(result, "resident_bytes_layer"), number(result, "resident_mib_all_layers"));
        assert!((layer * 32.0 / f64::from(1 << 20) / all - 1.0).abs() < 1e-3 && layer > 0.0, "{result}");
        assert!(number(result, "select_bytes") > 0.0, "{result}");
    }
    let error = String::from_utf8_lossy(&cluster(&["methods", "--methods", "minmax"]).stderr).into_owned();
    assert!(error.contains("chooses groups"), "{error}");
    assert_repeats(&arguments);
}

#[test]
fn adapt_lowers_the_variance_and_loads_less_with_a_buffer() {
    let arguments = ["adapt", "--entries", "3000", "--prefill", "1000", "--dim", "16", "--heads", "2"];
    let arguments = [&arguments[..], &["--shift", "0.8", "--buffer", "0,16"]].concat();
    let found = results(&arguments);
    let methods: Vec<_> = found.iter().map(|result| result["method"].as_str().expect("a method")).collect();
    assert_eq!(methods, ["static", "local", "dynakv", "dynakv", "all", "all-equal"]);
    for result in &found {
        assert!(number(result, "variance") > 0.0 && number(result, "buffered") <= 2.0 * 16.0, "{result}");
        assert_eq!(number(result, "splits") > 0.0, result["method"] == "dynakv", "{result}");
        assert!(result["method"] != "dynakv" || number(result, "largest") <= 64.0, "{result}");
        assert!(number(result, "ratio_static") >= 1.0, "{result}");
    }
    assert!(number(&found[3], "loaded_entries") < number(&found[2], "loaded_entries"), "{found:?}");
    assert_eq!(number(&found[2], "buffered"), 0.0);
    assert_repeats(&arguments);
}

#[test]
fn distance_of_new_entries_is_lowest_by_co_activation() {
    let arguments = ["distance", "--entries", "1024", "--new", "128", "--window", "128", "--steps", "1,4,8"];
    let arguments = [&arguments[..], &["--recall", "0.95", "--overlap", "1", "--drift", "0.00001"]].concat();
    let found = results(&arguments);
    assert_eq!(found.len(), 3);
    for (result, steps) in found.iter().zip([1.0, 4.0, 8.0]) {
        assert_eq!((number(result, "steps"), number(result, "entries")), (steps, 1024.0 + 128.0 * steps));
        assert!(number(result, "memberships_new") >= 1.0 && number(result, "initial_distance") > 0.0, "{result}");
        assert!(number(result, "swarm") < number(result, "min_size"), "{result}");
    }
    assert_repeats(&arguments);
}

#[test]
fn layout_lengthens_runs_by_clusters() {
    let arguments = ["layout", "--entries", "4096", "--queries", "96", "--dim", "16", "--mean-size", "16"];
    let arguments = [&arguments[..], &["--kind", "kmeans,medoids"]].concat();
    let found = results(&arguments);
    assert_eq!(found.len(), 10);
    for kind in found.chunks(5) {
        let layouts: Vec<_> = kind.iter().map(|result| result["layout"].as_str().expect("a layout")).collect();
        assert_eq!(layouts, ["tokens", "groups", "scattered", "clusters", "chained"]);
        for result in kind {
            let read = number(result, "mean_run") * number(result, "requests_per_query");
            assert!((read / number(result, "entries_per_query") - 1.0).abs() < 0.01, "{result}");
            assert!(number(result, "longest_run") >= number(result, "mean_run"), "{result}");
            assert!(number(result, "activated_share") <= 1.0, "{result}");
        }
        let run = |at: usize| number(&kind[at], "mean_run");
        assert!(run(2) < run(3) && run(3) <= run(4), "{kind:?}");
    }
    assert_repeats(&arguments);
}

#[test]
fn cache_compares_policies_on_the_same_steps() {
    let arguments = ["cache", "--entries", "2048", "--queries", "128", "--dim", "16", "--capacity", "0.1,0.4"];
    let arguments = [&arguments[..], &["--kind", "kmeans,medoids"]].concat();
    let found = results(&arguments);
    assert_eq!(found.len(), 24);
    for policies in found.chunks(6) {
        let names: Vec<_> = policies.iter().map(|result| result["policy"].as_str().expect("a policy")).collect();
        assert_eq!(names, ["lru", "fifo", "cost", "cluster-aligned", "s3-fifo", "best-fixed"]);
        for result in policies {
            assert_eq!(number(result, "requests_per_step"), number(&policies[0], "requests_per_step"));
            assert!((0.0..1.0).contains(&number(result, "hit_rate")), "{result}");
            assert!(number(result, "miss_us_per_step") > 0.0, "{result}");
        }
    }
    assert!(number(&found[6], "hit_rate") > number(&found[0], "hit_rate"));
    assert_repeats(&arguments);
    // By block, clusters are not named, and policies of blocks and clusters decide alike.
    let by_block = results(&[&arguments[..], &["--by-block", "--policy", "lru,cluster-lru"]].concat());
    for policies in by_block.chunks(3) {
        assert_eq!(number(&policies[0], "hit_rate"), number(&policies[1], "hit_rate"));
    }
    let groups = results(&[&arguments[..], &["--place", "groups", "--cold", "--policy", "cost"]].concat());
    assert!(groups.len() == 8 && number(&groups[0], "hit_rate") > 0.0, "{groups:?}");
}

/// Writes a profile of one layer with 256 entries and two heads. The last 16 tokens have queries of two query heads
/// per head, each with four activated entries.
fn profile_file() -> tempfile::NamedTempFile {
    let bytes = |words: Vec<u32>| words.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
    let keys: Vec<u8> = (0..256 * 2 * 4_u32).flat_map(|at| ((at * 37 % 101) as f32).to_le_bytes()).collect();
    let offsets = bytes((0..=16).map(|query| 4 * query).collect());
    let activated = bytes((0..16).flat_map(|query| (0..4).map(move |at| query % 4 * 8 + at * 60)).collect());
    let (weights, positions) =
        ((0..64).flat_map(|_| 0.25_f32.to_le_bytes()).collect::<Vec<u8>>(), bytes((240..256).collect()));
    let queries: Vec<u8> = (0..16 * 4 * 4_u32).flat_map(|at| ((at * 53 % 17) as f32 / 8.0).to_le_bytes()).collect();
    let view = |dtype, shape: &[usize], data| TensorView::new(dtype, shape.to_vec(), data).expect("a tensor");
    let tensors = [
        ("layers.0.keys", view(Dtype::F32, &[256, 2, 4], &keys)),
        ("layers.0.offsets", view(Dtype::U32, &[17], &offsets)),
        ("layers.0.activated", view(Dtype::U32, &[64], &activated)),
        ("layers.0.weights", view(Dtype::F32, &[64], &weights)),
        ("layers.0.queries", view(Dtype::F32, &[16, 4, 4], &queries)),
        ("positions", view(Dtype::U32, &[16], &positions)),
    ];
    let about = [("format", "stratakv-profile"), ("version", "1"), ("layers", "1")];
    let about = about.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), safetensors::serialize(tensors, Some(about)).expect("a profile")).expect("write");
    file
}

#[test]
fn a_recorded_profile_is_measured_like_a_planted_one() {
    let file = profile_file();
    let of_file = |arguments: &[&str]| {
        let path = file.path().to_str().expect("a path");
        let found = results(&[arguments, &["--file", path, "--layer", "0"]].concat());
        assert!(found.iter().all(|result| result["trace"] == "layer 0" && result["entries"] == 256), "{found:?}");
        found
    };
    let build = of_file(&["build", "--mean-size", "3"]);
    assert_eq!((number(&build[0], "queries"), number(&build[1], "heads")), (16.0, 2.0));
    assert_eq!(number(&build[0], "activated_per_query"), 4.0);
    let adapt = of_file(&["adapt", "--buffer", "16"]);
    assert_eq!((adapt.len(), number(&adapt[0], "prefill")), (5, 128.0));
    let recorded = of_file(&["adapt", "--buffer", "16", "--recorded", "--retrieved", "0.5"]);
    let dynakv = recorded.iter().find(|result| result["method"] == "dynakv").expect("dynakv");
    assert_eq!((number(dynakv, "prefill"), number(dynakv, "changes") > 0.0), (240.0, true), "{dynakv}");
    assert!((0.0..=1.0).contains(&number(dynakv, "chosen_again_8")) && dynakv["chosen_again_16"].is_null(), "{dynakv}");
    assert_eq!(of_file(&["layout"]).len(), 5);
    assert_eq!(of_file(&["cache", "--mean-size", "3", "--capacity", "0.2"]).len(), 6);
}

#[test]
fn radius_clusters_each_task_by_the_radius_of_each() {
    let file = profile_file();
    let tasks = format!("planted,{}", file.path().to_str().expect("a path"));
    let arguments = ["radius", "--tasks", &tasks, "--entries", "1000", "--queries", "64", "--mean-size", "3"];
    let found = results(&arguments);
    assert_eq!(found.len(), 4);
    for result in &found {
        assert!(number(result, "requests") > 0.0 && number(result, "weight_kept") > 0.0, "{result}");
        let is_own = result["task"] == result["radius_of"];
        assert!(
            !is_own || (number(result, "ratio_requests"), number(result, "ratio_weight")) == (1.0, 1.0),
            "{result}"
        );
    }
    assert_repeats(&arguments);
}

/// A sequence for the commands that write a store.
const STORED: [&str; 10] =
    ["--entries", "640", "--layers", "2", "--steps", "2", "--kv-heads", "2", "--methods", "dynakv:8,tck:64"];

#[test]
fn attach_takes_the_state_of_every_layer() {
    let found = results(&[&["attach", "--restarts", "1"], &STORED[..]].concat());
    assert_eq!(found.len(), 1, "groups have no state");
    assert_eq!((number(&found[0], "restored_layers"), number(&found[0], "layers")), (2.0, 2.0));
    for field in ["state_bytes", "keys_ms", "state_ms", "open_ms"] {
        assert!(number(&found[0], field) > 0.0, "{field} in {:?}", found[0]);
    }
}

#[test]
fn costs_compare_each_operation() {
    let found = results(&[&["costs", "--cost-rounds", "2"], &STORED[..]].concat());
    let operations: Vec<&str> = found.iter().filter_map(|result| result["operation"].as_str()).collect();
    assert_eq!(operations, ["open", "commit", "fork", "delete", "close"]);
    for field in ["plain_ms", "clusters_ms", "ratio"] {
        assert!(found.iter().all(|result| number(result, field) > 0.0), "{field} in {found:?}");
    }
}

#[test]
fn grow_moves_less_than_packed_clusters() {
    let found = results(&[&["grow", "--from", "320", "--every", "80", "--budgets", "1/5"], &STORED[..]].concat());
    assert_eq!((found.len(), number(&found[0], "stores")), (1, 5.0));
    let [packed, by_store] = ["moved_packed", "moved_packed_stores"].map(|field| number(&found[0], field));
    assert!(packed > by_store && by_store > 0.0 && number(&found[0], "moved") < packed, "{found:?}");
}

#[test]
fn decode_reads_batches_and_compares_lengths() {
    let arguments = ["decode", "--lengths", "320,640,960", "--batch", "1,2", "--budgets", "1/5", "--layers", "1"];
    let methods = ["--methods", "tck:64,swarm:8:single", "--places", "pages"];
    let sizes = ["--steps", "2", "--kv-heads", "2", "--rounds", "1"];
    let found = results(&[&arguments[..], &methods, &sizes].concat());
    let (lines, reads): (Vec<_>, Vec<_>) =
        found.iter().filter(|own| own["batch"].is_u64()).partition(|own| own["lengths"].is_array());
    assert_eq!((reads.len(), lines.len()), (3 * 2 * 2, 2 * 2), "{found:?}");
    for single in reads.iter().filter(|own| own["batch"] == 1) {
        let is_like =
            |own: &&&Value| own["batch"] == 2 && own["tokens"] == single["tokens"] && own["method"] == single["method"];
        let double = reads.iter().find(is_like).expect("a batch of two");
        // Each sequence of a batch reads its own blocks, and has every query once.
        for field in ["requests", "bytes", "entries"] {
            // Figures have four digits.
            let ratio = number(double, field) / number(single, field);
            assert!((ratio - 2.0).abs() < 0.003, "{field} in {double}");
        }
        assert_eq!(double["weight_kept"], single["weight_kept"]);
    }
    for line in lines {
        assert_eq!(line["lengths"], serde_json::json!([320, 640, 960]));
        assert!(number(line, "off_line") >= 0.0, "{line}");
    }
}

#[test]
fn wrong_arguments_are_refused() {
    for (arguments, why) in [
        (&["build", "--memberships", "0"][..], "none"),
        (&["build", "--overlap", "0.5", "--entries", "100"], "overlap is 0.5"),
        (&["build", "--mean-size", "17", "--entries", "100"], "mean size of 17"),
        (&["adapt", "--prefill", "100", "--entries", "100"], "--prefill 100"),
        (&["build", "--file", "/nowhere"], "--file /nowhere"),
        (&["cache", "--policy", "best"], "use one of fifo, lru, cost"),
        (&["cache", "--request-us", "80"], "--mib-per-s"),
    ] {
        let output = cluster(arguments);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && err.contains(why), "{arguments:?}: {err}");
    }
}
