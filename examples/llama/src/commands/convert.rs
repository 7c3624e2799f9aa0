//! `kvrun convert`: makes a GGUF file.

use anyhow::{Context, Result};
use stratakv_llama::cli::ConvertArgs;
use stratakv_llama::config::ModelConfig;
use stratakv_llama::convert::{WeightSource, write_gguf};
use stratakv_llama::random_model::{RandomWeights, geometry};
use stratakv_llama::weights::Weights;

pub(crate) fn convert(args: &ConvertArgs) -> Result<()> {
    let (config, mut source) = match (&args.model, &args.random) {
        (Some(dir), _) => (ModelConfig::load(dir)?, WeightSource::Stored(Weights::load(dir)?)),
        (None, name) => {
            let name = name.as_deref().context("give --model or --random")?;
            (geometry(name, args.layers)?, WeightSource::Random(Box::new(RandomWeights::new(args.seed))))
        }
    };
    let (bytes, fallen) = write_gguf(&config, &mut source, args.kind, &args.out)?;
    println!("{}: {bytes} bytes", args.out.display());
    if fallen > 0 {
        println!("{fallen} matrices are f16, because their rows are not whole blocks of {:?}", args.kind);
    }
    Ok(())
}
