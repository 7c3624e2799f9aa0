//! Random histories of a sequence with methods that choose entries, beside a plain model.
//!
//! [`EntryHistory`] says what a history does and checks. `STRATAKV_TEST_HISTORIES` sets the number of histories, and
//! `STRATAKV_TEST_SEED` the first seed.

use stratakv::{CreateOptions, Store};
use stratakv_testing::EntryHistory;

#[test]
fn every_history_attends_to_each_entry_once_and_to_its_own_bytes() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    let (histories, first) =
        (number("STRATAKV_TEST_HISTORIES").unwrap_or(40), number("STRATAKV_TEST_SEED").unwrap_or(1));
    let dir = tempfile::tempdir().unwrap();
    let store = Store::options().device(dir.path()).open().unwrap();
    let mut paged = 0;
    for seed in first..first + histories {
        let run = std::panic::AssertUnwindSafe(|| {
            paged += EntryHistory::new(store.clone(), format!("history-{seed}"), CreateOptions::new(), seed).run();
        });
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("repeat with STRATAKV_TEST_HISTORIES=1 STRATAKV_TEST_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
    assert!(paged > 0 || histories < 40, "no selection read pages of stored clusters");
}
