//! More Services than one answer of the agent's loop holds.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::agent::{Agent, DEADLINE, kpx, wait_until};
use testbed::netns::NetNs;

/// The number of Services, which is not a multiple of an answer's size.
const SERVICES: usize = 700;

#[test]
fn cli_lists_each_of_many_services_once() -> Result<()> {
    let node = NetNs::machine("parts")?;
    let agent = Agent::start_alone(&node, &[("many", &services()?)], "")?.healthy()?;
    wait_until(DEADLINE, "all Services are in force", || {
        Ok(agent
            .typed_status()?
            .tables
            .get("IPv4")
            .is_some_and(|table| table.services == SERVICES))
    })?;
    let listed = kpx(
        agent.ns(),
        &format!(
            "services -A -o json --run-dir {}",
            agent.run_dir().display()
        ),
    )?;
    let rows: Vec<Value> =
        serde_json::from_slice(&listed.stdout).with_context(|| format!("{listed:?}"))?;
    let names: Vec<_> = rows
        .iter()
        .filter_map(|row| {
            Some(format!(
                "{}/{}",
                row["namespace"].as_str()?,
                row["name"].as_str()?
            ))
        })
        .collect();
    let mut expected: Vec<_> = (0..SERVICES).map(name).collect();
    expected.sort_unstable();
    ensure!(names == expected, "{names:?}");
    agent.stop()
}

/// Returns a name in one of seven namespaces, so that names and numbers differ in order.
fn name(nth: usize) -> String {
    format!("ns{}/web-{nth}", nth % 7)
}

fn services() -> Result<String> {
    let mut text = String::new();
    for nth in 0..SERVICES {
        let full = name(nth);
        let ip = format!("10.96.{}.{}", 1 + nth / 250, 1 + nth % 250);
        let (namespace, name) = full.split_once('/').context("a namespace")?;
        write!(
            text,
            "---\napiVersion: v1\nkind: Service\nmetadata: {{ name: {name}, namespace: {namespace} }}\n\
             spec: {{ clusterIP: {ip}, clusterIPs: [{ip}], ipFamilies: [IPv4], ports: [{{ port: 80 }}] }}\n"
        )?;
    }
    Ok(text)
}
