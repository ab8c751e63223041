//! Devices: reported changes, their latency, and their role for kpx.

use std::collections::BTreeMap;
use std::ops::Index;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::time::{ClockId, clock_gettime};
use proxy_net::anchor;
use proxy_net::link::{Link, LinkHeader, LinkKind, headerless};
use proxy_net::role::{Role, role};
use proxy_net::{LinkEvent, watch};
use testbed::agent::DEADLINE;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use crate::net::{Netns, handle, in_netns, ip};

/// The limit from the start of `ip` to the event: kpx must serve a pod before its first packet.
const LATENCY: Duration = Duration::from_millis(100);

#[test]
fn changes_of_devices_are_reported_at_once() {
    in_netns(async {
        let mut devices = Devices::watch().await?;
        ensure!(devices.names() == ["lo"], "at first: {:?}", devices.names());

        ip("link add br0 type bridge").await?;
        devices.until("a bridge", |d| d.has("br0")).await?;

        let mut delays = Vec::new();
        for n in (0..5).rev() {
            let start = Instant::now();
            ip(&format!("link add v{n} type veth peer name far{n}")).await?;
            devices.until("a veth", |d| d.has(&format!("v{n}"))).await?;
            delays.push(start.elapsed());
            if n > 0 {
                ip(&format!("link del v{n}")).await?;
                devices
                    .until("no veth", |d| !d.has(&format!("v{n}")))
                    .await?;
            }
        }
        println!("veths were reported {delays:?} after `ip` was started");
        ensure!(
            delays.iter().min() < Some(&LATENCY),
            "veths were reported {delays:?} after `ip` was started"
        );
        let v0 = devices["v0"].clone();
        ensure!(
            (v0.kind, v0.header, v0.up, v0.peer_netns)
                == (LinkKind::Veth, LinkHeader::Ethernet, false, false),
            "{v0:?}"
        );
        ensure!(v0.mac.is_some() && v0.mtu == 1500, "{v0:?}");

        ip("link set v0 up mtu 1400").await?;
        devices
            .until("up, with its MTU", |d| d["v0"].up && d["v0"].mtu == 1400)
            .await?;
        ip("addr add 192.0.2.1/24 dev v0").await?;
        devices
            .until("an address", |d| d.addrs("v0") == ["192.0.2.1/24"])
            .await?;
        ip("addr add fd00::1/64 dev v0 nodad").await?;
        devices
            .until("an IPv6 address", |d| {
                d.addrs("v0") == ["192.0.2.1/24", "fd00::1/64"]
            })
            .await?;
        ip("addr del 192.0.2.1/24 dev v0").await?;
        devices
            .until("an address less", |d| d.addrs("v0") == ["fd00::1/64"])
            .await?;

        ip("link set v0 name w0").await?;
        devices.until("a new name", |d| d.has("w0")).await?;
        ensure!(
            devices["w0"].index == v0.index && devices.addrs("w0") == ["fd00::1/64"],
            "{:?}",
            devices["w0"]
        );

        ip("link set w0 master br0").await?;
        devices
            .until("enslaved", |d| d["w0"].master == Some(d["br0"].index))
            .await?;
        ip("link set w0 nomaster").await?;
        devices
            .until("free, not gone", |d| d["w0"].master.is_none())
            .await?;

        ip("link del w0").await?;
        devices
            .until("both ends gone", |d| d.names() == ["br0", "lo"])
            .await
    });
}

#[test]
fn a_veth_becomes_a_pods_when_its_other_end_leaves() {
    in_netns(async {
        let pod = Netns::new();
        let mut devices = Devices::watch().await?;
        ip("link add br0 type bridge").await?;
        ip("link add v0 master br0 type veth peer name v1").await?;
        devices
            .until("a port", |d| {
                d.has("v0") && d.role("v0") == Role::Ignored("its bridge is served")
            })
            .await?;
        // The other end stays down, so the kernel sends no event for this end yet.
        ip(&format!("link set v1 netns {}", pod.tid)).await?;
        let apart = Role::Ignored("the node is not on its bridge");
        devices
            .until("a port of others", |d| d.role("v0") == apart)
            .await?;
        ip("addr add 10.244.1.1/24 dev br0").await?;
        devices
            .until("a pod", |d| d.role("v0") == Role::Device { pod: true })
            .await
    });
}

