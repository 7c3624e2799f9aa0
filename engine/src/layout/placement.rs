//! Placement: chooses the devices of the next frame of a sequence.
//!
//! Data that is read together should be spread evenly: the layers of a decode step, and the groups that one layer
//! selects. Plain round-robin fails when a prefill writes its frames layer by layer and the layers are a multiple of
//! the devices. Every layer would then be on one device. So placement works per layer:
//!
//! 1. A frame is stored on the device with the fewest bytes of its layers, relative to the device's weight.
//! 2. Ties are decided by a counter of frames, so sequences start on different devices.
//! 3. Further copies use the next devices. Among nearly equal ones a hash decides, so that copies pair up differently.

/// A device that may take a frame.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    /// The device's share of the data, relative to the others.
    pub(crate) weight: f64,
    /// True if the device takes this frame.
    pub(crate) open: bool,
}

/// The bytes of each layer on each device that a sequence has placed since it was opened.
#[derive(Clone, Debug, Default)]
pub(crate) struct PlacedBytes {
    devices: usize,
    /// `[layer][device]`.
    bytes: Vec<u64>,
}

impl PlacedBytes {
    pub(crate) fn new(layers: usize, devices: usize) -> Self {
        Self { devices, bytes: vec![0; layers * devices] }
    }

    /// Extends the table to devices that joined the store.
    pub(crate) fn widen(&mut self, devices: usize) {
        if devices > self.devices {
            let layers = self.bytes.len() / self.devices.max(1);
            let mut wider = Self::new(layers, devices);
            for layer in 0..layers {
                wider.bytes[layer * devices..][..self.devices].copy_from_slice(self.of(layer));
            }
            *self = wider;
        }
    }

    fn of(&self, layer: usize) -> &[u64] {
        self.bytes.get(layer * self.devices..(layer + 1) * self.devices).unwrap_or_default()
    }

    /// Adds a frame's layers, each with its bytes, to a device.
    pub(crate) fn add(&mut self, parts: &[(usize, u64)], device: usize) {
        for (layer, bytes) in parts {
            let at = layer * self.devices + device;
            if let Some(own) = self.bytes.get_mut(at).filter(|_| device < self.devices) {
                *own = own.saturating_add(*bytes);
            }
        }
    }

    /// Returns the open devices in order of preference for a frame of these layers. The next ones are for its copies.
    ///
    /// `pointer` counts the frames of the store.
    pub(crate) fn order(&self, candidates: &[Candidate], parts: &[(usize, u64)], pointer: usize) -> Vec<usize> {
        let count = candidates.len().max(1);
        let fill = |device: usize| {
            // Each layer counts in proportion to its bytes in this frame.
            let held: f64 = parts
                .iter()
                .map(|(layer, bytes)| {
                    (self.of(*layer).get(device).copied().unwrap_or(0) + bytes) as f64 * *bytes as f64
                })
                .sum();
            held / candidates[device].weight.max(1e-9)
        };
        let mut order: Vec<usize> = (0..candidates.len()).filter(|&device| candidates[device].open).collect();
        order.sort_by(|&a, &b| {
            let distance = |device: usize| (device + count - pointer % count) % count;
            fill(a).total_cmp(&fill(b)).then(distance(a).cmp(&distance(b)))
        });
        // The pairs of devices with copies of the same frame must vary. Otherwise a busy device could pass its reads to
        // only a few others. Among devices that differ by less than this frame, a hash decides.
        if let Some(&second) = order.get(1) {
            let least = fill(second);
            let own: f64 = parts.iter().map(|(_, bytes)| *bytes as f64 * *bytes as f64).sum();
            let ahead =
                |device: usize| ((fill(device) - least) * candidates[device].weight / own.max(1.0) + 1e-6) as u64;
            order[1..].sort_by_key(|&device| (ahead(device), chance(pointer, device)));
        }
        order
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.bytes.capacity() * 8
    }
}

/// Returns a pseudo-random number (splitmix64).
fn chance(pointer: usize, device: usize) -> u64 {
    let mut x =
        (pointer as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (device as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place(weights: &[f64], frames: impl Iterator<Item = Vec<(usize, u64)>>, layers: usize) -> PlacedBytes {
        let mut placed = PlacedBytes::new(layers, weights.len());
        let candidates: Vec<_> = weights.iter().map(|&weight| Candidate { weight, open: true }).collect();
        for (pointer, parts) in frames.enumerate() {
            let device = placed.order(&candidates, &parts, pointer)[0];
            placed.add(&parts, device);
        }
        placed
    }

    #[test]
    fn placement_spreads_every_layer_of_a_prefill_over_all_devices() {
        // 32 layers, 4 devices, one frame per layer and chunk: round-robin would put each layer on one device.
        let placed = place(&[1.0; 4], (0..32 * 16).map(|at| vec![(at % 32, 1 << 20)]), 32);
        for layer in 0..32 {
            assert_eq!(placed.of(layer), [4 << 20; 4], "layer {layer}");
        }
    }

    #[test]
    fn sequences_start_on_different_devices() {
        let candidates = [Candidate { weight: 1.0, open: true }; 3];
        let empty = PlacedBytes::new(1, 3);
        let first: Vec<_> = (0..6).map(|pointer| empty.order(&candidates, &[(0, 1)], pointer)[0]).collect();
        assert_eq!(first, [0, 1, 2, 0, 1, 2]);
        let closed = [candidates[0], Candidate { open: false, ..candidates[1] }, candidates[2]];
        assert_eq!(empty.order(&closed, &[(0, 1)], 1), [2, 0]);
        assert!(empty.order(&[], &[], 0).is_empty());
    }

    #[test]
    fn every_pair_of_devices_has_copies_of_the_same_frames() {
        let candidates = [Candidate { weight: 1.0, open: true }; 4];
        for uneven in [0, 7] {
            let mut placed = PlacedBytes::new(1, 4);
            let mut firsts = [0; 4];
            let mut pairs = std::collections::BTreeMap::new();
            for pointer in 0..240 {
                let parts = [(0, 1000 + uneven * (pointer as u64 % 3))];
                let order = placed.order(&candidates, &parts, pointer);
                order[..2].iter().for_each(|device| placed.add(&parts, *device));
                firsts[order[0]] += 1;
                *pairs.entry((order[0].min(order[1]), order[0].max(order[1]))).or_insert(0) += 1;
            }
            assert!(firsts.iter().all(|own| *own > 30), "{firsts:?}");
            assert!(pairs.len() == 6 && pairs.values().all(|own| *own > 20), "{pairs:?}");
            let (least, most) = (placed.of(0).iter().min().unwrap(), placed.of(0).iter().max().unwrap());
            assert!(most - least < 4 * 1014, "{:?}", placed.of(0));
        }
    }

    proptest! {
        #[test]
        fn shares_follow_weights(weights in prop::collection::vec(1_u32..6, 2..5), layers in 1_usize..6) {
            let weights: Vec<f64> = weights.into_iter().map(f64::from).collect();
            let placed = place(&weights, (0..layers * 240).map(|at| vec![(at % layers, 1000)]), layers);
            let total: f64 = weights.iter().sum();
            for layer in 0..layers {
                for (device, weight) in weights.iter().enumerate() {
                    let share = placed.of(layer)[device] as f64 / 240_000.0;
                    prop_assert!((share - weight / total).abs() < 0.02, "{share} beside {weight} of {total}");
                }
            }
        }
    }
}
