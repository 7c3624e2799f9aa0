//! Continuing a text, across process restarts: with every token the cache commits what is needed to go on exactly.

use anyhow::{Context, Result, bail, ensure};

use crate::kv::KvCache;
use crate::model::{Model, Wanted};
use crate::sampler::SamplerState;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// Ids to continue; `None` goes on where the session stands.
    pub prompt: Option<Vec<u32>>,
    /// Tokens to generate for this prompt, those of earlier interrupted runs included.
    pub max_tokens: usize,
    /// The sampler; `None`: the session's own, or greedy in a new one.
    pub sampler: Option<SamplerState>,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// As many tokens as asked for.
    MaxTokens,
    /// The model ended the text.
    EndOfText,
    /// The sequence is as long as the model allows.
    ContextFull,
}

impl Stop {
    /// A short name for reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::MaxTokens => "max_tokens",
            Self::EndOfText => "end_of_text",
            Self::ContextFull => "context_full",
        }
    }
}

/// What came out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// All ids generated for this prompt, the end-of-text id excluded.
    pub ids: Vec<u32>,
    /// How many of them an earlier run had generated.
    pub resumed: usize,
    /// Prompt tokens this run put into the cache.
    pub prompt_tokens: usize,
    /// Decode steps this run made for generated tokens.
    pub steps: usize,
    /// Why it ended.
    pub stop: Stop,
}

/// The caller state of a commit: where the turn began, what comes next, how the sampler stands.
#[derive(Clone, Debug, PartialEq)]
struct Turn {
    sampler: SamplerState,
    /// Drawn, not yet in the cache.
    next: u32,
    /// Position of the prompt's first token, and the prompt's length.
    start: u64,
    prompt: u64,
}

const MAGIC: [u8; 4] = *b"KVR1";

impl Turn {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.sampler.to_bytes());
        bytes.extend(self.next.to_le_bytes());
        bytes.extend(self.start.to_le_bytes());
        bytes.extend(self.prompt.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self> {
        const WHAT: &str = "the session's state is none that kvrun wrote";
        let rest = bytes.strip_prefix(&MAGIC).context(WHAT)?;
        let (sampler, rest) = rest.split_at_checked(SamplerState::BYTES).context(WHAT)?;
        let (next, rest) = rest.split_first_chunk::<4>().context(WHAT)?;
        let (start, rest) = rest.split_first_chunk::<8>().context(WHAT)?;
        let (prompt, rest) = rest.split_first_chunk::<8>().context(WHAT)?;
        ensure!(rest.is_empty(), "{WHAT}");
        Ok(Self {
            sampler: SamplerState::from_bytes(sampler)?,
            next: u32::from_le_bytes(*next),
            start: u64::from_le_bytes(*start),
            prompt: u64::from_le_bytes(*prompt),
        })
    }

    /// Positions of the turn's generated tokens that are in the cache begin here.
    fn answer_start(&self, held: usize) -> Result<usize> {
        let start = self.start.checked_add(self.prompt).and_then(|n| usize::try_from(n).ok());
        match start {
            Some(start) if start <= held => Ok(start),
            _ => bail!("the session's state points behind its {held} tokens"),
        }
    }
}

