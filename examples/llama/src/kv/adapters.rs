//! Adapters as safetensors files, which other tools can read and write.
//!
//! Tensors are named `layers.N.PART`. The metadata holds the adapter's name, its version and the number of layers.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use stratakv::retrieval::{Adapter, Codebook, LayerAdapter, LowRankAdapter};

use super::error::engine_error;

/// Returns the file of an adapter in a directory.
#[must_use]
pub fn adapter_file(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.safetensors"))
}

/// The tensors of a file: name, shape, dtype, little-endian elements.
type Tensors = Vec<(String, Vec<usize>, Dtype, Vec<u8>)>;

fn floats(out: &mut Tensors, name: String, shape: Vec<usize>, numbers: &[f32]) {
    out.push((name, shape, Dtype::F32, numbers.iter().flat_map(|x| x.to_le_bytes()).collect()));
}

fn words(out: &mut Tensors, name: String, numbers: &[u32]) {
    let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    out.push((name, vec![numbers.len()], Dtype::U32, bytes));
}

/// Returns the bytes of an adapter's file.
///
/// # Errors
/// Fails if the adapter is too large for the format.
pub fn to_safetensors(adapter: &Adapter) -> Result<Vec<u8>> {
    let mut tensors = Tensors::new();
    for (index, layer) in adapter.layers().iter().enumerate() {
        let name = |part: &str| format!("layers.{index}.{part}");
        match layer {
            LayerAdapter::None => {}
            LayerAdapter::LowRank(low) => {
                let shape = vec![low.matrix().len() / low.rank(), low.rank()];
                floats(&mut tensors, name("low_rank"), shape, low.matrix());
            }
            LayerAdapter::Codes(book) => {
                let shape = || vec![book.width(), book.dims()];
                floats(&mut tensors, name("mean"), vec![book.width()], book.mean());
                floats(&mut tensors, name("forward"), shape(), book.forward());
                floats(&mut tensors, name("query"), shape(), book.query());
                floats(&mut tensors, name("distortion"), vec![1], &[book.distortion()]);
                let levels = book.levels().concat();
                floats(&mut tensors, name("levels"), vec![levels.len()], &levels);
                let counts: Vec<u32> = book.levels().iter().map(|levels| levels.len() as u32).collect();
                words(&mut tensors, name("level_counts"), &counts);
                words(&mut tensors, name("packing"), &book.packing().concat());
                let counts: Vec<u32> = book.packing().iter().map(|byte| byte.len() as u32).collect();
                words(&mut tensors, name("packing_counts"), &counts);
            }
        }
    }
    let about = [
        ("name", adapter.name().to_owned()),
        ("version", adapter.version().to_string()),
        ("layers", adapter.layers().len().to_string()),
    ];
    let about = about.map(|(key, value)| (key.to_owned(), value)).into();
    let views =
        tensors.iter().map(|(name, shape, dtype, bytes)| Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?)));
    let views = views.collect::<Result<Vec<_>>>()?;
    Ok(serialize(views, Some(about))?)
}

/// The tensors of one layer in a file.
struct LayerTensors<'a> {
    file: &'a SafeTensors<'a>,
    layer: usize,
}

