//! The host's own path to ClusterIPs, with foreign routing rules and networks.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, Service, kpx, wait_until};
use testbed::cases::Running;
use testbed::echo::{Dial, Protocol};
use testbed::lab::{EXTERNAL, Family, Host, Layout};
use testbed::netns::NetNs;
use testbed::served_lab::ServedLab;

const PORT: u16 = 8_080;
/// Flags by which packets, not socket programs, serve sockets.
const PACKETS: [&str; 2] = ["--socket-lb", "off"];
/// The same, and the removal of all rules and routes at the end.
const WITHOUT_TRACE: [&str; 3] = ["--socket-lb", "off", "--cleanup-on-exit"];
/// The default sync period, which is longer than any wait of these tests.
const PERIOD: Duration = Duration::from_secs(30);

/// Networks outside of Services, with routes in the main table that are narrower than the ranges of
/// ClusterIPs.
const ELSEWHERE: [&str; 2] = ["198.18.5.0/24", "2001:db8:5::/120"];

/// A node with a second table that has the routes to pods and a default route to the fabric.
fn multi_homed() -> Result<ServedLab> {
    let base = ServedLab::with_manifests(Layout::Routed)?.serve_all(PORT)?;
    base.put(&web())?;
    let n1 = &base.lab.n1.host;
    let fabric = base.lab.fabric.addrs;
    ip(
        &n1.ns,
        &format!(
            "route add default via {v4} table 77
         -6 route add default via {v6} table 77
         route add {} via {v4}
         -6 route add {} via {v6}",
            ELSEWHERE[0],
            ELSEWHERE[1],
            v4 = fabric.v4,
            v6 = fabric.v6
        ),
    )?;
    for (family, pods) in [("-4", "10.244."), ("-6", "fd00:10:244:")] {
        let main = n1
            .ns
            .exec(Command::new("ip").args([family, "route", "show"]))?;
        for route in main.lines().filter(|route| route.starts_with(pods)) {
            ip(&n1.ns, &format!("{family} route add {route} table 77"))?;
        }
    }
    Ok(base)
}

/// The rules that other programs add: for IPv4, then for IPv6.
fn rules_of_others(n1: &Host) -> [String; 5] {
    let v4 = n1.addrs.v4;
    let v6 = n1.addrs.v6;
    [
        // Rules of hosts with several networks.
        format!("rule add from {v4} lookup 77 pref 100\n-6 rule add from {v6} lookup 77 pref 100"),
        "rule add iif lo lookup 77 pref 100\n-6 rule add iif lo lookup 77 pref 100".to_owned(),
        "rule add lookup 77 pref 76\n-6 rule add lookup 77 pref 76".to_owned(),
        // Without a preference the kernel puts a rule before all rules but the local table's.
        format!("rule add from {v4} lookup 77\n-6 rule add from {v6} lookup 77"),
        // The rules of wg-quick, in its order.
        "rule add not fwmark 51820 lookup 77
         rule add lookup main suppress_prefixlength 0
         -6 rule add not fwmark 51820 lookup 77
         -6 rule add lookup main suppress_prefixlength 0"
            .to_owned(),
    ]
}

#[test]
fn rules_of_others_take_no_packet_of_the_host_from_cluster_ips() -> Result<()> {
    let base = multi_homed()?;
    let n1 = &base.lab.n1.host;
    for all in rules_of_others(n1) {
        let reported = || format!("{all}, before kpx");
        let before = rules_of(&n1.ns)?;
        ip(&n1.ns, &all)?;
        let before_kpx = way_elsewhere(n1)?;
        let agent = base.kpx(&WITHOUT_TRACE)?;
        ensure!(
            way_elsewhere(n1)? == before_kpx,
            "{}: {}",
            reported(),
            way_elsewhere(n1)?
        );
        serves(n1, &web(), "").with_context(reported)?;
        ensure!(
            agent.typed_status()?.healthy,
            "{:?}",
            agent.typed_status()?.problems
        );
        agent.stop()?;
        ip(&n1.ns, &all.replace(" add ", " del "))?;
        ensure!(rules_of(&n1.ns)? == before, "{}", rules_of(&n1.ns)?);
    }
    Ok(())
}

