//! Short runs of `cargo xtask soak`. They count failures; durations need an idle machine.

use std::time::Duration;

use anyhow::{Context, Result};
use proxy_datapath::object;
use tools::soak::{self, Greed, Place, Room, Scale};

/// New connections per second: a tenth of the long runs' rate, because other tests may be running.
const RATE: u32 = 200;

fn scale(rounds: u32) -> Scale {
    Scale {
        place: Place::Node,
        rate: RATE,
        rounds,
        at_least: Duration::ZERO,
    }
}

/// In kubeadm's DaemonSet for kube-proxy with kpx's image.
fn swapped(rounds: u32) -> Scale {
    Scale {
        place: Place::SwappedPod,
        ..scale(rounds)
    }
}

#[test]
fn clients_notice_no_kill_and_start() -> Result<()> {
    soak::restart(scale(2))?.check_counts()
}

#[test]
fn clients_notice_no_kill_in_a_swapped_daemon_set() -> Result<()> {
    soak::restart(swapped(2))?.check_counts()
}

#[test]
fn clients_notice_no_upgrade() -> Result<()> {
    upgrade(scale(1), "soak")
}

#[test]
fn clients_notice_no_upgrade_in_a_swapped_daemon_set() -> Result<()> {
    upgrade(swapped(2), "soak-swapped")
}

fn upgrade(scale: Scale, name: &str) -> Result<()> {
    let path = std::env::temp_dir().join(format!("kpx-{}-{name}.o", std::process::id()));
    std::fs::write(&path, object::embedded()?)
        .with_context(|| format!("write {}", path.display()))?;
    let report = soak::upgrade(scale, &path);
    std::fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
    report?.check_counts()
}

#[test]
fn connections_go_to_backends_of_the_moment() -> Result<()> {
    soak::endpoints(scale(100))?.check_counts()
}

#[test]
fn backends_change_while_devices_come_and_go() -> Result<()> {
    soak::devices(scale(2), 50)?.check_counts()
}

#[test]
fn a_swapped_daemon_set_follows_its_endpoints() -> Result<()> {
    soak::endpoints(swapped(100))?.check_counts()
}

#[test]
fn clients_notice_no_failure_of_the_api_server() -> Result<()> {
    soak::outage(scale(1), Duration::from_secs(1))?.check_counts()
}

#[test]
fn connections_that_netfilter_masquerades_share_the_nodes_ports_with_flows() -> Result<()> {
    soak::ports(Scale {
        at_least: Duration::from_secs(8),
        rate: 300,
        ..scale(1)
    })?
    .check_counts()
}

#[test]
fn a_flood_takes_nothing_from_established_flows() -> Result<()> {
    soak::flood(Scale {
        at_least: Duration::from_secs(3),
        ..scale(1)
    })?
    .check_counts()
}

#[test]
fn rules_and_filters_act_on_new_connections_and_break_no_others() -> Result<()> {
    soak::rules(scale(5))?.check_counts()
}

#[test]
fn strangers_end_no_silent_connection() -> Result<()> {
    soak::idle(40, Duration::from_secs(1))?.check_counts()
}

/// A greedy namespace requests more than the tables hold.
#[test]
fn a_greedy_namespace_takes_nothing_from_another() -> Result<()> {
    let room = Room {
        name: "small",
        flags: &[
            "--service-table-size",
            "1000",
            "--endpoint-table-size",
            "4000",
        ],
    };
    let greed = Greed {
        services: 3,
        ports: 1_200,
        endpoints: 600,
        changes: 20,
    };
    soak::tenants(2, greed, &[room])?.check_counts()
}
