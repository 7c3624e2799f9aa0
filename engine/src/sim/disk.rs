//! One simulated disk: its files and its names. A name is durable once a sync of its directory has covered it.

use super::disk_file::{CrashOutcome, DiskFile};
use super::pages::Pages;
use super::random::Rng;
use std::collections::BTreeMap;
use std::sync::Weak;

/// The lock of an open disk, exclusive or shared. It ends with its last holder, or with a restart of the machine.
pub(super) struct DiskLock {
    pub(super) is_shared: bool,
}

/// The directory or file that a name refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameNode {
    Directory,
    File(usize),
}

/// A change of names that is not durable yet.
#[derive(Clone, Debug)]
enum NameChange {
    Put { path: String, node: NameNode },
    Gone { path: String },
    Moved { from: String, to: String, node: NameNode },
}

/// A simulated disk.
#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    pub(super) files: Vec<DiskFile>,
    pub(super) names: BTreeMap<String, NameNode>,
    durable_names: BTreeMap<String, NameNode>,
    /// Changes that no sync has covered, in order, each with its directory.
    pending_names: Vec<(String, NameChange)>,
    /// The locks of stores that have it open.
    pub(super) locks: Vec<Weak<DiskLock>>,
}

/// Returns the directory that contains a path.
pub(super) fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or(".", |(parent, _)| parent)
}

fn apply_name(names: &mut BTreeMap<String, NameNode>, change: &NameChange) {
    match change {
        NameChange::Put { path, node } => {
            names.insert(path.clone(), *node);
        }
        NameChange::Gone { path } => {
            names.remove(path);
        }
        NameChange::Moved { from, to, node } => {
            names.remove(from);
            names.insert(to.clone(), *node);
        }
    }
}

impl Disk {
    fn change_name(&mut self, directory: &str, change: NameChange) {
        apply_name(&mut self.names, &change);
        self.pending_names.push((directory.to_owned(), change));
    }

    pub(super) fn put(&mut self, path: &str, node: NameNode) {
        self.change_name(parent(path), NameChange::Put { path: path.to_owned(), node });
    }

    /// Adds a file that is durable at once.
    pub(super) fn hold(&mut self, path: &str, file: DiskFile) {
        self.names.insert(path.to_owned(), NameNode::File(self.files.len()));
        self.files.push(file);
        self.durable_names.clone_from(&self.names);
    }

    pub(super) fn remove(&mut self, path: &str) {
        self.change_name(parent(path), NameChange::Gone { path: path.to_owned() });
    }

    pub(super) fn rename(&mut self, from: &str, to: &str, node: NameNode) {
        let change = NameChange::Moved { from: from.to_owned(), to: to.to_owned(), node };
        self.change_name(parent(to), change);
    }

    /// Makes the names in a directory durable.
    pub(super) fn sync_names(&mut self, directory: &str) {
        let names = &mut self.durable_names;
        self.pending_names.retain(|(own, change)| {
            let covered = own == directory;
            if covered {
                apply_name(names, change);
            }
            !covered
        });
    }

    /// Returns the bytes of all files.
    pub(super) fn all_bytes(&self) -> u64 {
        let bytes = |node: &NameNode| match node {
            NameNode::Directory => 0,
            NameNode::File(index) => self.files.get(*index).map_or(0, |file| file.len() as u64),
        };
        self.names.values().map(bytes).sum()
    }

    /// Returns the bytes of all files with a name in `directory`.
    pub(super) fn used_bytes(&self, directory: &str) -> u64 {
        let bytes = |node: &NameNode| match node {
            NameNode::Directory => 0,
            NameNode::File(index) => self.files.get(*index).map_or(0, |file| file.len() as u64),
        };
        self.names.iter().filter(|(path, _)| parent(path) == directory).map(|(_, node)| bytes(node)).sum()
    }

    /// Decides after a power failure which changes landed.
    pub(super) fn crash(&mut self, pages: &mut Pages, rng: &mut Rng) {
        let pending = std::mem::take(&mut self.pending_names);
        let outcome = CrashOutcome::any(rng, pending.len());
        for (index, (_, change)) in pending.iter().enumerate() {
            let lands = match outcome {
                CrashOutcome::Nothing => false,
                CrashOutcome::Everything => true,
                CrashOutcome::Front(count) => index < count,
                CrashOutcome::Whole | CrashOutcome::Torn => rng.one_in(2),
            };
            if lands {
                apply_name(&mut self.durable_names, change);
            }
        }
        let directories: Vec<String> = self.durable_names.keys().cloned().collect();
        let is_there = |path: &str| path == "." || directories.iter().any(|name| name == path);
        self.durable_names.retain(|path, _| is_there(parent(path)));
        self.names.clone_from(&self.durable_names);
        // A file that lost its name loses its content.
        let mut named = vec![false; self.files.len()];
        for node in self.names.values() {
            if let NameNode::File(index) = node
                && let Some(named) = named.get_mut(*index)
            {
                *named = true;
            }
        }
        for (file, named) in self.files.iter_mut().zip(named) {
            if named { file.crash(pages, rng) } else { *file = DiskFile::default() }
        }
    }
}