#[test]
fn rules_and_routes_of_kpx_hold_among_those_of_others() -> Result<()> {
    let fixture = &multi_homed()?;
    let n1 = &fixture.lab.n1.host;
    let before = rules_of(&n1.ns)?;
    let agent = fixture.kpx(&WITHOUT_TRACE)?;
    let running = Running { fixture, agent };
    testbed::cases!(
        &running;
        later_rules_of_others_take_no_packet_of_the_host_from_cluster_ips,
        rule_that_stays_before_those_of_kpx_is_a_problem,
        rules_and_routes_that_are_removed_come_back_at_once,
    )?;
    running.agent.stop()?;
    ensure!(rules_of(&n1.ns)? == before, "{}", rules_of(&n1.ns)?);
    Ok(())
}

fn later_rules_of_others_take_no_packet_of_the_host_from_cluster_ips(
    running: &Running<ServedLab>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    let n1 = &fixture.lab.n1.host;
    let before = rules_of(&n1.ns)?;
    for all in rules_of_others(n1) {
        let reported = || format!("{all}, after kpx");
        ip(&n1.ns, &all)?;
        wait_until(DEADLINE, "kpx's rules come first", || is_first(&n1.ns))
            .with_context(reported)?;
        serves(n1, &web(), "").with_context(reported)?;
        ensure!(
            agent.typed_status()?.healthy,
            "{:?}",
            agent.typed_status()?.problems
        );
        ip(&n1.ns, &all.replace(" add ", " del "))?;
        wait_until(DEADLINE, "kpx's rules are where they were", || {
            Ok(rules_of(&n1.ns)? == before)
        })
        .with_context(reported)?;
    }
    Ok(())
}

/// Returns the host's path to addresses outside of Services, as `ip route get` shows it.
fn way_elsewhere(n1: &Host) -> Result<String> {
    let way = |(net, family): (&str, Family)| {
        let to = net.split('/').next().context("an address")?;
        let from = n1.addrs.ip(family).to_string();
        n1.ns
            .exec(Command::new("ip").args(["-o", "route", "get", to, "from", &from]))
    };
    Ok([
        way((ELSEWHERE[0], Family::V4))?,
        way((ELSEWHERE[1], Family::V6))?,
    ]
    .concat())
}

fn rule_that_stays_before_those_of_kpx_is_a_problem(running: &Running<ServedLab>) -> Result<()> {
    let Running { fixture, agent } = running;
    let n1 = &fixture.lab.n1.host;
    ip(&n1.ns, "rule add to 10.96.0.0/24 lookup 77 pref 20")?;
    let reported = "ip -4 rule 20 to 10.96.0.0/24 precede";
    wait_until(DEADLINE, "it is reported", || {
        Ok(agent
            .problem("rules")?
            .is_some_and(|why| why.starts_with(reported)))
    })?;
    let trace = kpx(
        &n1.ns,
        &format!(
            "trace --run-dir {} --host --to 10.96.0.10:80",
            agent.run_dir().display()
        ),
    )?;
    let trace = String::from_utf8(trace.stdout)?;
    ensure!(trace.contains(reported), "{trace}");
    ip(&n1.ns, "rule del to 10.96.0.0/24 lookup 77 pref 20")?;
    wait_until(DEADLINE, "it is over", || {
        Ok(agent.problem("rules")?.is_none())
    })?;
    // These rules apply to foreign packets and to other addresses.
    let of_others = "rule add to 10.97.0.0/24 lookup 77 pref 20
         rule add fwmark 0x200/0xf00 lookup 77 pref 9
         rule add iif eth1 lookup 77 pref 21";
    ip(&n1.ns, of_others)?;
    serves(n1, &web(), "with rules for other packets")?;
    ensure!(
        agent.problem("rules")?.is_none() && is_at(&n1.ns, 75)?,
        "{}",
        rules_of(&n1.ns)?
    );
    ip(&n1.ns, &of_others.replace(" add ", " del "))
}

