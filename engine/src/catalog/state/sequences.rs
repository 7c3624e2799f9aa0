//! Sequences and adapters: created, forked, cut and deleted. Their references to frames.

use super::{Applied, Catalog};
use crate::catalog::meta::{AdapterMeta, SequenceMeta, adapter_record_bytes};
use crate::io::planted;
use crate::layout::KvLayout;
use stratakv_format::manifest as m;
use stratakv_format::{FrameId, LayoutId, SequenceId};

impl Catalog {
    pub(super) fn sequence_mut(&mut self, id: SequenceId) -> std::result::Result<&mut SequenceMeta, String> {
        self.sequences.get_mut(&id).ok_or_else(|| format!("sequence {id} does not exist"))
    }

    pub(super) fn insert_sequence(&mut self, id: SequenceId, key: &[u8], meta: SequenceMeta) -> Applied {
        if self.sequences.contains_key(&id) {
            return Err(format!("sequence {id} exists already"));
        }
        if !key.is_empty() && self.keys.insert(meta.key.clone(), id).is_some() {
            return Err("two sequences have the same key".into());
        }
        self.counters.sequence = self.counters.sequence.max(id.0.saturating_add(1));
        self.used_unix_ms = self.used_unix_ms.max(meta.used_unix_ms);
        self.refs += meta.refs.len() as u64;
        self.key_bytes += meta.key.len() as u64;
        self.sequences.insert(id, meta);
        Ok(())
    }

    pub(super) fn create(&mut self, create: &m::SequenceCreate, key: &[u8]) -> Applied {
        let layout = LayoutId(create.layout.get());
        if !self.layouts.contains_key(&layout) {
            return Err(format!("layout {layout} does not exist"));
        }
        let parent = create.parent.get();
        let meta = SequenceMeta {
            key: key_text(key, create.key_bytes.get())?,
            layout,
            summaries: create.summaries.get(),
            created_unix_ms: create.created_unix_ms.get(),
            ttl_ms: create.ttl_ms.get(),
            copies: create.replicas,
            evictable: create.evictable,
            parent: (parent != 0).then_some((SequenceId(parent), create.parent_tokens.get())),
            tokens: 0,
            token_ids: 0,
            state_frame: None,
            committed_unix_ms: create.created_unix_ms.get(),
            used_unix_ms: create.created_unix_ms.get(),
            adapter: None,
            refs: Vec::new(),
        };
        self.insert_sequence(SequenceId(create.sequence.get()), key, meta)
    }

    pub(super) fn fork(&mut self, fork: &m::Fork, key: &[u8]) -> Applied {
        let (parent_id, tokens) = (SequenceId(fork.parent.get()), fork.tokens.get());
        let parent = self.sequence_mut(parent_id)?.clone();
        if parent.adapter.is_some() {
            return Err(format!("sequence {parent_id} holds an adapter and cannot be forked"));
        }
        let refs: Vec<_> = parent.refs.iter().map(|&(frame, end)| (frame, end.min(tokens))).collect();
        for (frame, _) in &refs {
            if let Some(frame) = self.frames.get_mut(frame) {
                frame.refs += 1;
            }
        }
        let meta = SequenceMeta {
            key: key_text(key, fork.key_bytes.get())?,
            created_unix_ms: fork.created_unix_ms.get(),
            committed_unix_ms: fork.created_unix_ms.get(),
            used_unix_ms: fork.created_unix_ms.get(),
            parent: Some((parent_id, tokens)),
            tokens: parent.tokens.min(tokens),
            token_ids: parent.token_ids.min(tokens),
            state_frame: None,
            refs,
            ..parent
        };
        self.insert_sequence(SequenceId(fork.sequence.get()), key, meta)
    }

