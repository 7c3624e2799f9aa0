//! A second store of the process, on a machine of its own. Nothing that the first store meets may show in it.
//!
//! Both stores run on one thread, so that a wait of one runs the shards of the other. The power of the first machine
//! fails while the second store works, and its faults strike there only.

use super::{Runner, StepResult, Stop, failed};
use crate::sim::content::Token;
use crate::sim::coverage;
use stratakv::sim::{Geometry, Simulation};
use stratakv::{
    ByteSize, CreateOptions, Durability, Error, ErrorKind, OpenSequence, SelectRequest, Sequence, Store, StoreOptions,
};

const KEY: &str = "neighbour";
/// The limit of its memory. The other store has another one, because stores with equal limits share their buffers.
const MEMORY: ByteSize = ByteSize::mib(6);

/// The second store, and what it was given.
pub(super) struct Neighbour {
    /// The handle is dropped before its store, and the store before its machine.
    sequence: Option<Sequence>,
    store: Option<Store>,
    simulation: Simulation,
    tokens: Vec<Token>,
}

impl Neighbour {
    fn open(&mut self, options: StoreOptions) -> Result<Store, Error> {
        let store = self.simulation.open(options)?;
        self.store = Some(store.clone());
        Ok(store)
    }
}

impl Runner<'_> {
    fn neighbour_options(&self) -> StoreOptions {
        let segment = ByteSize(self.case.segment_pages * 4096);
        Store::options().memory_limit(MEMORY).segment_bytes(segment).frame_bytes(ByteSize::kib(64))
    }

    /// Decides about an error of the second store, which only refused memory may cause.
    fn neighbour_error(&mut self, doing: &str, e: &Error) -> StepResult {
        match self.simulation.memory_refused() {
            0 => failed(format!("the second store, {doing}: {e:?}")),
            _ => {
                self.beside = None;
                Ok(())
            }
        }
    }

    /// Opens the store of the case again, to write and to read. Both must fail without an operation of a disk.
    pub(super) fn open_twice(&mut self) -> StepResult {
        self.store()?;
        let before = self.simulation.operations();
        for read_only in [false, true] {
            let opened = self.simulation.open_on(self.options().read_only(read_only), &self.disks);
            let kind = opened.as_ref().err().map(Error::kind);
            if kind != Some(ErrorKind::InUse) {
                return failed(format!("a store was opened twice: {kind:?}"));
            }
        }
        if self.simulation.operations() > before {
            return failed("the second open did something before it failed");
        }
        self.coverage.add(coverage::OPENED_TWICE);
        Ok(())
    }

    /// Appends tokens to the second store, commits them durably, and reads all of them.
    pub(super) fn neighbour(&mut self, tokens: usize) -> StepResult {
        let options = self.neighbour_options();
        // A new machine forgets what was refused before it.
        let _ = self.simulation.memory_refused();
        let added: Vec<Token> = (0..tokens).map(|_| Token::new(self.salts.next_u64())).collect();
        let mut own = match self.beside.take() {
            Some(own) => own,
            None => {
                let geometry = Geometry { devices: 1, device_bytes: 64 << 20, whole: false, ..self.case.geometry };
                let simulation = Simulation::new(&geometry, self.case.seed ^ 0x2b);
                let mut own = Neighbour { sequence: None, store: None, simulation, tokens: Vec::new() };
                let create = CreateOptions::new().key(KEY);
                let made = own.open(options).and_then(|store| store.create_sequence(&self.shape.layout, create));
                match made {
                    Ok(sequence) => own.sequence = Some(sequence),
                    Err(e) => return self.neighbour_error("create", &e),
                }
                own
            }
        };
        let Some(sequence) = &mut own.sequence else { return Ok(()) };
        let layers = 0..self.shape.layers;
        let appended = layers.clone().try_for_each(|layer| self.shape.append(sequence, layer, &added));
        if let Err(e) = appended.and_then(|()| sequence.commit(Durability::Sync)) {
            return self.neighbour_error("append and commit", &e);
        }
        own.tokens.extend(added);
        self.beside = Some(own);
        self.check_neighbour()
    }

    /// Reads the second store and compares it.
    fn check_neighbour(&mut self) -> StepResult {
        for layer in 0..self.shape.layers {
            let Some(Neighbour { sequence: Some(sequence), store: Some(store), tokens, .. }) = &self.beside else {
                return Ok(());
            };
            match self.shape.check(store, |layer| sequence.select(layer, SelectRequest::all()), layer, tokens) {
                Ok(Ok(())) => {}
                Ok(Err(e)) => self.neighbour_error("read", &e)?,
                Err(e) => return failed(format!("the second store: {e}")),
            }
        }
        Ok(())
    }

    /// Cuts the power of the second machine, opens its store again, and checks that all of it is there.
    pub(super) fn leave_neighbour(&mut self) -> StepResult {
        let options = self.neighbour_options();
        let Some(own) = &mut self.beside else { return Ok(()) };
        own.simulation.crash();
        (own.sequence, own.store) = (None, None);
        own.simulation.restart();
        let wrong = |e: Error| Stop::Failed(format!("the second store, after a power failure: {e:?}"));
        let store = own.open(options).map_err(wrong)?;
        let sequence = store.open_sequence(KEY, OpenSequence::new()).map_err(wrong)?;
        if sequence.len() as usize != own.tokens.len() {
            return failed(format!("the second store has {} tokens, not {}", sequence.len(), own.tokens.len()));
        }
        own.sequence = Some(sequence);
        self.check_neighbour()?;
        self.coverage.add(coverage::NEIGHBOUR);
        Ok(())
    }
}
