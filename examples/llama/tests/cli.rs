//! Runs `kvrun` itself: what it prints, and how it fails.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

/// Runs `kvrun` in an empty directory, because defaults must not depend on the current directory.
fn kvrun(args: &[&str]) -> Output {
    let cwd = tempfile::tempdir().unwrap();
    Command::new(env!("CARGO_BIN_EXE_kvrun")).args(args).current_dir(cwd.path()).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn failure(args: &[&str]) -> String {
    let output = kvrun(args);
    assert!(!output.status.success() && output.stdout.is_empty(), "{args:?} did not fail, or printed to stdout");
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!text.contains("panicked"), "{text}");
    text
}

#[test]
fn recall_reports_every_cell() {
    let args = ["recall", "--policy", "full", "--contexts", "1024", "--tasks", "S,MQ", "--limit", "1"];
    let json: Value = serde_json::from_str(&stdout(&kvrun(&[&args[..], &["--json"]].concat()))).unwrap();
    let cells = json["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 2);
    for (cell, task) in cells.iter().zip(["S", "MQ"]) {
        assert_eq!(cell["task"], task);
        assert_eq!((&cell["context"], &cell["n"], &cell["policy"]), (&1024.into(), &1.into(), &"full".into()));
        assert_eq!((&cell["accuracy"], &cell["full_accuracy"]), (&1.0.into(), &1.0.into()));
        assert!(cell["kv_bytes_total"].as_u64().unwrap() > 1 << 20);
        assert!(cell["tokens_per_s"].as_f64().unwrap() > 0.0);
    }
    let table = stdout(&kvrun(&args));
    assert!(table.contains("MQ         1024    1   100.0   100.0"), "{table}");
    assert!(table.contains("mean       1024") && table.contains("peak resident memory"), "{table}");
}

#[test]
fn a_short_prefill_changes_the_cost_and_no_answer() {
    let args = ["--contexts", "1024", "--tasks", "MK", "--limit", "1", "--prefill", "900", "--json"];
    let recall = [&["recall", "--policy", "full"], &args[..]].concat();
    let json: Value = serde_json::from_str(&stdout(&kvrun(&recall))).unwrap();
    assert_eq!((&json["prefill"], &json["cells"][0]["accuracy"]), (&900.into(), &1.0.into()));
    assert_eq!(json["cells"][0]["logit_difference_max"], 0.0, "the caches hold the same keys and values");
    let compare = [&["compare", "--methods", "minmax", "--budgets", "1/4"], &args[..]].concat();
    let json: Value = serde_json::from_str(&stdout(&kvrun(&compare))).unwrap();
    assert_eq!((&json["prefill"], &json["rows"][0]["accuracy"]), (&900.into(), &1.0.into()));
    let text = failure(&["recall", "--contexts", "1024", "--tasks", "MK", "--prefill", "1020"]);
    assert!(text.contains("1019 tokens before the question of MK-1024-0"), "{text}");
}

#[test]
fn shifted_prompts_ask_about_the_second_haystack() {
    let args = ["recall", "--policy", "full", "--contexts", "1024", "--limit", "1", "--shift", "--json"];
    let json: Value = serde_json::from_str(&stdout(&kvrun(&args))).unwrap();
    assert!(json["passed_over"].is_u64(), "{json}");
    let cells = json["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 2);
    for (cell, task) in cells.iter().zip(["S+MK", "S+MKD"]) {
        assert_eq!((&cell["task"], &cell["context"], &cell["accuracy"]), (&task.into(), &2048.into(), &1.0.into()));
        assert!(cell["kv_bytes_total"].as_u64().unwrap() > 2 << 20);
    }
    assert!(failure(&["recall", "--shift", "--tasks", "S"]).contains("choose other --tasks"));
    assert!(failure(&["recall", "--shift=7"]).contains("contexts [7]"));
}

#[test]
fn questions_are_reported_in_two_halves() {
    let args = ["--contexts", "1024", "--tasks", "MK", "--limit", "1", "--questions", "4", "--json"];
    let recall = |more: &[&str]| -> Value {
        serde_json::from_str(&stdout(&kvrun(&[&["recall"], more, &args[..]].concat()))).unwrap()
    };
    for policy in [&["--policy", "full"][..], &["--policy", "signs", "--budget", "1/3"]] {
        let json = recall(policy);
        let answers = json["answers"].as_array().unwrap();
        let halves: Vec<&str> = answers.iter().map(|answer| answer["half"].as_str().unwrap()).collect();
        assert_eq!(halves, ["profile", "answer", "profile", "answer"]);
        assert_eq!(answers[3]["id"], "MK-1024-0#3");
        assert!(answers.iter().all(|answer| answer["full_accuracy"] == 1.0 && answer["accuracy"] == 1.0), "{json}");
        let cells = json["cells"].as_array().unwrap();
        let of = |cell: &Value| (cell["half"].clone(), cell["n"].clone());
        let expected = [("profile".into(), 2.into()), ("answer".into(), 2.into())];
        assert_eq!(cells.iter().map(of).collect::<Vec<_>>(), expected);
        assert!(cells.iter().all(|cell| cell["kv_bytes_read_per_step"].as_u64().unwrap() > 0), "{json}");
    }
    let compare = [&["compare", "--methods", "minmax", "--budgets", "1/4"], &args[..]].concat();
    let json: Value = serde_json::from_str(&stdout(&kvrun(&compare))).unwrap();
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4, "{json}");
    assert!(rows.iter().all(|row| row["half"].is_string() && row["n"] == 2 && row["accuracy"] == 1.0), "{json}");
    let few = failure(&["recall", "--contexts", "1024", "--tasks", "S", "--limit", "1", "--questions", "4"]);
    assert!(few.contains("1 value needles of S-1024-0"), "{few}");
    assert!(failure(&["recall", "--contexts", "1024", "--limit", "1", "--questions", "3"]).contains("even number"));
}

#[test]
fn clusters_are_made_of_the_queries_that_are_asked_for() {
    let args = ["--contexts", "1024", "--tasks", "MK", "--limit", "1", "--questions", "4", "--json"];
    let mut weights = Vec::new();
    for profile in ["last:32", "decode:8", "questions:2"] {
        let more = ["compare", "--methods", "swarm:8", "--budgets", "1/3", "--probe", "--profile", profile];
        let json: Value = serde_json::from_str(&stdout(&kvrun(&[&more[..], &args].concat()))).unwrap();
        assert_eq!(json["profile"], profile);
        let rows = json["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 4, "{json}");
        weights.push(rows[3]["mass_recall"].as_f64().unwrap());
        if profile != "questions:2" {
            continue;
        }
        // Forks of `recall` have clusters of the same queries as their parents.
        let fixed = ["recall", "--policy", "swarm", "--group-tokens", "8", "--memory-limit", "64MiB"];
        let more = [&fixed[..], &["--budget", "1/3", "--profile", profile]].concat();
        let json: Value = serde_json::from_str(&stdout(&kvrun(&[&more[..], &args].concat()))).unwrap();
        assert_eq!((&json["profile"], json["answers"].as_array().unwrap().len()), (&profile.into(), 4), "{json}");
        let answered = |rows: &[&Value]| rows.iter().map(|row| row["accuracy"].as_f64().unwrap()).sum::<f64>();
        let cells = [&json["cells"][0], &json["cells"][1]];
        assert_eq!(answered(&cells), answered(&[&rows[1], &rows[3]]), "{profile}");
        let bytes = |name: &str| cells[1][name].as_u64().unwrap();
        assert!(bytes("kv_bytes_read_per_step") < bytes("kv_bytes_total") * 9 / 10, "{json}");
    }
    assert!(weights.iter().all(|weight| (0.3..1.0).contains(weight)), "{weights:?}");
    assert!(weights[0] != weights[1] && weights[1] != weights[2], "{weights:?}");
    let refused = |more: &[&str]| failure(&[&["compare", "--contexts", "1024", "--limit", "1"], more].concat());
    assert!(refused(&["--profile", "questions:2"]).contains("needs --questions 4"));
    assert!(refused(&["--profile", "questions:3", "--questions", "4"]).contains("needs --questions 6"));
    assert!(refused(&["--profile", "questions:2", "--questions", "4", "--prefill", "9"]).contains("--prefill"));
    let long = ["--profile", "decode:9999", "--methods", "swarm", "--tasks", "S"];
    assert!(refused(&long).contains("--profile decode:9999"));
}

#[test]
fn dense_layers_are_left_out_of_the_figures_of_selections() {
    let compare = |dense: &str| -> Value {
        let fixed = ["compare", "--contexts", "1024", "--tasks", "S", "--limit", "1", "--probe", "--json"];
        let more = ["--methods", "signs,dynakv:16", "--budgets", "1/13", "--dense-layers", dense];
        serde_json::from_str(&stdout(&kvrun(&[&fixed[..], &more].concat()))).unwrap()
    };
    let (sparse, one, all) = (compare("0"), compare("1"), compare("4"));
    assert_eq!((&sparse["dense_layers"], &one["dense_layers"]), (&0.into(), &1.into()));
    for row in 1..3 {
        let figure = |json: &Value, name: &str| json["rows"][row][name].as_f64();
        assert!(figure(&sparse, "mass_recall") != figure(&one, "mass_recall"), "{one}");
        assert!(figure(&sparse, "read_bytes_per_step") < figure(&one, "read_bytes_per_step"), "{one}");
        assert!(figure(&one, "entries_per_layer").unwrap() < 81.0, "{one}");
        let dense = ["accuracy", "entries_per_layer", "mass_recall"].map(|name| figure(&all, name));
        assert_eq!(dense, [Some(1.0), Some(0.0), None], "{all}");
    }
    for command in ["recall", "compare"] {
        let text = failure(&[command, "--contexts", "1024", "--limit", "1", "--dense-layers", "5"]);
        assert!(text.contains("--dense-layers 5 is more than the 4 layers"), "{text}");
    }
}

/// Returns the name and the content of each file of a directory.
fn files(directory: &std::path::Path) -> Vec<(std::ffi::OsString, Vec<u8>)> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = entries
        .filter(|path| path.is_file())
        .map(|path| (path.file_name().unwrap().to_owned(), std::fs::read(&path).unwrap()))
        .collect();
    files.sort();
    files
}

#[test]
fn clusters_of_a_session_are_the_same_after_every_open() {
    let model = fixtures().join("recall-tiny");
    let dir = tempfile::tempdir().unwrap();
    let (ids, device) = (dir.path().join("ids"), dir.path().join("kv"));
    std::fs::write(&ids, (0..600).map(|id| format!("{} ", 144 + id * id % 97)).collect::<String>()).unwrap();
    std::fs::create_dir(&device).unwrap();
    std::fs::set_permissions(&device, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let store = ["--model", model.to_str().unwrap(), "--device", device.to_str().unwrap(), "--session", "s"];
    let make = ["generate", "--max-tokens", "9", "--prompt-ids", ids.to_str().unwrap(), "--policy", "full"];
    stdout(&kvrun(&[&make[..], &store].concat()));
    let before = files(&device);
    let cluster = |more: &[&str]| -> Value {
        let fixed = ["cluster", "--json"];
        serde_json::from_str(&stdout(&kvrun(&[&fixed[..], &store, more].concat()))).unwrap()
    };
    let with = ["--methods", "dynakv:16,swarm:8,infllm:32,kmeans:8:joint"];
    let [first, second] = [cluster(&with), cluster(&with)].map(|mut json| {
        for method in json["methods"].as_array_mut().unwrap() {
            assert!(method["build_seconds"].take().as_f64().unwrap() > 0.0);
        }
        json
    });
    assert_eq!(first, second);
    assert_eq!(files(&device), before, "the store is opened without writing to it");
    assert_eq!((&first["tokens"], &first["queries"]), (&608.into(), &128.into()), "{first}");
    // The lists of each method, and the members of its largest cluster. The newest 64 tokens and those of an
    // unfinished block may be in none.
    let limits = [(2, 64), (1, 16), (1, 32), (1, 32)];
    for (method, (lists, largest)) in first["methods"].as_array().unwrap().iter().zip(limits) {
        for layer in method["layers"].as_array().unwrap() {
            let number = |name: &str| layer[name].as_f64().unwrap();
            let covered = number("covered_tokens");
            assert!(number("lists") == f64::from(lists) && (300.0..=608.0).contains(&covered), "{method}");
            assert!(number("largest") <= f64::from(largest) && number("mean_size") >= 1.0, "{method}");
            let sizes = layer["sizes"].as_array().unwrap();
            let clusters: f64 = sizes.iter().map(|size| size["clusters"].as_f64().unwrap()).sum();
            assert_eq!(clusters, number("clusters"));
            let stored = number("clusters_per_token") * covered * f64::from(lists);
            assert!((stored - clusters * number("mean_size")).abs() < 1e-6, "{method}");
            assert!(number("bytes") > 0.0 && (0.0..=1.0).contains(&number("weight_kept")), "{method}");
        }
    }
    let none = cluster(&["--methods", "kmeans:16", "--queries", "0"]);
    assert!(none["methods"][0]["layers"][0]["weight_kept"].is_null(), "{none}");
    let table = stdout(&kvrun(&[&["cluster"], &store[..]].concat()));
    assert!(table.contains("session s: 608 tokens") && table.contains("infllm:128: 4 layers built in"), "{table}");

    let refused = |more: &[&str]| failure(&[&["cluster"], &store[..], more].concat());
    assert!(refused(&["--queries", "609"]).contains("608 tokens of session"));
    assert!(refused(&["--queries", "0"]).contains("swarm:8: the method makes its clusters of queries"));
    assert!(refused(&["--methods", "swarm:8:members"]).contains("kvrun calibrate"));
    assert!(refused(&["--group-tokens", "16"]).contains("LayoutMismatch"));
    assert!(refused(&["--memory-limit", "4MiB"]).contains("raise --memory-limit"));
    let other = ["cluster", "--session", "t", store[0], store[1], store[2], store[3]];
    assert!(failure(&other).contains("session \"t\"") && failure(&other).contains("NotFound"));
    let empty = dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let text = failure(&["cluster", "--session", "s", store[0], store[1], "--device", empty.to_str().unwrap()]);
    assert!(text.contains("empty") && files(&empty).is_empty(), "{text}");
}

#[test]
fn profiles_record_each_kind_of_queries() {
    use stratakv_llama::profile::Profile;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("new/profile.safetensors");
    let run = |more: &[&str]| -> (Value, Profile) {
        let fixed = ["profile", "--json", "--out", file.to_str().unwrap()];
        let json = serde_json::from_str(&stdout(&kvrun(&[&fixed[..], more].concat()))).unwrap();
        (json, Profile::from_safetensors(&std::fs::read(&file).unwrap()).unwrap())
    };
    let (json, last) = run(&["--queries", "last:32"]);
    assert_eq!((&json["queries"], last.about.entries, last.layers.len()), (&32.into(), 1019, 4));
    assert_eq!(last.positions, (987..1019).collect::<Vec<u32>>());
    for (layer, told) in last.layers.iter().zip(json["layers"].as_array().unwrap()) {
        assert!(layer.activated.iter().all(|at| (4..763).contains(at)), "sinks and newest tokens are left out");
        let most = layer.offsets.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap();
        assert!((1..=29).contains(&most), "at most 1/34 of 1019 tokens: {most}");
        assert!((0.0..=1.0).contains(&told["weight_held"].as_f64().unwrap()), "{told}");
    }
    // The same queries as decode steps activate nearly the same tokens, because keys are equal within rounding.
    let (_, steps) = run(&["--queries", "last:32", "--prefill", "1000"]);
    assert_eq!(steps.positions, last.positions);
    let same = |a: &[u32], b: &[u32]| a.iter().filter(|at| b.contains(at)).count() as f64 / a.len() as f64;
    assert!(same(&last.layers[3].activated, &steps.layers[3].activated) > 0.95);

    let (_, decode) = run(&["--queries", "decode", "--prefill", "1010", "--newest", "16"]);
    assert_eq!(decode.positions, (1010..1023).collect::<Vec<u32>>(), "9 tokens, the question and one of the answer");
    let (json, asked) = run(&["--queries", "questions", "--questions", "4", "--newest", "16"]);
    assert_eq!(asked.questions, [1, 1, 1, 1, 2, 2, 2, 2]);
    assert_eq!(asked.positions[..4], [1019, 1020, 1021, 1022]);
    assert!(json["layers"].as_array().unwrap().iter().any(|layer| layer["weight_held"].as_f64().unwrap() > 0.05));
    let table = stdout(&kvrun(&["profile", "--out", file.to_str().unwrap()]));
    assert!(table.contains("1019 tokens, 128 queries (last:128)"), "{table}");

    let refused = |more: &[&str]| failure(&[&["profile", "--out", file.to_str().unwrap()], more].concat());
    assert!(refused(&["--newest", "1015"]).contains("lower --sinks or --newest"));
    assert!(refused(&["--queries", "last:1020"]).contains("1019 tokens before the question"));
    assert!(refused(&["--number", "26"]).contains("more than the 25 prompts"));
    assert!(refused(&["--questions", "4"]).contains("--queries questions"));
}

#[test]
fn prefetching_changes_no_answer_and_reports_what_it_saved() {
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids");
    std::fs::write(&ids, (5..205).map(|id| format!("{} ", id % 120)).collect::<String>()).unwrap();
    let run = |switch: &str, more: &[&str]| -> Value {
        let model = fixtures().join("tiny-arch/llama3");
        let fixed = ["generate", "--max-tokens", "7", "--pipeline", switch, "--json", "--model"];
        let paths = [model.to_str().unwrap(), "--prompt-ids", ids.to_str().unwrap(), "--group-tokens", "4"];
        serde_json::from_str(&stdout(&kvrun(&[&fixed[..], &paths[..], more].concat()))).unwrap()
    };
    for more in [&["--policy", "full"][..], &["--policy", "signs", "--budget", "40t"], &["--budget", "1/5"]] {
        let (on, off) = (run("on", more), run("off", more));
        assert_eq!(on["ids"], off["ids"], "{more:?}");
        let recall = on["prediction_recall"].as_f64().unwrap();
        assert!(recall > 0.0 && recall <= 1.0, "{more:?}: {on}");
        assert!(on["io_hidden_share"].as_f64().unwrap() <= 1.0 && on["wasted_bytes_per_step"].is_u64(), "{on}");
        assert!(on["pipeline"]["read_bytes"].as_u64().unwrap() > 0, "{on}");
        assert!(off["pipeline"].is_null() && off["io_hidden_share"].is_null(), "{off}");
    }
    let args = ["recall", "--contexts", "1024", "--tasks", "S", "--limit", "1", "--pipeline"];
    let (on, off) = (stdout(&kvrun(&[&args[..], &["on"]].concat())), stdout(&kvrun(&[&args[..], &["off"]].concat())));
    assert!(on.contains("read ahead:") && !off.contains("read ahead:"), "{on}{off}");
}

#[test]
fn generate_continues_ids_and_repeats_its_draws_per_seed() {
    let model = fixtures().join("tiny-arch/llama3");
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids");
    std::fs::write(&ids, "5 6 7 8 9").unwrap();
    let run = |more: &[&str]| {
        let fixed = ["generate", "--policy", "full", "--max-tokens", "7", "--model"];
        let paths = [model.to_str().unwrap(), "--prompt-ids", ids.to_str().unwrap()];
        stdout(&kvrun(&[&fixed[..], &paths[..], more].concat()))
    };
    let plain = run(&[]);
    assert_eq!(plain.split_whitespace().count(), 7, "{plain:?}");
    let json: Value = serde_json::from_str(&run(&["--json"])).unwrap();
    assert_eq!(json["text"].as_str().unwrap(), plain.trim_end());
    assert_eq!(json["prompt_tokens"], 5);
    let drawn = run(&["--temperature", "3", "--seed", "5"]);
    assert_eq!(drawn, run(&["--temperature", "3", "--seed", "5"]));
    assert_ne!(drawn, run(&["--temperature", "3", "--seed", "6"]));
}

#[test]
fn a_chat_goes_on_after_a_restart_and_prints_its_figures() {
    use std::io::Write;
    use std::process::Stdio;
    let model = fixtures().join("tiny-arch/llama3");
    let dir = tempfile::tempdir().unwrap();
    let chat = |lines: &str, more: &[&str]| -> (String, String) {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvrun"))
            .args(["--threads", "1", "chat", "--max-tokens", "5", "--model", model.to_str().unwrap()])
            .args(["--device", dir.path().to_str().unwrap()])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr.clone()).unwrap();
        assert!(output.status.success(), "{stderr}");
        (String::from_utf8(output.stdout).unwrap(), stderr)
    };
    let (whole, figures) = chat("5 6 7\n8 9\n8 9\n\n10", &["--session", "whole"]);
    assert_eq!(whole.lines().count(), 3, "an empty line leaves: {whole}");
    assert!(figures.contains("session whole: 0 tokens") && figures.contains("tokens/s, first after"), "{figures}");
    assert!(figures.contains("MiB resident"), "{figures}");
    let (first, _) = chat("5 6 7\n", &[]);
    let (second, figures) = chat("8 9\n8 9\n", &[]);
    assert_eq!(first + &second, whole, "{figures}");
    assert!(figures.contains("session chat: 7 tokens"), "three of the message and four of the answer: {figures}");
    assert!(failure(&["chat", "--model", model.to_str().unwrap()]).contains("--device"));
}

#[test]
fn errors_name_their_cause() {
    assert!(failure(&["recall", "--budget", "0"]).contains("attends to no token"));
    assert!(failure(&["recall", "--model", "/nonexistent/model"]).contains("/nonexistent/model"));
    assert!(failure(&["recall", "--policy", "full", "--tasks", "XYZ"]).contains("XYZ"));
    assert!(failure(&["recall", "--policy", "full", "--prompts", "/nonexistent.jsonl"]).contains("/nonexistent.jsonl"));
    let model = fixtures().join("recall-tiny");
    let model = model.to_str().unwrap();
    let text = failure(&["generate", "--model", model, "--policy", "full", "--prompt", "hello", "--max-tokens", "3"]);
    assert!(text.contains("--prompt-ids"), "{text}");
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids");
    for (content, needle) in [("1 2 300", "token id 300 at position 2"), (&"3 ".repeat(8193), "8193 tokens are more")] {
        std::fs::write(&ids, content).unwrap();
        let ids = ids.to_str().unwrap();
        let text =
            failure(&["generate", "--model", model, "--policy", "full", "--prompt-ids", ids, "--max-tokens", "3"]);
        assert!(text.contains(needle), "{text}");
    }
}

#[test]
fn unusable_stores_say_why() {
    use std::os::unix::fs::PermissionsExt;
    let model = fixtures().join("tiny-arch/llama3");
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids");
    std::fs::write(&ids, "5 6 7 8 9 10 11").unwrap();
    let args = |device: &std::path::Path, more: &[&str]| -> Vec<String> {
        let paths =
            [model.to_str().unwrap(), "--prompt-ids", ids.to_str().unwrap(), "--device", device.to_str().unwrap()];
        let all = [&["generate", "--session", "s", "--max-tokens", "4", "--model"], &paths[..], more].concat();
        all.into_iter().map(str::to_owned).collect()
    };
    let go = |device: &std::path::Path, more: &[&str]| {
        let args = args(device, more);
        failure(&args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let make = |name: &str| {
        let path = dir.path().join(name);
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        path
    };
    let text = go(&dir.path().join("nowhere"), &[]);
    assert!(text.contains("does not exist") && text.contains("Configuration"), "{text}");
    let shared = make("shared");
    std::fs::set_permissions(&shared, std::fs::Permissions::from_mode(0o770)).unwrap();
    assert!(go(&shared, &[]).contains("chmod"));
    let foreign = make("foreign");
    std::fs::write(foreign.join("thesis.tex"), "text").unwrap();
    assert!(go(&foreign, &[]).contains("Configuration"));
    assert_eq!(std::fs::read_to_string(foreign.join("thesis.tex")).unwrap(), "text");

    let good = make("good");
    let run = |more: &[&str]| {
        let args = args(&good, more);
        stdout(&kvrun(&args.iter().map(String::as_str).collect::<Vec<_>>()))
    };
    let first = run(&[]);
    assert_eq!(run(&[]), first, "the session repeats its answer");
    for more in [["--dtype", "bf16"], ["--group-tokens", "8"]] {
        let text = go(&good, &more);
        assert!(text.contains("LayoutMismatch") && text.contains("--dtype"), "{text}");
    }
    assert!(go(&good, &["--device", good.to_str().unwrap()]).contains("same directory"));
    let held = stratakv::Store::options().device(&good).open().unwrap();
    let text = go(&good, &[]);
    assert!(text.contains("InUse") && text.contains("in use"), "{text}");
    held.close().unwrap();
    assert_eq!(run(&[]), first);

    use stratakv_format::superblock::{SLOTS, Slot};
    use zerocopy::FromBytes;
    let superblock = good.join("superblock");
    let mut bytes = std::fs::read(&superblock).unwrap();
    for slot in bytes.chunks_exact_mut(4096).take(SLOTS) {
        let mut newer = Slot::read_from_prefix(slot).unwrap().0;
        newer.features.minor.set(newer.features.minor.get() + 1);
        slot.copy_from_slice(&newer.encode());
    }
    std::fs::write(&superblock, &bytes).unwrap();
    let text = go(&good, &[]);
    assert!(text.contains("Unsupported"), "{text}");
    assert_eq!(std::fs::read(&superblock).unwrap(), bytes);
}

#[test]
fn adapters_come_from_files_and_from_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let (files, device) = (dir.path().join("adapters"), dir.path().join("kv"));
    std::fs::create_dir(&device).unwrap();
    std::fs::set_permissions(&device, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let (files, device) = (files.to_str().unwrap(), device.to_str().unwrap());
    let few = ["--limit", "1", "--contexts", "1024", "--tasks", "S"];
    let fit = ["calibrate", "--sigmas", "8", "--bits", "64", "--out", files, "--device", device];
    let text = stdout(&kvrun(&[&fit[..], &few].concat()));
    assert!(text.contains("kvswap-8.safetensors") && text.contains("tck-64/1 stored for groups of 4"), "{text}");
    // The same numbers again: the stored version stays.
    let text = stdout(&kvrun(&[&fit[..], &few].concat()));
    assert!(text.contains("tck-64/1 stored"), "{text}");
    // Other numbers: the next version is stored, and the old one is deleted afterwards.
    let text = stdout(&kvrun(&[&fit[..], &["--limit", "1", "--contexts", "1024", "--tasks", "MK"]].concat()));
    assert!(text.contains("tck-64/2 stored"), "{text}");
    let store = stratakv::Store::options().device(device).open().unwrap();
    let held: Vec<(String, u32)> = store.adapters().into_iter().map(|a| (a.name, a.version)).collect();
    let expected = ["infinigen-8", "kvswap-8", "tck-64"].map(|name| (name.to_owned(), 2));
    assert_eq!(held, expected);
    store.close().unwrap();
    let recall = ["recall", "--json", "--policy", "kvswap"];
    let from = |more: &[&str]| -> Value {
        let json: Value = serde_json::from_str(&stdout(&kvrun(&[&recall[..], &few, more].concat()))).unwrap();
        json["cells"][0]["accuracy"].clone()
    };
    assert_eq!(from(&["--device", device]), from(&["--adapters", files]));
    // Only methods with codes report drift, one number per layer.
    let run = |policy: &[&str]| -> Value {
        let fixed = ["recall", "--json", "--adapters", files, "--policy"];
        serde_json::from_str(&stdout(&kvrun(&[&fixed[..], policy, &few].concat()))).unwrap()
    };
    let told = run(&["tck", "--bits", "64"]);
    let drift: Vec<f64> = told["drift"].as_array().unwrap().iter().map(|drift| drift.as_f64().unwrap()).collect();
    assert!(drift.len() == 4 && drift.iter().all(|drift| (0.3..3.0).contains(drift)), "{drift:?}");
    assert!(run(&["kvswap"])["drift"].is_null());
    let wrong =
        failure(&[&["recall", "--json", "--policy"][..], &["tck", "--bits", "32", "--device", device], &few].concat());
    assert!(wrong.contains("kvrun calibrate"), "{wrong}");
}