/// Some VRF set-ups put the local table behind the VRFs' rules.
#[test]
fn services_are_reached_where_the_local_table_comes_last() -> Result<()> {
    let base = multi_homed()?;
    let external = Service::new("external", 30, &["p1b"], PORT).external_ips(EXTERNAL.host(7));
    base.put(&external)?;
    let n1 = &base.lab.n1.host;
    ip(
        &n1.ns,
        "rule add pref 32765 lookup local
         rule del pref 0
         -6 rule add pref 32765 lookup local
         -6 rule del pref 0",
    )?;
    let agent = base.kpx(&PACKETS)?;
    serves(n1, &web(), "the local table comes last")?;
    for family in Family::ALL {
        for protocol in Protocol::COMMON {
            let to = SocketAddr::new(EXTERNAL.host(7).ip(family), 80);
            let answer = Dial::new(protocol, to).exchange(&n1.ns, b"hello");
            answer.with_context(|| format!("{protocol} to {to}"))?;
        }
    }
    agent.stop()
}

fn rules_and_routes_that_are_removed_come_back_at_once(running: &Running<ServedLab>) -> Result<()> {
    let n1 = &running.fixture.lab.n1.host;
    let [of_others, ..] = rules_of_others(n1);
    ip(&n1.ns, &of_others)?;
    let whole = || state(&n1.ns);
    let before = whole()?;
    for removal in [
        "rule del pref 75\n-6 rule del pref 75",
        "rule del pref 32765\nrule del pref 32765\n-6 rule del pref 32765\n-6 rule del pref 32765",
        "route flush table 7041145\n-6 route flush table 7041145",
    ] {
        let since = Instant::now();
        ip(&n1.ns, removal)?;
        wait_until(DEADLINE, removal, || Ok(whole()? == before))?;
        ensure!(since.elapsed() < PERIOD / 3, "after {:?}", since.elapsed());
        serves(n1, &web(), removal)?;
    }
    ip(&n1.ns, &of_others.replace(" add ", " del "))
}

#[test]
fn route_of_an_older_kpx_leaves_the_main_table() -> Result<()> {
    let base = multi_homed()?;
    let n1 = &base.lab.n1.host;
    base.kpx(&PACKETS)?.crash()?;
    ip(
        &n1.ns,
        "rule del pref 75
         rule del pref 32765
         rule del pref 32765
         -6 rule del pref 75
         -6 rule del pref 32765
         -6 rule del pref 32765
         route flush table 7041145
         -6 route flush table 7041145
         route add 10.96.0.0/16 dev kpx0 proto 75 scope link
         -6 route add fd00:10:96::/112 dev kpx0 proto 75",
    )?;
    let agent = base.kpx(&PACKETS)?;
    for family in ["-4", "-6"] {
        let main = n1
            .ns
            .exec(Command::new("ip").args([family, "route", "show", "proto", "75"]))?;
        ensure!(main.is_empty(), "{main}");
    }
    serves(n1, &web(), "after the upgrade")?;
    agent.stop()
}

