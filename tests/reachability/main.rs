//! The reachability of Services: the backend that answers and the source that it sees, with real
//! sockets, in every setting.
//!
//! Both nodes run kpx. The names of the cases are those of the reachability matrix;
//! `docs/reachability.md` lists them.

mod case;
mod document;
mod fixture;
mod results;
mod rows;
mod services;
mod setting;
mod special;
mod table;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::json;
use testbed::agent::{Cluster, DEADLINE, Object, SERVICE_PORT, Service};
use testbed::capture::{Capture, Checksums, Packet};
use testbed::cgroup::PodThread;
use testbed::echo::Servers;
use testbed::lab::{Family, Lab, Layout, PodRoute, TunnelKind, Ways};

use crate::fixture::{Fixture, compat_args, create_services};
use crate::results::Results;
use crate::setting::{Setting, mode};
use crate::table::{ASYMMETRIC, CASES, CASES_OF_FLAGS};

#[test]
fn routed_pods_reach_services() {
    check(Layout::Routed, false, Cluster::with_api_server).unwrap();
}

#[test]
fn point_to_point_pods_reach_services() {
    check(Layout::Ptp, false, Cluster::with_manifests).unwrap();
}

#[test]
fn bridged_pods_reach_services() {
    check(Layout::Bridge, false, Cluster::with_manifests).unwrap();
}

#[test]
fn overlaid_pods_reach_services() {
    check(Layout::Vxlan, false, Cluster::with_api_server).unwrap();
}

#[test]
fn pods_behind_a_tunnel_reach_services() {
    check(
        Layout::Tunnel(TunnelKind::Tun),
        false,
        Cluster::with_manifests,
    )
    .unwrap();
}

#[test]
fn pods_on_macvlan_devices_reach_services() {
    check(Layout::Macvlan, false, Cluster::with_manifests).unwrap();
}

/// Pods under socket load balancing, as pods on a bridge are by default. Hairpins are left out,
/// because nothing masquerades them.
#[test]
fn pods_in_cgroups_reach_services_by_their_sockets() {
    socket_lb().unwrap();
}

fn socket_lb() -> Result<()> {
    const UID: &str = "6ad0a8c5-9fd1-4d0b-8f5e-0a1b2c3d4e5f";
    let lab = Lab::start(Layout::Vxlan)?;
    let servers = Servers::start()?;
    create_services(&lab, &servers)?;
    let cluster = Cluster::with_api_server(&lab)?;
    for object in services::services(&lab)
        .iter()
        .flat_map(|service: &Service| service.objects(&lab))
    {
        cluster.put(&object)?;
    }
    cluster.put_as_is(&Object(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "namespace": "default", "name": "client", "uid": UID },
        "spec": { "nodeName": "n1", "containers": [{ "name": "main" }] },
        "status": { "phase": "Running" },
    })))?;
    let fixture = Fixture::new(&lab, &cluster, &[])?;
    let agent = fixture.agents.first().context("an agent")?;
    let counted = || {
        Ok::<_, anyhow::Error>(
            agent.status()?["events"]["socket_translated"]
                .as_u64()
                .unwrap_or_default(),
        )
    };
    let mut results = Results::default();
    {
        let _pod = PodThread::enter(UID)?;
        agent.wait(DEADLINE, "the pod's sockets are translated", |status| {
            status
                .pods
                .as_ref()
                .is_some_and(|pods| pods.by_sockets == 1)
        })?;
        let plain = Setting::plain(Layout::Vxlan, false);
        for setting in [
            plain,
            Setting {
                firewall: true,
                ..plain
            },
        ] {
            setting.apply(&lab)?;
            let before = counted()?;
            let cases = CASES
                .iter()
                .filter(|case| case.client == "p1a" && !case.is_answered_on_lo());
            rows::run(&lab, &setting, cases, &mut results);
            ensure!(
                counted()? > before,
                "no socket of the pod was translated in {setting}"
            );
        }
    }
    let logs = fixture.logs();
    fixture.stop()?;
    println!("{results}");
    results
        .into_result()
        .with_context(|| format!("logs of kpx:\n{logs}"))
}

