//! Choosing a copy of each piece so that the last device ends as early as possible (SWARM section 5.2, with bytes and
//! speed instead of counts). Pure.
//!
//! 1. Pieces with fewer copies choose first, among them larger pieces first.
//! 2. Each piece is assigned to the device that finishes first with it, behind what is queued there.
//! 3. Pieces move away from the device that ends last, as long as the whole ends earlier.

use crate::options::BalancePolicy;

/// The expected speed and queue of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Load {
    /// Seconds until its queue is empty.
    pub(crate) queued_s: f64,
    pub(crate) request_s: f64,
    pub(crate) byte_s: f64,
    /// True if it failed recently. It is used only if no other copy is left.
    pub(crate) avoided: bool,
}

impl Load {
    fn cost(&self, piece: &PlannedPiece) -> f64 {
        self.request_s + piece.bytes as f64 * self.byte_s
    }
}

/// Bytes that are read together, and the devices that have a copy, the first copy first.
#[derive(Clone, Debug)]
pub(crate) struct PlannedPiece {
    pub(crate) bytes: usize,
    /// Its devices in the common list: the index of the first, and their number.
    pub(crate) devices: std::ops::Range<usize>,
}

/// The pieces of a read.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    pub(crate) list: Vec<PlannedPiece>,
    /// Devices of all pieces, as indexes into the list of loads.
    pub(crate) devices: Vec<usize>,
}

impl Pieces {
    pub(crate) fn push(&mut self, bytes: usize, devices: impl Iterator<Item = usize>) {
        let first = self.devices.len();
        self.devices.extend(devices);
        self.list.push(PlannedPiece { bytes, devices: first..self.devices.len() });
    }

    /// Adds bytes to the last piece.
    pub(crate) fn grow(&mut self, bytes: usize) {
        if let Some(last) = self.list.last_mut() {
            last.bytes += bytes;
        }
    }

    fn of(&self, piece: &PlannedPiece) -> &[usize] {
        &self.devices[piece.devices.clone()]
    }

    /// Returns the copy to read for each piece.
    pub(crate) fn balance(&self, loads: &[Load], policy: BalancePolicy) -> Vec<u8> {
        let mut chosen = vec![0_u8; self.list.len()];
        if policy == BalancePolicy::FirstCopy {
            for (piece, chosen) in self.list.iter().zip(&mut chosen) {
                *chosen = self.usable(piece, loads).next().unwrap_or(0);
            }
            return chosen;
        }
        if self.list.iter().all(|piece| piece.devices.len() < 2) {
            return chosen;
        }
        let mut order: Vec<u32> = (0..self.list.len() as u32).collect();
        let key = |at: &u32| {
            let piece = &self.list[*at as usize];
            (piece.devices.len(), std::cmp::Reverse(piece.bytes))
        };
        match policy {
            BalancePolicy::EarliestFinish => order.sort_by_key(key),
            // By count alone, in the order of the selection, regardless of queues and speeds.
            BalancePolicy::FirstCopy | BalancePolicy::FewestReads => {}
        }
        let counted = policy == BalancePolicy::FewestReads;
        let mut balanced = CopyAssignment::new(self, loads, counted);
        for at in order {
            let best = self.usable(&self.list[at as usize], loads);
            let best =
                best.min_by(|a, b| balanced.end_with(at as usize, *a).total_cmp(&balanced.end_with(at as usize, *b)));
            if let Some(best) = best {
                balanced.put(at as usize, best);
            }
        }
        if counted {
            return balanced.copies;
        }
        balanced.improve();
        // Choosing piece by piece may end badly. The result is never later than the improved first copies.
        let mut first = CopyAssignment::new(self, loads, false);
        for (at, piece) in self.list.iter().enumerate() {
            if let Some(copy) = self.usable(piece, loads).next() {
                first.put(at, copy);
            }
        }
        if first.end() >= balanced.end() {
            return balanced.copies;
        }
        first.improve();
        first.copies
    }

    /// Returns the copies to choose from: copies on sound devices, or all copies if there are none.
    fn usable<'a>(&'a self, piece: &PlannedPiece, loads: &'a [Load]) -> impl Iterator<Item = u8> + 'a {
        let devices = &self.devices[piece.devices.clone()];
        let avoid = devices.iter().any(|&device| !loads[device].avoided);
        let usable = move |copy: &u8| !(avoid && loads[devices[usize::from(*copy)]].avoided);
        (0..devices.len() as u8).filter(usable)
    }
}

