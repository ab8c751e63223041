//! kpx and a node's devices: which devices get programs, how soon, by which mechanism, and the
//! state after kpx ends.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aya::programs::{SchedClassifier, TcAttachType};
use nix::ifaddrs::getifaddrs;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, bind, send, socket,
};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto};
use proxy_common::counter::Reason;
use proxy_common::device::Device;
use proxy_common::frontend::{Backend, Frontend, FrontendKey, FrontendKind, Service, Set, SlotKey};
use proxy_common::hook::Place;
use proxy_core::diff::{Change, FamilyChange};
use proxy_datapath::{Maps, Mechanism, Options};
use testbed::agent::{Agent, DEADLINE, binary, wait_until};
use testbed::cases::Running;
use testbed::netns::NetNs;
use testbed::test_run::Bench;
use testbed::text::Names;

use crate::churn::fixture::{is_hooked, is_hooked_headerless};

#[test]
fn kpx_follows_devices_and_stays_alone() -> Result<()> {
    let node = &NetNs::machine_v4("devices")?;
    let agent = start(node, "--node-ip 192.0.2.1")?;
    let running = Running {
        fixture: node,
        agent,
    };
    testbed::cases!(
        &running;
        a_new_veth_has_its_programs_within_100_ms,
        a_second_kpx_is_refused_and_harms_nothing,
        routes_survive_an_address_that_goes_and_comes_back,
    )?;
    running.agent.stop()
}

fn a_new_veth_has_its_programs_within_100_ms(running: &Running<NetNs>) -> Result<()> {
    let Running {
        fixture: node,
        agent: kpx,
    } = running;
    let pod = NetNs::create(format!("kpx-{}-pod", std::process::id()))?;
    let mut delays = Vec::new();
    for n in 0..5 {
        let name = format!("pod{n}");
        let peer = format!("eth{n}");
        node.ip(&format!(
            "link add {name} type veth peer name {peer} netns {}\nlink set {name} up",
            pod.name()
        ))?;
        let since = Instant::now();
        wait_until(DEADLINE, &format!("{name} has its programs"), || {
            Ok(
                programs(node, &name, TcAttachType::Ingress)? == ["kpx_ingress"]
                    && programs(node, &name, TcAttachType::Egress)? == ["kpx_egress"],
            )
        })?;
        delays.push(since.elapsed());
    }
    ensure!(
        delays.iter().min() < Some(&Duration::from_millis(100)),
        "attached after {delays:?}"
    );

    // kpx follows a renamed device, and forgets a deleted device.
    node.ip("link set pod0 down\nlink set pod0 name renamed\nlink set renamed up\nlink del pod1")?;
    wait_until(DEADLINE, "status follows", || {
        let status = kpx.status()?.to_string();
        Ok(status.contains("\"renamed\"")
            && !status.contains("\"pod0\"")
            && !status.contains("\"pod1\""))
    })?;
    ensure!(programs(node, "renamed", TcAttachType::Ingress)? == ["kpx_ingress"]);
    node.ip("link del renamed\nlink del pod2\nlink del pod3\nlink del pod4")
}

#[test]
fn cleanup_on_exit_leaves_nothing() -> Result<()> {
    for how in ["tcx", "clsact"] {
        let node = NetNs::machine_v4(&format!("end-{how}"))?;
        let before = settled(&node)?;
        let kpx = start(&node, &format!("--attach {how} --cleanup-on-exit"))?;
        wait_until(DEADLINE, "eth0 is attached", || {
            Ok(kpx.status()?.to_string().contains("\"eth0\""))
        })?;
        let with_kpx = state(&node)?;
        ensure!(
            with_kpx.contains("10.96.0.10 dev kpx0") && with_kpx.contains("accept_local=1"),
            "{with_kpx}"
        );
        kpx.stop()?;
        let after = state(&node)?;
        ensure!(before == after, "{how}: before\n{before}\nafter\n{after}");
        for direction in [TcAttachType::Ingress, TcAttachType::Egress] {
            ensure!(
                programs(&node, "eth0", direction)?.is_empty(),
                "programs are left on eth0"
            );
        }
        ensure!(
            filters(&node)?.is_empty(),
            "filters are left: {}",
            filters(&node)?
        );
    }
    Ok(())
}

