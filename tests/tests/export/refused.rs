//! Files that are damaged, foreign or cut short are refused and leave nothing in the store.

use crate::files::{Step, assemble, export, history, kvfsck_says, open, pieces, refused, shapes, small};
use std::io::Read;
use stratakv::export::ImportOptions;
use stratakv::layout::LayerSpec;
use stratakv::{DType, Durability, ErrorKind, KvLayout};
use stratakv_format::export::{ExportEnd, ExportPage, PIECE_SUMMARY, PieceHeader};
use stratakv_format::{PAGE_BYTES, Unverified};
use stratakv_tests::count_from_env;
use stratakv_tests::disk::{assert_clean, copy_devices, device_dirs, fast_scratch};
use stratakv_tests::rng::{Rng, mix};
use zerocopy::IntoBytes;

#[test]
fn every_flipped_byte_is_found() {
    let (_scratch, store, file, layout) = small();
    for at in 0..file.len() {
        let mut bad = file.clone();
        bad[at] ^= 1 << (mix(at as u64) % 8);
        let kind = refused(&store, &bad, &layout);
        assert!(matches!(kind, ErrorKind::Corruption | ErrorKind::Unsupported), "byte {at}: {kind:?}");
        assert!(!kvfsck_says(&bad).clean, "byte {at}: kvfsck finds nothing");
    }
    assert!(kvfsck_says(&file).clean);
    store.import(&file[..], &layout, ImportOptions::new()).unwrap();
}

#[test]
fn a_file_of_another_length_is_refused() {
    let (_scratch, store, file, layout) = small();
    for len in (0..file.len()).step_by(7).chain(file.len() - 20..file.len()) {
        assert_eq!(refused(&store, &file[..len], &layout), ErrorKind::Corruption, "{len} bytes");
        assert!(kvfsck_says(&file[..len]).has_length_finding(), "{len} bytes");
    }
    for more in [1, 8, 4096] {
        let longer = [&file[..], &vec![0; more]].concat();
        assert_eq!(refused(&store, &longer, &layout), ErrorKind::Corruption, "{more} bytes more");
        assert!(kvfsck_says(&longer).has_length_finding(), "{more} bytes more");
    }
}

trait HasLength {
    fn has_length_finding(&self) -> bool;
}

impl HasLength for kvfsck::ExportReport {
    fn has_length_finding(&self) -> bool {
        !self.clean && self.findings.iter().any(|f| f.code == kvfsck::Code::ExportLength)
    }
}

#[test]
fn pieces_that_do_not_belong_are_refused_although_their_checksums_are_right() {
    let (_scratch, store, file, layout) = small();
    let (page, all) = (file[..PAGE_BYTES].to_vec(), pieces(&file));
    assert_eq!(assemble(&page, &all), file);
    let cases = count_from_env("STRATAKV_TEST_EXPORTS", 600) as u64;
    let mut refusals = 0;
    for seed in 0..cases {
        let mut rng = Rng(seed);
        let mut pieces = all.clone();
        for _ in 0..1 + rng.below(2) {
            let at = rng.below(pieces.len());
            match rng.below(9) {
                0 => drop(pieces.remove(at)),
                1 => pieces.insert(at, all[rng.below(all.len())].clone()),
                2 => {
                    let other = rng.below(pieces.len());
                    pieces.swap(at, other);
                }
                3 => pieces[at].0.kind = rng.below(10) as u16,
                4 => pieces[at].0.layer = rng.below(4) as u16,
                5 => pieces[at].0.first = rng.below(20) as u64,
                6 => pieces[at].0.tokens = rng.below(20) as u32,
                7 => {
                    let len = rng.below(300);
                    pieces[at].1.resize(len, rng.next_u64() as u8);
                }
                _ => {
                    let bytes = &mut pieces[at].1;
                    if !bytes.is_empty() {
                        let byte = rng.below(bytes.len());
                        bytes[byte] ^= rng.next_u64() as u8;
                    }
                }
            }
            if pieces.is_empty() {
                break;
            }
        }
        let bad = assemble(&page, &pieces);
        let imported = store.import(&bad[..], &layout, ImportOptions::new());
        let report = kvfsck_says(&bad);
        match imported {
            Ok(sequence) => {
                assert!(report.clean, "seed {seed}: the engine takes what kvfsck does not:\n{}", report.to_text());
                sequence.delete(Durability::Sync).unwrap();
            }
            Err(e) => {
                refusals += 1;
                // A file of another layout is valid, so kvfsck accepts it.
                let other = e.kind() == ErrorKind::LayoutMismatch;
                assert!(!report.clean || other, "seed {seed}: kvfsck takes what the engine does not: {e}");
                assert!(store.sequences().is_empty(), "seed {seed}");
            }
        }
    }
    assert!(refusals > cases / 2, "{refusals} of {cases}");
}

