//! Node ports at 127.0.0.1 and ::1 (KEP-6032): only the host's own programs are served.

use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::netns::NetNs;

use super::reach::{answer, dial_within, is_refused, pod};

/// The timeout of an answer.
const SOON: Duration = Duration::from_millis(700);
const ROUTE_LOCALNET: &str = "/proc/sys/net/ipv4/conf/";
const NFTABLES: &str =
    "--proxy-mode nftables --nodeport-addresses primary,localhost --socket-lb off";

#[test]
fn the_host_alone_reaches_node_ports_at_its_loopback_addresses() -> Result<()> {
    let node = NetNs::machine("localhost")?;
    node.sysctl("ipv4/ip_forward", "1")?;
    node.sysctl("ipv6/conf/all/forwarding", "1")?;
    let pod = pod(&node)?;
    serve(&pod, &["10.244.1.5:8443", "[fd00:1::5]:8443"])?;
    serve(&node, &["192.0.2.1:8444", "[fd00::1]:8444"])?;
    let objects = [("services", SERVICES), ("slices", SLICES)];
    let kpx = Agent::start_alone(&node, &objects, NFTABLES)?.healthy()?;

    let is_refused = |to: &str| is_refused(dial_within(&node, to, SOON));
    for (to, seen) in [
        ("127.0.0.1:30443", "192.0.2.1"),
        ("[::1]:30443", "fd00::1"),
        // The backend on the host must not see a loopback client, which it might trust.
        ("127.0.0.1:30444", "192.0.2.1"),
        ("[::1]:30444", "fd00::1"),
        ("192.0.2.1:30443", "192.0.2.1"),
    ] {
        ensure!(
            by_tcp(&node, to).with_context(|| format!("TCP, {to}"))? == seen,
            "TCP, {to}"
        );
        ensure!(
            by_udp(&node, to).with_context(|| format!("UDP, {to}"))? == seen,
            "UDP, {to}"
        );
    }
    // KEP-6032 refuses these addresses. kube-proxy's mode iptables serves the node itself without a
    // local endpoint.
    for to in [
        "127.0.0.1:30445",
        "[::1]:30445",
        "127.0.0.1:30446",
        "127.0.0.2:30443",
    ] {
        ensure!(is_refused(to), "{to} is refused");
    }
    let localnet = |device: &str| node.read(&format!("{ROUTE_LOCALNET}{device}/route_localnet"));
    ensure!(
        [localnet("lo")?, localnet("all")?, localnet("eth0")?].map(|value| value.trim().to_owned())
            == ["1", "0", "0"]
    );

    // Pods and machines behind an uplink cannot reach a loopback address, even where kube-proxy has
    // set `route_localnet` for all devices.
    lead_out(&pod)?;
    let resets = own_resets(&node)?;
    ensure!(
        !is_answered(&pod, "127.0.0.1:30443") && own_resets(&node)? == resets,
        "the kernel drops a martian"
    );
    node.sysctl("ipv4/conf/all/route_localnet", "1")?;
    node.sysctl("ipv4/conf/all/rp_filter", "0")?;
    ensure!(
        !is_answered(&pod, "127.0.0.1:30443"),
        "a pod is served at the node's loopback address"
    );
    ensure!(
        own_resets(&node)? > resets,
        "the packet comes to the node's stack, which refuses it"
    );
    node.sysctl("ipv4/conf/all/route_localnet", "0")?;
    kpx.stop()?;

    let kpx =
        Agent::start_alone(&node, &objects, "--proxy-mode nftables --socket-lb off")?.healthy()?;
    ensure!(
        is_refused("127.0.0.1:30443") && is_refused("[::1]:30443"),
        "they are not named any more"
    );
    ensure!(localnet("lo")?.trim() == "0", "the switch is as it was");
    kpx.stop()?;

    let kpx = Agent::start_alone(&node, &objects, "--socket-lb off")?.healthy()?;
    ensure!(
        by_tcp(&node, "127.0.0.1:30443")? == "192.0.2.1" && is_refused("[::1]:30443"),
        "mode iptables"
    );
    kpx.stop()
}

