//! `kvrun chat`: messages from stdin, answers on stdout, figures on stderr.

use std::io::{BufRead, IsTerminal, Write};
use std::time::Instant;

use anyhow::Result;
use stratakv_llama::chat_format::ChatFormat;
use stratakv_llama::cli::ChatArgs;
use stratakv_llama::generate::{self, Outcome, Request, Stop};
use stratakv_llama::kv::store::StoreKv;
use stratakv_llama::kv::{KvCache, backend};
use stratakv_llama::model::Model;
use stratakv_llama::process;
use stratakv_llama::text::{Stream, Vocabulary};
use stratakv_llama::weights::fingerprint;

use super::shared::{check_dense_layers, decode_all, geometry, key_dimensions};

pub(crate) fn chat(args: &ChatArgs) -> Result<()> {
    let mut model = Model::load(&args.model)?;
    check_dense_layers(&model, args.cache.dense_layers)?;
    let vocabulary = Vocabulary::load(&args.model);
    let (format, end) = ChatFormat::of(&vocabulary);
    if let Some(end) = end {
        model.end_at(end);
    }
    let options = args.backend_options(key_dimensions(&model))?;
    let geometry = geometry(&model, args.cache.storage.dtype, options.policy.rank().is_some())?;
    let backend = backend::open(&options, geometry, fingerprint(&args.model)?)?;
    let mut cache = backend.session(&args.session, &|ids, cache| decode_all(&model, ids, cache))?;
    eprintln!("session {}: {} tokens; an empty line or end of input leaves", args.session, cache.len());
    let chat = Chat { model: &model, vocabulary: &vocabulary, format, args };
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if std::io::stdin().is_terminal() {
            eprint!("> ");
        }
        let Some(line) = lines.next().transpose()?.filter(|line| !line.trim().is_empty()) else { break };
        let outcome = chat.turn(&mut cache, &line)?;
        if outcome.stop == Stop::ContextFull {
            eprintln!("the session is as long as the model allows; begin another with --session");
            break;
        }
    }
    if let Some(note) = cache.method_note() {
        eprintln!("{note}");
    }
    Box::new(cache).finish(true)?;
    backend.close()
}

/// The parts of a chat that all turns share.
struct Chat<'a> {
    model: &'a Model,
    vocabulary: &'a Vocabulary,
    format: ChatFormat,
    args: &'a ChatArgs,
}

impl Chat<'_> {
    /// Answers one message.
    fn turn(&self, cache: &mut StoreKv, message: &str) -> Result<Outcome> {
        let first = cache.is_empty();
        let prompt = self.format.turn(self.vocabulary, message, self.args.system.as_deref(), first)?;
        // A session keeps its sampler from turn to turn. A new one starts only if options ask for it.
        let sampler = if first { self.args.sampler.sampler()? } else { None };
        let max_tokens = self.args.max_tokens as usize;
        let request = Request { prompt: Some(prompt), max_tokens, sampler, new_turn: true };
        let mut stream = Stream::new(self.vocabulary);
        let mut out = std::io::stdout().lock();
        let (begin, mut first_token) = (Instant::now(), None);
        let mut emit = |id: u32| -> Result<()> {
            first_token.get_or_insert_with(|| begin.elapsed());
            out.write_all(stream.push(id)?.as_bytes())?;
            out.flush()?;
            Ok(())
        };
        let outcome = generate::generate(self.model, cache, &request, &mut emit, &|_| ())?;
        let first_token = first_token.unwrap_or_default().as_secs_f64();
        let per_s = outcome.steps as f64 / (begin.elapsed().as_secs_f64() - first_token).max(1e-9);
        writeln!(out, "{}", stream.finish()?)?;
        eprintln!(
            "[{} tokens, {per_s:.1} tokens/s, first after {first_token:.2} s; {} tokens in the session; {}]",
            outcome.ids.len(),
            cache.len(),
            process::ProcessMemory::now().line().unwrap_or_else(|| "memory unknown".to_owned())
        );
        Ok(outcome)
    }
}
