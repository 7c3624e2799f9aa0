//! SPEC.md as the tests read it: its tables and its byte grids.
//!
//! - A **table** follows a heading `#### NAME` directly and has a header row and a row of `---`.
//! - A **byte grid** is a picture of a structure with 8 bytes per line. It starts with a line `=== NAME (N bytes) ===`.
//!   Each byte takes 12 columns, and each `|` starts a cell. A cell with text starts a field. A blank cell continues
//!   the field above it.

pub(crate) mod structs;

/// The text of SPEC.md.
pub(crate) const SPEC: &str = include_str!("../../SPEC.md");

/// The columns that a byte grid uses per byte.
const GRID_COLUMNS: usize = 12;

/// A table: the heading above it, and its rows of cells without the two header lines.
pub(crate) struct Table {
    pub(crate) heading: String,
    pub(crate) rows: Vec<Vec<String>>,
}

/// A byte grid: the structure it shows, the size in its title, and offset and name of each field.
pub(crate) struct Grid {
    pub(crate) name: String,
    pub(crate) size: usize,
    pub(crate) fields: Vec<(usize, String)>,
}

/// Returns the cells of a table row, trimmed.
fn cells(row: &str) -> Vec<String> {
    row.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
}

/// Returns the tables under headings `#### NAME`.
pub(crate) fn tables(spec: &str) -> Vec<Table> {
    let mut tables = Vec::new();
    let mut lines = spec.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(heading) = line.strip_prefix("#### ") else { continue };
        let mut rows = Vec::new();
        while let Some(row) = lines.next_if(|line| line.starts_with('|')) {
            rows.push(cells(row));
        }
        assert!(rows.len() > 2, "no table under {heading}");
        assert!(rows[1].iter().all(|cell| cell == "---"), "no header row under {heading}");
        rows.drain(..2);
        tables.push(Table { heading: heading.to_owned(), rows });
    }
    tables
}

/// Returns the rows of the table under `heading` in SPEC.md.
pub(crate) fn table(heading: &str) -> Vec<Vec<String>> {
    let found = tables(SPEC).into_iter().find(|table| table.heading == heading);
    found.unwrap_or_else(|| panic!("SPEC.md has no table {heading}")).rows
}

/// Returns the number that a cell holds, decimal or hexadecimal.
pub(crate) fn number(text: &str) -> u64 {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).expect("a number"),
        None => text.parse().expect("a number"),
    }
}

/// Returns the cells of all tables that hold an identifier whose first letter was lower-cased.
///
/// Such a word starts with a lower-case letter and has an upper-case letter later, as in `fLAG_MORE`, `cRC-32` or `kV`.
/// Tables without a `####` heading count too.
pub(crate) fn lower_cased_identifiers(spec: &str) -> Vec<String> {
    let is_lower_cased = |word: &str| {
        word.starts_with(|first: char| first.is_ascii_lowercase()) && word.contains(|c: char| c.is_ascii_uppercase())
    };
    let has_one = |cell: &String| cell.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(is_lower_cased);
    spec.lines().filter(|line| line.starts_with('|')).flat_map(cells).filter(has_one).collect()
}

/// Returns the byte grids of `spec`.
pub(crate) fn grids(spec: &str) -> Vec<Grid> {
    let mut grids = Vec::new();
    let mut lines = spec.lines().peekable();
    while let Some(line) = lines.next() {
        let title =
            line.starts_with("===").then(|| line.trim_matches(['=', ' '])).and_then(|title| title.split_once(" ("));
        let Some((name, size)) = title else { continue };
        let size: usize = size.trim_end_matches(" bytes)").parse().expect("a size");
        let mut fields = Vec::new();
        for row in 0..size.div_ceil(8) {
            let line =
                lines.next_if(|line| line.starts_with('|')).unwrap_or_else(|| panic!("the grid of {name} is short"));
            let starts: Vec<usize> = line.match_indices('|').map(|(at, _)| at).collect();
            for cell in starts.windows(2) {
                assert_eq!(cell[0] % GRID_COLUMNS, 0, "the grid of {name} has a crooked line: {line}");
                let text = line[cell[0] + 1..cell[1]].trim();
                if !text.is_empty() {
                    fields.push((row * 8 + cell[0] / GRID_COLUMNS, text.to_owned()));
                }
            }
            assert_eq!(starts.last(), Some(&(8 * GRID_COLUMNS)), "a line of the grid of {name} is not 8 bytes wide");
        }
        grids.push(Grid { name: name.to_owned(), size, fields });
    }
    grids
}