#[test]
fn an_export_that_contradicts_itself_is_refused_with_its_place() {
    let (_scratch, store, file, layout) = small();
    let (page, all) = (file[..PAGE_BYTES].to_vec(), pieces(&file));
    let refused = |bad: &[u8], code: kvfsck::Code, words: &str, offset: usize| {
        assert!(store.import(bad, &layout, ImportOptions::new()).is_err(), "{words}");
        assert!(store.sequences().is_empty(), "{words}");
        let report = kvfsck_says(bad);
        let found = report.findings.iter().find(|f| f.code == code && f.message.contains(words));
        let found = found.unwrap_or_else(|| panic!("{words}: {}", report.to_text()));
        assert_eq!(found.offset, Some(offset as u64), "{words}");
    };
    // The last piece names other numbers of pieces and bytes.
    let (nonce, last) = (u64::from_le_bytes(page[64..72].try_into().unwrap()), all.len() - 1);
    let start = file.len() - size_of::<PieceHeader>() - size_of::<ExportEnd>();
    for end in [(last as u64 + 1, file.len() as u64), (last as u64, file.len() as u64 - 8)] {
        let end = ExportEnd { pieces: end.0.into(), file_bytes: end.1.into() };
        let header = PieceHeader::new(&all[last].0, last as u64, nonce, end.as_bytes());
        let bad = [&file[..start], header.as_bytes(), end.as_bytes()].concat();
        refused(&bad, kvfsck::Code::ExportLength, "the end piece names", start);
    }
    // Bytes follow the layout in its piece.
    let mut longer = all.clone();
    longer[0].1.extend_from_slice(&[0; 8]);
    let exported = Unverified::<ExportPage>::at_front(&page, "export page").and_then(|page| page.verify());
    let mut exported = exported.expect("a page").into_inner();
    exported.layout_bytes = (exported.layout_bytes.get() + 8).into();
    let bad = assemble(&exported.encode(), &longer);
    refused(&bad, kvfsck::Code::ExportPiece, "bytes follow the layout in its piece", PAGE_BYTES);
    // Summaries of f16 keys have f16 elements.
    let mut other = all.clone();
    let nth = other.iter().position(|(piece, _)| piece.kind == PIECE_SUMMARY).expect("a summary");
    other[nth].0.element = Some(DType::Bf16);
    let start = assemble(&page, &other[..nth]).len();
    refused(&assemble(&page, &other), kvfsck::Code::ExportPiece, "the summaries have element type", start);
}

#[test]
fn another_model_is_refused() {
    let (_scratch, store, file, _) = small();
    let layout = |dtype, fingerprint| {
        let specs = [LayerSpec::full(2, 16), LayerSpec::full(1, 8)];
        let builder = KvLayout::builder().layer_specs(specs).dtype(dtype).group_tokens(4);
        builder.fingerprint([fingerprint; 32]).build().unwrap()
    };
    for (layout, word) in [(layout(DType::F16, 1), "fingerprint"), (layout(DType::Bf16, 0), "geometry")] {
        let error = store.import(&file[..], &layout, ImportOptions::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LayoutMismatch);
        assert!(error.to_string().contains(word), "{error}");
    }
    let right = layout(DType::F16, 0);
    let first = store.import(&file[..], &right, ImportOptions::new()).unwrap();
    let taken = store.import(&file[..], &right, ImportOptions::new()).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::AlreadyExists);
    let second = store.import(&file[..], &right, ImportOptions::new().key("other")).unwrap();
    assert_eq!((first.key(), second.key()), ("session", "other"));
    let nameless = store.import(&file[..], &right, ImportOptions::new().key("")).unwrap();
    assert_eq!(nameless.key(), "");
    assert_eq!(store.sequences().len(), 3);
}

/// A reader that copies the devices of a store after some bytes, and fails after some more.
struct Interrupted<'a> {
    file: &'a [u8],
    at: usize,
    copy_at: usize,
    fail_at: usize,
    copy: Option<Box<dyn FnOnce() + 'a>>,
}

impl Read for Interrupted<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        if self.at >= self.copy_at
            && let Some(copy) = self.copy.take()
        {
            copy();
        }
        if self.at >= self.fail_at {
            return Err(std::io::Error::other("the line is dead"));
        }
        let count = out.len().min(self.file.len() - self.at).min(977);
        out[..count].copy_from_slice(&self.file[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

#[test]
fn an_import_cut_short_leaves_nothing() {
    let shape = &shapes()[4];
    let scratch = fast_scratch();
    let source = open(&device_dirs(&scratch.path().join("from"), 1));
    let steps = [Step::Append(900, 0), Step::Commit(None)];
    let (mut sequence, seeds) = history(&source, shape, "session", true, &steps);
    let file = export(&mut sequence);
    let dirs = device_dirs(&scratch.path().join("to"), 2);
    let store = open(&dirs);
    let layout = shape.layout().unwrap();
    let mut written = false;
    for round in 0..6_usize {
        let copy_at = file.len() * round / 6;
        let to = scratch.path().join(format!("copy-{round}"));
        let mut copied = Vec::new();
        let reader = Interrupted {
            file: &file,
            at: 0,
            copy_at,
            fail_at: copy_at + 3000,
            copy: Some(Box::new(|| copied = copy_devices(&dirs, &to, &mut Rng(round as u64)))),
        };
        let error = store.import(reader, &layout, ImportOptions::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        assert!(store.sequences().is_empty());
        written |= store.status().written_bytes > 0;
        assert_clean(&copied, "of a crash during an import");
        let crashed = open(&copied);
        assert!(crashed.sequences().is_empty());
        crashed.import(&file[..], &layout, ImportOptions::new()).unwrap();
    }
    assert!(written, "nothing was on its way to the devices yet");
    let imported = store.import(&file[..], &layout, ImportOptions::new()).unwrap();
    shape.check_all(&store, &imported, |_| seeds.clone());
    drop(imported);
    store.close().unwrap();
    assert_clean(&dirs, "after imports that were cut short");
}
