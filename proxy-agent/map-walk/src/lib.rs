//! Reads and writes a hash map of the kernel in batches (`BPF_MAP_LOOKUP_BATCH` and its like, Linux 5.6), which aya has no
//! calls for: one for many entries.
//!
//! Key by key, a walk starts over whenever the key is deleted that it stands at. By batches it goes from bucket to bucket:
//! it ends, and meets nothing twice that stays.

use std::io::{Error, ErrorKind, Result};
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use aya::Pod;
use aya::maps::MapData;

/// A walk through a hash map, and the memory that it takes: as much for any map.
#[derive(Debug)]
pub struct Walk<K, V> {
    map: OwnedFd,
    keys: Vec<K>,
    values: Vec<V>,
    at: At,
}

/// Where a walk goes on: the kernel's own number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Start,
    Bucket(u32),
    End,
}

impl<K: Pod, V: Pod> Walk<K, V> {
    /// A walk in batches of up to `len` entries; longer ones where a bucket is fuller.
    pub fn new(map: &MapData, len: usize) -> Result<Self> {
        Ok(Self::of(open::<K, V>(map)?, len))
    }

    fn of(map: OwnedFd, len: usize) -> Self {
        let mut walk = Self { map, keys: Vec::new(), values: Vec::new(), at: At::Start };
        walk.make_room(len.max(1));
        walk
    }

    /// The next batch begins from the start.
    pub fn restart(&mut self) {
        self.at = At::Start;
    }

    /// The next batch; none after the last one.
    pub fn next_batch(&mut self) -> Result<Option<impl Iterator<Item = (K, V)> + use<'_, K, V>>> {
        let Some(len) = self.read()? else { return Ok(None) };
        let (keys, values) = (&self.keys[..len], &self.values[..len]);
        Ok(Some(keys.iter().copied().zip(values.iter().copied())))
    }

    /// How many were read.
    fn read(&mut self) -> Result<Option<usize>> {
        let mut tries = 0;
        while self.at != At::End {
            let (result, at, len) = self.ask();
            let Err(error) = result else {
                self.at = at;
                return Ok(Some(len));
            };
            match error.raw_os_error() {
                Some(libc::ENOENT) => {
                    self.at = At::End;
                    return Ok(Some(len));
                }
                Some(libc::ENOSPC) if len == 0 => self.make_room(self.keys.len() * 2),
                // A bucket was locked: what came before it was read.
                Some(libc::EBUSY | libc::EAGAIN | libc::EINTR) if len > 0 => {
                    self.at = at;
                    return Ok(Some(len));
                }
                Some(libc::EBUSY | libc::EAGAIN | libc::EINTR) if tries < TRIES => tries += 1,
                _ => return Err(error),
            }
        }
        Ok(None)
    }

    /// One call: where the next one goes on, and how many were read.
    fn ask(&mut self) -> (Result<()>, At, usize) {
        let (from, mut to) = match self.at {
            At::Bucket(bucket) => (Some(bucket), 0_u32),
            _ => (None, 0),
        };
        let mut batch = Batch {
            in_batch: from.as_ref().map_or(0, |from| address(std::ptr::from_ref(from))),
            out_batch: address(&raw mut to),
            keys: address(self.keys.as_mut_ptr()),
            values: address(self.values.as_mut_ptr()),
            count: self.keys.len() as u32,
            map_fd: self.map.as_raw_fd().cast_unsigned(),
            ..Batch::default()
        };
        // SAFETY: the kernel reads and writes `from` and `to`, which live on, and writes at most `count` keys and values of
        // the map's sizes, which are those of `K` and `V`: any bits are a `Pod`.
        let result = unsafe { batch.call(LOOKUP_BATCH) };
        (result, At::Bucket(to), (batch.count as usize).min(self.keys.len()))
    }

    fn make_room(&mut self, len: usize) {
        // SAFETY: any bits are a `Pod`.
        let (key, value) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        self.keys.resize(len, key);
        self.values.resize(len, value);
    }
}

