//! Fragments: only a packet's first fragment has ports, which the hooks store for the later
//! fragments.

use proxy_common::addr::{Port, Proto, SockAddr};
use proxy_common::counter::Reason;
use proxy_common::device::Node;
use proxy_common::fragment::{FragmentKey, Ports};
use proxy_macros::global_fn;

use crate::net::Net;
use crate::skb::Skb;
use crate::spoof::{At, is_spoofed};
use crate::{fast_path, lookup, maps};

/// Stores the ports of a first fragment for the later fragments. Called before the rewrite, because
/// the key consists of the fields that all fragments share at this hook.
#[global_fn(kpx_remember4, kpx_remember6)]
pub fn remember<A: Net>(skb: Skb, is_far: bool) {
    // Without a key, the later fragments are left alone.
    let _known = with_key::<A, _>(skb, |key| {
        let found = skb.found();
        maps::remember_fragment(
            key,
            &Ports::new(found.sport, found.dport, found.proto),
            is_far,
        );
    });
}

/// Removes the ports of an earlier packet with the key of this first fragment. IPv4 has only 65,536
/// identifications for all packets between two addresses, and if the hook does not rewrite this
/// packet, it must not rewrite the later fragments either.
#[global_fn(kpx_disown4, kpx_disown6)]
pub fn forget<A: Net>(skb: Skb) {
    // Without a key, nothing was remembered by it.
    let _known = with_key::<A, _>(skb, |key| maps::forget_fragment(key));
}

/// Gives a later fragment the ports of its first fragment. Returns false if no hook has seen the
/// first fragment, or if it had no flow.
#[global_fn(kpx_recall4, kpx_recall6)]
pub fn recall<A: Net>(skb: Skb) -> bool {
    let Ok(Some(ports)) = with_key::<A, _>(skb, |key| maps::fragment_ports(key)) else {
        return false;
    };
    let mut found = skb.found();
    (found.sport, found.dport, found.proto) = (ports.src, ports.dst, ports.proto);
    skb.set_found(found);
    true
}

/// Returns true if a first fragment that is too short for its transport header is for a Service of
/// this node, or is spoofed.
#[global_fn(kpx_stub4, kpx_stub6)]
pub fn is_stub_for_service<A: Net>(skb: Skb) -> bool {
    if maps::node().is_none_or(|node| node.has(Node::HOST | Node::DRAINING)) {
        return false;
    }
    let found = skb.found();
    let ports = if found.len < size_of::<[u16; 2]>() as u32 {
        Err(Reason::Malformed)
    } else {
        skb.load(found.l4.into())
    };
    let [_, port] = ports.unwrap_or([0; 2]);
    let dst = skb.lend(found.link().len() + A::DST_OFFSET, |addr: &mut A| {
        lookup::is_services(&SockAddr::new(*addr, Port::from_wire(port)), found.proto)
    });
    dst == Ok(true)
        || found.proto == Proto::TCP && fast_path::is_on() && is_spoofed_fragment::<A>(skb)
}

/// Returns true if a fragment is spoofed. The stack may reassemble it into a FIN or RST, which a
/// liberal conntrack entry accepts.
#[inline(always)]
fn is_spoofed_fragment<A: Net>(skb: Skb) -> bool {
    let at = skb.found().link().len();
    let (Ok(src), Ok(dst)) = (
        skb.load::<A>(at + A::SRC_OFFSET),
        skb.load::<A>(at + A::DST_OFFSET),
    ) else {
        return false;
    };
    is_spoofed(skb, At::Here, &src, &dst)
}

/// Builds the key in place: loads the addresses together with the bytes before them, and overwrites
/// those bytes with the other fields.
#[inline(always)]
fn with_key<A: Net, T>(skb: Skb, borrow: impl FnOnce(&FragmentKey<A>) -> T) -> Result<T, Reason> {
    let at = skb.found().link().len();
    skb.lend(
        at + A::SRC_OFFSET - FragmentKey::<A>::ADDRS_OFFSET,
        |key: &mut FragmentKey<A>| {
            let found = skb.found();
            key.set(found.hook, found.split, found.id);
            borrow(key)
        },
    )
}
