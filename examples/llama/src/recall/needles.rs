//! Needles of a haystack, and prompts made from them. `tests/fixtures/recall-tiny/TASKS.md` describes the tokens.
//!
//! - [`shift`] puts the haystack of one prompt before that of another: a change of distribution inside of one context.
//! - [`questions`] asks many questions about one haystack: a document that is asked many times.

use anyhow::{Result, ensure};
use serde::Serialize;

use super::prompts::Prompt;

/// The token that begins a sequence.
const BEGIN: u32 = 1;
/// The token that opens a value needle.
const VALUE: u32 = 3;
/// The token that opens a reference needle.
const REFERENCE: u32 = 4;
/// The token that opens a question.
const QUESTION: u32 = 5;
/// The tokens of a needle.
const NEEDLE_TOKENS: usize = 5;

fn is_key(id: u32) -> bool {
    (16..80).contains(&id)
}

fn is_value(id: u32) -> bool {
    (80..144).contains(&id)
}

/// The half of a haystack's questions that a question belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Half {
    /// Questions whose queries a profile may record.
    Profile,
    /// Questions whose answers count in means.
    Answer,
}

impl Half {
    /// Returns the name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Profile => "profile",
            Self::Answer => "answer",
        }
    }
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

/// Returns the prompt `second` with the haystack of `first` before its own.
///
/// It is `None` if the needles contradict each other: the same key has different contents.
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

/// Returns `count` questions about the value needles of a prompt's haystack, from its beginning to its end. Every
/// second one, the first included, belongs to [`Half::Profile`].
///
/// # Errors
/// Fails if `count` is odd or 0, or if the haystack has fewer value needles.
pub fn questions(prompt: &Prompt, count: usize) -> Result<Vec<Prompt>> {
    ensure!(count > 0 && count.is_multiple_of(2), "--questions {count} has no two equal halves; give an even number");
    let haystack = &prompt.prompt[..prompt.query_start];
    let asked: Vec<Needle> = needles(haystack).filter(|needle| !needle.reference).collect();
    let (id, found) = (&prompt.id, asked.len());
    ensure!(
        count <= found,
        "--questions {count} is more than the {found} value needles of {id}; give fewer, or tasks such as MK and MKD"
    );
    let question = |index: usize| {
        let needle = asked[index * found / count];
        Prompt {
            id: format!("{id}#{index}"),
            prompt: [haystack, &[QUESTION], &needle.key].concat(),
            answer: needle.content.to_vec(),
            score: vec![1, 1],
            half: Some(if index.is_multiple_of(2) { Half::Profile } else { Half::Answer }),
            ..prompt.clone()
        }
    };
    Ok((0..count).map(question).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn questions_ask_for_needles_of_the_haystack_in_two_halves() {
        // A key without a value, a decoy and a reference are no value needles.
        let haystack =
            [1, 3, 16, 17, 90, 91, 3, 16, 17, 150, 4, 18, 19, 16, 17, 3, 20, 21, 80, 81, 3, 22, 23, 82, 83, 90];
        let prompt = prompt("MK", &haystack, [20, 21]);
        let asked = questions(&prompt, 2).unwrap();
        assert_eq!(asked[0].prompt, [&haystack[..], &[QUESTION, 16, 17]].concat());
        assert_eq!((asked[0].answer.as_slice(), asked[0].half), (&[90, 91][..], Some(Half::Profile)));
        assert_eq!((asked[1].answer.as_slice(), asked[1].half), (&[80, 81][..], Some(Half::Answer)));
        assert_eq!((asked[1].id.as_str(), asked[1].query_start), ("MK#1", haystack.len()));
        assert!(questions(&prompt, 4).unwrap_err().to_string().contains("3 value needles of MK"));
        assert!(questions(&prompt, 3).unwrap_err().to_string().contains("even"));
        assert!(questions(&prompt, 0).is_err());
    }
}
