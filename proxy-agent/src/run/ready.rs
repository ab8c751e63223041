//! The line that ends the start of a host outside the cluster: what the host reaches, the next
//! step, and a command to try.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::pending;
use std::io::{Write as _, stderr};
use std::net::IpAddr;
use std::time::Duration;

use anyhow::Result;
use tokio::time::sleep;
use tracing::debug;

use crate::choices::Mode;
use crate::control::AgentHandle;
use proxy_view::status::{NamesStatus, Status};
use proxy_view::{PortView, ServiceView};

/// The time between two checks for the end of the start: the first, and the longest.
const AGAIN: Duration = Duration::from_millis(100);
const AGAIN_MAX: Duration = Duration::from_secs(3);

/// Prints the line to standard error in host mode.
pub(super) async fn announce(mode: Mode, agent: &AgentHandle) -> Infallible {
    if mode == Mode::Host {
        match started(agent).await {
            // The line is for a person, who may have closed standard error.
            Ok((status, services)) => drop(writeln!(stderr(), "{}", line(&status, &services))),
            Err(error) => debug!(error = format!("{error:#}"), "the start is not announced"),
        }
    }
    pending().await
}

/// Waits until Services are programmed, and names are served or known to be unavailable.
async fn started(agent: &AgentHandle) -> Result<(Status, Vec<ServiceView>)> {
    let mut again = AGAIN;
    loop {
        let status = agent.status().await?;
        let is_decided = |names: &NamesStatus| names.address.is_some() || names.why_not.is_some();
        if status.healthy && status.names.as_ref().is_none_or(is_decided) {
            return Ok((status, agent.services().await?));
        }
        sleep(again).await;
        again = (again * 2).min(AGAIN_MAX);
    }
}

fn line(status: &Status, services: &[ServiceView]) -> String {
    let cut_off: BTreeSet<_> = status.cut_off.iter().map(|one| &*one.service).collect();
    let mut parts = vec![match services.len() {
        1 => "1 Service".to_owned(),
        number => format!("{number} Services"),
    }];
    if !cut_off.is_empty() {
        parts[0] += &out_of_reach(status, &cut_off);
    }
    let is_reached = |service: &&ServiceView| {
        !cut_off.contains(&*format!("{}/{}", service.namespace, service.name))
    };
    let domain = status
        .names
        .as_ref()
        .filter(|names| names.address.is_some())
        .map(|names| &*names.domain);
    parts.extend(example(services.iter().filter(is_reached), domain));
    format!("ready: {}", parts.join("; "))
}

/// Returns the number of unreachable Services, with their common cause and the next step.
fn out_of_reach(status: &Status, cut_off: &BTreeSet<&str>) -> String {
    let causes: Vec<_> = status
        .unreachable
        .iter()
        .filter(|one| cut_off.contains(&*one.service))
        .collect();
    let number = cut_off.len();
    let cause = match (
        number,
        causes.iter().all(|one| one.why.contains("no node port")),
    ) {
        (_, false) => "",
        (1, true) => " because it has no node port and no route to its pods",
        (_, true) => " because they have no node port and no route to their pods",
    };
    let has_tcp = causes.iter().any(|one| one.port.ends_with("/tcp"));
    let step = match status.tunnel.is_none() && has_tcp {
        true => "try --tunnel tcp",
        false => "see kpx status",
    };
    format!(", {number} out of reach{cause}: {step}")
}

/// Returns a command that reaches a Service by HTTP, by its name or (if there is no domain) by its
/// address. `None` if no port looks like HTTP.
fn example<'a>(
    services: impl Iterator<Item = &'a ServiceView>,
    domain: Option<&str>,
) -> Option<String> {
    let ports = services.flat_map(|service| {
        let ports = service.ports.iter().filter(|port| is_served(port));
        ports.filter_map(move |port| Some((likeness(port)?, service, port)))
    });
    let (_, service, port) = ports.min_by_key(|(likeness, ..)| *likeness)?;
    let host = match (domain, service.cluster_ips.first()?) {
        (Some(domain), _) => format!("{}.{}.svc.{domain}", service.name, service.namespace),
        (None, IpAddr::V4(ip)) => ip.to_string(),
        (None, IpAddr::V6(ip)) => format!("[{ip}]"),
    };
    let port = match port.port {
        80 => String::new(),
        port => format!(":{port}"),
    };
    Some(format!("curl http://{host}{port}"))
}

/// Returns true if new connections reach a backend.
fn is_served(port: &PortView) -> bool {
    let mut ways = port
        .backends
        .iter()
        .filter_map(|backend| backend.way.as_deref());
    !port.frontends.is_empty() && ways.any(|way| way != "unreachable")
}

/// Ranks a port by its likeness to HTTP, 0 is the best; `None` if the port looks like another
/// protocol.
fn likeness(port: &PortView) -> Option<u8> {
    match (&*port.protocol, port.port, &*port.name) {
        ("TCP", 80, _) => Some(0),
        ("TCP", _, name) if name.starts_with("http") && !name.starts_with("https") => Some(1),
        ("TCP", 8000..=8999, _) => Some(2),
        _ => None,
    }
}
