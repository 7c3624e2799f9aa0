//! One disk: what is durable, what reads see, and what lies between the two.

use super::random::Rng;
use std::collections::BTreeMap;

/// What lands or not as a whole.
pub(super) const SECTOR_BYTES: usize = 512;

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Node {
    Directory,
    File(usize),
}

/// A change of names that is not durable yet.
#[derive(Clone, Debug)]
enum NameChange {
    Put { path: String, node: Node },
    Gone { path: String },
    Moved { from: String, to: String, node: Node },
}

/// A change of a file that is not durable yet.
#[derive(Clone, Debug)]
enum FileChange {
    Length(usize),
    Write { offset: usize, bytes: Vec<u8> },
}

#[derive(Clone, Debug, Default)]
pub(super) struct File {
    /// What reads see.
    pub(super) live: Vec<u8>,
    durable: Vec<u8>,
    pending: Vec<FileChange>,
    /// Written before a sync that failed: the system believes them clean, and no later sync brings them home.
    doomed: Vec<FileChange>,
}

/// How much of what is pending lands at a crash.
#[derive(Clone, Copy)]
enum Landing {
    Nothing,
    Everything,
    /// Each change or not.
    Whole,
    /// Sectors of each write or not.
    Torn,
    /// The first changes.
    Front(usize),
}

impl Landing {
    fn any(rng: &mut Rng, changes: usize) -> Self {
        match rng.below(8) {
            0 => Self::Nothing,
            1 => Self::Everything,
            2 | 3 => Self::Whole,
            4 => Self::Front(rng.below(changes as u64 + 1) as usize),
            _ => Self::Torn,
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    pub(super) files: Vec<File>,
    pub(super) names: BTreeMap<String, Node>,
    durable_names: BTreeMap<String, Node>,
    /// In order, with the directory that they change.
    pending_names: Vec<(String, NameChange)>,
}

/// The directory that a path lies in.
pub(super) fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or(".", |(parent, _)| parent)
}

fn write_at(bytes: &mut Vec<u8>, offset: usize, new: &[u8]) {
    if bytes.len() < offset + new.len() {
        bytes.resize(offset + new.len(), 0);
    }
    bytes[offset..offset + new.len()].copy_from_slice(new);
}

impl File {
    pub(super) fn with_length(len: usize) -> Self {
        Self { live: vec![0; len], pending: vec![FileChange::Length(len)], ..Self::default() }
    }

    pub(super) fn grow(&mut self, len: usize) {
        if len > self.live.len() {
            self.live.resize(len, 0);
            self.pending.push(FileChange::Length(len));
        }
    }

    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) {
        write_at(&mut self.live, offset, bytes);
        self.pending.push(FileChange::Write { offset, bytes: bytes.to_vec() });
    }

    pub(super) fn sync(&mut self) {
        for change in std::mem::take(&mut self.pending) {
            apply(&mut self.durable, &change);
        }
    }

    /// A sync that failed.
    pub(super) fn doom(&mut self) {
        self.doomed.append(&mut self.pending);
    }

    /// Flips a bit on the medium.
    pub(super) fn rot(&mut self, offset: usize, bit: u32) {
        for bytes in [&mut self.live, &mut self.durable] {
            if let Some(byte) = bytes.get_mut(offset) {
                *byte ^= 1 << bit;
            }
        }
    }

    fn crash(&mut self, rng: &mut Rng) {
        if self.pending.is_empty() && self.doomed.is_empty() {
            return;
        }
        let mut changes = std::mem::take(&mut self.doomed);
        changes.append(&mut self.pending);
        let landing = Landing::any(rng, changes.len());
        for (index, change) in changes.iter().enumerate() {
            match (landing, change) {
                (Landing::Nothing, _) => {}
                (Landing::Everything, _) => apply(&mut self.durable, change),
                (Landing::Front(count), _) => {
                    if index < count {
                        apply(&mut self.durable, change);
                    }
                }
                (Landing::Torn, FileChange::Write { offset, bytes }) => self.land_torn(rng, *offset, bytes),
                (Landing::Whole, _) | (Landing::Torn, FileChange::Length(_)) => {
                    if rng.one_in(2) {
                        apply(&mut self.durable, change);
                    }
                }
            }
        }
        self.live.clone_from(&self.durable);
    }

