//! Many connections to a pod's ports over one WebSocket, each with a pair of SPDY streams for data
//! and errors.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::{Context, Result};
use bytes::Bytes;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinSet;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::{PIECE, connect, failure};
use crate::apiserver::kubelet::Container;
use crate::apiserver::spdy::{self, Frame, Reader};

/// The data pieces that may wait for a pod. A full queue blocks the other streams, as in client-go.
const QUEUE: usize = 50;

type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// Serves streams until the client disconnects.
pub(super) async fn serve(upgraded: Upgraded, container: Arc<dyn Container>) {
    let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, None).await;
    let (sink, source) = socket.split();
    let session = Session {
        out: Arc::new(Out(Mutex::new(sink))),
        container,
        is_first: true,
        errors: HashMap::new(),
        pods: HashMap::new(),
        tasks: JoinSet::new(),
    };
    if let Err(error) = session.run(source).await {
        tracing::debug!(error = format!("{error:#}"), "forwarding by streams ended");
    }
}

/// The shared connection to the client.
struct Out(Mutex<SplitSink<Socket, Message>>);

impl Out {
    async fn send(&self, frame: Vec<u8>) -> Result<()> {
        Ok(self
            .0
            .lock()
            .await
            .send(Message::Binary(frame.into()))
            .await?)
    }
}

struct Session {
    out: Arc<Out>,
    container: Arc<dyn Container>,
    /// True before the first accepted stream.
    is_first: bool,
    /// The error streams of connections without a data stream yet, by request number.
    errors: HashMap<String, u32>,
    /// The connections to pods, by data stream.
    pods: HashMap<u32, mpsc::Sender<Bytes>>,
    /// The connections' tasks, which end with the client's connection.
    tasks: JoinSet<()>,
}

impl Session {
    async fn run(mut self, mut source: SplitStream<Socket>) -> Result<()> {
        let mut reader = Reader::new();
        while let Some(message) = source.next().await {
            match message? {
                Message::Binary(bytes) => reader.take(&bytes),
                Message::Close(_) => break,
                _ => continue,
            }
            while let Some(frame) = reader.next()? {
                self.handle(frame).await?;
            }
        }
        Ok(())
    }

    async fn handle(&mut self, frame: Frame) -> Result<()> {
        match frame {
            Frame::Open { stream, headers } => self.open(stream, &headers).await?,
            Frame::Data {
                stream,
                data,
                is_last,
            } => {
                if let Some(pod) = self.pods.get(&stream)
                    && !data.is_empty()
                {
                    let _ = pod.send(data).await; // The pod may have ended.
                }
                if is_last {
                    self.pods.remove(&stream);
                }
            }
            Frame::Reset { stream } => {
                self.pods.remove(&stream);
            }
            Frame::Ping { id } => self.out.send(spdy::ping(id)).await?,
            Frame::Other => {}
        }
        Ok(())
    }

    async fn open(&mut self, stream: u32, headers: &[(String, String)]) -> Result<()> {
        let header = |wanted: &str| {
            let found = headers.iter().find(|(name, _)| name == wanted);
            found
                .map(|(_, value)| value.as_str())
                .with_context(|| format!("a stream without {wanted}"))
        };
        let request = header("requestid")?;
        self.out.send(spdy::accept(stream, self.is_first)).await?;
        self.is_first = false;
        if header("streamtype")? == "error" {
            self.errors.insert(request.to_owned(), stream);
            return Ok(());
        }
        let errors = self
            .errors
            .remove(request)
            .context("a data stream without one for errors")?;
        let port = header("port")?.parse().context("read a port")?;
        let (to_pod, from_client) = mpsc::channel(QUEUE);
        self.pods.insert(stream, to_pod);
        while self.tasks.try_join_next().is_some() {}
        let connection = Connection {
            out: self.out.clone(),
            data: stream,
            errors,
        };
        self.tasks
            .spawn(connection.forward(self.container.clone(), port, from_client));
        Ok(())
    }
}

/// A connection to a pod, with its two streams.
struct Connection {
    out: Arc<Out>,
    data: u32,
    errors: u32,
}

impl Connection {
    async fn forward(
        self,
        container: Arc<dyn Container>,
        port: u16,
        from_client: mpsc::Receiver<Bytes>,
    ) {
        let ended = async {
            if let Err(error) = self.relay(container, port, from_client).await {
                self.out
                    .send(spdy::data(
                        self.errors,
                        failure(port, &error).as_bytes(),
                        false,
                    ))
                    .await?;
            }
            self.out.send(spdy::data(self.data, &[], true)).await?;
            self.out.send(spdy::data(self.errors, &[], true)).await
        };
        let _ = ended.await; // The client may have disconnected.
    }

    /// Relays until either side ends, like a single port.
    async fn relay(
        &self,
        container: Arc<dyn Container>,
        port: u16,
        mut from_client: mpsc::Receiver<Bytes>,
    ) -> Result<()> {
        let mut stream = connect(container, port).await?;
        let (mut reader, mut writer) = stream.split();
        let from_pod = async {
            let mut buffer = vec![0; PIECE];
            loop {
                match reader.read(&mut buffer).await? {
                    0 => return Ok(()),
                    length => {
                        self.out
                            .send(spdy::data(self.data, &buffer[..length], false))
                            .await?
                    }
                }
            }
        };
        let to_pod = async {
            while let Some(data) = from_client.recv().await {
                writer.write_all(&data).await?;
            }
            Ok(())
        };
        tokio::select! {
            ended = from_pod => ended,
            ended = to_pod => ended,
        }
    }
}
