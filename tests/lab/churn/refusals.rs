//! Foreign chains that drop packets by default: kube-proxy's mode iptables adds an accepting rule
//! there, and kpx reports its absence.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::agent::{DEADLINE, Service, kpx, wait_until};
use testbed::lab::{CLUSTER_PODS, EXTERNAL, Family};

use super::fixture::{Fixture, PORT, TRY};

#[test]
fn chains_that_refuse_clients_outside_are_named_with_a_remedy_that_works() -> Result<()> {
    let fixture = Fixture::new()?;
    let node = fixture.node();
    let pods = Family::ALL
        .map(|family| CLUSTER_PODS.cidr(family))
        .join(",");
    let load_balanced = Service::new("lb", 11, &["p1b"], PORT)
        .load_balancer(EXTERNAL.host(9), "VIP")
        .external_local();
    fixture
        .base
        .put(&load_balanced.health_check_node_port(30_512))?;
    let agent = fixture
        .base
        .kpx(&["--cluster-cidr", &pods, "--iptables-sync-period", "1s"])?;
    let note = || -> Result<String> {
        let notes = agent.typed_status()?.notices;
        Ok(notes
            .into_iter()
            .find(|note| note.starts_with("clients outside "))
            .unwrap_or_default())
    };
    let check = |what: &str| -> Result<(String, String)> {
        let output = kpx(node, &format!("check --output json --cluster-cidr {pods}"))?;
        let report: Value = serde_json::from_slice(&output.stdout).context("kpx check")?;
        let findings = report["findings"].as_array().context("no findings")?;
        let finding = findings
            .iter()
            .find(|finding| finding["what"] == what)
            .with_context(|| what.to_owned())?;
        Ok((finding["found"].to_string(), finding["fix"].to_string()))
    };
    for (family, tool) in [(Family::V4, "iptables"), (Family::V6, "ip6tables")] {
        for variant in ["nft", "legacy"] {
            let tool = format!("{tool}-{variant}");
            let run = |words: &str| node.exec(Command::new("sh").args(["-c", words]));
            ensure!(
                fixture.ask("x", family).is_ok() && note()?.is_empty(),
                "{tool}: before"
            );
            run(&format!("{tool} -P FORWARD DROP"))?;
            let is_served = || {
                fixture
                    .dial("x", family)
                    .deadline(TRY)
                    .exchange(&fixture.lab.host("x").ns, b"hello")
                    .is_ok()
            };
            ensure!(!is_served(), "{tool}: the policy is of no effect");
            wait_until(DEADLINE, "the chain is named", || {
                Ok(note()?.contains("chain FORWARD of table "))
            })?;
            let note_before = note()?;
            let (found, fix) = check("forwarding")?;
            let (_, remedy) = note_before
                .split_once("; accept pods: ")
                .context("no remedy")?;
            ensure!(
                found.contains("are refused") && found.contains("chain FORWARD of table "),
                "{tool}: {found}"
            );
            ensure!(fix.contains(remedy), "{tool}: {fix}, {remedy}");
            run(remedy)?;
            ensure!(is_served(), "{tool}: {remedy}");
            if variant == "nft" {
                wait_until(DEADLINE, "the note is gone", || Ok(note()?.is_empty()))?;
            }
            run(&format!(
                "{tool} -F FORWARD && {tool} -P FORWARD ACCEPT && {tool} -P INPUT DROP"
            ))?;
            let (found, _) = check("health check ports")?;
            ensure!(found.contains("chain INPUT of table "), "{tool}: {found}");
            agent.wait(DEADLINE, "a note about probes", |status| {
                status
                    .notices
                    .iter()
                    .any(|note| note.contains("healthCheckNodePorts: chain INPUT of table "))
            })?;
            run(&format!("{tool} -P INPUT ACCEPT"))?;
            wait_until(DEADLINE, "the note is gone", || Ok(note()?.is_empty()))?;
            let (found, _) = check("health check ports")?;
            ensure!(found.contains("no chain drops"), "{tool}: {found}");
        }
    }
    agent.stop()
}
