//! kube-proxy's iptables mode.

use std::fmt::{self, Write};
use std::net::SocketAddrV4;

use super::{MASQUERADE, Rules, ServicePort, hash};

/// Above this number of endpoints kube-proxy omits comments from their rules.
const LARGE: usize = 1000;
const HASH: usize = 16;

pub(super) fn text(rules: &Rules) -> String {
    let mut text = format!("*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n{}", filter());
    nat(rules, &mut text).expect("a string takes all");
    text
}

/// Returns the rules from a service port to its current endpoints, and the deletions of the chains
/// of removed endpoints.
pub(super) fn change(rules: &Rules, port: &ServicePort, gone: &[SocketAddrV4]) -> String {
    let mut text = String::from("*nat\n");
    let is_large = is_large(rules);
    chains(port, &mut text).expect("a string takes all");
    for at in gone {
        text += &format!(":KUBE-SEP-{} - [0:0]\n", id(port, Some(at)));
    }
    service(rules, port, is_large, &mut text).expect("a string takes all");
    for at in gone {
        text += &format!("-X KUBE-SEP-{}\n", id(port, Some(at)));
    }
    text + "COMMIT\n"
}

fn is_large(rules: &Rules) -> bool {
    rules
        .ports
        .iter()
        .map(|port| port.endpoints.len())
        .sum::<usize>()
        > LARGE
}

fn filter() -> String {
    let firewall = r#"-m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL"#;
    let portals = r#"-m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES"#;
    let external = r#"-m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES"#;
    format!(
        r#"*filter
:KUBE-SERVICES - [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-PROXY-CANARY - [0:0]
-A INPUT {firewall}
-A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-A INPUT {external}
-A FORWARD {firewall}
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD {portals}
-A FORWARD {external}
-A OUTPUT {firewall}
-A OUTPUT {portals}
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark {MASQUERADE}/{MASQUERADE} -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
"#
    )
}

fn nat(rules: &Rules, text: &mut String) -> fmt::Result {
    text.push_str(
        "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\n:KUBE-POSTROUTING - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n\
         :KUBE-PROXY-CANARY - [0:0]\n",
    );
    rules.owners().try_for_each(|port| chains(port, text))?;
    write!(
        text,
        r#"-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-POSTROUTING -m mark ! --mark {MASQUERADE}/{MASQUERADE} -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark {MASQUERADE}
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-MARK-MASQ -j MARK --or-mark {MASQUERADE}
"#
    )?;
    let large = is_large(rules);
    rules
        .ports
        .iter()
        .try_for_each(|port| frontends(rules, port, text))?;
    rules
        .owners()
        .try_for_each(|port| service(rules, port, large, text))?;
    text.push_str(
        "-A KUBE-SERVICES -m comment --comment \"kubernetes service nodeports; NOTE: this must be the last rule in \
         this chain\" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\nCOMMIT\n",
    );
    Ok(())
}

fn chains(port: &ServicePort, text: &mut String) -> fmt::Result {
    let chain = id(port, None);
    writeln!(text, ":KUBE-SVC-{chain} - [0:0]")?;
    if port.node_port.is_some() {
        writeln!(text, ":KUBE-EXT-{chain} - [0:0]")?;
    }
    port.endpoints
        .iter()
        .try_for_each(|at| writeln!(text, ":KUBE-SEP-{} - [0:0]", id(port, Some(at))))
}

fn frontends(rules: &Rules, port: &ServicePort, text: &mut String) -> fmt::Result {
    let chain = id(rules.owner(port), None);
    let name = port.full_name();
    let proto = port.proto;
    if let Some(number) = port.node_port {
        writeln!(
            text,
            r#"-A KUBE-NODEPORTS -m comment --comment "{name}" -m {proto} -p {proto} --dport {number} -j KUBE-EXT-{chain}"#
        )?;
    }
    writeln!(
        text,
        "-A KUBE-SERVICES {} -j KUBE-SVC-{chain}",
        cluster_ip(port)
    )
}

fn cluster_ip(port: &ServicePort) -> String {
    let ServicePort {
        proto,
        cluster_ip,
        port: number,
        ..
    } = port;
    let name = port.full_name();
    format!(
        r#"-m comment --comment "{name} cluster IP" -m {proto} -p {proto} -d {cluster_ip} --dport {number}"#
    )
}

fn service(rules: &Rules, port: &ServicePort, large: bool, text: &mut String) -> fmt::Result {
    let chain = id(port, None);
    let name = port.full_name();
    let proto = port.proto;
    writeln!(
        text,
        "-A KUBE-SVC-{chain} {} ! -s {} -j KUBE-MARK-MASQ",
        cluster_ip(port),
        rules.pods
    )?;
    if port.node_port.is_some() {
        let what = format!(
            r#"-m comment --comment "masquerade traffic for {name} external destinations""#
        );
        writeln!(text, "-A KUBE-EXT-{chain} {what} -j KUBE-MARK-MASQ")?;
        writeln!(text, "-A KUBE-EXT-{chain} -j KUBE-SVC-{chain}")?;
    }
    let count = port.endpoints.len();
    for (nth, at) in port.endpoints.iter().enumerate() {
        let target = id(port, Some(at));
        let comment = |what: String| {
            if large {
                String::new()
            } else {
                format!(" -m comment --comment {what}")
            }
        };
        let said = comment(format!(r#""{name} -> {at}""#));
        // Each rule selects among the remaining endpoints; the last rule needs no probability.
        let dice = (nth + 1 < count).then(|| {
            format!(
                " -m statistic --mode random --probability {:.10}",
                1.0 / (count - nth) as f64
            )
        });
        writeln!(
            text,
            "-A KUBE-SVC-{chain}{said}{} -j KUBE-SEP-{target}",
            dice.unwrap_or_default()
        )?;
        let said = comment(name.clone());
        writeln!(
            text,
            "-A KUBE-SEP-{target}{said} -s {} -j KUBE-MARK-MASQ",
            at.ip()
        )?;
        writeln!(
            text,
            "-A KUBE-SEP-{target}{said} -m {proto} -p {proto} -j DNAT --to-destination {at}"
        )?;
    }
    Ok(())
}

/// Returns the suffix of a chain's name.
fn id(port: &ServicePort, endpoint: Option<&SocketAddrV4>) -> String {
    let endpoint = endpoint.map(SocketAddrV4::to_string).unwrap_or_default();
    hash(
        &format!("{}{}{endpoint}", port.full_name(), port.proto),
        HASH,
    )
}
