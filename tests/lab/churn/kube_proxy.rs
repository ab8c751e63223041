//! kube-proxy, as far as packets show: its rules for a Service in each of its modes.

use std::io::Write;
use std::net::SocketAddr;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use testbed::lab::{CLUSTER_PODS, Family, SERVICE_CIDR};

use crate::churn::fixture::{Fixture, NODE_PORT, PORT};

/// kube-proxy's endpoints differ from kpx's, so that each answer identifies the proxy.
pub(crate) const BACKENDS: [&str; 2] = ["p2b", "p1c"];

/// The form of kube-proxy's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Nftables,
    /// The variant of iptables.
    Iptables(&'static str),
}

impl Mode {
    pub(crate) const ALL: [Self; 3] = [
        Self::Nftables,
        Self::Iptables("nft"),
        Self::Iptables("legacy"),
    ];

    /// Writes the rules of both families on n1.
    pub(crate) fn install(self, fixture: &Fixture) -> Result<()> {
        for family in Family::ALL {
            match self {
                Self::Nftables => fixture.node().nft(&fill(
                    fixture,
                    family,
                    include_str!("kube_proxy/nftables.nft"),
                ))?,
                Self::Iptables(variant) => {
                    let six = if family == Family::V6 { "6" } else { "" };
                    let tool = format!("ip{six}tables-{variant}-restore");
                    restore(
                        fixture,
                        &tool,
                        &fill(fixture, family, include_str!("kube_proxy/iptables.txt")),
                    )?;
                }
            }
        }
        Ok(())
    }
}

fn fill(fixture: &Fixture, family: Family, template: &str) -> String {
    let ip = |name: &str| fixture.lab.host(name).addrs.ip(family).to_string();
    let endpoint =
        |name: &str| SocketAddr::new(fixture.lab.host(name).addrs.ip(family), PORT).to_string();
    let [first, second] = BACKENDS;
    let (table, addr_type) = if family == Family::V4 {
        ("ip", "ipv4_addr")
    } else {
        ("ip6", "ipv6_addr")
    };
    let values = [
        ("FAMILY", table.to_owned()),
        ("ADDR_TYPE", addr_type.to_owned()),
        (
            "CLUSTER_IP",
            fixture.web.cluster_ip().ip(family).to_string(),
        ),
        ("NODE_IP", ip("n1")),
        ("NODE_PORT", NODE_PORT.to_string()),
        ("SERVICE_CIDR", SERVICE_CIDR.cidr(family)),
        ("POD_CIDR", CLUSTER_PODS.cidr(family)),
        ("FIRST_IP", ip(first)),
        ("FIRST_ENDPOINT", endpoint(first)),
        ("SECOND_IP", ip(second)),
        ("SECOND_ENDPOINT", endpoint(second)),
    ];
    values
        .iter()
        .fold(template.to_owned(), |text, (name, value)| {
            text.replace(name, value)
        })
}

fn restore(fixture: &Fixture, tool: &str, rules: &str) -> Result<()> {
    let mut command = Command::new(tool);
    command
        .args(["--wait", "--noflush"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = fixture
        .node()
        .spawn(&mut command)
        .context("install iptables")?;
    child
        .stdin
        .take()
        .context("open standard input")?
        .write_all(rules.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "{tool}: {}\n{rules}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
