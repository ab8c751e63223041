//! A thousand pods come and go, one namespace at a time.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result};
use proxy_common::device::Device;
use testbed::agent::{Agent, wait_until};
use testbed::lab::Family;
use testbed::netns::NetNs;

use crate::churn::fixture::{Fixture, PROMPT, Running, is_hooked};

const ROUNDS: usize = 4;
const PODS: usize = 250;

#[test]
fn a_thousand_pods_leave_nothing_behind() -> Result<()> {
    let fixture = Fixture::new()?;
    let kpx = fixture.kpx("tcx")?;
    let mut kept = [
        fixture.connect("p1a", Family::V4)?,
        fixture.connect("n1", Family::V6)?,
    ];
    let pods = || -> Result<usize> {
        let devices = fixture
            .devices()?
            .iter()
            .collect::<Result<Vec<(u32, Device)>, _>>()?;
        Ok(devices.iter().filter(|(_, device)| device.is_pod()).count())
    };
    wait_until(PROMPT, "the lab's pods are known", || Ok(pods()? == 3))?;
    let before = held(&kpx, &fixture)?;
    for round in 0..ROUNDS {
        let ns = NetNs::create(format!("{}-pods{round}", fixture.node().name()))?;
        let mut lines = String::new();
        for pod in 0..PODS {
            let name = format!("veth{round}x{pod}");
            writeln!(
                lines,
                "link add {name} type veth peer name eth{pod} netns {}\nlink set {name} up",
                ns.name()
            )?;
        }
        fixture.node().ip(&lines)?;
        wait_until(PROMPT, "all pods are known", || Ok(pods()? == 3 + PODS))?;
        let last = format!("veth{round}x{}", PODS - 1);
        wait_until(PROMPT, "the last has its programs", || {
            is_hooked(fixture.node(), "tcx", &last)
        })?;
        for connection in &mut kept {
            connection
                .exchange(b"while pods come")
                .context("while pods come")?;
        }
        drop(ns); // All devices go with their namespace.
        wait_until(PROMPT, "all pods are forgotten", || Ok(pods()? == 3))?;
        for connection in &mut kept {
            connection
                .exchange(b"while pods go")
                .context("while pods go")?;
        }
    }
    until_held(before, &kpx, &fixture)?;
    kpx.stop()
}

/// Pods that fail at once: their devices are renamed and removed while kpx attaches programs.
pub(super) fn namespaces_may_go_while_programs_are_attached(running: &Running) -> Result<()> {
    let Running { fixture, kpx, .. } = running;
    let mut kept = [
        fixture.connect("p1a", Family::V4)?,
        fixture.connect("n1", Family::V6)?,
    ];
    let before = held(kpx, fixture)?;
    for round in 0..2 {
        let ns = NetNs::create(format!("{}-short{round}", fixture.node().name()))?;
        let mut lines = String::new();
        for pod in 0..60 {
            writeln!(
                lines,
                "link add tmp type veth peer name eth{pod} netns {}\nlink set tmp up",
                ns.name()
            )?;
            writeln!(lines, "link set tmp name short{round}x{pod}")?;
        }
        fixture.node().ip(&lines)?;
        drop(ns);
        for connection in &mut kept {
            connection
                .exchange(b"while pods fail")
                .context("while pods fail")?;
        }
    }
    until_held(before, kpx, fixture)?;
    kpx.wait(PROMPT, "nothing is wrong", |status| {
        status.healthy && status.problems.is_empty()
    })?;
    fixture.all_served(&["p1a", "n1", "x"])
}

/// Returns the numbers of links and of link pins.
pub(super) fn held(kpx: &Agent, fixture: &Fixture) -> Result<(usize, usize)> {
    let mut links = 0;
    for file in fs::read_dir(format!("/proc/{}/fdinfo", kpx.pid()))? {
        let text = fs::read_to_string(file?.path()).unwrap_or_default();
        links += usize::from(text.contains("link_type:"));
    }
    let pins = fs::read_dir(fixture.node().bpf_dir().join("v2/links"))?.count();
    Ok((links, pins))
}

/// Waits until these are the numbers of links and of link pins.
pub(super) fn until_held(before: (usize, usize), kpx: &Agent, fixture: &Fixture) -> Result<()> {
    wait_until(PROMPT, "nothing is left", || {
        Ok(held(kpx, fixture)? == before)
    })
    .with_context(|| format!("before {before:?}, now {:?}", held(kpx, fixture)))
}
