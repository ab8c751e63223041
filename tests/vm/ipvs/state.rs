//! The state of kube-proxy's mode ipvs on a node, made with kube-proxy's tools in its order.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use testbed::agent::{SERVICE_PORT, Service};
use testbed::lab::{CLUSTER_PODS, Family, Lab};
use testbed::netns::NetNs;

pub(super) const PORT: u16 = 8080;
pub(super) const NODE_PORT: u16 = 30_080;

/// The sysctls that kube-proxy sets with `strictARP`.
const SETTINGS: [(&str, &str); 5] = [
    ("ipv4/vs/conntrack", "1"),
    ("ipv4/vs/expire_nodest_conn", "1"),
    ("ipv4/vs/expire_quiescent_template", "1"),
    ("ipv4/conf/all/arp_ignore", "1"),
    ("ipv4/conf/all/arp_announce", "2"),
];
/// The protocols, in the words of ipvsadm and ipset.
const PROTOCOLS: [(&str, &str); 3] = [("-t", "tcp"), ("-u", "udp"), ("--sctp-service", "sctp")];
/// The ipsets without `KUBE-`, and their kinds. kube-proxy creates all of them, empty ones
/// included.
const SETS: [(&str, &str); 17] = [
    ("LOOP-BACK", "hash:ip,port,ip"),
    ("CLUSTER-IP", "hash:ip,port"),
    ("EXTERNAL-IP", "hash:ip,port"),
    ("EXTERNAL-IP-LOCAL", "hash:ip,port"),
    ("LOAD-BALANCER", "hash:ip,port"),
    ("LOAD-BALANCER-FW", "hash:ip,port"),
    ("LOAD-BALANCER-LOCAL", "hash:ip,port"),
    ("LOAD-BALANCER-SOURCE-IP", "hash:ip,port,ip"),
    ("LOAD-BALANCER-SOURCE-CIDR", "hash:ip,port,net"),
    ("NODE-PORT-TCP", "bitmap:port"),
    ("NODE-PORT-LOCAL-TCP", "bitmap:port"),
    ("NODE-PORT-UDP", "bitmap:port"),
    ("NODE-PORT-LOCAL-UDP", "bitmap:port"),
    ("NODE-PORT-SCTP-HASH", "hash:ip,port"),
    ("NODE-PORT-LOCAL-SCTP-HASH", "hash:ip,port"),
    ("HEALTH-CHECK-NODE-PORT", "bitmap:port"),
    ("IPVS-IPS", "hash:ip"),
];
/// The maximum length of an ipset's name; kube-proxy truncates longer ones.
const NAME_MAX: usize = 31;

/// Makes the state on n1 for a Service with a node port: sets, device, servers and their addresses,
/// set entries, rules.
pub(super) fn install(lab: &Lab, service: &Service) -> Result<()> {
    let ns = &lab.n1.host.ns;
    SETTINGS
        .iter()
        .try_for_each(|(key, value)| ns.sysctl(key, value))?;
    ns.ip("link add kube-ipvs0 type dummy")?;
    for family in Family::ALL {
        feed(ns, "ipset", &["restore"], &empty_sets(family)?)?;
        feed(
            ns,
            "ipvsadm",
            &["--restore"],
            &servers(lab, service, family)?,
        )?;
        let (length, nodad) = if family == Family::V4 {
            ("32", "")
        } else {
            ("128", "nodad")
        };
        let ip = service.cluster_ip().ip(family);
        ns.ip(&format!("addr add {ip}/{length} dev kube-ipvs0 {nodad}"))?;
        feed(ns, "ipset", &["restore"], &entries(lab, service, family)?)?;
        feed(
            ns,
            &format!("{}-restore", tool(family)),
            &["--wait", "--noflush"],
            &rules(family),
        )?;
    }
    Ok(())
}

/// Returns the remaining state of mode ipvs, as comparable lines.
pub(super) fn state(ns: &NetNs) -> Result<String> {
    let mut lines = Vec::new();
    let mut add = |text: String, is_wanted: fn(&str) -> bool| {
        lines.extend(
            text.lines()
                .filter(|line| is_wanted(line))
                .map(|line| without_chance(line)),
        );
    };
    add(
        ns.exec(Command::new("ipvsadm").args(["--save", "--numeric"]))?,
        |_| true,
    );
    add(ns.exec(Command::new("ipset").arg("save"))?, |_| true);
    for family in Family::ALL {
        add(
            ns.exec(&mut Command::new(format!("{}-save", tool(family))))?,
            |line| line.contains("KUBE-"),
        );
    }
    add(
        ns.exec(Command::new("ip").args(["-oneline", "address"]))?,
        |line| line.contains("kube-ipvs0"),
    );
    for (key, _) in &SETTINGS[3..] {
        lines.push(format!(
            "{key} = {}",
            ns.read(&format!("/proc/sys/net/{key}"))?.trim()
        ));
    }
    // The kernel lists the entries of a hash in random order.
    lines.sort();
    Ok(lines.join("\n"))
}

