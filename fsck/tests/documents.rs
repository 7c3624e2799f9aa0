//! The operator's page about kvfsck, compared with the code: it names every finding code and exit code once.

use kvfsck::{Code, EXIT_CLEAN, EXIT_DAMAGE, EXIT_IN_USE, EXIT_IO, EXIT_UNSUPPORTED, EXIT_USAGE};
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
