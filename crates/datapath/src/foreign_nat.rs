//! Keeps source ports free that connections of other programs used before the programs ran.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{HashMap, MapData};
use proxy_common::addr::{Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::flow::{FlowKey, Hook};
use proxy_common::foreign_nat::ForeignNat;

use crate::clock::boot_secs;
use crate::maps::{FamilyNames, lend};

/// The tables of both families, which the programs keep up to date.
pub struct ForeignNatPorts {
    v4: Ports<Addr4>,
    v6: Ports<Addr6>,
}

type Ports<A> = HashMap<MapData, FlowKey<A>, ForeignNat>;

impl ForeignNatPorts {
    pub(crate) fn new(ebpf: &Ebpf) -> Result<Self> {
        Ok(Self {
            v4: lend(ebpf, Addr4::MAPS.foreign_nat)?,
            v6: lend(ebpf, Addr6::MAPS.foreign_nat)?,
        })
    }

    /// Keeps the port of `source` free towards `peer` for `secs` seconds, or until the programs see
    /// the connection's end. `proto` is a protocol number of IP.
    pub fn keep(
        &mut self,
        proto: u8,
        source: SocketAddr,
        peer: SocketAddr,
        secs: u32,
    ) -> Result<()> {
        if source.is_ipv4() {
            keep(&mut self.v4, proto, source, peer, secs)
        } else {
            keep(&mut self.v6, proto, source, peer, secs)
        }
    }
}

fn keep<A: FamilyNames>(
    ports: &mut Ports<A>,
    proto: u8,
    source: SocketAddr,
    peer: SocketAddr,
    secs: u32,
) -> Result<()> {
    let end = |at: SocketAddr| Some(SockAddr::new(A::from_ip(at.ip())?, Port::new(at.port())));
    let (Some(source), Some(peer)) = (end(source), end(peer)) else {
        return Ok(());
    };
    let key = FlowKey::new(Hook::INGRESS, Proto(proto), peer, source);
    let row = ForeignNat::until(boot_secs()?.saturating_add(secs));
    ports
        .insert(key, row, 0)
        .with_context(|| format!("write {}", A::MAPS.foreign_nat))
}
