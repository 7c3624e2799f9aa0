//! The operator's page about kvfsck, compared with the code: it names every finding code and exit code once, and every
//! field of the map and the statistics.

use kvfsck::{Code, EXIT_CLEAN, EXIT_DAMAGE, EXIT_IN_USE, EXIT_IO, EXIT_UNSUPPORTED, EXIT_USAGE};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Returns the first cell of every table row of a section.
fn first_cells(page: &str, section: &str) -> Vec<String> {
    let start = page.find(section).unwrap_or_else(|| panic!("no section {section:?}"));
    let text = &page[start + section.len()..];
    let text = &text[..text.find("\n## ").unwrap_or(text.len())];
    let rows = text.lines().filter_map(|line| line.strip_prefix('|')?.split('|').next());
    let cells = rows.map(|cell| cell.trim().trim_matches('`').to_owned());
    cells.filter(|cell| cell != "code" && !cell.starts_with("---")).collect()
}

fn page() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operating/kvfsck.md");
    fs::read_to_string(path).expect("the page")
}

#[test]
fn page_explains_every_finding_code_in_the_order_of_the_code() {
    let codes: Vec<&str> = Code::ALL.iter().map(|code| code.as_str()).collect();
    assert_eq!(first_cells(&page(), "\n## Codes\n"), codes);
}

#[test]
fn page_explains_every_exit_code() {
    let codes = [EXIT_CLEAN, EXIT_DAMAGE, EXIT_USAGE, EXIT_UNSUPPORTED, EXIT_IO, EXIT_IN_USE];
    assert_eq!(first_cells(&page(), "\n## Exit codes\n"), codes.map(|code| code.to_string()));
}

/// Collects the names of all fields of a JSON value.
fn fields(value: &serde_json::Value, names: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Object(object) => object.iter().for_each(|(name, value)| {
            names.insert(name.clone());
            fields(value, names);
        }),
        serde_json::Value::Array(list) => list.iter().for_each(|value| fields(value, names)),
        _ => {}
    }
}

#[test]
fn page_names_every_field_of_the_map_and_the_statistics() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../format-spec/golden/v0.4/store-pools");
    let report = kvfsck::check(&[golden], &kvfsck::Options::default(), &()).expect("a report");
    let mut names = BTreeSet::new();
    fields(&serde_json::to_value(&report.pools).expect("JSON"), &mut names);
    fields(&serde_json::to_value(&report.stats).expect("JSON"), &mut names);
    assert!(names.len() > 50, "{names:?}");
    let page = page();
    let words: BTreeSet<&str> = page.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    let missing: Vec<_> = names.iter().filter(|name| !words.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "kvfsck.md does not name {missing:?}");
}
