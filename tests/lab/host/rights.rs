//! The rights of a host outside of the cluster.

use anyhow::{Result, ensure};
use k8s_openapi::api::rbac::v1::ClusterRole;
use serde_json::Value;
use testbed::agent::{Service, Source, kpx as kpx_in};
use testbed::echo::Protocol;
use testbed::lab::Layout;
use testbed::rights::granted;

use crate::host::fixture::{Fixture, PORT};

const ROLE: &str = include_str!("../../../deploy/kubernetes/host/cluster-role.yaml");
const OF_TUNNEL: &str = include_str!("../../../deploy/kubernetes/host/cluster-role-tunnel.yaml");

#[test]
fn kpx_asks_for_what_the_roles_grant_and_the_check_misses_it() -> Result<()> {
    let fixture = Fixture::start(Layout::Vxlan)?;
    let (c, api) = (&fixture.lab.x, fixture.cluster.api_server()?);
    let web = Service::new("web", 10, &["p1b"], PORT);
    fixture.put(&web)?;
    fixture.cluster.reach(&fixture.lab, &["p1b"])?;
    let role_of = serde_saphyr::from_str::<ClusterRole>;
    let (role, of_tunnel) = (role_of(ROLE)?, role_of(OF_TUNNEL)?);
    let kpx = fixture.outside(c, &[])?;
    fixture.refused(c, |family| web.frontend(family))?;
    ensure!(api.traffic().kinds().collect::<Vec<_>>() == Vec::from_iter(granted(&role)), "{:?}", api.traffic());
    kpx.stop()?;
    let kpx = fixture.outside(c, &["--tunnel", "tcp"])?;
    fixture.served_over(&[Protocol::Tcp], c, |family| web.frontend(family), &["p1b"], None)?;
    let both = &granted(&role) | &granted(&of_tunnel);
    ensure!(api.traffic().kinds().collect::<Vec<_>>() == Vec::from_iter(both), "{:?}", api.traffic());

    let Source::Kubeconfig(kubeconfig) = fixture.cluster.source() else { unreachable!("an API server") };
    let level = |what: &str, tunnel: &str| -> Result<Value> {
        let check = format!("check --mode host -o json --tunnel {tunnel} --kubeconfig {}", kubeconfig.display());
        let report: Value = serde_json::from_slice(&kpx_in(&c.ns, &check)?.stdout)?;
        let mut findings = report["findings"].as_array().into_iter().flatten();
        Ok(findings.find(|finding| finding["what"] == what).map_or(Value::Null, |finding| finding["level"].clone()))
    };
    ensure!(level("tunnel", "off")?.is_null() && level("tunnel", "tcp")? == "ok" && level("rights", "off")? == "ok");
    for (verb, resource, what) in [("create", "pods/portforward", "tunnel"), ("list", "endpointslices", "rights")] {
        api.fail(verb, resource, 403);
        ensure!(level(what, "tcp")? == "fail", "without {verb} of {resource}");
    }
    kpx.stop()
}
