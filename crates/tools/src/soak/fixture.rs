//! A lab with one node under kpx, servers, and load.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use super::Place;
use super::kpx::{AnyAgent, Home};
use crate::load::{Dialer, Exchange, Kind, Plan, Results, Route, StreamResults, Streams};
use testbed::agent::{Cluster, Service};
use testbed::echo::{Protocol, Servers};
use testbed::lab::{Family, Host, Lab, Layout};

/// The node port of the connections' Service, for outside clients.
pub(super) const NODE_PORT: u16 = 30_080;
pub(super) const WEB_PORT: u16 = 8080;
/// The port of the streams' servers, which have their own thread.
const STREAM_PORT: u16 = 9000;
/// The node port of the streams' Service, for outside clients.
const STREAM_NODE_PORT: u16 = 30_082;
/// All pods of both nodes except the clients.
pub(super) const BACKENDS: [&str; 3] = ["p1b", "p1c", "p2a"];
pub(super) const CLIENT: &str = "p1a";
const CLIENT_OUTSIDE: &str = "x";
/// The client of control streams: neither its node nor its server's node has kpx.
const CONTROL_CLIENT: &str = "p2b";
const CONTROL_SERVER: &str = "p2a";
/// Longer than the delay of a SYN that is lost twice.
pub(super) const DEADLINE: Duration = Duration::from_secs(5);

/// kpx serves only n1, so that some pods reach each other without kpx.
pub(super) struct Fixture {
    pub(super) lab: Lab,
    pub(super) cluster: Cluster,
    /// The Services of new connections: a single Service would have too few source ports for the
    /// rate.
    pub(super) web: [Service; 2],
    /// The Services of streams: one with a backend on the client's node, one with a backend
    /// elsewhere.
    pub(super) streams: [Service; 2],
    pub(super) home: Home,
    _servers: [Servers; 2],
}

pub(super) struct Seen {
    pub(super) connections: Results,
    pub(super) streams: Vec<StreamResults>,
}

pub(super) struct Load {
    dialer: Dialer,
    streams: Streams,
}

impl Fixture {
    pub(super) fn build(place: Place) -> Result<Self> {
        let lab = Lab::start(Layout::Routed)?;
        let servers = [Servers::start()?, Servers::start()?];
        for host in lab.backends().filter(|host| host.name != CLIENT) {
            servers[0].serve(host, WEB_PORT)?;
            servers[1].serve(host, STREAM_PORT)?;
        }
        let client = lab.host(CLIENT);
        // Each connection occupies its port for a minute, as with any busy client.
        client.ns.sysctl("ipv4/ip_local_port_range", "1024 65535")?;
        client.ns.sysctl("ipv4/tcp_tw_reuse", "1")?;
        for node in lab.nodes() {
            // At this rate the CNI's masquerading would fill the machine's conntrack table in two
            // minutes.
            node.host
                .ns
                .sysctl("netfilter/nf_conntrack_tcp_timeout_time_wait", "10")?;
        }
        let mut cluster = Cluster::with_api_server(&lab)?;
        let home = Home::new(place, &lab, cluster.server()?)?;
        let web = Service::new("web", 20, &BACKENDS, WEB_PORT).node_port(NODE_PORT);
        let web = [web, Service::new("web2", 21, &BACKENDS, WEB_PORT)];
        let near =
            Service::new("stream-near", 22, &["p1b"], STREAM_PORT).node_port(STREAM_NODE_PORT);
        let streams = [near, Service::new("stream-far", 23, &["p2a"], STREAM_PORT)];
        for object in web
            .iter()
            .chain(&streams)
            .flat_map(|service| service.objects(&lab))
        {
            cluster.put(&object)?;
        }
        Ok(Self {
            lab,
            cluster,
            web,
            streams,
            home,
            _servers: servers,
        })
    }

    /// Starts kpx and waits until it serves the node.
    pub(super) fn kpx(&self, args: &[String]) -> Result<AnyAgent<'_>> {
        AnyAgent::start(&self.home, &self.lab, self.cluster.source(), args)
    }

    /// Makes a file visible to kpx, and returns its path there.
    pub(super) fn show(&self, file: &Path) -> Result<PathBuf> {
        self.home.show(&self.lab, file)
    }

    pub(super) fn load(
        &self,
        rate: u32,
        allowed: impl Fn(&Exchange) -> bool + Send + 'static,
    ) -> Result<Load> {
        self.load_with(rate, allowed, &[])
    }

    /// Adds the same load, and streams from outside clients to a node port.
    pub(super) fn load_with_clients_outside(
        &self,
        rate: u32,
        allowed: impl Fn(&Exchange) -> bool + Send + 'static,
    ) -> Result<Load> {
        let node = self.lab.n1.host.addrs;
        let to = Family::ALL.map(|family| SocketAddr::new(node.ip(family), STREAM_NODE_PORT));
        self.load_with(
            rate,
            allowed,
            &to.map(|to| (Kind::Service, self.lab.host(CLIENT_OUTSIDE), to)),
        )
    }

    fn load_with(
        &self,
        rate: u32,
        allowed: impl Fn(&Exchange) -> bool + Send + 'static,
        more: &[(Kind, &Host, SocketAddr)],
    ) -> Result<Load> {
        let client = self.lab.host(CLIENT);
        let frontends = |services: &[Service]| -> Vec<SocketAddr> {
            let both = services
                .iter()
                .flat_map(|service| Family::ALL.map(|family| service.frontend(family)));
            both.collect()
        };
        let through = frontends(&self.streams)
            .into_iter()
            .map(|to| (Kind::Service, client, to));
        let from = self.lab.host(CONTROL_CLIENT);
        let server = self.lab.host(CONTROL_SERVER);
        let direct =
            Family::ALL.map(|family| SocketAddr::new(server.addrs.ip(family), STREAM_PORT));
        let past = direct.into_iter().map(|to| (Kind::Control, from, to));
        // Control streams take turns before, between and after the compared streams.
        let all: Vec<_> = past
            .clone()
            .take(1)
            .chain(through)
            .chain(more.iter().copied())
            .chain(past.skip(1))
            .collect();
        let routes = [Protocol::Udp, Protocol::Tcp]
            .into_iter()
            .flat_map(|protocol| {
                all.iter().map(move |&(kind, from, to)| Route {
                    kind,
                    protocol,
                    from,
                    to,
                })
            });
        let routes: Vec<Route> = routes.collect();
        let streams = Streams::start(&routes)?;
        let plan = Plan {
            targets: frontends(&self.web),
            rate,
            deadline: DEADLINE,
            allowed: Box::new(allowed),
        };
        Ok(Load {
            dialer: Dialer::start(&client.ns, plan)?,
            streams,
        })
    }
}

impl Load {
    pub(super) fn finish(self) -> Result<Seen> {
        Ok(Seen {
            connections: self.dialer.finish()?,
            streams: self.streams.finish()?,
        })
    }
}
