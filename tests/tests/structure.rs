//! Rules of the tree's structure: imports, names, lengths, headers, words. `tests/tests/tidy.rs` has the rules of its
//! content.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use stratakv_tests::disk::files;

const CRATES: [&str; 6] = ["engine", "fsck", "format-spec", "examples/llama", "bench", "tests"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_path_buf()
}

/// Returns the source files below a directory, with their text.
fn sources(dir: &str) -> Vec<(String, String)> {
    let base = root().join(dir);
    let rust = files(&base).into_iter().filter(|path| path.extension().is_some_and(|e| e == "rs"));
    let rust = rust.filter(|path| !path.starts_with("target"));
    rust.map(|path| {
        let text = fs::read_to_string(base.join(&path)).expect("a source file");
        (path.to_string_lossy().into_owned(), text)
    })
    .collect()
}

/// Returns whether a file holds nothing but tests.
fn is_test_file(path: &str) -> bool {
    path.split('/').any(|part| part == "tests" || part == "tests.rs" || part == "loom.rs")
}

/// Returns the code in front of the tests at a file's end.
fn without_tests(text: &str) -> &str {
    let tests = ["\n#[cfg(test)]\nmod ", "\n#[cfg(all(test"];
    let end = tests.iter().filter_map(|mark| text.find(mark)).min();
    &text[..end.unwrap_or(text.len())]
}

/// Returns the line without its comment and without the contents of strings.
fn code(line: &str) -> String {
    let mut out = String::new();
    let (mut in_string, mut chars) = (false, line.chars().peekable());
    while let Some(c) = chars.next() {
        match (in_string, c) {
            (true, '\\') => {
                chars.next();
            }
            (_, '"') => in_string = !in_string,
            (true, _) => {}
            (false, '\'') => {
                // A character literal may hold a quote or a brace. A lifetime has no closing quote.
                let mut rest = chars.clone();
                let first = rest.next();
                if first == Some('\\') {
                    while chars.next().is_some_and(|c| c != '\'') {}
                } else if rest.next() == Some('\'') {
                    chars.next();
                    chars.next();
                }
            }
            (false, '/') if chars.peek() == Some(&'/') => return out,
            (false, c) => out.push(c),
        }
    }
    out
}

/// The module tree of a crate's sources.
struct Modules {
    /// The file of each module path, as `a::b`; the crate's root is empty.
    files: BTreeMap<String, String>,
    /// The re-exports of each module file: the path of each name.
    exports: BTreeMap<String, BTreeMap<String, String>>,
    /// Imports of each file, by full path, re-exports aside.
    imports: BTreeMap<String, BTreeSet<String>>,
}

/// Returns the module path of a file: `a/b.rs` and `a/b/mod.rs` are `a::b`.
fn module_of(path: &str) -> String {
    let stem = path.trim_end_matches(".rs").trim_end_matches("/mod");
    if stem == "lib" || stem == "main" { String::new() } else { stem.replace('/', "::") }
}

/// Returns every path of a `use` tree: `a::{b, c::{d, self}}` has three.
fn leaves(tree: &str) -> Vec<String> {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let path = tree.split(" as ").next().unwrap_or_default().trim();
        return if path.is_empty() { Vec::new() } else { vec![path.trim_end_matches("::self").to_owned()] };
    };
    let (prefix, inner) = (&tree[..open], &tree[open + 1..tree.rfind('}').unwrap_or(tree.len())]);
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, c) in inner.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&inner[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&inner[start..]);
    let inner = parts.into_iter().flat_map(leaves);
    inner.map(|leaf| format!("{prefix}{leaf}").trim_end_matches("::self").to_owned()).collect()
}

