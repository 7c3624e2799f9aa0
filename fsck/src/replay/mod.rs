//! Replay of manifest records into the state of the store (SPEC.md chapter 7).
//!
//! Every record must agree with the records before it. A record that does not is reported, and replay continues with
//! the next record, so that one bad record does not hide later findings.
//!
//! - `frames` holds frames, their copies and segments, and counts the references to each frame.
//! - `sequences` holds sequences, keys and adapters.
//! - This file applies batches, and records that touch both tables.

mod frames;
mod record;
mod sequences;
mod state;

pub(crate) use frames::{Frame, Segment};
pub(crate) use record::StoreLimits;
pub(crate) use sequences::{AdapterRecord, Sequence};
pub(crate) use state::State;

use crate::finding::{Code, FilePlace, Finding, Sink};
use record::{RecordResult, require, reserved_byte};
use stratakv_format::error::FormatError;
use stratakv_format::layout::Layout;
use stratakv_format::manifest::{self as m, Batch, Record};

/// The replay of one manifest generation.
pub(crate) struct Replay<'a> {
    pub(crate) state: State,
    limits: StoreLimits,
    sink: &'a Sink,
    /// The numbers of the last `Counters` record in the current run of batches, as in [`COUNTER_NAMES`].
    counters: Option<[u64; 4]>,
    /// The next frame id, sequence id, LSN and layout id of a reader: the maximum of all records so far.
    ends: [u64; 4],
    checkpoint_done: bool,
}

const COUNTER_NAMES: [&str; 4] = ["frame id", "sequence id", "LSN", "layout id"];
const FRAME_ID: usize = 0;
const SEQUENCE_ID: usize = 1;
const LSN: usize = 2;
const LAYOUT_ID: usize = 3;

impl<'a> Replay<'a> {
    pub(crate) fn new(limits: StoreLimits, sink: &'a Sink) -> Self {
        Self { state: State::default(), limits, sink, counters: None, ends: [1; 4], checkpoint_done: false }
    }

    /// Applies the records of the batch at `offset` of `file`. `is_last` tells that no batch follows it.
    pub(crate) fn apply_batch(&mut self, batch: &Batch<'_>, file: &FilePlace, offset: u64, bytes: u64, is_last: bool) {
        let sink = self.sink;
        let push = |finding: Finding| sink.push(finding.at(file, offset, bytes));
        if batch.is_checkpoint() == self.checkpoint_done {
            let text = match self.checkpoint_done {
                true => "a checkpoint batch follows the end of the checkpoint",
                false => "the manifest does not start with a checkpoint batch",
            };
            push(Finding::damage(Code::ManifestRecord, text));
        }
        let count = u64::from(batch.header().record_count.get());
        for (index, record) in batch.records().enumerate() {
            let record = match record {
                Ok(record) => record,
                Err(error) => {
                    push(Finding::format(Code::ManifestRecord, &error));
                    continue;
                }
            };
            let ends_run = index as u64 + 1 == count && !batch.has_more();
            let applied = self.apply(&record, ends_run, is_last);
            self.state.records += 1;
            if let Err(text) = applied {
                let text = format!("record {index} of batch {}: {text}", batch.header().sequence.get());
                let code = match record {
                    Record::PoolAllocation(_) => Code::Unsupported,
                    _ => Code::ManifestRecord,
                };
                push(Finding::damage(code, text));
            }
        }
        if !batch.has_more() {
            self.check_counters().into_iter().for_each(push);
        }
    }

    /// Returns whether the checkpoint at the front of the manifest is complete.
    pub(crate) fn has_checkpoint(&self) -> bool {
        self.checkpoint_done
    }

    /// Returns a note for each counter of the run that other records exceed. Readers take the maximum, so it is no
    /// damage.
    fn check_counters(&mut self) -> Vec<Finding> {
        let mut findings = Vec::new();
        for (name, (given, end)) in COUNTER_NAMES.iter().zip(self.counters.take().into_iter().flatten().zip(self.ends))
        {
            if given < end {
                let text =
                    format!("the counters name {given} as the next {name}, but other records imply {end}, which holds");
                findings.push(Finding::note(Code::ManifestRecord, text).values(end, given));
            }
        }
        findings
    }

    /// Applies one record. `ends_run` tells that it is the last record of a run of batches.
    fn apply(&mut self, record: &Record<'_>, ends_run: bool, is_last: bool) -> RecordResult {
        require(self.state.superseded.is_none(), || "the record follows the end of the generation".into())?;
        let State { frames, sequences: table, layouts, .. } = &mut self.state;
        match record {
            Record::Member(member) => self.apply_member(member),
            Record::Layout(defined, bytes) => self.apply_layout(defined, bytes),
            Record::SequenceCreate(create, key) => {
                let sequence = sequences::created(create, key, layouts, self.limits.replicas)?;
                self.insert(create.sequence.get(), sequence)
            }
            Record::Adapter(adapter, name) => table.add_adapter(adapter, name),
            Record::Fork(fork, key) => self.apply_fork(fork, key),
            Record::SequenceTruncate(cut) => table.truncate(cut.sequence.get(), cut.tokens.get()),
            Record::SequenceDelete(delete) => {
                let sequence = table.delete(delete.sequence.get())?;
                sequence.refs.keys().for_each(|&frame| frames.release(frame));
                Ok(())
            }
            Record::Frame(frame) => self.apply_frame(frame),
            Record::FrameRef(r) => {
                let (id, frame) = (r.sequence.get(), r.frame.get());
                frames.require_referable(frame)?;
                let other = table.get_mut(id)?.refs.insert(frame, r.token_end.get());
                require(other.is_none(), || format!("sequence {id} refers to frame {frame} twice"))?;
                frames.retain(frame);
                Ok(())
            }
            Record::FrameRelease(r) => {
                let (id, frame) = (r.sequence.get(), r.frame.get());
                let removed = table.get_mut(id)?.refs.remove(&frame);
                require(removed.is_some(), || format!("sequence {id} does not refer to frame {frame}"))?;
                frames.release(frame);
                Ok(())
            }
            Record::FrameMoved(moved) => {
                self.require_not_removed(moved.location.device.get())?;
                self.state.frames.move_frame(moved)
            }
            Record::SegmentOpen(open) => frames.open_segment(open, &self.limits),
            Record::SegmentSeal(seal) => frames.seal_segment(seal),
            Record::SegmentFree(free) => frames.free_segment(free),
            Record::SequenceCommit(commit) => table.commit(commit),
            Record::Counters(counters) => self.apply_counters(counters),
            Record::CheckpointEnd(end) => self.apply_checkpoint_end(end, ends_run),
            Record::Superseded(next) => self.apply_superseded(next, ends_run && is_last),
            Record::Replica(replica) => frames.add_copy(replica, self.limits.replicas),
            Record::PoolAllocation(_) => Err("the record is reserved, and no feature of this version allows it".into()),
            Record::Unknown(_) => Ok(()),
        }
    }

