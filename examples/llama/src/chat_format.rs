//! The text around the messages of a chat, by the special tokens that a model's vocabulary has.

use anyhow::{Context, Result};

use crate::text::{Vocabulary, parse_ids};

/// How messages become the prompt of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatFormat {
    /// `<|im_start|>` and `<|im_end|>` around each message (Qwen).
    ChatMl,
    /// Headers with the role, and `<|eot_id|>` after each message (Llama 3).
    Llama3,
    /// `[INST]` around each message of the user (Mistral).
    Mistral,
    /// The message and a line break.
    Plain,
    /// Token ids in decimal, for a model without a tokenizer.
    Ids,
}

impl ChatFormat {
    /// Returns the format of a vocabulary, and the token that ends an answer.
    #[must_use]
    pub fn of(vocabulary: &Vocabulary) -> (Self, Option<u32>) {
        if matches!(vocabulary, Vocabulary::Ids(_)) {
            return (Self::Ids, None);
        }
        for (token, end, format) in [
            ("<|im_start|>", "<|im_end|>", Self::ChatMl),
            ("<|start_header_id|>", "<|eot_id|>", Self::Llama3),
            ("[INST]", "</s>", Self::Mistral),
        ] {
            if vocabulary.id(token).is_some() {
                return (format, vocabulary.id(end));
            }
        }
        (Self::Plain, None)
    }

    /// Returns the text of a turn. The first turn may have a message of the system.
    fn text(self, message: &str, system: Option<&str>, first: bool) -> String {
        match self {
            Self::ChatMl => {
                let system = system.map(|text| format!("<|im_start|>system\n{text}<|im_end|>\n")).unwrap_or_default();
                let line = if first { "" } else { "\n" };
                format!("{system}{line}<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n")
            }
            Self::Llama3 => {
                let part =
                    |role: &str, text: &str| format!("<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>");
                let system = system.map(|text| part("system", text)).unwrap_or_default();
                let user = part("user", message);
                format!("{system}{user}<|start_header_id|>assistant<|end_header_id|>\n\n")
            }
            Self::Mistral => {
                let system = system.map(|text| format!("{text}\n\n")).unwrap_or_default();
                format!("[INST] {system}{message} [/INST]")
            }
            Self::Plain | Self::Ids => {
                let system = system.map(|text| format!("{text}\n")).unwrap_or_default();
                format!("{system}{message}\n")
            }
        }
    }

    /// Returns the token ids of a turn. `first` says that the turn begins the session.
    ///
    /// # Errors
    /// Fails if the tokenizer refuses the text, or if a model without a tokenizer gets other words than token ids.
    pub fn turn(self, vocabulary: &Vocabulary, message: &str, system: Option<&str>, first: bool) -> Result<Vec<u32>> {
        let system = system.filter(|_| first);
        if self == Self::Ids {
            return parse_ids(&self.text(message, system, first)).context("the model has no tokenizer");
        }
        vocabulary.encode(&self.text(message, system, first), first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_have_the_text_that_models_were_trained_on() {
        assert_eq!(
            ChatFormat::ChatMl.text("Hi", Some("Be brief."), true),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        );
        assert_eq!(
            ChatFormat::ChatMl.text("Hi", None, false),
            "\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        );
        assert_eq!(
            ChatFormat::Llama3.text("Hi", None, true),
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        );
        assert_eq!(ChatFormat::Mistral.text("Hi", Some("Be brief."), true), "[INST] Be brief.\n\nHi [/INST]");
        let none = Vocabulary::Ids("no tokenizer".to_owned());
        assert_eq!(ChatFormat::of(&none), (ChatFormat::Ids, None));
        assert_eq!(ChatFormat::Ids.turn(&none, "5 6", Some("7"), true).unwrap(), [7, 5, 6]);
        assert_eq!(ChatFormat::Ids.turn(&none, "5 6", Some("7"), false).unwrap(), [5, 6]);
        assert!(ChatFormat::Ids.turn(&none, "Hi", None, true).is_err());
    }
}