/// A network of containers holds some ClusterIPs of the range; other ClusterIPs lie outside of it.
#[test]
fn network_within_the_range_and_cluster_ips_in_it_are_reached() -> Result<()> {
    let base = ServedLab::with_manifests(Layout::Routed)?.serve_all(PORT)?;
    let beside = Service::new("beside", 200, &["p1b", "p2a"], PORT);
    base.put(&web())?;
    base.put(&beside)?;
    let n1 = &base.lab.n1.host;
    let before = state(&n1.ns)?;
    let container = containers(
        &n1.ns,
        ["10.96.0.1/25", "fd00:10:96::1/120"],
        ["10.96.0.5/25", "fd00:10:96::5/120"],
    )?;
    let directly: [SocketAddr; 2] = ["10.96.0.5:8080".parse()?, "[fd00:10:96::5]:8080".parse()?];
    for to in directly {
        base.servers.serve_at(&container, "container", to)?;
    }
    let reaches_all = |reported: &str| -> Result<()> {
        serves(n1, &web(), reported)?;
        serves(n1, &beside, reported)?;
        for to in directly {
            for protocol in Protocol::COMMON {
                let answer = Dial::new(protocol, to).exchange(&n1.ns, b"hello");
                let answer = answer
                    .with_context(|| format!("{protocol} to the container at {to}, {reported}"))?;
                ensure!(answer.backend == "container");
            }
        }
        Ok(())
    };
    let source = base.cluster.source();
    let agent = Agent::launch_by(None, &base.lab, n1, source, &WITHOUT_TRACE)?;
    let agent = agent.having("complete")?;
    let is_named = || Ok(agent.problem("ranges of ClusterIPs")?.is_some());
    wait_until(DEADLINE, "the overlap is a problem", is_named)?;
    let within = || -> Result<bool> { Ok(state(&n1.ns)?.contains("10.96.0.10 dev kpx0")) };
    wait_until(DEADLINE, "the ClusterIP within has a route", within)?;
    reaches_all("the network came first")?;
    // A Service that is added later.
    let later = Service::new("later", 11, &["p1b"], PORT);
    base.put(&later)?;
    wait_until(DEADLINE, "the new ClusterIP has a route", || {
        Ok(state(&n1.ns)?.contains("10.96.0.11 dev kpx0"))
    })?;
    serves(n1, &later, "a new Service within the network")?;
    ip(&n1.ns, "link del br-abc")?;
    wait_until(PERIOD * 2, "the range is for Services alone", || {
        Ok(!state(&n1.ns)?.contains("10.96.0.10 dev kpx0"))
    })?;
    serves(n1, &later, "the network is gone")?;
    ip(
        &n1.ns,
        "link add br-abc type bridge\nlink set br-abc up\naddr add 10.96.0.1/25 dev br-abc",
    )?;
    let since = Instant::now();
    wait_until(DEADLINE, "the network is left to its route", within)?;
    ensure!(since.elapsed() < PERIOD / 3, "after {:?}", since.elapsed());
    serves(n1, &later, "the network is back")?;
    ip(&n1.ns, "link del br-abc")?;
    agent.stop()?;
    ensure!(
        state(&n1.ns)? == before,
        "before\n{before}\nafter\n{}",
        state(&n1.ns)?
    );
    Ok(())
}

/// A network with exactly the ServiceCIDR's prefix appears before kpx, or after it.
#[test]
fn network_with_the_ranges_prefix_is_reached_from_a_host_outside() -> Result<()> {
    let base = ServedLab::with_manifests(Layout::Routed)?.serve_all(PORT)?;
    base.put(&web())?;
    let xl = &base.lab.xl;
    let n2 = &base.lab.n2;
    let routes = Family::ALL.map(|family| {
        format!(
            "route add {} via {}",
            n2.pod_net.cidr(family),
            n2.host.addrs.ip(family)
        )
    });
    ip(&xl.ns, &routes.join("\n"))?;
    for comes_first in [false, true] {
        let make = || {
            containers(
                &xl.ns,
                ["10.96.0.1/16", "fd00:10:96::1/112"],
                ["10.96.0.5/16", "fd00:10:96::5/112"],
            )
        };
        let early = if comes_first { Some(make()?) } else { None };
        let agent = Agent::start_outside(&base.lab, xl, base.cluster.source(), &[])?;
        let container = early.map_or_else(make, Ok)?;
        // The agent sets the routes of IPv4 first.
        let within = || -> Result<bool> {
            let state = state(&xl.ns)?;
            let own = ["10.96.0.10 dev kpx0", "fd00:10:96::10 dev kpx0"];
            Ok(own.iter().all(|route| state.contains(route)))
        };
        wait_until(DEADLINE, "the ClusterIPs have routes of their own", within)?;
        let reported = if comes_first {
            "the network came first"
        } else {
            "the network came later"
        };
        wait_until(DEADLINE, "the Service is in reach", || {
            Ok(serves(xl, &web(), reported).is_ok())
        })?;
        serves(xl, &web(), reported)?;
        for to in [
            "10.96.0.5:8080".parse::<SocketAddr>()?,
            "[fd00:10:96::5]:8080".parse()?,
        ] {
            base.servers.serve_at(&container, "container", to)?;
            for protocol in Protocol::COMMON {
                let answer = Dial::new(protocol, to).exchange(&xl.ns, b"hello");
                answer
                    .with_context(|| format!("{protocol} to the container at {to}, {reported}"))?;
            }
        }
        agent.stop()?;
        ip(&xl.ns, "link del br-abc\nlink del box0")?;
        drop(container);
    }
    Ok(())
}