/// Routes a pod's packets for 127.0.0.1 out of its device.
fn lead_out(pod: &NetNs) -> Result<()> {
    pod.sysctl("ipv4/conf/all/route_localnet", "1")?;
    pod.sysctl("ipv4/conf/all/rp_filter", "0")?;
    pod.ip("link set lo up
         route flush table local root 127.0.0.0/8
         route add 127.0.0.1/32 via 169.254.1.1 dev eth0 onlink src 10.244.1.5")
}

/// Answers each client by TCP and UDP with the client's address, until the test process ends.
fn serve(ns: &NetNs, addrs: &[&str]) -> Result<()> {
    for addr in addrs {
        answer(ns, addr, |from| from.ip().to_string())?;
        let socket = ns
            .run(|| UdpSocket::bind(addr))
            .with_context(|| format!("bind {addr}"))?;
        thread::spawn(move || {
            while let Ok((_, from)) = socket.recv_from(&mut [0; 9]) {
                let _sent = socket.send_to(from.ip().to_string().as_bytes(), from);
            }
        });
    }
    Ok(())
}

fn by_tcp(ns: &NetNs, to: &str) -> Result<String> {
    let mut reported = None;
    wait_until(DEADLINE, &format!("{to} answers"), || {
        reported = dial_within(ns, to, SOON).ok();
        Ok(reported.is_some())
    })?;
    reported.context("an answer")
}

fn by_udp(ns: &NetNs, to: &str) -> Result<String> {
    let to: SocketAddr = to.parse()?;
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = ns.run(|| UdpSocket::bind(any))?;
    socket.set_read_timeout(Some(DEADLINE))?;
    ns.run(|| socket.send_to(b"?", to))?;
    let mut answer = [0; 64];
    let (len, from) = socket.recv_from(&mut answer)?;
    ensure!(from == to, "the client sees {from}");
    Ok(String::from_utf8(answer[..len].to_vec())?)
}

fn is_answered(ns: &NetNs, to: &str) -> bool {
    let to: SocketAddr = to.parse().expect("an address");
    ns.run(|| TcpStream::connect_timeout(&to, SOON)).is_ok()
}

/// Returns the number of connections that the host's own stack has reset.
fn own_resets(ns: &NetNs) -> Result<u64> {
    let counters = ns.read("/proc/thread-self/net/snmp")?;
    let mut lines = counters
        .lines()
        .filter_map(|line| line.strip_prefix("Tcp: "));
    let names = lines.next().context("the names")?;
    let values = lines.next().context("the values")?;
    let mut pairs = names.split(' ').zip(values.split(' '));
    let (_, resets) = pairs
        .find(|(name, _)| *name == "OutRsts")
        .context("OutRsts")?;
    Ok(resets.parse()?)
}

const SERVICES: &str = "
apiVersion: v1
kind: Service
metadata: { name: pod, namespace: default }
spec:
  type: NodePort
  ipFamilies: [IPv4, IPv6]
  clusterIP: 10.96.0.20
  clusterIPs: [10.96.0.20, \"fd00:10::20\"]
  ports: [{ name: t, port: 443, nodePort: 30443 }, { name: u, port: 443, nodePort: 30443, protocol: UDP }]
---
apiVersion: v1
kind: Service
metadata: { name: host, namespace: default }
spec:
  type: NodePort
  ipFamilies: [IPv4, IPv6]
  clusterIP: 10.96.0.21
  clusterIPs: [10.96.0.21, \"fd00:10::21\"]
  ports: [{ name: t, port: 443, nodePort: 30444 }, { name: u, port: 443, nodePort: 30444, protocol: UDP }]
---
apiVersion: v1
kind: Service
metadata: { name: far, namespace: default }
spec:
  type: NodePort
  externalTrafficPolicy: Local
  ipFamilies: [IPv4, IPv6]
  clusterIP: 10.96.0.22
  clusterIPs: [10.96.0.22, \"fd00:10::22\"]
  ports: [{ name: t, port: 443, nodePort: 30445 }]
---
apiVersion: v1
kind: Service
metadata: { name: none, namespace: default }
spec:
  type: NodePort
  clusterIP: 10.96.0.23
  clusterIPs: [10.96.0.23]
  ports: [{ port: 443, nodePort: 30446 }]
";

const SLICES: &str = "
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: pod-4, namespace: default, labels: { kubernetes.io/service-name: pod } }
addressType: IPv4
ports: [{ name: t, port: 8443 }, { name: u, port: 8443, protocol: UDP }]
endpoints: [{ addresses: [10.244.1.5], nodeName: n1 }]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: pod-6, namespace: default, labels: { kubernetes.io/service-name: pod } }
addressType: IPv6
ports: [{ name: t, port: 8443 }, { name: u, port: 8443, protocol: UDP }]
endpoints: [{ addresses: [\"fd00:1::5\"], nodeName: n1 }]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: host-4, namespace: default, labels: { kubernetes.io/service-name: host } }
addressType: IPv4
ports: [{ name: t, port: 8444 }, { name: u, port: 8444, protocol: UDP }]
endpoints: [{ addresses: [192.0.2.1], nodeName: n1 }]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: host-6, namespace: default, labels: { kubernetes.io/service-name: host } }
addressType: IPv6
ports: [{ name: t, port: 8444 }, { name: u, port: 8444, protocol: UDP }]
endpoints: [{ addresses: [\"fd00::1\"], nodeName: n1 }]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: far-4, namespace: default, labels: { kubernetes.io/service-name: far } }
addressType: IPv4
ports: [{ name: t, port: 8443 }]
endpoints: [{ addresses: [10.244.2.9], nodeName: n2 }]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: far-6, namespace: default, labels: { kubernetes.io/service-name: far } }
addressType: IPv6
ports: [{ name: t, port: 8443 }]
endpoints: [{ addresses: [\"fd00:2::9\"], nodeName: n2 }]
";
