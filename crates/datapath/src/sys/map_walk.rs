//! Reads and writes a kernel hash map in batches (`BPF_MAP_LOOKUP_BATCH` and similar commands,
//! Linux 5.6), which aya does not support.
//!
//! An iteration by keys restarts whenever the current key is deleted. An iteration in batches
//! proceeds from bucket to bucket, so it ends, and returns each entry that stays in the map at most
//! once.

use std::io::{Error, ErrorKind, Result};
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use aya::Pod;
use aya::maps::MapData;

/// An iteration over a hash map, with buffers for a batch.
#[derive(Debug)]
pub(crate) struct Walk<K, V> {
    map: OwnedFd,
    keys: Vec<K>,
    values: Vec<V>,
    at: At,
}

/// The position of an iteration, in the kernel's numbering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Start,
    Bucket(u32),
    End,
}

impl<K: Pod, V: Pod> Walk<K, V> {
    /// Returns an iteration in batches of up to `len` entries, or more if a bucket holds more.
    pub(crate) fn new(map: &MapData, len: usize) -> Result<Self> {
        Ok(Self::of(open::<K, V>(map)?, len))
    }

    fn of(map: OwnedFd, len: usize) -> Self {
        let mut walk = Self {
            map,
            keys: Vec::new(),
            values: Vec::new(),
            at: At::Start,
        };
        walk.make_room(len.max(1));
        walk
    }

    pub(crate) fn restart(&mut self) {
        self.at = At::Start;
    }

    /// Returns the next batch; `None` after the last batch.
    pub(crate) fn next_batch(
        &mut self,
    ) -> Result<Option<impl Iterator<Item = (K, V)> + use<'_, K, V>>> {
        let Some(len) = self.read()? else {
            return Ok(None);
        };
        let keys = &self.keys[..len];
        let values = &self.values[..len];
        Ok(Some(keys.iter().copied().zip(values.iter().copied())))
    }

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
                // The kernel stopped at a locked bucket after reading the entries before it.
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

    /// Makes one call. Returns its result, the next position, and the number of entries read.
    fn ask(&mut self) -> (Result<()>, At, usize) {
        let (from, mut to) = match self.at {
            At::Bucket(bucket) => (Some(bucket), 0_u32),
            _ => (None, 0),
        };
        let mut batch = Batch {
            in_batch: from
                .as_ref()
                .map_or(0, |from| address(std::ptr::from_ref(from))),
            out_batch: address(&raw mut to),
            keys: address(self.keys.as_mut_ptr()),
            values: address(self.values.as_mut_ptr()),
            count: self.keys.len() as u32,
            map_fd: self.map.as_raw_fd().cast_unsigned(),
            ..Batch::default()
        };
        // SAFETY: the kernel reads and writes `from` and `to`, which outlive the call. The kernel
        // writes at most `count` keys and values. Their sizes are the map's and those of `K` and
        // `V`, and any bits are a valid `Pod`.
        let result = unsafe { batch.call(LOOKUP_BATCH) };
        (
            result,
            At::Bucket(to),
            (batch.count as usize).min(self.keys.len()),
        )
    }

    fn make_room(&mut self, len: usize) {
        // SAFETY: any bits are a valid `Pod`.
        let (key, value) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        self.keys.resize(len, key);
        self.values.resize(len, value);
    }
}

#[derive(Debug)]
pub(crate) struct Rows<K, V> {
    map: OwnedFd,
    row: PhantomData<(K, V)>,
}

/// A batch that stopped at a refused row.
#[derive(Debug)]
pub(crate) struct Stopped {
    /// The number of rows written before the refused row; 0 if the kernel does not support batches.
    pub done: usize,
    pub error: Error,
}

impl<K: Pod, V: Pod> Rows<K, V> {
    pub(crate) fn new(map: &MapData) -> Result<Self> {
        Ok(Self {
            map: open::<K, V>(map)?,
            row: PhantomData,
        })
    }

    /// Returns an iteration over this map: see [`Walk::new`].
    pub(crate) fn walk(&self, len: usize) -> Result<Walk<K, V>> {
        Ok(Walk::of(self.map.try_clone()?, len))
    }

    pub(crate) fn map(&self) -> Result<OwnedFd> {
        self.map.try_clone()
    }

    /// Writes rows in order, replacing rows with the same key. Surplus keys or values are ignored.
    pub(crate) fn put(&mut self, keys: &[K], values: &[V]) -> std::result::Result<(), Stopped> {
        let len = keys.len().min(values.len());
        self.write(UPDATE_BATCH, &keys[..len], Some(&values[..len]))
    }

    /// Deletes rows in order. A missing row stops the batch.
    pub(crate) fn delete(&mut self, keys: &[K]) -> std::result::Result<(), Stopped> {
        self.write(DELETE_BATCH, keys, None)
    }

    /// Runs a command on the keys, with one value per key if there are values.
    fn write(
        &mut self,
        command: libc::c_int,
        keys: &[K],
        values: Option<&[V]>,
    ) -> std::result::Result<(), Stopped> {
        let count = u32::try_from(keys.len()).map_err(|error| Stopped {
            done: 0,
            error: Error::other(error),
        })?;
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
        // SAFETY: the kernel reads `count` keys, and as many values where the command takes values.
        // All of them outlive the call and have the map's sizes.
        let result = unsafe { batch.call(command) };
        // After an error before the first row, the kernel may leave the count unchanged.
        let done = if batch.count < count {
            batch.count as usize
        } else {
            0
        };
        result.map_err(|error| Stopped { done, error })
    }
}

/// Returns the map's descriptor, or an error if the sizes of `K` and `V` differ from the map's.
fn open<K: Pod, V: Pod>(map: &MapData) -> Result<OwnedFd> {
    let info = map.info().map_err(Error::other)?;
    let sizes = (info.key_size() as usize, info.value_size() as usize);
    if sizes != (size_of::<K>(), size_of::<V>()) {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!("keys and values are of {sizes:?} bytes"),
        ));
    }
    map.fd().as_fd().try_clone_to_owned()
}

fn address<T>(pointer: *const T) -> u64 {
    pointer.addr() as u64
}

/// The maximum number of retries of a call that finds its first bucket locked.
const TRIES: u32 = 100;

// The commands of linux/bpf.h: BPF_MAP_LOOKUP_BATCH, BPF_MAP_UPDATE_BATCH, BPF_MAP_DELETE_BATCH.
const LOOKUP_BATCH: libc::c_int = 24;
const UPDATE_BATCH: libc::c_int = 26;
const DELETE_BATCH: libc::c_int = 27;

/// The part of `union bpf_attr` for the batch commands.
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
    /// The memory that the command reads and writes must be at the addresses in `self`, and must
    /// outlive the call.
    unsafe fn call(&mut self, command: libc::c_int) -> Result<()> {
        // SAFETY: the kernel reads and writes `self`, and the memory that the caller vouches for.
        let result =
            unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *self, size_of::<Self>()) };
        if result == 0 {
            Ok(())
        } else {
            Err(Error::last_os_error())
        }
    }
}
