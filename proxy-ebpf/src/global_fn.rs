//! BPF global functions. The verifier follows each of them once for a program and any arguments, and not once for every call
//! with all that is known there. So its work does not multiply with that of their callers.
//!
//! To be one, a function must be exported, and take and return numbers, or the context as the kernel calls it.

use aya_ebpf::bindings::__sk_buff;
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::crc32c;

use crate::net::Net;
use crate::skb::Skb;
use crate::{extension, fragment, maps, open};

/// Exports functions under their names.
macro_rules! global_functions {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),+) -> $result:ty $body:block)+) => {
        $(
            $(#[$doc])*
            #[inline(never)]
            // SAFETY: the name begins with `kpx_`, as no symbol of a library does, and each of them is in this list once.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($arg: $type),+) -> $result $body
        )+
    };
}

global_functions! {
    /// Calls [`crc32c::updated`].
    fn kpx_crc32c(crc: u32, diff: u32, len: u32) -> u32 {
        crc32c::updated(crc, diff, len as u16)
    }

    /// Calls [`extension::walk`].
    fn kpx_extensions(skb: *mut __sk_buff, next: u32, at: u32) -> u64 {
        extension::walk(Skb::from_ptr(skb), next as u8, at).0
    }

    /// Calls [`fragment::remember`]; 0.
    fn kpx_remember4(skb: *mut __sk_buff) -> u32 {
        fragment::remember::<Addr4>(Skb::from_ptr(skb));
        0
    }

    /// Calls [`fragment::remember`]; 0.
    fn kpx_remember6(skb: *mut __sk_buff) -> u32 {
        fragment::remember::<Addr6>(Skb::from_ptr(skb));
        0
    }

    /// Calls [`fragment::recall`]; 0 if not found.
    fn kpx_recall4(skb: *mut __sk_buff) -> u32 {
        fragment::recall::<Addr4>(Skb::from_ptr(skb)).into()
    }

    /// Calls [`fragment::recall`]; 0 if not found.
    fn kpx_recall6(skb: *mut __sk_buff) -> u32 {
        fragment::recall::<Addr6>(Skb::from_ptr(skb)).into()
    }

    /// Calls [`fragment::forget`]; 0.
    fn kpx_disown4(skb: *mut __sk_buff) -> u32 {
        fragment::forget::<Addr4>(Skb::from_ptr(skb));
        0
    }

    /// Calls [`fragment::forget`]; 0.
    fn kpx_disown6(skb: *mut __sk_buff) -> u32 {
        fragment::forget::<Addr6>(Skb::from_ptr(skb));
        0
    }

    /// Calls [`fragment::is_stub_for_service`]; 0 if not.
    fn kpx_stub4(skb: *mut __sk_buff) -> u32 {
        fragment::is_stub_for_service::<Addr4>(Skb::from_ptr(skb)).into()
    }

    /// Calls [`fragment::is_stub_for_service`]; 0 if not.
    fn kpx_stub6(skb: *mut __sk_buff) -> u32 {
        fragment::is_stub_for_service::<Addr6>(Skb::from_ptr(skb)).into()
    }

    /// Calls [`open::forget_first`], which spares streams unless `spares` is 0; 0 if that one stays.
    fn kpx_forget4(spares: u32) -> u32 {
        forget_first::<Addr4>(spares).into()
    }

    /// Calls [`open::forget_first`], which spares streams unless `spares` is 0; 0 if that one stays.
    fn kpx_forget6(spares: u32) -> u32 {
        forget_first::<Addr6>(spares).into()
    }
}

#[inline(always)]
fn forget_first<A: Net>(spares: u32) -> bool {
    // SAFETY: only the two functions above call this, for a family each, and hooks call those: they are tc programs.
    unsafe { maps::eviction::<A>() }.is_some_and(|eviction| open::forget_first(eviction, spares != 0))
}
