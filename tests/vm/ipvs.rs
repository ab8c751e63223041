//! The remains of kube-proxy's mode ipvs, with real virtual servers: `kpx check` finds them, `kpx cleanup` removes them.

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
    for (frontend, backend) in FRONTENDS.into_iter().zip(BACKENDS) {
        answers(&ns, frontend, backend).with_context(|| format!("IPVS does not lead {frontend} to {backend}"))?;
    }
    expect![[r#"
        fail   kube-ipvs0              there, of kube-proxy's mode ipvs: it makes every ClusterIP the host's own — 1. start kpx beside kube-proxy (docs/migration.md), 2. wait until kpx status says healthy, 3. kpx cleanup --kube-proxy
    "#]].assert_eq(&found(&ns)?);

    let untouched = kpx(&ns, "cleanup")?;
    ensure!(untouched.stdout == b"nothing to remove\n", "only with --kube-proxy: {untouched:?}");
    ensure!(virtual_servers(&ns)? == 4);
    let output = kpx(&ns, "cleanup --kube-proxy --force")?;
    ensure!(output.status.success(), "{output:?}");
    expect![[r#"
        removed 4 virtual servers of IPVS
        removed the device kube-ipvs0
    "#]]
    .assert_eq(&String::from_utf8(output.stdout)?);
    ensure!(virtual_servers(&ns)? == 0);
    expect![[r#"
        ok     kube-ipvs0              not there
    "#]]
    .assert_eq(&found(&ns)?);
    Ok(())
}

#[test]
fn virtual_servers_of_others_stay() -> Result<()> {
    let ns = NetNs::create(format!("kpx-ipvs-other-{}", std::process::id()))?;
    ipvsadm(&ns, &["-A", "-t", FRONTENDS[0], "-s", "rr"])?;
    let output = kpx(&ns, "cleanup --kube-proxy --force")?;
    ensure!(output.stdout == b"nothing to remove\n", "{output:?}");
    ensure!(virtual_servers(&ns)? == 1);
    Ok(())
}

/// A connection to `frontend` is one to `backend`.
fn answers(ns: &NetNs, frontend: &str, backend: &str) -> Result<()> {
    let (frontend, backend): (SocketAddr, SocketAddr) = (frontend.parse()?, backend.parse()?);
    ns.run(|| {
        let listener = TcpListener::bind(backend).context("listen")?;
        let server = thread::spawn(move || -> Result<()> {
            let (mut stream, _) = listener.accept()?;
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            Ok(stream.write_all(&byte)?)
        });
        let mut client = TcpStream::connect_timeout(&frontend, Duration::from_secs(5)).context("connect")?;
        client.write_all(b"?")?;
        client.read_exact(&mut [0]).context("read the answer")?;
        server.join().expect("the server does not panic")
    })
}

fn ipvsadm(ns: &NetNs, arguments: &[&str]) -> Result<String> {
    ns.exec(Command::new("ipvsadm").args(arguments))
}

/// Counts the virtual servers that the kernel lists for this thread, below three lines of headings.
fn virtual_servers(ns: &NetNs) -> Result<usize> {
    let listed = ns.run(|| fs::read_to_string("/proc/thread-self/net/ip_vs")).context("read the virtual servers")?;
    let is_server = |line: &&str| line.starts_with("TCP") || line.starts_with("UDP");
    Ok(listed.lines().filter(is_server).count())
}

/// Returns the findings of `kpx check` about the device.
fn found(ns: &NetNs) -> Result<String> {
    let text = String::from_utf8(kpx(ns, "check --no-headers")?.stdout)?;
    Ok(text.lines().filter(|line| line.contains("kube-ipvs0")).map(|line| format!("{line}\n")).collect())
}
