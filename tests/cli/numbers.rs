//! The numbers of flows and backends, which agree in every output.

use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::agent::{DEADLINE, wait_until};

use crate::node::Node;

/// Returns the sum of a field over objects.
fn sum<'a>(objects: impl IntoIterator<Item = &'a Value>, pointer: &str) -> u64 {
    objects
        .into_iter()
        .filter_map(|object| object.pointer(pointer)?.as_u64())
        .sum()
}

/// Returns the body that the web page reads at a path.
fn page(node: &Node, path: &str) -> Result<String> {
    let address = "127.0.0.1:10249";
    node.ns().run(|| {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(DEADLINE))?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(answer.contains(" 200 OK\r\n"), "{answer}");
        Ok(answer)
    })
}

#[test]
fn flows_and_backends_are_counted_alike_in_every_output() -> Result<()> {
    let node = Node::start("numbers", "--socket-lb off --ui")?;
    let json = |command: &str| -> Result<Value> {
        let text = node.text(&format!("{command} -o json"))?;
        serde_json::from_str(&text).with_context(|| text)
    };
    drop(node.connect()?);
    let _open = node.connect()?;

    // A closed flow stays in the table for a minute. A sweep counts it within ten seconds.
    wait_until(
        DEADLINE,
        "status counts both flows, one of them open",
        || {
            let flows = &json("status")?["flows"]["IPv4"];
            Ok(flows["flows"] == 2 && flows["open"] == 1)
        },
    )?;
    let flows = json("flows")?;
    let states: Vec<_> = flows
        .as_array()
        .context("flows")?
        .iter()
        .filter_map(|flow| flow["state"].as_str())
        .collect();
    ensure!(
        states.len() == 2 && states.contains(&"closed") && states.contains(&"established"),
        "{states:?}"
    );

    let services = json("services")?;
    let services = services.as_array().context("Services")?;
    let ports = || {
        services
            .iter()
            .flat_map(|service| service["ports"].as_array())
            .flatten()
    };
    let of_ports = [
        sum(ports(), "/counts/flows"),
        sum(ports(), "/counts/openFlows"),
    ];
    assert_eq!(of_ports, [2, 1], "{services:?}");
    let backends = json("backends")?;
    let backends = backends.as_array().context("backends")?;
    assert_eq!(
        [sum(backends, "/flows"), sum(backends, "/openFlows")],
        [2, 1]
    );
    assert_eq!(json("top --interval 0.5")?["total"]["flows"], 2);

    let column = |command: &str, name: &str| -> Result<Vec<String>> {
        let text = node.text(command)?;
        let mut lines = text.lines().map(|line| line.split_whitespace());
        let mut header = lines.next().context("a header")?;
        let place = header
            .position(|column| column == name)
            .context("a column")?;
        Ok(lines
            .filter_map(|mut line| Some(line.nth(place)?.to_owned()))
            .collect())
    };
    assert_eq!(column("services", "FLOWS")?, ["0", "2", "0"]);
    assert_eq!(column("services -o wide", "OPEN")?, ["0", "1", "0"]);
    // The two ports of kube-dns have the same pod.
    assert_eq!(column("services", "BACKENDS")?, ["1/1", "1/3", "0/0"]);

    let rows = page(&node, "/ui/api/rows")?;
    let rows: Vec<Value> = rows
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    assert_eq!(
        [
            sum(&rows, "/flows"),
            sum(&rows, "/openFlows"),
            sum(&rows, "/total")
        ],
        [2, 1, 4],
        "{rows:?}"
    );
    Ok(())
}
