//! Values in the memory of maps.

use core::ptr::{NonNull, copy_nonoverlapping};

use aya_ebpf::maps::{Array, HashMap, LruHashMap, PerCpuArray};

/// A value in the memory of a map. Programs on other CPUs and the agent may write it at any time.
///
/// So a copy may have an old half and a new half, and one of two updates may be lost. Every bit
/// pattern is a valid value in these maps, and the callers document the cost of such a mix.
#[repr(transparent)]
pub struct Live<V>(pub(super) NonNull<V>);

/// A map that finds the memory of a value. The pointers come from the kernel's look-up, and only
/// this module creates a [`Live`].
pub trait Find<K, V> {
    /// Looks up a key inline, for the most frequent look-ups.
    fn find_here(&self, key: &K) -> Option<Live<V>>;

    /// Looks up a key by one function for all maps of this type: for each inlined look-up in a
    /// program the kernel moves all instructions behind it.
    #[inline(never)]
    fn find(&self, key: &K) -> Option<Live<V>> {
        self.find_here(key)
    }
}

impl<K, V> Find<K, V> for HashMap<K, V> {
    #[inline(always)]
    fn find_here(&self, key: &K) -> Option<Live<V>> {
        self.get_ptr_mut(key).and_then(NonNull::new).map(Live)
    }
}

impl<K, V> Find<K, V> for LruHashMap<K, V> {
    #[inline(always)]
    fn find_here(&self, key: &K) -> Option<Live<V>> {
        self.get_ptr_mut(key).and_then(NonNull::new).map(Live)
    }
}

impl<V> Find<u32, V> for Array<V> {
    #[inline(always)]
    fn find_here(&self, key: &u32) -> Option<Live<V>> {
        self.get_ptr_mut(*key).and_then(NonNull::new).map(Live)
    }
}

impl<V> Find<u32, V> for PerCpuArray<V> {
    #[inline(always)]
    fn find_here(&self, key: &u32) -> Option<Live<V>> {
        self.get_ptr_mut(*key).and_then(NonNull::new).map(Live)
    }
}

impl<V: Copy> Live<V> {
    #[inline(always)]
    pub fn copy(&self) -> V {
        // SAFETY: the kernel found this memory for a `V`, and frees none of a map before the
        // program has ended.
        unsafe { self.0.read() }
    }

    /// Copies the value to memory of the program. (For an assignment the compiler would allow for
    /// an overlap, and copy byte by byte.)
    #[inline(always)]
    pub fn copy_to(&self, to: &mut V) {
        // SAFETY: both are a whole `V`, and `to` is a unique reference. They do not overlap: a row
        // that is copied by this method is never borrowed.
        unsafe { copy_nonoverlapping(self.0.as_ptr(), to, 1) };
    }

    /// Reads a part of the value, without a copy of the rest.
    #[inline(always)]
    pub fn read<T: Copy>(&self, part: impl FnOnce(&V) -> T) -> T {
        // SAFETY: the memory is a `V` until the program has ended. The reference ends with `part`,
        // which only loads integers: each load is whole, even if another CPU writes the integer.
        part(unsafe { self.0.as_ref() })
    }

    #[inline(always)]
    pub fn set(&self, value: V) {
        // SAFETY: the memory is a `V` until the program has ended, and no reference into it
        // outlives `Self::read`.
        unsafe { self.0.write(value) };
    }

    /// Replaces the value by the result of `change`, without a lock. Returns the previous value.
    #[inline(always)]
    pub fn update(&self, change: impl FnOnce(V) -> V) -> V {
        let before = self.copy();
        self.set(change(before));
        before
    }

    /// Writes the value after the earlier writes of this method, as another program on this CPU
    /// sees them.
    #[inline(always)]
    pub fn set_in_order(&self, value: V) {
        // SAFETY: the kernel found this memory for a `V`, and frees none of a map before the
        // program has ended.
        unsafe { self.0.write_volatile(value) };
    }
}

impl<V: Copy, const N: usize> Live<[V; N]> {
    /// Returns an element. Returns `None` if the index is too large.
    #[inline(always)]
    pub fn at(&self, index: usize) -> Option<Live<V>> {
        // SAFETY: the index is within the array.
        (index < N).then(|| Live(unsafe { self.0.cast::<V>().add(index) }))
    }
}

/// A part of a live value: `part!(live.field)`.
macro_rules! part {
    ($live:ident.$($field:ident).+) => {
        // SAFETY: the kernel found this memory for the whole value, and the place is a field of it.
        // No reference is made.
        $crate::maps::live::Live(unsafe {
            core::ptr::NonNull::new_unchecked(&raw mut (*$live.0.as_ptr()).$($field).+)
        })
    };
}
pub(super) use part;