/// A hash map that is written in batches.
#[derive(Debug)]
pub struct Rows<K, V> {
    map: OwnedFd,
    row: PhantomData<(K, V)>,
}

/// A batch that came to a row at which it could not go on.
#[derive(Debug)]
pub struct Stopped {
    /// Rows before that one, all of which were written; none where the kernel takes no batches.
    pub done: usize,
    pub error: Error,
}

impl<K: Pod, V: Pod> Rows<K, V> {
    pub fn new(map: &MapData) -> Result<Self> {
        Ok(Self { map: open::<K, V>(map)?, row: PhantomData })
    }

    /// A walk through this map: see [`Walk::new`].
    pub fn walk(&self, len: usize) -> Result<Walk<K, V>> {
        Ok(Walk::of(self.map.try_clone()?, len))
    }

    /// Writes rows in their order, each in place of one with the same key: as many as there are both keys and values.
    pub fn put(&mut self, keys: &[K], values: &[V]) -> std::result::Result<(), Stopped> {
        let len = keys.len().min(values.len());
        self.write(UPDATE_BATCH, &keys[..len], Some(&values[..len]))
    }

    /// Deletes rows in their order. One that is not there stops it.
    pub fn delete(&mut self, keys: &[K]) -> std::result::Result<(), Stopped> {
        self.write(DELETE_BATCH, keys, None)
    }

    /// As many values as keys, where there are any.
    fn write(&mut self, command: libc::c_int, keys: &[K], values: Option<&[V]>) -> std::result::Result<(), Stopped> {
        let count = u32::try_from(keys.len()).map_err(|error| Stopped { done: 0, error: Error::other(error) })?;
        if count == 0 {
            return Ok(());
        }
        let mut batch = Batch {
            keys: address(keys.as_ptr()),
            values: values.map_or(0, |values| address(values.as_ptr())),
            count,
            map_fd: self.map.as_raw_fd().cast_unsigned(),
            ..Batch::default()
        };
        // SAFETY: the kernel reads `count` keys, and as many values where the command takes any, which all live on and are
        // of the map's sizes.
        let result = unsafe { batch.call(command) };
        // Before it comes to the first row, an error may leave the count as it was.
        let done = if batch.count < count { batch.count as usize } else { 0 };
        result.map_err(|error| Stopped { done, error })
    }
}

/// The map, if its rows are of these types.
fn open<K: Pod, V: Pod>(map: &MapData) -> Result<OwnedFd> {
    let info = map.info().map_err(Error::other)?;
    let sizes = (info.key_size() as usize, info.value_size() as usize);
    if sizes != (size_of::<K>(), size_of::<V>()) {
        return Err(Error::new(ErrorKind::InvalidInput, format!("keys and values are of {sizes:?} bytes")));
    }
    map.fd().as_fd().try_clone_to_owned()
}

fn address<T>(pointer: *const T) -> u64 {
    pointer.addr() as u64
}

/// Times that a call is repeated which met a locked bucket first.
const TRIES: u32 = 100;

// Commands of linux/bpf.h: BPF_MAP_LOOKUP_BATCH and its like.
const LOOKUP_BATCH: libc::c_int = 24;
const UPDATE_BATCH: libc::c_int = 26;
const DELETE_BATCH: libc::c_int = 27;

/// The part of `union bpf_attr` that is these commands' own.
#[derive(Default)]
#[repr(C)]
struct Batch {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

impl Batch {
    /// # Safety
    ///
    /// What the command reads and writes is at the addresses that `self` names, and lives on.
    unsafe fn call(&mut self, command: libc::c_int) -> Result<()> {
        // SAFETY: the kernel reads and writes `self`, and what the caller vouches for.
        let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *self, size_of::<Self>()) };
        if result == 0 { Ok(()) } else { Err(Error::last_os_error()) }
    }
}
