//! CPU affinity of shard threads: the options `shard_cpus` and `shard_nodes`.

use rustix::thread::CpuSet;

use crate::error::{Error, ErrorKind, Result};

/// The CPUs that one thread may run on.
#[derive(Clone, Copy, Debug)]
enum CpuPlace {
    Cpu(usize),
    /// All CPUs of a NUMA node.
    Node(usize),
}

/// The CPU places of shard threads, by thread number modulo their count. An empty list lets threads run anywhere.
#[derive(Clone, Debug, Default)]
pub(crate) struct Affinity(Vec<CpuPlace>);

impl Affinity {
    /// Returns an affinity by CPU numbers or by NUMA nodes.
    ///
    /// # Errors
    /// `Configuration`: both lists have entries.
    pub(crate) fn new(cpus: &[usize], nodes: &[usize]) -> Result<Self> {
        if !cpus.is_empty() && !nodes.is_empty() {
            return Err(Error::new(
                ErrorKind::Configuration,
                "open: shard_cpus and shard_nodes are both set; set one of them",
            ));
        }
        Ok(Self(cpus.iter().copied().map(CpuPlace::Cpu).chain(nodes.iter().copied().map(CpuPlace::Node)).collect()))
    }

    /// Restricts the calling thread, and threads it starts later, to the place of shard thread number `thread`.
    ///
    /// # Errors
    /// `Configuration`: the CPU or node does not exist, or this process may not use it.
    pub(super) fn keep(&self, thread: usize) -> Result<()> {
        let Some(place) = self.0.get(thread % self.0.len().max(1)) else { return Ok(()) };
        let (what, cpus) = match place {
            CpuPlace::Cpu(cpu) => (format!("CPU {cpu}"), Ok(vec![*cpu])),
            CpuPlace::Node(node) => (format!("NUMA node {node}"), cpus_of(*node)),
        };
        cpus.and_then(|cpus| keep_on(&cpus)).map_err(|why| {
            Error::new(ErrorKind::Configuration, format!("open: a shard thread cannot be restricted to {what}: {why}"))
        })
    }
}

fn keep_on(cpus: &[usize]) -> Result<(), String> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        if cpu >= CpuSet::MAX_CPU {
            return Err(format!("CPU numbers are below {}", CpuSet::MAX_CPU));
        }
        set.set(cpu);
    }
    rustix::thread::sched_setaffinity(None, &set).map_err(|e| e.to_string())
}

fn cpus_of(node: usize) -> Result<Vec<usize>, String> {
    let path = format!("/sys/devices/system/node/node{node}/cpulist");
    let list = std::fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    match parse(list.trim()) {
        Some(cpus) if cpus.is_empty() => Err("the node has no CPUs".to_owned()),
        Some(cpus) => Ok(cpus),
        None => Err(format!("{path} holds {list:?}, which is not a CPU list")),
    }
}

/// Parses a CPU list such as `0-3,8`.
fn parse(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in list.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        cpus.extend((first..=last).take(CpuSet::MAX_CPU));
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_parse_ranges_and_single_numbers() {
        assert_eq!(parse("0-3,8,10-11"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(parse(""), Some(vec![]));
        for bad in ["a", "1-", "-1", "1-b", "0x1"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        assert_eq!(parse("5-2"), Some(vec![]));
        assert!(parse("0-18446744073709551615").is_some_and(|cpus| cpus.len() == CpuSet::MAX_CPU));
    }

    #[test]
    fn affinity_refuses_cpus_and_nodes_together() {
        assert_eq!(Affinity::new(&[0], &[0]).expect_err("both").kind(), ErrorKind::Configuration);
        let refused = Affinity::new(&[], &[123_456]).expect("either").keep(0).expect_err("no such node");
        assert!(refused.to_string().contains("NUMA node 123456"), "{refused}");
        Affinity::default().keep(7).expect("anywhere");
    }
}
