//! Reserves foreign NAT ports: source ports of connections that are older than kpx's programs.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{HashMap, MapData};
use proxy_common::addr::{Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::flow::{FlowKey, Hook};
use proxy_common::foreign_nat::{ForeignNat, Packet};

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

    /// Reserves the port of `source` towards `peer`, for as long as the programs do after a
    /// connection's packet. `proto` is an IP protocol number. A valid row, which the programs may
    /// have written, stays unchanged.
    pub fn keep(
        &mut self,
        proto: u8,
        source: SocketAddr,
        peer: SocketAddr,
        is_closing: bool,
    ) -> Result<()> {
        if source.is_ipv4() {
            keep(&mut self.v4, Proto(proto), source, peer, is_closing)
        } else {
            keep(&mut self.v6, Proto(proto), source, peer, is_closing)
        }
    }
}

fn keep<A: FamilyNames>(
    ports: &mut Ports<A>,
    proto: Proto,
    source: SocketAddr,
    peer: SocketAddr,
    is_closing: bool,
) -> Result<()> {
    let end = |at: SocketAddr| Some(SockAddr::new(A::from_ip(at.ip())?, Port::new(at.port())));
    let (Some(source), Some(peer)) = (end(source), end(peer)) else {
        return Ok(());
    };
    let key = FlowKey::new(Hook::INGRESS, proto, peer, source);
    let now_secs = boot_secs()?;
    if ports.get(&key, 0).is_ok_and(|row| row.is_there(now_secs)) {
        return Ok(());
    }
    let latest = Packet {
        ends: is_closing,
        ..Packet::default()
    };
    let row = ForeignNat::after(ForeignNat::NONE, latest, proto, now_secs);
    ports
        .insert(key, row, 0)
        .with_context(|| format!("write {}", A::MAPS.foreign_nat))
}