    fn saw(&mut self, counter: usize, id: u64) {
        self.ends[counter] = self.ends[counter].max(id.saturating_add(1));
    }

    fn insert(&mut self, id: u64, sequence: Sequence) -> RecordResult {
        self.state.sequences.require_new(id)?;
        self.saw(SEQUENCE_ID, id);
        self.state.sequences.insert(id, sequence)
    }

    fn apply_member(&mut self, member: &m::Member) -> RecordResult {
        let device = member.device.get();
        require(device < self.limits.devices, || {
            format!("device {device} in a store of {} devices", self.limits.devices)
        })?;
        require((m::MEMBER_ACTIVE..=m::MEMBER_REMOVED).contains(&member.state), || {
            format!("device {device} has the unknown state {}", member.state)
        })?;
        if member.state == m::MEMBER_REMOVED {
            self.state.frames.remove_device(device)?;
        }
        self.state.members.insert(device, *member);
        Ok(())
    }

    fn apply_layout(&mut self, defined: &m::LayoutDefined, bytes: &[u8]) -> RecordResult {
        let id = defined.layout.get();
        require(defined.reserved.get() == 0, reserved_byte)?;
        let layout = Layout::decode(bytes).map_err(|e: FormatError| e.to_string())?;
        require(layout.encoded_bytes() == bytes.len(), || {
            format!("layout {id} takes {} bytes of a record of {}", layout.encoded_bytes(), bytes.len())
        })?;
        require(self.limits.codecs || !layout.is_encoded(), || {
            format!("layout {id} names codecs in a store without the feature of codecs")
        })?;
        self.saw(LAYOUT_ID, u64::from(id));
        require(self.state.layouts.insert(id, layout).is_none(), || format!("layout {id} already exists"))
    }

    /// Creates a sequence that refers to every frame of its parent.
    fn apply_fork(&mut self, fork: &m::Fork, key: &[u8]) -> RecordResult {
        require(fork.reserved == [0; 6], reserved_byte)?;
        let parent = self.state.sequences.get_mut(fork.parent.get())?;
        require(parent.adapter.is_none(), || format!("sequence {} holds an adapter and is forked", fork.parent))?;
        self.state.frames.require_references_fit(parent.refs.len() as u64)?;
        let child = parent.fork(fork, key)?;
        let frames: Vec<_> = child.refs.keys().copied().collect();
        self.insert(fork.sequence.get(), child)?;
        frames.into_iter().for_each(|frame| self.state.frames.retain(frame));
        Ok(())
    }

    fn apply_frame(&mut self, frame: &m::Frame) -> RecordResult {
        self.require_not_removed(frame.location.device.get())?;
        self.state.frames.occupy(frame, self.limits.pools)?;
        self.saw(FRAME_ID, frame.frame.get());
        self.saw(LSN, frame.lsn.get());
        self.state.frames.insert(frame)
    }

    /// Returns an error if a device was removed. It cannot hold the first copy of a frame.
    fn require_not_removed(&self, device: u16) -> RecordResult {
        let removed = self.state.members.get(&device).is_some_and(|member| member.state == m::MEMBER_REMOVED);
        require(!removed, || format!("the first copy of a frame is on device {device}, which was removed"))
    }

    fn apply_counters(&mut self, counters: &m::Counters) -> RecordResult {
        require(counters.reserved.get() == 0, reserved_byte)?;
        let given = [
            counters.next_frame.get(),
            counters.next_sequence.get(),
            counters.next_lsn.get(),
            u64::from(counters.next_layout.get()),
        ];
        self.ends.iter_mut().zip(given).for_each(|(end, given)| *end = given.max(*end));
        self.counters = Some(given);
        Ok(())
    }

    fn apply_checkpoint_end(&mut self, end: &m::CheckpointEnd, ends_run: bool) -> RecordResult {
        let before = self.state.records;
        require(!self.checkpoint_done, || "the checkpoint ends twice".into())?;
        self.checkpoint_done = true;
        require(ends_run, || "the end of the checkpoint is not the last record of its run".into())?;
        require(end.records.get() == before, || {
            format!("the checkpoint has {before} records but names {}", end.records.get())
        })
    }

    fn apply_superseded(&mut self, next: &m::Superseded, ends_generation: bool) -> RecordResult {
        let (generation, own) = (next.generation.get(), self.limits.generation);
        require(generation > own, || format!("generation {own} names generation {generation} as its successor"))?;
        self.state.superseded = Some((generation, next.nonce.get()));
        require(ends_generation, || "records follow the one that ends the generation".into())
    }
}
