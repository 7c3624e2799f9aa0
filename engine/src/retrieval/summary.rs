//! Summaries: the interface that every kind of summary has.
//!
//! How a summary is kept:
//! 1. [`SummarySpec::layer`] returns the empty [`LayerSummary`] of a layer.
//! 2. [`LayerSummary::push`] adds each sealed group, while a prompt streams in and while decode appends.
//! 3. [`LayerSummary::encode`] gives the records that a commit stores with the groups.
//! 4. [`LayerSummary::restore`] takes these records back when a sequence is opened.
//! 5. [`LayerSummary::truncate`] cuts it back with the sequence.
//!
//! Invariants:
//! - Groups are pushed in order, without gaps.
//! - Specs with the same id make the same summaries, so selectors share them.
//! - A summary takes at most [`LayerSummary::bytes_for`] bytes, which the engine accounts before it pushes groups.
//!
//! The callers are sequences. Selectors read the summaries.

use crate::error::Result;
use crate::retrieval::adapter::Adapter;
use crate::retrieval::bounds::layer_records::LoadedMinMax;
use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter};
use crate::retrieval::clusters::ClusterLists;
pub use crate::retrieval::key_group::KeyGroup;
pub use crate::retrieval::key_shape::KeyShape;
use crate::retrieval::sealed_keys::QueryProfile;
use crate::retrieval::stored_summary::SummaryRecordId;
pub(crate) use crate::retrieval::summary_records::{Records, ToBytes};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// The summary of the groups of one layer, in memory.
pub trait LayerSummary: Any + Send + Sync {
    /// Returns the number of groups that it holds.
    fn groups(&self) -> usize;

