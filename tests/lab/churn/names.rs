//! Devices that change names, swap names or go at any moment.

use anyhow::{Context, Result, ensure};
use testbed::agent::wait_until;
use testbed::http::get_at_socket;
use testbed::lab::Family;
use testbed::netns::NetNs;

use crate::churn::fixture::{PROMPT, Running, is_hooked};
use crate::churn::pods::{held, until_held};

pub(super) fn device_names_may_move_between_devices(running: &Running) -> Result<()> {
    let Running { fixture, kpx, .. } = running;
    let before = held(kpx, fixture)?;
    let mut kept = fixture.connect("p1a", Family::V4)?;
    // The devices of two pods swap their names.
    for _ in 0..5 {
        fixture
            .node()
            .ip("link set p1a name swap\nlink set p1c name p1a\nlink set swap name p1c")?;
        kept.exchange(b"under another name")?;
    }
    fixture
        .node()
        .ip("link set p1a name swap\nlink set p1c name p1a\nlink set swap name p1c")?;
    fixture
        .all_served(&["p1a", "p1c", "n1"])
        .context("all are served under their own names again")?;

    // CNI plugins create a device and rename it at once, while the next plugin takes the first
    // name.
    let pods = NetNs::create(format!("{}-names", fixture.node().name()))?;
    let lines: Vec<String> = (0..40)
        .map(|n| {
            format!(
                "link add tmp type veth peer name eth{n} netns {}\nlink set tmp name veth{n}\nlink set veth{n} up",
                pods.name()
            )
        })
        .collect();
    fixture.node().ip(&lines.join("\n"))?;
    for n in 0..40 {
        let device = format!("veth{n}");
        wait_until(PROMPT, "each has its programs, once", || {
            is_hooked(fixture.node(), "tcx", &device)
        })
        .context(device)?;
    }
    let status = kpx.status()?;
    ensure!(
        status["problems"].as_array().is_some_and(Vec::is_empty),
        "{status}"
    );
    kept.exchange(b"after all that")?;
    drop(pods); // All devices go with their namespace.
    until_held(before, kpx, fixture)
}

pub(super) fn devices_that_are_gone_again_are_no_problem(running: &Running) -> Result<()> {
    let Running { fixture, kpx, .. } = running;
    let before = held(kpx, fixture)?;
    let lines: Vec<String> = (0..100)
        .map(|n| format!("link add gone{n} type veth peer name peer{n}\nlink set gone{n} up\nlink del gone{n}"))
        .collect();
    fixture.node().ip(&lines.join("\n"))?;
    // Events arrive in order, so this device's event is the last.
    fixture
        .node()
        .ip("link add last type veth peer name peer\nlink set last up")?;
    wait_until(PROMPT, "the last device has its programs", || {
        is_hooked(fixture.node(), "tcx", "last")
    })?;
    let events = get_at_socket(&proxy_view::socket(kpx.run_dir()), "/events")?.body;
    ensure!(
        !events.contains("device gone") && !events.contains("device peer"),
        "{events}"
    );
    fixture.node().ip("link del last")?;
    until_held(before, kpx, fixture)
}
