//! Pages of stored clusters: verifying them, and filling those that failed from groups.
//!
//! A page has one copy, and groups hold the same elements. A page that cannot be read, or whose checksum is wrong, is
//! filled from the groups of its attended entries. The read waits for them, and the result has the same bits.

use super::planes::planes;
use super::ticket::ReadTicket;
use crate::codec::BlockCoder;
use crate::error::{Error, ErrorKind, Result};
use crate::events::event;
use crate::io::buffer::lease::Lease;
use crate::io::coverage;
use crate::io::planted;
use crate::io::planted::{covered, page_place};
use crate::kernels::plane_checksum;
use crate::log::Devices;
use crate::plan::{AttendedEntries, KeySource, PlaneSet, ReadPriority, SelectedGroup, SelectedPage, SelectionInner};
use crate::pools::put_entry;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stratakv_format::PlaneIdentity;

/// How long a read without a deadline waits for buffers for the groups of a page that failed.
const REBUILD_WAIT: Duration = Duration::from_secs(10);

/// Returns whether the checksum of a page is right.
fn is_good(devices: &Devices, selection: &SelectionInner, page: &SelectedPage, bytes: &[u8]) -> bool {
    let (frame, own) = (&page.frame, &page.chosen);
    let layer = selection.layer as u16;
    let (place, valid) = page_place(own.page.page, own.page.valid);
    let identity = PlaneIdentity::of_page(frame.nonce, frame.origin, layer, own.heads, place, valid);
    plane_checksum(devices.identity.checksum, &identity, covered(bytes)) == own.page.checksum
}

impl ReadTicket {
    /// Verifies the pages of a part that has arrived, and fills those that failed from groups. `failed` are the reads
    /// that failed.
    ///
    /// # Errors
    /// [`ErrorKind::Deadline`]: it passed.
    pub(super) fn verify_pages(
        &mut self,
        index: usize,
        failed: &[(usize, Error)],
        deadline: Option<Instant>,
    ) -> Result<()> {
        let bad = self.bad_pages(index, failed);
        let outcome = bad.and_then(|bad| if bad.is_empty() { Ok(()) } else { self.fill_pages(index, &bad, deadline) });
        match outcome {
            Err(e) if e.kind() == ErrorKind::Deadline => return Err(e),
            Err(e) => _ = self.failures[self.parts[index].selection].get_or_insert(e),
            Ok(()) => self.verified[index] = Some(true),
        }
        Ok(())
    }

    /// Returns the pages of a part that failed, counted within the part, and counts them. Offers the others to the
    /// cache.
    fn bad_pages(&self, index: usize, failed: &[(usize, Error)]) -> Result<Vec<usize>> {
        let part = &self.parts[index];
        let selection = &self.selections[part.selection];
        let Some(buffer) = &self.buffers[index] else { return Ok(Vec::new()) };
        let broken =
            || Error::new(ErrorKind::Io, "read: the driver broke, and a read into the buffer may be in flight");
        let all = buffer.bytes().ok_or_else(broken)?;
        let mut bad = Vec::new();
        for (nth, (page, at)) in selection.pages[part.pages.clone()].iter().zip(&part.blocks).enumerate() {
            let Some(at) = *at else { continue };
            let bytes = all.get(at..at + page.bytes()).unwrap_or_default();
            let has_failed = failed.iter().any(|(read, _)| {
                part.reads.get(*read).is_some_and(|read| (read.to..read.to + read.bytes).contains(&at))
            });
            let device = page.frame.segment.key.0;
            if !has_failed && is_good(&self.devices, selection, page, bytes) {
                selection.cache.iter().for_each(|cache| cache.admit(page.key(selection.layer), bytes));
                continue;
            }
            if !has_failed {
                self.devices.count_checksum_failures(device, 1);
            }
            if let Ok(device) = self.devices.get(device) {
                device.counters.rebuilt_pages.add(1);
            }
            coverage!(PageRebuilt);
            event!(warn, device = device, "a page of clusters failed and is read from groups");
            bad.push(nth);
        }
        Ok(bad)
    }

