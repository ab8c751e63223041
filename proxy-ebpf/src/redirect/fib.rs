//! The route of a packet past the stack: the kernel's look-up (FIB), and a router's changes to the
//! packet.

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

use crate::checksum::{Checksums, diff_words};
use crate::header::Head;
use crate::maps;
use crate::net::Net;
use crate::outcome::Action;
use crate::skb::{ETH_LEN, Skb};

/// The route of a packet, from [`find`]. In map memory, as a [`Packet`] is.
#[derive(Clone, Copy)]
pub struct FibResult {
    /// The look-up's parameters, and its result.
    fib: FibLookup,
    neighbour: bpf_redir_neigh,
    /// The packet goes to the peer of the device.
    pub to_peer: bool,
    /// The flags of the device.
    device: u32,
    /// The longest IP packet that the device takes.
    device_mtu: u32,
    /// Interface index of the pod's device, if cached; else 0.
    exit: u32,
    /// Not 0: the route may lead to an unresolved neighbour.
    resolves: u32,
}

impl FibResult {
    /// Prepares a look-up. The ports are those between the hooks, by which the stack would route
    /// (`ip rule`, several next hops). `exit` is the pod's device, if an earlier packet of the flow
    /// has cached it in this term; else 0. With `resolves`, the route may lead to a neighbour
    /// without known link address, which the kernel then resolves.
    #[inline(always)]
    pub fn ask(&mut self, sport: Port, dport: Port, exit: u32, resolves: bool) {
        (self.fib.sport, self.fib.dport) = (sport.wire(), dport.wire());
        (self.exit, self.resolves) = (exit, resolves.into());
    }

    /// Caches the route to a pod for later packets of the flow. Returns the interface index of the
    /// pod's device, or 0 if each packet needs a look-up.
    #[inline(never)]
    pub fn keep<A: Net>(&self, pod: &A) -> u32 {
        // SAFETY: every field of the union is a number. Since Linux 5.13 the kernel returns the
        // route's MTU; before, it leaves this packet's length.
        let mtu = u32::from(unsafe { self.fib.__bindgen_anon_1.mtu_result });
        // A route with its own MTU needs a look-up for each packet.
        if !self.to_peer || mtu != self.device_mtu {
            return 0;
        }
        maps::keep_exit(pod, self.fib.ifindex, mtu, self.macs());
        self.fib.ifindex
    }

    /// Returns true if [`Self::ask`] was called with `resolves`, which is set only for bypass
    /// flows.
    #[inline(always)]
    pub fn is_of_bypass(&self) -> bool {
        maps::again(&self.resolves) != 0
    }

    /// Returns the interface index of the route's device.
    #[inline(always)]
    pub fn ifindex(&self) -> u32 {
        self.fib.ifindex
    }

    /// Takes the route that an earlier packet has cached. Returns false if there is none, or its
    /// MTU is below this packet's length.
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
        // A change of the device begins a new epoch, so the flags still hold.
        (self.to_peer, self.device) = (true, Device::POD | Device::BARE);
        true
    }

    /// Returns true if the route leads to a pod of this node.
    #[inline(always)]
    pub fn is_to_pod(&self) -> bool {
        self.device & Device::POD != 0
    }

    /// Returns true if a bypass flow may be opened by this route. `may_go_far` allows routes to
    /// other nodes.
    #[inline(always)]
    pub fn is_for_openers(&self, may_go_far: bool) -> bool {
        self.device & Device::BARE != 0
            && if self.is_to_pod() {
                self.to_peer
            } else {
                may_go_far
            }
    }

    /// Returns the frame's destination and source MAC addresses, in words.
    #[inline(always)]
    fn macs(&self) -> [u32; 3] {
        // SAFETY: equal in size, and any bits are a number.
        unsafe { transmute([self.fib.dmac, self.fib.smac]) }
    }
}

/// The differences between IPv4 and IPv6 for a router.
pub trait Forward: Net {
    /// Offset of the TTL or hop limit in a frame.
    const HOPS_OFFSET: u32;