#[test]
fn routes_tell_whether_a_pod_is_behind_a_veth_with_an_address() {
    in_netns(async {
        let pod = Netns::new();
        ip("link set lo up").await?;
        let mut devices = Devices::watch().await?;
        ip(&format!(
            "link add v0 type veth peer name eth0 netns {}",
            pod.tid
        ))
        .await?;
        devices
            .until("a pod's, without an address", |d| {
                d.has("v0") && d.is_pod("v0")
            })
            .await?;
        ip("link set v0 up").await?;
        ip("addr add 10.244.1.1/32 dev v0").await?;
        ip("addr add fd00::1/128 dev v0 nodad").await?;
        devices
            .until("none with an address alone", |d| {
                d.addrs("v0").len() == 2 && !d.is_pod("v0")
            })
            .await?;
        // The CNI plugin adds the route last.
        for (change, is_pod) in [
            ("route add 10.244.1.2/32 dev v0", true),
            ("route add 10.9.0.0/24 dev v0", false),
            ("route del 10.9.0.0/24 dev v0", true),
            (
                "route add 10.9.0.0/24 via 10.244.1.2 dev v0 onlink table 100",
                false,
            ),
            ("route del 10.9.0.0/24 table 100", true),
            ("route add 10.244.1.3/32 dev v0 table 100", true),
            ("route del 10.244.1.2/32 dev v0", true),
            ("route replace 10.244.1.3/32 dev lo table 100", false),
            ("-6 route add fd00::2/128 dev v0", true),
            ("addr add 10.9.0.1/24 dev v0", false),
            ("addr del 10.9.0.1/24 dev v0", true),
            ("-6 route del fd00::2/128 dev v0", false),
        ] {
            ip(change).await.with_context(|| change.to_owned())?;
            devices.until(change, |d| d.is_pod("v0") == is_pod).await?;
        }
        // The kernel drops the routes of a device that goes down without an event.
        ip("route add 10.244.1.2/32 dev v0").await?;
        devices.until("a pod's again", |d| d.is_pod("v0")).await?;
        ip("link set v0 down").await?;
        devices
            .until("none without its route", |d| !d["v0"].up && !d.is_pod("v0"))
            .await
    });
}

#[test]
fn hundreds_of_pods_with_gateways_are_detected() {
    const PODS: usize = 300;
    in_netns(async {
        let pods = Netns::new();
        let mut devices = Devices::watch().await?;
        let line = |n: usize| {
            let addr = format!("10.244.{}.{}", 1 + n / 250, 2 + n % 250);
            format!(
                "link add v{n} type veth peer name w{n} netns {}\nlink set v{n} up\naddr add 10.244.0.1/32 dev v{n}\n\
                 route add {addr}/32 dev v{n}\n",
                pods.tid
            )
        };
        let mut batch = tokio::process::Command::new("ip")
            .args(["-batch", "-"])
            .stdin(Stdio::piped())
            .spawn()?;
        let lines: String = (0..PODS).map(line).collect();
        let mut stdin = batch.stdin.take().context("no pipe")?;
        let feed = tokio::spawn(async move { stdin.write_all(lines.as_bytes()).await });
        feed.await??;
        ensure!(batch.wait().await?.success(), "ip -batch failed");
        let is_pod = |d: &Devices, link: &Link| role(link, &d.links) == Role::Device { pod: true };
        devices
            .until("all pods", |d| {
                d.links.values().filter(|link| is_pod(d, link)).count() == PODS
            })
            .await?;
        let took = Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?);
        println!("{PODS} pods came; the watch and this test took {took:?}");
        Ok(())
    });
}

#[test]
fn an_address_counts_only_after_duplicate_address_detection() {
    in_netns(async {
        ip("link add v0 type veth peer name v1").await?;
        let mut devices = Devices::watch().await?;
        ip("link set v1 up").await?;
        ip("link set v0 up").await?;
        ip("addr add fd00::1/64 dev v0").await?;
        // This address follows the first address, so that the absence of the first address is
        // conclusive.
        ip("addr add fd00::2/64 dev v0 nodad").await?;
        devices
            .until("the unchecked one", |d| {
                d.addrs("v0").contains(&"fd00::2/64".into())
            })
            .await?;
        ensure!(
            devices.addrs("v0") == ["fd00::2/64"],
            "a tentative address counts"
        );
        devices
            .until("the checked one", |d| {
                d.addrs("v0") == ["fd00::1/64", "fd00::2/64"]
            })
            .await
    });
}

#[test]
fn lost_events_lead_to_a_new_list() {
    in_netns(async {
        let mut devices = Devices::watch().await?;
        ip("link add v0 type veth peer name v1").await?;
        devices.until("a veth", |d| d.has("v0")).await?;
        // More events than the socket's buffer holds, while this thread blocks and the watch does
        // not run.
        let changes: String = (0..12_000)
            .map(|i| format!("link set v0 mtu {}\n", 1400 + i % 2))
            .collect();
        let mut batch = std::process::Command::new("ip")
            .args(["-batch", "-"])
            .stdin(Stdio::piped())
            .spawn()?;
        std::io::Write::write_all(
            &mut batch.stdin.take().context("no pipe")?,
            changes.as_bytes(),
        )?;
        ensure!(batch.wait()?.success(), "ip -batch failed");
        ip("link set v0 mtu 1402").await?;
        let lists = devices.lists;
        devices
            .until("a new list", |d| d.lists > lists && d["v0"].mtu == 1402)
            .await
    });
}

