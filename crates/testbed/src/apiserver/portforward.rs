//! `pods/portforward` over WebSocket: the kubelet's form with a data and an error channel per port,
//! and kubectl's form.

mod streams;

use std::io;
use std::sync::Arc;

use anyhow::Context;
use futures::{SinkExt, StreamExt};
use http::Request;
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::failure::{Failure, Outcome};
use super::http::Answer;
use super::kubelet::{Container, Upgrade};

/// The kubelet supports no later channel protocol here.
const CHANNELS: &str = "v4.channel.k8s.io";
/// SPDY frames in messages, which kubectl requests since 1.31.
const STREAMS: &str = "SPDY/3.1+portforward.k8s.io";
const DATA: u8 = 0;
const ERROR: u8 = 1;
/// The largest message of a kubelet, in bytes.
const PIECE: usize = 32 * 1024;

/// Accepts a port-forward: to the port in the query, or to the ports of streams.
pub(super) fn answer(
    container: Arc<dyn Container>,
    query: &[(String, String)],
    request: Request<Incoming>,
) -> Outcome<Answer> {
    let upgrade = Upgrade::of(&request, &[CHANNELS, STREAMS])?;
    if upgrade.protocol() == STREAMS {
        return upgrade.accept(request, move |upgraded| streams::serve(upgraded, container));
    }
    let ports: Vec<u16> = query
        .iter()
        .filter(|(name, _)| name == "ports")
        .filter_map(|(_, port)| port.parse().ok())
        .collect();
    let [port] = ports[..] else {
        return Err(Failure::bad_request(
            "query parameter \"ports\" names no single port",
        ));
    };
    upgrade.accept(request, move |upgraded| forward(upgraded, container, port))
}

async fn forward(upgraded: Upgraded, container: Arc<dyn Container>, port: u16) {
    let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, None).await;
    if let Err(error) = relay(socket, container, port).await {
        tracing::debug!(error = format!("{error:#}"), port, "forwarding ended");
    }
}

/// Relays until either side ends. Like containerd, ends both directions together.
async fn relay(
    socket: WebSocketStream<TokioIo<Upgraded>>,
    container: Arc<dyn Container>,
    port: u16,
) -> anyhow::Result<()> {
    let (mut sink, mut source) = socket.split();
    for channel in [DATA, ERROR] {
        sink.send(message(channel, &port.to_le_bytes())).await?;
    }
    let mut stream = match connect(container, port).await {
        Ok(stream) => stream,
        Err(error) => {
            sink.send(message(ERROR, failure(port, &error).as_bytes()))
                .await?;
            return Ok(sink.close().await?);
        }
    };
    let (mut reader, mut writer) = stream.split();
    let from_pod = async {
        let mut buffer = vec![0; PIECE];
        loop {
            match reader.read(&mut buffer).await? {
                0 => return Ok(sink.close().await?),
                length => sink.send(message(DATA, &buffer[..length])).await?,
            }
        }
    };
    let to_pod = async {
        while let Some(message) = source.next().await {
            match message? {
                Message::Binary(message) if message.first() == Some(&DATA) => {
                    writer.write_all(&message[1..]).await?
                }
                Message::Close(_) => break,
                _ => {}
            }
        }
        Ok(())
    };
    tokio::select! {
        ended = from_pod => ended,
        ended = to_pod => ended,
    }
}

async fn connect(container: Arc<dyn Container>, port: u16) -> anyhow::Result<TcpStream> {
    let connected = tokio::task::spawn_blocking(move || container.connect(port)).await;
    of_tokio(connected.context("connect").flatten()?)
}

/// Returns the kubelet's error for an unreachable port.
fn failure(port: u16, error: &anyhow::Error) -> String {
    format!("an error occurred forwarding {port}: {error:#}")
}

fn of_tokio(stream: std::net::TcpStream) -> anyhow::Result<TcpStream> {
    stream.set_nonblocking(true)?;
    Ok::<_, io::Error>(TcpStream::from_std(stream)?).map_err(Into::into)
}

fn message(channel: u8, data: &[u8]) -> Message {
    Message::Binary([&[channel], data].concat().into())
}
