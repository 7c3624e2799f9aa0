//! Adapters of the store. Each version is absent, or equals what was stored.

use super::{Runner, StepResult, Stop, failed};
use crate::sim::coverage;
use std::collections::BTreeMap;
use stratakv::Error;
use stratakv::retrieval::{Adapter, LayerAdapter, LowRankAdapter};

const NAME: &str = "adapter";

/// The presence of each version; none if an operation on it was interrupted.
pub(super) type Adapters = BTreeMap<u32, Option<bool>>;

impl Runner<'_> {
    /// Makes the adapter of a version. Its size ranges from a few bytes to several frames.
    fn adapter_of(&self, version: u32) -> Result<Adapter, Error> {
        let (width, rank) = (self.shape.width(), 1 + (version as usize * 37) % 150);
        let number = |i: usize| (i as f32 + version as f32) / 16.0;
        let layer = |at: usize| match (at + version as usize) % 3 {
            0 if at > 0 => Ok(LayerAdapter::None),
            _ => LowRankAdapter::new(width, rank, (0..width * rank).map(number).collect()).map(LayerAdapter::from),
        };
        Adapter::new(NAME, version, (0..self.shape.layers).map(layer).collect::<Result<_, _>>()?)
    }

    pub(super) fn put_adapter(&mut self, version: u32) -> StepResult {
        let adapter = self.adapter_of(version).map_err(|e| Stop::Failed(format!("adapter: {e}")))?;
        let before = self.adapters.insert(version, None).flatten();
        self.mark_commits();
        let put = self.store()?.put_adapter(&self.shape.layout, &adapter, self.case.copies);
        self.by_itself(0, put.is_ok())?;
        self.model.sync_attempted(put.is_ok());
        match put {
            Ok(_) => {
                self.adapters.insert(version, Some(true));
                self.coverage.add(coverage::ADAPTER);
                self.check_adapter(version)
            }
            Err(e) => {
                if before == Some(true) {
                    self.adapters.insert(version, before);
                }
                self.fault("put an adapter", &e)
            }
        }
    }

    pub(super) fn delete_adapter(&mut self, version: u32) -> StepResult {
        let before = self.adapters.insert(version, None).flatten();
        self.mark_commits();
        let deleted = self.store()?.delete_adapter(&self.shape.layout, NAME, version);
        self.by_itself(0, deleted.is_ok())?;
        self.model.sync_attempted(deleted.is_ok());
        match deleted {
            Ok(()) if before == Some(false) => failed(format!("version {version} was deleted twice")),
            Ok(()) => {
                self.adapters.insert(version, Some(false));
                Ok(())
            }
            Err(e) if e.kind() == stratakv::ErrorKind::NotFound && before != Some(true) => {
                self.adapters.insert(version, Some(false));
                Ok(())
            }
            Err(e) => self.fault("delete an adapter", &e),
        }
    }

    /// Compares all adapters with what must be there. Afterwards the presence of each is known.
    pub(super) fn check_adapters(&mut self) -> StepResult {
        let found: Vec<u32> = self.store()?.adapters().into_iter().map(|info| info.version).collect();
        let expected: Vec<(u32, Option<bool>)> =
            self.adapters.iter().map(|(version, there)| (*version, *there)).collect();
        if let Some(version) = found.iter().find(|version| !self.adapters.contains_key(version)) {
            return failed(format!("the store has an adapter of version {version}, which was never stored"));
        }
        for (version, there) in expected {
            let is_there = found.contains(&version);
            if there.is_some_and(|there| there != is_there) {
                return failed(format!("adapter of version {version}: present {is_there}, expected {there:?}"));
            }
            self.adapters.insert(version, Some(is_there));
            if is_there {
                self.check_adapter(version)?;
            }
        }
        Ok(())
    }

    fn check_adapter(&mut self, version: u32) -> StepResult {
        let expected = self.adapter_of(version).map_err(|e| Stop::Failed(format!("adapter: {e}")))?;
        match self.store()?.adapter(&self.shape.layout, NAME, Some(version)) {
            Ok(found) if found == expected => Ok(()),
            Ok(_) => failed(format!("adapter of version {version} is not what was stored")),
            Err(e) => Err(self.unreadable("read an adapter", &e)),
        }
    }
}
