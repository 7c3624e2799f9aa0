//! Runs every subcommand with tiny sizes. The JSON must parse, figures must be positive, and no file may be left
//! behind.

use serde_json::Value;
use std::process::{Command, Output};

fn kvbench(device: &std::path::Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbench"));
    command.args(arguments).arg("--device").arg(device).output().expect("kvbench starts")
}

fn results(arguments: &[&str]) -> Vec<Value> {
    let device = tempfile::tempdir().expect("a directory");
    let output = kvbench(device.path(), arguments);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {err}");
    let left: Vec<_> = std::fs::read_dir(device.path()).expect("the directory").collect();
    assert!(left.is_empty(), "{arguments:?} leaves {left:?}");
    out.lines().map(|line| serde_json::from_str(line).expect("a JSON object per line")).collect()
}

fn assert_positive(result: &Value, fields: &[&str]) {
    for field in fields {
        assert!(result[field].as_f64().is_some_and(|value| value > 0.0), "{field} in {result}");
    }
}

#[test]
fn read_measures_each_block_size() {
    let arguments = ["read", "--block", "4096,64KiB", "--batch", "8", "--seconds", "0.1", "--rounds", "1"];
    let found = results(&[&arguments[..], &["--size", "8MiB", "--bare", "--fio", "--json"]].concat());
    assert_eq!(found.iter().map(|r| r["block"].as_u64()).collect::<Vec<_>>(), [Some(4096), Some(65536)]);
    for result in &found {
        assert_positive(result, &["gb_per_s", "iops", "p50_us", "p99_us", "cpu_s_per_gb", "checksum_cpu_s_per_gb"]);
        assert_positive(result, &["bare_gb_per_s", "bare_cpu_s_per_gb", "ratio_bare"]);
        assert_positive(result, &["bare_touched_gb_per_s", "ratio_bare_touched", "bare_p99_us", "ratio_bare_p99"]);
        assert_eq!(result["requests_per_batch"].as_f64(), Some(8.0));
        assert!(result["huge_pages"].is_string());
        match result["fio_skipped"].as_str() {
            Some(why) => assert!(why.starts_with("skipped: fio")),
            None => assert_positive(result, &["fio_gb_per_s", "ratio_fio", "fio_full_gb_per_s"]),
        }
    }
}

#[test]
fn reads_with_attention_are_compared_with_bare_loops() {
    let arguments = ["read", "--attend", "--block", "64KiB", "--batch", "8", "--seconds", "0.1", "--rounds", "2"];
    let found = results(&[&arguments[..], &["--size", "8MiB", "--json"]].concat());
    assert_eq!(found.len(), 1);
    assert_positive(&found[0], &["gb_per_s", "cpu_s_per_gb", "p50_us", "p99_us", "apart_gb_per_s", "steps_gb_per_s"]);
    assert_positive(&found[0], &["parts_gb_per_s", "ratio_apart", "ratio_steps", "ratio_parts"]);
    if std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1) {
        assert_positive(&found[0], &["two_cores_gb_per_s", "ratio_two_cores"]);
    }
}

#[test]
fn drivers_are_measured_in_rotation() {
    let arguments = ["drivers", "--block", "16KiB", "--batch", "8", "--seconds", "0.1", "--rounds", "1"];
    let found = results(&[&arguments[..], &["--size", "8MiB", "--json"]].concat());
    let sides: Vec<_> = found.iter().map(|r| (r["driver"].as_str(), r["path"].as_str())).collect();
    let expected = [("uring", "tickets"), ("uring", "blocking"), ("posix", "tickets")];
    assert!(expected.iter().all(|(driver, path)| sides.contains(&(Some(driver), Some(path)))), "{sides:?}");
    for result in found.iter().filter(|result| result["skipped"].is_null()) {
        assert_positive(result, &["gb_per_s", "iops", "p50_us", "p99_us", "cpu_s_per_gb", "ratio_uring"]);
    }
    assert!(found.iter().any(|result| result["skipped"].is_null()));
}