#[test]
fn real_devices_have_their_roles() {
    in_netns(async {
        let outside = Netns::new();
        let pods = Netns::new();
        for command in [
            "link set lo up",
            &format!(
                "link add uplink type veth peer name eth0 netns {}",
                outside.tid
            ),
            "addr add 192.0.2.1/24 dev uplink",
            &format!(
                "link add cali0 type veth peer name cali0 netns {}",
                pods.tid
            ),
            "link add cni0 type bridge",
            "addr add 10.244.0.1/24 dev cni0",
            &format!(
                "link add veth0 master cni0 type veth peer name veth0 netns {}",
                pods.tid
            ),
            "tuntap add tap0 mode tap",
            "tuntap add tap1 mode tap",
            "link set tap1 master cni0",
            "tuntap add tun0 mode tun",
            "link add ifb7 type ifb",
            "link add vxlan0 type vxlan id 5 dstport 4789",
            &format!("link add ptp0 type veth peer name ptp0 netns {}", pods.tid),
            &format!("link add ptp1 type veth peer name ptp1 netns {}", pods.tid),
            "link set ptp0 up",
            "link set ptp1 up",
            "addr add 10.244.1.1/32 dev ptp0",
            "addr add 10.244.1.1/32 dev ptp1",
            "addr add fd00::1/128 dev ptp0 nodad",
            "addr add fd00::1/128 dev ptp1 nodad",
            "route add 10.244.1.2/32 dev ptp0",
            "route add fd00::3/128 dev ptp1",
        ] {
            ip(command).await?;
        }
        let mut devices = Devices::watch().await?;
        anchor::ensure(&handle()?, 1500).await?;
        devices
            .until("the anchor", |d| d.has("kpx0") && d.has("kpx1"))
            .await?;
        let device = Role::Device { pod: false };
        let pod = Role::Device { pod: true };
        for (name, want) in [
            ("lo", Role::Loopback),
            ("kpx0", Role::Anchor),
            ("kpx1", Role::Ignored("the anchor's other end")),
            ("uplink", device),
            ("cali0", pod),
            ("cni0", device),
            ("veth0", pod),
            ("tap0", device),
            ("tap1", Role::Ignored("its bridge is served")),
            ("tun0", device),
            (
                "ifb7",
                Role::Ignored("an ifb only shapes packets that other devices receive"),
            ),
            ("vxlan0", device),
            ("ptp0", pod),
            ("ptp1", pod),
        ] {
            ensure!(
                devices.role(name) == want,
                "{:?}: {:?}",
                devices.role(name),
                devices[name]
            );
        }
        ensure!(devices["vxlan0"].kind == LinkKind::Overlay);
        ensure!(
            headerless()? == ["tun0".to_owned()].into(),
            "{:?}",
            headerless()?
        );
        Ok(())
    });
}

/// The devices as the watch reports them.
struct Devices {
    events: mpsc::Receiver<LinkEvent>,
    links: BTreeMap<u32, Link>,
    /// The number of full lists.
    lists: u32,
}

impl Devices {
    async fn watch() -> Result<Self> {
        let (sender, events) = mpsc::channel(64);
        tokio::spawn(watch(sender, DEADLINE));
        let mut devices = Self {
            events,
            links: BTreeMap::new(),
            lists: 0,
        };
        devices.next().await?;
        ensure!(devices.lists == 1, "the first event is not the list");
        Ok(devices)
    }

    async fn next(&mut self) -> Result<()> {
        match self.events.recv().await.context("the watch ended")? {
            LinkEvent::All(links) => {
                self.links = links.into_iter().map(|link| (link.index, link)).collect();
                self.lists += 1;
            }
            LinkEvent::Put(link) => drop(self.links.insert(link.index, *link)),
            LinkEvent::Del(index) => drop(self.links.remove(&index).context("deleted twice")?),
        }
        Ok(())
    }

    async fn until(&mut self, what: &str, met: impl Fn(&Self) -> bool) -> Result<()> {
        let deadline = tokio::time::Instant::now() + DEADLINE;
        while !met(self) {
            let event = tokio::time::timeout_at(deadline, self.next()).await;
            event.with_context(|| format!("{what} never came; there are {:#?}", self.links))??;
        }
        Ok(())
    }

    fn has(&self, name: &str) -> bool {
        self.names().contains(&name)
    }

    /// Returns the names, sorted.
    fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.links.values().map(|link| link.name.as_str()).collect();
        names.sort_unstable();
        names
    }

    fn role(&self, name: &str) -> Role {
        role(&self[name], &self.links)
    }

    fn is_pod(&self, name: &str) -> bool {
        self.role(name) == Role::Device { pod: true }
    }

    fn addrs(&self, name: &str) -> Vec<String> {
        self[name].addrs.iter().map(ToString::to_string).collect()
    }
}

impl Index<&str> for Devices {
    type Output = Link;

    fn index(&self, name: &str) -> &Link {
        self.links
            .values()
            .find(|link| link.name == name)
            .unwrap_or_else(|| panic!("no device {name}"))
    }
}
