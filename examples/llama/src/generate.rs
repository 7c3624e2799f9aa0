//! Continues a text, across process restarts.
//!
//! A *turn* is a prompt and the answer to it. A session is a sequence of turns in one cache.
//!
//! 1. The prompt enters the cache, by prefill if the cache is empty. Otherwise each of its tokens attends as in a
//!    decode step. The first token of the answer is drawn from its logits.
//! 2. The last drawn token is decoded, the next token is drawn, and the cache commits. This repeats until the answer
//!    ends.
//! 3. With every commit the cache stores the turn's state: the drawn token that it does not hold yet, and the
//!    sampler's state.
//!
//! Because of step 3, a run that is killed and started again ends with the ids of an uninterrupted run.

use anyhow::{Context, Result, bail, ensure};

use crate::kv::{Committed, KvCache};
use crate::model::{LogitPositions, Model};
use crate::sampler::SamplerState;

/// A request for an answer.
#[derive(Clone, Debug)]
pub struct Request {
    /// The ids to continue. `None` continues the session's last turn.
    pub prompt: Option<Vec<u32>>,
    /// Tokens to generate for this prompt, including tokens that an interrupted run generated.
    pub max_tokens: usize,
    /// The sampler. `None` takes the session's sampler, or a greedy one for a new session.
    pub sampler: Option<SamplerState>,
    /// True if a prompt that equals the last turn's prompt begins the next turn. Otherwise it continues the last turn.
    pub new_turn: bool,
}

/// The reason why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The requested number of tokens was generated.
    MaxTokens,
    /// The model ended the text.
    EndOfText,
    /// The sequence is as long as the model allows.
    ContextFull,
}

impl Stop {
    /// Returns the name for reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::MaxTokens => "max_tokens",
            Self::EndOfText => "end_of_text",
            Self::ContextFull => "context_full",
        }
    }
}

/// The result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// All ids generated for this prompt, without the end-of-text id.
    pub ids: Vec<u32>,
    /// How many of the ids an earlier run had generated.
    pub resumed: usize,
    /// Prompt tokens that this run put into the cache.
    pub prompt_tokens: usize,
    /// Decode steps of this run for generated tokens.
    pub steps: usize,
    /// Why generation ended.
    pub stop: Stop,
}

/// The caller's state of a commit.
#[derive(Clone, Debug, PartialEq)]
struct Turn {
    sampler: SamplerState,
    /// The id that was drawn last. The cache does not hold it yet.
    next: u32,
    /// The position of the prompt's first token.
    start: u64,
    /// The tokens of the prompt.
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
        const WHAT: &str = "the session's state was not written by kvrun generate";
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

    /// Returns the position of the answer's first token in a cache of `held` tokens.
    fn answer_start(&self, held: usize) -> Result<usize> {
        let start = self.start.checked_add(self.prompt).and_then(|n| usize::try_from(n).ok());
        match start {
            Some(start) if start <= held => Ok(start),
            _ => bail!("the session's state points beyond its {held} tokens"),
        }
    }
}

/// Generates an answer. Every id goes to `emit` after it is committed. Ids of an interrupted run are emitted first.
/// `progress` receives prompt tokens times layers as they are computed.
///
/// If the cache holds a session, the request decides: the prompt of the last turn, or no prompt, continues that turn.
/// Another prompt starts the next turn, and so does any prompt with [`Request::new_turn`].
///
/// # Errors
/// Fails if an empty cache gets no prompt, if the prompt is too long for the model, or if a continued turn gets other
/// sampler settings. It also fails if the model, the cache or `emit` fails.
pub fn generate(
    model: &Model,
    cache: &mut dyn KvCache,
    request: &Request,
    emit: &mut dyn FnMut(u32) -> Result<()>,
    progress: &dyn Fn(usize),
) -> Result<Outcome> {
    ensure!(request.max_tokens > 0, "max_tokens is 0; ask for at least one token");
    let mut run = Generation { model, cache, request, emit, progress };
    let mut outcome = Outcome { ids: Vec::new(), resumed: 0, prompt_tokens: 0, steps: 0, stop: Stop::MaxTokens };
    let mut turn = match run.cache.committed()? {
        None => {
            let prompt = request.prompt.as_deref().context("a new session needs a prompt")?;
            run.begin(prompt, None, request.sampler.clone().unwrap_or(SamplerState::greedy()))?
        }
        Some(committed) => run.resume(&committed, &mut outcome)?,
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
            (run.emit)(turn.next)?;
        }
        if outcome.ids.len() >= request.max_tokens {
            break;
        }
        if run.cache.len() >= model.config().max_positions {
            outcome.stop = Stop::ContextFull;
            break;
        }
        let fed = turn.next;
        let logits = model.decode(fed, run.cache)?;
        turn.next = turn.sampler.draw(&logits)?;
        run.cache.commit(&[fed], &turn.to_bytes())?;
        outcome.steps += 1;
    }
    outcome.resumed = outcome.resumed.min(outcome.ids.len());
    Ok(outcome)
}

/// The arguments of [`generate`].
struct Generation<'a> {
    model: &'a Model,
    cache: &'a mut dyn KvCache,
    request: &'a Request,
    emit: &'a mut dyn FnMut(u32) -> Result<()>,
    progress: &'a dyn Fn(usize),
}

