//! kpx with the least privileges: three capabilities, no privilege escalation, a read-only root
//! file system, and a container runtime's default seccomp profile.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::SeccompProfile;
use proxy_agent::privileges::NEEDED;

use crate::deploy::cluster::Cluster;
use crate::deploy::own::{container, overlay};
use testbed::pod::Running;

#[test]
fn a_node_is_served_by_either_way_to_attach() -> Result<()> {
    is_served_confined(&["p1a", "n1"], &[&["--attach=tcx"], &["--attach=clsact"]])
}

#[test]
fn a_host_outside_is_served_by_either_way_to_attach() -> Result<()> {
    is_served_confined(
        &["n1"],
        &[
            &["--mode=host", "--attach=tcx"],
            &["--mode=host", "--attach=clsact"],
        ],
    )
}

/// kpx itself drops root's unneeded capabilities.
#[test]
fn kpx_gives_up_unneeded_capabilities() -> Result<()> {
    let cluster = Cluster::start()?;
    let objects = overlay("kind")?;
    let config = objects.config_map.context("a ConfigMap")?;
    let mut set = objects.daemon_set.context("a DaemonSet")?;
    let security = container(&mut set)?
        .security_context
        .as_mut()
        .context("a security context")?;
    security.privileged = Some(true);
    security.capabilities = None;
    let kpx = Running::ready(
        &cluster.lab,
        &cluster.lab.n1,
        &set,
        &cluster.supplies(&[&config]),
    )?;
    has_what_is_needed(&kpx)?;
    cluster.serves("n1").with_context(|| kpx.log())?;
    kpx.stop()
}

fn is_served_confined(clients: &[&str], ways: &[&[&str]]) -> Result<()> {
    let cluster = Cluster::start()?;
    let objects = overlay("kind")?;
    let config = objects.config_map.context("a ConfigMap")?;
    let set = confined(objects.daemon_set.context("a DaemonSet")?)?;
    for args in ways {
        let mut set = set.clone();
        container(&mut set)?
            .args
            .get_or_insert_default()
            .extend(args.iter().map(|&arg| arg.to_owned()));
        let kpx = Running::ready(
            &cluster.lab,
            &cluster.lab.n1,
            &set,
            &cluster.supplies(&[&config]),
        )?;
        has_what_is_needed(&kpx).with_context(|| format!("{args:?}"))?;
        ensure!(
            kpx.process("Seccomp")? == "2",
            "no filter of system calls: {}",
            kpx.process("Seccomp")?
        );
        cluster
            .is_served(clients)
            .with_context(|| format!("{args:?}\n{}", kpx.log()))?;
        kpx.stop()?;
        if args.contains(&"--mode=host") {
            cluster.serves_no_more("n1")?;
        } else {
            cluster.is_served(clients).context("its programs stay")?;
        }
    }
    Ok(())
}

/// Removes the one optional capability, and applies the runtime's seccomp profile.
fn confined(mut set: DaemonSet) -> Result<DaemonSet> {
    let security = container(&mut set)?
        .security_context
        .as_mut()
        .context("a security context")?;
    let capabilities = security
        .capabilities
        .as_mut()
        .and_then(|capabilities| capabilities.add.as_mut());
    *capabilities.context("added capabilities")? = NEEDED
        .iter()
        .map(|need| need.capability.to_string().replace("CAP_", ""))
        .collect();
    ensure!(
        security.read_only_root_filesystem == Some(true)
            && security.allow_privilege_escalation == Some(false)
    );
    security.seccomp_profile = Some(SeccompProfile {
        type_: "RuntimeDefault".to_owned(),
        ..SeccompProfile::default()
    });
    Ok(set)
}

fn has_what_is_needed(kpx: &Running<'_>) -> Result<()> {
    let needed = NEEDED
        .iter()
        .fold(0, |mask, need| mask | need.capability.bitmask());
    for (key, expected) in [
        ("CapEff", needed),
        ("CapPrm", needed),
        ("CapBnd", needed),
        ("CapInh", 0),
        ("CapAmb", 0),
    ] {
        let mask = u64::from_str_radix(&kpx.process(key)?, 16)?;
        ensure!(mask == expected, "{key} is {mask:x}, not {expected:x}");
    }
    ensure!(kpx.process("NoNewPrivs")? == "1", "it may gain privileges");
    Ok(())
}
