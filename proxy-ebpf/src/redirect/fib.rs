//! The way of a packet past the stack: what the kernel says of it, and what a router owes to a
//! packet that goes it.

use core::mem::transmute;
use core::ptr::from_mut;

use aya_ebpf::bindings::{
    BPF_F_RECOMPUTE_CSUM, BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS,
    bpf_fib_lookup as FibLookup, bpf_redir_neigh,
};
use aya_ebpf::helpers::generated::{bpf_fib_lookup, bpf_redirect_neigh};
use proxy_common::addr::{Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::counter::{Event, Reason};
use proxy_common::device::Device;
use proxy_common::flow::{AnyKey, FlowKey};

use super::{Delivery, Known};
use crate::established::Head;
use crate::maps;
use crate::net::{self, Net};
use crate::outcome::Outcome;
use crate::setting::FAST_PATH;
use crate::skb::{ETH_LEN, Skb};
use crate::{Action, global_fn};

/// The kernel's answer about a packet's route, from [`find`]. In map memory, as a [`Packet`] is.
#[derive(Clone, Copy)]
pub struct FibResult {
    /// The question, and the kernel's answer.
    fib: FibLookup,
    neighbour: bpf_redir_neigh,
    /// Into the other end of the device's pair.
    pub to_peer: bool,
    /// The flags of the device.
    device: u32,
    /// The longest IP packet that the device takes.
    device_mtu: u32,
    /// Interface index of the device in front of the pod, where that is known; else 0.
    exit: u32,
    /// Not 0: the neighbour need not be known.
    resolves: u32,
}

impl FibResult {
    /// Sets the ports that the stack would route by, if it routes by ports (`ip rule`, several next
    /// hops): those between the hooks. `exit` is the device in front of the pod, if a packet of the
    /// same flow has found it in this term; else 0. If `resolves`, the way may lead to a neighbour
    /// whose link address is not known: the kernel asks for that then.
    #[inline(always)]
    pub fn ask(&mut self, sport: Port, dport: Port, exit: u32, resolves: bool) {
        (self.fib.sport, self.fib.dport) = (sport.wire(), dport.wire());
        (self.exit, self.resolves) = (exit, resolves.into());
    }

    /// Keeps the way to a pod that the kernel has named, for later packets of the flow. Returns its
    /// device, or 0 if each packet has to ask.
    #[inline(never)]
    pub fn keep<A: Net>(&self, pod: &A) -> u32 {
        // SAFETY: a number, whichever field of the union was written. Since Linux 5.13 the kernel
        // answers with the route's MTU, and before it leaves this packet's length.
        let mtu = u32::from(unsafe { self.fib.__bindgen_anon_1.mtu_result });
        // A route with an MTU of its own would be asked for it.
        if !self.to_peer || mtu != self.device_mtu {
            return 0;
        }
        maps::keep_exit(pod, self.fib.ifindex, mtu, self.macs());
        self.fib.ifindex
    }

    /// Returns true if [`Self::ask`] was told that the way may lead to an unknown neighbour: that
    /// of a bypass flow may.
    #[inline(always)]
    pub fn is_of_bypass(&self) -> bool {
        maps::again(&self.resolves) != 0
    }

    /// Returns the device of the way.
    #[inline(always)]
    pub fn ifindex(&self) -> u32 {
        self.fib.ifindex
    }

    /// Takes a way that an earlier packet has kept. Returns false if there is none for a packet of
    /// this length.
    #[inline(always)]
    fn recall<A: Net>(&mut self, len: u16, pod: &A) -> bool {
        if self.exit == 0 {
            return false;
        }
        let Some(exit) = maps::exit(self.exit, pod).filter(|exit| u32::from(len) <= exit.mtu)
        else {
            return false;
        };
        self.fib.ifindex = exit.ifindex;
        // SAFETY: equal in size, and any bits are a number.
        [self.fib.dmac, self.fib.smac] = unsafe { transmute::<[u32; 3], [[u8; 6]; 2]>(exit.macs) };
        // A change of the device moves the epoch.
        (self.to_peer, self.device) = (true, Device::POD | Device::BARE);
        true
    }

    /// Returns true if the way leads to a pod of this node.
    #[inline(always)]
    pub fn is_to_pod(&self) -> bool {
        self.device & Device::POD != 0
    }

    /// Returns true if the way is one by which a bypass flow may be opened, `may_go_far` if to
    /// another node as well.
    #[inline(always)]
    pub fn is_for_openers(&self, may_go_far: bool) -> bool {
        self.device & Device::BARE != 0
            && if self.is_to_pod() {
                self.to_peer
            } else {
                may_go_far
            }
    }

    /// Returns the destination and the source of the frame, in words.
    #[inline(always)]
    fn macs(&self) -> [u32; 3] {
        // SAFETY: equal in size, and any bits are a number.
        unsafe { transmute([self.fib.dmac, self.fib.smac]) }
    }
}

/// The differences between IPv4 and IPv6 for a router.
pub trait Forward: Net {
    /// Offset in a frame of the number of hops that a packet may still go.
    const HOPS_OFFSET: u32;

    /// One hop less.
    fn spend_hop(skb: Skb) -> Result<(), Reason>;
    /// Gives a packet with the usual headers other addresses and ports, and one hop less.
    fn forward(
        skb: Skb,
        head: &Head<Self>,
        src: &SockAddr<Self>,
        dst: &SockAddr<Self>,
    ) -> Result<(), Reason>;
    /// Returns true if a packet with the usual headers may go on to another host.
    fn may_go_on(skb: Skb, head: &Head<Self>) -> bool;
    fn any_key(key: &FlowKey<Self>) -> AnyKey;

    /// Calls [`super::quick`].
    fn quick(skb: Skb) -> Outcome;
    /// Calls [`super::deliver`].
    fn deliver(skb: Skb, known: Known) -> Delivery;
    /// Calls [`super::errors::deliver`].
    fn deliver_error(skb: Skb) -> Delivery;
    /// Calls [`super::opener::find_way`].
    fn find_way(skb: Skb);
}

/// Finds the way of a packet that goes from `src` to `dst`, as [`FibResult::ask`] has prepared it.
/// Its IP header is the usual one. False if it is a packet for the stack.
#[inline(always)]
pub fn find<A: Forward>(skb: Skb, proto: Proto, route: &mut FibResult, src: &A, dst: &A) -> bool {
    may_go_on::<A>(skb) && find_on(skb, proto, route, src, dst)
}

/// Returns true if a packet has a hop left for another host.
#[inline(always)]
fn may_go_on<A: Forward>(skb: Skb) -> bool {
    skb.load::<u8>(A::HOPS_OFFSET).is_ok_and(|hops| hops > 1)
}

/// Does what [`find`] says for a packet that may go on.
#[inline(never)]
pub fn find_on<A: Forward>(
    skb: Skb,
    proto: Proto,
    route: &mut FibResult,
    src: &A,
    dst: &A,
) -> bool {
    let Some(len) = longest::<A>(skb, proto) else {
        return false;
    };
    if route.recall(len, dst) {
        return true;
    }
    let fib = &mut route.fib;
    fib.family = A::AF;
    fib.l4_protocol = proto.0;
    fib.__bindgen_anon_1.tot_len = len;
    fib.ifindex = skb.ifindex();
    fib.__bindgen_anon_2.rt_metric = 0;
    fib.__bindgen_anon_5.tbid = 0;
    A::fib_addrs(fib, *src, *dst);
    // SAFETY: the helper takes the context, and a structure borrowed alone with its size.
    let result = unsafe {
        bpf_fib_lookup(
            skb.as_ptr().cast(),
            from_mut(fib),
            size_of::<FibLookup>() as i32,
            0,
        )
    };
    let is_resolved = result as u32 == BPF_FIB_LKUP_RET_SUCCESS;
    let may_resolve = result as u32 == BPF_FIB_LKUP_RET_NO_NEIGH && route.resolves != 0;
    if !is_resolved && !may_resolve {
        return false;
    }
    // A device without our hooks would let a packet out untranslated, or a reply in untranslated.
    let Some(device) = maps::device(fib.ifindex).filter(|device| !device.is_headerless()) else {
        return false;
    };
    route.to_peer = device.has_peer() && is_resolved;
    route.device = device.flags();
    route.device_mtu = device.mtu;
    // The next router of an IPv4 route may have an IPv6 address (RFC 5549).
    route.neighbour.nh_family = fib.family.into();
    // SAFETY: any bits are an address; the kernel reads no more of it than the family has.
    route.neighbour.__bindgen_anon_1.ipv6_nh = unsafe { fib.__bindgen_anon_4.ipv6_dst };
    true
}

/// The length, without link header, of the longest packet that this one will be on the wire. None
/// if it cannot be told.
#[inline(always)]
pub fn longest<A: Net>(skb: Skb, proto: Proto) -> Option<u16> {
    let len = match skb.gso_size() {
        0 => skb.len() - ETH_LEN,
        size => {
            let header_len = match proto {
                Proto::TCP => u32::from(skb.load::<u8>(ETH_LEN + A::IP_LEN + 12).ok()? >> 4) * 4,
                Proto::UDP => 8,
                _ => return None,
            };
            A::IP_LEN + header_len + size
        }
    };
    u16::try_from(len).ok()
}

/// Sends a packet, rewritten, on the way that was found for it.
#[inline(always)]
pub fn leave<A: Forward>(skb: Skb, route: &mut FibResult) -> Result<Action, Reason> {
    A::spend_hop(skb)?;
    send(skb, route)
}

/// Does the same with a packet that has spent its hop.
#[inline(never)]
pub fn send(skb: Skb, route: &mut FibResult) -> Result<Action, Reason> {
    let ifindex = route.fib.ifindex;
    if route.to_peer {
        // For a bridge, a capture, a virtual machine in the pod: its stack itself takes any.
        skb.store(0, &[route.fib.dmac, route.fib.smac], 0)?;
        maps::count(Event::FastLocal);
        return Ok(skb.into_peer(ifindex));
    }
    // The kernel adds the link header that is here to a sum that a device took over the whole
    // packet, and writes another.
    skb.add_to_sum(net::diff_words(&skb.load::<[u32; 3]>(0)?, &route.macs()));
    maps::count(Event::FastRemote);
    let neighbour = from_mut(&mut route.neighbour);
    let len = size_of::<bpf_redir_neigh>() as i32;
    // SAFETY: the structure is ours, and its size is its own. (By name of the neighbour, a packet
    // that has just come in and has no route needs none.)
    Ok(Action(
        unsafe { bpf_redirect_neigh(ifindex, neighbour, len, 0) } as i32,
    ))
}

#[inline(always)]
pub fn is_built_in() -> bool {
    FAST_PATH.get() != 0
}

/// Returns the checksum of an IPv4 header whose hop limit has become one less (RFC 1624).
#[inline(always)]
fn behind_hop(check: [u8; 2]) -> [u8; 2] {
    let sum = u32::from(u16::from_be_bytes(check)) + 0x0100;
    // One's complement has two zeros: this is a header's.
    ((sum + u32::from(sum >= 0xffff)) as u16).to_be_bytes()
}

impl Forward for Addr4 {
    const HOPS_OFFSET: u32 = ETH_LEN + 8;

    /// The header's checksum makes up for the hop (RFC 1624), and so a sum over the whole packet
    /// stays.
    #[inline(always)]
    fn spend_hop(skb: Skb) -> Result<(), Reason> {
        let [hops, proto, check @ ..] = skb.load::<[u8; 4]>(Self::HOPS_OFFSET)?;
        let check = behind_hop(check);
        skb.store(Self::HOPS_OFFSET, &[hops - 1, proto, check[0], check[1]], 0)
    }

    /// The rewritten header makes up for the hop as well.
    #[inline(always)]
    fn forward(
        skb: Skb,
        head: &Head<Self>,
        src: &SockAddr<Self>,
        dst: &SockAddr<Self>,
    ) -> Result<(), Reason> {
        let [hops, proto, check @ ..] = head.check.to_ne_bytes();
        let [high, low] = behind_hop(check);
        let check = u32::from_ne_bytes([hops - 1, proto, high, low]);
        Self::rewrite(skb, &Head { check, ..*head }, src, dst)
    }

    #[inline(always)]
    fn may_go_on(_: Skb, head: &Head<Self>) -> bool {
        head.check.to_ne_bytes()[0] > 1
    }

    #[inline(always)]
    fn any_key(key: &FlowKey<Self>) -> AnyKey {
        AnyKey::of_v4(key)
    }

    #[inline(always)]
    fn quick(skb: Skb) -> Outcome {
        Outcome(global_fn::kpx_quick4(skb.as_ptr()))
    }

    #[inline(always)]
    fn deliver(skb: Skb, known: Known) -> Delivery {
        Delivery(global_fn::kpx_deliver4(skb.as_ptr(), known.0))
    }

    #[inline(always)]
    fn deliver_error(skb: Skb) -> Delivery {
        Delivery(global_fn::kpx_deliver_error4(skb.as_ptr()))
    }

    #[inline(always)]
    fn find_way(skb: Skb) {
        global_fn::kpx_find_way4(skb.as_ptr());
    }
}

impl Forward for Addr6 {
    const HOPS_OFFSET: u32 = ETH_LEN + 7;

    /// A word of which the hops are the end: a checksum that the device took over the whole packet
    /// counts in pairs.
    #[inline(always)]
    fn spend_hop(skb: Skb) -> Result<(), Reason> {
        const WORD: u32 = Addr6::HOPS_OFFSET - 3;
        let mut word: [u8; 4] = skb.load(WORD)?;
        word[3] -= 1;
        skb.store(WORD, &word, BPF_F_RECOMPUTE_CSUM)
    }

    #[inline(always)]
    fn forward(
        skb: Skb,
        head: &Head<Self>,
        src: &SockAddr<Self>,
        dst: &SockAddr<Self>,
    ) -> Result<(), Reason> {
        Self::rewrite(skb, head, src, dst)?;
        Self::spend_hop(skb)
    }

    #[inline(always)]
    fn may_go_on(skb: Skb, _: &Head<Self>) -> bool {
        may_go_on::<Self>(skb)
    }

    #[inline(always)]
    fn any_key(key: &FlowKey<Self>) -> AnyKey {
        AnyKey::of_v6(key)
    }

    #[inline(always)]
    fn quick(skb: Skb) -> Outcome {
        Outcome(global_fn::kpx_quick6(skb.as_ptr()))
    }

    #[inline(always)]
    fn deliver(skb: Skb, known: Known) -> Delivery {
        Delivery(global_fn::kpx_deliver6(skb.as_ptr(), known.0))
    }

    #[inline(always)]
    fn deliver_error(skb: Skb) -> Delivery {
        Delivery(global_fn::kpx_deliver_error6(skb.as_ptr()))
    }

    #[inline(always)]
    fn find_way(skb: Skb) {
        global_fn::kpx_find_way6(skb.as_ptr());
    }
}
