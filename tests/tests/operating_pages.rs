//! Compares the operator's pages with the code. Every option has a row with its default, and every counter has a row.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;
use stratakv::options::CacheOptions;
use stratakv::store::{Health, Usage};
use stratakv::{ByteSize, StoreOptions};

fn page(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operating").join(name);
    fs::read_to_string(path).expect("the page")
}

/// Returns the second cell of each table row, by each name in backticks of its first cell.
fn rows(page: &str) -> BTreeMap<String, String> {
    let mut rows = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        let (first, second) = (cells.next().expect("a cell"), cells.next().expect("two cells"));
        for name in first.split('`').skip(1).step_by(2) {
            rows.insert(name.to_owned(), second.to_owned());
        }
    }
    rows
}

fn fields(value: &impl serde::Serialize) -> serde_json::Map<String, Value> {
    match serde_json::to_value(value).expect("JSON") {
        Value::Object(fields) => fields,
        other => panic!("not a structure: {other}"),
    }
}

/// Returns the default as the page writes it.
fn written(name: &str, default: &Value) -> String {
    match default {
        Value::Null => match name {
            "segment_bytes" => StoreOptions::default().segment_size().to_string().replace(".0", ""),
            "shard_threads" => "one per device".into(),
            "gap_limit" => "by device".into(),
            _ => "none".into(),
        },
        Value::Array(list) if list.is_empty() => "none".into(),
        Value::Number(number) if name.ends_with("_bytes") || name.ends_with("_limit") => {
            ByteSize(number.as_u64().expect("bytes")).to_string().replace(".0", "")
        }
        Value::Number(number) if number.is_f64() && name.ends_with("_watermark") => {
            format!("{:.2}", number.as_f64().expect("a share"))
        }
        other => other.to_string().trim_matches('"').to_owned(),
    }
}

#[test]
fn settings_page_has_every_option_with_its_default() {
    let rows = rows(&page("settings.md"));
    for (name, default) in fields(&StoreOptions::default()) {
        let row = rows.get(&name).unwrap_or_else(|| panic!("settings.md has no row for `{name}`"));
        assert_eq!(row.trim_matches('`'), written(&name, &default), "`{name}`");
    }
}

#[test]
fn settings_keep_their_values_in_text() {
    let options = StoreOptions::default().device("a").capacity(ByteSize::gib(2)).lazy_delay(Duration::from_millis(7));
    let options = options.hedge_percentile(None).cache(CacheOptions::new(ByteSize::mib(4)));
    let text = serde_json::to_string(&options).unwrap();
    assert_eq!(serde_json::from_str::<StoreOptions>(&text).unwrap(), options, "{text}");
    let read: StoreOptions = serde_json::from_str(r#"{"lazy_delay_ms": 7, "devices": ["a"]}"#).unwrap();
    assert_eq!(read, StoreOptions::default().device("a").lazy_delay(Duration::from_millis(7)));
    assert!(serde_json::from_str::<StoreOptions>(r#"{"lazy_delay": 7}"#).is_err());
    let read: StoreOptions = serde_json::from_str(r#"{"memory_limit": "64MiB", "capacity": 4096}"#).unwrap();
    assert_eq!(read, StoreOptions::default().memory_limit(ByteSize::mib(64)).capacity(ByteSize::kib(4)));
    assert!(serde_json::from_str::<StoreOptions>(r#"{"memory_limit": "much"}"#).is_err());
}

#[test]
fn monitoring_page_has_every_counter() {
    let rows = rows(&page("monitoring.md"));
    let device = stratakv::metrics::DeviceSnapshot::default();
    let health = fields(&Health::default()).into_iter().map(|(name, _)| name).filter(|name| name != "devices");
    let counters = fields(&device).into_iter().map(|(name, _)| name);
    for name in health.chain(counters) {
        assert!(rows.contains_key(&name), "monitoring.md has no row for `{name}`");
    }
    let text = page("monitoring.md");
    for name in fields(&Usage::default()).keys().filter(|name| !matches!(name.as_str(), "devices" | "limited")) {
        let named = text.contains(&format!("`{name}`")) || name == "capacity_bytes";
        assert!(named, "monitoring.md does not explain `{name}`");
    }
}
