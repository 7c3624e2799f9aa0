//! The geometry that both directions share: ranges, runs and their parameters.

use stratakv_format::DType;
use stratakv_format::codec::VALUE_RANGE_CHANNELS;

/// The channels of a run, and the ranges that are worked on together.
pub(super) const RUN: usize = VALUE_RANGE_CHANNELS;

/// The shape of a plane `[heads, tokens, dims]` and of its quantised form.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuantisedShape {
    /// True if each channel has a range over all tokens (keys). Otherwise each run of channels of a token has one
    /// (values).
    pub(crate) per_channel: bool,
    /// KV heads.
    pub(crate) heads: usize,
    /// Tokens.
    pub(crate) tokens: usize,
    /// Channels.
    pub(crate) dims: usize,
    /// The type of the elements and of the parameters.
    pub(crate) dtype: DType,
    /// Ranges of a head.
    pub(crate) ranges: usize,
    /// Bytes of the quantised form of a head.
    pub(crate) head_bytes: usize,
}

/// The ranges of a head, which are worked on [`RUN`] at a time in the order of their parameters.
///
/// Ranges per channel: `RUN` ranges are neighbouring channels, which have one element each in a run of every token.
/// Otherwise each range is one run.
#[derive(Clone, Copy)]
pub(super) struct RangeLayout {
    pub(super) per_channel: bool,
    pub(super) tokens: usize,
    pub(super) dims: usize,
    pub(super) row_bytes: usize,
    /// Ranges of a head.
    pub(super) count: usize,
}

impl RangeLayout {
    #[inline(always)]
    pub(super) fn of<const BITS: u32>(shape: &QuantisedShape) -> Self {
        let &QuantisedShape { per_channel, tokens, dims, ranges, .. } = shape;
        let row_bytes = if BITS == 4 { dims.div_ceil(2) } else { dims };
        Self { per_channel, tokens, dims, row_bytes, count: ranges }
    }

    /// Returns the number of ranges from `first` on that are worked on together.
    #[inline(always)]
    pub(super) fn some(&self, first: usize) -> usize {
        RUN.min(self.count - first)
    }

    /// Returns the number of runs that these ranges have.
    #[inline(always)]
    pub(super) fn runs(&self, first: usize) -> usize {
        if self.per_channel { self.tokens } else { self.some(first) }
    }

    /// Returns the first of these runs.
    #[inline(always)]
    pub(super) fn place(&self, first: usize) -> ChannelRun {
        let (token, channel) = if self.per_channel {
            (0, first)
        } else {
            let per_row = self.dims.div_ceil(RUN);
            (first / per_row, first % per_row * RUN)
        };
        ChannelRun { token, channel, channels: RUN.min(self.dims - channel) }
    }

    /// Returns the run after `place`.
    #[inline(always)]
    pub(super) fn after(&self, place: ChannelRun) -> ChannelRun {
        let channel = place.channel + if self.per_channel { 0 } else { RUN };
        let (token, channel) = match self.per_channel || channel >= self.dims {
            true => (place.token + 1, if self.per_channel { channel } else { 0 }),
            false => (place.token, channel),
        };
        ChannelRun { token, channel, channels: RUN.min(self.dims - channel) }
    }
}

/// A run: up to [`RUN`] neighbouring channels of a token.
#[derive(Clone, Copy)]
pub(super) struct ChannelRun {
    pub(super) token: usize,
    /// The first channel.
    pub(super) channel: usize,
    /// The number of channels.
    pub(super) channels: usize,
}

/// Returns a full run that starts with `some`. If `some` is shorter, the run is in `spare` and repeats the first
/// element.
#[inline(always)]
pub(super) fn full_run<'a, T: Copy>(some: &'a [T], spare: &'a mut [T; RUN]) -> &'a [T; RUN] {
    if let Some(all) = some.first_chunk() {
        return all;
    }
    for (at, to) in spare.iter_mut().enumerate() {
        *to = some[if at < some.len() { at } else { 0 }];
    }
    spare
}

/// The parameters of [`RUN`] ranges.
pub(super) struct RangeParameters {
    /// The least value of each range.
    pub(super) least: [f32; RUN],
    /// The step of each range, or its inverse.
    pub(super) steps: [f32; RUN],
}