    /// Fills pages of a part from the groups of their attended entries. Slots of other entries become zero.
    fn fill_pages(&mut self, index: usize, bad: &[usize], deadline: Option<Instant>) -> Result<()> {
        let part = &self.parts[index];
        let selection = Arc::clone(&self.selections[part.selection]);
        let tokens = selection.group_tokens();
        let wanted: Vec<(usize, &SelectedPage)> = (bad.iter())
            .filter_map(|nth| Some((part.blocks[*nth]?, &selection.pages[part.pages.start + nth])))
            .collect();
        let rows = wanted.iter().flat_map(|(_, page)| &page.chosen.rows);
        let groups: BTreeSet<u64> = rows.map(|(_, token)| u64::from(*token) / tokens as u64).collect();
        let source = Arc::new(groups_of(&selection, &groups));
        let own = self.read_groups(&source, deadline)?;
        let coder = BlockCoder::of(&selection.layout, selection.layer);
        let all = self.buffers[index].as_mut().and_then(Arc::get_mut).and_then(Lease::bytes_mut);
        let all = all.ok_or_else(|| Error::new(ErrorKind::Busy, "read: a buffer that was just filled is in use"))?;
        for (at, page) in &wanted {
            all[*at..at + page.bytes()].fill(0);
        }
        for (part, buffer) in own.parts.iter().zip(&own.buffers) {
            for nth in part.groups.clone() {
                let (keys, values) = planes(&source, part, buffer.as_deref(), nth)?;
                let planes = [plain(coder.as_ref(), 0, keys)?, plain(coder.as_ref(), 1, values)?];
                let group = source.groups[nth].index;
                for (at, page) in &wanted {
                    let out = &mut all[*at..at + page.bytes()];
                    for (slot, token) in page.chosen.rows.iter().filter(|row| u64::from(row.1) / tokens as u64 == group)
                    {
                        let row = *token as usize + usize::from(planted!(PageRebuiltWrong));
                        let row = (row % tokens, tokens);
                        let own = &page.chosen;
                        put_entry(&own.geometry, own.heads, out, usize::from(*slot), [&planes[0], &planes[1]], row);
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads and verifies the groups of a selection, into buffers of the store.
    fn read_groups(&self, source: &Arc<SelectionInner>, deadline: Option<Instant>) -> Result<Self> {
        let place = (self.devices.arena.clone(), false);
        let selections = vec![Arc::clone(source)];
        let mut own = Self::prepare(Arc::clone(&self.devices), selections, ReadPriority::Demand(None), place)?;
        own.submit_by(Some(deadline.unwrap_or_else(|| Instant::now() + REBUILD_WAIT))).map_err(|e| match deadline {
            None if e.kind() == ErrorKind::Deadline => {
                let text = "read: no buffers for the groups of a page of clusters that failed; select less at once";
                Error::new(ErrorKind::Busy, text)
            }
            _ => e,
        })?;
        for part in 0..own.parts.len() {
            own.complete_part(part, deadline)?;
        }
        match own.failures[0].take() {
            Some(e) => Err(e.during("groups of a page of clusters")),
            None => Ok(own),
        }
    }
}

/// Returns a selection of whole groups among those of `selection`.
fn groups_of(selection: &SelectionInner, groups: &BTreeSet<u64>) -> SelectionInner {
    let selected = selection.groups.iter().filter(|own| groups.contains(&own.index)).map(|own| SelectedGroup {
        index: own.index,
        entries: AttendedEntries::AllHeads(None),
        source: own.source.clone(),
        keys: KeySource::Stored,
        beside_pages: None,
    });
    SelectionInner {
        layout: selection.layout.clone(),
        layer: selection.layer,
        length: selection.length,
        groups: selected.collect(),
        pages: Vec::new(),
        tail: None,
        rebuilt: None,
        instance: selection.instance,
        handle: selection.handle,
        planes: PlaneSet::KeysAndValues,
        cache: None,
        cluster_runs: None,
        clusters: None,
    }
}

/// Returns a plane without its codec.
fn plain<'a>(coder: Option<&BlockCoder>, plane: usize, stored: &'a [u8]) -> Result<Cow<'a, [u8]>> {
    match coder {
        Some(coder) if coder.encodes(plane) && !stored.is_empty() => {
            let mut out = vec![0; coder.plain_bytes(plane)];
            coder.decode_plane(plane, stored, &mut out)?;
            Ok(Cow::Owned(out))
        }
        _ => Ok(Cow::Borrowed(stored)),
    }
}
