//! The remains of kube-proxy's mode ipvs, with real virtual servers: `kpx check` finds them, `kpx
//! cleanup` removes them.

mod dialling;
mod migration;
mod state;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use expect_test::expect;
use testbed::agent::kpx;
use testbed::netns::NetNs;

const FRONTENDS: [&str; 2] = ["10.96.0.10:80", "[fd00:10:96::10]:80"];
const BACKENDS: [&str; 2] = ["192.0.2.1:8080", "[fd00::1]:8080"];

#[test]
fn cleanup_removes_the_remains_of_mode_ipvs() -> Result<()> {
    let ns = NetNs::create(format!("kpx-ipvs-{}", std::process::id()))?;
    ns.ip("link add eth0 type dummy
         link set eth0 up
         addr add 192.0.2.1/24 dev eth0
         addr add fd00::1/64 dev eth0 nodad
         link add kube-ipvs0 type dummy
         addr add 10.96.0.10/32 dev kube-ipvs0
         addr add fd00:10:96::10/128 dev kube-ipvs0 nodad")?;
    for (frontend, backend) in FRONTENDS.into_iter().zip(BACKENDS) {
        for protocol in ["-t", "-u"] {
            ipvsadm(&ns, &["-A", protocol, frontend, "-s", "rr"])?;
            ipvsadm(&ns, &["-a", protocol, frontend, "-r", backend, "-m"])?;
        }
    }
    // A node port of kube-proxy, a server of another program, and a server in a network that
    // kube-proxy excludes.
    for set in [
        "KUBE-NODE-PORT-TCP bitmap:port range 0-65535",
        "KUBE-6-LOAD-BALANCER-SOURCE-CID hash:ip family inet6",
        "MINE hash:ip",
    ] {
        ns.exec(Command::new("ipset").arg("create").args(set.split(' ')))?;
    }
    ns.exec(Command::new("ipset").args(["add", "KUBE-NODE-PORT-TCP", "30080"]))?;
    ns.ip("addr add 10.96.7.7/32 dev kube-ipvs0")?;
    for others in ["192.0.2.1:30080", "192.0.2.1:30081", "10.96.7.7:80"] {
        ipvsadm(&ns, &["-A", "-t", others, "-s", "rr"])?;
    }
    for (key, value) in [
        ("ipv4/conf/all/arp_ignore", "1"),
        ("ipv4/conf/all/arp_announce", "2"),
    ] {
        ns.sysctl(key, value)?;
    }
    for (frontend, backend) in FRONTENDS.into_iter().zip(BACKENDS) {
        answers(&ns, frontend, backend)
            .with_context(|| format!("IPVS does not lead {frontend} to {backend}"))?;
    }
    expect![[r#"
        fail   kube-ipvs0              there, of kube-proxy's mode ipvs: it makes every ClusterIP the host's own — 1. start kpx beside kube-proxy (docs/migration.md), 2. wait until kpx status says healthy, 3. kpx cleanup --kube-proxy
    "#]].assert_eq(&found(&ns)?);

    let untouched = kpx(&ns, "cleanup")?;
    ensure!(
        untouched.stdout == b"nothing to remove\n",
        "only with --kube-proxy: {untouched:?}"
    );
    ensure!(virtual_servers(&ns)? == 7);
    let output = kpx(
        &ns,
        "cleanup --kube-proxy --force --ipvs-exclude-cidrs 10.96.7.0/24",
    )?;
    ensure!(output.status.success(), "{output:?}");
    expect![[r#"
        removed 5 virtual servers of IPVS
        removed the device kube-ipvs0
        removed the setting ipv4.conf.all.arp_ignore = 1 of strictARP
        removed the setting ipv4.conf.all.arp_announce = 2 of strictARP
        removed 2 ipsets
        left as they are: virtual servers of IPVS at 10.96.7.7:80/tcp, 192.0.2.1:30081/tcp: not at addresses of kube-proxy, or excluded
    "#]]
    .assert_eq(&String::from_utf8(output.stdout)?);
    ensure!(virtual_servers(&ns)? == 2, "those of others");
    ensure!(
        ns.exec(Command::new("ipset").args(["list", "-name"]))? == "MINE\n",
        "a set of others is gone"
    );
    let arp = ns.run(|| fs::read_to_string("/proc/sys/net/ipv4/conf/all/arp_announce"))?;
    ensure!(arp == "0\n", "arp_announce is {arp}");
    expect![[r#"
        ok     kube-ipvs0              not there
    "#]]
    .assert_eq(&found(&ns)?);
    Ok(())
}

#[test]
fn foreign_virtual_servers_stay() -> Result<()> {
    let ns = NetNs::create(format!("kpx-ipvs-other-{}", std::process::id()))?;
    ipvsadm(&ns, &["-A", "-t", FRONTENDS[0], "-s", "rr"])?;
    let output = kpx(&ns, "cleanup --kube-proxy --force")?;
    expect![[r#"
        nothing to remove
        left as they are: virtual servers of IPVS at 10.96.0.10:80/tcp: without kube-ipvs0 their owner is unknown
    "#]]
    .assert_eq(&String::from_utf8(output.stdout)?);
    ensure!(virtual_servers(&ns)? == 1);
    Ok(())
}

/// Checks that a connection to `frontend` reaches `backend`.
fn answers(ns: &NetNs, frontend: &str, backend: &str) -> Result<()> {
    let frontend: SocketAddr = frontend.parse()?;
    let backend: SocketAddr = backend.parse()?;
    ns.run(|| {
        let listener = TcpListener::bind(backend).context("listen")?;
        let server = thread::spawn(move || -> Result<()> {
            let (mut stream, _) = listener.accept()?;
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            Ok(stream.write_all(&byte)?)
        });
        let mut client =
            TcpStream::connect_timeout(&frontend, Duration::from_secs(5)).context("connect")?;
        client.write_all(b"?")?;
        client.read_exact(&mut [0]).context("read the answer")?;
        server.join().expect("the server does not panic")
    })
}

fn ipvsadm(ns: &NetNs, arguments: &[&str]) -> Result<String> {
    ns.exec(Command::new("ipvsadm").args(arguments))
}

/// Counts the virtual servers that the kernel lists for this thread, below three heading lines.
fn virtual_servers(ns: &NetNs) -> Result<usize> {
    let listed = ns
        .run(|| fs::read_to_string("/proc/thread-self/net/ip_vs"))
        .context("read the virtual servers")?;
    let is_server = |line: &&str| line.starts_with("TCP") || line.starts_with("UDP");
    Ok(listed.lines().filter(is_server).count())
}

/// Returns the findings of `kpx check` about the device.
fn found(ns: &NetNs) -> Result<String> {
    let text = String::from_utf8(kpx(ns, "check --no-headers")?.stdout)?;
    Ok(text
        .lines()
        .filter(|line| line.contains("kube-ipvs0"))
        .map(|line| format!("{line}\n"))
        .collect())
}
