//! BPF global functions. The verifier checks each function once per program, for arbitrary
//! arguments, instead of once per call with the caller's register state. So its work does not
//! multiply with the number of calls.
//!
//! The kernel requires such a function to be exported, to take only integers or the context
//! (`__sk_buff`), and to return an integer.

use aya_ebpf::bindings::__sk_buff;
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::connect::PortsAndOutcome;
use proxy_common::counter::Reason;
use proxy_common::crc32c;
use proxy_common::flow::{FlowKey, Hook};
use proxy_common::hook::HookId;
use proxy_common::share::PortAndShare;

use crate::clock::now_secs;
use crate::maps::{Memory, Moment, Scratch};
use crate::net::{self, At, Net};
use crate::open::Draw;
use crate::outcome::Outcome;
use crate::packet::{self, Reading};
use crate::ring::Ring;
use crate::skb::{PacketMark, Skb};
use crate::{decide, extension, flow, foreign_nat, fragment, ipv6, maps, open, redirect, slow};

/// Stands for "no place": every ring is shorter.
pub const NO_PLACE: u32 = u32::MAX;

/// Exports functions under their names.
macro_rules! global_functions {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty $body:block)+) => {
        $(
            $(#[$doc])*
            #[inline(never)]
            // SAFETY: the name begins with `kpx_`, which no library's symbol does, and each name is
            // in this list once.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($arg: $type),*) -> $result $body
        )+
    };
}

