//! Converts between text and token ids.
//!
//! The tokenizer is the `tokenizer.json` of a model directory or beside a GGUF file, or the one in the GGUF file. A
//! model without one works with plain ids.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokenizers::Tokenizer;

use crate::gguf::{GgufHeader, tokenizer};

/// A converter between text and token ids.
pub enum Vocabulary {
    /// A Hugging Face tokenizer.
    Tokenizer(Box<Tokenizer>),
    /// Ids in decimal, separated by blanks. It holds the reason why there is no tokenizer.
    Ids(String),
}

impl Vocabulary {
    /// Loads the tokenizer of a model directory or of a GGUF file. If there is no usable one, text is ids in decimal.
    #[must_use]
    pub fn load(model: &Path) -> Self {
        let path = beside(model, "tokenizer.json");
        if !path.is_file() {
            let none = format!("{} does not exist", path.display());
            return if model.is_file() { Self::load_gguf(model, &none) } else { Self::Ids(none) };
        }
        match Tokenizer::from_file(&path) {
            Ok(tokenizer) => Self::Tokenizer(Box::new(tokenizer)),
            Err(error) => Self::Ids(format!("{} is not a Hugging Face tokenizer: {error}", path.display())),
        }
    }

    /// Loads the tokenizer in a GGUF file. `none` says why there is no other.
    fn load_gguf(model: &Path, none: &str) -> Self {
        let load = || -> Result<Tokenizer> {
            let bytes = crate::weights::map(model)?;
            tokenizer(&GgufHeader::parse(&bytes)?)
        };
        match load() {
            Ok(tokenizer) => Self::Tokenizer(Box::new(tokenizer)),
            Err(error) => Self::Ids(format!("{none}, and {}: {error:#}", model.display())),
        }
    }

    /// Returns the ids of a text. If `first` is true, the special tokens of a text's beginning are added.
    ///
    /// # Errors
    /// Fails if there is no tokenizer, or if the tokenizer refuses the text.
    pub fn encode(&self, text: &str, first: bool) -> Result<Vec<u32>> {
        match self {
            Self::Tokenizer(tokenizer) => {
                let encoding = tokenizer.encode(text, first).map_err(|e| anyhow!("cannot tokenise the prompt: {e}"))?;
                Ok(encoding.get_ids().to_vec())
            }
            Self::Ids(why) => bail!("text needs a tokenizer, and {why}; give token ids with --prompt-ids"),
        }
    }

    /// Returns the id of a token, or `None` if there is no such token or no tokenizer.
    #[must_use]
    pub fn id(&self, token: &str) -> Option<u32> {
        match self {
            Self::Tokenizer(tokenizer) => tokenizer.token_to_id(token),
            Self::Ids(_) => None,
        }
    }

    /// Returns the text of some ids without special tokens.
    ///
    /// # Errors
    /// Fails if the tokenizer refuses the ids.
    fn decode(&self, ids: &[u32]) -> Result<String> {
        match self {
            Self::Tokenizer(tokenizer) => {
                tokenizer.decode(ids, true).map_err(|e| anyhow!("cannot turn token ids into text: {e}"))
            }
            Self::Ids(_) => Ok(ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")),
        }
    }
}

/// Returns the path of a file in a model directory, or beside a model's GGUF file.
#[must_use]
pub fn beside(model: &Path, file: &str) -> PathBuf {
    if model.is_file() { model.with_file_name(file) } else { model.join(file) }
}

/// Reads ids from a file: decimal numbers separated by blanks or commas, or a JSON array.
///
/// # Errors
/// Fails if the file is unreadable, if it holds no id, or if a word in it is not an id.
pub fn read_ids(path: &Path) -> Result<Vec<u32>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse_ids(&text).with_context(|| format!("{}", path.display()))
}

/// Reads ids from a text: decimal numbers separated by blanks or commas, or a JSON array.
///
/// # Errors
/// Fails if the text holds no id, or if a word in it is not an id.
pub fn parse_ids(text: &str) -> Result<Vec<u32>> {
    let words = text.split(|c: char| c.is_whitespace() || matches!(c, ',' | '[' | ']')).filter(|w| !w.is_empty());
    let ids: Vec<u32> =
        words.map(|w| w.parse().with_context(|| format!("{w:?} is not a token id"))).collect::<Result<_>>()?;
    ensure!(!ids.is_empty(), "it holds no token ids");
    Ok(ids)
}

/// A text that grows token by token and gives out whole characters only.
pub struct Stream<'a> {
    vocabulary: &'a Vocabulary,
    ids: Vec<u32>,
    /// The first id of the window that the next token is decoded with.
    window: usize,
    /// The first id whose text was not given out yet.
    pending: usize,
}

impl<'a> Stream<'a> {
    /// Makes an empty text.
    #[must_use]
    pub fn new(vocabulary: &'a Vocabulary) -> Self {
        Self { vocabulary, ids: Vec::new(), window: 0, pending: 0 }
    }

