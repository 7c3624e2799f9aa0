//! Writing one derived frame to the device that has least of its layers.

use crate::error::Result;
use crate::layout::PlacedBytes;
use crate::log::{DerivedDraft, DerivedFrame, FrameTarget, SequenceIdentity, StoreInner, write_derived};
use crate::metrics::lock;
use std::sync::Arc;
use stratakv_format::DeviceIndex;

/// Writes a frame to `first`, otherwise to the device that has least of its layers. `parts` are the bytes of each
/// layer.
///
/// # Errors
/// As [`write_derived`].
pub(super) fn write_once(
    (store, identity): (&Arc<StoreInner>, &SequenceIdentity),
    placed: &mut PlacedBytes,
    (draft, parts): (&DerivedDraft<'_>, &[(usize, u64)]),
    first: Option<DeviceIndex>,
) -> Result<DerivedFrame> {
    placed.widen(store.devices.list.slots());
    let mut order = store.devices.order(placed, parts, lock(&store.space).next_frame());
    order.sort_by_key(|device| Some(*device) != first);
    let target = FrameTarget { devices: &store.devices, space: &store.space, order: &order, blocking: true };
    let frame = write_derived(&target, store.ids.next_frame(), identity, draft)?;
    placed.add(parts, usize::from(frame.meta.location.device.0));
    store.activity.add_written(frame.meta.location.bytes());
    Ok(frame)
}
