//! Rotary position embedding: rotates keys to their positions and back.
//!
//! Each pair of elements of a key is rotated by an angle proportional to its position. Frequencies and angles are
//! rounded to f32 where the code of the models rounds them, so that rotated keys have the same bits.
//!
//! Source: Su et al. 2021, "RoFormer".

use std::ops::Range;
use stratakv_format::rope::{Rope, RopePairing, RopeScaling};

/// The rotation of the keys of a layer.
#[derive(Clone, Debug)]
pub(crate) struct Rotation {
    /// The first rotated element.
    first: usize,
    pairing: RopePairing,
    /// The frequency of each pair, rounded to f32 as in the code of the models.
    frequencies: Vec<f32>,
}

/// The cosine and sine of each pair at one position.
pub(crate) type Angles = Vec<(f32, f32)>;

impl Rotation {
    /// Returns the rotation that a layout describes.
    pub(crate) fn new(rope: &Rope) -> Self {
        let dims = rope.dims() as f64;
        let frequency = |pair: usize| {
            let f = rope.theta().powf(-2.0 * pair as f64 / dims);
            let scaled = match rope.scaling() {
                RopeScaling::None => f,
                RopeScaling::Linear { factor } => f / factor,
                RopeScaling::Llama3 { factor, low, high, original } => {
                    let wavelength = std::f64::consts::TAU / f;
                    if wavelength < original / high {
                        f
                    } else if wavelength > original / low {
                        f / factor
                    } else {
                        let smooth = (original / wavelength - low) / (high - low);
                        (1.0 - smooth) * f / factor + smooth * f
                    }
                }
            };
            scaled as f32
        };
        let frequencies = (0..rope.dims() / 2).map(frequency).collect();
        Self { first: rope.first(), pairing: rope.pairing(), frequencies }
    }

    /// Writes the angles at a position. Products are rounded to f32 as in the code of the models.
    pub(crate) fn angles(&self, position: u64, out: &mut Angles) {
        out.clear();
        out.extend(self.frequencies.iter().map(|f| {
            let (sin, cos) = f64::from(position as f32 * f).sin_cos();
            (cos as f32, sin as f32)
        }));
    }

    /// Returns the range of the rotated elements of a key.
    fn rotated(&self) -> Range<usize> {
        self.first..self.first + 2 * self.frequencies.len()
    }

    /// Rotates the key of one head to the position of `angles`.
    pub(crate) fn turn(&self, angles: &Angles, key: &mut [f32]) {
        self.pairs(angles, key, |(cos, sin), (a, b)| (a * cos - b * sin, b * cos + a * sin));
    }

    /// Rotates the key of one head back from the position of `angles`.
    pub(crate) fn turn_back(&self, angles: &Angles, key: &mut [f32]) {
        self.pairs(angles, key, |(cos, sin), (a, b)| (a * cos + b * sin, b * cos - a * sin));
    }

    /// Replaces each rotated pair by `by(angle, pair)`.
    #[inline(always)]
    fn pairs(&self, angles: &Angles, key: &mut [f32], by: impl Fn((f32, f32), (f32, f32)) -> (f32, f32)) {
        let key = &mut key[self.rotated()];
        match self.pairing {
            RopePairing::Halves => {
                let (low, high) = key.split_at_mut(key.len() / 2);
                for ((a, b), angle) in low.iter_mut().zip(high).zip(angles) {
                    (*a, *b) = by(*angle, (*a, *b));
                }
            }
            RopePairing::Interleaved => {
                for (pair, angle) in key.chunks_exact_mut(2).zip(angles) {
                    (pair[0], pair[1]) = by(*angle, (pair[0], pair[1]));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ropes() -> impl Strategy<Value = Rope> {
        let scaling = prop_oneof![
            Just(RopeScaling::None),
            Just(RopeScaling::Linear { factor: 4.0 }),
            Just(RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64.0 }),
        ];
        (1..9_u16, 0..4_u16, any::<bool>(), scaling).prop_map(|(pairs, first, halves, scaling)| {
            let rope = Rope::new(2 * pairs, 10_000.0).starting_at(first).scaled(scaling);
            if halves { rope } else { rope.interleaved() }
        })
    }

    proptest! {
        #[test]
        fn turned_keys_turn_back(
            rope in ropes(), key in prop::collection::vec(-4.0_f32..4.0, 24), position in 0..100_000_u64,
        ) {
            let (rotation, mut angles) = (Rotation::new(&rope), Vec::new());
            rotation.angles(position, &mut angles);
            let mut turned = key.clone();
            rotation.turn(&angles, &mut turned);
            let rotated = rope.first()..rope.first() + rope.dims();
            for (i, (a, b)) in key.iter().zip(&turned).enumerate() {
                prop_assert!(rotated.contains(&i) || a == b, "element {i} is not rotated");
            }
            let length = |key: &[f32]| key.iter().map(|x| x * x).sum::<f32>();
            prop_assert!((length(&turned) - length(&key)).abs() < 1e-3);
            // By definition a pair is a complex number that is multiplied by e^(i angle).
            for (pair, (cos, sin)) in angles.iter().enumerate() {
                let (a, b) = match rope.pairing() {
                    RopePairing::Halves => (pair, pair + rope.dims() / 2),
                    RopePairing::Interleaved => (2 * pair, 2 * pair + 1),
                };
                let (a, b) = (rope.first() + a, rope.first() + b);
                prop_assert!((turned[a] - (key[a] * cos - key[b] * sin)).abs() < 1e-5);
                prop_assert!((turned[b] - (key[b] * cos + key[a] * sin)).abs() < 1e-5);
            }
            rotation.turn_back(&angles, &mut turned);
            for (a, b) in key.iter().zip(&turned) {
                prop_assert!((a - b).abs() < 1e-5, "{a} {b}");
            }
        }

        #[test]
        fn dot_products_of_turned_keys_depend_on_their_distance(
            rope in ropes(), seed in prop::collection::vec(-1.0_f32..1.0, 48), at in 0..400_u64,
            distance in 0..400_u64,
        ) {
            let rotation = Rotation::new(&rope);
            let dot = |p: u64, q: u64| {
                let turned = |position, key: &[f32]| {
                    let (mut angles, mut key) = (Vec::new(), key.to_vec());
                    rotation.angles(position, &mut angles);
                    rotation.turn(&angles, &mut key);
                    key
                };
                let (a, b) = (turned(p, &seed[..24]), turned(q, &seed[24..]));
                a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>()
            };
            prop_assert!((dot(0, distance) - dot(at, at + distance)).abs() < 2e-3);
        }
    }
}
