//! CPUs that the threads of devices are kept on.

use rustix::thread::CpuSet;

use crate::error::{Error, ErrorKind, Result};

/// CPUs that one thread is kept on.
#[derive(Clone, Copy, Debug)]
enum CpuPlace {
    Cpu(usize),
    /// Those of a NUMA node.
    Node(usize),
}

/// Places for threads, in turn; none: they run anywhere.
#[derive(Clone, Debug, Default)]
pub(crate) struct Affinity(Vec<CpuPlace>);

impl Affinity {
    /// # Errors
    /// `Configuration`: both are named.
    pub(crate) fn new(cpus: &[usize], nodes: &[usize]) -> Result<Self> {
        if !cpus.is_empty() && !nodes.is_empty() {
            return Err(Error::new(
                ErrorKind::Configuration,
                "name CPUs or NUMA nodes for the devices' threads, not both",
            ));
        }
        Ok(Self(cpus.iter().copied().map(CpuPlace::Cpu).chain(nodes.iter().copied().map(CpuPlace::Node)).collect()))
    }

    /// Keeps the calling thread, and those that it starts, where the thread of this number belongs.
    ///
    /// # Errors
    /// `Configuration`: no such CPU or node, or none that this process may use.
    pub(super) fn keep(&self, thread: usize) -> Result<()> {
        let Some(place) = self.0.get(thread % self.0.len().max(1)) else { return Ok(()) };
        let (what, cpus) = match place {
            CpuPlace::Cpu(cpu) => (format!("CPU {cpu}"), Ok(vec![*cpu])),
            CpuPlace::Node(node) => (format!("NUMA node {node}"), cpus_of(*node)),
        };
        cpus.and_then(|cpus| keep_on(&cpus)).map_err(|why| {
            Error::new(ErrorKind::Configuration, format!("a device's thread cannot be kept on {what}: {why}"))
        })
    }
}

fn keep_on(cpus: &[usize]) -> Result<(), String> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        if cpu >= CpuSet::MAX_CPU {
            return Err(format!("CPUs are numbered below {}", CpuSet::MAX_CPU));
        }
        set.set(cpu);
    }
    rustix::thread::sched_setaffinity(None, &set).map_err(|e| e.to_string())
}

fn cpus_of(node: usize) -> Result<Vec<usize>, String> {
    let path = format!("/sys/devices/system/node/node{node}/cpulist");
    let list = std::fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    match parse(list.trim()) {
        Some(cpus) if cpus.is_empty() => Err("it has no CPUs".to_owned()),
        Some(cpus) => Ok(cpus),
        None => Err(format!("{path} says {list:?}")),
    }
}

/// The numbers of a list such as `0-3,8`.
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
    fn lists_of_cpus() {
        assert_eq!(parse("0-3,8,10-11"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(parse(""), Some(vec![]));
        for bad in ["a", "1-", "-1", "1-b", "0x1"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        assert_eq!(parse("5-2"), Some(vec![]));
        assert!(parse("0-18446744073709551615").is_some_and(|cpus| cpus.len() == CpuSet::MAX_CPU));
    }

    #[test]
    fn places_are_named_in_one_way() {
        assert_eq!(Affinity::new(&[0], &[0]).expect_err("both").kind(), ErrorKind::Configuration);
        let refused = Affinity::new(&[], &[123_456]).expect("either").keep(0).expect_err("no such node");
        assert!(refused.to_string().contains("NUMA node 123456"), "{refused}");
        Affinity::default().keep(7).expect("anywhere");
    }
}