#[test]
fn next_kpx_takes_over_from_a_killed_one() -> Result<()> {
    for how in ["tcx", "clsact"] {
        let node = NetNs::machine_v4(&format!("kill-{how}"))?;
        let before = settled(&node)?;
        for _ in 0..2 {
            let kpx = start(&node, &format!("--attach {how}"))?;
            wait_until(DEADLINE, "eth0 is attached", || {
                Ok(kpx.status()?.to_string().contains("\"eth0\""))
            })?;
            kpx.crash()?;
        }
        let kpx = start(&node, &format!("--attach {how} --cleanup-on-exit"))?;
        wait_until(DEADLINE, "eth0 is attached", || {
            Ok(kpx.status()?.to_string().contains("\"eth0\""))
        })?;
        let at_egress = filters(&node)?
            .lines()
            .filter(|line| line.contains("kpx_egress"))
            .count();
        ensure!(
            how == "tcx" || at_egress == 1,
            "{at_egress} filters at egress"
        );
        kpx.stop()?;
        ensure!(state(&node)? == before, "{how}: {}", state(&node)?);
    }
    Ok(())
}

/// The kernel keeps TCX programs on a device that moves, while no agent sees the move.
#[test]
fn device_that_moved_while_no_agent_ran_loses_its_programs_with_the_next_one() -> Result<()> {
    let node = NetNs::machine_v4("moved")?;
    let pod = NetNs::create(format!("kpx-{}-moved-pod", std::process::id()))?;
    node.ip("link add nic1 type veth peer name far1\nlink set nic1 up")?;
    let kpx = start(&node, "--attach tcx")?;
    let on = |ns: &NetNs| programs(ns, "nic1", TcAttachType::Ingress);
    wait_until(DEADLINE, "nic1 has its programs", || {
        Ok(on(&node)? == ["kpx_ingress"])
    })?;
    kpx.crash()?;
    node.ip(&format!("link set nic1 netns {}", pod.name()))?;
    ensure!(
        on(&pod)? == ["kpx_ingress"],
        "the kernel takes them off: docs/limits.md says otherwise"
    );
    let kpx = start(&node, "--attach tcx")?;
    wait_until(DEADLINE, "nic1 has no programs", || {
        Ok(on(&pod)?.is_empty() && programs(&pod, "nic1", TcAttachType::Egress)?.is_empty())
    })?;
    kpx.stop()
}

fn a_second_kpx_is_refused_and_harms_nothing(running: &Running<NetNs>) -> Result<()> {
    let Running {
        fixture: node,
        agent: kpx,
    } = running;
    let mut second = Command::new(binary()?);
    // Separate run and BPF directories make no difference.
    second
        .args(["run", "--manifests"])
        .arg(kpx.manifests()?)
        .arg("--run-dir")
        .arg(kpx.run_dir().with_file_name("run2"));
    second
        .arg("--bpf-dir")
        .arg(format!("{}-2", node.bpf_dir().display()));
    let error = node
        .exec(&mut second)
        .err()
        .context("the second one must end")?;
    ensure!(
        format!("{error:#}").contains("another kpx is running"),
        "{error:#}"
    );
    ensure!(kpx.typed_status()?.healthy);
    Ok(())
}

#[test]
fn filters_of_a_killed_kpx_go_when_the_next_one_uses_tcx() -> Result<()> {
    let node = NetNs::create(format!("kpx-{}-swap", std::process::id()))?;
    node.wire()?;
    let kpx = start(&node, "--attach clsact")?;
    wait_until(DEADLINE, "eth0 has filters", || {
        Ok(filters(&node)?.contains("kpx_ingress"))
    })?;
    kpx.crash()?;
    ensure!(
        filters(&node)?.contains("kpx_ingress"),
        "the kernel keeps filters of dead processes"
    );
    // By default (`auto`) kpx would keep the attached filters.
    let kpx = start(&node, "--attach tcx")?;
    wait_until(DEADLINE, "eth0 has programs", || {
        Ok(
            programs(&node, "eth0", TcAttachType::Ingress)? == ["kpx_ingress"]
                && filters(&node)?.is_empty(),
        )
    })?;
    kpx.stop()
}

