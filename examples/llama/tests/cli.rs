//! The program itself: what it prints, and how it fails.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

/// Runs `kvrun` in an empty directory: defaults must not depend on where it is started.
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
    assert!(!output.status.success() && output.stdout.is_empty(), "{args:?} did not fail");
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
fn generate_continues_ids_and_draws_reproducibly() {
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
fn errors_name_their_cause() {
    assert!(failure(&["recall", "--budget", "0"]).contains("attends no token"));
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
