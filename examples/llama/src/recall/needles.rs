//! Needles of a haystack, and prompts made from them. `tests/fixtures/recall-tiny/TASKS.md` describes the tokens.
//!
//! - [`shift`] puts the haystack of one prompt before that of another: a change of distribution inside of one context.

use super::prompts::Prompt;

/// The token that begins a sequence.
const BEGIN: u32 = 1;
/// The token that opens a value needle.
const VALUE: u32 = 3;
/// The token that opens a reference needle.
const REFERENCE: u32 = 4;
/// The tokens of a needle.
const NEEDLE_TOKENS: usize = 5;

fn is_key(id: u32) -> bool {
    (16..80).contains(&id)
}

fn is_value(id: u32) -> bool {
    (80..144).contains(&id)
}

/// A needle: `KEY k1 k2 v1 v2`, or `REF y1 y2 x1 x2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Needle {
    /// True if it refers to another key and holds no value.
    reference: bool,
    key: [u32; 2],
    content: [u32; 2],
}

/// Returns the needles of a haystack in their order.
fn needles(haystack: &[u32]) -> impl Iterator<Item = Needle> + '_ {
    haystack.windows(NEEDLE_TOKENS).filter_map(|window| {
        let &[open, k1, k2, c1, c2] = window else { return None };
        let content = match open {
            VALUE => is_value(c1) && is_value(c2),
            REFERENCE => is_key(c1) && is_key(c2),
            _ => false,
        };
        let found = is_key(k1) && is_key(k2) && content;
        found.then_some(Needle { reference: open == REFERENCE, key: [k1, k2], content: [c1, c2] })
    })
}

/// Returns the prompt `second` with the haystack of `first` before its own, or `None` if a needle of one contradicts a
/// needle of the other: the same key with other content.
#[must_use]
pub fn shift(first: &Prompt, second: &Prompt) -> Option<Prompt> {
    let (before, own) = (&first.prompt[..first.query_start], &second.prompt[..second.query_start]);
    let known: Vec<Needle> = needles(before).collect();
    if needles(own).any(|needle| known.iter().any(|other| other.key == needle.key && *other != needle)) {
        return None;
    }
    // A sequence begins once.
    let rest = second.prompt.strip_prefix(&[BEGIN]).unwrap_or(&second.prompt);
    let cut = second.prompt.len() - rest.len();
    Some(Prompt {
        id: format!("{}+{}", first.id, second.id),
        task: format!("{}+{}", first.task, second.task),
        context: first.context + second.context,
        prompt: [before, rest].concat(),
        query_start: before.len() + second.query_start - cut,
        ..second.clone()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUESTION: u32 = 5;

    fn prompt(id: &str, haystack: &[u32], key: [u32; 2]) -> Prompt {
        let tokens = [haystack, &[QUESTION], &key].concat();
        let json = serde_json::json!({
            "id": id, "task": id, "context": 16, "prompt": tokens, "query_start": haystack.len(),
            "answer": [80, 81], "score": [1, 1]
        });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn shifted_prompts_hold_both_haystacks() {
        let first = prompt("S", &[1, 150, 3, 16, 17, 90, 91, 151], [16, 17]);
        let second = prompt("MK", &[1, 152, 3, 20, 21, 80, 81, 153], [20, 21]);
        let shifted = shift(&first, &second).unwrap();
        assert_eq!(shifted.prompt, [&first.prompt[..8], &second.prompt[1..]].concat());
        assert_eq!((shifted.query_start, shifted.context), (15, 32));
        assert_eq!((shifted.id.as_str(), shifted.task.as_str()), ("S+MK", "S+MK"));
        assert_eq!(shifted.prompt[shifted.query_start..], [QUESTION, 20, 21]);
        assert_eq!(shifted.answer, second.answer);
    }

    #[test]
    fn needles_that_contradict_each_other_give_no_shifted_prompt() {
        let first = prompt("S", &[1, 3, 16, 17, 90, 91], [16, 17]);
        let same = prompt("MK", &[1, 3, 16, 17, 90, 91, 3, 20, 21, 80, 81], [20, 21]);
        assert!(shift(&first, &same).is_some());
        let other_value = prompt("MK", &[1, 3, 16, 17, 90, 92, 3, 20, 21, 80, 81], [20, 21]);
        assert!(shift(&first, &other_value).is_none());
        let reference = prompt("VTC", &[1, 3, 20, 21, 80, 81, 4, 16, 17, 20, 21], [16, 17]);
        assert!(shift(&first, &reference).is_none());
    }
}