fn routes_survive_an_address_that_goes_and_comes_back(running: &Running<NetNs>) -> Result<()> {
    let Running {
        fixture: node,
        agent: kpx,
    } = running;
    let route =
        || node.exec(Command::new("ip").args(["route", "show", "table", "all", "10.96.0.10"]));
    let with_source = || Ok(route()?.contains("dev kpx0") && route()?.contains("src 192.0.2.1"));
    wait_until(DEADLINE, "the route is there", with_source)?;
    node.ip("addr del 192.0.2.1/24 dev eth0")?;
    // The route has no source while the address is absent, because the host may have other
    // addresses.
    wait_until(DEADLINE, "a route is there again", || {
        Ok(route()?.contains("dev kpx0") && !route()?.contains("src"))
    })?;
    node.ip("addr add 192.0.2.1/24 dev eth0")?;
    wait_until(DEADLINE, "its source is back", with_source)?;
    node.ip("link set kpx0 down")?;
    wait_until(
        DEADLINE,
        "the anchor is up again, and the route back",
        with_source,
    )?;
    kpx.wait(DEADLINE, "all is well again", |status| status.healthy)
}

/// The rows that BPF_PROG_TEST_RUN does not support: a tag that the device has removed, and a
/// bridge behind its port.
#[test]
fn tagged_frames_and_bridged_ones_are_left_alone_and_counted() -> Result<()> {
    for mechanism in [Mechanism::Tcx, Mechanism::Clsact] {
        let node = NetNs::create(format!("kpx-{}-br-{mechanism}", std::process::id()))?;
        node.ip("link add br0 type bridge
             link set br0 address 02:00:00:00:00:02
             link set br0 up
             link add port type veth peer name wire
             link set port master br0
             link set port up
             link set wire up")?;
        let mut bench = Bench::load(Options {
            mechanism: Some(mechanism),
            ..Options::default()
        })?;
        let attachments = &mut bench.datapath.attachments;
        node.run(|| {
            let ifindex = |name| nix::net::if_::if_nametoindex(name);
            attachments.attach(ifindex("port")?, "port", Place::Device)?;
            attachments.attach(ifindex("br0")?, "br0", Place::Device)
        })?;
        let port = node.run(|| nix::net::if_::if_nametoindex("port"))?;
        let pod = Device::new(Device::POD, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED);
        bench
            .datapath
            .node
            .set_devices(&BTreeMap::from([(port, pod)]))?;
        let key = FrontendKey::<Addr4>::new(
            Ipv4Addr::new(10, 96, 0, 10).into(),
            Port::new(80),
            Proto::UDP,
        );
        for change in [
            FamilyChange::PutSlot(
                SlotKey::new(key, Set::CLUSTER, 0),
                Backend::new(Ipv4Addr::new(10, 0, 0, 3).into(), Port::new(8080), 0),
            ),
            FamilyChange::PutService(key, Service::new(1, 0, Service::HAS_ENDPOINTS)),
            FamilyChange::PutFrontend(key, Frontend::new(key, FrontendKind::CLUSTER_IP)),
        ] {
            bench.datapath.tables.apply(&Change::V4(change))?;
        }
        let names = [
            ("client", "10.0.0.1"),
            ("stranger", "10.0.0.2"),
            ("web", "10.96.0.10"),
        ];
        let names = names
            .map(|(name, addr)| Ok((name, addr.parse()?)))
            .into_iter()
            .collect::<Result<Vec<_>>>()?;
        let names = Names::new(names);
        let served = names.frame("udp client:1 > web:80 +9")?;
        let mut tagged = served.clone();
        tagged.splice(12..12, [0x81, 0x00, 0, 5]);

        // The bridge's hook leaves packets alone that the port's hook has rewritten.
        send_frame(&node, "wire", &served)?;
        expect(&bench, &BTreeMap::from([(Reason::SeenBefore, 1)]))?;
        // Each hook processes a packet that no hook has rewritten.
        send_frame(&node, "wire", &names.frame("udp client:1 > stranger:2 +9")?)?;
        expect(
            &bench,
            &BTreeMap::from([(Reason::NotOurs, 2), (Reason::SeenBefore, 1)]),
        )?;
        // Both hooks leave tagged packets to a VLAN device on top of either.
        send_frame(&node, "wire", &tagged)?;
        expect(
            &bench,
            &BTreeMap::from([
                (Reason::NotOurs, 2),
                (Reason::SeenBefore, 1),
                (Reason::Vlan, 2),
            ]),
        )?;
        node.run(|| drop(bench)); // Filters are detached in their namespace.
    }
    Ok(())
}

#[test]
fn a_device_that_changes_its_kind_gets_other_programs() -> Result<()> {
    for (mechanism, attach) in [(Mechanism::Tcx, "tcx"), (Mechanism::Clsact, "clsact")] {
        let node = NetNs::create(format!("kpx-{}-kind-{mechanism}", std::process::id()))?;
        node.wire()?;
        let mut bench = Bench::load(Options {
            mechanism: Some(mechanism),
            ..Options::default()
        })?;
        for place in [Place::Device, Place::Headerless, Place::Device] {
            let attachments = &mut bench.datapath.attachments;
            node.run(|| attachments.attach(nix::net::if_::if_nametoindex("eth0")?, "eth0", place))?;
            let found = [
                is_hooked(&node, attach, "eth0")?,
                is_hooked_headerless(&node, attach, "eth0")?,
            ];
            ensure!(
                found == [place == Place::Device, place == Place::Headerless],
                "{attach}, {place:?}: {found:?}"
            );
        }
        node.run(|| drop(bench));
    }
    Ok(())
}

fn expect(bench: &Bench, wanted: &BTreeMap<Reason, u64>) -> Result<()> {
    let counted = || -> Result<BTreeMap<Reason, u64>> {
        // The bridge and the kernel send their own frames too (IGMP, neighbour discovery).
        let noise = [Reason::NotIp, Reason::Protocol, Reason::NotUnicast];
        let reasons = bench.datapath.counters.reasons()?.into_iter();
        Ok(reasons
            .filter(|(reason, n)| *n > 0 && !noise.contains(reason))
            .collect())
    };
    wait_until(DEADLINE, "the frames are counted", || {
        Ok(counted()? == *wanted)
    })
    .with_context(|| format!("counted {:?}", counted()))
}

fn send_frame(node: &NetNs, device: &str, frame: &[u8]) -> Result<()> {
    node.run(|| {
        let socket = socket(
            AddressFamily::Packet,
            SockType::Raw,
            SockFlag::empty(),
            SockProtocol::EthAll,
        )?;
        let addrs = getifaddrs()?.filter(|found| found.interface_name == device);
        let link = addrs
            .filter_map(|found| found.address)
            .find_map(|addr| addr.as_link_addr().copied());
        bind(
            socket.as_raw_fd(),
            &link.with_context(|| format!("no device {device}"))?,
        )?;
        send(socket.as_raw_fd(), frame, MsgFlags::empty()).context("send a frame")?;
        Ok(())
    })
}

/// Returns the names of a device's TCX programs.
fn programs(node: &NetNs, device: &str, direction: TcAttachType) -> Result<Vec<String>> {
    let (_, programs) = node.run(|| SchedClassifier::query_tcx(device, direction))?;
    Ok(programs
        .iter()
        .map(|program| program.name_as_str().unwrap_or_default().to_owned())
        .collect())
}

fn filters(node: &NetNs) -> Result<String> {
    let at = |direction| {
        node.exec(Command::new("tc").args(["filter", "show", "dev", "eth0", direction]))
    };
    Ok(at("ingress")? + &at("egress")?)
}

/// Returns all state that kpx changes on a node, except programs: devices, routes, settings.
fn state(node: &NetNs) -> Result<String> {
    let ip = |arguments: &[&str]| node.exec(Command::new("ip").args(arguments));
    let accept_local = node.read("/proc/sys/net/ipv4/conf/lo/accept_local")?;
    let links = ip(&["-brief", "link", "show"])?;
    let ours = ip(&["route", "show", "table", "all", "proto", "75"])?;
    Ok(links
        + &ip(&["route", "show"])?
        + &ip(&["-6", "route", "show"])?
        + &ours
        + "accept_local="
        + &accept_local)
}

/// Returns the state once both ends of the wire have their link-local addresses.
fn settled(node: &NetNs) -> Result<String> {
    let has_all = |state: &str| {
        ["eth0", "wire"]
            .iter()
            .all(|name| state.contains(&format!("fe80::/64 dev {name} ")))
    };
    wait_until(DEADLINE, "both ends have link-local addresses", || {
        Ok(has_all(&state(node)?))
    })?;
    state(node)
}

/// Starts kpx with a Service, and waits until it is healthy.
fn start<'a>(node: &'a NetNs, arguments: &str) -> Result<Agent<'a>> {
    Agent::start_alone(node, &[("web", SERVICE)], arguments)?.healthy()
}

const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: { name: web }
spec:
  clusterIP: 10.96.0.10
  ports: [{ port: 80 }]
";
