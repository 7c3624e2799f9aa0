//! The queue of group commit: one of the waiting callers leads for all of them, and the others get its outcomes.
//!
//! Invariants:
//! - One caller leads at a time. It takes everything that is queued when it begins.
//! - Every request is led once, or put back by its leader.
//! - A caller that joins gets exactly one outcome, also if the leader panics.

use crate::sync::{Condvar, Mutex, hold};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// A queued request, and where its caller finds the outcome.
pub(crate) struct QueuedCommit<T, R> {
    pub(crate) request: T,
    outcome: Arc<Mutex<Option<R>>>,
}

/// The state of a [`CommitQueue`].
struct QueueState<T, R> {
    waiting: Vec<QueuedCommit<T, R>>,
    /// True if a caller leads.
    busy: bool,
    /// When the earliest request without a waiting caller is due.
    due: Option<Instant>,
    closed: bool,
}

/// Requests that wait to be led together.
pub(crate) struct CommitQueue<T, R> {
    queue: Mutex<QueueState<T, R>>,
    changed: Condvar,
}

/// The right to lead. It is given back on drop, also by a panic.
struct LeaderGuard<'a, T, R, F: Fn() -> R> {
    group: &'a CommitQueue<T, R>,
    outcomes: Vec<Arc<Mutex<Option<R>>>>,
    panicked: F,
}

impl<T, R, F: Fn() -> R> Drop for LeaderGuard<'_, T, R, F> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for outcome in &self.outcomes {
                let failure = (self.panicked)();
                hold(outcome).get_or_insert(failure);
            }
        }
        hold(&self.group.queue).busy = false;
        self.group.changed.notify_all();
    }
}

impl<T, R> QueuedCommit<T, R> {
    fn new(item: T) -> Self {
        Self { request: item, outcome: Arc::new(Mutex::new(None)) }
    }

    /// Hands the outcome to the caller.
    pub(crate) fn tell(&self, outcome: R) {
        *hold(&self.outcome) = Some(outcome);
    }
}

impl<T, R> CommitQueue<T, R> {
    pub(crate) fn new() -> Self {
        let queue = QueueState { waiting: Vec::new(), busy: false, due: None, closed: false };
        Self { queue: Mutex::new(queue), changed: Condvar::new() }
    }

    /// Adds a request without a waiting caller. The next group takes it. [`Self::wait_due`] returns at `due`, if given.
    pub(crate) fn add(&self, item: T, due: Option<Instant>) {
        let mut queue = hold(&self.queue);
        queue.waiting.push(QueuedCommit::new(item));
        if let Some(due) = due {
            queue.due = Some(queue.due.map_or(due, |old| old.min(due)));
            self.changed.notify_all();
        }
    }