fn web() -> Service {
    Service::new("web", 10, &["p1b", "p2a"], PORT)
}

/// Dials a Service from sockets without an address, and from sockets bound to the host's address.
fn serves(host: &Host, service: &Service, reported: &str) -> Result<()> {
    for family in Family::ALL {
        for protocol in Protocol::COMMON {
            let dial = Dial::new(protocol, service.frontend(family));
            for (what, dial) in [
                ("any address", dial),
                ("its address", dial.source_ip(host.addrs.ip(family))),
            ] {
                let answer = dial.exchange(&host.ns, b"hello");
                answer.with_context(|| {
                    format!(
                        "{protocol} over {family} from {what} to {}, {reported}",
                        service.name
                    )
                })?;
            }
        }
    }
    Ok(())
}

/// Makes a bridge with addresses of both families, and a container on it.
fn containers(node: &NetNs, addrs: [&str; 2], container: [&str; 2]) -> Result<Host> {
    let ns = NetNs::create(format!("{}-box", node.name()))?;
    let [v4, v6] = addrs;
    let [inner4, inner6] = container;
    ip(
        node,
        &format!(
            "link add br-abc type bridge
         link set br-abc up
         link add box0 type veth peer name eth0 netns {}
         link set box0 master br-abc
         link set box0 up",
            ns.name()
        ),
    )?;
    ip(
        &ns,
        &format!(
            "link set lo up\nlink set eth0 up\naddr add {inner4} dev eth0\naddr add {inner6} dev eth0 nodad"
        ),
    )?;
    ip(
        node,
        &format!("addr add {v4} dev br-abc\naddr add {v6} dev br-abc nodad"),
    )?;
    ns.settle()?;
    node.settle()?;
    let of = |text: &str| text.split('/').next().unwrap_or_default().to_owned();
    Ok(Host {
        name: "box",
        ns,
        addrs: testbed::lab::Dual {
            v4: of(inner4).parse()?,
            v6: of(inner6).parse()?,
        },
    })
}

/// Returns true if kpx's rules for the host's own packets directly follow the local table's, in
/// both families.
fn is_first(node: &NetNs) -> Result<bool> {
    let is = |family: &str| -> Result<bool> {
        let rules = node.exec(Command::new("ip").args([family, "rule", "show"]))?;
        Ok(rules
            .lines()
            .nth(1)
            .is_some_and(|second| second.contains("iif lo lookup 7041145 proto 75")))
    };
    Ok(is("-4")? && is("-6")?)
}

/// Runs lines of `ip` commands separately, because commands of a batch have no options.
fn ip(node: &NetNs, lines: &str) -> Result<()> {
    lines.lines().try_for_each(|line| {
        node.exec(Command::new("ip").args(line.split_whitespace()))
            .map(drop)
    })
}

fn is_at(node: &NetNs, preference: u32) -> Result<bool> {
    Ok(rules_of(node)?
        .lines()
        .any(|line| line.starts_with(&format!("{preference}:")) && line.contains("lookup 7041145")))
}

fn rules_of(node: &NetNs) -> Result<String> {
    let show = |family| node.exec(Command::new("ip").args([family, "rule", "show"]));
    Ok(show("-4")? + &show("-6")?)
}

/// Returns all state that kpx changes for the host's own packets: rules, and routes without those
/// that the kernel makes for addresses.
fn state(node: &NetNs) -> Result<String> {
    let mut state = rules_of(node)?;
    for family in ["-4", "-6"] {
        let routes =
            node.exec(Command::new("ip").args([family, "route", "show", "table", "all"]))?;
        let made = routes
            .lines()
            .filter(|line| !line.contains("table local") && !line.contains("proto kernel"));
        state.extend(made.map(|line| format!("{line}\n")));
    }
    Ok(state)
}