#[test]
fn decode_compares_caches_and_pipelines() {
    let arguments = ["decode", "--layers", "2", "--batch", "2", "--context", "1024", "--budget", "64", "--steps", "3"];
    let more =
        ["--policy", "none,fifo,lru,cost,s3-fifo", "--pipeline", "off,on", "--layer-compute-us", "100", "--json"];
    let found = results(&[&arguments[..], &more[..]].concat());
    assert_eq!(found.len(), 10);
    for (at, result) in found.iter().enumerate() {
        assert_positive(result, &["tokens_per_s", "step_ms", "io_ms", "bytes_read_per_step", "resident_bytes_peak"]);
        let number = |field: &str| result[field].as_f64().expect("a number");
        assert!((0.0..=1.0).contains(&number("io_hidden_share")));
        assert_eq!((number("hit_rate") > 0.3, at == 0), (at >= 2, result["speedup"].is_null()), "{result}");
        // Without a cache a step reads every selected block of every layer and sequence.
        let all = 2.0 * 2.0 * 8.0 * 32768.0;
        assert!(if at < 2 { number("bytes_read_per_step") == all } else { number("bytes_read_per_step") < 0.7 * all });
    }
}

#[test]
fn decode_solves_for_the_share_of_layers_under_a_codec() {
    let arguments = ["decode", "--layers", "3", "--batch", "2", "--context", "1024", "--budget", "64", "--steps", "3"];
    let shares = |more: &[&str]| results(&[&arguments[..], &["--codec", "int4", "--json"], more].concat());
    // A layer that computes for a tenth of a second hides all reads, so the share is 0.
    let found = shares(&["--policy", "none", "--codec-share", "auto", "--layer-compute-us", "0,100000"]);
    assert_eq!(found.len(), 2);
    for (result, idle) in found.iter().zip([true, false]) {
        assert_positive(result, &["share_read_bps", "share_decode_bps", "step_ms"]);
        let number = |field: &str| result[field].as_f64().expect("a number");
        assert_eq!((number("share"), number("share_layer_bytes")), (number("codec_share"), 2.0 * 8.0 * 32768.0));
        assert!((0.01..10.0).contains(&number("share_ratio")), "{result}");
        assert_eq!(number("codec_layers"), (3.0 * number("share")).round(), "{result}");
        assert!(idle || number("share") == 0.0, "{result}");
    }
    let found = shares(&["--policy", "lru", "--codec-share", "0.5"]);
    assert_eq!((found[0]["codec_layers"].as_u64(), found[0]["share"].is_null()), (Some(2), true));
    let device = tempfile::tempdir().expect("a directory");
    for more in [&["--codec", "raw"][..], &["--codec", "int8", "--pipeline", "off,on"]] {
        let output = kvbench(device.path(), &[&arguments[..], &["--codec-share", "auto"], more].concat());
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && err.contains("--codec-share auto"), "{more:?}: {err}");
    }
}

#[test]
fn codecs_are_measured_on_real_keys_and_values() {
    let kv = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/recall-tiny/reference.safetensors");
    let arguments = ["codec", "--kv", kv, "--group", "8", "--seconds", "0.005", "--rounds", "1", "--layers", "3"];
    let found = results(&[&arguments[..], &["--bandwidth", "250M", "--layer-bytes", "256KiB", "--json"]].concat());
    let (share, codecs) = found.split_last().expect("results");
    for result in codecs {
        assert_positive(result, &["stored_share", "encode_gb_per_s", "decode_gb_per_s", "planes"]);
        let number = |field: &str| result[field].as_f64().expect("a number");
        let lossy = result["codec"].as_str().is_some_and(|codec| codec.starts_with("int"));
        assert_eq!(lossy, number("relative_error") > 0.0, "{result}");
        assert!(number("relative_error") < 0.15 && number("stored_share") <= 1.0, "{result}");
    }
    assert!(codecs.len() >= 16);
    assert_positive(share, &["share_ms", "best_ms", "ratio_best", "ratio", "decode_gb_per_s"]);
}

