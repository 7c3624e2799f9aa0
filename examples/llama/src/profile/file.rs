//! Profiles as safetensors files: a JSON header and little-endian arrays. `CLUSTERS.md` of this crate lists them.
//!
//! The metadata entry `profile` holds [`ProfileAbout`] as JSON. `format` is `stratakv-profile`, and `version` is `1`.
//! A reader checks every length and index before it uses them.

use std::collections::HashMap;

use anyhow::{Context, Result, bail, ensure};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};

use super::{Profile, ProfileAbout, ProfileLayer};
use crate::kv::KvDType;

const FORMAT: &str = "stratakv-profile";
const VERSION: &str = "1";

/// A tensor of a file: name, shape, dtype, little-endian elements.
type Tensor = (String, Vec<usize>, Dtype, Vec<u8>);

fn words(name: String, numbers: &[u32]) -> Tensor {
    (name, vec![numbers.len()], Dtype::U32, numbers.iter().flat_map(|x| x.to_le_bytes()).collect())
}

fn floats(name: String, shape: Vec<usize>, numbers: &[f32]) -> Tensor {
    (name, shape, Dtype::F32, numbers.iter().flat_map(|x| x.to_le_bytes()).collect())
}

/// Returns the keys in their element type. They are rounded to it already.
fn keys(name: String, shape: Vec<usize>, numbers: &[f32], dtype: KvDType) -> Tensor {
    match dtype {
        KvDType::F32 => floats(name, shape, numbers),
        KvDType::F16 => {
            (name, shape, Dtype::F16, numbers.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect())
        }
        KvDType::Bf16 => {
            (name, shape, Dtype::BF16, numbers.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect())
        }
    }
}

impl Profile {
    /// Returns the bytes of the profile's file.
    ///
    /// # Errors
    /// Fails if the profile is too large for the format.
    pub fn to_safetensors(&self) -> Result<Vec<u8>> {
        let queries = self.positions.len();
        let mut tensors =
            vec![words("positions".to_owned(), &self.positions), words("questions".to_owned(), &self.questions)];
        for (index, layer) in self.layers.iter().enumerate() {
            let name = |part: &str| format!("layers.{index}.{part}");
            let shape = vec![self.about.entries, layer.kv_heads, layer.head_dim];
            tensors.push(keys(name("keys"), shape, &layer.keys, self.dtype));
            let shape = vec![queries, self.about.query_heads, layer.head_dim];
            tensors.push(floats(name("queries"), shape, &layer.queries));
            tensors.push(words(name("offsets"), &layer.offsets));
            tensors.push(words(name("activated"), &layer.activated));
            tensors.push(floats(name("weights"), vec![layer.weights.len()], &layer.weights));
        }
        let about = [
            ("format", FORMAT.to_owned()),
            ("version", VERSION.to_owned()),
            ("layers", self.layers.len().to_string()),
            ("profile", serde_json::to_string(&self.about)?),
        ];
        let about = about.map(|(key, value)| (key.to_owned(), value)).into();
        let views = tensors.iter().map(|(name, shape, dtype, bytes)| {
            let view = TensorView::new(*dtype, shape.clone(), bytes);
            Ok((name, view.with_context(|| format!("tensor {name} of the profile"))?))
        });
        Ok(serialize(views.collect::<Result<Vec<_>>>()?, Some(about))?)
    }

    /// Returns the profile in the bytes of a file.
    ///
    /// # Errors
    /// Fails if the bytes are not a profile of this version. The error names the tensor.
    pub fn from_safetensors(bytes: &[u8]) -> Result<Self> {
        let (_, metadata) = SafeTensors::read_metadata(bytes)?;
        let none = HashMap::new();
        let texts = metadata.metadata().as_ref().unwrap_or(&none);
        let text = |key: &str| texts.get(key).with_context(|| format!("profile: the metadata has no {key:?}"));
        ensure!(text("format")? == FORMAT, "profile: the format is {:?}, not {FORMAT:?}", text("format")?);
        ensure!(text("version")? == VERSION, "profile: version {:?}, but only {VERSION:?} is known", text("version")?);
        let about: ProfileAbout = serde_json::from_str(text("profile")?).context("profile: the metadata")?;
        let count: usize = text("layers")?.parse().context("profile: the number of layers")?;
        let file = Tensors { file: SafeTensors::deserialize(bytes)? };
        let (positions, questions) = (file.words("positions")?, file.words("questions")?);
        ensure!(positions.len() == questions.len(), "profile: positions and questions differ in length");
        ensure!((1..=usize::from(u16::MAX)).contains(&count), "profile: {count} layers are out of range");
        let dtype = match file.tensor("layers.0.keys")?.dtype() {
            Dtype::F32 => KvDType::F32,
            Dtype::F16 => KvDType::F16,
            Dtype::BF16 => KvDType::Bf16,
            other => bail!("profile: keys of {other:?} are not supported"),
        };
        let layers = (0..count).map(|index| file.layer(index, &about, positions.len())).collect::<Result<_>>()?;
        Ok(Self { about, dtype, positions, questions, layers })
    }
}

/// The tensors of a file.
struct Tensors<'a> {
    file: SafeTensors<'a>,
}

