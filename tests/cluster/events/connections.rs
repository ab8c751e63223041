//! Conntrack entries that kube-proxy's rules have left, and the source ports that kpx draws.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use testbed::agent::{DEADLINE, wait_until};
use testbed::echo::{Dial, Fault, Protocol, Servers};
use testbed::lab::{Dual, Family, Host};
use testbed::netns::NetNs;

use crate::events::fixture::{Fixture, service, slice};

/// kube-proxy's rules for the host's own packets: two Services, and an address without a Service.
/// The table cni is unrelated, and keeps netfilter tracking and translating after kube-proxy.
const RULES: &str = "
table inet kube-proxy {
    chain output {
        type nat hook output priority -100;
        ip daddr 10.96.0.10 udp dport 53 dnat ip to 192.0.2.2:5353
        ip6 daddr fd00:96::a udp dport 53 dnat ip6 to [fd00::2]:5353
        ip daddr 198.51.100.7 udp dport 53 dnat ip to 192.0.2.2:5353
    }
}
table inet cni {
    chain output { type nat hook output priority 0; }
    chain post { type nat hook postrouting priority 100; ct state new oifname none masquerade; }
}";

#[test]
fn connections_of_kube_proxy_move_to_kpx() -> Result<()> {
    let fixture = Fixture::with_node()?;
    // The old and the new backend are both on the wire.
    let wire = neighbour(&fixture.ns)?;
    let servers = Servers::start()?;
    for (name, last) in [("old", 2), ("new", 3)] {
        for family in Family::ALL {
            servers.serve_at(&wire, name, SocketAddr::new(address(family, last), 5353))?;
        }
    }
    fixture.ns.nft(RULES)?;
    let dials = [
        ("10.96.0.10", 4001),
        ("fd00:96::a", 4002),
        ("198.51.100.7", 4003),
    ];
    let answers = |(to, port): (&str, u16)| {
        let to = SocketAddr::new(to.parse()?, 53);
        let dial = Dial::new(Protocol::Udp, to)
            .source_port(port)
            .deadline(Duration::from_millis(500));
        match dial.exchange(&fixture.ns, b"hello") {
            Ok(answer) => Ok(answer.backend),
            Err(Fault::TimedOut(_) | Fault::Refused) => Ok(String::new()),
            Err(fault) => bail!(fault),
        }
    };
    for dial in dials {
        assert_eq!(answers(dial)?, "old", "{dial:?} by kube-proxy's rules");
    }
    fixture.ns.nft("delete table inet kube-proxy")?;
    for dial in dials {
        assert_eq!(
            answers(dial)?,
            "old",
            "{dial:?} after kube-proxy, whose translation stays"
        );
    }

    fixture.put(&service("dns", 10))?;
    fixture.put(&slice("dns", "192.0.2.3"))?;
    fixture.put(&slice("dns", "fd00::3"))?;
    let kpx = fixture.start_healthy("")?;
    for dial in &dials[..2] {
        wait_until(DEADLINE, "the new backend answers", || {
            Ok(answers(*dial)? == "new")
        })
        .with_context(|| format!("{dial:?}: {}", fixture.log()))?;
    }
    for family in Family::ALL {
        let deleted = format!(
            "kubeproxy_conntrack_reconciler_deleted_entries_total{{ip_family=\"{family}\"}} 1\n"
        );
        wait_until(DEADLINE, &deleted, || {
            Ok(fixture.metrics()?.contains(&deleted))
        })?;
    }
    assert_eq!(
        answers(dials[2])?,
        "old",
        "kpx leaves alone an address that is no frontend"
    );
    kpx.stop()
}

#[test]
fn source_ports_are_reserved_where_the_kernel_would_give_them() -> Result<()> {
    const RANGE: &str = "ipv4/ip_local_port_range";
    const RESERVED: &str = "ipv4/ip_local_reserved_ports";
    let fixture = Fixture::with_node()?;
    let reserved = || {
        Ok::<_, anyhow::Error>(
            fixture
                .ns
                .read(&format!("/proc/sys/net/{RESERVED}"))?
                .trim()
                .to_owned(),
        )
    };
    fixture.ns.sysctl(RANGE, "32768 60999")?;
    let kpx = fixture.start_healthy("")?;
    assert_eq!(reserved()?, "", "nothing is given that must not be");
    kpx.stop()?;

    fixture.ns.sysctl(RANGE, "32768 65535")?;
    fixture.ns.sysctl(RESERVED, "8080,62000")?;
    let kpx = fixture.start_healthy("--cleanup-on-exit")?;
    assert_eq!(reserved()?, "8080,61000-65535");
    fixture.ns.sysctl(RESERVED, "8080,9999,61000-65535")?;
    kpx.stop()?;
    assert_eq!(
        reserved()?,
        "8080,9999,62000",
        "what was reserved before, and by others meanwhile"
    );
    Ok(())
}

/// Returns a namespace at the other end of the node's wire, with two addresses of each family.
fn neighbour(node: &NetNs) -> Result<Host> {
    let ns = NetNs::create(format!("{}-wire", node.name()))?;
    node.ip(&format!("link set wire netns {}", ns.name()))?;
    let addrs = [2, 3].map(|last| {
        Family::ALL.map(|family| {
            let prefix = if family == Family::V4 { 24 } else { 64 };
            let nodad = if family == Family::V4 { "" } else { "nodad" };
            format!(
                "addr add {}/{prefix} dev wire {nodad}",
                address(family, last)
            )
        })
    });
    ns.ip(&format!("link set wire up\n{}", addrs.concat().join("\n")))?;
    let addrs = Dual {
        v4: "192.0.2.2".parse()?,
        v6: "fd00::2".parse()?,
    };
    Ok(Host {
        name: "wire",
        ns,
        addrs,
    })
}

fn address(family: Family, last: u8) -> IpAddr {
    match family {
        Family::V4 => IpAddr::from([192, 0, 2, last]),
        Family::V6 => IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, last.into()]),
    }
}