/// Returns a line without the numbers that differ each time: hash seeds, counters, device indexes.
fn without_chance(line: &str) -> String {
    let mut words = line.split(' ').peekable();
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        match word {
            "initval" => drop(words.next()),
            _ if word.starts_with('[') || word.ends_with(':') => {}
            _ => kept.push(word),
        }
    }
    kept.join(" ")
}

fn tool(family: Family) -> &'static str {
    if family == Family::V4 {
        "iptables-nft"
    } else {
        "ip6tables-nft"
    }
}

fn infix(family: Family) -> &'static str {
    if family == Family::V4 { "" } else { "6-" }
}

fn set(family: Family, name: &str) -> String {
    format!("KUBE-{}{name}", infix(family))
        .chars()
        .take(NAME_MAX)
        .collect()
}

fn empty_sets(family: Family) -> Result<String> {
    let inet = if family == Family::V4 {
        "inet"
    } else {
        "inet6"
    };
    let mut text = String::new();
    for (name, kind) in SETS {
        let hash = format!("family {inet} hashsize 1024 maxelem 65536");
        let size = if kind == "bitmap:port" {
            "range 0-65535"
        } else {
            &hash
        };
        writeln!(text, "create {} {kind} {size}", set(family, name))?;
    }
    Ok(text)
}

fn entries(lab: &Lab, service: &Service, family: Family) -> Result<String> {
    let cluster_ip = service.cluster_ip().ip(family);
    let node = lab.n1.host.addrs.ip(family);
    let mut text = String::new();
    for (_, proto) in PROTOCOLS {
        writeln!(
            text,
            "add {} {cluster_ip},{proto}:{SERVICE_PORT}",
            set(family, "CLUSTER-IP")
        )?;
        for pod in lab
            .n1
            .pods
            .iter()
            .filter(|pod| service.backends.contains(&pod.name))
        {
            let ip = pod.addrs.ip(family);
            writeln!(
                text,
                "add {} {ip},{proto}:{PORT},{ip}",
                set(family, "LOOP-BACK")
            )?;
        }
    }
    for name in ["NODE-PORT-TCP", "NODE-PORT-UDP"] {
        writeln!(text, "add {} {NODE_PORT}", set(family, name))?;
    }
    writeln!(
        text,
        "add {} {node},sctp:{NODE_PORT}",
        set(family, "NODE-PORT-SCTP-HASH")
    )?;
    writeln!(text, "add {} {cluster_ip}", set(family, "IPVS-IPS"))?;
    Ok(text)
}

fn servers(lab: &Lab, service: &Service, family: Family) -> Result<String> {
    let cluster_ip = service.cluster_ip().ip(family);
    let node = lab.n1.host.addrs.ip(family);
    let mut text = String::new();
    for (flag, _) in PROTOCOLS {
        for at in [
            SocketAddr::new(cluster_ip, SERVICE_PORT),
            SocketAddr::new(node, NODE_PORT),
        ] {
            writeln!(text, "-A {flag} {at} -s rr")?;
            for backend in &service.backends {
                let to = SocketAddr::new(lab.host(backend).addrs.ip(family), PORT);
                writeln!(text, "-a {flag} {at} -r {to} -m -w 1")?;
            }
        }
    }
    Ok(text)
}

fn rules(family: Family) -> String {
    let loopback = if family == Family::V4 {
        "-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN\n"
    } else {
        ""
    };
    include_str!("rules.txt")
        .replace("LOOPBACK_RULE\n", loopback)
        .replace("POD_CIDR", &CLUSTER_PODS.cidr(family))
        .replace(
            "--match-set KUBE-",
            &format!("--match-set KUBE-{}", infix(family)),
        )
}

fn feed(ns: &NetNs, tool: &str, arguments: &[&str], text: &str) -> Result<()> {
    let mut command = Command::new(tool);
    let mut child = ns.spawn(
        command
            .args(arguments)
            .stdin(Stdio::piped())
            .stderr(Stdio::piped()),
    )?;
    child
        .stdin
        .take()
        .context("open standard input")?
        .write_all(text.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "{tool}: {}\n{text}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
