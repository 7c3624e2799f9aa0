//! Groups are what the coder makes of them, after any history.

use crate::model::{Model, RAW, Shape, append, shapes};
use crate::stores::{features, open};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use stratakv::export::ImportOptions;
use stratakv::{CreateOptions, Durability, ErrorKind, OpenSequence, StoredSummary};
use stratakv_tests::count_from_env;
use stratakv_tests::disk::{assert_clean, device_dirs, fast_scratch};

#[derive(Clone, Debug)]
enum Step {
    Append(usize),
    Truncate(f64),
    Commit,
    Fork,
    Reopen,
    Export,
    Compact,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => prop_oneof![1..4_usize, 1..90_usize].prop_map(Step::Append),
        2 => (0.0..1.0_f64).prop_map(Step::Truncate),
        3 => Just(Step::Commit),
        1 => Just(Step::Fork),
        2 => Just(Step::Reopen),
        1 => Just(Step::Export),
        1 => Just(Step::Compact),
    ]
}

fn history(shape: &Shape, copies: u8, cache: bool, steps: &[Step]) {
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), usize::from(copies));
    let mut store = open(&dirs, cache);
    let layout = shape.layout();
    let create = || CreateOptions::new().store_summary(StoredSummary::MinMax).copies(copies);
    let mut key = "first".to_owned();
    let mut sequence = store.create_sequence(&layout, create().key(&*key)).expect("created");
    let mut live = Model::new(shape);
    let mut durable: Option<(String, Model)> = None;
    let mut next = 0_u64;
    for (at, step) in steps.iter().chain([&Step::Commit, &Step::Reopen]).enumerate() {
        match step {
            Step::Append(tokens) => {
                let seeds: Vec<u64> = (next..next + *tokens as u64).collect();
                next += *tokens as u64;
                append(&mut sequence, shape, &seeds);
                seeds.iter().for_each(|seed| live.push(*seed));
            }
            Step::Truncate(share) => {
                let tokens = (live.len() as f64 * share) as usize;
                sequence.truncate(tokens as u64).expect("cut");
                live.truncate(tokens);
            }
            Step::Commit => {
                sequence.commit(Durability::Sync).expect("committed");
                durable = Some((key.clone(), live.clone()));
            }
            Step::Fork => {
                key = format!("{at}");
                sequence = sequence.fork_as(&key).expect("a fork");
            }
            Step::Reopen => {
                drop(sequence);
                store.close().expect("closed");
                assert_clean(&dirs, "between");
                store = open(&dirs, cache);
                let (kept, model) = durable.clone().unwrap_or_else(|| ("none".into(), Model::new(shape)));
                sequence = match store.open_sequence(&kept, OpenSequence::new().layout(&layout)) {
                    Ok(sequence) => sequence,
                    Err(e) => {
                        assert!(durable.is_none() && e.kind() == ErrorKind::NotFound, "{e}");
                        store.create_sequence(&layout, create().key("none")).expect("created")
                    }
                };
                (key, live) = (kept, model);
            }
            Step::Export => {
                let mut file = Vec::new();
                sequence.export(&mut file).expect("an export");
                let path = std::path::Path::new("session.skv");
                let report = kvfsck::check_reader(&file[..], file.len() as u64, path, &kvfsck::Options::default(), &());
                assert!(report.clean, "{}", report.to_text());
                key = format!("{at}");
                let options = ImportOptions::new().key(&*key).copies(copies);
                sequence = store.import(&file[..], &layout, options).expect("an import");
                durable = Some((key.clone(), live.clone()));
            }
            Step::Compact => {
                store.clean().expect("cleaned");
            }
        }
        live.check(&store, &sequence);
    }
    drop(sequence);
    store.close().expect("closed");
    assert_clean(&dirs, "at the end");
    let due = if shape.layers.iter().any(|layer| layer.codecs != RAW) { 5 } else { 1 };
    assert!(features(&dirs).iter().all(|found| found & 5 == due), "{:?}", features(&dirs));
}

#[test]
fn groups_are_what_the_coder_makes_of_them() {
    let strategy = (0..shapes().len(), 1..=2_u8, any::<bool>(), proptest::collection::vec(step(), 1..14));
    let config = Config {
        cases: count_from_env("STRATAKV_CODEC_CASES", 48) as u32,
        failure_persistence: None,
        ..Config::default()
    };
    TestRunner::new(config)
        .run(&strategy, |(shape, copies, cache, steps)| {
            history(&shapes()[shape], copies, cache, &steps);
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{e}"));
}
