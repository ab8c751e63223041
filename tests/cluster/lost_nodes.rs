//! Connections to a node that the control plane has lost: those of a Service with the annotation
//! end.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use socket2::{Domain, Socket, Type};
use testbed::agent::{Agent, DEADLINE, Object, Service, idle, node, wait_until};
use testbed::lab::{Family, Host, Layout};
use testbed::watched_lab::WatchedLab;

const PORT: u16 = 8080;
const ANNOTATION: &str = "kpx.dev/reset-on-node-loss";

/// The ready, serving and terminating conditions of the endpoints of a lost node; a draining pod
/// has the same.
const FAILS: [bool; 3] = [false, false, false];
const DRAINS: [bool; 3] = [false, true, true];

#[test]
fn annotated_service_ends_connections_to_lost_node() -> Result<()> {
    let lab = WatchedLab::start(PORT)?;
    let asks = Service::new("asks", 10, &["p2a"], PORT).annotation(ANNOTATION, "true");
    let control = Service::new("control", 11, &["p2a"], PORT);
    let drains = Service::new("drains", 12, &["p2b"], PORT).annotation(ANNOTATION, "true");
    [&asks, &control, &drains]
        .into_iter()
        .try_for_each(|service| lab.put_service(service))?;
    let kpx = Agent::start_with(&lab.lab, &lab.lab.n1, lab.source(), &[])?;
    let clients = [lab.lab.host("p1a"), &lab.lab.n1.host];
    let dial_both = |service: &Service, client: &Host| -> Result<Vec<TcpStream>> {
        Family::ALL
            .into_iter()
            .map(|family| dial(client, service, family))
            .collect()
    };
    let [mut of_pod, mut of_host] = [dial_both(&asks, clients[0])?, dial_both(&asks, clients[1])?];
    let mut spared = Vec::new();
    for (service, client) in [&control, &drains]
        .into_iter()
        .flat_map(|service| clients.map(|client| (service, client)))
    {
        spared.extend(dial_both(service, client)?);
    }

    // The pods' probes fail, and one pod drains, on a node that is present.
    conditions(&lab, &asks, FAILS)?;
    conditions(&lab, &control, FAILS)?;
    conditions(&lab, &drains, DRAINS)?;
    wait_until(DEADLINE, "the agent asks for the node", || {
        Ok(lab.api().traffic().requests("get", "nodes") > 0)
    })?;
    // The agent spares nodes whose packets it has just seen, so no packet goes there now.
    of_host
        .iter_mut()
        .try_for_each(waits)
        .context("the node is there")
        .with_context(|| kpx.log())?;

    // The node is cut off. The control plane marks it lost, and later removes the pods.
    lab.lab.n2.host.ns.ip("link set eth0 down")?;
    lose_node(&lab)?;
    for service in [&asks, &control] {
        lab.put_service(&service.backed_by(&[]))?;
    }
    for connection in &mut of_host {
        // The client waits for the server without sending.
        connection.set_read_timeout(Some(DEADLINE))?;
        let error = connection.read(&mut [0]).err().context("an error")?;
        ensure!(
            error.kind() == ErrorKind::ConnectionAborted,
            "{error}: {}",
            kpx.log()
        );
    }
    for connection in &mut of_pod {
        wait_until(DEADLINE, "the pod's connection is reset", || {
            connection.set_read_timeout(Some(Duration::from_millis(200)))?;
            let ended = connection
                .write_all(&[1])
                .and_then(|()| connection.read(&mut [0]));
            Ok(ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset))
        })
        .with_context(|| kpx.log())?;
    }
    for connection in &mut spared {
        connection.write_all(&[1])?;
        waits(connection).context("of another Service, or to a pod that drains")?;
    }
    let reported = || {
        let events = lab.api().list("events.events.k8s.io");
        events
            .into_iter()
            .filter(|event| event["reason"] == "ConnectionsEnded")
            .collect::<Vec<_>>()
    };
    wait_until(DEADLINE, "the Service is reported", || {
        Ok(reported().len() == 2)
    })?;
    for event in reported() {
        ensure!(event["regarding"]["name"] == "asks", "{event}");
        let note = event["note"].as_str().unwrap_or_default();
        ensure!(
            note.starts_with("node n1: 2 connections of port 80 end with node n2, which is lost: "),
            "{note}"
        );
    }
    kpx.stop()
}

/// The client's first SYNs go to a node that is cut off. The SYN after the removal of the endpoint
/// reaches another backend.
#[test]
fn connection_that_waits_leaves_lost_node_in_every_layout() -> Result<()> {
    Layout::ALL
        .into_iter()
        .try_for_each(|layout| leaves_lost_node(layout).with_context(|| format!("{layout:?}")))
}

