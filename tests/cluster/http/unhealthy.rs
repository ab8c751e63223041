//! Desired state that cannot be programmed.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, Map, MapData};
use proxy_common::addr::{Addr4, Port, Proto};
use proxy_common::frontend::{FrontendKey, Service};
use serde_json::Value;
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::exposition::Exposition;
use testbed::http::HEALTH;

use crate::http::fixture::{Fixture, service};

#[test]
fn a_family_whose_map_is_full_makes_the_node_unhealthy_until_there_is_room() -> Result<()> {
    let cluster = Fixture::start("full")?;
    let kpx = cluster.healthy_kpx(&format!(
        "--iptables-sync-period 100ms --service-table-size {ROOM}"
    ))?;
    cluster.api.apply(&service("first", 10, false))?;
    wait_until(DEADLINE, "the first Service is served", || {
        Ok(kpx.typed_status()?.tables["IPv4"].services == 1)
    })?;

    let mut services = services(&kpx)?;
    fill(&mut services)?;
    cluster.api.apply(&service("second", 11, false))?;
    wait_until(DEADLINE, "/livez answers 503", || {
        // kpx removes the filler when it retries.
        fill(&mut services)?;
        Ok(cluster.get(HEALTH, "/livez")?.code == 503)
    })?;
    let body: Value = serde_json::from_str(&cluster.get(HEALTH, "/healthz")?.body)?;
    // kpx may have recovered by now; recovery takes at least a second.
    if body["healthy"] == false {
        ensure!(
            body["status"]["IPv4"]["healthy"] == false && body["status"]["IPv6"]["healthy"] == true,
            "{body}"
        );
        ensure!(body["nodeEligible"] == true, "{body}");
        ensure!(
            body["lastUpdated"] == body["status"]["IPv6"]["lastUpdated"],
            "{body}"
        );
    }
    wait_until(DEADLINE, "a failure is counted", || {
        Ok(value(&cluster.scrape()?, "kpx_sync_failures_total", "IPv4")? >= 1.0)
    })?;
    let metrics = cluster.scrape()?;
    ensure!(
        value(&metrics, "kpx_sync_failures_total", "IPv6")? == 0.0,
        "the other family had room"
    );

    wait_until(DEADLINE, "/livez answers 200", || {
        Ok(cluster.get(HEALTH, "/livez")?.code == 200)
    })?;
    wait_until(DEADLINE, "the second Service is served", || {
        let status = kpx.typed_status()?;
        Ok(status.tables["IPv4"].services == 2 && status.problems.is_empty())
    })?;
    let metrics = cluster.scrape()?;
    let [queued, synced] = ["last_queued_timestamp", "last_timestamp"].map(|name| {
        value(
            &metrics,
            &format!("kubeproxy_sync_proxy_rules_{name}_seconds"),
            "IPv4",
        )
    });
    ensure!(synced? >= queued?, "the last sync was successful");
    kpx.stop()
}

/// The number of service ports that kpx has room for.
const ROOM: u32 = 1_000;

type Services = HashMap<MapData, FrontendKey<Addr4>, Service>;

fn services(kpx: &Agent<'_>) -> Result<Services> {
    let id = *kpx
        .typed_status()?
        .maps
        .get("SERVICES4")
        .context("no map SERVICES4")?;
    Ok(Map::from_map_data(MapData::from_id(id)?)?.try_into()?)
}

/// Fills the map to the last entry with service ports that belong to no Service.
fn fill(services: &mut Services) -> Result<()> {
    for nth in 0..2 * ROOM {
        let addr = Ipv4Addr::from(u32::from(Ipv4Addr::new(203, 0, 0, 0)) + nth);
        let key = FrontendKey::new(Addr4::from(addr), Port::new(1), Proto::TCP);
        if services.insert(key, Service::new(0, 0, 0), 0).is_err() {
            return Ok(());
        }
    }
    anyhow::bail!("SERVICES4 has room for more than {ROOM}")
}

fn value(metrics: &Exposition, name: &str, family: &str) -> Result<f64> {
    let samples = &metrics
        .get(name)
        .with_context(|| format!("no {name}"))?
        .samples;
    let of_family = samples.iter().find(|sample| {
        sample
            .labels
            .get("ip_family")
            .is_some_and(|is| is == family)
    });
    Ok(of_family
        .with_context(|| format!("no {name} of {family}"))?
        .value)
}