/// Generates. Ids go to `emit` as they are known and, with a session, durable; those of an interrupted run come first.
/// `progress` gets prompt tokens times layers as they pass.
///
/// A cache that holds tokens continues: with the prompt of its last turn, or none, that turn goes on; another prompt is appended.
///
/// # Errors
/// No prompt for an empty cache, a prompt longer than the model allows, sampler settings that differ from those the turn began with,
/// and what the model, the cache and `emit` report.
pub fn generate(
    model: &Model,
    cache: &mut dyn KvCache,
    request: &Request,
    emit: &mut dyn FnMut(u32) -> Result<()>,
    progress: &dyn Fn(usize),
) -> Result<Outcome> {
    let mut outcome = Outcome { ids: Vec::new(), resumed: 0, prompt_tokens: 0, steps: 0, stop: Stop::MaxTokens };
    ensure!(request.max_tokens > 0, "no token to generate");
    let mut turn = match cache.committed()? {
        None => {
            let prompt = request.prompt.as_deref().context("a new session needs a prompt")?;
            begin(model, cache, prompt, None, request.sampler.clone().unwrap_or(SamplerState::greedy()), progress)?
        }
        Some(committed) => {
            ensure!(
                committed.ids.len() == cache.len(),
                "the session names {} tokens and holds {}",
                committed.ids.len(),
                cache.len()
            );
            let turn = Turn::from_bytes(&committed.state)?;
            let answer = turn.answer_start(committed.ids.len())?;
            let asked = &committed.ids[turn.start as usize..answer];
            match request.prompt.as_deref() {
                Some(prompt) if prompt != asked => {
                    let sampler = request.sampler.clone().unwrap_or(turn.sampler);
                    begin(model, cache, prompt, Some(turn.next), sampler, progress)?
                }
                _ => {
                    if let Some(sampler) = &request.sampler {
                        ensure!(
                            sampler.same_settings(&turn.sampler),
                            "this answer was begun with other sampler settings; leave them out to continue it"
                        );
                    }
                    for &id in &committed.ids[answer..] {
                        outcome.ids.push(id);
                        emit(id)?;
                    }
                    outcome.resumed = outcome.ids.len() + 1;
                    turn
                }
            }
        }
    };
    if outcome.resumed == 0 {
        outcome.prompt_tokens = turn.prompt as usize;
    }
    let ends = |id: u32| model.config().eos.contains(&id);
    loop {
        if ends(turn.next) {
            outcome.stop = Stop::EndOfText;
            break;
        }
        if outcome.ids.len() < request.max_tokens {
            outcome.ids.push(turn.next);
            emit(turn.next)?;
        }
        if outcome.ids.len() >= request.max_tokens {
            break;
        }
        if cache.len() >= model.config().max_positions {
            outcome.stop = Stop::ContextFull;
            break;
        }
        let fed = turn.next;
        let logits = model.decode(fed, cache)?;
        turn.next = turn.sampler.draw(&logits)?;
        cache.commit(&[fed], &turn.to_bytes())?;
        outcome.steps += 1;
    }
    outcome.resumed = outcome.resumed.min(outcome.ids.len());
    Ok(outcome)
}