#[test]
fn routed_pods_masqueraded_as_kube_proxy_does() {
    check(Layout::Routed, true, Cluster::with_manifests).unwrap();
}

#[test]
fn point_to_point_pods_masqueraded_as_kube_proxy_does() {
    check(Layout::Ptp, true, Cluster::with_api_server).unwrap();
}

#[test]
fn bridged_pods_masqueraded_as_kube_proxy_does() {
    check(Layout::Bridge, true, Cluster::with_api_server).unwrap();
}

#[test]
fn overlaid_pods_masqueraded_as_kube_proxy_does() {
    check(Layout::Vxlan, true, Cluster::with_manifests).unwrap();
}

/// Runs everything in one lab, and fails at the end with all errors.
fn check(layout: Layout, compat: bool, cluster: fn(&Lab) -> Result<Cluster>) -> Result<()> {
    let lab = Lab::start(layout)?;
    let servers = Servers::start()?;
    create_services(&lab, &servers)?;
    let cluster = cluster(&lab)?;
    let services = services::services(&lab);
    for object in services
        .iter()
        .flat_map(|service: &Service| service.objects(&lab))
    {
        cluster.put(&object)?;
    }
    let args = if compat { compat_args() } else { Vec::new() };
    let fixture = Fixture::new(&lab, &cluster, &args)?;

    let mut results = Results::default();
    let plain = Setting::plain(layout, compat);
    // These differ from routed pods only in their devices, so one setting suffices.
    let has_more = !matches!(layout, Layout::Tunnel(_) | Layout::Macvlan);
    if has_more {
        run_settings(&lab, plain, &mut results)?;
    } else {
        run_watched(
            &lab,
            Setting {
                firewall: true,
                ..plain
            },
            Checksums::MayBePending,
            &mut results,
        )?;
    }
    let has_more = has_more && !compat;
    if has_more {
        special::run(&fixture, &mut results);
    }
    let mut logs = fixture.logs();
    if results.has_failures() {
        logs += &fixture.losses();
    }
    fixture.stop()?;
    if layout == Layout::Routed && !compat {
        logs += &run_asymmetric(&lab, &cluster, &mut results)?;
    }
    if has_more {
        logs += &run_flags(&lab, &servers, &cluster, &mut results)?;
    }
    println!("{layout:?} {}\n{results}", mode(compat));
    results
        .into_result()
        .with_context(|| format!("{layout:?} {}; logs of kpx:\n{logs}", mode(compat)))
}

/// Runs everything in the plain and the watched settings, and ClusterIPs in all others: everything
/// forwarded behaves alike.
fn run_settings(lab: &Lab, plain: Setting, results: &mut Results) -> Result<()> {
    for rp_filter in [0, 1, 2] {
        for default_route in [true, false] {
            let setting = Setting {
                rp_filter,
                default_route,
                ..plain
            };
            setting.apply(lab)?;
            let everything = rp_filter == 1 && default_route;
            rows::run(
                lab,
                &setting,
                CASES
                    .iter()
                    .filter(|case| everything || case.is_clusterip()),
                results,
            );
        }
    }
    let overlay = Setting {
        pod_route: PodRoute::Eth1,
        ..plain
    };
    overlay.apply(lab)?;
    rows::run(lab, &overlay, CASES, results);
    run_watched(
        lab,
        Setting {
            firewall: true,
            ..plain
        },
        Checksums::MayBePending,
        results,
    )?;
    run_watched(
        lab,
        Setting {
            firewall: true,
            offload: false,
            ..plain
        },
        Checksums::Complete,
        results,
    )
}

