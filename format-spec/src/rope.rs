//! Rotations: the rotary position embedding of the keys of a layer, as a layout describes it (Su et al. 2021).

use crate::error::FormatError;
use crate::verify::check_zeros;
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The most rotation entries of a layout.
pub const ROPES_MAX: usize = 255;

/// Pairing: rotated element i with rotated element i + dims / 2.
pub const PAIRING_HALVES: u8 = 1;
/// Pairing: rotated element 2 i with rotated element 2 i + 1.
pub const PAIRING_INTERLEAVED: u8 = 2;

/// Scaling: unscaled frequencies.
pub const SCALING_NONE: u8 = 0;
/// Scaling: all frequencies divided by the factor.
pub const SCALING_LINEAR: u8 = 1;
/// Scaling of Llama 3.1: low frequencies divided by the factor, high ones kept, the others interpolated.
pub const SCALING_LLAMA3: u8 = 2;

/// A rotation entry of an encoded layout. The numbers are IEEE 754 binary64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawRope {
    /// The first rotated element of the key of a head.
    pub first: U16,
    /// The number of rotated elements, even.
    pub dims: U16,
    /// [`PAIRING_HALVES`] or [`PAIRING_INTERLEAVED`].
    pub pairing: u8,
    /// [`SCALING_NONE`], [`SCALING_LINEAR`] or [`SCALING_LLAMA3`].
    pub scaling: u8,
    /// Zero.
    pub reserved: [u8; 2],
    /// The base of the frequencies, above 1.
    pub theta: U64,
    /// The factor of linear and llama3 scaling, above 0, else 0.
    pub factor: U64,
    /// Llama3: wavelengths above original / low are low frequencies. Else 0.
    pub low: U64,
    /// Llama3: wavelengths below original / high are high frequencies. It is above `low`. Else 0.
    pub high: U64,
    /// Llama3: the context length of the original training, above 0. Else 0.
    pub original: U64,
}

const _: () = assert!(size_of::<RawRope>() == 48);

/// The pairing of rotated elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopePairing {
    /// Element i with element i + dims / 2, as in Hugging Face's Llama and most other models.
    Halves,
    /// Element 2 i with element 2 i + 1, as in the paper, GPT-J and llama.cpp's "normal".
    Interleaved,
}

/// The scaling of the frequencies `theta^(-2 i / dims)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Unscaled.
    None,
    /// All frequencies divided by the factor.
    Linear {
        /// The stretch of positions.
        factor: f64,
    },
    /// The scaling of Llama 3.1.
    Llama3 {
        /// The stretch of low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are low frequencies.
        low: f64,
        /// Wavelengths below `original / high` are high frequencies.
        high: f64,
        /// The context length of the original training.
        original: f64,
    },
}

/// The rotation of the keys of a layer.
///
/// Pair i of the key of the token at position p is rotated by the angle p * frequency i. Two rotations are equal if all
/// their numbers are equal bit by bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rope {
    first: u16,
    dims: u16,
    pairing: RopePairing,
    scaling: u8,
    /// theta, factor, low, high and original as bits of binary64, so that layouts can be compared and hashed.
    numbers: [u64; 5],
}

impl Rope {
    /// Returns the rotation of the first `dims` elements, paired in halves, with unscaled frequencies of base `theta`.
    #[must_use]
    pub const fn new(dims: u16, theta: f64) -> Self {
        let numbers = [theta.to_bits(), 0, 0, 0, 0];
        Self { first: 0, dims, pairing: RopePairing::Halves, scaling: SCALING_NONE, numbers }
    }

    /// Pairs neighbours instead of halves.
    #[must_use]
    pub const fn interleaved(mut self) -> Self {
        self.pairing = RopePairing::Interleaved;
        self
    }

    /// Rotates the elements from `first` on.
    #[must_use]
    pub const fn starting_at(mut self, first: u16) -> Self {
        self.first = first;
        self
    }

    /// Scales the frequencies.
    #[must_use]
    pub const fn scaled(mut self, scaling: RopeScaling) -> Self {
        let theta = self.numbers[0];
        (self.scaling, self.numbers) = match scaling {
            RopeScaling::None => (SCALING_NONE, [theta, 0, 0, 0, 0]),
            RopeScaling::Linear { factor } => (SCALING_LINEAR, [theta, factor.to_bits(), 0, 0, 0]),
            RopeScaling::Llama3 { factor, low, high, original } => {
                let numbers = [theta, factor.to_bits(), low.to_bits(), high.to_bits(), original.to_bits()];
                (SCALING_LLAMA3, numbers)
            }
        };
        self
    }

