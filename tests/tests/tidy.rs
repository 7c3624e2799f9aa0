//! Rules of the code base that the compiler does not check.
//!
//! - Modules of the engine import only from the floors below.
//! - Unsafe code, vector code, CPU detection and float conversion stay in their rooms.
//! - Files are small, every crate keeps the lints, and kvfsck does not depend on the engine.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use stratakv_tests::disk::files;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_path_buf()
}

/// Returns the source files below a directory with their text.
fn sources(dir: &str) -> Vec<(String, String)> {
    let base = root().join(dir);
    let rust = files(&base).into_iter().filter(|path| path.extension().is_some_and(|e| e == "rs"));
    rust.map(|path| {
        let text = fs::read_to_string(base.join(&path)).expect("a source file");
        (path.to_string_lossy().into_owned(), text)
    })
    .collect()
}

/// A module imports only from floors below its own.
const FLOORS: &[&[&str]] = &[
    &["sync", "kernels", "huge_pages", "events"],
    &["error", "metrics"],
    &["options", "layout", "io", "attention"],
    &["codec", "catalog", "cache", "retrieval"],
    &["log"],
    &["pools"],
    &["plan", "recovery"],
    &["read"],
    &["sequence", "maintenance"],
    &["store"],
    &["pipeline"],
    &["export", "sim"],
];

fn floor(module: &str) -> Option<usize> {
    FLOORS.iter().position(|floor| floor.contains(&module))
}

/// Returns the modules that a source file names.
fn uses(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
        for (at, _) in line.match_indices("crate::") {
            // Names that end in "crate" do not count.
            let before = line[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '$') {
                continue;
            }
            let rest = &line[at + "crate::".len()..];
            let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            assert!(!name.is_empty(), "name one module per import: {line}");
            found.insert(name);
        }
    }
    found
}