/// Makes a path of a `use` in `module` count from the crate's root. Paths of other crates are none.
fn absolute(path: &str, module: &str, children: &BTreeMap<String, String>) -> Option<String> {
    let join = |base: &str, rest: &str| if base.is_empty() { rest.to_owned() } else { format!("{base}::{rest}") };
    if let Some(rest) = path.strip_prefix("crate::") {
        return Some(rest.to_owned());
    }
    if let Some(rest) = path.strip_prefix("self::") {
        return Some(join(module, rest));
    }
    let (mut base, mut rest) = (module, path);
    while let Some(next) = rest.strip_prefix("super::") {
        base = base.rsplit_once("::").map_or("", |(parent, _)| parent);
        rest = next;
    }
    if rest.len() < path.len() {
        return Some(join(base, rest));
    }
    let first = join(module, path.split("::").next().unwrap_or_default());
    children.contains_key(&first).then(|| join(module, path))
}

impl Modules {
    fn read(dir: &str) -> Self {
        let sources: Vec<_> = sources(dir).into_iter().filter(|(path, _)| !is_test_file(path)).collect();
        let files: BTreeMap<_, _> = sources.iter().map(|(path, _)| (module_of(path), path.clone())).collect();
        let mut modules = Self { files, exports: BTreeMap::new(), imports: BTreeMap::new() };
        for (path, text) in &sources {
            let module = module_of(path);
            let stripped: String = without_tests(text).lines().map(|line| code(line) + " ").collect();
            for statement in stripped.split(';') {
                let statement = statement.rsplit(['}', '{']).next().map_or(statement, |_| statement);
                let Some(at) = find_use(statement) else { continue };
                let (before, tree) = (&statement[..at], &statement[at + 4..]);
                let is_public = before.trim_end().ends_with("pub") || before.trim_end().ends_with(')');
                for leaf in leaves(tree) {
                    let Some(full) = absolute(&leaf, &module, &modules.files) else { continue };
                    if is_public {
                        let name = full.rsplit("::").next().unwrap_or_default().to_owned();
                        modules.exports.entry(module.clone()).or_default().insert(name, full);
                    } else {
                        modules.imports.entry(path.clone()).or_default().insert(full);
                    }
                }
            }
        }
        modules
    }

    /// Returns the file that defines a path, through re-exports.
    fn target(&self, path: &str) -> Option<&String> {
        let mut path = path.to_owned();
        for _ in 0..8 {
            let mut module = path.as_str();
            while !self.files.contains_key(module) {
                module = module.rsplit_once("::")?.0;
            }
            let rest = path[module.len()..].trim_start_matches("::");
            let first = rest.split("::").next().unwrap_or_default();
            match self.exports.get(module).and_then(|names| names.get(first)) {
                Some(next) if !first.is_empty() => path.clone_from(next),
                _ => return self.files.get(module),
            }
        }
        None
    }

    /// Returns which files each file imports.
    fn edges(&self) -> BTreeMap<&String, BTreeSet<&String>> {
        let mut edges: BTreeMap<&String, BTreeSet<&String>> = BTreeMap::new();
        for (file, paths) in &self.imports {
            let targets = paths.iter().filter_map(|path| self.target(path)).filter(|target| *target != file);
            // The crate's root re-exports everything and defines nothing.
            edges.entry(file).or_default().extend(targets.filter(|target| *target != "lib.rs"));
        }
        edges
    }
}

/// Finds a `use` item that begins a statement.
fn find_use(statement: &str) -> Option<usize> {
    let at = statement.rfind("use ")?;
    let before = statement[..at].trim_end();
    let begins = before.is_empty() || before.ends_with(['}', '{', ']', ')']) || before.ends_with("pub");
    begins.then_some(at)
}

/// Returns the files that reach each other, as groups of two and more.
fn circles<'a>(edges: &BTreeMap<&'a String, BTreeSet<&'a String>>) -> Vec<Vec<&'a String>> {
    let reach = |from: &'a String| -> BTreeSet<&'a String> {
        let (mut seen, mut stack) = (BTreeSet::new(), vec![from]);
        while let Some(at) = stack.pop() {
            for next in edges.get(at).into_iter().flatten() {
                if seen.insert(*next) {
                    stack.push(next);
                }
            }
        }
        seen
    };
    let all: BTreeMap<&String, BTreeSet<&String>> = edges.keys().map(|file| (*file, reach(file))).collect();
    let mut found = Vec::new();
    let mut done = BTreeSet::new();
    for (file, reached) in &all {
        if reached.contains(*file) && !done.contains(*file) {
            let own: Vec<&String> = all
                .iter()
                .filter(|(other, back)| reached.contains(**other) && back.contains(*file))
                .map(|x| *x.0)
                .collect();
            done.extend(own.iter().copied());
            found.push(own);
        }
    }
    found
}

