//! The operator's closed choices, with their names in flags and files.

pub use proxy_view::Mode;

/// Host mode: the routes to pods without a route of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PodRoutes {
    /// None; the default route does not count.
    #[default]
    Off,
    /// The default route, whose gateway has routes to pods.
    Default,
    /// kpx's own routes through the pods' nodes, if the nodes are neighbours of the host.
    Nodes,
}

/// Host mode: the connections that reach pods only through the API server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Tunnel {
    #[default]
    Off,
    /// TCP connections: the API server forwards no other protocol.
    Tcp,
}

/// The sockets whose destination is translated at connect, before any packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SocketLb {
    /// None; packets are translated.
    Off,
    /// On a node, the host's sockets and those of pods without an obstacle, if kernel and cgroups
    /// support it.
    #[default]
    Auto,
    /// The sockets of the host's own network namespace.
    Host,
    /// The host's sockets and those of all pods.
    All,
}
