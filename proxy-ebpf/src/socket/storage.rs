//! Values that the kernel stores with a TCP socket, and frees with it.
//!
//! The kernel calls the programs that write them while it holds the socket's lock.

use core::ptr::{from_ref, null_mut};

use aya_ebpf::bindings::{BPF_SK_STORAGE_GET_F_CREATE, bpf_sock};
use aya_ebpf::btf_maps::SkStorage;
use aya_ebpf::helpers::generated::{bpf_sk_storage_delete, bpf_sk_storage_get};

/// Stores a value, if the kernel has memory for it.
#[inline(always)]
pub fn set<T: Copy>(storage: &'static SkStorage<T>, sock: *mut bpf_sock, value: &T) {
    let place = place(storage, sock, BPF_SK_STORAGE_GET_F_CREATE);
    if !place.is_null() {
        // SAFETY: the storage lives as long as the socket, and only a call under its lock writes it.
        unsafe { place.write(*value) };
    }
}

/// Returns a copy of the value; `None` if there is none.
#[inline(always)]
pub fn get<T: Copy>(storage: &'static SkStorage<T>, sock: *mut bpf_sock) -> Option<T> {
    // SAFETY: the helper returns null, or a value that lives as long as the socket.
    unsafe { place(storage, sock, 0).as_ref() }.copied()
}

/// Frees a value, if there is one.
#[inline(always)]
pub fn clear<T>(storage: &'static SkStorage<T>, sock: *mut bpf_sock) {
    // SAFETY: the kernel lends the socket for the program's whole run. An error means that there is
    // nothing to free.
    let _cleared = unsafe { bpf_sk_storage_delete(map(storage), sock.cast()) };
}

#[inline(always)]
fn place<T>(storage: &'static SkStorage<T>, sock: *mut bpf_sock, flags: u32) -> *mut T {
    // SAFETY: the kernel lends the socket for the program's whole run.
    unsafe { bpf_sk_storage_get(map(storage), sock.cast(), null_mut(), flags.into()) }.cast()
}

/// Returns the map as helpers take it: the loader replaces the static's address.
#[inline(always)]
fn map<T>(storage: &'static SkStorage<T>) -> *mut core::ffi::c_void {
    from_ref(storage).cast_mut().cast()
}
