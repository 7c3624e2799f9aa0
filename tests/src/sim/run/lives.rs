//! Operations that create, open, fork, import and read sequences.

use super::write::is_doubtful;
use super::{Runner, StepResult, failed, key};
use crate::sim::coverage;
use crate::sim::model::{ModelSequence, Version};
use std::time::Duration;
use stratakv::export::ImportOptions;
use stratakv::{CreateOptions, Durability, ErrorKind, OpenSequence, SelectRequest, StoredSummary, SummaryResidency};

/// The largest number of readers at a time.
const READERS_MAX: usize = 3;

impl Runner<'_> {
    /// Returns the id of the open handle of a slot. Opens or creates the sequence if the slot has no handle. Returns
    /// none if a fault prevented this.
    pub(super) fn handle(&mut self, slot: usize) -> StepResult<Option<u64>> {
        if let Some((id, _)) = &self.handles[slot] {
            return Ok(Some(*id));
        }
        let known = self.model.in_slot(slot);
        let end = self.case.ends.get(slot).copied().unwrap_or_default();
        let start = self.simulation.now();
        let summaries = if self.case.streamed { SummaryResidency::Streamed } else { SummaryResidency::Resident };
        let made = match &known {
            Some(_) => self.store()?.open_sequence(&key(slot), OpenSequence::new().summary_residency(summaries)),
            None => {
                let options = CreateOptions::new().key(key(slot)).copies(self.case.copies);
                let options = options.evictable(end.evictable);
                let options = if self.case.summaries { options.store_summary(StoredSummary::MinMax) } else { options };
                let options = options.summary_residency(summaries);
                let options = if end.ttl > 0 { options.ttl(Duration::from_millis(end.ttl)) } else { options };
                self.store()?.create_sequence(&self.shape.layout, options)
            }
        };
        self.model.sync_attempted(made.is_ok());
        let sequence = match made {
            Ok(sequence) => sequence,
            Err(e) => {
                self.fault("open or create a sequence", &e)?;
                return Ok(None);
            }
        };
        let id = sequence.id().0;
        match known {
            None => {
                let created = (start, self.simulation.now());
                let now = Version { layers: vec![Vec::new(); self.shape.layers], ..Version::default() };
                self.model
                    .created(id, ModelSequence { slot, now, end, created, ..ModelSequence::default() })
                    .or_else(failed)?;
            }
            Some((known, version)) => {
                let known = self.model.resolve_id(known, id);
                let step = self.model.step;
                let Some(life) = self.model.lives.get_mut(&known) else {
                    return failed(format!("the model has no sequence {known}"));
                };
                life.back_to(&version);
                life.used = (step, step);
                let same = sequence.len() as usize == version.tokens()
                    && sequence.token_ids() == version.ids
                    && sequence.caller_state() == version.state.as_deref();
                if known != id || !same {
                    let found = (sequence.len(), sequence.token_ids(), sequence.caller_state());
                    return failed(format!("slot {slot}: opened {id} {found:?}, committed {known} {version:?}"));
                }
            }
        }
        self.handles[slot] = Some((id, sequence));
        Ok(Some(id))
    }

    /// Deletes the sequence in a slot. Returns false if a fault prevented this.
    fn vacate(&mut self, slot: usize) -> StepResult<bool> {
        if self.handles[slot].is_none() && self.model.in_slot(slot).is_none() {
            return Ok(true);
        }
        self.delete(slot, Durability::Lazy)?;
        Ok(self.handles[slot].is_none() && self.model.in_slot(slot).is_none())
    }

    pub(super) fn fork(&mut self, slot: usize, to: usize) -> StepResult {
        let Some(id) = self.handle(slot)? else { return Ok(()) };
        if slot == to || !self.vacate(to)? {
            return Ok(());
        }
        self.mark_commits();
        let start = self.simulation.now();
        let Some((_, sequence)) = &mut self.handles[slot] else { return Ok(()) };
        let forked = sequence.fork_as(&key(to));
        self.by_itself(0, forked.is_ok())?;
        let fork = match forked {
            Ok(fork) => fork,
            Err(e) => return self.fault("fork", &e),
        };
        // The fork succeeded, so the deletion of the key's previous sequence is durable.
        self.model.sync_attempted(true);
        let Some(parent) = self.model.lives.get(&id) else { return failed("the model has no parent") };
        let created = (start, self.simulation.now());
        let life = ModelSequence { slot: to, created, owed: None, ..parent.clone() };
        let lengths: Vec<_> = (0..self.shape.layers).map(|layer| fork.layer_len(layer).ok()).collect();
        if lengths.iter().zip(&life.now.layers).any(|(len, own)| *len != Some(own.len() as u64))
            || (fork.token_ids(), fork.caller_state()) != (&life.now.ids[..], life.now.state.as_deref())
        {
            return failed(format!("a fork has layers of {lengths:?} tokens, ids {:?}", fork.token_ids()));
        }
        self.coverage.add(if parent.now == life.committed(self.shape.group) {
            coverage::FORKED
        } else {
            coverage::FORKED_BETWEEN
        });
        self.stored.forked(id, fork.id().0);
        self.states.forked(id, fork.id().0);
        self.model.created(fork.id().0, life).or_else(failed)?;
        self.handles[to] = Some((fork.id().0, fork));
        Ok(())
    }

    pub(super) fn check(&mut self, slot: usize) -> StepResult {
        let Some(id) = self.handle(slot)? else { return Ok(()) };
        for layer in 0..self.shape.layers {
            let (Some((_, sequence)), Some(life)) = (&self.handles[slot], self.model.lives.get(&id)) else { break };
            let select = |layer| sequence.select(layer, SelectRequest::all());
            match self.shape.check(self.store()?, select, layer, &life.now.layers[layer]) {
                Ok(Ok(())) => {}
                Ok(Err(e)) => self.fault("read", &e)?,
                Err(e) => return failed(format!("sequence {id}: {e}")),
            }
        }
        self.check_attached(slot)
    }

    pub(super) fn reader(&mut self, slot: usize) -> StepResult {
        let Some(id) = self.handle(slot)? else { return Ok(()) };
        let (Some((_, sequence)), Some(life)) = (&mut self.handles[slot], self.model.lives.get(&id)) else {
            return Ok(());
        };
        match sequence.reader() {
            Ok(reader) => {
                if self.readers.len() == READERS_MAX {
                    self.readers.remove(0);
                }
                self.readers.push((reader, life.committed(self.shape.group)));
                Ok(())
            }
            Err(e) => self.fault("reader", &e),
        }
    }

    pub(super) fn check_readers(&mut self) -> StepResult {
        for nth in 0..self.readers.len() {
            let (reader, version) = &self.readers[nth];
            let same = reader.len() as usize == version.tokens()
                && (reader.token_ids(), reader.caller_state()) == (&version.ids[..], version.state.as_deref());
            if !same {
                let found = (reader.len(), reader.token_ids(), reader.caller_state());
                return failed(format!("a reader of sequence {} sees {found:?}", reader.id()));
            }
            let deleted = !self.model.visible().contains_key(&reader.id().0);
            for layer in 0..self.shape.layers {
                let (reader, version) = &self.readers[nth];
                match self.shape.check(
                    self.store()?,
                    |layer| reader.select(layer, SelectRequest::all()),
                    layer,
                    &version.layers[layer],
                ) {
                    Ok(Ok(())) => {}
                    Ok(Err(e)) => self.fault("read of a reader", &e)?,
                    Err(e) => return failed(format!("reader of sequence {}: {e}", reader.id())),
                }
            }
            self.coverage.add(if deleted { coverage::READ_DELETED } else { coverage::READ_BESIDE });
        }
        Ok(())
    }

    pub(super) fn carry(&mut self, slot: usize, to: usize, part: Option<u16>) -> StepResult {
        let Some(id) = self.handle(slot)? else { return Ok(()) };
        let (Some((_, sequence)), Some(life)) = (&mut self.handles[slot], self.model.lives.get(&id)) else {
            return Ok(());
        };
        let (now, end) = (life.committed(self.shape.group), life.end);
        let mut file = Vec::new();
        if let Err(e) = sequence.export(&mut file) {
            return self.fault("export", &e);
        }
        if !self.vacate(to)? {
            return Ok(());
        }
        if let Some(part) = part {
            file.truncate(file.len() * usize::from(part) / 1000);
        }
        self.mark_commits();
        let start = self.simulation.now();
        let options = ImportOptions::new().key(key(to)).copies(self.case.copies);
        let imported = self.store()?.import(&file[..], &self.shape.layout, options);
        self.by_itself(u64::from(imported.is_ok()), imported.is_ok())?;
        let created = (start, self.simulation.now());
        let life = ModelSequence { slot: to, now, end, created, ..ModelSequence::default() };
        let version = life.committed(self.shape.group);
        match imported {
            Ok(_) if part.is_some() => failed("a part of an export was imported"),
            Ok(sequence) => {
                let id = sequence.id().0;
                self.model.created(id, life).or_else(failed)?;
                self.model.commit(id, version);
                self.model.sync_attempted(true);
                self.handles[to] = Some((id, sequence));
                self.coverage.add(coverage::CARRIED);
                Ok(())
            }
            Err(e) if e.kind() == ErrorKind::Corruption && part.is_some() => Ok(()),
            Err(e) => {
                // The commit of the import may be in progress, or wait behind another commit.
                let own = e.to_string().contains("commit of sequence");
                if part.is_none() && (self.simulation.is_down() || (own && is_doubtful(&e))) {
                    self.model.maybe_created(life, version);
                    self.model.sync_attempted(false);
                }
                self.fault("import", &e)
            }
        }
    }
}