#[test]
fn read_runs_with_the_other_driver_and_checksum() {
    let arguments =
        ["read", "--block", "16KiB", "--batch", "4", "--seconds", "0.05", "--rounds", "1", "--size", "4MiB"];
    let found = results(
        &[&arguments[..], &["--driver", "posix", "--checksum", "crc32", "--in-flight", "2", "--json"]].concat(),
    );
    assert_eq!((found.len(), found[0]["driver"].as_str()), (1, Some("posix")));
    assert_positive(&found[0], &["gb_per_s", "checksum_cpu_s_per_gb"]);
}

#[test]
fn ingest_counts_the_bytes_written_to_the_device() {
    let found = results(&["ingest", "--size", "16MiB", "--chunk", "64", "--rounds", "1", "--fio", "--json"]);
    assert_positive(&found[0], &["gb_per_s", "cpu_s_per_gb", "commit_ms", "device_gb_per_s"]);
    let amplification = found[0]["write_amplification"].as_f64().expect("a number");
    assert!((1.0..2.0).contains(&amplification), "{amplification}");
    assert!(found[0]["write_amplification_kv"].as_f64().expect("a number") > amplification);
}

#[test]
fn peers_store_and_read_the_same_blocks() {
    let arguments =
        ["peers", "--peers", "stratakv,raw,files-direct,files-buffered", "--block", "16KiB", "--batch", "8"];
    let sizes = ["--size", "4MiB", "--cores", "1", "--threads", "4", "--rounds", "2", "--ingest-rounds", "1"];
    let found = results(&[&arguments[..], &sizes, &["--seconds", "0.1", "--json"]].concat());
    let sides: Vec<_> = found.iter().map(|r| (r["what"].as_str(), r["peer"].as_str())).collect();
    let (ingest, read) = (Some("ingest"), Some("read"));
    let peers = ["stratakv", "raw", "files-direct", "files-buffered"];
    // Both ways to read files share one store.
    let stored = peers.iter().take(3).map(|peer| (ingest, Some(*peer)));
    let expected: Vec<_> = stored.chain(peers.map(|peer| (read, Some(peer)))).collect();
    assert_eq!(sides, expected);
    for result in &found {
        assert!(result["skipped"].is_null(), "{result}");
        assert_positive(result, &["gb_per_s", "cpu_s_per_gb", "resident_mib", "ratio_engine"]);
        match result["what"].as_str() {
            Some("read") => assert_positive(result, &["p50_us", "p99_us"]),
            // The engine preallocates a whole segment.
            _ => assert!(result["space"].as_f64().is_some_and(|space| space >= 1.0), "{result}"),
        }
    }
}

#[test]
fn commit_is_compared_with_plain_calls() {
    let found = results(&["commit", "--commits", "4", "--json"]);
    assert_positive(&found[0], &["p50_us", "p99_us", "plain_p50_us", "ratio_p50", "ratio_p99"]);
    // One group of 32 KiB in each of 32 layers.
    assert!(found[0]["bytes_per_commit"].as_u64().expect("a number") >= 1 << 20);
}

#[test]
fn select_is_compared_with_memory() {
    let found = results(&[
        "select",
        "--tokens",
        "256,1024",
        "--budget",
        "64",
        "--working-set",
        "1MiB",
        "--rounds",
        "2",
        "--json",
    ]);
    assert_eq!(found.iter().map(|r| r["tokens"].as_u64()).collect::<Vec<_>>(), [Some(256), Some(1024)]);
    for result in &found {
        assert_positive(result, &["p50_us", "gb_per_s", "memory_gb_per_s", "ratio_memory"]);
    }
}