#[test]
fn engine_modules_import_from_floors_below() {
    let mut wrong = Vec::new();
    for (path, text) in sources("engine/src") {
        let module = path.split('/').next().and_then(|m| m.strip_suffix(".rs").or(Some(m))).expect("a module");
        if module == "lib" {
            continue;
        }
        let Some(own) = floor(module) else { panic!("{module} has no floor: give it one") };
        for other in uses(&text).into_iter().filter(|other| other != module) {
            match floor(&other) {
                Some(theirs) if theirs < own => {}
                Some(theirs) => wrong.push(format!("{path} (floor {}) uses {other} (floor {})", own + 1, theirs + 1)),
                None => wrong.push(format!("{path} uses crate::{other}: name it by its module")),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn unsafe_stays_in_its_rooms() {
    let sources_of = ["engine/src", "fsck/src", "format-spec/src", "examples/llama/src", "bench/src", "tests/src"];
    let others = ["engine/examples", "engine/tests", "examples/llama/tests", "testing/src", "tests/tests"];
    for dir in sources_of.into_iter().chain(others) {
        for (path, text) in sources(dir) {
            let room = match dir {
                "engine/src" => path.starts_with("io/") || path.starts_with("kernels/") || path == "huge_pages.rs",
                // The plain io_uring loop and LMDB's memory map, which benchmarks compare the engine with.
                "bench/src" => path == "support/bare.rs" || path == "peers/stores/lmdb.rs",
                // Maps the weight files of models.
                "examples/llama/src" => path == "weights/mapping.rs",
                // Memory that the embedder owns.
                "engine/examples" => path == "read_into_region.rs",
                // Memory and allocators of the tests' own.
                "engine/tests" => matches!(path.as_str(), "region.rs" | "allocations.rs" | "choice_memory.rs"),
                _ => false,
            };
            for (number, line) in text.lines().enumerate() {
                let code = line.split("//").next().unwrap_or_default();
                let code = code.split('"').step_by(2).collect::<String>();
                let is_unsafe = code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe");
                assert!(room || !is_unsafe, "{dir}/{path}:{}: {line}", number + 1);
                for mark in [concat!("todo", "!("), concat!("unimplemented", "!("), concat!("dbg", "!(")] {
                    assert!(!code.contains(mark), "{dir}/{path}:{}: {line}", number + 1);
                }
            }
        }
    }
    let forbids = concat!("#![forbid(", "unsafe_code)]");
    for lib in ["fsck/src/lib.rs", "format-spec/src/lib.rs", "tests/src/lib.rs"] {
        assert!(fs::read_to_string(root().join(lib)).expect("a library").contains(forbids), "{lib}");
    }
}

/// A function compiled for an instruction set is sound only if its caller asked for that set. One file asks, so that
/// one reading shows it.
#[test]
fn one_file_detects_cpu_features() {
    let marks = [concat!("_feature_", "detected"), concat!("__", "cpuid"), concat!("getaux", "val")];
    for dir in ["engine/src", "fsck/src", "format-spec/src", "examples/llama/src", "bench/src", "tests/src"] {
        for (path, text) in sources(dir) {
            if (dir, path.as_str()) == ("engine/src", "kernels/dispatch.rs") {
                continue;
            }
            for (number, line) in text.lines().enumerate() {
                let mark = marks.iter().find(|mark| line.contains(**mark));
                assert!(mark.is_none(), "{dir}/{path}:{}: ask kernels/dispatch.rs: {line}", number + 1);
            }
        }
    }
}

/// The rounding of f16 and bf16 is part of what a store holds. One file decides it.
#[test]
fn one_file_widens_and_narrows() {
    let marks =
        ["f16::from_f32", "f16::from_f64", ".to_f32()", ".to_f64()", "convert_to_f32_slice", "convert_from_f32_slice"];
    for (path, text) in sources("engine/src") {
        let is_test = path.split('/').any(|part| part == "tests.rs" || part == "tests");
        if path == "kernels/convert.rs" || is_test {
            continue;
        }
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        for (number, line) in code.lines().enumerate() {
            let mark = marks.iter().find(|mark| line.contains(**mark));
            assert!(mark.is_none(), "engine/src/{path}:{}: call kernels/convert.rs: {line}", number + 1);
        }
    }
}

/// The vector code is in one room, where the rules of its callers can be read together.
#[test]
fn vector_code_stays_in_the_kernels() {
    let marks = [concat!("multi", "version!"), concat!("target_", "feature"), "std::arch", "core::arch"];
    for (path, text) in sources("engine/src") {
        for (number, line) in text.lines().enumerate().filter(|_| !path.starts_with("kernels/")) {
            let mark = marks.iter().find(|mark| line.contains(**mark));
            assert!(mark.is_none(), "engine/src/{path}:{}: move it to kernels: {line}", number + 1);
        }
    }
}

#[test]
fn files_are_small() {
    for dir in ["engine/src", "fsck/src", "format-spec/src", "examples/llama/src", "bench/src", "tests/src"] {
        for (path, text) in sources(dir) {
            let lines = text.lines().count();
            assert!(lines <= 700, "{dir}/{path} has {lines} lines: split it along the path of the data");
        }
    }
}

/// A lock taken in a field of a literal is held until the literal is complete, whatever the order of its fields.
#[test]
fn no_lock_is_taken_in_a_field_of_a_literal() {
    let is_name = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_');
    let locks = |line: &str| {
        let field = line.trim_start().split_once(": ").filter(|(name, _)| is_name(name));
        field.is_some_and(|(_, value)| ["lock(", "hold("].iter().any(|lock| value.contains(lock)))
    };
    assert!(
        locks("    stuck: lock(&inner.space).stuck(),") && !locks("    let stuck: u64 = lock(&inner.space).stuck();")
    );
    let sources = sources("engine/src");
    assert!(!sources.is_empty());
    for (path, text) in sources {
        for (at, line) in text.lines().enumerate() {
            assert!(!locks(line), "engine/src/{path}:{}: take it in a statement before: {}", at + 1, line.trim());
        }
    }
}

fn manifest(path: &Path) -> toml::Table {
    let text = fs::read_to_string(path.join("Cargo.toml")).expect("a Cargo.toml");
    text.parse().expect("TOML")
}

fn members() -> Vec<String> {
    let workspace = manifest(&root());
    let members = workspace["workspace"]["members"].as_array().expect("members");
    members.iter().map(|m| m.as_str().expect("a path").to_owned()).collect()
}

#[test]
fn every_crate_keeps_the_lints() {
    for member in members() {
        let table = manifest(&root().join(&member));
        let lints = table.get("lints").and_then(|l| l.get("workspace")).and_then(toml::Value::as_bool);
        assert_eq!(lints, Some(true), "{member} does not take the lints of the workspace");
    }
}

#[test]
fn the_checker_is_a_second_reader() {
    let depends = |member: &str| -> BTreeSet<String> {
        let table = manifest(&root().join(member));
        let tables = ["dependencies", "dev-dependencies", "build-dependencies"];
        let names = |key: &&str| table.get(*key).and_then(toml::Value::as_table).map(|t| t.keys().cloned());
        tables.iter().filter_map(names).flatten().collect()
    };
    assert!(!depends("fsck").contains("stratakv"), "kvfsck must not depend on the engine");
    assert!(!depends("engine").contains("kvfsck"), "the engine must not depend on kvfsck");
    assert!(!depends("testing").contains("kvfsck"), "the engine's tests must not depend on kvfsck");
    let format = depends("format-spec");
    assert!(!format.contains("stratakv") && !format.contains("kvfsck"), "{format:?}");
}

#[test]
fn texts_are_about_the_code() {
    let mut wrong = Vec::new();
    let mut texts: Vec<PathBuf> = Vec::new();
    for dir in members().iter().map(String::as_str).chain(["docs", "fuzz", "."]) {
        let base = root().join(dir);
        if !base.is_dir() {
            continue;
        }
        let list: Vec<PathBuf> = match dir {
            "." => fs::read_dir(&base).expect("the workspace").filter_map(|e| e.ok().map(|e| e.path())).collect(),
            _ => files(&base).into_iter().map(|path| base.join(path)).collect(),
        };
        texts.extend(list.into_iter().filter(|path| {
            let kept = path.components().all(|part| part.as_os_str() != "target" && part.as_os_str() != "fixtures");
            kept && path.extension().is_some_and(|e| ["rs", "md", "toml", "sh", "py"].iter().any(|k| e == *k))
        }));
    }
    let homes = [concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/wo", "rk/"), concat!("/tmp", "/wt")];
    for path in texts {
        let Ok(text) = fs::read_to_string(&path) else { continue };
        for (number, line) in text.lines().enumerate() {
            let lower = line.to_lowercase();
            let home = homes.iter().find(|home| line.contains(**home));
            let at = lower.find(concat!("issue", " ")).map(|at| &lower[at + 6..]);
            let numbered =
                at.is_some_and(|rest| rest.trim_start_matches('#').starts_with(|c: char| c.is_ascii_digit()));
            if home.is_some() || numbered {
                wrong.push(format!("{}:{}: {line}", path.display(), number + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
