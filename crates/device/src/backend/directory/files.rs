//! The files of the chunks: which exist, a bounded cache of open ones, and which are not durable yet.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;

use drover_core::DeviceError;
use parking_lot::Mutex;
use roaring::RoaringBitmap;

use super::header;
use crate::remote::Shape;
use drover_storage::{Access, Directory, File, read_exact_at};

/// The files of a device's chunks. Who calls keeps a chunk's file from being made or removed meanwhile.
pub(super) struct Files {
    directory: Arc<dyn Directory>,
    shape: Shape,
    access: Access,
    most_open: usize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// Chunks that have a file.
    present: RoaringBitmap,
    open: HashMap<u32, Open>,
    /// Open files by when they were used last.
    order: BTreeMap<u64, u32>,
    clock: u64,
    /// A file was made or removed since the directory was synced.
    names: bool,
    /// What could not be made durable.
    broken: Option<DeviceError>,
}

struct Open {
    file: Arc<dyn File>,
    used: u64,
    /// Counts changes that are done.
    changed: u64,
    /// How many of them are durable.
    synced: u64,
}

fn name(index: u64) -> String {
    format!("{index:08x}.chunk")
}

fn index_of(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".chunk")?;
    let index = u64::from_str_radix(digits, 16).ok()?;
    // Only the one spelling.
    (self::name(index) == name).then_some(index)
}

/// As the tables count: there are at most [`super::MAX_CHUNKS`].
fn narrow(index: u64) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

impl Table {
    fn touch(&mut self, index: u32) -> Option<Arc<dyn File>> {
        let open = self.open.get_mut(&index)?;
        self.order.remove(&open.used);
        self.clock += 1;
        open.used = self.clock;
        self.order.insert(open.used, index);
        Some(Arc::clone(&open.file))
    }

    fn put(&mut self, index: u32, file: Arc<dyn File>) {
        self.take(index);
        self.clock += 1;
        self.order.insert(self.clock, index);
        let open = Open {
            file,
            used: self.clock,
            changed: 0,
            synced: 0,
        };
        self.open.insert(index, open);
    }

    fn take(&mut self, index: u32) -> Option<Open> {
        let open = self.open.remove(&index)?;
        self.order.remove(&open.used);
        Some(open)
    }

    /// The least recently used file that is not in use.
    fn oldest(&self) -> Option<u32> {
        self.order
            .values()
            .copied()
            .find(|index| Arc::strong_count(&self.open[index].file) == 1)
    }

    fn break_with(&mut self, error: DeviceError) -> DeviceError {
        self.broken.get_or_insert(error).clone()
    }
}

impl Files {
    pub(super) fn scan(
        directory: Arc<dyn Directory>,
        shape: Shape,
        access: Access,
        most_open: usize,
    ) -> Result<Self, DeviceError> {
        let mut present = RoaringBitmap::new();
        let names = directory.list();
        for file in names.map_err(|e| header::at(directory.as_ref(), header::NAME, &e))? {
            match index_of(&file) {
                Some(index) if index < shape.chunks() => {
                    present.insert(narrow(index));
                }
                Some(_) => {
                    return Err(DeviceError::Corrupt(format!(
                        "{}: the device has no such chunk",
                        directory.describe(&file)
                    )));
                }
                None => {}
            }
        }
        Ok(Self {
            directory,
            shape,
            access,
            most_open: most_open.max(1),
            table: Mutex::new(Table {
                present,
                ..Table::default()
            }),
        })
    }

    pub(super) fn has(&self, index: u64) -> bool {
        self.table.lock().present.contains(narrow(index))
    }

    pub(super) fn count(&self) -> u64 {
        self.table.lock().present.len()
    }

    pub(super) fn open_count(&self) -> usize {
        self.table.lock().open.len()
    }

    fn error(&self, index: u64, error: &io::Error) -> DeviceError {
        header::at(self.directory.as_ref(), &name(index), error)
    }

    /// The file of a chunk that has one.
    fn file(&self, index: u64) -> Result<Arc<dyn File>, DeviceError> {
        let mut table = self.table.lock();
        if let Some(file) = table.touch(narrow(index)) {
            return Ok(file);
        }
        let opened = self.directory.open(&name(index), self.access);
        let file: Arc<dyn File> = opened.map_err(|e| self.error(index, &e))?.into();
        let length = u64::from(self.shape.length(index));
        match file.len().map_err(|e| self.error(index, &e))? {
            is if is == length => {}
            // A crash came between its making and its first flush: it holds nothing that anybody was promised.
            0 if self.access == Access::Write => {
                file.set_len(length).map_err(|e| self.error(index, &e))?;
            }
            0 => {}
            is => {
                return Err(DeviceError::Corrupt(format!(
                    "{}: the file has {is} bytes and the chunk {length}",
                    self.directory.describe(&name(index))
                )));
            }
        }
        table.put(narrow(index), Arc::clone(&file));
        drop(table);
        self.close_some();
        Ok(file)
    }

