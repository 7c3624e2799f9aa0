//! Crashes and recovery.
//!
//! 1. [`Runner::crash`] cuts the power, applies bit rot, and restarts the devices.
//! 2. In some cases, kvfsck checks the image, or a read-only open must leave every byte as it is.
//! 3. [`Runner::crash_while_opening`] cuts the power again during recovery.
//! 4. The store is opened, without a lost disk if the round has one. After a power failure alone, no metadata may be
//!    damaged.
//! 5. [`Runner::verify`] reads the whole store and finds the state of the model that holds exactly that. The model
//!    continues from there.

use super::{Runner, StepResult, Stop, failed, key};
use crate::sim::case::{Regime, Round, SLOTS};
use crate::sim::content::Contents;
use crate::sim::coverage;
use crate::sim::model::{Candidate, FoundSequence};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use stratakv::{Error, ErrorKind, OpenSequence, SelectRequest, Sequence, Store, StoreOptions};

/// kvfsck checks the crash images of one case in this many, of those in which a disk left or joined. They are rare.
const CHECK_EVERY_CHANGED: u64 = 4;
/// kvfsck checks the crash images of one case in this many.
const CHECK_EVERY: u64 = 32;

impl Runner<'_> {
    /// Cuts the power, restarts the devices, perhaps several times, and checks the store against the model.
    pub(super) fn crash(&mut self, round: &Round) -> StepResult {
        if round.rot.as_ref().is_some_and(|(_, copies, _)| *copies > 1) {
            // The reader can tell damage of every copy from a torn tail only if a superblock records the manifest's
            // synced length. A close writes it.
            match self.close_store() {
                Ok(()) | Err(Stop::Broken) => {}
                Err(other) => return Err(other),
            }
        }
        self.note_given_up();
        self.simulation.crash();
        self.note(|| "power cut".into());
        self.drop_store();
        self.gone_now().clear();
        self.coverage.crashes += 1;
        self.simulation.restart();
        self.stored.opening();
        if let Some((prefix, copies, below)) = &round.rot {
            self.note(|| format!("bit rot in {copies} files {prefix}"));
            self.rotten |= self.simulation.rot(prefix, *copies, *below);
        }
        let unharmed = matches!(self.case.regime, Regime::Plain | Regime::Tight) && !self.flipped;
        if self.case.seed.is_multiple_of(CHECK_EVERY) && unharmed && !self.changed {
            self.check_image()?;
        }
        if round.look {
            self.look()?;
        }
        self.crash_while_opening(&round.again)?;
        let lost = round.lost.filter(|disk| self.may_lose(*disk));
        let opened = match lost {
            Some(disk) => self.open_without(disk),
            None => self.open(),
        };
        match opened {
            Ok(()) => {}
            Err(Stop::Broken) => return failed("the store does not open after a crash"),
            Err(other) => return Err(other),
        }
        self.verify()?;
        if lost.is_some() {
            self.repair_all()?;
        }
        let sound = unharmed && self.changed && self.simulation.faults_hit() == 0;
        if self.case.seed.is_multiple_of(CHECK_EVERY_CHANGED) && sound {
            // Only the open tells which disks the store has now.
            self.check_image()?;
            self.coverage.add(coverage::CHECKED_CHANGED);
        }
        Ok(())
    }

    pub(super) fn crash_while_opening(&mut self, again: &[u64]) -> StepResult {
        for &operations in again {
            self.simulation.crash_in(operations);
            self.note(|| format!("power goes {operations} device operations into the recovery"));
            let opened = self.open_store(&self.options());
            match opened {
                Ok(store) => {
                    self.simulation.crash();
                    drop(store);
                }
                Err(e) if self.simulation.is_down() => {
                    self.note(|| format!("open: {e:?}"));
                    self.coverage.add(coverage::DOUBLE_CRASH);
                }
                Err(e) => self.fault("open", &e)?,
            }
            self.simulation.crash();
            self.coverage.crashes += 1;
            self.simulation.restart();
        }
        Ok(())
    }

    pub(super) fn open(&mut self) -> StepResult {
        self.open_with(self.options())
    }

    pub(super) fn open_with(&mut self, options: StoreOptions) -> StepResult {
        self.above = self.simulation.take_peak_bytes();
        self.held = (Vec::new(), 0);
        self.stored.opening();
        self.capacity = self.opened_capacity();
        let start = self.simulation.now();
        match self.open_store(&options) {
            Ok(store) => {
                let gone = std::sync::Arc::clone(&self.gone);
                store.on_eviction(move |event| {
                    gone.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(event.clone());
                });
                self.store = Some(store);
                self.failed = self.simulation.refused();
                self.opened = start..=self.simulation.now();
                self.note(|| "opened".into());
                self.nothing_damaged()?;
                self.within_capacity()
            }
            Err(e) if self.manifest_may_be_gone(&e) => Err(Stop::Reported),
            Err(e) => {
                self.fault("open", &e)?;
                // A fault struck during the open. The next attempt must succeed.
                Err(Stop::Broken)
            }
        }
    }

    /// Checks that a power failure alone damaged no metadata. It may tear only metadata that was not known durable.
    fn nothing_damaged(&self) -> StepResult {
        let unharmed = matches!(self.case.regime, Regime::Plain | Regime::Tight) && !self.flipped && !self.rotten;
        let Some(store) = self.store.as_ref().filter(|_| unharmed && self.simulation.faults_hit() == 0) else {
            return Ok(());
        };
        let health = store.health();
        match health.devices.iter().all(|device| device.damaged_metadata == 0) {
            true => Ok(()),
            false => failed(format!("metadata is damaged after a power failure: {health:?}")),
        }
    }

    /// Opens the store read-only. It must show a state that a recovery may produce, and leave every byte as it is.
    fn look(&mut self) -> StepResult {
        let (before, bytes) = (self.simulation.changes(), self.simulation.take_peak_bytes());
        let opened = self.open_store(&self.options().read_only(true));
        let store = match opened {
            Ok(store) => store,
            // The power failed before the store was created.
            Err(e) if e.kind() == ErrorKind::Configuration && self.model.visible().is_empty() => return Ok(()),
            Err(e) => return self.fault("open for reading only", &e),
        };
        let found = self.read_store(&store, None);
        let refused = store.flush().err().map(|e| e.kind());
        let closed = store.close();
        found?;
        if refused.is_some_and(|kind| kind != ErrorKind::ReadOnly) {
            return failed(format!("flush of a store that is open for reading only: {refused:?}"));
        }
        closed.or_else(|e| self.fault("close of a store that is open for reading only", &e))?;
        if self.simulation.changes() > before || self.simulation.take_peak_bytes() > bytes {
            return failed("a store that was open for reading only was changed");
        }
        self.coverage.add(coverage::LOOKED);
        Ok(())
    }

    /// Reads the whole store and compares it with the model, which continues from there.
    pub(super) fn verify(&mut self) -> StepResult {
        let store = self.store()?.clone();
        let (found, candidate) = self.read_store(&store, Some(self.opened.clone()))?;
        // The comparison accounts for sequences that expired during the open.
        self.gone_now().clear();
        let (kept, doubtful) = self.model.continue_from(&found, &candidate);
        if kept > 0 {
            self.coverage.add(coverage::LANDED);
        }
        if doubtful > kept {
            self.coverage.add(coverage::LOST);
        }
        self.check_adapters()
    }

    /// Reads the whole store. Returns the sequences found and the state of the model that holds exactly these.
    fn read_store(
        &mut self,
        store: &Store,
        expires: Option<RangeInclusive<u64>>,
    ) -> StepResult<(Vec<FoundSequence>, Candidate)> {
        let (mut found, mut sequences): (Vec<FoundSequence>, Vec<Sequence>) = (Vec::new(), Vec::new());
        for info in store.sequences() {
            let Some(slot) = (0..SLOTS).find(|slot| key(*slot) == info.key) else {
                return failed(format!("a sequence with the key {:?}", info.key));
            };
            let sequence = match store.open_sequence(&info.key, OpenSequence::new()) {
                Ok(sequence) => sequence,
                Err(e) => return Err(self.unreadable("open a sequence after recovery", &e)),
            };
            found.push(FoundSequence {
                id: info.id,
                slot,
                tokens: sequence.len() as usize,
                ids: sequence.token_ids().to_vec(),
                state: sequence.caller_state().map(<[u8]>::to_vec),
            });
            sequences.push(sequence);
        }
        let candidates = self.model.candidates(&found, expires, self.simulation.latest());
        let mut wrong = "no commit left this".to_owned();
        let mut read = None;
        for (at, candidate) in candidates.iter().enumerate() {
            match self.read_as(store, &sequences, candidate)? {
                Ok(contents) => {
                    read = Some((at, contents));
                    break;
                }
                Err(e) => wrong = e,
            }
        }
        // Several states may have equal groups. Their tails decide, without another read.
        if let Some((at, contents)) = read {
            for candidate in candidates.into_iter().skip(at) {
                match self.compare(&sequences, &candidate, &contents) {
                    Ok(()) => {
                        let layers = contents.chunks(self.shape.layers);
                        for ((sequence, version), own) in sequences.iter_mut().zip(&candidate.versions).zip(layers) {
                            self.compare_entries((store, sequence), &version.layers, Some(own))?
                                .map_err(|e| self.unreadable("choose entries after recovery", &e))?;
                        }
                        return Ok((found, candidate));
                    }
                    Err(e) => wrong = e,
                }
            }
        }
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        failed(format!("recovered {found:?}: {wrong}\n  {}", self.model.describe()))
    }

    /// Reads all sequences and compares their groups with a state. Returns the contents of their layers, or the first
    /// difference.
    ///
    /// Tails of encoded layers are not compared here, so a state that differs only in such a tail is read to its end.
    /// The order of reads decides what the devices do, and must not change for kept histories.
    fn read_as(
        &mut self,
        store: &Store,
        sequences: &[Sequence],
        candidate: &Candidate,
    ) -> StepResult<Result<Vec<Contents>, String>> {
        let mut all = Vec::new();
        for (sequence, version) in sequences.iter().zip(&candidate.versions) {
            for (layer, tokens) in version.layers.iter().enumerate() {
                let read =
                    match self.shape.read(store, |layer| sequence.select(layer, SelectRequest::all()), layer, tokens) {
                        Ok(Ok(contents)) if self.shape.is_encoded(layer) => Ok(contents),
                        Ok(Ok(contents)) => self.shape.compare_tail(layer, &contents, tokens).map(|()| contents),
                        Ok(Err(e)) => return Err(self.unreadable("read after recovery", &e)),
                        Err(e) => Err(e),
                    };
                match read {
                    Ok(contents) => all.push(contents),
                    Err(e) => return Ok(Err(format!("sequence {}: {e}", sequence.id()))),
                }
            }
        }
        Ok(Ok(all))
    }

    /// Compares the contents of all sequences with a state.
    fn compare(&self, sequences: &[Sequence], candidate: &Candidate, contents: &[Contents]) -> Result<(), String> {
        let mut contents = contents.iter();
        for (sequence, version) in sequences.iter().zip(&candidate.versions) {
            for ((layer, tokens), contents) in version.layers.iter().enumerate().zip(&mut contents) {
                let compared = self.shape.compare_all(layer, contents, tokens);
                compared.map_err(|e| format!("sequence {}: {e}", sequence.id()))?;
            }
        }
        Ok(())
    }

    /// Converts the error of a read, which only the medium may cause, into a stop.
    pub(super) fn unreadable(&mut self, doing: &str, e: &Error) -> Stop {
        match self.fault(doing, e) {
            Err(stop) => stop,
            Ok(()) if matches!(e.kind(), ErrorKind::Io | ErrorKind::MemoryLimit | ErrorKind::Busy) => Stop::Reported,
            Ok(()) => Stop::Failed(format!("{doing}: {e:?}")),
        }
    }

    fn check_image(&mut self) -> StepResult {
        let failed = |e: std::io::Error| Stop::Failed(format!("dump of the image: {e}"));
        let memory = Path::new("/dev/shm");
        let place = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let dir = tempfile::tempdir_in(place).map_err(failed)?;
        self.simulation.dump(dir.path()).map_err(failed)?;
        let devices: Vec<PathBuf> = self.disks.iter().map(|disk| dir.path().join(disk.to_string())).collect();
        let options = kvfsck::Options { threads: 1, full: self.case.entries.is_some(), ..kvfsck::Options::default() };
        let report = kvfsck::check(&devices, &options, &());
        let report = report.map_err(|e| Stop::Failed(format!("kvfsck: {e:?}")))?;
        self.coverage.add(coverage::CHECKED);
        let is_damage = |finding: &&kvfsck::Finding| finding.severity == kvfsck::Severity::Damage;
        match report.findings.iter().filter(is_damage).find(|finding| !self.explains(finding)) {
            None => Ok(()),
            Some(finding) => Err(Stop::Failed(format!("kvfsck finds damage after a crash: {finding}"))),
        }
    }
}