#[test]
fn select_runs_every_method() {
    let methods = "records,quest,leoam,shadowkv,mean,signs,oracle,kvswap:8,infinigen:8,infinigen:32,tck:64";
    let found = results(&[
        "select",
        "--tokens",
        "512",
        "--budget",
        "64",
        "--working-set",
        "64KiB",
        "--rounds",
        "2",
        "--method",
        methods,
        "--form",
        "raw,softmax",
        "--json",
    ]);
    // The records are scored in one form only.
    assert_eq!(found.len(), 2 * methods.split(',').count() - 1);
    for result in &found {
        assert_positive(result, &["p50_us", "tokens_per_us", "summary_bytes", "ratio_memory"]);
        // The bytes scanned of 512 tokens of 1024 joint elements in 64 groups, without the unused part of their memory.
        let expected = match result["method"].as_str().expect("a method") {
            "records" | "quest" | "leoam" => 64 * 2 * 1024 * 2,
            "shadowkv" | "mean" => 64 * (1024 * 2 + 4),
            "signs" => 512 * 8 * (16 + 2),
            "oracle" => 512 * 1024 * 2,
            "kvswap:8" | "infinigen:8" => 512 * 128 * 2,
            "infinigen:32" => 512 * 32 * 2,
            "tck:64" => 512 * 8,
            other => panic!("{other}"),
        };
        assert_eq!(result["summary_bytes"].as_u64(), Some(expected), "{result}");
    }
}

#[test]
fn select_measures_a_method_in_the_form_that_it_names() {
    let arguments =
        ["select", "--tokens", "256", "--budget", "64", "--working-set", "64KiB", "--rounds", "2", "--json"];
    let methods = "records,minmax:softmax,tck:64:group,signs";
    let found = results(&[&arguments[..], &["--method", methods, "--form", "raw,softmax"]].concat());
    let forms: Vec<_> = found.iter().map(|r| (r["method"].as_str().unwrap(), r["form"].as_str().unwrap())).collect();
    let expected = [
        ("records", "raw"),
        ("minmax:softmax", "softmax"),
        ("tck:64:group", "group-softmax"),
        ("signs", "raw"),
        ("signs", "softmax"),
    ];
    assert_eq!(forms, expected);
}

#[test]
fn written_and_open_name_the_selector_as_the_registry_does() {
    let sizes = ["--tokens", "256", "--layers", "2", "--per", "0", "--rounds", "1", "--json"];
    for (name, printed) in
        [("signs", "signs"), ("shadowkv", "shadowkv"), ("kvswap:32", "kvswap:32"), ("quest", "minmax")]
    {
        let opened = results(&[&["open", "--selector", name, "--stored"], &sizes[..]].concat());
        assert_eq!((opened[0]["selector"].as_str(), opened[0]["stored"].as_bool()), (Some(printed), Some(true)));
        assert_positive(&opened[0], &["attach_ms"]);
        let written = results(&[&["written", "--selector", name], &sizes[..]].concat());
        assert_eq!(written[0]["selector"].as_str(), Some(printed));
        assert_positive(&written[0], &["selector_bytes"]);
    }
}

#[test]
fn wrong_arguments_end_with_an_error_and_without_a_panic() {
    let device = tempfile::tempdir().expect("a directory");
    for (arguments, what) in [
        (&["read", "--block", "5000"][..], "multiples of 4 KiB"),
        (&["read", "--block", "64KiB", "--size", "1MiB"], "too few blocks"),
        (&["read", "--seconds", "0"], "--seconds"),
        (&["ingest", "--size", "1KiB"], "less than a token"),
        (&["select", "--tokens", "256", "--method", "best"], "unknown name"),
        (&["select", "--tokens", "256", "--method", "kvswap:3"], "does not divide"),
        (&["ingest", "--size", "900TiB"], "free"),
        (&["churn", "--full", "0.99"], "--full"),
    ] {
        let output = kvbench(device.path(), arguments);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(err.contains(what) && !err.contains("panicked"), "{arguments:?}: {err}");
    }
    let missing = kvbench(std::path::Path::new("/nonexistent/kvbench"), &["commit", "--commits", "1"]);
    assert!(String::from_utf8_lossy(&missing.stderr).contains("/nonexistent/kvbench"));
}

