//! The machine: a WebAssembly instance whose linear memory is a region, and whose disk is a block device.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use drover_core::BlockDevice;
use drover_frontend::region::Region;
use wasmtime::{
    Caller, Config, Engine, Extern, Global, LinearMemory, Linker, MemoryCreator, MemoryType,
    Module, Store, TypedFunc, Val,
};

/// Size of its memory in bytes, as the module declares it.
pub const MEMORY: u64 = 1024 * 65_536;
/// Size of its disk in bytes: 1024 blocks.
pub const DISK: u64 = 1024 * BLOCK;
const BLOCK: u64 = 4096;

/// A region as linear memory.
struct RegionMemory(Arc<Region>);

// SAFETY: the region is page-aligned, does not move, and is of exactly the size that the module declares; the engine checks
// bounds explicitly, so that there need be no guard. Others only read it, whole words, while the machine runs (the seeder);
// it is written by others only before the machine runs (the leecher), and absent pages are filled by the kernel.
unsafe impl LinearMemory for RegionMemory {
    fn byte_size(&self) -> usize {
        self.0.len()
    }

    fn byte_capacity(&self) -> usize {
        self.0.len()
    }

    fn grow_to(&mut self, new_size: usize) -> wasmtime::Result<()> {
        if new_size > self.0.len() {
            return Err(wasmtime::Error::msg(
                "the memory of this machine does not grow",
            ));
        }
        Ok(())
    }

    fn as_ptr(&self) -> *mut u8 {
        self.0.as_mut_ptr().unwrap_or(std::ptr::null_mut())
    }
}

/// Gives the one memory of a machine.
struct Creator(Arc<Region>);

// SAFETY: each engine has its own creator, and its module one memory.
unsafe impl MemoryCreator for Creator {
    fn new_memory(
        &self,
        _: MemoryType,
        minimum: usize,
        _: Option<usize>,
        _: Option<usize>,
        guard: usize,
    ) -> Result<Box<dyn LinearMemory>, String> {
        if minimum != self.0.len() || guard != 0 || self.0.as_mut_ptr().is_none() {
            return Err("the module's memory has another size than the region".to_owned());
        }
        Ok(Box::new(RegionMemory(Arc::clone(&self.0))))
    }
}

/// A machine between two slices of its run.
pub struct Machine {
    store: Store<Arc<dyn BlockDevice>>,
    run: TypedFunc<i32, i64>,
    check: TypedFunc<(), i64>,
    /// What it has outside of its memory.
    random: Global,
}

impl Machine {
    /// A machine over this memory, which is not touched, and this disk.
    pub fn new(region: Arc<Region>, disk: Arc<dyn BlockDevice>) -> Result<Self> {
        ensure!(region.len() as u64 == MEMORY, "the memory has another size");
        let mut config = Config::new();
        // Images of memory are mapped into it, over the region; and bounds are checked, since there are no guards.
        config.memory_init_cow(false);
        config.memory_reservation(0);
        config.memory_guard_size(0);
        config.memory_may_move(false);
        config.signals_based_traps(false);
        config.with_host_memory(Arc::new(Creator(region)));
        let engine = Engine::new(&config).map_err(said)?;
        let module = Module::new(&engine, include_str!("machine.wat"));
        let module = module.map_err(said)?;
        let mut linker = Linker::new(&engine);
        link(&mut linker).map_err(said)?;
        let mut store = Store::new(&engine, disk);
        let instance = linker.instantiate(&mut store, &module);
        let instance = instance.map_err(said)?;
        let run = instance.get_typed_func(&mut store, "run");
        let check = instance.get_typed_func(&mut store, "check");
        let random = instance.get_global(&mut store, "random");
        Ok(Self {
            run: run.map_err(said)?,
            check: check.map_err(said)?,
            random: random.context("it has no state")?,
            store,
        })
    }

    /// Runs for some steps; what it has counted then.
    pub fn run(&mut self, steps: i32) -> Result<i64> {
        let ran = self.run.call(&mut self.store, steps);
        ran.map_err(said)
    }

    /// How many pages and blocks are not as it wrote them last.
    pub fn check(&mut self) -> Result<i64> {
        let checked = self.check.call(&mut self.store, ());
        checked.map_err(said)
    }

    /// What it has outside of its memory.
    pub fn state(&mut self) -> Vec<u8> {
        let random = self.random.get(&mut self.store).i64().unwrap_or_default();
        random.to_le_bytes().to_vec()
    }

    /// Takes it over from another one.
    pub fn set_state(&mut self, state: &[u8]) -> Result<()> {
        let random = state.try_into().context("it has another state")?;
        let random = Val::I64(i64::from_le_bytes(random));
        let set = self.random.set(&mut self.store, random);
        set.map_err(said)
    }
}

fn said(error: wasmtime::Error) -> anyhow::Error {
    anyhow!("{error:?}")
}

fn link(linker: &mut Linker<Arc<dyn BlockDevice>>) -> wasmtime::Result<()> {
    linker.func_wrap("host", "disk_write", disk_write)?;
    linker.func_wrap("host", "disk_read", disk_read)?;
    Ok(())
}

type Call<'a> = Caller<'a, Arc<dyn BlockDevice>>;

/// The bytes of a block's size at an address of the machine.
fn at<'a>(caller: &'a mut Call<'_>, address: i32) -> wasmtime::Result<&'a mut [u8]> {
    let Some(Extern::Memory(memory)) = caller.get_export("memory") else {
        return Err(wasmtime::Error::msg("it has no memory"));
    };
    let start = address as u32 as usize;
    let bytes = memory.data_mut(caller).get_mut(start..);
    let bytes = bytes.and_then(|bytes| bytes.get_mut(..BLOCK as usize));
    bytes.ok_or_else(|| wasmtime::Error::msg("an address outside of its memory"))
}

fn disk_write(mut caller: Call<'_>, block: i32, address: i32) -> wasmtime::Result<()> {
    let disk = Arc::clone(caller.data());
    let bytes = at(&mut caller, address)?;
    let written = disk.write(u64::from(block as u32) * BLOCK, bytes);
    written.map_err(|e| wasmtime::Error::msg(e.to_string()))
}

fn disk_read(mut caller: Call<'_>, block: i32, address: i32) -> wasmtime::Result<()> {
    let disk = Arc::clone(caller.data());
    let bytes = at(&mut caller, address)?;
    let read = disk.read(u64::from(block as u32) * BLOCK, bytes);
    read.map_err(|e| wasmtime::Error::msg(e.to_string()))
}
