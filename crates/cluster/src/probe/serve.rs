//! Servers that answer with their name and the client's address.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::{Answer, LONGEST, QUESTION};

/// Time limit for a conversation.
const CONVERSATION: Duration = Duration::from_secs(10);
/// The maximum number of concurrent conversations per port. Their messages fit into the memory
/// limit of the test's pods.
const MOST: usize = 64;
/// The pause after a socket error, such as a lack of file descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);

/// Answer each client with this name and the client's address, by TCP and UDP, until SIGTERM or
/// SIGINT.
#[derive(Args, Debug)]
pub(super) struct ServeArgs {
    /// The name in the answers.
    #[arg(long, value_name = "NAME")]
    name: String,
    /// Answer at this port; may be repeated. Without a port it only waits.
    #[arg(long, value_name = "PORT")]
    port: Vec<u16>,
}

pub(super) async fn serve(args: ServeArgs) -> Result<ExitCode> {
    // The kernel delivers no signal with default action to the first process of a container.
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    let name: Arc<str> = args.name.into();
    for port in args.port {
        let mut served = 0;
        for any in [
            IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        ] {
            let at = SocketAddr::new(any, port);
            // An IPv6 socket serves both families on most hosts. A host may have only one family.
            if let (Ok(listener), Ok(socket)) =
                (TcpListener::bind(at).await, UdpSocket::bind(at).await)
            {
                tokio::spawn(accept(listener, Arc::clone(&name)));
                tokio::spawn(respond(socket, Arc::clone(&name)));
                served += 1;
            }
        }
        ensure!(served > 0, "port {port} is already in use, over TCP or UDP");
    }
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(ExitCode::SUCCESS)
}

async fn accept(listener: TcpListener, name: Arc<str>) {
    let free = Arc::new(Semaphore::new(MOST));
    loop {
        let Ok(permit) = Arc::clone(&free).acquire_owned().await else {
            return;
        };
        let Ok((stream, client)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let name = Arc::clone(&name);
        tokio::spawn(async move {
            // The client reports a missing answer.
            let _ended = timeout(CONVERSATION, converse(stream, client, &name)).await;
            drop(permit);
        });
    }
}

/// Reads the client's message to its end, and answers with as many bytes.
async fn converse(stream: TcpStream, client: SocketAddr, name: &str) -> Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut bytes = Vec::new();
    reader.take(LONGEST as u64).read_to_end(&mut bytes).await?;
    writer
        .write_all(&answer(name, client, bytes.len())?)
        .await?;
    writer.shutdown().await.context("end the answer")
}

pub(super) async fn respond(socket: UdpSocket, name: Arc<str>) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let Ok((length, client)) = socket.recv_from(&mut buffer).await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        // Otherwise a datagram spoofed from a server's address would make two servers answer each
        // other forever.
        if !buffer[..length].starts_with(&[QUESTION]) {
            continue;
        }
        // An answer longer than its question would amplify a flood against a spoofed address.
        if let Ok(answer) = answer(&name, client, length)
            && answer.len() <= length
        {
            let _sent: io::Result<usize> = socket.send_to(&answer, client).await;
        }
    }
}

fn answer(name: &str, client: SocketAddr, bytes: usize) -> Result<Vec<u8>> {
    let answer = Answer {
        name: name.to_owned(),
        client: client.ip().to_canonical(),
        bytes,
    };
    let mut answer = serde_json::to_vec(&answer)?;
    answer.resize(answer.len().max(bytes), b' ');
    Ok(answer)
}