global_functions! {
    /// Returns `value`, which the verifier then assumes to be arbitrary: it checks what follows once
    /// instead of once for each value.
    fn kpx_any(value: u32) -> u32 {
        // A volatile read, so that the compiler does not put the argument into the result's place.
        // SAFETY: a reference may be read.
        unsafe { core::ptr::from_ref(&value).read_volatile() }
    }

    /// Calls [`maps::in_this_tick`] with the clock.
    fn kpx_about_now() -> u32 {
        maps::in_this_tick(now_secs)
    }

    /// Calls [`maps::count_at`]. Returns 0.
    fn kpx_count(index: u32) -> u32 {
        maps::count_at(index);
        0
    }

    /// Calls [`crc32c::updated`].
    fn kpx_crc32c(crc: u32, diff: u32, len: u32) -> u32 {
        crc32c::updated(crc, diff, len as u16)
    }

    /// Calls [`extension::walk`].
    fn kpx_extensions(skb: *mut __sk_buff, next: u32, at: u32) -> u64 {
        extension::walk(Skb::from_ptr(skb), next as u8, at).0
    }

    /// Calls [`fragment::remember`]; `is_far` is not 0 for a client behind an uplink. Returns 0.
    fn kpx_remember4(skb: *mut __sk_buff, is_far: u32) -> u32 {
        fragment::remember::<Addr4>(Skb::from_ptr(skb), is_far != 0);
        0
    }

    /// Calls [`fragment::remember`]; `is_far` is not 0 for a client behind an uplink. Returns 0.
    fn kpx_remember6(skb: *mut __sk_buff, is_far: u32) -> u32 {
        fragment::remember::<Addr6>(Skb::from_ptr(skb), is_far != 0);
        0
    }

    /// Calls [`fragment::recall`]. Returns 0 if not found.
    fn kpx_recall4(skb: *mut __sk_buff) -> u32 {
        fragment::recall::<Addr4>(Skb::from_ptr(skb)).into()
    }

    /// Calls [`fragment::recall`]. Returns 0 if not found.
    fn kpx_recall6(skb: *mut __sk_buff) -> u32 {
        fragment::recall::<Addr6>(Skb::from_ptr(skb)).into()
    }

    /// Calls [`fragment::forget`]. Returns 0.
    fn kpx_disown4(skb: *mut __sk_buff) -> u32 {
        fragment::forget::<Addr4>(Skb::from_ptr(skb));
        0
    }

    /// Calls [`fragment::forget`]. Returns 0.
    fn kpx_disown6(skb: *mut __sk_buff) -> u32 {
        fragment::forget::<Addr6>(Skb::from_ptr(skb));
        0
    }

    /// Calls [`fragment::is_stub_for_service`]. Returns 0 if false.
    fn kpx_stub4(skb: *mut __sk_buff) -> u32 {
        fragment::is_stub_for_service::<Addr4>(Skb::from_ptr(skb)).into()
    }

    /// Calls [`fragment::is_stub_for_service`]. Returns 0 if false.
    fn kpx_stub6(skb: *mut __sk_buff) -> u32 {
        fragment::is_stub_for_service::<Addr6>(Skb::from_ptr(skb)).into()
    }

    /// Calls [`redirect::quick`].
    fn kpx_quick4(skb: *mut __sk_buff) -> i32 {
        redirect::quick::<Addr4>(Skb::from_ptr(skb), memory()).0
    }

    /// Calls [`redirect::quick`].
    fn kpx_quick6(skb: *mut __sk_buff) -> i32 {
        redirect::quick::<Addr6>(Skb::from_ptr(skb), memory()).0
    }

    /// Calls [`redirect::deliver`]; `known` is a [`redirect::Known`].
    fn kpx_deliver4(skb: *mut __sk_buff, known: u32) -> i32 {
        redirect::deliver::<Addr4>(Skb::from_ptr(skb), redirect::Known(known), memory()).0
    }

    /// Calls [`redirect::deliver`]; `known` is a [`redirect::Known`].
    fn kpx_deliver6(skb: *mut __sk_buff, known: u32) -> i32 {
        redirect::deliver::<Addr6>(Skb::from_ptr(skb), redirect::Known(known), memory()).0
    }

    /// Calls [`redirect::errors::deliver`].
    fn kpx_deliver_error4(skb: *mut __sk_buff) -> i32 {
        redirect::errors::deliver::<Addr4>(Skb::from_ptr(skb), memory()).0
    }

    /// Calls [`redirect::errors::deliver`].
    fn kpx_deliver_error6(skb: *mut __sk_buff) -> i32 {
        redirect::errors::deliver::<Addr6>(Skb::from_ptr(skb), memory()).0
    }

    /// Calls [`redirect::opener::find_route`]. Returns 0.
    fn kpx_find_route4(skb: *mut __sk_buff) -> u32 {
        redirect::opener::find_route::<Addr4>(Skb::from_ptr(skb), memory());
        0
    }

    /// Calls [`redirect::opener::find_route`]. Returns 0.
    fn kpx_find_route6(skb: *mut __sk_buff) -> u32 {
        redirect::opener::find_route::<Addr6>(Skb::from_ptr(skb), memory());
        0
    }

    /// Calls [`ipv6::is_hidden_and_spoofed`]. Returns 0 if false.
    fn kpx_hidden6(skb: *mut __sk_buff, at: u32) -> u32 {
        ipv6::is_hidden_and_spoofed(Skb::from_ptr(skb), at).into()
    }

    /// Calls [`net::spoofed`], with [`At::Before`] unless `before` is 0. Returns 0 if false.
    fn kpx_spoofed4(skb: *mut __sk_buff, src: u32, dst: u32, before: u32) -> u32 {
        let at = if before == 0 { At::Here } else { At::Before };
        net::spoofed(Skb::from_ptr(skb), at, &Addr4::from_wire(src), &Addr4::from_wire(dst)).into()
    }

    /// Calls [`net::spoofed`] with the registers of both addresses. Returns 0 if false.
    fn kpx_spoofed6(skb: *mut __sk_buff, a: u64, b: u64, c: u64, d: u64) -> u32 {
        let src = Addr6::from_registers([a, b]);
        let dst = Addr6::from_registers([c, d]);
        net::spoofed(Skb::from_ptr(skb), At::Here, &src, &dst).into()
    }

    /// Calls [`net::spoofed`] with [`At::Before`] and the registers of both addresses. Returns 0 if
    /// false.
    fn kpx_spoofed_before6(skb: *mut __sk_buff, a: u64, b: u64, c: u64, d: u64) -> u32 {
        let src = Addr6::from_registers([a, b]);
        let dst = Addr6::from_registers([c, d]);
        net::spoofed(Skb::from_ptr(skb), At::Before, &src, &dst).into()
    }

    /// Calls [`maps::is_sender`]. Returns 0 if false.
    fn kpx_is_sender4(src: u32, dst: u32, moment: u64) -> u32 {
        maps::is_sender(&Addr4::from_wire(src), &Addr4::from_wire(dst), Moment(moment)).into()
    }

    /// Calls [`maps::is_sender`] with the registers of both addresses. Returns 0 if false.
    fn kpx_is_sender6(a: u64, b: u64, c: u64, d: u64, moment: u64) -> u32 {
        maps::is_sender(&Addr6::from_registers([a, b]), &Addr6::from_registers([c, d]), Moment(moment)).into()
    }

    /// Calls [`maps::keep_sender`]. Returns 0.
    fn kpx_keep_sender4(src: u32, dst: u32, moment: u64) -> u32 {
        maps::keep_sender(&Addr4::from_wire(src), &Addr4::from_wire(dst), Moment(moment));
        0
    }

    /// Calls [`maps::keep_sender`] with the registers of both addresses. Returns 0.
    fn kpx_keep_sender6(a: u64, b: u64, c: u64, d: u64, moment: u64) -> u32 {
        maps::keep_sender(&Addr6::from_registers([a, b]), &Addr6::from_registers([c, d]), Moment(moment));
        0
    }

    /// Calls [`Skb::weighed`].
    fn kpx_weigh(skb: *mut __sk_buff, mark: u32, is_fragment: u32) -> u32 {
        Skb::from_ptr(skb).weighed(mark, is_fragment != 0)
    }

    /// Calls [`open::draw`] with the words of a key; the last word also holds a [`Draw`]. Returns 0
    /// if every try met another flow.
    fn kpx_draw4(a: u64, b: u64) -> u32 {
        open::draw(FlowKey::<Addr4>::from_words([a, b]), Draw(b)).map_or(0, |port| port.get().into())
    }

    /// Calls [`open::draw`] with the words of a key; the last word also holds a [`Draw`]. Returns 0
    /// if every try met another flow.
    fn kpx_draw6(a: u64, b: u64, c: u64, d: u64, e: u64) -> u32 {
        open::draw(FlowKey::<Addr6>::from_words([a, b, c, d, e]), Draw(e)).map_or(0, |port| port.get().into())
    }

    /// Calls [`slow::refuse`]; `hook` is a [`HookId`].
    fn kpx_refuse4(skb: *mut __sk_buff, hook: u32, outcome: i32) -> i32 {
        slow::refuse::<Addr4>(Skb::from_ptr(skb), HookId(hook as u8), Outcome(outcome), memory()).0
    }

    /// Calls [`Packet::rewrite`](crate::packet::Packet::rewrite). Returns 0 or a reason.
    fn kpx_rewrite4(skb: *mut __sk_buff) -> i32 {
        Outcome::of_number(rewrite_packet::<Addr4>(Skb::from_ptr(skb), memory()).map(|()| 0)).0
    }

    /// Calls [`flow::apply`]. Returns 1 if the packet has a flow, 0 if not, or a reason.
    fn kpx_follow4(skb: *mut __sk_buff, hook: u32, mark: u32) -> i32 {
        let is_known = flow::apply::<Addr4>(Skb::from_ptr(skb), Hook(hook as u8), PacketMark(mark), memory());
        Outcome::of_number(is_known.map(i32::from)).0
    }

    /// Calls [`packet::parse`] at this hook, with [`Reading`](packet::Reading). Returns 0 or a reason.
    fn kpx_parse4(skb: *mut __sk_buff, hook: u32, reading: u32) -> i32 {
        let parsed = packet::parse::<Addr4>(Skb::from_ptr(skb), Hook(hook as u8), Reading(reading), memory());
        Outcome::of_number(parsed.map(|()| 0)).0
    }

    /// Calls [`foreign_nat::remember`] with `is_seen_alone` unless it is 0. Returns 0 if the packet
    /// opens no connection.
    fn kpx_foreign4(is_seen_alone: u32) -> u32 {
        foreign_nat::remember::<Addr4>(is_seen_alone != 0, memory()).into()
    }

    /// Calls [`decide::find_frontend`]. Returns 0 or a reason.
    fn kpx_find4() -> i32 {
        Outcome::of_number(decide::find_frontend::<Addr4>(memory()).map(|()| 0)).0
    }

    /// Calls [`decide::select_backend`]. Returns 0 or a reason.
    fn kpx_select4() -> i32 {
        Outcome::of_number(decide::select_backend::<Addr4>(memory()).map(|()| 0)).0
    }

    /// Calls [`open::claim_entries`]. Returns 0 or a reason.
    fn kpx_open4() -> i32 {
        Outcome::of_number(open::claim_entries::<Addr4>(memory()).map(|()| 0)).0
    }

    /// Calls [`open::draw_port`]. Returns 0 if it found no port.
    fn kpx_draw_port4(looks: u32) -> u32 {
        open::draw_port::<Addr4>(looks != 0, memory()).into()
    }

    /// Calls [`open::claim`]. Returns the number of a [`Claim`](open::Claim).
    fn kpx_claim4() -> u32 {
        open::claim::<Addr4>(memory()) as u32
    }

    /// Calls [`flow::remove_entries`] with the words of the original entry's key. Returns 0.
    fn kpx_close4(a: u64, b: u64) -> u32 {
        remove_entries(FlowKey::<Addr4>::from_words([a, b]));
        0
    }

    /// Calls [`open::half_open_place`]. Returns [`NO_PLACE`] if there is none.
    fn kpx_place4() -> u32 {
        open::half_open_place::<Addr4>().unwrap_or(NO_PLACE)
    }

    /// Calls [`open::make_room`]. Returns 0 if it evicted no flow.
    fn kpx_make_room4() -> u32 {
        open::make_room::<Addr4>().into()
    }

    /// Calls [`maps::share`]; `rest` is a [`PortAndShare`]. Returns 0 if a share is used up.
    fn kpx_share4(client: u32, service: u32, rest: u64) -> u32 {
        let rest = PortAndShare(rest);
        maps::share(&Addr4::from_wire(client), &rest.service(Addr4::from_wire(service)), rest.share()).into()
    }

    /// Calls [`maps::count_outcome`]; `ports` is a [`PortsAndOutcome`]. Returns 0.
    fn kpx_outcome4(service: u32, backend: u32, ports: u64) -> u32 {
        maps::count_outcome(Addr4::from_wire(service), Addr4::from_wire(backend), PortsAndOutcome(ports));
        0
    }

    /// Calls [`maps::count_outcome`] with the registers of both addresses; `ports` is a
    /// [`PortsAndOutcome`]. Returns 0.
    fn kpx_outcome6(a: u64, b: u64, c: u64, d: u64, ports: u64) -> u32 {
        let service = Addr6::from_registers([a, b]);
        let backend = Addr6::from_registers([c, d]);
        maps::count_outcome(service, backend, PortsAndOutcome(ports));
        0
    }

    /// Calls [`open::forget_first`], which spares streams unless `spares` is 0. Returns the number
    /// of closed flows.
    fn kpx_forget4(ring: u32, spares: u32) -> u32 {
        forget_first::<Addr4>(ring, spares).into()
    }

    /// Calls [`slow::refuse`]; `hook` is a [`HookId`].
    fn kpx_refuse6(skb: *mut __sk_buff, hook: u32, outcome: i32) -> i32 {
        slow::refuse::<Addr6>(Skb::from_ptr(skb), HookId(hook as u8), Outcome(outcome), memory()).0
    }

    /// Calls [`Packet::rewrite`](crate::packet::Packet::rewrite). Returns 0 or a reason.
    fn kpx_rewrite6(skb: *mut __sk_buff) -> i32 {
        Outcome::of_number(rewrite_packet::<Addr6>(Skb::from_ptr(skb), memory()).map(|()| 0)).0
    }

    /// Calls [`flow::apply`]. Returns 1 if the packet has a flow, 0 if not, or a reason.
    fn kpx_follow6(skb: *mut __sk_buff, hook: u32, mark: u32) -> i32 {
        let is_known = flow::apply::<Addr6>(Skb::from_ptr(skb), Hook(hook as u8), PacketMark(mark), memory());
        Outcome::of_number(is_known.map(i32::from)).0
    }

    /// Calls [`packet::parse`] at this hook, with [`Reading`](packet::Reading). Returns 0 or a reason.
    fn kpx_parse6(skb: *mut __sk_buff, hook: u32, reading: u32) -> i32 {
        let parsed = packet::parse::<Addr6>(Skb::from_ptr(skb), Hook(hook as u8), Reading(reading), memory());
        Outcome::of_number(parsed.map(|()| 0)).0
    }

    /// Calls [`foreign_nat::remember`] with `is_seen_alone` unless it is 0. Returns 0 if the packet
    /// opens no connection.
    fn kpx_foreign6(is_seen_alone: u32) -> u32 {
        foreign_nat::remember::<Addr6>(is_seen_alone != 0, memory()).into()
    }

    /// Calls [`decide::find_frontend`]. Returns 0 or a reason.
    fn kpx_find6() -> i32 {
        Outcome::of_number(decide::find_frontend::<Addr6>(memory()).map(|()| 0)).0
    }

    /// Calls [`decide::select_backend`]. Returns 0 or a reason.
    fn kpx_select6() -> i32 {
        Outcome::of_number(decide::select_backend::<Addr6>(memory()).map(|()| 0)).0
    }

    /// Calls [`open::claim_entries`]. Returns 0 or a reason.
    fn kpx_open6() -> i32 {
        Outcome::of_number(open::claim_entries::<Addr6>(memory()).map(|()| 0)).0
    }

    /// Calls [`open::draw_port`]. Returns 0 if it found no port.
    fn kpx_draw_port6(looks: u32) -> u32 {
        open::draw_port::<Addr6>(looks != 0, memory()).into()
    }

    /// Calls [`open::claim`]. Returns the number of a [`Claim`](open::Claim).
    fn kpx_claim6() -> u32 {
        open::claim::<Addr6>(memory()) as u32
    }

    /// Calls [`flow::remove_entries`] with the words of the original entry's key. Returns 0.
    fn kpx_close6(a: u64, b: u64, c: u64, d: u64, e: u64) -> u32 {
        remove_entries(FlowKey::<Addr6>::from_words([a, b, c, d, e]));
        0
    }

    /// Calls [`open::half_open_place`]. Returns [`NO_PLACE`] if there is none.
    fn kpx_place6() -> u32 {
        open::half_open_place::<Addr6>().unwrap_or(NO_PLACE)
    }

    /// Calls [`open::make_room`]. Returns 0 if it evicted no flow.
    fn kpx_make_room6() -> u32 {
        open::make_room::<Addr6>().into()
    }

    /// Calls [`maps::share`] with the registers of both addresses; `rest` is a [`PortAndShare`].
    /// Returns 0 if a share is used up.
    fn kpx_share6(a: u64, b: u64, c: u64, d: u64, rest: u64) -> u32 {
        let client = Addr6::from_registers([a, b]);
        let service = Addr6::from_registers([c, d]);
        let rest = PortAndShare(rest);
        maps::share(&client, &rest.service(service), rest.share()).into()
    }

    /// Calls [`open::forget_first`], which spares streams unless `spares` is 0. Returns the number
    /// of closed flows.
    fn kpx_forget6(ring: u32, spares: u32) -> u32 {
        forget_first::<Addr6>(ring, spares).into()
    }
}

