//! [`PageSources`]: the devices of stored pages, and when each device ends with the pages that are read from it.

use crate::options::BalancePolicy;
use stratakv_format::PAGE_BYTES;

/// How many times slower than the fastest device a device is before its speed counts.
const SLOW: f64 = 2.0;

/// The expected speed of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageDevice {
    pub(crate) request_s: f64,
    pub(crate) byte_s: f64,
    /// True if it failed recently. It is used only for entries that no other device has.
    pub(crate) avoided: bool,
    /// Seconds until it ends with the pages that are read from it, or their number with
    /// [`BalancePolicy::FewestReads`].
    end: f64,
}

impl PageDevice {
    /// Returns a device without pages to read.
    pub(crate) fn new(request_s: f64, byte_s: f64, avoided: bool) -> Self {
        Self { request_s, byte_s, avoided, end: 0.0 }
    }

    fn page_s(&self) -> f64 {
        self.request_s + PAGE_BYTES as f64 * self.byte_s
    }
}

/// The devices of the pages of a layer.
#[derive(Clone, Debug)]
pub(crate) struct PageSources {
    /// The device of each frame of the layer; none if its pages cannot be read.
    frames: Vec<Option<usize>>,
    devices: Vec<PageDevice>,
    pub(super) policy: BalancePolicy,
}

impl PageSources {
    /// Returns the sources of frames on these devices. Every index of `frames` is one of `devices`.
    ///
    /// Devices that are less than [`SLOW`] times slower than the fastest one count as equal, because estimates of equal
    /// devices differ. They also change with every read, and a prefetch would then bring the wrong pages.
    pub(crate) fn new(frames: Vec<Option<usize>>, mut devices: Vec<PageDevice>, policy: BalancePolicy) -> Self {
        let in_use = frames.iter().flatten().filter_map(|at| devices.get(*at)).filter(|device| !device.avoided);
        let fastest = in_use.min_by(|one, other| one.page_s().total_cmp(&other.page_s())).copied();
        if let Some(fastest) = fastest {
            for device in devices.iter_mut().filter(|device| device.page_s() < SLOW * fastest.page_s()) {
                (device.request_s, device.byte_s) = (fastest.request_s, fastest.byte_s);
            }
        }
        Self { frames, devices, policy }
    }

    /// Returns whether the pages of a frame can be read.
    pub(super) fn is_usable(&self, frame: u32) -> bool {
        self.device(frame).is_some()
    }

    fn device(&self, frame: u32) -> Option<&PageDevice> {
        self.devices.get((*self.frames.get(frame as usize)?)?)
    }

    /// Returns whether the device of a frame is avoided, and when it ends with one more page of `bytes` bytes.
    pub(super) fn end_with(&self, frame: u32, bytes: usize) -> (bool, f64) {
        let Some(device) = self.device(frame) else { return (true, f64::INFINITY) };
        let more = match self.policy {
            BalancePolicy::EarliestFinish => device.request_s + bytes as f64 * device.byte_s,
            BalancePolicy::FewestReads | BalancePolicy::FirstCopy => 1.0,
        };
        (device.avoided, device.end + more)
    }

    /// Records that a page is read.
    pub(super) fn read(&mut self, frame: u32, bytes: usize) {
        let (_, end) = self.end_with(frame, bytes);
        let device = self.frames.get(frame as usize).copied().flatten();
        if let Some(device) = device.and_then(|device| self.devices.get_mut(device)) {
            device.end = end;
        }
    }
}