fn leaves_lost_node(layout: Layout) -> Result<()> {
    let lab = WatchedLab::start_in(layout, PORT, Vec::new())?;
    let asks = Service::new("asks", 10, &["p2a"], PORT).annotation(ANNOTATION, "true");
    lab.put_service(&asks)?;
    let kpx = Agent::start_with(&lab.lab, &lab.lab.n1, lab.source(), &[])?;
    // The agent records the endpoints' nodes several times a second. An endpoint that has gone
    // before that is never suspected.
    idle(Duration::from_secs(1))?;
    // The neighbour answers on; otherwise the client would get an ICMP error.
    lab.lab
        .n2
        .host
        .ns
        .nft("table inet cut { chain c { type filter hook prerouting priority -300; meta l4proto tcp drop; }; }")?;
    let mut waiting = Vec::new();
    for (client, family) in [lab.lab.host("p1a"), &lab.lab.n1.host]
        .into_iter()
        .flat_map(|client| Family::ALL.map(|family| (client, family)))
    {
        waiting.push((client, family, begin_to_dial(client, &asks, family)?));
    }
    lose_node(&lab)?;
    lab.put_service(&asks.backed_by(&["p1b"]))?;
    for (client, family, socket) in waiting {
        let what = format!("the connection of {} by {family} is open", client.name);
        wait_until(DEADLINE, &what, || Ok(socket.peer_addr().is_ok()))
            .with_context(|| kpx.log())?;
        socket.set_nonblocking(false)?;
        goes_on(&mut TcpStream::from(socket))?;
    }
    let events = lab.api().list("events.events.k8s.io");
    ensure!(
        events
            .iter()
            .all(|event| event["reason"] != "ConnectionsEnded"),
        "{events:?}"
    );
    kpx.stop()
}

/// Sends a SYN without waiting for the answer.
fn begin_to_dial(client: &Host, service: &Service, family: Family) -> Result<Socket> {
    let to = service.frontend(family);
    let socket = client
        .ns
        .run(|| Socket::new(Domain::for_address(to), Type::STREAM, None))?;
    socket.set_nonblocking(true)?;
    let error = socket
        .connect(&to.into())
        .err()
        .context("an answer at once")?;
    ensure!(
        error.raw_os_error() == Some(nix::errno::Errno::EINPROGRESS as i32),
        "{error}"
    );
    Ok(socket)
}

/// Makes the control plane mark the other node lost.
fn lose_node(lab: &WatchedLab) -> Result<()> {
    let mut lost = node(&lab.lab.n2).0;
    lost["spec"]["taints"] =
        json!([{ "key": "node.kubernetes.io/unreachable", "effect": "NoExecute" }]);
    lab.put(&Object(lost))
}

fn dial(client: &Host, service: &Service, family: Family) -> Result<TcpStream> {
    let to = service.frontend(family);
    let mut connection = None;
    wait_until(DEADLINE, "the Service answers", || {
        connection = client
            .ns
            .run(|| TcpStream::connect_timeout(&to, Duration::from_secs(1)))
            .ok();
        Ok(connection.is_some())
    })?;
    let mut connection = connection.context("a connection")?;
    goes_on(&mut connection)?;
    Ok(connection)
}

/// Checks that the server answers a request of one byte: see `testbed::echo`.
fn goes_on(connection: &mut TcpStream) -> Result<()> {
    connection.set_read_timeout(Some(DEADLINE))?;
    connection.write_all(&[0, 0, 0, 1, 7])?;
    let mut length = [0];
    connection
        .read_exact(&mut length)
        .context("the greeting's length")?;
    connection
        .read_exact(&mut vec![0; usize::from(length[0]) + 1])
        .context("the greeting and the echo")
}

/// Checks that nothing arrives, FIN and RST included.
fn waits(connection: &mut TcpStream) -> Result<()> {
    connection.set_read_timeout(Some(Duration::from_millis(50)))?;
    let read = connection.read(&mut [0]);
    ensure!(
        read.as_ref()
            .is_err_and(|error| error.kind() == ErrorKind::WouldBlock),
        "{read:?}"
    );
    Ok(())
}

/// Sets these conditions on all endpoints of a Service.
fn conditions(
    lab: &WatchedLab,
    service: &Service,
    [ready, serving, terminating]: [bool; 3],
) -> Result<()> {
    for Object(mut object) in service.objects(&lab.lab) {
        for endpoint in object["endpoints"].as_array_mut().into_iter().flatten() {
            endpoint["conditions"] =
                json!({ "ready": ready, "serving": serving, "terminating": terminating });
        }
        if object["kind"] == "EndpointSlice" {
            lab.put(&Object(object))?;
        }
    }
    Ok(())
}