    /// Adds the next group. Groups come in order.
    fn push(&mut self, group: &KeyGroup<'_>);

    /// Forgets the groups from `groups` on.
    fn truncate(&mut self, groups: usize);

    /// Returns the bytes that it takes in memory now, without the adapter of its kind.
    fn bytes(&self) -> usize;

    /// Returns the most bytes that it takes in memory after `groups` more groups.
    fn bytes_for(&self, groups: usize) -> usize;

    /// Returns the identity of its records on a device. Returns none for summaries that are kept in memory only, such
    /// as an embedder's own kind.
    fn stored_as(&self) -> Option<SummaryRecordId> {
        None
    }

    /// Appends the records of these groups as they are stored on a device. All records have the same number of bytes.
    fn encode(&self, groups: Range<usize>, out: &mut Vec<u8>) {
        let _ = (groups, out);
    }

    /// Adds the next groups from whole records of a device. Returns `false`, and changes nothing, if it refuses them.
    ///
    /// The checksum of the records matched, but they may still hold any bytes.
    fn restore(&mut self, records: &[u8]) -> bool {
        let _ = records;
        false
    }

    /// Returns whether it keeps clusters, so that the engine calls [`Self::advance`] after appends.
    fn has_clusters(&self) -> bool {
        false
    }

    /// Takes note that the groups so far are those that the sequence had when the selector was attached. A summary with
    /// clusters builds them from all of these groups at its next [`Self::advance`].
    fn attached(&mut self) {}

    /// Takes in the groups that were pushed, as far as it can. Returns the groups whose keys it needs to go on, in
    /// rising order; none if it has taken in everything.
    ///
    /// The engine calls it after an append has succeeded, and reads these keys for [`Self::supply`]. If they cannot be
    /// read, it asks again after a later append.
    ///
    /// # Errors
    /// The errors of the method.
    fn advance(&mut self) -> Result<Vec<u64>> {
        Ok(Vec::new())
    }

    /// Takes the keys of a group that [`Self::advance`] asked for.
    fn supply(&mut self, group: &KeyGroup<'_>) {
        let _ = group;
    }

    /// Returns the number of entries that wait for each split, one number per cluster that is to be split. The summary
    /// splits these clusters by itself, but may be asked to split one earlier ([`Self::request_split`]).
    fn buffer_sizes(&self) -> Vec<usize> {
        Vec::new()
    }

    /// Asks for the split of the cluster in which the most entries wait, at the next [`Self::advance`]. Returns whether
    /// there is one. All pushed groups are taken in.
    ///
    /// The engine then calls [`Self::advance`] and [`Self::supply`] as after an append.
    fn request_split(&mut self) -> bool {
        false
    }

    /// Withdraws the request of a split, because the keys that it needs cannot be read. Clusters are as before it.
    fn withdraw_split(&mut self) {}

    /// Returns the version of the encoding of [`Self::put_state`]. Returns none if the summary has no state that is
    /// stored with its clusters.
    fn state_encoding(&self) -> Option<u32> {
        None
    }

    /// Returns the most bytes that [`Self::put_state`] appends.
    fn state_bytes(&self) -> usize {
        0
    }

    /// Appends what it needs to choose and to go on as now, without the keys of its groups. Returns false if it has no
    /// clusters yet, or has not taken in all groups.
    fn put_state(&self, out: &mut StateWriter) -> bool {
        let _ = out;
        false
    }

    /// Returns the most bytes that [`Self::take_state`] takes in memory, scratch included, beside the state itself.
    fn take_state_bytes(&self, state: &StateReader<'_>) -> usize {
        // Lists of members are copied, collected by cluster, and marked.
        state.left().saturating_mul(5)
    }

    /// Takes the state of the first `groups` groups of the same kind and layer, before any group is pushed. The engine
    /// then pushes the groups from [`Self::groups`] on, of which there are at least up to `groups`.
    ///
    /// # Errors
    /// The state breaks a rule. The engine then starts again with an empty summary.
    fn take_state(&mut self, state: &mut StateReader<'_>, groups: usize) -> std::result::Result<(), StateError> {
        let _ = (state, groups);
        Err(StateError::new("the summary has none"))
    }

    /// Returns the most bytes of scratch that a profile of `queries` queries takes beside the keys; none if the summary
    /// takes no profile.
    fn profile_bytes(&self, queries: usize) -> Option<usize> {
        let _ = queries;
        None
    }

    /// Builds what the summary makes of recorded queries. The engine calls it only if [`Self::profile_bytes`] returns
    /// some.
    ///
    /// # Errors
    /// The errors of the method. Nothing changed.
    fn profile(&mut self, profile: &QueryProfile<'_>) -> Result<()> {
        let _ = profile;
        Ok(())
    }

    /// Returns the members of each cluster, for inspection: one list of clusters per KV head, or one for all heads.
    /// Tokens that are in no cluster are in no list. Without clusters there is no list.
    ///
    /// The lists are copies, whose memory is not accounted.
    fn cluster_lists(&self) -> Vec<ClusterLists> {
        Vec::new()
    }

    /// Returns whether the engine can compute the summary from the min/max records of the groups alone. A sequence that
    /// streams its summaries then keeps no such summary in memory.
    fn streams_from_min_max(&self) -> bool {
        false
    }

    /// Drops all groups and keeps none from now on. Selections then compute the summary with [`Self::over_min_max`].
    /// The engine calls it only if [`Self::streams_from_min_max`] returns true.
    #[doc(hidden)]
    fn stream(&mut self) {}

    /// Returns the summary over min/max records that were read for one selection, or none if there is no memory for it.
    #[doc(hidden)]
    fn over_min_max(&self, records: LoadedMinMax<'_>) -> Option<Box<dyn LayerSummary>> {
        let _ = records;
        None
    }
}

/// The specification of a summary. Selectors with the same [`id`](Self::id) share the summary.
pub trait SummarySpec: Send + Sync {
    /// Returns the name of the kind with everything that changes the summary, such as an adapter's version.
    fn id(&self) -> String;

    /// Returns the adapter that makes the summary, if any. Sequences account its memory once for all that share it.
    fn adapter(&self) -> Option<&Arc<Adapter>> {
        None
    }

    /// Returns the summary of a layer without groups.
    ///
    /// # Errors
    /// It cannot summarise keys of this shape, for example because its adapter was fitted for another one.
    fn layer(&self, layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>>;
}

impl<K: SummarySpec + ?Sized> SummarySpec for Arc<K> {
    fn id(&self) -> String {
        (**self).id()
    }

    fn adapter(&self) -> Option<&Arc<Adapter>> {
        (**self).adapter()
    }

    fn layer(&self, layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        (**self).layer(layer, shape)
    }
}