    pub(super) fn adapter(&mut self, adapter: &m::AdapterDefined, name: &[u8]) -> Applied {
        let id = SequenceId(adapter.sequence.get());
        let name = std::str::from_utf8(name).map_err(|_| "the name of an adapter is not UTF-8")?;
        let meta = AdapterMeta {
            name: name.to_owned(),
            version: adapter.version.get(),
            bytes: adapter.bytes.get(),
            checksum: adapter.checksum.get(),
        };
        let sequence = self.sequence_mut(id)?;
        if sequence.adapter.is_some() || sequence.tokens > 0 || sequence.token_ids > 0 || !sequence.key.is_empty() {
            return Err(format!("sequence {id} holds other content and cannot take the adapter {name:?}"));
        }
        let place = (sequence.layout, meta.name.clone(), meta.version);
        self.adapter_bytes += adapter_record_bytes(&meta);
        self.sequence_mut(id)?.adapter = Some(meta);
        match self.adapters.insert(place, id) {
            None => Ok(()),
            Some(other) => Err(format!("sequences {other} and {id} hold the same adapter")),
        }
    }

    /// Finds an adapter of a layout by its name. Without a version, finds the latest. Equal layouts may have several
    /// ids.
    pub(crate) fn find_adapter(&self, layout: &KvLayout, name: &str, version: Option<u32>) -> Option<SequenceId> {
        let named = self.adapters.iter().filter(|((id, known, of), _)| {
            known == name && version.is_none_or(|v| v == *of) && self.layouts.get(id) == Some(layout)
        });
        named.max_by_key(|((_, _, version), _)| *version).map(|(_, id)| *id)
    }

    pub(super) fn truncate(&mut self, id: SequenceId, tokens: u64) -> Applied {
        let sequence = self.sequence_mut(id)?;
        sequence.tokens = sequence.tokens.min(tokens);
        sequence.token_ids = sequence.token_ids.min(tokens);
        for (_, end) in &mut sequence.refs {
            if !planted!(StaleClustersKept) {
                *end = (*end).min(tokens);
            }
        }
        Ok(())
    }

    pub(super) fn delete(&mut self, id: SequenceId) -> Applied {
        self.queued_deletions.remove(&id);
        let Some(sequence) = self.sequences.remove(&id) else {
            return Err(format!("sequence {id} does not exist"));
        };
        if !sequence.key.is_empty() {
            self.keys.remove(&sequence.key);
        }
        self.refs -= sequence.refs.len() as u64;
        self.key_bytes -= sequence.key.len() as u64;
        if let Some(adapter) = sequence.adapter {
            self.adapter_bytes -= adapter_record_bytes(&adapter);
            self.adapters.remove(&(sequence.layout, adapter.name, adapter.version));
        }
        for (frame, _) in sequence.refs {
            if planted!(ForkFreedWithParent)
                && let Some(frame) = self.frames.get_mut(&frame)
            {
                frame.refs = 1;
            }
            self.release(frame);
        }
        Ok(())
    }

    pub(super) fn reference(&mut self, sequence: SequenceId, id: FrameId, token_end: u64) -> Applied {
        let Some(frame) = self.frames.get_mut(&id) else {
            return Err(format!("frame {id} does not exist"));
        };
        frame.refs += 1;
        let lsn = frame.lsn;
        let frames = &self.frames;
        let Some(sequence) = self.sequences.get_mut(&sequence) else {
            return Err(format!("sequence {sequence} does not exist"));
        };
        let at = sequence.refs.partition_point(|(other, _)| frames.get(other).is_some_and(|f| f.lsn < lsn));
        // The references are in order of LSN, so a duplicate has the same LSN.
        let equals =
            sequence.refs[at..].iter().take_while(|(other, _)| frames.get(other).is_some_and(|f| f.lsn == lsn));
        if equals.into_iter().any(|(other, _)| *other == id) {
            return Err(format!("one sequence refers to frame {id} twice"));
        }
        sequence.refs.insert(at, (id, token_end));
        self.refs += 1;
        Ok(())
    }
}

fn key_text(key: &[u8], bytes: u16) -> std::result::Result<String, String> {
    if key.len() != usize::from(bytes) || key.len() > m::KEY_BYTES_MAX {
        return Err(format!("a key of {} bytes in a record that states {bytes}", key.len()));
    }
    String::from_utf8(key.to_vec()).map_err(|_| "a key that is not UTF-8".into())
}