/// Puts a prompt into the cache and draws the first token. An empty cache is filled by dense prefill; one that holds tokens takes the token
/// still owed and the prompt as decode steps.
fn begin(
    model: &Model,
    cache: &mut dyn KvCache,
    prompt: &[u32],
    owed: Option<u32>,
    mut sampler: SamplerState,
    progress: &dyn Fn(usize),
) -> Result<Turn> {
    ensure!(!prompt.is_empty(), "the prompt is empty");
    let limit = model.config().max_positions;
    let length = cache.len() + owed.iter().len() + prompt.len();
    ensure!(length <= limit, "{length} tokens are more than the model's {limit} (max_position_embeddings)");
    let start = (cache.len() + owed.iter().len()) as u64;
    let fed: Vec<u32> = owed.into_iter().chain(prompt.iter().copied()).collect();
    let logits = if cache.is_empty() {
        model.prefill(&fed, &mut [&mut *cache], Wanted::Last, progress)?
    } else {
        let mut logits = Vec::new();
        for &id in &fed {
            logits = model.decode(id, cache)?;
            progress(model.config().layers());
        }
        logits
    };
    let next = sampler.draw(&logits)?;
    let turn = Turn { sampler, next, start, prompt: prompt.len() as u64 };
    cache.commit(&fed, &turn.to_bytes())?;
    Ok(turn)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::memory::MemoryPolicy;
    use crate::kv::{KvDType, MemoryKv};

    fn model(name: &str) -> Model {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
        Model::load(&root.join(name)).unwrap()
    }

    fn cache(model: &Model) -> MemoryKv {
        MemoryKv::new(model.kv_geometry(KvDType::F16), MemoryPolicy::Full)
    }

    fn request(prompt: &[u32], max_tokens: usize) -> Request {
        let sampler = Some(SamplerState::new(0.9, 0.95, 11).unwrap());
        Request { prompt: Some(prompt.to_vec()), max_tokens, sampler }
    }

    fn go(model: &Model, cache: &mut MemoryKv, request: &Request) -> Result<Outcome> {
        let mut emitted = Vec::new();
        let mut emit = |id| {
            emitted.push(id);
            Ok(())
        };
        let outcome = generate(model, cache, request, &mut emit, &|_| ())?;
        assert_eq!(emitted, outcome.ids);
        Ok(outcome)
    }

    #[test]
    fn an_interrupted_run_continues_to_the_same_ids() {
        let model = model("tiny-arch/llama3");
        let prompt: Vec<u32> = (3..40).collect();
        let whole = go(&model, &mut cache(&model), &request(&prompt, 20)).unwrap();
        assert_eq!((whole.ids.len(), whole.resumed, whole.prompt_tokens, whole.steps), (20, 0, 37, 19));
        for cut in 1..=20 {
            // The failing `emit` stands for a kill: what was committed before it stays, nothing else does.
            let mut kv = cache(&model);
            let mut seen = 0;
            let mut emit = |_| {
                seen += 1;
                if seen == cut { bail!("killed") } else { Ok(()) }
            };
            assert!(generate(&model, &mut kv, &request(&prompt, 20), &mut emit, &|_| ()).is_err());
            let again = go(&model, &mut kv, &request(&prompt, 20)).unwrap();
            assert_eq!(again.ids, whole.ids, "cut at {cut}");
            assert_eq!((again.resumed, again.prompt_tokens, again.steps), (cut, 0, 20 - cut));
        }
    }

    #[test]
    fn a_finished_answer_is_repeated_and_can_grow_without_a_prompt() {
        let model = model("tiny-arch/qwen3");
        let prompt = [5, 6, 7, 8];
        let whole = go(&model, &mut cache(&model), &request(&prompt, 12)).unwrap();
        let mut kv = cache(&model);
        let short = go(&model, &mut kv, &request(&prompt, 6)).unwrap();
        let held = kv.len();
        assert_eq!(go(&model, &mut kv, &request(&prompt, 6)).unwrap().ids, short.ids);
        assert_eq!(kv.len(), held, "nothing new was computed");
        let grown = go(&model, &mut kv, &Request { prompt: None, max_tokens: 12, sampler: None }).unwrap();
        assert_eq!(grown.ids, whole.ids);
        let other = Request { sampler: Some(SamplerState::greedy()), ..request(&prompt, 12) };
        assert!(go(&model, &mut kv, &other).unwrap_err().to_string().contains("sampler settings"));
    }

    #[test]
    fn another_prompt_is_appended_as_if_all_had_been_one() {
        let model = model("tiny-arch/mistral-window");
        let greedy = |prompt: &[u32], max_tokens| Request { prompt: Some(prompt.to_vec()), max_tokens, sampler: None };
        let mut kv = cache(&model);
        let first = go(&model, &mut kv, &greedy(&[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], 5)).unwrap();
        let second = go(&model, &mut kv, &greedy(&[20, 21, 22], 6)).unwrap();
        assert_eq!((second.prompt_tokens, second.resumed), (3, 0));
        let mut joined: Vec<u32> = (5..15).collect();
        joined.extend(&first.ids);
        joined.extend([20, 21, 22]);
        let one = go(&model, &mut cache(&model), &greedy(&joined, 6)).unwrap();
        assert_eq!(second.ids, one.ids);
        assert_eq!(kv.committed().unwrap().unwrap().ids.len(), kv.len());
    }

    #[test]
    fn limits_and_foreign_states_are_errors() {
        let model = model("tiny-arch/llama3");
        let mut kv = cache(&model);
        let none = Request { prompt: None, max_tokens: 3, sampler: None };
        assert!(go(&model, &mut kv, &none).unwrap_err().to_string().contains("needs a prompt"));
        let long = go(&model, &mut kv, &request(&[3; 257], 3)).unwrap_err().to_string();
        assert!(long.contains("257 tokens are more than the model's 256"), "{long}");
        let full = go(&model, &mut kv, &request(&[3; 250], 100)).unwrap();
        assert!(full.stop == Stop::ContextFull && full.ids.len() == 7 || full.stop == Stop::EndOfText, "{full:?}");
        let next = go(&model, &mut kv, &request(&[4; 10], 3)).unwrap_err().to_string();
        assert!(next.contains("more than the model's 256"), "{next}");
        let mut foreign = cache(&model);
        model.prefill(&[3, 4], &mut [&mut foreign], Wanted::Nothing, &|_| ()).unwrap();
        foreign.commit(&[3, 4], b"something else").unwrap();
        assert!(go(&model, &mut foreign, &none).unwrap_err().to_string().contains("none that kvrun wrote"));
        let mut behind = Turn { sampler: SamplerState::greedy(), next: 1, start: u64::MAX, prompt: 2 };
        assert!(Turn::from_bytes(&behind.to_bytes()).unwrap().answer_start(5).is_err());
        behind.start = 4;
        assert!(behind.answer_start(5).is_err());
        assert_eq!(behind.answer_start(6).unwrap(), 6);
    }
}
