//! A node with a client's device and a backend's, and sockets that talk through it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use proxy_common::addr::Proto;
use socket2::{Domain, Protocol, Socket, Type};

use super::NetNs;

pub(super) const CLIENT_DEVICE: &str = "c0";
pub(super) const BACKEND_DEVICE: &str = "b0";

/// The longest wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Turns before the clock is looked at.
const PRELUDE: u32 = 100;

pub(super) struct Fixture {
    pub(super) node: NetNs,
    client: NetNs,
    backend: NetNs,
}

impl Fixture {
    pub(super) fn new() -> Result<Self> {
        let pid = std::process::id();
        let netns = |what: &str| NetNs::create(format!("kpx-cost-{pid}-{what}"));
        let this = Self {
            node: netns("node")?,
            client: netns("client")?,
            backend: netns("backend")?,
        };
        for (pod, n, device) in [
            (&this.client, 1, CLIENT_DEVICE),
            (&this.backend, 2, BACKEND_DEVICE),
        ] {
            this.node.ip(&format!(
                "link add {device} type veth peer name eth0 netns {}\n\
                 addr add 10.244.{n}.1/24 dev {device}\naddr add fd00:{n}::1/64 dev {device} nodad\nlink set {device} up",
                pod.name()
            ))?;
            pod.ip(&format!(
                "addr add 10.244.{n}.10/24 dev eth0\naddr add fd00:{n}::10/64 dev eth0 nodad\nlink set eth0 up\n\
                 route add default via 10.244.{n}.1\nroute add default via fd00:{n}::1"
            ))?;
        }
        for key in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            this.node.sysctl(key, "1")?;
        }
        for netns in [&this.node, &this.client, &this.backend] {
            netns.settle()?;
        }
        Ok(this)
    }

    /// The client sends a byte and waits for it to come back, again and again; what `look` saw
    /// before that and after. Both keep to a CPU of their own, always the same, if there are two.
    pub(super) fn talk<T: Send>(
        &self,
        proto: Proto,
        client: SocketAddr,
        dialled: SocketAddr,
        backend: SocketAddr,
        turns: u32,
        look: impl Fn() -> T + Send,
    ) -> Result<(T, T)> {
        if proto == Proto::TCP {
            let listener = self
                .backend
                .run(|| TcpListener::bind(backend))
                .context("listen")?;
            return thread::scope(|scope| {
                let echo = scope.spawn(|| echo_stream(&listener));
                let seen = self
                    .client
                    .run(|| dial_stream(client, dialled, turns, look));
                // The client has hung up, or has never come: then this ends the wait for it.
                let _end = self.backend.run(|| TcpStream::connect(backend));
                join(echo)?;
                seen
            });
        }
        let socket = self
            .backend
            .run(|| UdpSocket::bind(backend))
            .context("bind")?;
        thread::scope(|scope| {
            let echo = scope.spawn(|| echo_datagrams(&socket));
            let seen = self
                .client
                .run(|| dial_datagrams(client, dialled, turns, look));
            self.backend
                .run(|| UdpSocket::bind(SocketAddr::new(backend.ip(), 0))?.send_to(&[], backend))?;
            join(echo)?;
            seen
        })
    }
}

fn join(echo: thread::ScopedJoinHandle<'_, Result<()>>) -> Result<()> {
    echo.join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn echo_stream(listener: &TcpListener) -> Result<()> {
    keep_to(1)?;
    let (mut stream, _) = listener.accept().context("accept")?;
    stream.set_nodelay(true)?;
    let mut byte = [0];
    // Until it is reset.
    while matches!(stream.read(&mut byte), Ok(1)) {
        stream.write_all(&byte).context("answer")?;
    }
    Ok(())
}

fn dial_stream<T>(
    client: SocketAddr,
    dialled: SocketAddr,
    turns: u32,
    look: impl Fn() -> T,
) -> Result<(T, T)> {
    keep_to(0)?;
    let socket = Socket::new(
        Domain::for_address(client),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket
        .bind(&client.into())
        .with_context(|| format!("bind {client}"))?;
    // By a reset: the port is free for the next.
    socket.set_linger(Some(Duration::ZERO))?;
    socket.set_tcp_nodelay(true)?;
    socket
        .connect_timeout(&dialled.into(), TIMEOUT)
        .with_context(|| format!("connect to {dialled}"))?;
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut byte = [0];
    timed(turns, look, || {
        stream.write_all(b"x")?;
        stream.read_exact(&mut byte)
    })
}

/// Until an empty datagram comes.
fn echo_datagrams(socket: &UdpSocket) -> Result<()> {
    keep_to(1)?;
    let mut byte = [0];
    loop {
        let (len, from) = socket.recv_from(&mut byte).context("receive")?;
        if len == 0 {
            return Ok(());
        }
        socket.send_to(&byte, from).context("answer")?;
    }
}

fn dial_datagrams<T>(
    client: SocketAddr,
    dialled: SocketAddr,
    turns: u32,
    look: impl Fn() -> T,
) -> Result<(T, T)> {
    keep_to(0)?;
    let socket = UdpSocket::bind(client).with_context(|| format!("bind {client}"))?;
    socket.connect(dialled)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    let mut byte = [0];
    timed(turns, look, || {
        socket.send(b"x")?;
        socket.recv(&mut byte).map(drop)
    })
}

/// Returns what `look` saw before so many turns and after.
fn timed<T>(
    turns: u32,
    look: impl Fn() -> T,
    mut turn: impl FnMut() -> std::io::Result<()>,
) -> Result<(T, T)> {
    for _ in 0..PRELUDE {
        turn().context("an answer")?;
    }
    let before = look();
    for _ in 0..turns {
        turn().context("an answer")?;
    }
    Ok((before, look()))
}

/// On a machine with fewer CPUs, the last one.
fn keep_to(cpu: usize) -> Result<()> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu.min(thread::available_parallelism()?.get() - 1))?;
    sched_setaffinity(Pid::from_raw(0), &cpus).context("keep to a CPU")
}
