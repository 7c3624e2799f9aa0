//! The names of tensors in Hugging Face models and in GGUF files.

/// Parts of a layer: the name in Hugging Face models, and the name in GGUF files.
const LAYER_PARTS: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// Tensors that belong to no layer.
const MODEL_PARTS: [(&str, &str); 3] =
    [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];

/// Translates a name by a table, forwards (`true`) or backwards.
fn translate(table: &[(&'static str, &'static str)], name: &str, forwards: bool) -> Option<&'static str> {
    table.iter().map(|&(a, b)| if forwards { (a, b) } else { (b, a) }).find(|(from, _)| *from == name).map(|(_, to)| to)
}

/// Splits `.weight` or `.bias` off.
fn split_suffix(name: &str) -> Option<(&str, &str)> {
    name.rsplit_once('.').filter(|(_, suffix)| matches!(*suffix, "weight" | "bias"))
}

/// Returns the Hugging Face name of a GGUF tensor, or `None` if this runtime does not use it.
pub(crate) fn from_gguf(name: &str) -> Option<String> {
    let (stem, suffix) = split_suffix(name)?;
    if let Some(rest) = stem.strip_prefix("blk.") {
        let (layer, part) = rest.split_once('.')?;
        let part = translate(&LAYER_PARTS, part, false)?;
        return Some(format!("model.layers.{layer}.{part}.{suffix}"));
    }
    Some(format!("{}.{suffix}", translate(&MODEL_PARTS, stem, false)?))
}

/// Returns the GGUF name of a Hugging Face tensor, or `None` if this runtime does not use it.
pub(crate) fn to_gguf(name: &str) -> Option<String> {
    let (stem, suffix) = split_suffix(name)?;
    if let Some(rest) = stem.strip_prefix("model.layers.") {
        let (layer, part) = rest.split_once('.')?;
        let part = translate(&LAYER_PARTS, part, true)?;
        return Some(format!("blk.{layer}.{part}.{suffix}"));
    }
    Some(format!("{}.{suffix}", translate(&MODEL_PARTS, stem, true)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_translate_in_both_directions() {
        for (ours, theirs) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("lm_head.weight", "output.weight"),
            ("model.layers.17.self_attn.q_proj.bias", "blk.17.attn_q.bias"),
            ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
        ] {
            assert_eq!(to_gguf(ours).as_deref(), Some(theirs));
            assert_eq!(from_gguf(theirs).as_deref(), Some(ours));
        }
        for unused in ["rope_freqs.weight", "blk.0.attn_q", "blk.weight", "blk.0.ffn_gate_exps.weight", ""] {
            assert_eq!(from_gguf(unused), None, "{unused}");
        }
    }
}
