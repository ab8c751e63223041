//! The agent's tables in the kernel's maps: what is written is what is read, and what is deleted is gone.

use anyhow::{Context, Result, ensure};
use kpx_tests::kernel_tables;
use nix::unistd::Pid;
use proxy_agent::datapath::{Datapath, Maps, Options};
use proxy_agent::desired::Desired;
use proxy_agent::diff::{Change, FamilyChange, diff};
use proxy_agent::input::{Input, Update};
use proxy_agent::object;
use proxy_agent::tables::Tables;
use serde_json::{Value, from_value, json};

#[test]
fn tables_become_maps_and_are_read_back() -> Result<()> {
    let mut maps = Datapath::load(object::embedded()?, Options::default())?.tables;
    let states = [
        Tables::default(),
        tables("maglev", &["198.51.100.0/24", "0.0.0.0/0", "2001:db8:1::/48"], 3)?,
        tables("random", &["198.51.100.0/28", "2001:db8::/32"], 2)?,
        Tables::default(),
    ];
    let full = &states[1].v4;
    ensure!([full.endpoints.len(), full.maglev.len(), full.source_ranges.len()] == [3, 2, 2], "{}", states[1]);
    let mut deleted = 0;
    for step in states.windows(2) {
        let [now, want] = step else { continue };
        for change in diff(now, want) {
            maps.apply(&change)?;
            deleted += u32::from(matches!(
                change,
                Change::V4(FamilyChange::DelEndpoint(_)) | Change::V6(FamilyChange::DelEndpoint(_))
            ));
        }
        let read = maps.read()?;
        ensure!(read == *want, "wanted\n{want}\nand read\n{read}");
        ensure!(kernel_tables::of(Pid::this())? == *want, "read from outside");
        let generation = kernel_tables::generation(Pid::this())?;
        ensure!(generation == deleted, "generation {generation} after {deleted} deletions of endpoints");
    }
    ensure!(deleted > 0);
    // What is gone already is as wanted.
    for change in diff(&states[1], &Tables::default()) {
        maps.apply(&change)?;
    }
    Ok(())
}

/// A Service of both families with a row in every map, and `backends`.
fn tables(algorithm: &str, ranges: &[&str], backends: u8) -> Result<Tables> {
    let service = json!({
        "metadata": { "namespace": "default", "name": "web", "annotations": { "kpx.dev/lb-algorithm": algorithm } },
        "spec": {
            "type": "LoadBalancer", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "fd00:96::1"],
            "ipFamilies": ["IPv4", "IPv6"], "externalTrafficPolicy": "Local", "healthCheckNodePort": 32_000,
            "sessionAffinity": "ClientIP", "externalIPs": ["192.0.2.1"], "loadBalancerSourceRanges": ranges,
            "ports": [{ "port": 53, "protocol": "UDP", "nodePort": 30_053 }],
        },
        "status": { "loadBalancer": { "ingress": [{ "ip": "203.0.113.1" }, { "ip": "2001:db8::1" }] } },
    });
    let slice = |family: &str, prefix: &str| {
        let endpoint = |host: u8| json!({ "addresses": [format!("{prefix}{host}")], "nodeName": "here" });
        json!({
            "metadata": {
                "namespace": "default", "name": format!("web-{family}"),
                "labels": { "kubernetes.io/service-name": "web" },
            },
            "addressType": family, "ports": [{ "name": "", "port": 53, "protocol": "UDP" }],
            "endpoints": (1..=backends).map(endpoint).collect::<Vec<Value>>(),
        })
    };
    let mut desired = Desired::new("here");
    desired.apply(Input::Service(Update::All(vec![from_value(service)?])));
    let slices = [slice("IPv4", "10.244.0."), slice("IPv6", "fd00:244::")];
    let slices = slices.into_iter().map(from_value).collect::<Result<_, _>>().context("slices")?;
    desired.apply(Input::EndpointSlice(Update::All(slices)));
    desired.apply(Input::Node(Update::All(Vec::new())));
    desired.apply(Input::ServiceCidr(Update::All(Vec::new())));
    let skipped = desired.sync().skipped;
    ensure!(skipped.is_empty(), "{skipped:?}");
    Ok(desired.tables().clone())
}