    /// Closes files until there are no more than there may be. One that is not durable is synced before, as nobody
    /// would hear of its errors afterwards; it stays in the table until then, so that a flush finds it. An error is for
    /// the next flush to tell.
    fn close_some(&self) {
        loop {
            let (index, file, seen) = {
                let mut table = self.table.lock();
                if table.open.len() <= self.most_open {
                    return;
                }
                let Some(index) = table.oldest() else {
                    return;
                };
                let open = &table.open[&index];
                if open.changed == open.synced || table.broken.is_some() {
                    table.take(index);
                    continue;
                }
                (index, Arc::clone(&open.file), open.changed)
            };
            let _ = self.sync_file(index, &file, seen);
        }
    }

    fn sync_file(&self, index: u32, file: &Arc<dyn File>, seen: u64) -> Result<(), DeviceError> {
        let done = file.sync();
        let mut table = self.table.lock();
        match done {
            Ok(()) => {
                if let Some(open) = table.open.get_mut(&index)
                    && Arc::ptr_eq(&open.file, file)
                {
                    open.synced = open.synced.max(seen);
                }
                Ok(())
            }
            Err(error) => Err(table.break_with(self.error(u64::from(index), &error))),
        }
    }

    pub(super) fn read(&self, index: u64, buffer: &mut [u8], at: u64) -> Result<(), DeviceError> {
        let file = self.file(index)?;
        let empty = self.access == Access::Read && file.len().is_ok_and(|length| length == 0);
        if empty {
            buffer.fill(0);
            return Ok(());
        }
        read_exact_at(file.as_ref(), buffer, at).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => DeviceError::Corrupt(format!(
                "{}: the file is shorter than its chunk",
                self.directory.describe(&name(index))
            )),
            _ => self.error(index, &error),
        })
    }

    /// Changes the file of a chunk that has one.
    pub(super) fn change(
        &self,
        index: u64,
        change: impl FnOnce(&dyn File) -> io::Result<()>,
    ) -> Result<(), DeviceError> {
        let file = self.file(index)?;
        let done = change(file.as_ref());
        // Also what failed may have changed something. The file is still in the table: it was in use.
        if let Some(open) = self.table.lock().open.get_mut(&narrow(index)) {
            open.changed += 1;
        }
        done.map_err(|error| self.error(index, &error))
    }

    /// Makes the file of a chunk that has none.
    pub(super) fn make(&self, index: u64) -> Result<(), DeviceError> {
        let make = || {
            let file = self.directory.create(&name(index))?;
            file.set_len(u64::from(self.shape.length(index)))?;
            Ok(file)
        };
        let made = make();
        {
            let mut table = self.table.lock();
            // An empty file that could not grow is a chunk of zeros, too.
            table.names = true;
            let file = made.map_err(|error| self.error(index, &error))?;
            table.present.insert(narrow(index));
            table.put(narrow(index), file.into());
            // Its length is not durable.
            if let Some(open) = table.open.get_mut(&narrow(index)) {
                open.changed += 1;
            }
        }
        self.close_some();
        Ok(())
    }

    /// Removes the file of a chunk that has one.
    pub(super) fn remove(&self, index: u64) -> Result<(), DeviceError> {
        let removed = self.directory.remove(&name(index));
        let mut table = self.table.lock();
        table.names = true;
        removed.map_err(|error| self.error(index, &error))?;
        table.present.remove(narrow(index));
        table.take(narrow(index));
        Ok(())
    }

    /// Makes all changes durable that are done, and names that were made and removed. One call at a time.
    pub(super) fn sync(&self) -> Result<(), DeviceError> {
        let (changed, names) = {
            let mut table = self.table.lock();
            if let Some(error) = &table.broken {
                return Err(error.clone());
            }
            let changed: Vec<_> = table
                .open
                .iter()
                .filter(|(_, open)| open.changed > open.synced)
                .map(|(index, open)| (*index, Arc::clone(&open.file), open.changed))
                .collect();
            (changed, std::mem::take(&mut table.names))
        };
        for (index, file, seen) in changed {
            self.sync_file(index, &file, seen)?;
        }
        if names && let Err(error) = self.directory.sync() {
            let error = header::at(self.directory.as_ref(), header::NAME, &error);
            return Err(self.table.lock().break_with(error));
        }
        // A file may have failed while it was being closed.
        match &self.table.lock().broken {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}