    fn land_torn(&mut self, rng: &mut Rng, offset: usize, bytes: &[u8]) {
        // A front, a back, or any sectors.
        let sectors = bytes.len().div_ceil(SECTOR_BYTES);
        let cut = rng.below(sectors as u64 + 1) as usize;
        let shape = rng.below(3);
        for (index, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
            let lands = match shape {
                0 => index < cut,
                1 => index >= cut,
                _ => rng.one_in(2),
            };
            if lands {
                write_at(&mut self.durable, offset + index * SECTOR_BYTES, sector);
            }
        }
    }
}

fn apply(durable: &mut Vec<u8>, change: &FileChange) {
    match change {
        FileChange::Length(len) => {
            if durable.len() < *len {
                durable.resize(*len, 0);
            }
        }
        FileChange::Write { offset, bytes } => write_at(durable, *offset, bytes),
    }
}

fn apply_name(names: &mut BTreeMap<String, Node>, change: &NameChange) {
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

    pub(super) fn put(&mut self, path: &str, node: Node) {
        self.change_name(parent(path), NameChange::Put { path: path.to_owned(), node });
    }

    pub(super) fn remove(&mut self, path: &str) {
        self.change_name(parent(path), NameChange::Gone { path: path.to_owned() });
    }

    pub(super) fn rename(&mut self, from: &str, to: &str, node: Node) {
        let change = NameChange::Moved { from: from.to_owned(), to: to.to_owned(), node };
        self.change_name(parent(to), change);
    }

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

    /// Bytes of all files that have a name in `directory`.
    /// Bytes of all files.
    pub(super) fn all_bytes(&self) -> u64 {
        let bytes = |node: &Node| match node {
            Node::Directory => 0,
            Node::File(index) => self.files.get(*index).map_or(0, |file| file.live.len() as u64),
        };
        self.names.values().map(bytes).sum()
    }

    pub(super) fn used_bytes(&self, directory: &str) -> u64 {
        let bytes = |node: &Node| match node {
            Node::Directory => 0,
            Node::File(index) => self.files.get(*index).map_or(0, |file| file.live.len() as u64),
        };
        self.names.iter().filter(|(path, _)| parent(path) == directory).map(|(_, node)| bytes(node)).sum()
    }

    /// The power went: decides what landed.
    pub(super) fn crash(&mut self, rng: &mut Rng) {
        let pending = std::mem::take(&mut self.pending_names);
        let landing = Landing::any(rng, pending.len());
        for (index, (_, change)) in pending.iter().enumerate() {
            let lands = match landing {
                Landing::Nothing => false,
                Landing::Everything => true,
                Landing::Front(count) => index < count,
                Landing::Whole | Landing::Torn => rng.one_in(2),
            };
            if lands {
                apply_name(&mut self.durable_names, change);
            }
        }
        let directories: Vec<String> = self.durable_names.keys().cloned().collect();
        let is_there = |path: &str| path == "." || directories.iter().any(|name| name == path);
        self.durable_names.retain(|path, _| is_there(parent(path)));
        self.names.clone_from(&self.durable_names);
        // What has no name any more is gone; the others lie where they were.
        let mut named = vec![false; self.files.len()];
        for node in self.names.values() {
            if let Node::File(index) = node
                && let Some(named) = named.get_mut(*index)
            {
                *named = true;
            }
        }
        for (file, named) in self.files.iter_mut().zip(named) {
            if named { file.crash(rng) } else { *file = File::default() }
        }
    }
}
