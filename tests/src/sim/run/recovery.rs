//! The power goes, the store is opened again, and must be as the model has it.

use super::{Runner, Stop, Stopped, failed, key};
use crate::sim::case::{Regime, Round, SLOTS};
use crate::sim::content::Contents;
use crate::sim::coverage;
use crate::sim::model::{Candidate, Found};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use stratakv::{Error, ErrorKind, OpenSequence, Sequence, Store, StoreOptions};

/// The same of stores that disks left or joined, which are fewer.
const CHECK_EVERY_CHANGED: u64 = 4;
/// One crash image in this many cases goes through kvfsck.
const CHECK_EVERY: u64 = 32;

impl Runner<'_> {
    /// The power goes, the machine comes back, perhaps several times, and the store must be as the model has it.
    pub(super) fn crash(&mut self, round: &Round) -> Stopped {
        if round.rot.as_ref().is_some_and(|(_, copies, _)| *copies > 1) {
            // Damage of every copy is told from a torn tail only where a superblock says how far the manifest goes.
            match self.close_store() {
                Ok(()) | Err(Stop::Broken) => {}
                Err(other) => return Err(other),
            }
        }
        self.note_given_up();
        self.simulation.crash();
        self.note(|| "power cut".into());
        self.let_go();
        self.gone_now().clear();
        self.coverage.crashes += 1;
        self.simulation.restart();
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
            // With the disks that it has by now, which only the open has said.
            self.check_image()?;
            self.coverage.add(coverage::CHECKED_CHANGED);
        }
        Ok(())
    }

    pub(super) fn crash_while_opening(&mut self, again: &[u64]) -> Stopped {
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

    pub(super) fn open(&mut self) -> Stopped {
        self.open_with(self.options())
    }

    pub(super) fn open_with(&mut self, options: StoreOptions) -> Stopped {
        self.above = self.simulation.take_peak_bytes();
        self.held = (Vec::new(), 0);
        self.capacity = self.case.capacity.map(|segments| self.capacity_bytes(segments));
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
                // A fault struck while it was opening: the next attempt must succeed.
                Err(Stop::Broken)
            }
        }
    }

    /// A power failure damages nothing: what it tears is no metadata that was known durable.
    fn nothing_damaged(&self) -> Stopped {
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

    /// Opens the store for reading only: it shows what a recovery may bring, and leaves every byte as it is.
    fn look(&mut self) -> Stopped {
        let (before, bytes) = (self.simulation.changes(), self.simulation.take_peak_bytes());
        let opened = self.open_store(&self.options().read_only(true));
        let store = match opened {
            Ok(store) => store,
            // No store was there yet.
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

    /// Reads the whole store and holds it against the model, which goes on from there.
    pub(super) fn verify(&mut self) -> Stopped {
        let store = self.store()?.clone();
        let (found, candidate) = self.read_store(&store, Some(self.opened.clone()))?;
        // What the store let go of while it opened is not there, as was just seen.
        self.gone_now().clear();
        let (kept, doubtful) = self.model.go_on(&found, &candidate);
        if kept > 0 {
            self.coverage.add(coverage::LANDED);
        }
        if doubtful > kept {
            self.coverage.add(coverage::LOST);
        }
        self.check_adapters()
    }

    /// Reads the whole store: what it holds, and the state of the model that has exactly that.
    fn read_store(&mut self, store: &Store, expires: Option<RangeInclusive<u64>>) -> Stopped<(Vec<Found>, Candidate)> {
        let (mut found, mut sequences): (Vec<Found>, Vec<Sequence>) = (Vec::new(), Vec::new());
        for info in store.sequences() {
            let Some(slot) = (0..SLOTS).find(|slot| key(*slot) == info.key) else {
                return failed(format!("a sequence with the key {:?}", info.key));
            };
            let sequence = match store.open_sequence(&info.key, OpenSequence::new()) {
                Ok(sequence) => sequence,
                Err(e) => return Err(self.unreadable("open a sequence after recovery", &e)),
            };
            found.push(Found {
                id: info.id,
                slot,
                tokens: sequence.len() as usize,
                ids: sequence.token_ids().to_vec(),
                state: sequence.state().map(<[u8]>::to_vec),
            });
            sequences.push(sequence);
        }
        let candidates = self.model.candidates(&found, expires, self.simulation.now());
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
        // Other states may have the same groups: the tails decide, without another read.
        if let Some((at, contents)) = read {
            for candidate in candidates.into_iter().skip(at) {
                match self.compare(&sequences, &candidate, &contents) {
                    Ok(()) => return Ok((found, candidate)),
                    Err(e) => wrong = e,
                }
            }
        }
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        failed(format!("recovered {found:?}: {wrong}\n  {}", self.model.describe()))
    }

    /// Reads all sequences and compares their groups with a state. Returns what is in their layers, or what is not as
    /// in the state.
    ///
    /// A tail under a codec is not compared here. The order of reads decides what the devices do, and recorded
    /// histories must stay what they are: a state that differs in such a tail alone is read to its end.
    fn read_as(
        &mut self,
        store: &Store,
        sequences: &[Sequence],
        candidate: &Candidate,
    ) -> Stopped<Result<Vec<Contents>, String>> {
        let mut all = Vec::new();
        for (sequence, version) in sequences.iter().zip(&candidate.versions) {
            for (layer, tokens) in version.layers.iter().enumerate() {
                let read = match self.shape.read(store, |layer| sequence.select_all(layer), layer, tokens) {
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

    /// Compares everything that was read of all sequences with a state.
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

    /// An error of a read that can only come from the medium.
    pub(super) fn unreadable(&mut self, doing: &str, e: &Error) -> Stop {
        match self.fault(doing, e) {
            Err(stop) => stop,
            Ok(()) if e.kind() == ErrorKind::Io => Stop::Reported,
            Ok(()) => Stop::Failed(format!("{doing}: {e:?}")),
        }
    }

    fn check_image(&mut self) -> Stopped {
        let failed = |e: std::io::Error| Stop::Failed(format!("dump of the image: {e}"));
        let memory = Path::new("/dev/shm");
        let place = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let dir = tempfile::tempdir_in(place).map_err(failed)?;
        self.simulation.dump(dir.path()).map_err(failed)?;
        let devices: Vec<PathBuf> = self.disks.iter().map(|disk| dir.path().join(disk.to_string())).collect();
        let options = kvfsck::Options { threads: 1, ..kvfsck::Options::default() };
        let report = kvfsck::check(&devices, &options, &());
        let report = report.map_err(|e| Stop::Failed(format!("kvfsck: {e:?}")))?;
        self.coverage.add(coverage::CHECKED);
        match report.findings.iter().find(|finding| finding.severity == kvfsck::Severity::Damage) {
            None => Ok(()),
            Some(finding) => Err(Stop::Failed(format!("kvfsck finds damage after a crash: {finding}"))),
        }
    }
}
