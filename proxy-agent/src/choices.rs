//! The choices among few that an operator has, as flags and files spell them.

pub use proxy_view::Mode;

/// The way in which a host outside the cluster finds pods, beside its own routes to them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PodRoutes {
    /// No other way: the default route does not count.
    #[default]
    Off,
    /// The default route, whose gateway knows where pods are.
    Default,
    /// Routes of kpx through the pods' nodes, as far as the nodes are the host's neighbours.
    Nodes,
}

/// The connections that reach pods through the API server, from a host outside the cluster that
/// reaches them by no other way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Tunnel {
    /// None.
    #[default]
    Off,
    /// Those by TCP: the API server forwards no others.
    Tcp,
}

/// The sockets whose destination is translated before they send a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SocketLb {
    /// No sockets; their packets are translated.
    Off,
    /// On a node, the sockets of its own network namespace and of pods that nothing speaks against,
    /// if kernel and cgroups allow that.
    #[default]
    Auto,
    /// The sockets of the host's own network namespace.
    Host,
    /// The sockets of pods as well.
    All,
}