impl<'a> Tensors<'a> {
    fn tensor(&self, name: &str) -> Result<TensorView<'a>> {
        self.file.tensor(name).with_context(|| format!("profile: {name} is missing"))
    }

    fn words(&self, name: &str) -> Result<Vec<u32>> {
        let tensor = self.tensor(name)?;
        ensure!(tensor.dtype() == Dtype::U32, "profile: {name} has elements of {:?}, not U32", tensor.dtype());
        Ok(tensor.data().as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
    }

    /// Returns the shape and the elements of a tensor of floats.
    fn floats(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        let tensor = self.tensor(name)?;
        let (four, two) = (tensor.data().as_chunks::<4>().0, tensor.data().as_chunks::<2>().0);
        let numbers = match tensor.dtype() {
            Dtype::F32 => four.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::F16 => two.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::BF16 => two.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            other => bail!("profile: {name} has elements of {other:?}, which are no floats"),
        };
        Ok((tensor.shape().to_vec(), numbers))
    }

    fn layer(&self, index: usize, about: &ProfileAbout, queries: usize) -> Result<ProfileLayer> {
        let name = |part: &str| format!("layers.{index}.{part}");
        let (shape, keys) = self.floats(&name("keys"))?;
        let &[entries, kv_heads, head_dim] = &shape[..] else { bail!("profile: {} has no 3 axes", name("keys")) };
        ensure!(entries == about.entries, "profile: {} holds {entries} of {} entries", name("keys"), about.entries);
        let (shape, recorded) = self.floats(&name("queries"))?;
        let expected = [queries, about.query_heads, head_dim];
        ensure!(shape == expected, "profile: {} has the shape {shape:?}, not {expected:?}", name("queries"));
        let (offsets, activated) = (self.words(&name("offsets"))?, self.words(&name("activated"))?);
        let (_, weights) = self.floats(&name("weights"))?;
        let ends = (offsets.first().copied(), offsets.last().map(|last| *last as usize));
        let whole = ends == (Some(0), Some(activated.len())) && offsets.is_sorted() && offsets.len() == queries + 1;
        ensure!(whole, "profile: {} does not cut {} entries for {queries} queries", name("offsets"), activated.len());
        ensure!(weights.len() == activated.len(), "profile: {} has another length than activated", name("weights"));
        if let Some(at) = activated.iter().find(|at| **at as usize >= entries) {
            bail!("profile: {} names entry {at} of {entries}", name("activated"));
        }
        Ok(ProfileLayer { kv_heads, head_dim, keys, queries: recorded, offsets, activated, weights })
    }
}

#[cfg(test)]
mod tests {
    use stratakv::retrieval::clusters::ActivationRule;

    use super::*;

    fn profile(dtype: KvDType) -> Profile {
        let layer = ProfileLayer {
            kv_heads: 1,
            head_dim: 2,
            keys: (0..6).map(|x| x as f32 / 4.0).collect(),
            queries: (0..8).map(|x| x as f32 / 3.0).collect(),
            offsets: vec![0, 2, 3],
            activated: vec![0, 2, 1],
            weights: vec![0.5, 0.25, 1.0],
        };
        let about = ProfileAbout {
            prompt: "MK-8-0".to_owned(),
            entries: 3,
            source: "last:2".to_owned(),
            rule: ActivationRule { weight: 0.75, share: 1.0 / 32.0, sinks: 0, window: 0 },
            query_heads: 2,
            scale: 0.125,
            model: "00".to_owned(),
        };
        Profile { about, dtype, positions: vec![1, 2], questions: vec![0, 0], layers: vec![layer.clone(), layer] }
    }

    #[test]
    fn a_profile_survives_its_file_and_damaged_files_are_errors() {
        for dtype in [KvDType::F32, KvDType::F16, KvDType::Bf16] {
            let profile = profile(dtype);
            let bytes = profile.to_safetensors().unwrap();
            assert_eq!(Profile::from_safetensors(&bytes).unwrap(), profile);
            for at in 0..bytes.len() {
                assert!(Profile::from_safetensors(&bytes[..at]).is_err(), "{at} bytes");
                // A changed byte may give an error or another profile, but no panic.
                let mut other = bytes.clone();
                other[at] ^= 0x11;
                let _ = Profile::from_safetensors(&other);
            }
        }
    }

    #[test]
    fn lists_that_contradict_each_other_are_errors() {
        let refused = |change: fn(&mut Profile)| {
            let mut wrong = profile(KvDType::F32);
            change(&mut wrong);
            format!("{:#}", Profile::from_safetensors(&wrong.to_safetensors().unwrap()).unwrap_err())
        };
        assert!(refused(|p| p.layers[1].activated[0] = 3).contains("layers.1.activated names entry 3 of 3"));
        assert!(refused(|p| p.layers[0].offsets[1] = 9).contains("layers.0.offsets"));
        assert!(refused(|p| p.layers[0].offsets = vec![0, 3]).contains("layers.0.offsets"));
        assert!(refused(|p| p.questions = vec![0]).contains("differ in length"));
        assert!(refused(|p| p.layers.clear()).contains("0 layers"));
    }
}