    /// Adds a request and waits for its outcome.
    ///
    /// If no caller leads, this one calls `lead` with everything that is queued. `lead` tells each request its outcome.
    /// If it panics, requests without an outcome get that of `panicked`.
    pub(crate) fn join(&self, item: T, lead: impl Fn(Vec<QueuedCommit<T, R>>), panicked: impl Fn() -> R) -> R {
        let own = QueuedCommit::new(item);
        let outcome = Arc::clone(&own.outcome);
        let mut queue = hold(&self.queue);
        queue.waiting.push(own);
        loop {
            if let Some(outcome) = hold(&outcome).take() {
                return outcome;
            }
            if queue.busy {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            queue.busy = true;
            queue.due = None;
            let all = std::mem::take(&mut queue.waiting);
            drop(queue);
            let outcomes = all.iter().map(|member| Arc::clone(&member.outcome)).collect();
            let leading = LeaderGuard { group: self, outcomes, panicked: &panicked };
            lead(all);
            drop(leading);
            queue = hold(&self.queue);
        }
    }

    /// Puts requests back in front of all others, for the next group or for `due` at the latest. Only a leader calls
    /// this.
    pub(crate) fn put_back(&self, items: impl Iterator<Item = T>, due: Instant) {
        let mut again: Vec<_> = items.map(QueuedCommit::new).collect();
        let mut queue = hold(&self.queue);
        again.append(&mut queue.waiting);
        queue.waiting = again;
        queue.due = Some(queue.due.map_or(due, |old| old.min(due)));
    }

    /// Returns whether nothing is queued and no caller leads.
    pub(crate) fn is_idle(&self) -> bool {
        let queue = hold(&self.queue);
        queue.waiting.is_empty() && !queue.busy
    }

    /// Waits until a request is due. Returns false once the queue is closed. Nothing is due while `is_broken` holds.
    pub(crate) fn wait_due(&self, is_broken: impl Fn() -> bool) -> bool {
        let mut queue = hold(&self.queue);
        loop {
            if queue.closed {
                return false;
            }
            if queue.due.is_some() && is_broken() {
                queue.due = None;
            }
            queue = match queue.due.map(|due| due.saturating_duration_since(Instant::now())) {
                None => self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return true,
                Some(rest) => self.changed.wait_timeout(queue, rest).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// Ends [`Self::wait_due`] for good.
    pub(crate) fn close(&self) {
        hold(&self.queue).closed = true;
        self.changed.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        hold(&self.queue).closed
    }

    pub(crate) fn waiting(&self) -> usize {
        hold(&self.queue).waiting.len()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn put_back_requests_postpone_no_other() {
        let group: CommitQueue<u8, ()> = CommitQueue::new();
        let start = Instant::now();
        group.add(1, Some(start));
        group.put_back(std::iter::once(2), start + Duration::from_secs(3600));
        assert!(group.wait_due(|| false));
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
        assert_eq!(group.waiting(), 2);
    }

    #[test]
    fn a_leader_that_panics_leaves_an_outcome_to_its_group_and_the_lead_to_the_next() {
        let group: CommitQueue<u8, &str> = CommitQueue::new();
        let tell = |all: Vec<QueuedCommit<u8, &'static str>>| all.iter().for_each(|queued| queued.tell("led"));
        let wait_for = |waiting: usize| {
            while group.is_idle() || group.waiting() != waiting {
                std::thread::yield_now();
            }
        };
        // Leads until two others wait, which then are one group.
        let lead = |all| {
            wait_for(2);
            tell(all);
        };
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let first = scope.spawn(|| group.join(0, &lead, || "panicked"));
            wait_for(0);
            let failing = || group.join(1, |_| panic!("a leader fails"), || "panicked");
            let others = [scope.spawn(failing), scope.spawn(failing)];
            assert_eq!(first.join().ok(), Some("led"));
            others.into_iter().map(|other| other.join().ok()).collect()
        });
        assert!(outcomes.contains(&None) && outcomes.contains(&Some("panicked")), "{outcomes:?}");
        assert!(group.is_idle());
        assert_eq!(group.join(2, tell, || "panicked"), "led");
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    type Adding = CommitQueue<usize, usize>;

    /// Two callers and one request without a caller: each is led once, and each caller gets the outcome of its group.
    /// Fails if the leader does not wake the others when it ends, or if two lead at a time.
    #[test]
    fn loom_every_request_is_led_once() {
        loom::model(|| {
            let (group, sum) = (Arc::new(Adding::new()), Arc::new(AtomicUsize::new(0)));
            let leading = Arc::new(AtomicUsize::new(0));
            let join = |item: usize| {
                let (group, sum, leading) = (Arc::clone(&group), Arc::clone(&sum), Arc::clone(&leading));
                move || {
                    let lead = |all: Vec<QueuedCommit<usize, usize>>| {
                        assert_eq!(leading.fetch_add(1, Ordering::AcqRel), 0, "two lead at a time");
                        let own: usize = all.iter().map(|member| member.request).sum();
                        sum.fetch_add(own, Ordering::AcqRel);
                        leading.fetch_sub(1, Ordering::AcqRel);
                        all.iter().for_each(|member| member.tell(own));
                    };
                    let came_to = group.join(item, lead, || 0);
                    assert!(came_to & item == item, "{came_to} without {item}");
                }
            };
            group.add(4, None);
            let others = [thread::spawn(join(1)), thread::spawn(join(2))];
            others.into_iter().for_each(|other| other.join().expect("no panic"));
            assert_eq!(sum.load(Ordering::Acquire), 7);
            assert!(group.is_idle());
        });
    }

    /// A request that is put back goes with the next group, and its caller gets one outcome. Fails if the request is
    /// dropped, or if the end of the first attempt wakes no caller.
    #[test]
    fn loom_put_back_requests_are_led_again() {
        loom::model(|| {
            let (group, tries) = (Arc::new(Adding::new()), Arc::new(AtomicUsize::new(0)));
            let join = |item: usize| {
                let (group, tries) = (Arc::clone(&group), Arc::clone(&tries));
                move || {
                    let lead = |all: Vec<QueuedCommit<usize, usize>>| {
                        if tries.fetch_add(1, Ordering::AcqRel) > 0 {
                            let own = all.iter().map(|member| member.request).sum();
                            return all.iter().for_each(|member| member.tell(own));
                        }
                        all.iter().for_each(|member| member.tell(0));
                        group.put_back(all.into_iter().map(|member| member.request), Instant::now());
                    };
                    group.join(item, lead, || 0)
                }
            };
            let other = thread::spawn(join(1));
            let own = join(2)();
            let other = other.join().expect("no panic");
            // Either one failed alone and the other took both along, or both failed together.
            assert!(matches!((other, own), (0, 3) | (3, 0) | (0, 0)), "{other}, {own}");
            assert_eq!(group.waiting(), if (other, own) == (0, 0) { 2 } else { 0 });
        });
    }

    /// A thread in `wait_due` wakes for a request that becomes due, and takes it along. Fails if adding the request
    /// wakes no thread.
    #[test]
    fn loom_due_requests_wake_the_waiting_thread() {
        loom::model(|| {
            let group = Arc::new(Adding::new());
            let waiter = {
                let group = Arc::clone(&group);
                thread::spawn(move || {
                    assert!(group.wait_due(|| false));
                    let lead = |all: Vec<QueuedCommit<usize, usize>>| {
                        let sum = all.iter().map(|member| member.request).sum();
                        all.iter().for_each(|member| member.tell(sum));
                    };
                    group.join(0, &lead, || 9)
                })
            };
            group.add(1, Some(Instant::now()));
            assert_eq!(waiter.join().expect("no panic"), 1);
            group.close();
            assert!(!group.wait_due(|| false));
        });
    }

    /// After a final failure nothing is due, so that the waiting thread neither spins nor misses the end. Fails if
    /// requests stay due, or if closing wakes no thread.
    #[test]
    fn loom_nothing_is_due_once_it_is_broken() {
        loom::model(|| {
            let (group, broken) = (Arc::new(Adding::new()), Arc::new(AtomicUsize::new(0)));
            let waiter = {
                let (group, broken) = (Arc::clone(&group), Arc::clone(&broken));
                thread::spawn(move || {
                    let mut tries = 0;
                    while group.wait_due(|| broken.load(Ordering::Acquire) > 0) {
                        tries += 1;
                        broken.store(1, Ordering::Release);
                        // The commit is refused before it takes what is queued.
                        assert!(tries < 2, "it spins");
                    }
                })
            };
            group.add(1, Some(Instant::now()));
            group.close();
            waiter.join().expect("no panic");
        });
    }
}
