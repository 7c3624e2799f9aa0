//! Entries of clusters against the groups and tails that hold the same tokens (SPEC.md chapter 11).
//!
//! Pages repeat what a reader decodes from groups, so every row of an entry equals the row of its token there. The
//! comparison reads a block for each group that the pages of a directory name, so it is made only on request.

use crate::devices::Devices;
use crate::finding::Sink;
use crate::frames::{FrameInfo, RowExtent};
use crate::io::{self, StoreFile};
use crate::planes::decoded;
use crate::replay::State;
use std::collections::HashMap;
use stratakv_format::codec::PlaneShape;
use stratakv_format::frame::tail_plane_bytes;
use stratakv_format::layout::{LayerGeometry, Layout};
use stratakv_format::pool::{EntryHeads, PageGeometry};
use stratakv_format::{Location, PlaneCodec, SegmentId, segment};

/// The most bytes of decoded planes that are kept.
const KEPT_BYTES: usize = 64 << 20;

/// Planes `[kv_heads, stride, dim]` of consecutive tokens, decoded.
struct Rows {
    first: u64,
    stride: usize,
    planes: [Vec<u8>; 2],
}

/// An extent with tokens of a layer, as a sequence refers to it.
struct Source {
    location: Location,
    extent: RowExtent,
    /// One past its last token that belongs to the sequence.
    end: u64,
}

/// The tokens of one layer of one sequence.
pub(crate) struct LayerRows<'a> {
    layout: &'a Layout,
    layer: &'a LayerGeometry,
    /// The newest first.
    sources: Vec<Source>,
    files: HashMap<(u16, u32), Option<StoreFile>>,
    /// Decoded planes by source and first token. `None` if they cannot be read, which other checks report.
    kept: HashMap<(usize, u64), Option<Rows>>,
    kept_bytes: usize,
}

impl<'a> LayerRows<'a> {
    /// Returns the rows of a layer of the sequence that wrote a derived frame, or of another one that refers to it.
    pub(crate) fn new(
        state: &State,
        infos: &HashMap<u64, FrameInfo>,
        (frame, origin): (u64, u64),
        (layout, layer): (&'a Layout, u16),
    ) -> Option<Self> {
        let refers = |id: &&u64| state.sequences().get(*id).is_some_and(|own| own.refs.contains_key(&frame));
        let own = Some(&origin).filter(refers).or_else(|| state.sequences().keys().find(refers))?;
        let sequence = state.sequences().get(own)?;
        let mut sources: Vec<(u64, Source)> = Vec::new();
        for (id, token_end) in &sequence.refs {
            let (Some(frame), Some(info)) = (state.frames().get(id), infos.get(id)) else { continue };
            for extent in info.rows.iter().filter(|extent| extent.layer == layer) {
                let end = (extent.first + u64::from(extent.tokens)).min(*token_end).min(sequence.committed);
                let source = Source { location: frame.location, extent: *extent, end };
                sources.push((frame.record.lsn.get(), source));
            }
        }
        sources.sort_by_key(|(lsn, _)| std::cmp::Reverse(*lsn));
        Some(Self {
            layout,
            layer: layout.layers.get(usize::from(layer))?,
            sources: sources.into_iter().map(|(_, source)| source).collect(),
            files: HashMap::new(),
            kept: HashMap::new(),
            kept_bytes: 0,
        })
    }

    /// Returns the first entry of a page that differs from its token: its slot. Tokens that no extent holds are passed
    /// over.
    pub(crate) fn first_difference(
        &mut self,
        devices: &Devices,
        (geometry, heads): (&PageGeometry, EntryHeads),
        page: &[u8],
        tokens: &[u32],
    ) -> Option<usize> {
        let rows = [geometry.key_row, geometry.value_row];
        tokens.iter().enumerate().position(|(slot, token)| {
            let Some(own) = self.rows_of(devices, u64::from(*token)) else { return false };
            let at = (u64::from(*token) - own.first) as usize;
            (0..2).any(|plane| {
                (0..geometry.heads).any(|nth| {
                    let head = if let EntryHeads::One(head) = heads { usize::from(head) } else { nth };
                    let start = (head * own.stride + at) * rows[plane];
                    let expected = own.planes[plane].get(start..start + rows[plane]);
                    expected != page.get(geometry.row(plane, nth, slot))
                })
            })
        })
    }

    /// Returns decoded planes that hold a token.
    fn rows_of(&mut self, devices: &Devices, token: u64) -> Option<&Rows> {
        let holds = |source: &Source| source.extent.first <= token && token < source.end;
        let nth = self.sources.iter().position(holds)?;
        let extent = self.sources[nth].extent;
        let group = u64::from(self.layout.group_tokens);
        let first = if extent.is_groups { token - token % group } else { extent.first };
        if !self.kept.contains_key(&(nth, first)) {
            if self.kept_bytes > KEPT_BYTES {
                self.kept.clear();
                self.kept_bytes = 0;
            }
            let rows = self.read(devices, nth, first);
            self.kept_bytes += rows.as_ref().map_or(0, |rows| rows.planes[0].len() + rows.planes[1].len());
            self.kept.insert((nth, first), rows);
        }
        self.kept.get(&(nth, first))?.as_ref()
    }

    /// Reads and decodes the planes of a source from token `first` on: a block, or a tail.
    fn read(&mut self, devices: &Devices, nth: usize, first: u64) -> Option<Rows> {
        let Source { location, extent, .. } = &self.sources[nth];
        let (extent, offset) = (*extent, location.offset() + extent.offset);
        let key = (location.device.0, location.segment.0);
        let quiet = Sink::new(0);
        let opened = self.files.entry(key).or_insert_with(|| {
            let own = devices.get(key.0)?;
            io::open(&own.directory, Some(own.index), &own.path, &segment::file_name(SegmentId(key.1)), &quiet)
        });
        let file = opened.as_ref()?;
        let read = |at: u64, bytes: usize| {
            let mut out = vec![0; bytes];
            file.read(at, &mut out, &quiet).is_empty().then_some(out)
        };
        if !extent.is_groups {
            let (keys, values) = tail_plane_bytes(self.layer, self.layout.dtype, extent.tokens as usize);
            let planes = [read(offset, keys)?, read(offset + keys as u64, values)?];
            return Some(Rows { first: extent.first, stride: extent.tokens as usize, planes });
        }
        let (group, block) = (u64::from(self.layout.group_tokens), self.layout.block(self.layer));
        let at = offset + block.block_offset(((first - extent.first) / group) as usize) as u64;
        let plane = |plane: usize| {
            let (start, bytes) = block.plane(plane);
            let (codec, shape): (PlaneCodec, PlaneShape) =
                (self.layer.codecs[plane], self.layout.plane_shape(self.layer, plane));
            let stored = read(at + start as u64, bytes)?;
            codec.first_bad(&shape, &stored).is_none().then(|| decoded(codec, &shape, &stored))
        };
        Some(Rows { first, stride: group as usize, planes: [plane(0)?, plane(1)?] })
    }
}
