//! Breadth-first search over exact states, so that a counterexample is a shortest one.

use super::model::{Action, Event, Property, ProtocolModel, State};
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

/// What a search visited.
#[derive(Debug)]
pub struct Explored {
    /// Distinct states.
    pub states: usize,
    /// Steps between states.
    pub steps: usize,
    /// The length of the longest shortest history.
    pub depth: usize,
    /// How many opens met each event.
    pub events: BTreeMap<Event, usize>,
}

/// A history that breaks a property.
#[derive(Debug)]
pub struct Counterexample {
    /// The property.
    pub property: Property,
    /// The actions that lead to it, one a line.
    pub history: String,
    /// How many states were visited before it.
    pub states: usize,
}

/// A state, the number of the state before it, the action between them, and its depth.
struct Visited {
    state: State,
    before: usize,
    action: Option<Action>,
    depth: usize,
}

/// The states that were reached, in order.
#[derive(Default)]
struct States {
    list: Vec<Visited>,
    /// Numbers of states by the hash of the state. States are compared, so equal hashes hide nothing.
    known: HashMap<u64, Vec<u32>>,
}

impl States {
    fn add(&mut self, visited: Visited) {
        let mut hasher = DefaultHasher::new();
        visited.state.hash(&mut hasher);
        let same = self.known.entry(hasher.finish()).or_default();
        if same.iter().all(|number| self.list[*number as usize].state != visited.state) {
            same.push(self.list.len() as u32);
            self.list.push(visited);
        }
    }

    /// Returns the actions that lead to a state and then `last`, one a line.
    fn history(&self, mut at: usize, last: Action) -> String {
        let mut actions = vec![last.to_string()];
        while let Visited { before, action: Some(action), .. } = &self.list[at] {
            actions.push(action.to_string());
            at = *before;
        }
        actions.reverse();
        actions.join("\n")
    }
}

/// Visits every state of the model.
///
/// # Errors
/// The first history that breaks a property. No shorter one does.
pub fn explore(model: &ProtocolModel) -> Result<Explored, Box<Counterexample>> {
    let mut states = States::default();
    states.add(Visited { state: model.initial(), before: 0, action: None, depth: 0 });
    let mut explored = Explored { states: 0, steps: 0, depth: 0, events: BTreeMap::new() };
    let (mut at, mut next) = (0, Vec::new());
    while at < states.list.len() {
        let Visited { state, depth, .. } = &states.list[at];
        let depth = *depth;
        explored.depth = depth;
        if let Err((property, action)) = model.next(state, &mut next, &mut explored.events) {
            let history = states.history(at, action);
            return Err(Box::new(Counterexample { property, history, states: states.list.len() }));
        }
        explored.steps += next.len();
        for (action, state) in next.drain(..) {
            states.add(Visited { state, before: at, action: Some(action), depth: depth + 1 });
        }
        at += 1;
    }
    explored.states = states.list.len();
    Ok(explored)
}
