//! From kube-proxy to kpx and back on a node with connections: the promises of `docs/migration.md`.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use anyhow::{Context, Result, ensure};
use testbed::agent::{DEADLINE, SERVICE_PORT, Service, wait_until};
use testbed::echo::{Connection, Dial, Protocol};
use testbed::lab::{Family, Node};

use crate::deploy::cluster::{Cluster, PORT};
use crate::deploy::drop_in::kubeadm;
use crate::deploy::own::{container, initial};
use crate::deploy::render::{deploy_dir, kustomize};
use testbed::pod::Running;

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

/// kpx's image contains no nft or iptables. Open connections outlive the rules that translate them,
/// in both forms of nftables rules.
#[test]
fn pod_removes_kube_proxys_rules_once_kpx_serves() -> Result<()> {
    for made_by in [MadeBy::Nft, MadeBy::Iptables] {
        let cluster = Cluster::start()?;
        let node = &cluster.lab.n1;
        let web = cluster.web()?;
        match made_by {
            MadeBy::Nft => install_kube_proxy(&cluster, node, &web)?,
            MadeBy::Iptables => install_by_iptables(&cluster, node, &web)?,
        }
        let mut kept = connections(&cluster, &web)?;
        let cleanup = initial("kube-proxy-cleanup")?;
        let (set, config) = kubeadm()?;
        let supplies = cluster.supplies(&[&config]);
        let mut early = Running::start(&cluster.lab, node, &cleanup, &supplies)?;
        ensure!(!early.wait()?.success(), "{}", early.log());
        ensure!(
            early.log().contains("kpx does not serve this node"),
            "{}",
            early.log()
        );
        all_answer(&mut kept).context("nothing is removed")?;

        let kpx = Running::ready(&cluster.lab, node, &set, &supplies)?;
        let mut late = Running::start(&cluster.lab, node, &cleanup, &supplies)?;
        ensure!(late.wait()?.success(), "{}", late.log());
        let rules = node
            .host
            .ns
            .exec(Command::new("nft").args(["list", "ruleset"]))?;
        ensure!(
            !rules.contains("KUBE-S") && !rules.contains("kube-proxy"),
            "{rules}"
        );
        let said = late.log();
        let removed = match made_by {
            MadeBy::Nft => "removed the nftables table ip6 kube-proxy",
            MadeBy::Iptables => "removed 3002 chains of ip6tables-nft's table nat",
        };
        ensure!(
            said.contains(removed) && said.contains("made the nftables table ip6 kpx-keep"),
            "{said}"
        );
        all_answer(&mut kept).context("without kube-proxy's rules")?;
        cluster.serves("n1").context("new connections")?;
        kpx.stop()?;
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum MadeBy {
    Nft,
    Iptables,
}

/// The operator restores kube-proxy's image, while a pod of `deploy/kubernetes/way-back` stands by.
#[test]
fn a_node_is_kube_proxys_again_when_the_image_is_set_back() -> Result<()> {
    let cluster = Cluster::start()?;
    let node = &cluster.lab.n1;
    let web = cluster.web()?;
    let (set, config) = kubeadm()?;
    let supplies = cluster.supplies(&[&config]);
    let way_back = stands_by(&cluster, "1s")?;
    let kpx = Running::ready(&cluster.lab, node, &set, &supplies)?;
    let mut kept = connections(&cluster, &web)?;
    // The pod stands by while kpx restarts.
    kpx.stop()?;
    let kpx = Running::ready(&cluster.lab, node, &set, &supplies)?;
    all_answer(&mut kept).context("after a restart")?;
    ensure!(!way_back.log().contains(REPLACED), "{}", way_back.log());
    kpx.stop()?;

    install_kube_proxy(&cluster, node, &web)?;
    let kube_proxy = KubeProxy::start(node, "1.7e+09")?;
    wait_until(DEADLINE, "the drain begins", || {
        Ok(way_back.log().contains("draining: "))
    })
    .with_context(|| way_back.log())?;
    // New connections follow kube-proxy's rules, which lead to a newer backend; no agent has
    // updated the programs.
    remove_kube_proxy(node)?;
    install_kube_proxy(&cluster, node, &web.backed_by(&["p2b"]))?;
    for (client, family) in ["p1a", "n1"]
        .into_iter()
        .flat_map(|client| Family::ALL.map(|family| (client, family)))
    {
        let dial = Dial::new(Protocol::Tcp, web.frontend(family));
        let backend = dial
            .exchange(&cluster.lab.host(client).ns, b"hello")?
            .backend;
        ensure!(
            backend == "p2b",
            "{client} by {family} is served by {backend}"
        );
    }
    all_answer(&mut kept).context("while it drains")?;
    drop(kept);
    let is_clean = || {
        let links = node
            .host
            .ns
            .exec(Command::new("ip").args(["-brief", "link"]))?;
        let filters = node
            .host
            .ns
            .exec(Command::new("tc").args(["filter", "show", "dev", "eth0", "ingress"]))?;
        Ok(!links.contains("kpx0") && !filters.contains("kpx_"))
    };
    wait_until(DEADLINE, "nothing of kpx is left", is_clean).with_context(|| way_back.log())?;
    wait_until(DEADLINE, "it says so", || {
        Ok(way_back.log().contains("removed the devices kpx0 and kpx1"))
    })?;
    ensure!(kube_proxy.times_asked() > 0, "kube-proxy was not asked");
    way_back.stop()
}

/// A kube-proxy that answers before it has written rules must not take the node.
#[test]
fn a_kube_proxy_without_rules_takes_no_node() -> Result<()> {
    let cluster = Cluster::start()?;
    let node = &cluster.lab.n1;
    let (set, config) = kubeadm()?;
    let kpx = Running::ready(&cluster.lab, node, &set, &cluster.supplies(&[&config]))?;
    cluster.serves("n1")?;
    kpx.stop()?;
    let way_back = stands_by(&cluster, "200ms")?;
    let kube_proxy = KubeProxy::start(node, "0")?;
    // Two requests per look, at least every 100 ms: far longer than kube-proxy needs to serve.
    wait_until(DEADLINE, "it is asked again and again", || {
        Ok(kube_proxy.times_asked() > 20)
    })?;
    cluster.serves("n1")?;
    ensure!(!way_back.log().contains(REPLACED), "{}", way_back.log());
    way_back.stop()
}

/// The first log line of the way back.
const REPLACED: &str = "kube-proxy serves, and no kpx runs";

/// Starts a pod of `deploy/kubernetes/way-back`, which waits until kube-proxy has served for
/// `time`.
fn stands_by<'a>(cluster: &'a Cluster, time: &str) -> Result<Running<'a>> {
    let mut set = kustomize(&deploy_dir().join("kubernetes/way-back"))?
        .daemon_set
        .context("a DaemonSet")?;
    let args = container(&mut set)?.args.as_mut().context("arguments")?;
    let stand_by = args
        .iter_mut()
        .find(|arg| *arg == "--stand-by")
        .context("the flag")?;
    *stand_by = format!("--stand-by={time}");
    let running = Running::start(&cluster.lab, &cluster.lab.n1, &set, &cluster.supplies(&[]))?;
    wait_until(DEADLINE, "it stands by", || {
        Ok(running.log().contains("standing by"))
    })?;
    Ok(running)
}

