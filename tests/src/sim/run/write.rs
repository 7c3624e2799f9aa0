//! Operations that write to a sequence, and closing the store.

use super::{Runner, StepResult, Stop, failed};
use crate::sim::case::SLOTS;
use crate::sim::content::Token;
use crate::sim::coverage;
use stratakv::{Durability, Error, ErrorKind};

/// Returns whether a commit that failed with this error may still take effect.
pub(super) fn is_doubtful(e: &Error) -> bool {
    e.is_queued() || matches!(e.kind(), ErrorKind::Indeterminate | ErrorKind::Poisoned)
}

impl Runner<'_> {
    pub(super) fn append(&mut self, slot: usize, tokens: usize, layers: u8) -> StepResult {
        let Some(id) = self.handle(slot)? else { return Ok(()) };
        for layer in (0..self.shape.layers).filter(|layer| layers >> layer & 1 == 1) {
            let added: Vec<Token> = (0..tokens).map(|_| Token::new(self.salts.next_u64())).collect();
            self.mark_commits();
            let Some((_, sequence)) = &mut self.handles[slot] else { return Ok(()) };
            let appended = self.shape.append(sequence, layer, &added);
            let len = sequence.layer_len(layer).ok();
            self.by_itself(0, appended.is_ok())?;
            let own = &mut self.model.lives.entry(id).or_default().now.layers[layer];
            if appended.is_ok() {
                own.extend(added);
            }
            if len != Some(own.len() as u64) {
                let text = format!("layer {layer} has {len:?} tokens, not {}", own.len());
                return failed(format!("after append {appended:?}: {text}"));
            }
            if let Err(e) = appended {
                self.fault("append", &e)?;
            }
        }
        Ok(())
    }

    pub(super) fn push_ids(&mut self, slot: usize, count: usize) -> StepResult {
        let Some(id) = self.handle(slot)? else { return Ok(()) };
        let ids: Vec<u32> = (0..count).map(|_| self.salts.next_u64() as u32).collect();
        let Some((_, sequence)) = &mut self.handles[slot] else { return Ok(()) };
        if let Err(e) = sequence.append_token_ids(&ids) {
            return self.fault("token ids", &e);
        }
        self.model.lives.entry(id).or_default().now.ids.extend(ids);
        Ok(())
    }

    pub(super) fn commit(&mut self, slot: usize, durability: Durability, state: Option<usize>) -> StepResult {
        let Some(id) = self.handle(slot)? else { return Ok(()) };
        let state: Option<Vec<u8>> = state.map(|len| (0..len).map(|_| self.salts.next_u64() as u8).collect());
        self.mark_commits();
        let states = super::states::written();
        let Some((_, sequence)) = &mut self.handles[slot] else { return Ok(()) };
        let committed = match &state {
            Some(state) => sequence.commit_with(state, durability),
            None => sequence.commit(durability),
        };
        let (state_now, tokens_now) = (sequence.caller_state().map(<[u8]>::to_vec), sequence.committed());
        // A durable commit may write the state of a method, which takes a commit of its own.
        let own =
            u64::from(durability == Durability::Sync && committed.is_ok()) * (1 + super::states::written() - states);
        self.note_state_of_commit(slot, states)?;
        self.by_itself(own, committed.is_ok())?;
        let Some(life) = self.model.lives.get_mut(&id) else { return Ok(()) };
        let before = life.now.state.clone();
        if state.is_some() {
            life.now.state = state;
        }
        let version = life.committed(self.shape.group);
        // A commit without space for a checkpoint is queued, with its state, and the next commit writes it.
        let made = committed.as_ref().err().is_none_or(Error::is_queued);
        if !made {
            life.now.state = before;
        }
        if state_now != life.now.state {
            return failed(format!("after commit {committed:?} the handle's state is not that of the model"));
        }
        if durability != Durability::None && made && tokens_now != version.tokens() as u64 {
            return failed(format!("after commit {committed:?}: {tokens_now} tokens, not {}", version.tokens()));
        }
        if durability == Durability::None {
            if committed.is_ok() {
                life.owed = Some((version.tokens(), version.ids.len()));
            }
        } else {
            let down = self.simulation.is_down();
            let handed_over = match &committed {
                Ok(()) => true,
                Err(e) => durability == Durability::Sync && (down || is_doubtful(e)),
            };
            if handed_over {
                self.model.commit(id, version);
            }
            if durability == Durability::Sync && handed_over {
                self.model.sync_attempted(committed.is_ok());
            }
        }
        committed.or_else(|e| self.fault("commit", &e))
    }

    pub(super) fn truncate(&mut self, slot: usize, back: usize) -> StepResult {
        let Some(id) = self.handle(slot)? else { return Ok(()) };
        let Some((_, sequence)) = &mut self.handles[slot] else { return Ok(()) };
        let tokens = (sequence.len() as usize).saturating_sub(back);
        let cut = sequence.truncate(tokens as u64);
        let lengths: Vec<_> = (0..self.shape.layers).map(|layer| sequence.layer_len(layer).ok()).collect();
        if self.stored.cut(id, tokens as u64) {
            self.coverage.add(coverage::CLUSTERS_CUT);
        }
        let life = self.model.lives.entry(id).or_default();
        if cut.is_ok() {
            life.now.cut(tokens, self.shape.group);
            life.now.ids.truncate(tokens);
            let ids = life.now.ids.len();
            life.owed = life.owed.map(|(owed, owed_ids)| (owed.min(tokens), owed_ids.min(ids)));
        }
        if lengths.iter().zip(&life.now.layers).any(|(len, own)| *len != Some(own.len() as u64)) {
            return failed(format!("after {cut:?} to {tokens} tokens the layers have {lengths:?}"));
        }
        cut.or_else(|e| self.fault("truncate", &e))
    }

    pub(super) fn delete(&mut self, slot: usize, durability: Durability) -> StepResult {
        let Some(id) = self.handle(slot)? else { return Ok(()) };
        let Some((_, sequence)) = self.handles[slot].take() else { return Ok(()) };
        let deleted = sequence.delete(durability);
        self.stored.gone(id);
        self.model.handle_dropped(id);
        if !self.model.is_committed(id) {
            self.model.lives.remove(&id);
        } else if deleted.is_ok() || durability == Durability::Sync {
            self.model.delete(id);
            if durability == Durability::Sync {
                self.model.sync_attempted(deleted.is_ok());
            }
        }
        deleted.or_else(|e| self.fault("delete", &e))
    }

    pub(super) fn close(&mut self, slot: usize) -> StepResult {
        let Some((id, sequence)) = self.handles[slot].take() else { return Ok(()) };
        self.stored.detached(id);
        self.mark_commits();
        // The sequence has a handle until it is closed.
        self.closing = Some(id);
        let closed = sequence.close();
        let noted = self.by_itself(0, closed.is_ok());
        self.closing = None;
        self.model.handle_dropped(id);
        noted?;
        if let Some(life) = self.model.lives.get_mut(&id)
            && let Some((tokens, ids)) = life.owed.take()
            && closed.is_ok()
        {
            let mut version = life.now.clone();
            version.cut(tokens, self.shape.group);
            version.ids.truncate(ids);
            self.model.commit(id, version);
        }
        match self.model.visible().get(&id) {
            Some(version) => {
                if let Some(life) = self.model.lives.get_mut(&id) {
                    life.back_to(version);
                }
            }
            None if self.model.is_committed(id) => {}
            None => {
                self.model.lives.remove(&id);
            }
        }
        closed.or_else(|e| self.fault("close of a sequence", &e))
    }

    pub(super) fn close_store(&mut self) -> StepResult {
        for slot in 0..SLOTS {
            self.close(slot)?;
        }
        self.readers.clear();
        self.note_given_up();
        let Some(store) = self.store.take() else { return Ok(()) };
        let closed = store.close();
        self.model.sync_attempted(closed.is_ok());
        if let Err(e) = closed {
            self.fault("close of the store", &e)?;
            // The store is not closed, so the round ends with a crash.
            return Err(Stop::Broken);
        }
        Ok(())
    }
}
