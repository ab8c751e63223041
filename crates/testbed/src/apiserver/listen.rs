//! The socket and its connections, on a separate thread.

use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd};
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use nix::sched::{CloneFlags, setns};
use rustls::ServerConfig;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpStream;
use tokio::sync::{mpsc as commands, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::http::answer;
use super::meter::Metered;
use super::shared::Shared;
use crate::agent::wait_until;

/// The backlog, as in Go.
const BACKLOG: i32 = 4_096;
/// The time limit for a closed listener's address to become free.
const FREED: Duration = Duration::from_secs(2);

/// The serving thread, and the channel that controls it.
#[derive(Debug)]
pub(crate) struct Server {
    commands: Option<commands::UnboundedSender<Command>>,
    thread: Option<JoinHandle<()>>,
    address: SocketAddr,
    /// The network namespace of the given socket, where new sockets must be created.
    network: Option<File>,
}

#[derive(Debug)]
enum Command {
    /// Close the listening socket and all connections, then confirm.
    Stop(mpsc::Sender<()>),
    Start(TcpListener),
    /// Serve new connections with this configuration.
    Tls(Arc<ServerConfig>),
    /// End each connection after its current answer.
    Retire,
}

impl Server {
    pub(crate) fn start(
        listener: TcpListener,
        tls: Arc<ServerConfig>,
        shared: Arc<Shared>,
    ) -> Result<Self> {
        let address = listener
            .local_addr()
            .context("read the address of the API server")?;
        let network = network_namespace(&listener);
        let (sender, receiver) = commands::unbounded_channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start a runtime")?;
        let thread = thread::Builder::new()
            .name("apiserver".to_owned())
            .spawn(move || runtime.block_on(serve(receiver, TlsAcceptor::from(tls), shared)))
            .context("start the API server's thread")?;
        let server = Self {
            commands: Some(sender),
            thread: Some(thread),
            address,
            network,
        };
        server.send(Command::Start(listener))?;
        Ok(server)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Cuts every connection and refuses new ones. The returned socket reserves the address.
    pub(crate) fn stop(&self) -> Result<Socket> {
        let (done, stopped) = mpsc::channel();
        self.send(Command::Stop(done))?;
        stopped.recv().context("stop the API server")?;
        let parked = match &self.network {
            Some(network) => thread::scope(|scope| {
                let bind_there = || {
                    setns(network, CloneFlags::CLONE_NEWNET)?;
                    bind_when_free(self.address)
                };
                // A separate thread, because the thread stays in that namespace.
                scope
                    .spawn(bind_there)
                    .join()
                    .unwrap_or_else(|_| bail!("thread panicked"))
            }),
            None => bind_when_free(self.address),
        };
        parked.with_context(|| format!("keep {} while the API server is stopped", self.address))
    }

    /// Serves again on the socket from [`Self::stop`].
    pub(crate) fn start_again(&self, parked: Socket) -> Result<()> {
        parked
            .listen(BACKLOG)
            .with_context(|| format!("listen on {} again", self.address))?;
        self.send(Command::Start(parked.into()))
    }

    /// Serves another certificate to new connections.
    pub(crate) fn serve_by(&self, tls: Arc<ServerConfig>) -> Result<()> {
        self.send(Command::Tls(tls))
    }

    /// Ends each connection after its current answer.
    pub(crate) fn retire(&self) -> Result<()> {
        self.send(Command::Retire)
    }

    fn send(&self, command: Command) -> Result<()> {
        let sender = self.commands.as_ref().context("API server has ended")?;
        sender.send(command).ok().context("API server has ended")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.commands.take());
        if let Some(thread) = self.thread.take() {
            // The thread has already printed any panic.
            let _ = thread.join();
        }
    }
}

async fn serve(
    mut commands: commands::UnboundedReceiver<Command>,
    mut tls: TlsAcceptor,
    shared: Arc<Shared>,
) {
    let mut listener: Option<tokio::net::TcpListener> = None;
    let mut connections = JoinSet::new();
    let retirement = watch::Sender::new(());
    loop {
        let accepted = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            command = commands.recv() => match command {
                None => return,
                Some(Command::Retire) => retirement.send_replace(()),
                Some(Command::Tls(config)) => tls = TlsAcceptor::from(config),
                Some(Command::Stop(done)) => {
                    listener = None;
                    connections.shutdown().await;
                    let _ = done.send(());
                }
                Some(Command::Start(socket)) => match listen(socket) {
                    Ok(socket) => listener = Some(socket),
                    Err(error) => return tracing::error!(%error, "API server cannot listen"),
                },
            },
            accepted = accepted => match accepted {
                Ok((stream, _)) => {
                    let retirement = retirement.subscribe();
                    connections.spawn(connection(stream, tls.clone(), shared.clone(), retirement));
                }
                Err(error) => tracing::warn!(%error, "API server cannot accept a connection"),
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection(
    stream: TcpStream,
    tls: TlsAcceptor,
    shared: Arc<Shared>,
    mut retirement: watch::Receiver<()>,
) {
    let _ = stream.set_nodelay(true);
    let stream = match tls
        .accept(Metered {
            stream,
            meter: shared.meter.clone(),
        })
        .await
    {
        Ok(stream) => stream,
        Err(error) => return tracing::debug!(%error, "TLS handshake failed"),
    };
    let has_certificate = stream.get_ref().1.peer_certificates().is_some();
    let service = service_fn(|request| answer(shared.clone(), has_certificate, request));
    let server = auto::Builder::new(TokioExecutor::new());
    let mut connection = pin!(server.serve_connection_with_upgrades(TokioIo::new(stream), service));
    let served = loop {
        tokio::select! {
            served = connection.as_mut() => break served,
            Ok(()) = retirement.changed() => connection.as_mut().graceful_shutdown(),
        }
    };
    if let Err(error) = served {
        tracing::debug!(%error, "connection ended");
    }
}

fn listen(socket: TcpListener) -> io::Result<tokio::net::TcpListener> {
    socket.set_nonblocking(true)?;
    tokio::net::TcpListener::from_std(socket)
}

/// Retries, because a child forked by another thread holds the listener until it executes its
/// program.
fn bind_when_free(address: SocketAddr) -> Result<Socket> {
    let mut socket = None;
    wait_until(FREED, "the address is free", || match bind(address) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(false),
        bound => {
            socket = Some(bound?);
            Ok(true)
        }
    })?;
    socket.context("nothing was bound")
}

/// Binds without listening: clients are refused, and the address stays reserved.
fn bind(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    // Earlier connections may still be closing.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Returns the network namespace of a socket. Without the privilege to query it, `None`: an
/// unprivileged process cannot have changed its namespace.
fn network_namespace(socket: &TcpListener) -> Option<File> {
    /// From linux/sockios.h.
    const SIOCGSKNS: nix::libc::Ioctl = 0x894c;
    // SAFETY: this request takes no argument, and returns a new file descriptor.
    let fd = unsafe { nix::libc::ioctl(socket.as_raw_fd(), SIOCGSKNS) };
    // SAFETY: the line above made the descriptor, and no other value holds it.
    (fd >= 0).then(|| unsafe { File::from_raw_fd(fd) })
}
