//! From what a client dialled to the backend that shall serve it. No packets here, and nothing is remembered.

use aya_ebpf::helpers::bpf_get_prandom_u32;
use proxy_common::addr::{Proto, SockAddr};
use proxy_common::counter::Reason;
use proxy_common::frontend::{Backend, Frontend, FrontendKey, Service, SlotKey};

use crate::maps;
use crate::net::Net;

/// The frontend at an address and port.
#[inline(always)]
pub fn frontend<A: Net>(dialled: SockAddr<A>, proto: Proto) -> Result<Frontend<A>, Reason> {
    if let Some(frontend) = maps::frontend(&FrontendKey::new(dialled.addr, dialled.port, proto)) {
        return Ok(frontend);
    }
    match maps::frontend(&FrontendKey::address(dialled.addr)) {
        Some(_) => Err(Reason::UnknownPort),
        None => Err(Reason::NotOurs),
    }
}

/// One of the frontend's backends, at random.
#[inline(always)]
pub fn backend<A: Net>(frontend: &Frontend<A>) -> Result<Backend<A>, Reason> {
    // A slot may go between counting and reading: slots are deleted after the count has shrunk, so a second look sees
    // the new count.
    match pick(frontend)? {
        Some(backend) => Ok(backend),
        None => pick(frontend)?.ok_or(Reason::StaleSlot),
    }
}

#[inline(always)]
fn pick<A: Net>(frontend: &Frontend<A>) -> Result<Option<Backend<A>>, Reason> {
    let service = maps::service(&frontend.service).ok_or(Reason::NotOurs)?;
    let set = service.internal_set();
    let count = service.count(set);
    if count == 0 {
        let elsewhere = service.has(Service::HAS_ENDPOINTS);
        return Err(if elsewhere { Reason::NoLocalEndpoints } else { Reason::NoEndpoints });
    }
    Ok(maps::slot(&SlotKey::new(frontend.service, set, below(u32::from(count)) as u16)))
}

/// A random number below `bound`, without a division: the upper half of a 64-bit product.
#[inline(always)]
pub fn below(bound: u32) -> u32 {
    // SAFETY: the helper takes no arguments and cannot fail.
    let random = unsafe { bpf_get_prandom_u32() };
    ((u64::from(random) * u64::from(bound)) >> 32) as u32
}
