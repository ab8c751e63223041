//! Relays between a connection and a port of a pod: the protocol `v4.channel.k8s.io` of
//! `pods/portforward`, over WebSocket.
//!
//! Each message begins with its channel: 0 for data, 1 for the kubelet's error. The first message
//! of a channel carries the port's number. The protocol has no half-close: a stream ends as a
//! whole.

use std::convert::Infallible;
use std::future::pending;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

const DATA: u8 = 0;
const ERROR: u8 = 1;
/// The maximum size of a message to the pod in bytes.
const PIECE: usize = 32 * 1024;
/// The time without data to the pod before a ping. Load balancers drop idle connections, many after
/// a minute.
const PING: Duration = Duration::from_secs(30);
/// The maximum wait until the server accepts the end of a stream.
const GOODBYE: Duration = Duration::from_secs(1);
/// The maximum size of an error text in bytes.
const TEXT: usize = 1024;

/// An open stream to a port of a pod.
#[derive(Debug)]
pub struct PodStream<S = TokioIo<Upgraded>> {
    socket: WebSocketStream<S>,
    port: u16,
}

impl<S: AsyncRead + AsyncWrite + Unpin> PodStream<S> {
    pub(super) fn new(socket: WebSocketStream<S>, port: u16) -> Self {
        Self { socket, port }
    }

    /// Relays until the pod or the client ends the connection. `Ok` is an orderly end of the pod's
    /// direction, after which the client's socket is closed for writing. A slow receiver blocks
    /// only its own direction.
    ///
    /// The protocol cannot forward the client's FIN. After a FIN, the stream ends once `gone`
    /// completes.
    pub async fn relay(
        self,
        client: impl AsyncRead + AsyncWrite,
        gone: impl Future<Output = ()>,
    ) -> Result<()> {
        let (reader, writer) = tokio::io::split(client);
        let (mut sink, source) = self.socket.split();
        let (has_closed, closed) = oneshot::channel();
        let ended = tokio::select! {
            ended = down(source, writer, self.port, closed, gone) => ended,
            Err(error) = up(&mut sink, reader, has_closed) => Err(error),
        };
        // The server or the client may be gone.
        let _ = timeout(GOODBYE, sink.close()).await;
        ended
    }
}

/// Sends the client's data, and signals the client's FIN. Returns only if reading from the client
/// fails.
async fn up<S: AsyncRead + AsyncWrite + Unpin>(
    sink: &mut SplitSink<WebSocketStream<S>, Message>,
    mut reader: impl AsyncRead + Unpin,
    has_closed: oneshot::Sender<()>,
) -> Result<Infallible> {
    let mut buffer = vec![0; PIECE];
    loop {
        let message = match timeout(PING, reader.read(&mut buffer)).await {
            Err(_) => Message::Ping(Bytes::new()),
            Ok(read) => match read.context("read from the client")? {
                0 => break,
                length => Message::Binary([&[DATA], &buffer[..length]].concat().into()),
            },
        };
        if sink.send(message).await.is_err() {
            break;
        }
    }
    // `down` still delivers the pod's data, and reports how the pod closed the connection.
    let _ = has_closed.send(());
    pending().await
}

/// Passes the pod's data to the client.
async fn down<S: AsyncRead + AsyncWrite + Unpin>(
    mut source: SplitStream<WebSocketStream<S>>,
    mut writer: impl AsyncWrite + Unpin,
    port: u16,
    mut closed: oneshot::Receiver<()>,
    gone: impl Future<Output = ()>,
) -> Result<()> {
    let mut gone = pin!(gone);
    let mut named = [false; 2];
    let mut is_half_closed = false;
    loop {
        let message = tokio::select! {
            message = source.next() => message,
            _ = &mut closed, if !is_half_closed => {
                is_half_closed = true;
                continue;
            }
            () = &mut gone, if is_half_closed => break,
        };
        let Some(message) = message else { break };
        let message = match message.context("receive from the API server")? {
            Message::Binary(message) => message,
            Message::Close(_) => break,
            _ => continue,
        };
        let Some((&channel, data)) = message.split_first() else {
            continue;
        };
        let Some(is_named) = named.get_mut(usize::from(channel)) else {
            bail!("the server sent data on the unknown channel {channel}")
        };
        if !std::mem::replace(is_named, true) {
            if data != port.to_le_bytes() {
                bail!("the server begins with another port than {port}");
            }
        } else if channel == ERROR {
            let text = String::from_utf8_lossy(&data[..data.len().min(TEXT)]);
            bail!("the kubelet reports: {}", text.trim());
        } else {
            writer
                .write_all(data)
                .await
                .context("write to the client")?;
        }
    }
    writer
        .shutdown()
        .await
        .context("close the client's connection")
}