#[test]
#[cfg(target_os = "linux")]
fn interrupted_run_removes_its_files() {
    let device = tempfile::tempdir().expect("a directory");
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvbench"))
        .args(["read", "--block", "16KiB", "--size", "64MiB", "--seconds", "600", "--device"])
        .arg(device.path())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("kvbench starts");
    let begun = || std::fs::read_dir(device.path()).expect("the directory").next().is_some();
    while !begun() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).expect("the signal is sent");
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
    assert!(!begun(), "files are left");
}

#[test]
fn churn_counts_the_bytes_that_cleaning_writes() {
    let arguments = ["churn", "--capacity", "128MiB", "--segment", "1MiB", "--shortest", "4", "--longest", "256"];
    let found = results(&[&arguments[..], &["--full", "0.6", "--turnover", "1.5", "--json"]].concat());
    assert_positive(
        &found[0],
        &["kv_bytes", "device_bytes", "summary_bytes", "live_share", "usage_over_du", "gb_per_s"],
    );
    let amplification = found[0]["write_amplification"].as_f64().expect("a number");
    assert!((1.0..4.0).contains(&amplification), "{}", found[0]);
}

fn devices(dir: &std::path::Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbench"));
    command.arg("devices").args(arguments).arg("--dir").arg(dir).output().expect("kvbench starts")
}

#[test]
#[cfg(target_os = "linux")]
fn devices_are_made_and_removed() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = devices(dir.path(), &["up", "--count", "2", "--size", "32MiB", "--json"]);
    let (out, err) = (String::from_utf8_lossy(&up.stdout), String::from_utf8_lossy(&up.stderr));
    if out.contains("skipped") || err.contains("losetup") {
        return println!("skipped: {out}{err}");
    }
    assert!(up.status.success(), "{err}");
    let found: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(found.len(), 2);
    let paths: Vec<&str> = found.iter().filter_map(|device| device["path"].as_str()).collect();
    std::fs::write(std::path::Path::new(paths[1]).join("file"), "x").expect("the device takes files");
    // A second set is refused, and the refusal does not take the first one down.
    assert_eq!(devices(dir.path(), &["up", "--count", "1"]).status.code(), Some(1));
    assert!(std::path::Path::new(paths[1]).join("file").exists());
    let down = devices(dir.path(), &["down"]);
    assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
    assert_eq!(std::fs::read_dir(dir.path()).expect("the directory").count(), 0);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    assert!(paths.iter().all(|path| !mounts.contains(path)));
    // Taking down an empty directory succeeds. A slow device beyond the count fails.
    assert!(devices(dir.path(), &["down"]).status.success());
    assert_eq!(devices(dir.path(), &["up", "--count", "1", "--slow", "1:1M"]).status.code(), Some(1));
    assert_eq!(std::fs::read_dir(dir.path()).expect("the directory").count(), 0);
}

/// Reads of 4 KiB through the store keep to the limit of requests, although the host and the limit of bytes allow more.
#[test]
#[cfg(target_os = "linux")]
fn devices_keep_to_a_limit_of_requests() {
    const LIMIT: f64 = 1000.0;
    let dir = tempfile::tempdir().expect("a directory");
    let arguments = ["up", "--count", "1", "--size", "448MiB", "--profile", "pm9a3", "--read-iops", "1000", "--json"];
    let up = devices(dir.path(), &arguments);
    let (out, err) = (String::from_utf8_lossy(&up.stdout), String::from_utf8_lossy(&up.stderr));
    // Without root, or without the blkio controller of cgroup v1.
    if out.contains("skipped") || err.contains("losetup") || err.contains("blkio") {
        return println!("skipped: {out}{err}");
    }
    assert!(up.status.success(), "{err}");
    let device: Value = serde_json::from_str(out.lines().next().expect("a device")).expect("JSON");
    let limits = ["read_bps", "read_iops", "write_bps"].map(|field| device[field].as_u64());
    assert_eq!(limits, [Some(100_000_000), Some(1000), None], "{device}");
    let host = device["host_read_iops"].as_f64().expect("the rate of the host");
    assert_eq!(host < LIMIT, err.contains("this host completes"), "{host}: {err}");
    let path = std::path::Path::new(device["path"].as_str().expect("a path"));
    let read = ["read", "--block", "4096", "--batch", "16", "--seconds", "1", "--rounds", "1", "--size", "8MiB"];
    let output = kvbench(path, &[&read[..], &["--json"]].concat());
    let measured: Result<Value, _> = serde_json::from_slice(&output.stdout);
    assert!(devices(dir.path(), &["down"]).status.success());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let iops = measured.expect("JSON")["iops"].as_f64().expect("a rate");
    println!("{iops} reads per second of 4 KiB; the limit is {LIMIT}, and the host completes {host}");
    if host < 2.0 * LIMIT {
        return println!("skipped: the host completes {host} reads per second, too few to see a limit of {LIMIT}");
    }
    // A new limit lets a burst through, and a loaded machine reads more slowly.
    assert!((0.5 * LIMIT..1.3 * LIMIT).contains(&iops), "{iops}");
}

