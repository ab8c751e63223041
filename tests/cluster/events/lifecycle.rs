//! The Node object: kpx waits for it, and exits when it changes. `node_object` has the service
//! without it.

use anyhow::{Result, ensure};
use serde_json::json;
use testbed::agent::DEADLINE;
use testbed::watched_node::node;

use crate::events::fixture::{Fixture, fails, service, wait_problem};

/// The name of the problem in the status.
const NODE_OBJECT: &str = "Node object";

#[test]
fn kpx_serves_nothing_before_the_node_has_addresses() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.put(&service("web", 10))?;
    let kpx = fixture.start("")?;
    wait_problem(&kpx, NODE_OBJECT, "no Node is named n1 yet")?;
    fixture.put(&node(&[]))?;
    wait_problem(&kpx, NODE_OBJECT, "n1 has no addresses yet")?;
    let status = kpx.typed_status()?;
    ensure!(!status.healthy && status.syncs == 0, "{status:?}");
    ensure!(
        fixture.events().is_empty(),
        "reported too early: {:?}",
        fixture.events()
    );
    fixture.put(&node(&["192.0.2.1"]))?;
    kpx.wait(DEADLINE, "all is well", |status| {
        status.healthy && status.tables["IPv4"].service_ports == 1
    })?;
    kpx.stop()
}

#[test]
fn pod_cidrs_that_do_not_come_are_given_up() -> Result<()> {
    let fixture = Fixture::with_node()?;
    let kpx = fixture.spawn("--node-timeout 1s --detect-local-mode NodeCIDR")?;
    fails(
        kpx,
        "gave up after 1s: local pods: the Node object has no podCIDRs yet",
    )
}

#[test]
fn a_deleted_node_ends_kpx() -> Result<()> {
    let fixture = Fixture::with_node()?;
    let kpx = fixture.start_healthy("")?;
    fixture.api.delete("Node", "", "n1")?;
    fails(kpx, "the Node object n1 was deleted")?;
    let event = fixture.reported("NodeChanged", |_| true)?;
    assert_eq!(event["note"], "the Node object n1 was deleted");
    Ok(())
}

#[test]
fn new_addresses_end_kpx_unless_they_do_not_matter() -> Result<()> {
    let fixture = Fixture::with_node()?;
    let kpx = fixture.start_healthy("")?;
    fixture.put(&node(&["192.0.2.99", "fd00::1"]))?;
    fails(
        kpx,
        "the addresses of the Node object n1 have changed from [192.0.2.1, fd00::1] to [192.0.2.99, fd00::1]",
    )?;

    let kpx = fixture.start_healthy("--node-ip 192.0.2.1,fd00::1")?;
    fixture.put(&node(&["192.0.2.1", "fd00::99"]))?;
    // A later change shows that kpx has seen the earlier one.
    let mut labelled = node(&["192.0.2.2", "fd00::2"]);
    labelled["metadata"]["labels"] = json!({ "a": "b" });
    fixture.put(&labelled)?;
    fixture.put(&service("web", 10))?;
    kpx.wait(DEADLINE, "a service after it is served", |status| {
        status.tables["IPv4"].service_ports == 1
    })?;
    fixture.api.delete("Node", "", "n1")?;
    fails(kpx, "the Node object n1 was deleted")
}

#[test]
fn server_without_nodes_is_only_a_problem() -> Result<()> {
    for code in [403, 404] {
        let fixture = Fixture::new()?;
        fixture.api.fail("list", "nodes", code);
        fixture.put(&service("web", 10))?;
        let kpx = fixture.start_healthy("--node-timeout 1s")?;
        wait_problem(&kpx, NODE_OBJECT, "serves no Nodes, or not to kpx")?;
        kpx.wait(DEADLINE, "served all the same", |status| {
            status.tables["IPv4"].service_ports == 1
        })?;
        kpx.stop()?;
    }
    Ok(())
}