/// An assignment of copies, and when each device ends with it.
struct CopyAssignment<'a> {
    pieces: &'a Pieces,
    loads: &'a [Load],
    /// True if every piece costs one, regardless of queues.
    counted: bool,
    copies: Vec<u8>,
    ends: Vec<f64>,
    /// Pieces of each device. A device without pieces does not count, however long its queue.
    given: Vec<u32>,
}

impl<'a> CopyAssignment<'a> {
    fn new(pieces: &'a Pieces, loads: &'a [Load], counted: bool) -> Self {
        let ends = loads.iter().map(|load| if counted { 0.0 } else { load.queued_s }).collect();
        Self { pieces, loads, counted, copies: vec![0; pieces.list.len()], ends, given: vec![0; loads.len()] }
    }

    fn device(&self, at: usize, copy: u8) -> usize {
        self.pieces.of(&self.pieces.list[at])[usize::from(copy)]
    }

    fn cost(&self, at: usize, device: usize) -> f64 {
        if self.counted { 1.0 } else { self.loads[device].cost(&self.pieces.list[at]) }
    }

    /// Returns when the device of a copy ends if it takes the piece as well.
    fn end_with(&self, at: usize, copy: u8) -> f64 {
        let device = self.device(at, copy);
        self.ends[device] + self.cost(at, device)
    }

    fn put(&mut self, at: usize, copy: u8) {
        let device = self.device(at, copy);
        self.ends[device] += self.cost(at, device);
        self.given[device] += 1;
        self.copies[at] = copy;
    }

    fn take(&mut self, at: usize) {
        let device = self.device(at, self.copies[at]);
        self.ends[device] -= self.cost(at, device);
        self.given[device] -= 1;
    }

    /// Returns the device with pieces that ends last.
    fn last(&self) -> Option<usize> {
        let given = (0..self.ends.len()).filter(|&device| self.given[device] > 0);
        given.max_by(|&a, &b| self.ends[a].total_cmp(&self.ends[b]))
    }

    fn end(&self) -> f64 {
        self.last().map_or(0.0, |last| self.ends[last])
    }