#[cfg(test)]
mod tests {
    use tokio::io::{DuplexStream, duplex};
    use tokio::time::advance;
    use tokio_tungstenite::tungstenite::protocol::Role;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    /// Returns a stream, and the kubelet's side after it sent the port on both channels.
    async fn pair() -> (PodStream<DuplexStream>, WebSocketStream<DuplexStream>) {
        let (ours, theirs) = duplex(1 << 16);
        let ours = WebSocketStream::from_raw_socket(ours, Role::Client, None).await;
        let mut theirs = WebSocketStream::from_raw_socket(theirs, Role::Server, None).await;
        for channel in [DATA, ERROR] {
            theirs
                .send(message(channel, &8080_u16.to_le_bytes()))
                .await
                .unwrap();
        }
        (PodStream::new(ours, 8080), theirs)
    }

    fn message(channel: u8, data: &[u8]) -> Message {
        Message::Binary([&[channel], data].concat().into())
    }

    async fn next(kubelet: &mut WebSocketStream<DuplexStream>) -> Message {
        kubelet.next().await.unwrap().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn pod_answers_after_client_has_closed_its_direction() {
        let (stream, mut kubelet) = pair().await;
        let (mut client, local) = duplex(1 << 16);
        let relay = tokio::spawn(stream.relay(local, pending()));
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        assert_eq!(next(&mut kubelet).await, message(DATA, b"question"));
        for _ in 0..3 {
            advance(Duration::from_secs(20)).await;
            kubelet.send(message(DATA, b"answer ")).await.unwrap();
        }
        kubelet.close(None).await.unwrap();
        let mut text = String::new();
        client.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "answer answer answer ");
        relay.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn stream_ends_once_a_client_that_has_closed_is_gone() {
        let (stream, _kubelet) = pair().await;
        let (mut client, local) = duplex(1 << 16);
        client.shutdown().await.unwrap();
        let (close, closed) = oneshot::channel::<()>();
        let mut relay = tokio::spawn(stream.relay(local, async { drop(closed.await) }));
        assert!(
            timeout(HOUR, &mut relay).await.is_err(),
            "the pod may answer yet"
        );
        drop(close);
        relay.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn client_that_says_nothing_is_not_gone() {
        let (stream, _kubelet) = pair().await;
        let (_client, local) = duplex(1 << 16);
        assert!(timeout(HOUR, stream.relay(local, async {})).await.is_err());
    }

    #[tokio::test]
    async fn error_of_the_kubelet_ends_the_stream() {
        let (stream, mut kubelet) = pair().await;
        kubelet
            .send(message(ERROR, b"connection refused\n"))
            .await
            .unwrap();
        let (_client, local) = duplex(1 << 16);
        let error = stream.relay(local, pending()).await.unwrap_err();
        assert_eq!(error.to_string(), "the kubelet reports: connection refused");
    }

    #[tokio::test]
    async fn server_that_names_another_port_is_not_believed() {
        let (ours, theirs) = duplex(1 << 16);
        let ours = WebSocketStream::from_raw_socket(ours, Role::Client, None).await;
        let mut theirs = WebSocketStream::from_raw_socket(theirs, Role::Server, None).await;
        theirs.send(message(DATA, b"no")).await.unwrap();
        let (_client, local) = duplex(1 << 16);
        let error = PodStream::new(ours, 8080)
            .relay(local, pending())
            .await
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "the server begins with another port than 8080"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn silent_stream_shows_that_it_lives() {
        let (stream, mut kubelet) = pair().await;
        let (_client, local) = duplex(1 << 16);
        let relay = tokio::spawn(stream.relay(local, pending()));
        assert!(next(&mut kubelet).await.is_ping());
        relay.abort();
    }

    /// A client that does not read blocks the pod's direction only.
    #[tokio::test]
    async fn slow_client_holds_the_pod_back() {
        let (stream, mut kubelet) = pair().await;
        let (mut client, local) = duplex(1024);
        let relay = tokio::spawn(stream.relay(local, pending()));
        let mut sent = 0;
        while timeout(
            Duration::from_millis(200),
            kubelet.send(message(DATA, &[7; PIECE])),
        )
        .await
        .is_ok()
        {
            sent += 1;
            assert!(sent < 100, "everything is taken");
        }
        client.write_all(b"on").await.unwrap();
        loop {
            if next(&mut kubelet).await == message(DATA, b"on") {
                break;
            }
        }
        relay.abort();
    }
}
