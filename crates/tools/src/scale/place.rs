//! A node's surroundings: a dialling pod, and the rest of the cluster, which answers at every
//! endpoint's address.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket;
use socket2::{Domain, SockRef, Socket, Type};
use testbed::netns::NetNs;

use crate::control::cluster::{CLUSTER_CIDR, ENDPOINT_NETS, TARGET_PORT};

/// The range of dialling pods.
pub(super) const PODS: &str = "10.244.0.0/16";
pub(super) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 2);
/// The port at which the rest of the cluster echoes open connections.
pub(super) const STREAM_PORT: u16 = 9000;
/// The node's next hop to the rest of the cluster.
const REST: &str = "192.0.2.1";
/// The MAC address of the node's end of the pod's veth pair.
const GATEWAY_MAC: &str = "ee:ee:ee:ee:ee:ee";
/// The client's timeout.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A node with its surroundings. The servers end with this value.
pub(super) struct Place<'a> {
    pub(super) node: &'a NetNs,
    pub(super) client: NetNs,
    rest: NetNs,
    listeners: Vec<TcpListener>,
}

/// A connection: the duration of its handshake, and the answering endpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dialled {
    pub(super) connected: Duration,
    pub(super) by: Ipv4Addr,
}

impl<'a> Place<'a> {
    /// Builds the surroundings of a node whose device `eth1` is the peer of its `eth0`.
    pub(super) fn around(node: &'a NetNs, node_ip: Ipv4Addr) -> Result<Self> {
        let create = |name: &str| NetNs::create(format!("{}-{name}", node.name()));
        let client = create("client")?;
        let rest = create("rest")?;
        let routes = ENDPOINT_NETS
            .map(|net| format!("route add {net} via {REST}"))
            .join("\n");
        node.sysctl("ipv4/ip_forward", "1")?;
        node.ip(&format!(
            "link set eth1 netns {}
             link add client address {GATEWAY_MAC} type veth peer name eth0 netns {}
             link set client up
             route add {CLIENT}/32 dev client",
            rest.name(),
            client.name(),
        ))?;
        let own = ENDPOINT_NETS
            .map(|net| format!("route add local {net} dev lo"))
            .join("\n");
        rest.ip(&format!(
            "link set eth1 up\naddr add {REST}/24 dev eth1\nroute add {PODS} via {node_ip}\n{own}"
        ))?;
        node.ip(&routes)?;
        client.ip(&format!(
            "link set eth0 up
             addr add {CLIENT}/32 dev eth0
             neigh add 169.254.1.1 lladdr {GATEWAY_MAC} dev eth0 nud permanent
             route add 169.254.1.1 dev eth0 scope link
             route add default via 169.254.1.1"
        ))?;
        client.sysctl("ipv4/ip_local_port_range", "1024 65535")?;
        client.sysctl("ipv4/tcp_tw_reuse", "1")?;
        masquerade(node)?;
        let mut place = Self {
            node,
            client,
            rest,
            listeners: Vec::new(),
        };
        place.listeners = vec![
            listen(&place.rest, TARGET_PORT, print_address)?,
            listen(&place.rest, STREAM_PORT, echo_all)?,
            listen(&place.client, STREAM_PORT, echo_all)?,
        ];
        Ok(place)
    }

    /// Opens connections without traffic.
    pub(super) fn hold(&self, to: SocketAddrV4, number: usize) -> Result<Vec<TcpStream>> {
        // Each end takes a file descriptor.
        let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, most, most).context("raise the limit on open files")?;
        let connect = |_| TcpStream::connect(to).with_context(|| format!("connect to {to}"));
        self.client.run(|| (0..number).map(connect).collect())
    }

    /// Returns the client's own address for control streams.
    pub(super) fn beside() -> SocketAddrV4 {
        SocketAddrV4::new(Ipv4Addr::LOCALHOST, STREAM_PORT)
    }
}

/// Serves on a thread that ends once the returned listener is shut down.
fn listen(ns: &NetNs, port: u16, serve: fn(TcpListener)) -> Result<TcpListener> {
    let listener = ns.run(|| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into())?;
        socket.listen(4_096)?;
        std::io::Result::Ok(TcpListener::from(socket))
    });
    let listener = listener.with_context(|| format!("listen on port {port}"))?;
    let handle = listener.try_clone().context("duplicate a listener")?;
    ns.thread("server", move || serve(listener))?;
    Ok(handle)
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        for listener in &self.listeners {
            let _ = socket::shutdown(listener.as_raw_fd(), socket::Shutdown::Both); // Its thread ends with an error.
        }
    }
}

/// Makes the node track its pods' connections, like every CNI plugin's masquerading rules.
fn masquerade(node: &NetNs) -> Result<()> {
    node.nft(&format!(
        "table inet cni {{
            chain postrouting {{
                type nat hook postrouting priority srcnat
                ip saddr {CLUSTER_CIDR} ip daddr != {CLUSTER_CIDR} masquerade
            }}
        }}"
    ))
}

/// Connects, reads the answering endpoint, and ends the connection by a RST, so that neither end
/// keeps state.
pub(super) fn dial(to: SocketAddrV4) -> Result<Dialled> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    socket.set_write_timeout(Some(TIMEOUT))?; // Applies to connect too.
    let started = Instant::now();
    socket
        .connect(&to.into())
        .with_context(|| format!("connect to {to}"))?;
    let connected = started.elapsed();
    let mut stream = TcpStream::from(socket);
    let mut by = [0; 4];
    stream
        .read_exact(&mut by)
        .with_context(|| format!("read from {to}"))?;
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    Ok(Dialled {
        connected,
        by: by.into(),
    })
}

/// Sends each client the address that it reached.
fn print_address(listener: TcpListener) {
    loop {
        match listener.accept() {
            Ok((mut stream, _)) => {
                if let Ok(SocketAddr::V4(own)) = stream.local_addr() {
                    let _ = stream.write_all(&own.ip().octets()); // The client reports a failure.
                }
            }
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
            Err(_) => return,
        }
    }
}

/// Echoes every connection byte by byte.
fn echo_all(listener: TcpListener) {
    while let Ok((mut stream, _)) = listener.accept() {
        thread::spawn(move || {
            let _ = stream.set_nodelay(true);
            let mut byte = [0];
            while matches!(stream.read(&mut byte), Ok(1)) && stream.write_all(&byte).is_ok() {}
            let _ = stream.shutdown(Shutdown::Both);
        });
    }
}