    /// Decrements the TTL or hop limit.
    fn spend_hop(skb: Skb) -> Result<(), Reason>;
    /// Replaces the addresses and ports of a packet with the usual headers, and decrements its hop
    /// limit.
    fn forward(
        skb: Skb,
        head: &Head<Self>,
        src: &SockAddr<Self>,
        dst: &SockAddr<Self>,
    ) -> Result<(), Reason>;
    /// Returns true if a packet with the usual headers has a hop left for another host.
    fn has_hop_left(skb: Skb, head: &Head<Self>) -> bool;
}

/// Finds the route of a packet from `src` to `dst`, as prepared by [`FibResult::ask`]. The packet
/// must have the usual IP header. Returns false if the packet takes the stack.
#[inline(always)]
pub fn find<A: Forward>(skb: Skb, proto: Proto, route: &mut FibResult, src: &A, dst: &A) -> bool {
    has_hop_left::<A>(skb) && find_on(skb, proto, route, src, dst)
}

/// Returns true if a packet has a hop left for another host.
#[inline(always)]
fn has_hop_left<A: Forward>(skb: Skb) -> bool {
    skb.load::<u8>(A::HOPS_OFFSET).is_ok_and(|hops| hops > 1)
}

/// Does the same as [`find`] for a packet that has a hop left.
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
    // On a device without kpx's hooks, packets would leave and replies come in untranslated.
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

/// Returns the length in bytes, without link header, of the longest packet that this one becomes on
/// the wire. `None` if unknown.
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

/// Sends a rewritten packet by its route.
#[inline(always)]
pub fn leave<A: Forward>(skb: Skb, route: &mut FibResult) -> Result<Action, Reason> {
    A::spend_hop(skb)?;
    send(skb, route)
}

/// Does the same with a packet after its hop limit is decremented.
#[inline(never)]
pub fn send(skb: Skb, route: &mut FibResult) -> Result<Action, Reason> {
    let ifindex = route.fib.ifindex;
    if route.to_peer {
        // For a bridge, a packet capture or a virtual machine in the pod. The pod's own stack
        // accepts any link address.
        skb.store(0, &[route.fib.dmac, route.fib.smac], 0)?;
        maps::count(Event::FastLocal);
        return Ok(skb.into_peer(ifindex));
    }
    // The kernel adds the present link header to a device's sum over the whole packet, but then
    // writes another.
    skb.add_to_sum(diff_words(&skb.load::<[u32; 3]>(0)?, &route.macs()));
    maps::count(Event::FastRemote);
    let neighbour = from_mut(&mut route.neighbour);
    let len = size_of::<bpf_redir_neigh>() as i32;
    // SAFETY: the structure is ours, and its size is its own. (An explicit neighbour is needed
    // because a packet that has just come in has no route.)
    Ok(Action(
        unsafe { bpf_redirect_neigh(ifindex, neighbour, len, 0) } as i32,
    ))
}

/// Returns the checksum of an IPv4 header after its TTL is decremented (RFC 1624).
#[inline(always)]
fn behind_hop(check: [u8; 2]) -> [u8; 2] {
    let sum = u32::from(u16::from_be_bytes(check)) + 0x0100;
    // One's complement has two zeros: a header's checksum is 0, never 0xffff.
    ((sum + u32::from(sum >= 0xffff)) as u16).to_be_bytes()
}

impl Forward for Addr4 {
    const HOPS_OFFSET: u32 = ETH_LEN + 8;

    /// The header's checksum compensates for the new TTL (RFC 1624), so a device's sum over the
    /// whole packet stays.
    #[inline(always)]
    fn spend_hop(skb: Skb) -> Result<(), Reason> {
        let [hops, proto, check @ ..] = skb.load::<[u8; 4]>(Self::HOPS_OFFSET)?;
        let check = behind_hop(check);
        skb.store(Self::HOPS_OFFSET, &[hops - 1, proto, check[0], check[1]], 0)
    }

    /// The rewrite stores the new TTL as well.
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
    fn has_hop_left(_: Skb, head: &Head<Self>) -> bool {
        head.check.to_ne_bytes()[0] > 1
    }
}

impl Forward for Addr6 {
    const HOPS_OFFSET: u32 = ETH_LEN + 7;

    /// Stores the four bytes that end with the hop limit: a device's sum over the whole packet
    /// counts pairs of bytes, so a store must begin at an even offset.
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
    fn has_hop_left(skb: Skb, _: &Head<Self>) -> bool {
        has_hop_left::<Self>(skb)
    }
}
