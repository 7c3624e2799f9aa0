//! Many wait for the same thing: one of them does it for all that wait at the moment, and the others learn how it went.

use crate::sync::{Condvar, Mutex, hold};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// What one of the waiting asked for, and where it looks for the outcome.
pub(crate) struct QueuedCommit<T, R> {
    pub(crate) request: T,
    outcome: Arc<Mutex<Option<R>>>,
}

struct Queue<T, R> {
    waiting: Vec<QueuedCommit<T, R>>,
    /// Somebody leads.
    busy: bool,
    /// When the oldest of those that nobody waits for is due.
    due: Option<Instant>,
    closed: bool,
}

/// Those who wait, and those who are led.
pub(crate) struct CommitQueue<T, R> {
    queue: Mutex<Queue<T, R>>,
    changed: Condvar,
}

/// The right to lead. Given back whatever happens, a panic included.
struct Leading<'a, T, R, F: Fn() -> R> {
    group: &'a CommitQueue<T, R>,
    outcomes: Vec<Arc<Mutex<Option<R>>>>,
    panicked: F,
}

impl<T, R, F: Fn() -> R> Drop for Leading<'_, T, R, F> {
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

    /// Tells whoever waits for it how it went.
    pub(crate) fn tell(&self, outcome: R) {
        *hold(&self.outcome) = Some(outcome);
    }
}

impl<T, R> CommitQueue<T, R> {
    pub(crate) fn new() -> Self {
        let queue = Queue { waiting: Vec::new(), busy: false, due: None, closed: false };
        Self { queue: Mutex::new(queue), changed: Condvar::new() }
    }

    /// Adds something that nobody waits for: it goes with the next group, or when `due`.
    pub(crate) fn add(&self, item: T, due: Option<Instant>) {
        let mut queue = hold(&self.queue);
        queue.waiting.push(QueuedCommit::new(item));
        if let Some(due) = due {
            queue.due = Some(queue.due.map_or(due, |old| old.min(due)));
            self.changed.notify_all();
        }
    }

    /// Takes part, and waits for the outcome. Whoever finds nobody leading calls `lead` with all that waits, which tells each
    /// its outcome; those it has not told when it panics get that of `panicked`.
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
            let leading = Leading { group: self, outcomes, panicked: &panicked };
            lead(all);
            drop(leading);
            queue = hold(&self.queue);
        }
    }

    /// Those who lead put back what is to be tried again, in front of all others, by `due` at the latest.
    pub(crate) fn put_back(&self, items: impl Iterator<Item = T>, due: Instant) {
        let mut again: Vec<_> = items.map(QueuedCommit::new).collect();
        let mut queue = hold(&self.queue);
        again.append(&mut queue.waiting);
        queue.waiting = again;
        queue.due = Some(queue.due.map_or(due, |old| old.min(due)));
    }

    /// Whether nothing waits and nobody leads.
    pub(crate) fn is_idle(&self) -> bool {
        let queue = hold(&self.queue);
        queue.waiting.is_empty() && !queue.busy
    }

    /// Waits until something is due; `false` once it is closed. Nothing is due any more from when it is `unrepairable`.
    pub(crate) fn wait_due(&self, unrepairable: impl Fn() -> bool) -> bool {
        let mut queue = hold(&self.queue);
        loop {
            if queue.closed {
                return false;
            }
            if queue.due.is_some() && unrepairable() {
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

    /// What is put back is due later, and what was due before it still is when it was.
    #[test]
    fn what_is_put_back_postpones_nothing() {
        let group: CommitQueue<u8, ()> = CommitQueue::new();
        let start = Instant::now();
        group.add(1, Some(start));
        group.put_back(std::iter::once(2), start + Duration::from_secs(3600));
        assert!(group.wait_due(|| false));
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
        assert_eq!(group.waiting(), 2);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    type Adding = CommitQueue<usize, usize>;

    /// Two who wait and one who does not: each item is led once, and whoever waits learns what its group came to. Fails when the
    /// leader tells nobody that it has ended, and when a second one leads beside it.
    #[test]
    fn loom_everybody_is_led_once() {
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

    /// What is put back goes with the next group, and whoever asked for it is not told twice. Fails when it is dropped, or when the
    /// end of the first attempt is not told.
    #[test]
    fn loom_what_is_put_back_is_tried_again() {
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
            // One failed alone, and the other took both along; or both failed together.
            assert!(matches!((other, own), (0, 3) | (3, 0) | (0, 0)), "{other}, {own}");
            assert_eq!(group.waiting(), if (other, own) == (0, 0) { 2 } else { 0 });
        });
    }

    /// One who waits for what is due wakes up for it without any further word, and takes it along. Fails when adding it tells nobody.
    #[test]
    fn loom_what_is_due_wakes_whoever_waits_for_it() {
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
                    group.join(0, lead, || 9)
                })
            };
            group.add(1, Some(Instant::now()));
            assert_eq!(waiter.join().expect("no panic"), 1);
            group.close();
            assert!(!group.wait_due(|| false));
        });
    }

    /// A failure for good leaves nothing that is due: whoever waits for that does not try for ever, and wakes for the end. Fails when
    /// what is hopeless stays due, and when the end is not told.
    #[test]
    fn loom_nothing_is_due_once_it_is_hopeless() {
        loom::model(|| {
            let (group, unrepairable) = (Arc::new(Adding::new()), Arc::new(AtomicUsize::new(0)));
            let waiter = {
                let (group, unrepairable) = (Arc::clone(&group), Arc::clone(&unrepairable));
                thread::spawn(move || {
                    let mut tries = 0;
                    while group.wait_due(|| unrepairable.load(Ordering::Acquire) > 0) {
                        tries += 1;
                        unrepairable.store(1, Ordering::Release);
                        // As a commit that is refused before it takes what waits.
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
