//! With the feature `tracing`, a store reports its work as spans and its faults as events.

use std::fmt::Write as _;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use stratakv::{CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, SelectRequest, Store, TensorView};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

const TOKENS: usize = 4096;

/// Keeps the names of spans, and the level and fields of events.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<String>>>);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "stratakv"
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut lines = self.0.lock().unwrap();
        lines.push(format!("span {}", span.metadata().name()));
        Id::from_u64(lines.len() as u64)
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(format!("{}", event.metadata().level()));
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Flips a bit in the middle of every segment below `dir`.
fn damage(dir: &Path) -> usize {
    let mut files = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files += damage(&path);
        } else if path.to_string_lossy().contains("seg") {
            let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
            // All keys and values of the test are ones, so the middle one of the ones belongs to a block.
            let bytes = std::fs::read(&path).unwrap();
            let one = 1.0_f32.to_le_bytes();
            let ones: Vec<usize> = (0..bytes.len() - 3).step_by(4).filter(|&at| bytes[at..at + 4] == one).collect();
            let at = ones[ones.len() / 2];
            file.write_all_at(&[bytes[at] ^ 1], at as u64).unwrap();
            files += 1;
        }
    }
    files
}

#[test]
fn a_damaged_block_is_an_event_and_work_is_spans() {
    let recorder = Recorder::default();
    let dir = tempfile::tempdir().unwrap();
    tracing::subscriber::with_default(recorder.clone(), || {
        let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).group_tokens(8).dtype(DType::F32);
        let layout = layout.build().unwrap();
        let open = || Store::options().device(dir.path()).open().unwrap();
        let store = open();
        let mut sequence = store.create_sequence(&layout, CreateOptions::new().key("s")).unwrap();
        let rows = vec![1.0_f32; TOKENS * 8];
        let view = TensorView::token_major(&rows, TOKENS, 1, 8);
        sequence.append(0, view, view).unwrap();
        sequence.commit(Durability::Sync).unwrap();
        drop(sequence);
        store.close().unwrap();
        assert_eq!(damage(dir.path()), 1);
        let store = open();
        let sequence = store.open_sequence("s", OpenSequence::new()).unwrap();
        let view = sequence.select(0, SelectRequest::all()).unwrap();
        let batch = store.read(&[&view]).wait().unwrap();
        let error = batch.get(0).err().expect("a damaged block");
        assert_eq!(error.kind(), ErrorKind::Corruption);
        assert_eq!(store.health().checksum_failures, 2);
    });
    let lines = recorder.0.lock().unwrap();
    for expected in ["span open", "span commit", "span read"] {
        assert!(lines.iter().any(|line| line == expected), "{expected}: {lines:?}");
    }
    let found = lines.iter().filter(|line| line.starts_with("WARN") && line.contains("checksum")).count();
    assert_eq!(found, 2, "{lines:?}");
}
