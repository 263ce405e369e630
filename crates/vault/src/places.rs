//! What is known of containers. A container is of its machine, whatever its number: peers choose theirs.

use std::collections::BTreeMap;

use crate::container::ContainerId;
use crate::names::Machine;

/// Something of each container.
pub(crate) struct ByContainer<T>(BTreeMap<Machine, BTreeMap<ContainerId, T>>);

/// The newest generation of each container, with its length.
pub(crate) type Places = ByContainer<(u32, u64)>;

impl<T> Default for ByContainer<T> {
    fn default() -> Self {
        ByContainer(BTreeMap::new())
    }
}

impl<T> ByContainer<T> {
    pub(crate) fn get(&self, machine: &Machine, id: ContainerId) -> Option<&T> {
        self.0.get(machine)?.get(&id)
    }

    pub(crate) fn get_mut(&mut self, machine: &Machine, id: ContainerId) -> Option<&mut T> {
        self.0.get_mut(machine)?.get_mut(&id)
    }

    /// The one of a container, which is made if there is none.
    pub(crate) fn of(
        &mut self,
        machine: &Machine,
        id: ContainerId,
        new: impl FnOnce() -> T,
    ) -> &mut T {
        if !self.0.contains_key(machine) {
            self.0.insert(machine.clone(), BTreeMap::new());
        }
        let of = self.0.get_mut(machine).expect("it was added");
        of.entry(id).or_insert_with(new)
    }

    pub(crate) fn insert(&mut self, machine: &Machine, id: ContainerId, what: T) {
        self.remove(machine, id);
        self.of(machine, id, || what);
    }

    pub(crate) fn remove(&mut self, machine: &Machine, id: ContainerId) {
        if let Some(of) = self.0.get_mut(machine) {
            of.remove(&id);
        }
    }

    /// In the order of machines, then of numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Machine, ContainerId, &T)> {
        let of = self.0.iter();
        of.flat_map(|(machine, of)| of.iter().map(move |(id, what)| (machine, *id, what)))
    }
}
