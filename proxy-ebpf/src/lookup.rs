//! Finds the frontend at a dialled address. Works without packets, and stores nothing.

use proxy_common::addr::{Port, Proto, SockAddr};
use proxy_common::counter::Reason;
use proxy_common::frontend::FrontendKey;
use proxy_common::policy::Decision;

use crate::maps;
use crate::net::Net;

/// Finds the frontend at an address and port, and writes it to `decision`.
#[inline(always)]
pub fn frontend<A: Net>(
    dialled: &SockAddr<A>,
    proto: Proto,
    decision: &mut Decision<A>,
) -> Result<(), Reason> {
    decision.frontend = FrontendKey::new(dialled.addr, dialled.port, proto);
    if take(decision) {
        return Ok(());
    }
    if let Some(own) = maps::own_addr_here(&dialled.addr) {
        decision.frontend = FrontendKey::node_port(dialled.port, proto);
        return if own.takes_node_ports() && take(decision) {
            Ok(())
        } else {
            Err(Reason::NotOurs)
        };
    }
    decision.frontend = FrontendKey::address(dialled.addr);
    if maps::frontend(&decision.frontend).is_some() {
        return Err(Reason::UnknownPort);
    }
    Err(if maps::is_in_service_cidr(dialled.addr) {
        Reason::Unallocated
    } else {
        Reason::NotOurs
    })
}

/// Finds the frontend of a node port, at whichever address.
#[inline(never)]
pub fn node_port<A: Net>(port: Port, proto: Proto, decision: &mut Decision<A>) -> bool {
    decision.frontend = FrontendKey::node_port(port, proto);
    take(decision)
}

/// Calls [`frontend`], as one function for all decisions about packets.
#[inline(never)]
pub fn find<A: Net>(
    dialled: &SockAddr<A>,
    proto: Proto,
    decision: &mut Decision<A>,
) -> Result<(), Reason> {
    frontend(dialled, proto, decision)
}

/// Returns true unless [`frontend`] would return [`Reason::NotOurs`].
#[inline(always)]
pub fn is_services<A: Net>(dialled: &SockAddr<A>, proto: Proto) -> bool {
    let SockAddr { addr, port, .. } = *dialled;
    if maps::has_frontend(&FrontendKey::new(addr, port, proto)) {
        return true;
    }
    match maps::own_addr(&addr) {
        Some(own) => {
            own.takes_node_ports() && maps::has_frontend(&FrontendKey::<A>::node_port(port, proto))
        }
        None => maps::has_frontend(&FrontendKey::address(addr)) || maps::is_in_service_cidr(addr),
    }
}

/// Copies the row of `decision.frontend` to the decision. Returns false if the row does not exist.
#[inline(always)]
fn take<A: Net>(decision: &mut Decision<A>) -> bool {
    let Some(frontend) = maps::frontend(&decision.frontend) else {
        return false;
    };
    decision.service = frontend.service;
    decision.kind = frontend.kind;
    true
}