/// The health endpoint of a kube-proxy on a node.
struct KubeProxy {
    asked: Arc<AtomicU32>,
}

impl KubeProxy {
    /// Starts it with the time of its last sync.
    fn start(node: &Node, synced: &str) -> Result<Self> {
        let asked = Arc::new(AtomicU32::new(0));
        let metrics = format!("kubeproxy_sync_proxy_rules_last_timestamp_seconds {synced}\n");
        for (port, body) in [(10_256, String::new()), (10_249, metrics)] {
            let listener = node
                .host
                .ns
                .run(|| TcpListener::bind(("127.0.0.1", port)))?;
            let asked = Arc::clone(&asked);
            thread::spawn(move || {
                for mut stream in listener.incoming().map_while(Result::ok) {
                    asked.fetch_add(1, Ordering::Relaxed);
                    let _read = stream.read(&mut [0; 1024]);
                    let head = format!(
                        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close",
                        body.len()
                    );
                    let _said = write!(stream, "{head}\r\n\r\n{body}");
                }
            });
        }
        Ok(Self { asked })
    }

    fn times_asked(&self) -> u32 {
        self.asked.load(Ordering::Relaxed)
    }
}

/// Adds the rules of kube-proxy's mode nftables for a Service, in a form equivalent for packets.
fn install_kube_proxy(cluster: &Cluster, node: &Node, service: &Service) -> Result<()> {
    let backend = cluster.lab.host(service.backends[0]).addrs;
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
        node.host.ns.nft(&format!(
            "table {table} kube-proxy {{\n{}\n}}",
            chains.join("\n")
        ))?;
    }
    Ok(())
}

/// Adds rules of mode iptables for a Service by iptables-nft, including a jump to another chain.
fn install_by_iptables(cluster: &Cluster, node: &Node, service: &Service) -> Result<()> {
    let backend = cluster.lab.host(service.backends[0]).addrs;
    for (family, tool) in [(Family::V4, "iptables-nft"), (Family::V6, "ip6tables-nft")] {
        let to = SocketAddr::new(backend.ip(family), PORT);
        let ip = service.cluster_ip().ip(family);
        for rule in [
            "-N KUBE-SERVICES".to_owned(),
            "-N KUBE-SVC-WEB".to_owned(),
            format!("-A KUBE-SVC-WEB -p tcp -j DNAT --to-destination {to}"),
            format!("-A KUBE-SERVICES -d {ip} -p tcp --dport {SERVICE_PORT} -j KUBE-SVC-WEB"),
            "-A PREROUTING -j KUBE-SERVICES".to_owned(),
            "-A OUTPUT -j KUBE-SERVICES".to_owned(),
        ] {
            let words = ["-t", "nat"].into_iter().chain(rule.split(' '));
            node.host.ns.exec(Command::new(tool).args(words))?;
        }
        // As many as a cluster of a thousand Services has.
        let table = match family {
            Family::V4 => "ip nat",
            Family::V6 => "ip6 nat",
        };
        let chains = (0..3_000).map(|nth| format!("add chain {table} KUBE-SEP-{nth}\n"));
        node.host.ns.nft(&chains.collect::<String>())?;
    }
    Ok(())
}

fn remove_kube_proxy(node: &Node) -> Result<()> {
    node.host
        .ns
        .nft("delete table ip kube-proxy\ndelete table ip6 kube-proxy\n")
}

/// Opens connections from a pod and from the node, by both families.
fn connections(cluster: &Cluster, service: &Service) -> Result<Vec<(String, Connection)>> {
    let clients = ["p1a", "n1"]
        .into_iter()
        .flat_map(|client| Family::ALL.map(|family| (client, family)));
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
        connection
            .exchange(b"hello")
            .with_context(|| what.clone())?;
    }
    Ok(())
}
