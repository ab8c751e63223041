//! Functions that the verifier follows apart: global ones, once for each program and for any arguments, instead of once for
//! every call and all that may be known there. So their work does not multiply with that of their callers.
//!
//! To be one, a function must be exported, and take and return numbers, or the context as the kernel calls it.

use aya_ebpf::bindings::__sk_buff;
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::crc32c;

use crate::skb::Skb;
use crate::{extension, fragment, open};

/// As [`crc32c::updated`].
#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn kpx_crc32c(crc: u32, diff: u32, len: u32) -> u32 {
    crc32c::updated(crc, diff, len as u16)
}

/// As [`extension::walk`].
#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn kpx_extensions(skb: *mut __sk_buff, next: u32, at: u32) -> u64 {
    extension::walk(Skb::from_ptr(skb), next as u8, at).0
}

/// As [`fragment::remember`]; 0.
#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn kpx_remember4(skb: *mut __sk_buff) -> u32 {
    fragment::remember::<Addr4>(Skb::from_ptr(skb));
    0
}

#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn kpx_remember6(skb: *mut __sk_buff) -> u32 {
    fragment::remember::<Addr6>(Skb::from_ptr(skb));
    0
}

/// As [`fragment::recall`]; 0 if not found.
#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn kpx_recall4(skb: *mut __sk_buff) -> u32 {
    fragment::recall::<Addr4>(Skb::from_ptr(skb)).into()
}

#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn kpx_recall6(skb: *mut __sk_buff) -> u32 {
    fragment::recall::<Addr6>(Skb::from_ptr(skb)).into()
}

/// As [`fragment::forget`]; 0.
#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn kpx_disown4(skb: *mut __sk_buff) -> u32 {
    fragment::forget::<Addr4>(Skb::from_ptr(skb));
    0
}

#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn kpx_disown6(skb: *mut __sk_buff) -> u32 {
    fragment::forget::<Addr6>(Skb::from_ptr(skb));
    0
}

/// As [`open::forget_first`], which spares streams unless `spares` is 0; 0 if that one stays.
#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn kpx_forget4(spares: u32) -> u32 {
    open::forget_first::<Addr4>(spares != 0).into()
}

#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn kpx_forget6(spares: u32) -> u32 {
    open::forget_first::<Addr6>(spares != 0).into()
}
