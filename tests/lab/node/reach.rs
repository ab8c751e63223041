//! The host's own sockets reach external frontends under every rp_filter, although no route leads
//! to these addresses. Packets to a ClusterIP that a device of the host has stay on the host.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::netns::NetNs;

#[test]
fn external_frontends_are_reached_under_every_rp_filter() -> Result<()> {
    for rp_filter in ["0", "1", "2"] {
        let node = NetNs::machine(&format!("reach{rp_filter}"))?;
        for device in ["all", "default", "eth0", "lo"] {
            node.sysctl(&format!("ipv4/conf/{device}/rp_filter"), rp_filter)?;
        }
        // Without a default route, only kpx's rules give rp_filter a route to an external address.
        node.ip("route del default via 192.0.2.254\nroute del default via fd00::fe")?;
        let pod = pod(&node)?;
        let kpx =
            Agent::start_alone(&node, &[("shop", SHOP), ("slices", SLICES)], "")?.healthy()?;
        serve(&pod, &["10.244.1.5:8443", "[fd00:1::5]:8443"], "hello")?;
        for to in [
            "10.96.0.20:443",
            "203.0.113.7:443",
            "[2001:db8::7]:443",
            "192.0.2.1:30443",
            "[fd00::1]:30443",
        ] {
            let answer = dial(&node, to).with_context(|| format!("rp_filter {rp_filter}, {to}"))?;
            ensure!(answer == "hello", "{to}: {answer}");
        }

        // A frontend without endpoints refuses at once, so rp_filter accepts the refusal too.
        kpx.delete("slices")?;
        for to in ["203.0.113.7:443", "[2001:db8::7]:443"] {
            wait_until(DEADLINE, &format!("{to} is refused"), || {
                Ok(is_refused(dial(&node, to)))
            })?;
        }
        kpx.stop()?;
    }
    Ok(())
}

#[test]
fn a_cluster_ip_on_a_device_that_leads_nowhere_stays_with_the_host() -> Result<()> {
    let node = NetNs::machine("local-dns")?;
    node.sysctl("ipv4/ip_forward", "1")?;
    let pod = pod(&node)?;
    let kpx = Agent::start_alone(&node, &[("shop", SHOP), ("slices", SLICES)], "")?.healthy()?;
    serve(&pod, &["10.244.1.5:8443"], "hello")?;
    serve(&node, &["0.0.0.0:443"], "local")?;
    let answers = |from: &NetNs, want: &str| {
        wait_until(DEADLINE, want, || {
            Ok(dial(from, "10.96.0.20:443").is_ok_and(|answer| answer == want))
        })
    };
    for round in ["first", "second"] {
        answers(&pod, "hello")
            .and(answers(&node, "hello"))
            .context(round)?;
        // A bridge stands for NodeLocal DNSCache's dummy device, which some kernels lack. It stays
        // down.
        node.ip("link add nodelocaldns type bridge\naddr add 10.96.0.20/32 dev nodelocaldns")?;
        answers(&pod, "local")
            .and(answers(&node, "local"))
            .context(round)?;
        ensure!(
            dial(&pod, "192.0.2.1:30443")? == "hello",
            "node ports are served"
        );
        let status = kpx.typed_status()?;
        let why = "Service default/shop spec.clusterIP: 10.96.0.20 is an address of device nodelocaldns: packets to it stay with the host";
        ensure!(
            status.healthy && status.skipped == [why],
            "{:?}",
            status.skipped
        );
        node.ip("link del nodelocaldns")?;
    }
    kpx.stop()
}

/// A pod with 10.244.1.5 and fd00:1::5 behind a routed device.
pub(super) fn pod(node: &NetNs) -> Result<NetNs> {
    let pod = NetNs::create(format!("{}-pod", node.name()))?;
    node.ip(&format!(
        "link add pod0 address 02:00:00:00:00:01 type veth peer name eth0 address 02:00:00:00:00:02 netns {}
         link set pod0 up
         neigh add 10.244.1.5 dev pod0 lladdr 02:00:00:00:00:02
         neigh add fd00:1::5 dev pod0 lladdr 02:00:00:00:00:02
         route add 10.244.1.5 dev pod0
         route add fd00:1::5 dev pod0",
        pod.name()
    ))?;
    pod.ip("link set eth0 up
         addr add 10.244.1.5/32 dev eth0
         addr add fd00:1::5/128 dev eth0 nodad
         neigh add 169.254.1.1 dev eth0 lladdr 02:00:00:00:00:01
         neigh add fe80::1 dev eth0 lladdr 02:00:00:00:00:01
         route add default via 169.254.1.1 dev eth0 onlink
         route add default via fe80::1 dev eth0")?;
    Ok(pod)
}

/// Greets each client until the test process ends.
fn serve(ns: &NetNs, addrs: &[&str], greeting: &'static str) -> Result<()> {
    addrs
        .iter()
        .try_for_each(|addr| answer(ns, addr, |_| greeting.to_owned()))
}

/// Writes `words` to each client that connects, until the test process ends.
pub(super) fn answer(
    ns: &NetNs,
    addr: &str,
    words: impl Fn(SocketAddr) -> String + Send + 'static,
) -> Result<()> {
    let listener = ns
        .run(|| TcpListener::bind(addr))
        .with_context(|| format!("listen on {addr}"))?;
    thread::spawn(move || {
        while let Ok((mut stream, from)) = listener.accept() {
            // A client may have closed its socket already.
            let _written = stream.write_all(words(from).as_bytes());
        }
    });
    Ok(())
}

fn dial(ns: &NetNs, to: &str) -> Result<String> {
    dial_within(ns, to, DEADLINE)
}

/// Connects within `limit`, and returns the server's text.
pub(super) fn dial_within(ns: &NetNs, to: &str, limit: Duration) -> Result<String> {
    let to: SocketAddr = to.parse()?;
    let mut stream = ns.run(|| TcpStream::connect_timeout(&to, limit))?;
    ensure!(
        stream.peer_addr()? == to,
        "the client sees {}",
        stream.peer_addr()?
    );
    stream.set_read_timeout(Some(DEADLINE))?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Returns true if the dial was refused.
pub(super) fn is_refused<T>(dialled: Result<T>) -> bool {
    let error = dialled
        .err()
        .and_then(|error| error.downcast::<std::io::Error>().ok());
    error.is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

const SHOP: &str = "
apiVersion: v1
kind: Service
metadata: { name: shop, namespace: default }
spec:
  type: LoadBalancer
  ipFamilies: [IPv4, IPv6]
  clusterIP: 10.96.0.20
  clusterIPs: [10.96.0.20, \"fd00:10::20\"]
  ports: [{ port: 443, nodePort: 30443 }]
status: { loadBalancer: { ingress: [{ ip: 203.0.113.7 }, { ip: \"2001:db8::7\" }] } }
";

const SLICES: &str = "
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: shop-4, namespace: default, labels: { kubernetes.io/service-name: shop } }
addressType: IPv4
ports: [{ port: 8443 }]
endpoints: [{ addresses: [10.244.1.5], nodeName: n1 }]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: shop-6, namespace: default, labels: { kubernetes.io/service-name: shop } }
addressType: IPv6
ports: [{ port: 8443 }]
endpoints: [{ addresses: [\"fd00:1::5\"], nodeName: n1 }]
";
