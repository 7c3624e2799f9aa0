//! Every history of the protocol within a scope: none breaks a property, and every planted mistake breaks one.

use stratakv_tests::protocol::{Event, Explored, Mistake, Property, ProtocolModel, Scope, explore};

/// Two copies. A file takes one group commit, so that the second one needs a checkpoint.
const COPIED: Scope = Scope { copies: 2, commits: 2, crashes: 2, losses: 1, pages: 5, checkpoints: 0, closes: 1 };
/// Files that take both commits, and a checkpoint at any time.
const CHECKPOINTED: Scope = Scope { pages: 7, checkpoints: 1, closes: 0, ..COPIED };
/// One copy of each frame, so that a failed sync of frames makes the store read-only.
const SINGLE: Scope = Scope { copies: 1, losses: 0, pages: 7, checkpoints: 1, ..COPIED };
/// Three commits, so that a place of a frame is used again.
const LONGER: Scope = Scope { commits: 3, losses: 0, closes: 0, ..COPIED };

/// Explores a scope and prints what it visited. Each of `events` must have been met.
fn holds(scope: Scope, events: &[Event]) -> Explored {
    let explored = explore(&ProtocolModel { scope, mistake: None }).unwrap_or_else(|broken| {
        panic!("{:?} is broken, after {} states, by:\n{}", broken.property, broken.states, broken.history)
    });
    println!("{scope:?}: {explored:?}");
    for event in events {
        assert!(explored.events.contains_key(event), "no history met {event:?}");
    }
    explored
}

#[test]
fn commits_survive_two_crashes_the_loss_of_a_device_and_a_close() {
    use Event::{
        CommitDropped, CommitKept, Opened, OpenedClean, OpenedWithout, RunCut, StaleRefused, SuccessorFollowed,
    };
    let all = [Opened, CommitKept, CommitDropped, RunCut, SuccessorFollowed, OpenedWithout, StaleRefused, OpenedClean];
    let explored = holds(COPIED, &all);
    assert!(explored.states > 500_000 && explored.depth > 40, "the scope is smaller than it was: {explored:?}");
}

#[test]
fn commits_survive_two_crashes_beside_a_checkpoint_and_the_loss_of_a_device() {
    holds(CHECKPOINTED, &[Event::CommitKept, Event::CommitDropped, Event::SuccessorFollowed, Event::StaleRefused]);
}

#[test]
fn commits_without_copies_survive_two_crashes_and_failed_syncs() {
    let explored = holds(SINGLE, &[Event::CommitKept, Event::CommitDropped, Event::OpenedClean]);
    assert!(!explored.events.contains_key(&Event::OpenedWithout), "a device was given up without copies");
}

#[test]
fn three_commits_survive_two_crashes() {
    holds(LONGER, &[Event::CommitKept, Event::CommitDropped, Event::RunCut]);
}

/// Makes a test of each mistake: a history in the scope breaks the property.
macro_rules! mistakes {
    ($($name:ident: $mistake:ident in $scope:ident breaks $property:ident,)+) => {
        $(#[test]
        fn $name() {
            let model = ProtocolModel { scope: $scope, mistake: Some(Mistake::$mistake) };
            let broken = explore(&model).expect_err("no history breaks a property");
            println!("{} states, then:\n{}", broken.states, broken.history);
            assert_eq!(broken.property, Property::$property, "{}", broken.history);
        })+

        #[test]
        fn every_mistake_has_a_test() {
            assert_eq!([$(Mistake::$mistake),+], Mistake::ALL);
        }
    };
}

mistakes! {
    a_commit_without_a_sync_of_the_manifest_is_found: ManifestSyncSkipped in COPIED breaks CommitsPresent,
    a_commit_with_one_synced_copy_is_found: OneCopySynced in COPIED breaks CommitsPresent,
    a_commit_without_a_sync_of_frames_is_found: FrameSyncSkipped in COPIED breaks CommitsPresent,
    a_batch_before_its_frames_are_synced_is_found: BatchBeforeFrames in COPIED breaks CommitsPresent,
    a_sync_that_is_tried_again_is_found: SyncRetried in SINGLE breaks CommitsPresent,
    a_superblock_before_its_checkpoint_is_found: SuperblockBeforeCheckpoint in COPIED breaks GenerationFound,
    a_successor_that_is_named_too_early_is_found: SupersededBeforeCheckpoint in COPIED breaks GenerationFound,
    one_slot_that_is_overwritten_twice_is_found: OneSlotUsed in LONGER breaks GenerationFound,
    a_checkpoint_that_no_superblock_names_is_found: SuperblockSkipped in LONGER breaks GenerationFound,
    a_lost_device_that_no_record_names_is_found: LostDeviceNotRecorded in COPIED breaks LostDeviceRefused,
    members_that_changed_without_superblocks_are_found: MembersWithoutSuperblock in COPIED breaks LostDeviceRefused,
    a_lost_device_that_is_accepted_is_found: LostDeviceAccepted in COPIED breaks LostDeviceRefused,
    a_frame_that_is_reused_too_early_is_found: FrameReusedEarly in COPIED breaks CommitsPresent,
    half_a_run_that_is_applied_is_found: HalfRunApplied in COPIED breaks CommitsWhole,
    a_repair_that_reuses_a_named_file_is_found: SettleSkipped in COPIED breaks GenerationFound,
    a_generation_that_goes_on_after_a_crash_is_found: GenerationNotBumped in COPIED breaks GenerationFound,
    an_open_store_that_is_marked_as_closed_is_found: OpenMarkSkipped in COPIED breaks CommitsWhole,
    a_repair_that_no_superblock_names_is_found: RepairNotNamed in LONGER breaks CommitsPresent,
}
