//! Servers that report their name and the client's address, and clients that verify the answers.
//!
//! TCP: a request is its length (4 bytes, big endian) and that many bytes; the answer is a greeting
//! and the same bytes. A connection may carry many requests. A request that starts with `GET ` is
//! HTTP, answered with the greeting as text. UDP and SCTP: the message [`WHO`] is answered with a
//! greeting, every other message is echoed. A greeting is its length (one byte) and
//! `backend client-address:port`.

mod association;
mod client;
mod kernel_sctp;
mod responder;
mod sctp;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use socket2::SockRef;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::runtime::Runtime;

pub use self::client::{Answer, Connection, Dial, Fault, Protocol, pattern};
pub use self::kernel_sctp::is_there as kernel_speaks_sctp;
use self::responder::Listeners;
pub use self::sctp::checksum as sctp_checksum;
use crate::lab::{Family, Host};
use crate::netns::NetNs;

/// The datagram that requests a greeting.
const WHO: &[u8] = b"who?";

/// The longest request: a larger length is a protocol error.
const MAX_REQUEST: u32 = 16 << 20;

/// Echo servers on one thread; they stop with this value.
pub struct Servers {
    runtime: Runtime,
    /// By namespace and address.
    sctp: Mutex<BTreeMap<(String, IpAddr), Listeners>>,
}

impl Servers {
    pub fn start() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        Ok(Self {
            runtime,
            sctp: Mutex::default(),
        })
    }

    /// Serves all protocols on both of a host's addresses. On the wildcard address, a UDP answer
    /// would have the address of its outgoing device.
    pub fn serve(&self, host: &Host, port: u16) -> Result<()> {
        Family::ALL.into_iter().try_for_each(|family| {
            self.serve_at(
                host,
                host.name,
                SocketAddr::new(host.addrs.ip(family), port),
            )
        })
    }

    /// Serves all protocols at any address of a host, under any name.
    pub fn serve_at(&self, host: &Host, name: &str, addr: SocketAddr) -> Result<()> {
        let (tcp, udp) = host
            .ns
            .run(|| {
                let tcp = std::net::TcpListener::bind(addr)?;
                let udp = client::udp_socket(addr)?;
                tcp.set_nonblocking(true)?;
                udp.set_nonblocking(true)?;
                io::Result::Ok((tcp, udp))
            })
            .with_context(|| format!("serve {name} at {addr}"))?;
        let name: Arc<str> = name.into();
        {
            let _entered = self.runtime.enter();
            self.runtime
                .spawn(serve_tcp(TcpListener::from_std(tcp)?, name.clone()));
            self.runtime
                .spawn(serve_udp(UdpSocket::from_std(udp.into())?, name.clone()));
        }
        if kernel_sctp::is_there() {
            let listener = host.ns.run(|| kernel_sctp::listen(addr));
            let listener = listener.with_context(|| format!("serve {name} at {addr} over SCTP"))?;
            let _entered = self.runtime.enter();
            self.runtime
                .spawn(kernel_sctp::serve(TcpListener::from_std(listener)?, name));
            return Ok(());
        }
        self.speak_sctp(&host.ns, addr.ip())?
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(addr.port(), name);
        Ok(())
    }

    fn speak_sctp(&self, ns: &NetNs, ip: IpAddr) -> Result<Listeners> {
        let mut sctp = self.sctp.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (ns.name().to_owned(), ip);
        if let Some(listeners) = sctp.get(&key) {
            return Ok(listeners.clone());
        }
        let socket = ns
            .run(|| sctp::socket(ip))
            .with_context(|| format!("speak SCTP at {ip}"))?;
        socket.set_nonblocking(true)?;
        let listeners = Listeners::default();
        let _entered = self.runtime.enter();
        self.runtime.spawn(responder::serve(
            UdpSocket::from_std(socket.into())?,
            listeners.clone(),
        ));
        sctp.insert(key, listeners.clone());
        Ok(listeners)
    }
}

async fn serve_tcp(listener: TcpListener, name: Arc<str>) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let name = name.clone();
                tokio::spawn(async move {
                    if let Err(error) = answer(stream, &name, peer).await {
                        tracing::debug!(%error, %name, %peer, "connection failed");
                    }
                });
            }
            Err(error) => tracing::warn!(%error, %name, "cannot accept"),
        }
    }
}

async fn answer(mut stream: TcpStream, name: &str, peer: SocketAddr) -> io::Result<()> {
    let mut length = [0; 4];
    loop {
        match stream.read_exact(&mut length).await {
            Ok(_) if &length == b"GET " => return answer_http(stream, name, peer).await,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        }
        let length = u32::from_be_bytes(length);
        if length > MAX_REQUEST {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("request of {length} bytes"),
            ));
        }
        let mut answer = greeting(name, peer);
        let start = answer.len();
        answer.resize(start + length as usize, 0);
        stream.read_exact(&mut answer[start..]).await?;
        stream.write_all(&answer).await?;
    }
}

async fn answer_http(stream: TcpStream, name: &str, peer: SocketAddr) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while stream.read_line(&mut line).await? > 0 && !line.trim_end().is_empty() {
        line.clear();
    }
    let body = format!("backend {name}, client {peer}\n");
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await?;
    stream.shutdown().await
}

async fn serve_udp(socket: UdpSocket, name: Arc<str>) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        // The error is an ICMP message about an earlier answer to a client that is gone.
        let Ok((length, peer)) = socket.recv_from(&mut buffer).await else {
            continue;
        };
        let greeting;
        let answer = match &buffer[..length] {
            WHO => {
                greeting = self::greeting(&name, peer);
                &greeting
            }
            datagram => datagram,
        };
        let sent = socket
            .async_io(Interest::WRITABLE, || {
                client::in_order(|| SockRef::from(&socket).send_to(answer, &peer.into()))
            })
            .await;
        if let Err(error) = sent {
            tracing::debug!(%error, %name, %peer, "cannot answer");
        }
    }
}

fn greeting(name: &str, peer: SocketAddr) -> Vec<u8> {
    let text = format!("{name} {peer}");
    let length = u8::try_from(text.len()).expect("a host's name and an address are short");
    [&[length], text.as_bytes()].concat()
}