    /// Moves pieces away from the device that ends last, each to a device that still ends earlier with it.
    fn improve(&mut self) {
        for _ in 0..self.copies.len() {
            let Some(last) = self.last() else { return };
            let mut best: Option<(f64, usize, u8)> = None;
            for (at, piece) in self.pieces.list.iter().enumerate() {
                if piece.devices.len() < 2 || self.device(at, self.copies[at]) != last {
                    continue;
                }
                for copy in self.pieces.usable(piece, self.loads).filter(|&copy| self.device(at, copy) != last) {
                    let end = self.end_with(at, copy);
                    if end < self.ends[last] && best.is_none_or(|(least, ..)| end < least) {
                        best = Some((end, at, copy));
                    }
                }
            }
            let Some((_, at, copy)) = best else { return };
            self.take(at);
            self.put(at, copy);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces(spec: &[(usize, Vec<usize>)]) -> Pieces {
        let mut pieces = Pieces::default();
        for (bytes, devices) in spec {
            pieces.push(*bytes, devices.iter().copied());
        }
        pieces
    }

    /// Returns when the last device ends.
    fn end(pieces: &Pieces, loads: &[Load], chosen: &[u8]) -> f64 {
        let mut ends: Vec<f64> = loads.iter().map(|load| load.queued_s).collect();
        for (piece, copy) in pieces.list.iter().zip(chosen) {
            let device = pieces.of(piece)[usize::from(*copy)];
            ends[device] += loads[device].cost(piece);
        }
        let used =
            |device: &usize| pieces.list.iter().zip(chosen).any(|(p, c)| pieces.of(p)[usize::from(*c)] == *device);
        (0..ends.len()).filter(used).map(|device| ends[device]).fold(0.0, f64::max)
    }

    fn best(pieces: &Pieces, loads: &[Load]) -> f64 {
        let mut chosen = vec![0; pieces.list.len()];
        let mut best = f64::INFINITY;
        loop {
            best = best.min(end(pieces, loads, &chosen));
            let next = (0..chosen.len()).find(|&at| usize::from(chosen[at]) + 1 < pieces.list[at].devices.len());
            let Some(next) = next else { return best };
            chosen[..next].fill(0);
            chosen[next] += 1;
        }
    }

    const FAST: Load = Load { queued_s: 0.0, request_s: 1e-5, byte_s: 1e-9, avoided: false };

    fn spec() -> impl Strategy<Value = (Vec<(usize, Vec<usize>)>, Vec<Load>)> {
        (2_usize..5).prop_flat_map(|devices| {
            let copies = prop::sample::subsequence((0..devices).collect::<Vec<_>>(), 1..=devices.min(3)).prop_shuffle();
            let load = (0_u32..3, 1_u32..4).prop_map(|(queue, slow)| Load {
                queued_s: f64::from(queue) * 2e-5,
                request_s: 1e-5,
                byte_s: 1e-9 * f64::from(slow),
                avoided: false,
            });
            let bytes = prop::sample::select(vec![4096_usize, 16384, 65536]);
            (prop::collection::vec((bytes, copies), 1..9), prop::collection::vec(load, devices))
        })
    }

    proptest! {
        #[test]
        fn close_to_the_best_of_all((spec, loads) in spec()) {
            let pieces = pieces(&spec);
            let chosen = pieces.balance(&loads, BalancePolicy::EarliestFinish);
            for (piece, copy) in pieces.list.iter().zip(&chosen) {
                prop_assert!(usize::from(*copy) < piece.devices.len());
            }
            let (own, best) = (end(&pieces, &loads, &chosen), best(&pieces, &loads));
            // Choosing piece by piece costs at most one more piece at the slowest device than the optimum.
            let widest = spec.iter().flat_map(|(bytes, devices)| {
                let piece = PlannedPiece { bytes: *bytes, devices: 0..0 };
                devices.iter().map(|&d| loads[d].cost(&piece)).collect::<Vec<_>>()
            });
            let widest = widest.fold(0.0, f64::max);
            prop_assert!(own <= best + widest + 1e-12, "{own} beside {best}");
        }

        #[test]
        fn never_worse_than_the_first_copy((spec, loads) in spec()) {
            let pieces = pieces(&spec);
            let balanced = end(&pieces, &loads, &pieces.balance(&loads, BalancePolicy::EarliestFinish));
            let first = end(&pieces, &loads, &pieces.balance(&loads, BalancePolicy::FirstCopy));
            prop_assert!(balanced <= first + 1e-12, "{balanced} beside {first}");
        }

        #[test]
        fn devices_that_failed_are_left_alone((spec, mut loads) in spec()) {
            loads[0].avoided = true;
            let pieces = pieces(&spec);
            for policy in [BalancePolicy::EarliestFinish, BalancePolicy::FewestReads, BalancePolicy::FirstCopy] {
                let chosen = pieces.balance(&loads, policy);
                for (piece, copy) in pieces.list.iter().zip(&chosen) {
                    let devices = pieces.of(piece);
                    prop_assert!(devices[usize::from(*copy)] != 0 || devices.len() == 1);
                }
            }
        }
    }

    #[test]
    fn a_skewed_selection_uses_all_devices() {
        // 52 of 64 pieces have their first copy on device 0. The second copy is on one of the others.
        let spec: Vec<_> =
            (0..64).map(|at| (65536, if at < 52 { vec![0, 1 + at % 3] } else { vec![1 + at % 3, 0] })).collect();
        let (pieces, loads) = (pieces(&spec), [FAST; 4]);
        let balanced = end(&pieces, &loads, &pieces.balance(&loads, BalancePolicy::EarliestFinish));
        let first = end(&pieces, &loads, &pieces.balance(&loads, BalancePolicy::FirstCopy));
        assert!((first / FAST.cost(&pieces.list[0]) - 52.0).abs() < 1e-6);
        assert!((balanced / FAST.cost(&pieces.list[0]) - 16.0).abs() < 1e-6);
    }

    #[test]
    fn a_slow_device_gets_its_share() {
        let slow = Load { request_s: 4e-5, byte_s: 4e-9, ..FAST };
        let spec: Vec<_> = (0..65).map(|at| (65536, vec![at % 2, 1 - at % 2])).collect();
        let pieces = pieces(&spec);
        let chosen = pieces.balance(&[FAST, slow], BalancePolicy::EarliestFinish);
        let on_slow = pieces.list.iter().zip(&chosen).filter(|(p, c)| pieces.of(p)[usize::from(**c)] == 1).count();
        assert_eq!(on_slow, 13);
    }
}
