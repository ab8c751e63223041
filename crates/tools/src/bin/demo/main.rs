//! A demo of kpx on this machine in a few seconds: two nodes, an API server and clients of every
//! kind.
//!
//! Everything runs in network namespaces, which are removed at the end and after Ctrl-C.

mod dial;
mod hints;
mod map;
mod scale;

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use clap::{Parser, ValueEnum};
use nix::unistd::Uid;
use testbed::agent::{Agent, Cluster, Service, Source};
use testbed::echo::Servers;
use testbed::lab::{EXTERNAL, Lab, Layout, keep_until_signal};

/// The port of every server of the lab.
const PORT: u16 = 8080;

/// Shows kpx at work in a small cluster of network namespaces. Needs root.
#[derive(Parser)]
#[command(name = "kpx-demo")]
struct Args {
    /// Leave everything up until Ctrl-C, and say what to try.
    #[arg(long)]
    keep: bool,
    /// How the pods hang on their nodes.
    #[arg(long, value_enum, default_value_t = Pods::Routed)]
    pods: Pods,
    /// Feed kpx from a folder of manifests instead of an API server.
    #[arg(long)]
    manifests: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Pods {
    Routed,
    Ptp,
    Bridge,
    Vxlan,
}

/// The node port of the Service web.
const NODE_PORT: u16 = 30_080;
/// The load balancer address of web: this number in the EXTERNAL network.
const LOAD_BALANCER: u8 = 10;

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        Uid::effective().is_root(),
        "the demo makes network namespaces, which takes root (sudo); nothing is changed yet"
    );
    let started = Instant::now();
    let say = |what: &str| println!("[{:4.1} s] {what}", started.elapsed().as_secs_f32());

    let lab = Lab::start(match args.pods {
        Pods::Routed => Layout::Routed,
        Pods::Ptp => Layout::Ptp,
        Pods::Bridge => Layout::Bridge,
        Pods::Vxlan => Layout::Vxlan,
    })?;
    let servers = Servers::start()?;
    lab.backends()
        .try_for_each(|host| servers.serve(host, PORT))?;
    say("two nodes with pods, each in a network namespace of its own:");
    println!("\n{}", map::draw(&lab));

    let cluster = if args.manifests {
        Cluster::with_manifests(&lab)?
    } else {
        Cluster::with_api_server(&lab)?
    };
    let services = services();
    for object in services.iter().flat_map(|service| service.objects(&lab)) {
        cluster.put(&object)?;
    }
    say(match cluster.source() {
        Source::Kubeconfig(_) => "an API server runs in the fabric, with these Services:",
        Source::Manifests(_) => "a folder holds the manifests of these Services:",
    });
    println!("\n{}\n", map::services(&services));

    let page = ["--ui".to_owned()];
    let start = |node| Agent::start_with(&lab, node, cluster.source(), &page);
    let agents = [start(&lab.n1)?, start(&lab.n2)?];
    say(
        "kpx serves both nodes, in kube-proxy's place; clients dial Services at all their addresses:",
    );
    let wrong = dial::everyone(&lab, &services)?;

    say(
        "now the Service web is scaled up and down while four clients dial it as fast as they can:",
    );
    let failures = scale::up_and_down(&lab, &cluster, &services[0])?;

    if args.keep {
        keep_until_signal(|| hints::print(&lab, &agents, cluster.source(), &services[0]))?;
    }
    agents.into_iter().try_for_each(Agent::stop)?;
    drop((cluster, servers, lab));
    say("all namespaces are removed");
    if wrong + failures > 0 {
        bail!("{} conversations failed", wrong + failures);
    }
    hints::print_next();
    Ok(())
}

fn services() -> [Service; 6] {
    [
        Service::new("web", 10, &["p1b", "p2a"], PORT)
            .node_port(NODE_PORT)
            .load_balancer(EXTERNAL.host(LOAD_BALANCER), "VIP"),
        Service::new("itself", 11, &["p1a"], PORT),
        Service::new("far", 12, &["p2b"], PORT),
        Service::new("node", 13, &["n1"], PORT),
        Service::new("outside", 14, &["ext"], PORT),
        Service::new("empty", 15, &[], PORT),
    ]
}
