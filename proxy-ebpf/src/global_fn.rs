//! BPF global functions. The verifier checks each function once per program, for arbitrary
//! arguments, instead of once per call with the caller's register state. So its work does not
//! multiply with the number of calls.
//!
//! The kernel requires such a function to be exported, to take only integers or the context
//! (`__sk_buff`), and to return an integer. [`global_fn`] makes one of any function whose arguments
//! and result are [`InRegister`].

use aya_ebpf::bindings::__sk_buff;
use proxy_common::addr::Port;
use proxy_common::connect::PortsAndOutcome;
use proxy_common::counter::Reason;
use proxy_common::flow::Hook;
use proxy_common::hook::HookId;
use proxy_common::share::PortAndShare;
use proxy_macros::global_fn;

use crate::extension::ExtHeaders;
use crate::maps::{self, Closing, Eviction, Memory, Moment};
use crate::net::Net;
use crate::open::Claim;
use crate::outcome::{Action, Outcome};
use crate::packet::Reading;
use crate::redirect::{Delivery, Known};
use crate::reject::Exit;
use crate::ring::Ring;
use crate::skb::{LinkHeader, PacketMark, Skb};

/// An argument or the result of a global function.
pub trait InRegister {
    type Register;
    fn into_register(self) -> Self::Register;
    fn from_register(register: Self::Register) -> Self;
}

macro_rules! in_register {
    ($($type:ty: $register:ty, $value:ident => $into:expr, $from:expr;)+) => {
        $(impl InRegister for $type {
            type Register = $register;

            #[inline(always)]
            fn into_register(self) -> $register {
                let $value = self;
                $into
            }

            #[inline(always)]
            fn from_register($value: $register) -> Self {
                $from
            }
        })+
    };
}

in_register! {
    (): u32, _value => 0, ();
    u8: u32, value => value.into(), value as u8;
    u16: u32, value => value.into(), value as u16;
    u32: u32, value => value, value;
    u64: u64, value => value, value;
    bool: u32, value => value.into(), value != 0;
    Skb: *mut __sk_buff, skb => skb.as_ptr(), Self::from_ptr(skb);
    Hook: u32, hook => hook.0.into(), Self(hook as u8);
    HookId: u32, hook => hook.0.into(), Self(hook as u8);
    Reading: u32, reading => reading.0, Self(reading);
    PacketMark: u32, mark => mark.0, Self(mark);
    Ring: u32, ring => ring.0, Self(ring);
    ExtHeaders: u64, headers => headers.0, Self(headers);
    Moment: u64, moment => moment.0, Self(moment);
    PortAndShare: u64, rest => rest.0, Self(rest);
    PortsAndOutcome: u64, ports => ports.0, Self(ports);
    Action: i32, action => action.0, Self(action);
    Outcome: i32, outcome => outcome.0, Self(outcome);
    Known: u32, known => known.0, Self(known);
    Delivery: i32, delivery => delivery.0, Self(delivery);
    Result<(), Reason>: i32, result => Outcome::of_number(result.map(|()| 0)).0,
        Outcome(result).number().map(drop);
    Result<bool, Reason>: i32, result => Outcome::of_number(result.map(i32::from)).0,
        Outcome(result).number().map(|number| number != 0);
    // Every ring is shorter than `u32::MAX`, which stands for no place.
    Option<u32>: u32, place => place.unwrap_or(u32::MAX),
        if place == u32::MAX { None } else { Some(place) };
    // No port is 0.
    Option<Port>: u32, port => port.map_or(0, |port| port.get().into()),
        if port == 0 { None } else { Some(Port::new(port as u16)) };
}

/// Any number of no variant stands for the last variant.
macro_rules! variant_in_register {
    ($($type:ident: $($variant:ident)|+, else $last:ident;)+) => {
        $(impl InRegister for $type {
            type Register = u32;

            #[inline(always)]
            fn into_register(self) -> u32 {
                self as u32
            }

            #[inline(always)]
            fn from_register(number: u32) -> Self {
                $(if number == Self::$variant as u32 {
                    return Self::$variant;
                })+
                Self::$last
            }
        })+
    };
}

variant_in_register! {
    Claim: Made | Taken | Opened, else Full;
    Exit: Device | Headerless, else Host;
    LinkHeader: None, else Ethernet;
}

/// Returns `value`, which the verifier then assumes to be arbitrary: it checks what follows once
/// instead of once for each value.
#[global_fn(kpx_any)]
pub fn any(value: u32) -> u32 {
    // A volatile read, so that the compiler does not put the argument into the result's place.
    // SAFETY: a reference may be read.
    unsafe { core::ptr::from_ref(&value).read_volatile() }
}

/// Borrows the room for the flow that is closed.
#[inline(always)]
pub fn closing<A: Net>() -> Option<&'static mut Closing<A>> {
    // SAFETY: only `kpx_close4` and `kpx_close6` call this, each for its family, and only tc
    // programs call those. Neither recurses.
    unsafe { maps::closing() }
}

/// Borrows the room for the flow that is evicted.
#[inline(always)]
pub fn eviction<A: Net>() -> Option<&'static mut Eviction<A>> {
    // SAFETY: only `kpx_forget4` and `kpx_forget6` call this, each for its family, and only tc
    // programs call those. Neither recurses.
    unsafe { maps::eviction() }
}

/// Takes the memory of the hook again. For the attribute [`global_fn`] alone, whose functions take it
/// once each, while their callers lend it to them.
#[inline(always)]
pub fn memory() -> Memory<'static> {
    // SAFETY: see above.
    unsafe { Memory::of_hook() }
}
