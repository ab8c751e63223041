//! From kube-proxy's mode ipvs to kpx and back, while clients dial: the commands of
//! `docs/migration.md`, and its promises for new connections.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use expect_test::expect;
use testbed::agent::{DEADLINE, Service, kpx, wait_until};
use testbed::echo::{Connection, Dial, Protocol};
use testbed::lab::{Family, Lab, Layout};
use testbed::netns::NetNs;
use testbed::served_lab::ServedLab;

use super::dialling::{Client, Dialling};
use super::state::{NODE_PORT, PORT, install, state};

const BACKENDS: [&str; 2] = ["p1b", "p2a"];

#[test]
fn no_new_connection_is_lost_on_the_way_from_ipvs_to_kpx_and_back() -> Result<()> {
    let base = ServedLab::with_manifests(Layout::Routed)?.serve(&BACKENDS, PORT)?;
    let web = Service::new("web", 10, &BACKENDS, PORT).node_port(NODE_PORT);
    base.put(&web)?;
    install(&base.lab, &web)?;
    let way = |dialling: &Dialling| walk(&base, &web, dialling);
    let account = Dialling::during(&clients(&base.lab, &web), &BACKENDS, way)?;
    println!("{account}");
    Ok(())
}

/// Returns a pod, the node by connections and by datagrams, and a machine outside.
fn clients<'a>(lab: &'a Lab, web: &Service) -> [Client<'a>; 4] {
    let node_port = |family| (lab.n1.host.addrs.ip(family), NODE_PORT).into();
    let dials = |protocols: &[Protocol], to: &dyn Fn(Family) -> std::net::SocketAddr| {
        protocols
            .iter()
            .flat_map(|protocol| Family::ALL.map(|family| Dial::new(*protocol, to(family))))
            .collect::<Vec<_>>()
    };
    let client = |name, dials| Client {
        host: lab.host(name),
        dials,
        asks_again: false,
    };
    let cluster_ip = |family| web.frontend(family);
    [
        client("p1a", dials(&Protocol::COMMON, &cluster_ip)),
        client("n1", dials(&[Protocol::Tcp], &cluster_ip)),
        // The node's own datagrams reach IPVS while its servers exist; a datagram in flight is lost
        // when they go.
        Client {
            asks_again: true,
            ..client("n1", dials(&[Protocol::Udp], &cluster_ip))
        },
        client("x", dials(&Protocol::COMMON, &node_port)),
    ]
}

fn walk(base: &ServedLab, web: &Service, dialling: &Dialling) -> Result<()> {
    let ns = &base.lab.n1.host.ns;
    let of_ipvs = state(ns)?;
    dialling.enter("IPVS serves alone")?;
    let mut kept = ["p1a", "n1"]
        .into_iter()
        .flat_map(|client| Family::ALL.map(|family| open(base, web, client, family)))
        .collect::<Result<Vec<_>>>()?;

    let agent = base.kpx(&["--proxy-mode=ipvs", "--ipvs-scheduler=wlc"])?;
    let status = agent.typed_status()?;
    ensure!(
        status.options.algorithm == "least-connections",
        "{status:?}"
    );
    ensure!(
        status
            .notices
            .iter()
            .any(|notice| notice.starts_with("ipvs.scheduler wlc: ")),
        "{status:?}"
    );
    dialling.enter("kpx serves beside IPVS")?;
    for (what, connection) in &mut kept {
        connection
            .exchange(b"still?")
            .with_context(|| format!("{what}: IPVS's connection beside kpx"))?;
    }
    same(
        &of_ipvs,
        &state(ns)?,
        "kpx beside kube-proxy changes nothing of it",
    )?;
    for (what, connection) in kept {
        connection.exchange_last(b"bye").context(what)?;
    }
    wait_until(DEADLINE, "the connections of IPVS have ended", || {
        Ok(!ns
            .read("/proc/thread-self/net/ip_vs_conn")?
            .contains("ESTABLISHED"))
    })?;

    let run_dir = agent.run_dir().display().to_string();
    expect![[r#"
        removed 12 virtual servers of IPVS
        removed the device kube-ipvs0
        removed the setting ipv4.conf.all.arp_ignore = 1 of strictARP
        removed the setting ipv4.conf.all.arp_announce = 2 of strictARP
        removed 6 chains of iptables-nft's table filter
        removed 5 chains of iptables-nft's table nat
        removed 6 chains of ip6tables-nft's table filter
        removed 5 chains of ip6tables-nft's table nat
        removed 34 ipsets
        made the nftables table ip kpx-keep, which keeps kube-proxy's connections open: kpx cleanup removes it
        made the nftables table ip6 kpx-keep, which keeps kube-proxy's connections open: kpx cleanup removes it
    "#]]
    .assert_eq(&said(ns, &format!("cleanup --kube-proxy --run-dir {run_dir}"))?);
    expect![[r#"
        ipv4/conf/all/arp_announce = 0
        ipv4/conf/all/arp_ignore = 0"#]]
    .assert_eq(&state(ns)?);
    dialling.enter("kpx serves alone")?;

    install(&base.lab, web)?;
    dialling.enter("IPVS is back beside kpx")?;
    same(&of_ipvs, &state(ns)?, "kube-proxy has made its state again")?;
    agent.stop()?;
    dialling.enter("the agent has ended")?;
    let bpf_dir = ns.bpf_dir();
    let drain = format!(
        "cleanup --drain --timeout 1s --run-dir {run_dir} --bpf-dir {}",
        bpf_dir.display()
    );
    let removed = said(ns, &drain)?;
    ensure!(
        removed.contains("removed the devices kpx0 and kpx1"),
        "{removed}"
    );
    ensure!(
        !ns.exec(Command::new("ip").args(["-brief", "link"]))?
            .contains("kpx0"),
        "kpx0 is left"
    );
    ensure!(
        !ns.exec(Command::new("nft").args(["list", "tables"]))?
            .contains("kpx-keep"),
        "kpx-keep is left"
    );
    dialling.enter("IPVS serves alone again")?;
    same(
        &of_ipvs,
        &state(ns)?,
        "kpx has taken nothing of kube-proxy's with it",
    )
}

fn open(
    base: &ServedLab,
    web: &Service,
    client: &str,
    family: Family,
) -> Result<(String, Connection)> {
    let what = format!("{client} by {family}");
    let connection =
        Dial::new(Protocol::Tcp, web.frontend(family)).connect(&base.lab.host(client).ns);
    Ok((what.clone(), connection.context(what)?))
}

fn same(before: &str, now: &str, what: &str) -> Result<()> {
    ensure!(before == now, "{what}. Before:\n{before}\nNow:\n{now}");
    Ok(())
}

/// Returns the output of a kpx command that must succeed.
fn said(ns: &NetNs, arguments: &str) -> Result<String> {
    let output = kpx(ns, arguments)?;
    ensure!(output.status.success(), "kpx {arguments}: {output:?}");
    Ok(String::from_utf8(output.stdout)?)
}
