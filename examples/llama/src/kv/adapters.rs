//! Adapters as safetensors: tensors by layer, name and version in the metadata. What other tools read and write too.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use stratakv::retrieval::{Adapter, Codebook, LayerAdapter, LowRankAdapter};

use super::store::engine_error;

/// The file of an adapter.
#[must_use]
pub fn adapter_file(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.safetensors"))
}

/// Tensors in the making: name, shape, dtype, little-endian elements.
type Tensors = Vec<(String, Vec<usize>, Dtype, Vec<u8>)>;

fn floats(out: &mut Tensors, name: String, shape: Vec<usize>, numbers: &[f32]) {
    out.push((name, shape, Dtype::F32, numbers.iter().flat_map(|x| x.to_le_bytes()).collect()));
}

fn words(out: &mut Tensors, name: String, numbers: &[u32]) {
    let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    out.push((name, vec![numbers.len()], Dtype::U32, bytes));
}

/// The adapter as a file.
///
/// # Errors
/// It is too large for the format.
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

/// Tensors of a file.
struct Tensor<'a> {
    file: &'a SafeTensors<'a>,
    layer: usize,
}

impl Tensor<'_> {
    fn bytes(&self, part: &str, dtype: Dtype) -> Result<Option<(Vec<usize>, Vec<u8>)>> {
        let name = format!("layers.{}.{part}", self.layer);
        let Ok(tensor) = self.file.tensor(&name) else { return Ok(None) };
        ensure!(tensor.dtype() == dtype, "{name} has elements of {:?}, {dtype:?} expected", tensor.dtype());
        Ok(Some((tensor.shape().to_vec(), tensor.data().to_vec())))
    }

    fn floats(&self, part: &str) -> Result<Option<(Vec<usize>, Vec<f32>)>> {
        let found = self.bytes(part, Dtype::F32)?;
        Ok(found
            .map(|(shape, bytes)| (shape, bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())))
    }

    fn needed(&self, part: &str) -> Result<Vec<f32>> {
        let found = self.floats(part)?.with_context(|| format!("layers.{}.{part} is missing", self.layer))?;
        Ok(found.1)
    }

    /// Elements cut into pieces of these lengths.
    fn cut<T: Clone>(&self, elements: &[T], counts: &str) -> Result<Vec<Vec<T>>> {
        let (_, counts) = self.bytes(counts, Dtype::U32)?.with_context(|| format!("{counts} is missing"))?;
        let (mut pieces, mut rest) = (Vec::new(), elements);
        for count in counts.as_chunks::<4>().0 {
            let piece = rest.split_at_checked(u32::from_le_bytes(*count) as usize);
            let (piece, left) = piece.context("counts that are more than there is")?;
            pieces.push(piece.to_vec());
            rest = left;
        }
        ensure!(rest.is_empty(), "counts that are less than there is");
        Ok(pieces)
    }

    fn layer(&self) -> Result<LayerAdapter> {
        if let Some((shape, matrix)) = self.floats("low_rank")? {
            let &[width, rank] = &shape[..] else { bail!("layers.{}.low_rank is no matrix", self.layer) };
            return Ok(LowRankAdapter::new(width, rank, matrix).map_err(engine_error)?.into());
        }
        let Some((_, mean)) = self.floats("mean")? else { return Ok(LayerAdapter::None) };
        let (_, packing) = self.bytes("packing", Dtype::U32)?.context("packing is missing")?;
        let packing: Vec<u32> = packing.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let distortion = self.needed("distortion")?.first().copied().context("no distortion")?;
        let levels = self.cut(&self.needed("levels")?, "level_counts")?;
        let packing = self.cut(&packing, "packing_counts")?;
        let book = Codebook::new(mean, self.needed("forward")?, self.needed("query")?, packing, levels, distortion);
        Ok(book.map_err(engine_error)?.into())
    }
}

/// The adapter of a file.
///
/// # Errors
/// It is no safetensors file, or not one of an adapter; the tensor is named.
pub fn from_safetensors(bytes: &[u8]) -> Result<Adapter> {
    let (_, metadata) = SafeTensors::read_metadata(bytes)?;
    let none = HashMap::new();
    let about = metadata.metadata().as_ref().unwrap_or(&none);
    let text = |key: &str| about.get(key).with_context(|| format!("the metadata has no {key:?}: no adapter"));
    let number = |key: &str| -> Result<u32> { text(key)?.parse().with_context(|| format!("{key:?} is no number")) };
    let layers = number("layers")? as usize;
    ensure!(layers <= usize::from(u16::MAX), "{layers} layers");
    let file = SafeTensors::deserialize(bytes)?;
    let layer = |layer| Tensor { file: &file, layer }.layer();
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
    fn a_file_gives_back_the_adapter() {
        let bytes = to_safetensors(&adapter()).unwrap();
        assert_eq!(from_safetensors(&bytes).unwrap(), adapter());
        for at in 0..bytes.len() {
            assert!(from_safetensors(&bytes[..at]).is_err(), "{at} bytes");
            // Whatever comes of it, it is an adapter or an error.
            let mut other = bytes.clone();
            other[at] ^= 0x11;
            let _ = from_safetensors(&other);
        }
    }
}