#[test]
fn files_of_the_engine_import_in_no_circle() {
    let modules = Modules::read("engine/src");
    let edges = modules.edges();
    assert!(edges.values().map(BTreeSet::len).sum::<usize>() > 300, "imports are not read");
    let mut wrong = Vec::new();
    for circle in circles(&edges) {
        wrong.push(format!("circle of {} files:", circle.len()));
        for file in &circle {
            let within: Vec<_> = edges[*file].iter().filter(|to| circle.contains(to)).map(|to| to.as_str()).collect();
            wrong.push(format!("  {file} -> {}", within.join(", ")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn rooms_import_only_what_they_may() {
    let modules = Modules::read("engine/src");
    let room = |file: &str| file.split('/').next().unwrap_or_default().trim_end_matches(".rs").to_owned();
    let mut wrong = Vec::new();
    for (file, targets) in modules.edges() {
        let forbidden: &[&str] = match room(file).as_str() {
            "log" => &["retrieval"],
            "retrieval" => &["io", "catalog", "cache", "log", "plan"],
            "kernels" => &["io", "retrieval", "attention", "log", "catalog", "error", "metrics"],
            _ => &[],
        };
        let hits = targets.iter().filter(|to| forbidden.contains(&room(to).as_str()));
        wrong.extend(hits.map(|to| format!("{file} imports {to}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_type_name_is_defined_once_in_a_crate() {
    let mut wrong = Vec::new();
    for dir in CRATES {
        let mut defined: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (path, text) in sources(&format!("{dir}/src")).into_iter().filter(|(path, _)| !is_test_file(path)) {
            for (number, line) in without_tests(&text).lines().enumerate() {
                if let Some(name) = defines(&code(line)) {
                    defined.entry(name).or_default().push(format!("{dir}/src/{path}:{}", number + 1));
                }
            }
        }
        wrong.extend(
            defined
                .into_iter()
                .filter(|(_, places)| places.len() > 1)
                .map(|(name, places)| format!("{name} is defined in {}", places.join(", "))),
        );
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns the type that a line defines.
fn defines(line: &str) -> Option<String> {
    let mut words = line.split_whitespace().skip_while(|word| *word == "pub" || word.starts_with("pub("));
    if !matches!(words.next()?, "struct" | "enum" | "trait" | "union") {
        return None;
    }
    let name: String = words.next()?.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (!name.is_empty()).then_some(name)
}

/// A field belongs to one concern. An object with more of them is split.
#[test]
fn the_largest_objects_stay_small() {
    for (path, name) in [("engine/src/sequence/handle.rs", "Sequence"), ("engine/src/log/store_state.rs", "StoreInner")]
    {
        let text = fs::read_to_string(root().join(path)).expect("a source file");
        let start = text.find(&format!("struct {name} {{")).unwrap_or_else(|| panic!("{path} does not define {name}"));
        let body = &text[start..start + text[start..].find("\n}").expect("the end of the struct")];
        let fields = body.lines().skip(1).filter(|line| code(line).contains(": ")).count();
        assert!((1..=12).contains(&fields), "{name} has {fields} fields");
    }
}

#[test]
fn lines_of_sources_fit_a_screen() {
    let mut wrong = Vec::new();
    for dir in CRATES.into_iter().chain(["fuzz"]) {
        for (path, text) in sources(dir) {
            let long = text.lines().enumerate().filter(|(_, line)| line.chars().count() > 120);
            wrong.extend(long.map(|(number, _)| format!("{dir}/{path}:{}", number + 1)));
        }
    }
    assert!(wrong.is_empty(), "lines of over 120 characters:\n{}", wrong.join("\n"));
}

/// Returns the Markdown documents of the project.
fn documents() -> Vec<(String, String)> {
    let base = root();
    let mut paths: Vec<PathBuf> =
        ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "UNSAFE.md", "SECURITY.md"].map(PathBuf::from).to_vec();
    for dir in ["docs", "format-spec", "examples/llama", "fuzz", "bench", "tests"] {
        let outside = ["target", "fixtures"];
        let all = files(&base.join(dir)).into_iter().filter(|path| !outside.iter().any(|o| path.starts_with(o)));
        paths.extend(
            all.filter(|path| path.extension().is_some_and(|e| e == "md")).map(|path| Path::new(dir).join(path)),
        );
    }
    let text = |path: PathBuf| {
        let text = fs::read_to_string(base.join(&path)).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        (path.to_string_lossy().into_owned(), text)
    };
    paths.into_iter().map(text).collect()
}

#[test]
fn documents_are_short() {
    let long = documents().into_iter().map(|(path, text)| (path, text.lines().count()));
    // The specification is read by chapter.
    let long: Vec<_> = long.filter(|(path, lines)| *lines > 200 && path != "format-spec/SPEC.md").collect();
    assert!(long.is_empty(), "documents of over 200 lines: {long:?}");
}

#[test]
fn prose_of_documents_wraps() {
    let mut wrong = Vec::new();
    for (path, text) in documents() {
        let mut in_code = false;
        for (number, line) in text.lines().enumerate() {
            let is_fence = line.trim_start().starts_with("```");
            in_code ^= is_fence;
            // Tables, code and the target of a link cannot be wrapped.
            let is_free = in_code || is_fence || line.contains('|') || line.contains("](") || line.starts_with('#');
            if !is_free && line.chars().count() > 100 {
                wrong.push(format!("{path}:{}", number + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "lines of over 100 characters:\n{}", wrong.join("\n"));
}

#[test]
fn links_between_documents_lead_somewhere() {
    let mut wrong = Vec::new();
    for (path, text) in documents() {
        let dir = root().join(&path).parent().expect("a directory").to_path_buf();
        for (at, _) in text.match_indices("](") {
            let link = text[at + 2..].split(')').next().unwrap_or_default().split('#').next().unwrap_or_default();
            if !link.is_empty() && !link.contains("://") && !link.starts_with("mailto:") && !dir.join(link).exists() {
                wrong.push(format!("{path}: {link}"));
            }
        }
    }
    assert!(wrong.is_empty(), "links to nothing:\n{}", wrong.join("\n"));
}

#[test]
fn every_room_has_a_header() {
    let mut wrong = Vec::new();
    for (path, text) in sources("engine/src") {
        let (lines, header) = (text.lines().count(), text.lines().take_while(|line| line.starts_with("//!")).count());
        let is_room = path.ends_with("/mod.rs") && !is_test_file(&path);
        if (is_room && header == 0) || (lines > 250 && header < 2 && !is_test_file(&path)) {
            wrong.push(format!("engine/src/{path} ({lines} lines, header of {header})"));
        }
    }
    assert!(wrong.is_empty(), "files without a header:\n{}", wrong.join("\n"));
}

/// Words of comments and documents that a reader has to translate.
#[test]
fn texts_use_plain_words() {
    let words = ["anew", "whoever", "so many", "in turn", "builds of before", "stands on", "is no number"];
    let has = |line: &str, word: &str| {
        let lower = line.to_lowercase();
        lower.match_indices(word).any(|(at, _)| {
            let is_letter = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
            !is_letter(lower[..at].chars().next_back()) && !is_letter(lower[at + word.len()..].chars().next())
        })
    };
    assert!(has("Made anew.", "anew") && !has("a new one", "anew"));
    let engine = sources("engine/src").into_iter().map(|(path, text)| (format!("engine/src/{path}"), text));
    let mut wrong = Vec::new();
    for (path, text) in engine.chain(documents().into_iter().filter(|(path, _)| path.starts_with("docs/"))) {
        for (number, line) in text.lines().enumerate() {
            let is_prose = path.ends_with(".md") || line.contains("//");
            if let Some(word) = words.iter().find(|word| is_prose && has(line, word)) {
                wrong.push(format!("{path}:{}: {word}", number + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
