//! The permissions of a host outside the cluster.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use k8s_openapi::api::rbac::v1::ClusterRole;
use serde_json::Value;
use testbed::agent::{DEADLINE, Service, Source, kpx as kpx_in, wait_until};
use testbed::echo::Protocol;
use testbed::lab::Layout;
use testbed::rights::granted;

use crate::host::fixture::{Fixture, PORT};

const ROLE: &str = include_str!("../../../deploy/kubernetes/host/cluster-role.yaml");
const OF_TUNNEL: &str = include_str!("../../../deploy/kubernetes/host/cluster-role-tunnel.yaml");

#[test]
fn kpx_asks_for_what_the_roles_grant_and_the_check_misses_it() -> Result<()> {
    let fixture = Fixture::start(Layout::Vxlan)?;
    let c = &fixture.lab.x;
    let api = fixture.cluster.api_server()?;
    let web = Service::new("web", 10, &["p1b"], PORT);
    fixture.put(&web)?;
    fixture.cluster.reach(&fixture.lab, &["p1b"])?;
    let role_of = serde_saphyr::from_str::<ClusterRole>;
    let role = role_of(ROLE)?;
    let of_tunnel = role_of(OF_TUNNEL)?;
    let kpx = fixture.outside(c, &[])?;
    fixture.refused(c, |family| web.frontend(family))?;
    // Watches begin after their lists, each at its own time.
    let is_all = |rights: &BTreeSet<(&str, &str, &str)>| {
        let traffic = api.traffic();
        let asked: Vec<(&str, &str, &str)> = traffic.kinds().collect();
        Ok(asked.iter().eq(rights))
    };
    let of_host = granted(&role);
    wait_until(DEADLINE, "kpx asks for all that the role grants", || {
        is_all(&of_host)
    })?;
    kpx.stop()?;
    let kpx = fixture.outside(c, &["--tunnel", "tcp"])?;
    fixture.served_over(
        &[Protocol::Tcp],
        c,
        |family| web.frontend(family),
        &["p1b"],
        None,
    )?;
    let both = &granted(&role) | &granted(&of_tunnel);
    wait_until(DEADLINE, "kpx asks for all that both roles grant", || {
        is_all(&both)
    })?;

    let Source::Kubeconfig(kubeconfig) = fixture.cluster.source() else {
        unreachable!("an API server")
    };
    let level = |what: &str, tunnel: &str| -> Result<Value> {
        let check = format!(
            "check --mode host -o json --tunnel {tunnel} --kubeconfig {}",
            kubeconfig.display()
        );
        let report: Value = serde_json::from_slice(&kpx_in(&c.ns, &check)?.stdout)?;
        let mut findings = report["findings"].as_array().into_iter().flatten();
        Ok(findings
            .find(|finding| finding["what"] == what)
            .map_or(Value::Null, |finding| finding["level"].clone()))
    };
    ensure!(
        level("tunnel", "off")?.is_null()
            && level("tunnel", "tcp")? == "ok"
            && level("rights", "off")? == "ok"
    );
    for (verb, resource, what) in [
        ("get", "pods/portforward", "tunnel"),
        ("watch", "services", "rights"),
        ("list", "endpointslices", "rights"),
    ] {
        api.fail(verb, resource, 403);
        ensure!(
            level(what, "tcp")? == "fail",
            "without {verb} of {resource}"
        );
    }
    kpx.stop()
}