impl Generation<'_> {
    /// Continues the last turn of a session and emits the ids that it holds, or starts the next turn.
    fn resume(&mut self, committed: &Committed, outcome: &mut Outcome) -> Result<Turn> {
        let (named, held) = (committed.ids.len(), self.cache.len());
        ensure!(named == held, "the session names {named} tokens but holds {held}");
        let turn = Turn::from_bytes(&committed.state)?;
        let answer = turn.answer_start(named)?;
        let last = &committed.ids[turn.start as usize..answer];
        if let Some(prompt) = self.request.prompt.as_deref().filter(|prompt| self.request.new_turn || *prompt != last) {
            let sampler = self.request.sampler.clone().unwrap_or(turn.sampler);
            return self.begin(prompt, Some(turn.next), sampler);
        }
        if let Some(sampler) = &self.request.sampler {
            ensure!(
                sampler.same_settings(&turn.sampler),
                "this answer was begun with other sampler settings; leave them out to continue it"
            );
        }
        for &id in &committed.ids[answer..] {
            outcome.ids.push(id);
            (self.emit)(id)?;
        }
        // The drawn token that the cache does not hold yet was generated by the earlier run too.
        outcome.resumed = outcome.ids.len() + 1;
        Ok(turn)
    }

    /// Puts a prompt into the cache, draws the first token of its answer and commits.
    ///
    /// An empty cache is filled by prefill. Otherwise `owed`, the last token of the turn before, and the prompt extend
    /// it.
    fn begin(&mut self, prompt: &[u32], owed: Option<u32>, mut sampler: SamplerState) -> Result<Turn> {
        ensure!(!prompt.is_empty(), "the prompt is empty");
        let limit = self.model.config().max_positions;
        let start = self.cache.len() + owed.iter().len();
        let length = start + prompt.len();
        ensure!(length <= limit, "{length} tokens are more than the model's {limit} (max_position_embeddings)");
        let fed: Vec<u32> = owed.into_iter().chain(prompt.iter().copied()).collect();
        let logits = if self.cache.is_empty() {
            self.model.prefill(&fed, &mut [&mut *self.cache], LogitPositions::Last, self.progress)?
        } else {
            self.model.extend(&fed, self.cache, self.progress)?
        };
        let next = sampler.draw(&logits)?;
        let turn = Turn { sampler, next, start: start as u64, prompt: prompt.len() as u64 };
        self.cache.commit(&fed, &turn.to_bytes())?;
        Ok(turn)
    }
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
        Request { prompt: Some(prompt.to_vec()), max_tokens, sampler, new_turn: false }
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
            // The failing `emit` acts as a kill: only what was committed before it stays.
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
        let grown =
            go(&model, &mut kv, &Request { prompt: None, max_tokens: 12, sampler: None, new_turn: false }).unwrap();
        assert_eq!(grown.ids, whole.ids);
        let other = Request { sampler: Some(SamplerState::greedy()), ..request(&prompt, 12) };
        assert!(go(&model, &mut kv, &other).unwrap_err().to_string().contains("sampler settings"));
    }

    #[test]
    fn another_prompt_continues_as_if_all_tokens_were_one_prompt() {
        let model = model("tiny-arch/mistral-window");
        let greedy = |prompt: &[u32], max_tokens| Request {
            prompt: Some(prompt.to_vec()),
            max_tokens,
            sampler: None,
            new_turn: false,
        };
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
        let again = Request { new_turn: true, ..greedy(&[20, 21, 22], 6) };
        let third = go(&model, &mut kv, &again).unwrap();
        assert_eq!((third.prompt_tokens, third.resumed), (3, 0), "the same words are a turn of their own");
    }

    #[test]
    fn exceeded_limits_and_foreign_states_are_errors() {
        let model = model("tiny-arch/llama3");
        let mut kv = cache(&model);
        let none = Request { prompt: None, max_tokens: 3, sampler: None, new_turn: false };
        assert!(go(&model, &mut kv, &none).unwrap_err().to_string().contains("needs a prompt"));
        let long = go(&model, &mut kv, &request(&[3; 257], 3)).unwrap_err().to_string();
        assert!(long.contains("257 tokens are more than the model's 256"), "{long}");
        let full = go(&model, &mut kv, &request(&[3; 250], 100)).unwrap();
        assert!(full.stop == Stop::ContextFull && full.ids.len() == 7 || full.stop == Stop::EndOfText, "{full:?}");
        let next = go(&model, &mut kv, &request(&[4; 10], 3)).unwrap_err().to_string();
        assert!(next.contains("more than the model's 256"), "{next}");
        let mut foreign = cache(&model);
        model.prefill(&[3, 4], &mut [&mut foreign], LogitPositions::Nothing, &|_| ()).unwrap();
        foreign.commit(&[3, 4], b"something else").unwrap();
        assert!(go(&model, &mut foreign, &none).unwrap_err().to_string().contains("not written by kvrun"));
        let mut behind = Turn { sampler: SamplerState::greedy(), next: 1, start: u64::MAX, prompt: 2 };
        assert!(Turn::from_bytes(&behind.to_bytes()).unwrap().answer_start(5).is_err());
        behind.start = 4;
        assert!(behind.answer_start(5).is_err());
        assert_eq!(behind.answer_start(6).unwrap(), 6);
    }
}