    /// Adds a token and returns the text that it completes. The text is empty inside a character of several tokens.
    ///
    /// # Errors
    /// Fails if the tokenizer refuses the ids.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        if matches!(self.vocabulary, Vocabulary::Ids(_)) {
            return Ok(if self.ids.len() == 1 { id.to_string() } else { format!(" {id}") });
        }
        // Blanks depend on the token before, so the window starts one completed piece earlier.
        let before = self.vocabulary.decode(&self.ids[self.window..self.pending])?;
        let after = self.vocabulary.decode(&self.ids[self.window..])?;
        if after.ends_with('\u{FFFD}') {
            return Ok(String::new());
        }
        let Some(new) = after.strip_prefix(&before) else { return Ok(String::new()) };
        self.window = self.pending;
        self.pending = self.ids.len();
        Ok(new.to_owned())
    }

    /// Returns the rest at the end: an incomplete character, as a replacement character.
    ///
    /// # Errors
    /// Fails if the tokenizer refuses the ids.
    pub fn finish(self) -> Result<String> {
        if matches!(self.vocabulary, Vocabulary::Ids(_)) {
            return Ok(String::new());
        }
        let before = self.vocabulary.decode(&self.ids[self.window..self.pending])?;
        let after = self.vocabulary.decode(&self.ids[self.window..])?;
        Ok(after.strip_prefix(&before).unwrap_or_default().to_owned())
    }

    /// Returns the whole text.
    ///
    /// # Errors
    /// Fails if the tokenizer refuses the ids.
    pub fn text(&self) -> Result<String> {
        self.vocabulary.decode(&self.ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a tokenizer whose tokens are bytes (byte-level BPE without merges).
    fn byte_level() -> Vocabulary {
        let vocab: String = {
            // In the byte-level alphabet printable bytes are themselves. The others are shifted beyond 255.
            let printable = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
            let mut next = 256;
            let entries: Vec<String> = (0..256u32)
                .map(|b| {
                    let c = if printable(b) {
                        b
                    } else {
                        next += 1;
                        next - 1
                    };
                    let c = serde_json::to_string(&char::from_u32(c).unwrap().to_string()).unwrap();
                    format!("{c}:{b}")
                })
                .collect();
            entries.join(",")
        };
        let json = format!(
            r#"{{"version":"1.0","added_tokens":[],"normalizer":null,
                "pre_tokenizer":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}},
                "post_processor":null,
                "decoder":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}},
                "model":{{"type":"BPE","vocab":{{{vocab}}},"merges":[]}}}}"#
        );
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), json).unwrap();
        let vocabulary = Vocabulary::load(dir.path());
        if let Vocabulary::Ids(why) = &vocabulary {
            panic!("{why}");
        }
        vocabulary
    }

    #[test]
    fn a_stream_gives_out_whole_characters_and_the_same_text() {
        let vocabulary = byte_level();
        let text = "Grüße, 世界 🦀 ok";
        let ids = vocabulary.encode(text, true).unwrap();
        assert_eq!(ids.len(), text.len(), "one token per byte");
        let mut stream = Stream::new(&vocabulary);
        let mut pieces = String::new();
        for id in ids {
            let piece = stream.push(id).unwrap();
            assert!(!piece.contains('\u{FFFD}'));
            pieces += &piece;
        }
        assert_eq!(pieces, text);
        assert_eq!(stream.text().unwrap(), text);
    }

    #[test]
    fn an_incomplete_character_at_the_end_is_not_lost() {
        let vocabulary = byte_level();
        let ids = vocabulary.encode("a世", true).unwrap();
        let mut stream = Stream::new(&vocabulary);
        let pieces: String = ids[..3].iter().map(|&id| stream.push(id).unwrap()).collect();
        assert_eq!(pieces, "a");
        assert_eq!(stream.finish().unwrap(), "\u{FFFD}");
    }

    #[test]
    fn ids_are_the_text_without_a_tokenizer() {
        let dir = tempfile::tempdir().unwrap();
        let vocabulary = Vocabulary::load(dir.path());
        let mut stream = Stream::new(&vocabulary);
        let pieces: String = [5, 17, 3].into_iter().map(|id| stream.push(id).unwrap()).collect();
        assert_eq!(pieces, "5 17 3");
        assert_eq!(stream.text().unwrap(), "5 17 3");
        assert!(vocabulary.encode("x", true).unwrap_err().to_string().contains("--prompt-ids"));
    }

    #[test]
    fn id_files_parse_in_three_forms_and_name_bad_words() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for text in ["1 2\n3", "[1, 2, 3]\n", "1,2,3"] {
            std::fs::write(file.path(), text).unwrap();
            assert_eq!(read_ids(file.path()).unwrap(), [1, 2, 3]);
        }
        for (text, needle) in
            [("1 x", "\"x\""), ("-1", "not a token id"), ("", "no token ids"), ("99999999999", "not a token id")]
        {
            std::fs::write(file.path(), text).unwrap();
            assert!(format!("{:#}", read_ids(file.path()).unwrap_err()).contains(needle), "{text:?}");
        }
    }
}
