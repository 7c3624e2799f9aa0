//! Pieces of the states of methods in derived frames: those that are counted, and those that contradict each other.

mod common;

use common::Image;
use kvfsck::{Code, EXIT_CLEAN, EXIT_DAMAGE, Finding, Report, Severity};
use stratakv_format::PAGE_BYTES;
use stratakv_format::pool::StateFields;

/// A state of all 8 tokens of the sequence.
const FIELDS: StateFields<'_> =
    StateFields { set: 1, generation: 1, number: 1, method: "method/8", encoding: 1, tokens: 8 };
/// The bytes of a piece: a header, a method, and 8 bytes or less of the state.
const PIECE_BYTES: usize = 80;

/// Returns a state of 20 bytes in three pieces.
fn pieces(fields: StateFields<'_>) -> Vec<Vec<u8>> {
    let pieces = fields.encode(&[7; 20], PIECE_BYTES).expect("pieces");
    assert!(pieces.len() == 3 && pieces.iter().all(|piece| piece.len() == PIECE_BYTES));
    pieces
}

/// Returns the pieces of layer 0 in a frame.
fn layer_0(pieces: &[&Vec<u8>]) -> Vec<(u16, Vec<u8>)> {
    pieces.iter().map(|piece| (0, (*piece).clone())).collect()
}

/// Checks a store whose only derived frame holds these pieces of layer 0. Its only finding must be about piece `nth`.
fn only_finding(pieces: &[&Vec<u8>], nth: usize) -> (Report, Finding) {
    let image = Image::with_derived(&[&layer_0(pieces)]);
    let report = image.check();
    let [found] = &report.findings[..] else { panic!("{}", report.to_text()) };
    let found = found.clone();
    assert_eq!(found.code, Code::ClusterState, "{found}");
    assert_eq!((found.device, found.file.as_deref()), (Some(1), Some("segments/00000000")), "{found}");
    assert_eq!((found.frame, found.sequence, found.layer), (Some(2), Some(1), Some(0)), "{found}");
    // The pieces follow the header page.
    let offset = image.frames[1].location.offset() + (PAGE_BYTES + nth * PIECE_BYTES) as u64;
    assert_eq!((found.offset, found.length), (Some(offset), Some(PIECE_BYTES as u64)), "{found}");
    (report, found)
}

#[test]
fn whole_states_are_counted() {
    let own = pieces(FIELDS);
    let mut second = layer_0(&[&own[2]]);
    second.extend(own.iter().map(|piece| (2, piece.clone())));
    let report = Image::with_derived(&[&layer_0(&[&own[0], &own[1]]), &second]).check();
    assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 0), "{}", report.to_text());
    let clusters = report.checked.clusters;
    assert_eq!((clusters.frames, clusters.directories, clusters.states, clusters.state_bytes), (2, 0, 2, 40));
    assert!(report.to_text().ends_with("\nstates of methods: 2 layers, 40 bytes\nclean\n"), "{}", report.to_text());
    // The last piece of layer 0 is in a frame that is gone.
    let report = Image::with_derived(&[&layer_0(&[&own[0], &own[1]])]).check();
    assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 0), "{}", report.to_text());
    assert_eq!(report.checked.clusters.states, 0);
    assert!(!report.to_text().contains("states of methods"), "{}", report.to_text());
}

#[test]
fn a_piece_with_a_wrong_field_is_damage_unless_its_version_is_unknown() {
    let own = pieces(FIELDS);
    // The set, and bytes behind the end of the state.
    let cases = [(8, 0, "set at 8: 0 is out of range", "0x1", "0x0"), (56, 13, "bytes of the piece", "0xc", "0xd")];
    for (at, value, words, expected, value_found) in cases {
        let mut bad = own[1].clone();
        bad[at] = value;
        // The last piece does not follow the first one, but nothing is known about the piece between them.
        let (report, found) = only_finding(&[&own[0], &bad, &own[2]], 1);
        assert!(found.message.contains(words), "{found}");
        assert_eq!((found.severity, report.exit_code), (Severity::Damage, EXIT_DAMAGE), "{found}");
        assert_eq!((found.expected.as_deref(), found.found.as_deref()), (Some(expected), Some(value_found)), "{found}");
        assert_eq!(report.checked.clusters.states, 0);
    }
    let mut newer = own[1].clone();
    newer[0] = 3;
    let (report, found) = only_finding(&[&own[0], &newer, &own[2]], 1);
    assert_eq!((found.severity, report.exit_code), (Severity::Note, EXIT_CLEAN), "{found}");
    assert!(found.message.contains("state version: 0x3 is not supported"), "{found}");
}

#[test]
fn neighbouring_pieces_that_contradict_each_other_are_damage() {
    let (own, other) = (pieces(FIELDS), pieces(StateFields { number: 2, ..FIELDS }));
    let cases = [
        ([&own[0], &own[2]], "it begins with byte 16 of the state, not 8"),
        ([&own[1], &own[0]], "it begins with byte 0 of the state, not 16"),
        ([&own[0], &other[1]], "it belongs to another state than the piece in front of it"),
    ];
    for (pieces, text) in cases {
        let (report, found) = only_finding(&pieces, 1);
        assert_eq!((found.message.as_str(), found.severity), (text, Severity::Damage));
        assert_eq!((report.exit_code, report.checked.clusters.states), (EXIT_DAMAGE, 0), "{}", report.to_text());
    }
    // Pieces of two layers, or of two frames, are no neighbours.
    let apart = [(0, own[0].clone()), (2, own[2].clone())];
    for frames in [&[&apart[..]][..], &[&layer_0(&[&own[0]])[..], &layer_0(&[&other[1]])]] {
        let report = Image::with_derived(frames).check();
        assert_eq!((report.exit_code, report.findings.len()), (EXIT_CLEAN, 0), "{}", report.to_text());
    }
}

#[test]
fn a_state_of_tokens_that_are_not_committed_is_damage() {
    let fields = StateFields { tokens: 12, ..FIELDS };
    let piece = fields.encode(&[7; 8], PIECE_BYTES).expect("pieces").remove(0);
    let (report, found) = only_finding(&[&piece], 0);
    assert_eq!(found.message, "the state is that of 12 tokens, but sequence 1 has 8");
    assert_eq!((found.severity, report.exit_code), (Severity::Damage, EXIT_DAMAGE), "{found}");
}
