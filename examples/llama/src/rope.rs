//! Rotary position embedding in the half-rotated form of Hugging Face models (Su et al. 2021).

use crate::config::{ModelConfig, RopeScaling};

/// The rotary frequencies of one model.
#[derive(Clone, Debug)]
pub(crate) struct RotaryFrequencies {
    frequencies: Vec<f32>,
}

/// The cosines and sines of consecutive positions, `[tokens, head_dim / 2]` each.
pub(crate) struct Rotation {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl RotaryFrequencies {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let dim = config.head_dim as f64;
        let base = (0..config.head_dim / 2).map(|i| config.rope_theta.powf(-2.0 * i as f64 / dim));
        let frequencies = match config.rope_scaling {
            RopeScaling::None => base.map(|f| f as f32).collect(),
            RopeScaling::Linear { factor } => base.map(|f| (f / factor) as f32).collect(),
            RopeScaling::Llama3 { factor, low, high, original } => base
                .map(|f| {
                    let wavelength = std::f64::consts::TAU / f;
                    if wavelength < original / high {
                        f as f32
                    } else if wavelength > original / low {
                        (f / factor) as f32
                    } else {
                        let smooth = (original / wavelength - low) / (high - low);
                        ((1.0 - smooth) * f / factor + smooth * f) as f32
                    }
                })
                .collect(),
        };
        Self { frequencies }
    }

    /// Returns the frequencies, in radians per position.
    pub(crate) fn values(&self) -> &[f32] {
        &self.frequencies
    }

    /// Returns the rotations of the positions `first..first + tokens`. Angles are products in f32, as in the models'
    /// training code.
    pub(crate) fn rotation(&self, first: usize, tokens: usize) -> Rotation {
        let half = self.frequencies.len();
        let (mut cos, mut sin) = (Vec::with_capacity(tokens * half), Vec::with_capacity(tokens * half));
        for position in first..first + tokens {
            for f in &self.frequencies {
                let (s, c) = f64::from(position as f32 * f).sin_cos();
                cos.push(c as f32);
                sin.push(s as f32);
            }
        }
        Rotation { cos, sin, half }
    }
}

impl Rotation {
    /// Rotates every head of one token, `[heads, head_dim]`. `token` counts from the rotation's first position.
    pub(crate) fn apply(&self, token: usize, heads: &mut [f32]) {
        let cos = &self.cos[token * self.half..][..self.half];
        let sin = &self.sin[token * self.half..][..self.half];
        for head in heads.chunks_exact_mut(2 * self.half) {
            let (low, high) = head.split_at_mut(self.half);
            for i in 0..self.half {
                let (a, b) = (low[i], high[i]);
                low[i] = a * cos[i] - b * sin[i];
                high[i] = b * cos[i] + a * sin[i];
            }
        }
    }
}