    /// Returns the first rotated element of a key.
    #[must_use]
    pub const fn first(&self) -> usize {
        self.first as usize
    }

    /// Returns the number of rotated elements of a key.
    #[must_use]
    pub const fn dims(&self) -> usize {
        self.dims as usize
    }

    /// Returns the pairing.
    #[must_use]
    pub const fn pairing(&self) -> RopePairing {
        self.pairing
    }

    /// Returns the base of the frequencies.
    #[must_use]
    pub const fn theta(&self) -> f64 {
        f64::from_bits(self.numbers[0])
    }

    /// Returns the scaling.
    #[must_use]
    pub const fn scaling(&self) -> RopeScaling {
        let [_, factor, low, high, original] = self.numbers;
        let factor = f64::from_bits(factor);
        match self.scaling {
            SCALING_NONE => RopeScaling::None,
            SCALING_LINEAR => RopeScaling::Linear { factor },
            _ => RopeScaling::Llama3 {
                factor,
                low: f64::from_bits(low),
                high: f64::from_bits(high),
                original: f64::from_bits(original),
            },
        }
    }

    /// Checks every range. `at` is the offset of the entry in the encoded layout.
    pub(crate) fn check(&self, at: usize) -> Result<(), FormatError> {
        if self.dims == 0 || !self.dims.is_multiple_of(2) {
            return Err(FormatError::range("rotated dims", at + 2, 2, u64::from(self.dims)));
        }
        let [theta, factor, low, high, original] = self.numbers.map(f64::from_bits);
        let scales = self.scaling != SCALING_NONE;
        let is_llama3 = self.scaling == SCALING_LLAMA3;
        let wrong = [
            ("theta", 8, !(theta.is_finite() && theta > 1.0)),
            ("factor", 16, scales && !(factor.is_finite() && factor > 0.0)),
            ("low frequencies", 24, is_llama3 && !(low.is_finite() && low > 0.0)),
            ("high frequencies", 32, is_llama3 && !(high.is_finite() && high > low)),
            ("original context", 40, is_llama3 && !(original.is_finite() && original > 0.0)),
        ];
        match wrong.iter().zip(self.numbers).find(|((.., wrong), _)| *wrong) {
            Some(((field, offset, _), bits)) => Err(FormatError::range(field, at + offset, 0, bits)),
            None => Ok(()),
        }
    }

    pub(crate) fn to_raw(self) -> RawRope {
        let [theta, factor, low, high, original] = self.numbers.map(U64::new);
        RawRope {
            first: U16::new(self.first),
            dims: U16::new(self.dims),
            pairing: match self.pairing {
                RopePairing::Halves => PAIRING_HALVES,
                RopePairing::Interleaved => PAIRING_INTERLEAVED,
            },
            scaling: self.scaling,
            reserved: [0; 2],
            theta,
            factor,
            low,
            high,
            original,
        }
    }

    /// Decodes and checks a rotation entry at offset `at` of the encoded layout.
    pub(crate) fn from_raw(raw: &RawRope, at: usize) -> Result<Self, FormatError> {
        let unknown = |field, offset: usize, known, found| {
            Err(FormatError::unsupported(field, at + offset, known, u64::from(found)))
        };
        let pairing = match raw.pairing {
            PAIRING_HALVES => RopePairing::Halves,
            PAIRING_INTERLEAVED => RopePairing::Interleaved,
            found => return unknown("pairing of a rotation", 4, 2, found),
        };
        if raw.scaling > SCALING_LLAMA3 {
            return unknown("scaling of a rotation", 5, 2, raw.scaling);
        }
        check_zeros(&raw.reserved, "rotation", at + 6)?;
        // Numbers that the scaling does not use are zero.
        let unused = match raw.scaling {
            SCALING_NONE => 16,
            SCALING_LINEAR => 24,
            _ => 48,
        };
        check_zeros(&raw.as_bytes()[unused..], "rotation", at + unused)?;
        let numbers = [raw.theta, raw.factor, raw.low, raw.high, raw.original].map(|number| number.get());
        let rope = Self { first: raw.first.get(), dims: raw.dims.get(), pairing, scaling: raw.scaling, numbers };
        rope.check(at)?;
        Ok(rope)
    }
}