/// Takes the memory of the hook again.
#[inline(always)]
fn memory() -> Memory<'static> {
    // SAFETY: only the functions above call this, once each, and their callers lend them the hook's
    // `Memory` for the whole call.
    unsafe { Memory::of_hook() }
}

#[inline(always)]
fn rewrite_packet<A: Net>(skb: Skb, memory: Memory) -> Result<(), Reason> {
    let (scratch, _) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    let Scratch {
        packet, becomes, ..
    } = scratch;
    packet.rewrite(skb, &becomes.src, &becomes.dst, becomes.is_far != 0)
}

#[inline(always)]
fn remove_entries<A: Net>(opener: FlowKey<A>) {
    // SAFETY: only the two functions above call this, each for its family, and only tc programs
    // call those. Neither recurses.
    if let Some(closing) = unsafe { maps::closing::<A>() } {
        closing.opener = opener;
        flow::remove_entries(closing);
    }
}

#[inline(always)]
fn forget_first<A: Net>(ring: u32, spares: u32) -> bool {
    // SAFETY: only the two functions above call this, each for its family, and only tc programs
    // call those.
    let eviction = unsafe { maps::eviction::<A>() };
    eviction.is_some_and(|eviction| open::forget_first(Ring(ring), eviction, spares != 0))
}
