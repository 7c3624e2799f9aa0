//! Selectors whose summaries stand with the groups: they know what the keys give, wherever it came from.

use super::{Runner, Stop, Stopped, failed};
use crate::sim::coverage;
use std::sync::Arc;
use stratakv::retrieval::{KeyGroup, Selector, ShadowKv, SignBits};

impl Runner<'_> {
    /// Attaches a selector of calibration-free summaries to the sequence of a slot, and holds what they know against the keys.
    pub(super) fn attach(&mut self, slot: usize, landmarks: bool) -> Stopped {
        let Some(id) = self.handle(slot)? else { return Ok(()) };
        let Some((_, sequence)) = &mut self.handles[slot] else { return Ok(()) };
        let selector: Arc<dyn Selector> = if landmarks { Arc::new(ShadowKv::default()) } else { Arc::new(SignBits) };
        let attached = match sequence.attach_stored(Arc::clone(&selector)) {
            Ok(attached) => attached,
            Err(e) => return self.fault("attach", &e),
        };
        let Some(life) = self.model.lives.get(&id) else { return Ok(()) };
        let wrong = |e: stratakv::Error| Stop::Failed(format!("summary: {e}"));
        // Rounded keys are not known here.
        let exact = |layer: &usize| !self.shape.encodes(*layer, 0);
        for (layer, salts) in life.now.layers.iter().enumerate().filter(|(layer, _)| exact(layer)) {
            let keys = self.shape.keys();
            let kinds = selector.summaries();
            let Some(kind) = kinds.first() else { continue };
            let mut own = kind.layer(layer, keys).map_err(wrong)?;
            for (group, salts) in salts.chunks_exact(keys.group_tokens).enumerate() {
                let plane = self.shape.key_plane(layer, salts);
                own.push(&KeyGroup::new(keys, &plane, group as u64).map_err(wrong)?);
            }
            let found = sequence.selector_summaries(attached, layer).map_err(wrong)?;
            let (mut expected, mut there) = (Vec::new(), Vec::new());
            own.encode(0..own.groups(), &mut expected);
            found.iter().for_each(|summary| summary.encode(0..summary.groups(), &mut there));
            if there != expected {
                return failed(format!("sequence {id}: the summaries of layer {layer} are not those of its keys"));
            }
        }
        self.coverage.add(coverage::ATTACHED);
        Ok(())
    }
}
