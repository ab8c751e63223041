//! The least that a connection past the stack costs: two programs and their ways, see
//! `proxy-ebpf/src/limit.rs`.

use std::net::SocketAddrV4;
use std::process::Command;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::HashMap;
use aya::programs::tc::TcAttachOptions;
use aya::programs::{LinkOrder, SchedClassifier, TcAttachType};
use nix::net::if_::if_nametoindex;
use proxy_common::addr::{Addr4, Port, Proto};
use proxy_common::limit::{LimitKey, LimitWay};
use proxy_common::names::{LIMIT, LIMIT_BACK, LIMIT_WAYS};
use proxy_datapath::verifier;
use serde_json::Value;
use testbed::lab::{Host, Lab};
use testbed::netns::NetNs;
use testbed::test_run::object;

use super::{Path, services};

/// The programs at the devices of the client and of the backend on n1, as long as this value lives.
#[derive(Debug)]
pub(super) struct Limit(Ebpf);

impl Limit {
    pub(super) fn start(lab: &Lab) -> Result<Self> {
        let mut this = Self(
            verifier::loader()
                .load(object()?)
                .context("load the BPF object")?,
        );
        let [client, backend] =
            [services::client, services::backend].map(|of| lab.host(of(Path::Local)));
        let frontend = services::frontend(lab, Path::Local);
        this.write(lab, client, backend, frontend)?;
        for (program, pod) in [(LIMIT, client), (LIMIT_BACK, backend)] {
            lab.n1.host.ns.run(|| this.attach(program, pod.name))?;
        }
        Ok(this)
    }

    /// Writes the ways of TCP and UDP: to the backend, and back to the client.
    fn write(
        &mut self,
        lab: &Lab,
        client: &Host,
        backend: &Host,
        frontend: SocketAddrV4,
    ) -> Result<()> {
        let there = way(
            &lab.n1.host.ns,
            backend,
            SocketAddrV4::new(backend.addrs.v4, services::TARGET_PORT),
        )?;
        let back = way(&lab.n1.host.ns, client, frontend)?;
        let map = self.0.map_mut(LIMIT_WAYS).context("no table of ways")?;
        let mut ways: HashMap<_, LimitKey, LimitWay> = map.try_into()?;
        let [client, backend, service] =
            [client.addrs.v4, backend.addrs.v4, *frontend.ip()].map(Addr4::from);
        let [from, to] = [frontend.port(), services::TARGET_PORT].map(Port::new);
        for proto in [Proto::TCP, Proto::UDP] {
            ways.insert(LimitKey::new(client, service, from, proto), there, 0)?;
            ways.insert(LimitKey::new(backend, client, to, proto), back, 0)?;
        }
        Ok(())
    }

    fn attach(&mut self, name: &str, device: &str) -> Result<()> {
        let program = self
            .0
            .program_mut(name)
            .with_context(|| format!("no program {name}"))?;
        let program: &mut SchedClassifier = program.try_into()?;
        verifier::load(|| program.load()).with_context(|| format!("load {name}"))?;
        let options = TcAttachOptions::TcxOrder(LinkOrder::first());
        program
            .attach_with_options(device, TcAttachType::Ingress, options)
            .map(drop)
            .context("attach the limit")
    }

    /// Returns the packets that have taken their way so far.
    pub(super) fn packets(&self) -> Result<u64> {
        let map = self.0.map(LIMIT_WAYS).context("no table of ways")?;
        let ways: HashMap<_, LimitKey, LimitWay> = map.try_into()?;
        ways.iter().map(|entry| Ok(entry?.1.packets)).sum()
    }
}

/// Returns the way to a pod of that node; `end` is the address that the packet gets.
fn way(node: &NetNs, pod: &Host, end: SocketAddrV4) -> Result<LimitWay> {
    let ifindex = node
        .run(|| if_nametoindex(pod.name))
        .with_context(|| format!("find device {}", pod.name))?;
    let dmac = mac(&pod.ns, "eth0")?;
    let smac = mac(node, pod.name)?;
    Ok(LimitWay::new(
        Addr4::from(*end.ip()),
        Port::new(end.port()),
        ifindex,
        dmac,
        smac,
    ))
}

fn mac(ns: &NetNs, device: &str) -> Result<[u8; 6]> {
    let text = ns.exec(Command::new("ip").args(["-json", "link", "show", device]))?;
    let list: Value = serde_json::from_str(&text).with_context(|| format!("parse {text}"))?;
    let address = list[0]["address"]
        .as_str()
        .with_context(|| format!("no address in {text}"))?;
    let bytes: Vec<u8> = address
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16))
        .collect::<Result<_, _>>()?;
    bytes
        .try_into()
        .map_err(|_| anyhow::anyhow!("{address} is no address of Ethernet"))
}
