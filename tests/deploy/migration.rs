//! From kube-proxy to kpx and back, on a node that has connections: what `docs/migration.md` promises of them.

use std::net::SocketAddr;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use kpx_tests::agent::{SERVICE_PORT, Service};
use kpx_tests::echo::{Connection, Dial, Protocol};
use kpx_tests::lab::{Family, Node};

use crate::cluster::{Cluster, PORT};
use crate::drop_in::kubeadm;
use kpx_tests::pod::Running;

#[test]
fn connections_that_kube_proxy_opened_outlive_it() -> Result<()> {
    let cluster = Cluster::start()?;
    let node = &cluster.lab.n1;
    let web = cluster.web()?;
    install_kube_proxy(&cluster, node, &web)?;
    let mut kept = connections(&cluster, &web)?;

    let (set, config) = kubeadm()?;
    let kpx = Running::ready(&cluster.lab, node, &set, &cluster.supplies(&[&config]))?;
    all_answer(&mut kept).context("kpx beside kube-proxy's rules")?;
    remove_kube_proxy(node)?;
    all_answer(&mut kept).context("kpx alone")?;
    cluster.serves("n1").context("new connections")?;
    kpx.stop()?;
    all_answer(&mut kept).context("neither of them")
}

#[test]
fn kube_proxy_serves_new_connections_at_once_when_kpx_goes() -> Result<()> {
    let cluster = Cluster::start()?;
    let node = &cluster.lab.n1;
    let web = cluster.web()?;
    let (set, config) = kubeadm()?;
    let kpx = Running::ready(&cluster.lab, node, &set, &cluster.supplies(&[&config]))?;
    cluster.serves("n1")?;
    install_kube_proxy(&cluster, node, &web)?;
    cluster.serves("n1").context("kube-proxy's rules under kpx")?;
    kpx.stop()?;
    cluster.serves("n1").context("kube-proxy alone")?;
    let links = node.host.ns.exec(Command::new("ip").args(["-brief", "link"]))?;
    ensure!(!links.contains("kpx0"), "kpx left a device behind:\n{links}");
    Ok(())
}

/// What kube-proxy in mode nftables makes of a Service, as far as its packets can tell.
fn install_kube_proxy(cluster: &Cluster, node: &Node, service: &Service) -> Result<()> {
    let backend = cluster.lab.host("p2a").addrs;
    for (family, table) in [(Family::V4, "ip"), (Family::V6, "ip6")] {
        let to = SocketAddr::new(backend.ip(family), PORT);
        let ip = service.cluster_ip().ip(family);
        let chains = ["prerouting", "output"].map(|hook| {
            format!(
                "chain nat-{hook} {{
                    type nat hook {hook} priority -100
                    {table} daddr {ip} meta l4proto {{ tcp, udp }} th dport {SERVICE_PORT} dnat to {to}
                }}"
            )
        });
        node.host.ns.nft(&format!("table {table} kube-proxy {{\n{}\n}}", chains.join("\n")))?;
    }
    Ok(())
}

/// As `kube-proxy --cleanup` does.
fn remove_kube_proxy(node: &Node) -> Result<()> {
    node.host.ns.nft("delete table ip kube-proxy\ndelete table ip6 kube-proxy\n")
}

/// From a pod and from the node, by both families.
fn connections(cluster: &Cluster, service: &Service) -> Result<Vec<(String, Connection)>> {
    let clients = ["p1a", "n1"].into_iter().flat_map(|client| Family::ALL.map(|family| (client, family)));
    let connections = clients.map(|(client, family)| {
        let dial = Dial::new(Protocol::Tcp, service.frontend(family));
        let connection = dial.connect(&cluster.lab.host(client).ns);
        let what = format!("{client} by {family}");
        Ok((what.clone(), connection.context(what)?))
    });
    let mut connections = connections.collect::<Result<Vec<_>>>()?;
    all_answer(&mut connections)?;
    Ok(connections)
}

fn all_answer(connections: &mut [(String, Connection)]) -> Result<()> {
    for (what, connection) in connections {
        connection.exchange(b"hello").with_context(|| what.clone())?;
    }
    Ok(())
}