#[test]
fn decode_scores_the_whole_context_if_a_method_is_given() {
    let arguments = ["decode", "--layers", "2", "--batch", "2", "--context", "1024", "--budget", "64", "--steps", "3"];
    let more = ["--policy", "lru", "--pipeline", "off,on", "--select", "none,signs,quest:raw", "--json"];
    let found = results(&[&arguments[..], &more[..]].concat());
    assert_eq!(found.len(), 6);
    for (at, result) in found.iter().enumerate() {
        let number = |field: &str| result[field].as_f64().expect("a number");
        assert_eq!(result["select"], ["none", "signs", "quest:raw"][at / 2]);
        assert_eq!(number("select_ms") > 0.0, at >= 2, "{result}");
        // Minima and maxima of both sequences and layers, 512 bytes per token. Their memory grows in steps.
        let records = 2.0 * 2.0 * 1024.0 * 512.0;
        assert!(at < 4 || (records..=1.5 * records).contains(&number("summary_bytes")), "{result}");
    }
}

#[test]
fn resident_bytes_are_in_the_account() {
    let arguments = ["resident", "--layers", "2", "--context", "4096", "--budget", "64", "--steps", "2", "--json"];
    let more = ["--method", "none,kvswap:32:raw,quest", "--limit", "48MiB", "--cache-mib", "2"];
    let found = results(&[&arguments[..], &more[..]].concat());
    assert_eq!(found.len(), 3);
    for (result, bytes) in found.iter().zip([0.0, 64.0, 512.0]) {
        let number = |field: &str| result[field].as_f64().expect("a number");
        let summaries = bytes * 4096.0 * 2.0;
        assert!((summaries..=1.3 * summaries).contains(&number("summary_bytes")), "{result}");
        assert!(number("account_peak_bytes") >= number("summary_bytes") + number("cache_bytes"), "{result}");
        assert!(number("account_peak_bytes") <= number("limit_bytes"), "{result}");
        assert_eq!(result["within_limit"], true, "{result}");
    }
}

/// Neither the records nor the bounds above them are kept in memory. A step reads the bytes that LeoAM predicts.
#[test]
fn streamed_summaries_are_read_and_not_kept() {
    let arguments = ["resident", "--layers", "3", "--context", "8192", "--steps", "2", "--json"];
    let more =
        ["--method", "records,quest,leoam:raw", "--limit", "48MiB", "--cache-mib", "0", "--summaries", "streamed"];
    let transfer = ["--group", "64", "--budget", "832", "--predict", "off"];
    let found = results(&[&arguments[..], &more[..], &transfer[..]].concat());
    assert_eq!(found.len(), 3);
    for result in &found {
        let number = |field: &str| result[field].as_f64().expect("a number");
        assert_eq!(number("summary_bytes"), 0.0, "{result}");
        // One selected group of thirteen is in memory and not read.
        let (moved, expected) = (number("read_of_kv"), number("alpha_plus_records"));
        assert!((0.90..=1.05).contains(&(moved / expected)), "{result}");
    }
}