impl LayerTensors<'_> {
    fn name(&self, part: &str) -> String {
        format!("layers.{}.{part}", self.layer)
    }

    /// Returns the shape and the bytes of a tensor, or `None` if there is none.
    fn bytes(&self, part: &str, dtype: Dtype) -> Result<Option<(Vec<usize>, Vec<u8>)>> {
        let name = self.name(part);
        let Ok(tensor) = self.file.tensor(&name) else { return Ok(None) };
        ensure!(tensor.dtype() == dtype, "{name} has elements of {:?}, but {dtype:?} is expected", tensor.dtype());
        Ok(Some((tensor.shape().to_vec(), tensor.data().to_vec())))
    }

    fn floats(&self, part: &str) -> Result<Option<(Vec<usize>, Vec<f32>)>> {
        let found = self.bytes(part, Dtype::F32)?;
        Ok(found
            .map(|(shape, bytes)| (shape, bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())))
    }

    fn needed_floats(&self, part: &str) -> Result<Vec<f32>> {
        let found = self.floats(part)?.with_context(|| format!("{} is missing", self.name(part)))?;
        Ok(found.1)
    }

    fn needed_words(&self, part: &str) -> Result<Vec<u32>> {
        let (_, bytes) = self.bytes(part, Dtype::U32)?.with_context(|| format!("{} is missing", self.name(part)))?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
    }

    /// Splits elements into pieces. The tensor `counts` holds the lengths of the pieces.
    fn cut<T: Clone>(&self, elements: &[T], counts: &str) -> Result<Vec<Vec<T>>> {
        let name = self.name(counts);
        let (mut pieces, mut rest) = (Vec::new(), elements);
        for length in self.needed_words(counts)? {
            let piece = rest.split_at_checked(length as usize);
            let (piece, left) = piece.with_context(|| format!("{name} adds up to more than the elements"))?;
            pieces.push(piece.to_vec());
            rest = left;
        }
        ensure!(rest.is_empty(), "{name} adds up to less than the elements");
        Ok(pieces)
    }

    fn layer(&self) -> Result<LayerAdapter> {
        if let Some((shape, matrix)) = self.floats("low_rank")? {
            let &[width, rank] = &shape[..] else {
                bail!("{} has the shape {shape:?}, which is not a matrix", self.name("low_rank"))
            };
            return Ok(LowRankAdapter::new(width, rank, matrix).map_err(engine_error)?.into());
        }
        let Some((_, mean)) = self.floats("mean")? else { return Ok(LayerAdapter::None) };
        let distortion = self.needed_floats("distortion")?.first().copied();
        let distortion = distortion.with_context(|| format!("{} is empty", self.name("distortion")))?;
        let levels = self.cut(&self.needed_floats("levels")?, "level_counts")?;
        let packing = self.cut(&self.needed_words("packing")?, "packing_counts")?;
        let (forward, query) = (self.needed_floats("forward")?, self.needed_floats("query")?);
        let book = Codebook::new(mean, forward, query, packing, levels, distortion);
        Ok(book.map_err(engine_error)?.into())
    }
}

/// Returns the adapter in the bytes of a file.
///
/// # Errors
/// Fails if the bytes are not a safetensors file, or not an adapter. The error names the tensor.
pub fn from_safetensors(bytes: &[u8]) -> Result<Adapter> {
    let (_, metadata) = SafeTensors::read_metadata(bytes)?;
    let none = HashMap::new();
    let about = metadata.metadata().as_ref().unwrap_or(&none);
    let text =
        |key: &str| about.get(key).with_context(|| format!("the file is not an adapter: its metadata has no {key:?}"));
    let number = |key: &str| -> Result<u32> {
        text(key)?.parse().with_context(|| format!("{key:?} in the metadata is not a number"))
    };
    let layers = number("layers")? as usize;
    ensure!(layers <= usize::from(u16::MAX), "{layers} layers are more than {}", u16::MAX);
    let file = SafeTensors::deserialize(bytes)?;
    let layer = |layer| LayerTensors { file: &file, layer }.layer();
    let list = (0..layers).map(layer).collect::<Result<_>>()?;
    Adapter::new(text("name")?.clone(), number("version")?, list).map_err(engine_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter() -> Adapter {
        let low = LowRankAdapter::new(4, 2, (0..8).map(|i| i as f32).collect()).unwrap();
        let packing = vec![vec![0], vec![1, 2]];
        let levels = vec![vec![-1.0, 1.0], vec![-1.0, -0.5, 0.5, 1.0], vec![0.0, 3.0]];
        let book = Codebook::new(vec![0.5; 4], vec![1.0; 12], vec![2.0; 12], packing, levels, 0.25).unwrap();
        Adapter::new("name", 7, vec![LayerAdapter::None, low.into(), book.into()]).unwrap()
    }

    #[test]
    fn an_adapter_survives_its_file_and_damaged_files_are_errors() {
        let bytes = to_safetensors(&adapter()).unwrap();
        assert_eq!(from_safetensors(&bytes).unwrap(), adapter());
        for at in 0..bytes.len() {
            assert!(from_safetensors(&bytes[..at]).is_err(), "{at} bytes");
            // A changed byte may give an error or another adapter, but no panic.
            let mut other = bytes.clone();
            other[at] ^= 0x11;
            let _ = from_safetensors(&other);
        }
    }
}