/// Runs cases in which n1's answers leave by another link than the requests came in by.
fn run_asymmetric(lab: &Lab, cluster: &Cluster, results: &mut Results) -> Result<String> {
    let plain = Setting::plain(lab.layout, false);
    let setting = |rp_filter, ways| Setting {
        rp_filter,
        ways,
        ..plain
    };
    let settings =
        [Ways::OutByEth1, Ways::InByEth1].map(|ways| [setting(0, ways), setting(2, ways)]);
    settings[0][0].apply(lab)?; // kpx reads `rp_filter` when it starts.
    let fixture = Fixture::new(lab, cluster, &[])?;
    for setting in settings.as_flattened() {
        setting.apply(lab)?;
        let cases = CASES
            .iter()
            .filter(|case| case.client == "x" && ASYMMETRIC.contains(&case.id));
        rows::run(lab, setting, cases, results);
    }
    plain.apply(lab)?;
    let logs = fixture.logs();
    fixture.stop()?;
    Ok(logs)
}

/// Runs the table with flags that restrict clients and frontends.
fn run_flags(
    lab: &Lab,
    servers: &Servers,
    cluster: &Cluster,
    results: &mut Results,
) -> Result<String> {
    let args = [
        "--nodeport-addresses",
        "172.18.0.0/24,fd00:172:18::/64",
        "--cluster-ip-external=false",
        "--feature-gates=AllowServiceExternalIPs=false",
    ];
    let fixture = Fixture::new(lab, cluster, &args.map(str::to_owned))?;
    let left_out = services::left_out();
    lab.n1.host.add_addrs("eth0", left_out)?;
    for family in Family::ALL {
        let port = services::node_port(services::index("p1b"));
        servers.serve_at(&lab.n1.host, "host", (left_out.ip(family), port).into())?;
        let external = services::external_ip(services::index("here"));
        servers.serve_at(
            &lab.n1.host,
            "host",
            (external.ip(family), SERVICE_PORT).into(),
        )?;
    }
    rows::run(
        lab,
        &Setting::plain(lab.layout, false),
        CASES_OF_FLAGS,
        results,
    );
    let logs = fixture.logs();
    fixture.stop()?;
    Ok(logs)
}

/// Runs the table while all hosts' packets are captured and conntrack is watched.
fn run_watched(
    lab: &Lab,
    setting: Setting,
    checksums: Checksums,
    results: &mut Results,
) -> Result<()> {
    setting.apply(lab)?;
    let hosts = ["p1a", "p1b", "p2a", "p2b", "n1", "n2", "ext", "x"].map(|name| lab.host(name));
    let captures: Vec<_> = hosts
        .into_iter()
        .map(|host| Ok((host, Capture::start(host)?)))
        .collect::<Result<_>>()?;
    rows::run(lab, &setting, CASES, results);
    for (host, capture) in captures {
        let captured = capture.stop(checksums);
        let result = captured.and_then(|packets| {
            if ["p1a", "x"].contains(&host.name) {
                only_frontends(lab, &packets)
            } else {
                Ok(())
            }
        });
        results.add(
            "packets",
            &format!("packets at {}, {setting}", host.name),
            result,
        );
    }
    let invalid = lab.invalid_packets()?;
    let result = if invalid.is_empty() {
        Ok(())
    } else {
        Err(anyhow!("{}", invalid.join(", ")))
    };
    results.add(
        "invalid",
        &format!("connection tracking finds no packet invalid, {setting}"),
        result,
    );
    Ok(())
}

/// Checks that a client that dials only frontends never receives a packet from a backend's own
/// address.
fn only_frontends(lab: &Lab, packets: &[Packet]) -> Result<()> {
    for name in ["p1b", "p2a", "n2", "ext"] {
        for family in Family::ALL {
            let backend = lab.host(name).addrs.ip(family);
            // Frontends and backends have different ports, and n2 is both.
            if let Some(packet) = packets
                .iter()
                .find(|packet| packet.src == (backend, services::PORT).into())
            {
                bail!("a client sees its backend's own address: {packet}");
            }
        }
    }
    Ok(())
}
