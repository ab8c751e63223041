//! The systemd unit: systemd accepts it, and its capabilities suffice.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testbed::agent::{DEADLINE, Service, Source, binary, wait_until};
use testbed::lab::{Family, Layout};

use crate::host::fixture::{Fixture, PORT, is_as_before, state};

const UNIT: &str = include_str!("../../../deploy/systemd/kpx.service");

#[test]
fn systemd_takes_the_unit() -> Result<()> {
    let dir = tempfile::TempDir::with_prefix("kpx-")?;
    let unit = dir.path().join("kpx.service");
    // systemd-analyze checks that the program exists.
    let text = UNIT.replace(
        "/usr/bin/kpx",
        binary()?.to_str().context("a path in UTF-8")?,
    );
    fs::write(&unit, text)?;
    let output = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .arg(&unit)
        .output();
    let output = output.context("run systemd-analyze, of the package systemd")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        output.status.success() && !said.contains("kpx.service"),
        "{}: {said}",
        output.status
    );
    Ok(())
}

/// kpx does all of its work on a host with the unit's capabilities and the example configuration.
#[test]
fn capabilities_of_the_unit_suffice() -> Result<()> {
    let fixture = Fixture::start(Layout::Routed)?;
    let c = &fixture.lab.xl;
    let web =
        Service::new("web", 10, &["p1b", "p2a"], PORT).external_ips(testbed::lab::EXTERNAL.host(7));
    fixture.put(&web)?;
    let before = state(c)?;
    let dir = fixture.lab.dir();
    let log = fixture.lab.dir().join("unit.log");
    let config = configuration(dir, &c.ns.bpf_dir(), fixture.cluster.source())?;
    let granted: Vec<String> = line("CapabilityBoundingSet=")?
        .split(' ')
        .map(|cap| format!("+{}", cap.replace("CAP_", "").to_lowercase()))
        .collect();
    let mut command = Command::new("setpriv");
    command
        .arg("--bounding-set")
        .arg(format!("-all,{}", granted.join(",")))
        .arg("--no-new-privs")
        .arg(binary()?);
    command
        .arg("run")
        .arg("--config")
        .arg(config)
        .stdout(Stdio::null())
        .stderr(File::create(&log)?);
    let mut child = c.ns.spawn(&mut command)?;
    let served = fixture.served_seeing(
        c,
        |family| web.frontend(family),
        &["p1b", "p2a"],
        Some(c.addrs),
    );
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM)?;
    let mut ended = None;
    wait_until(DEADLINE, "kpx ends", || {
        ended = child.try_wait()?;
        Ok(ended.is_some())
    })?;
    let log = fs::read_to_string(log)?;
    served.with_context(|| log.clone())?;
    ensure!(
        ended.is_some_and(|status| status.success()),
        "{ended:?}: {log}"
    );
    ensure!(!log.contains("problem"), "{log}");
    is_as_before(c, &before)
}

/// Returns `host.yaml` with the fixture's kubeconfig, and routes through nodes.
fn configuration(dir: &Path, bpf_dir: &Path, source: Source<'_>) -> Result<std::path::PathBuf> {
    let Source::Kubeconfig(kubeconfig) = source else {
        unreachable!("the fixture has an API server")
    };
    let text = include_str!("../../../deploy/systemd/host.yaml");
    let ours = text.replace(
        "/etc/kpx/kubeconfig",
        kubeconfig.to_str().context("a path in UTF-8")?,
    );
    let ours = ours.replace("podRoutes: off", "podRoutes: nodes");
    let cidrs = Family::ALL.map(|family| testbed::lab::SERVICE_CIDR.cidr(family));
    let run_dir = dir.join("unit-run");
    let file = dir.join("unit.yaml");
    fs::write(
        &file,
        format!(
            "{ours}serviceCIDRs: {cidrs:?}\nrunDir: {}\nbpfDir: {}\n",
            run_dir.display(),
            bpf_dir.display()
        ),
    )?;
    Ok(file)
}

fn line(key: &str) -> Result<&'static str> {
    UNIT.lines()
        .find_map(|line| line.strip_prefix(key))
        .with_context(|| format!("no {key} in the unit"))
}
