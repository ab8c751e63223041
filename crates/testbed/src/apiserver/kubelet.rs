//! The kubelet's part of the API: exec and port-forward over WebSocket, and logs.

use std::fmt::Debug;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, ExitStatus};
use std::sync::Arc;

use anyhow::Context;
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::failure::{Failure, Outcome};
use super::http::Answer;
use super::portforward;
use super::shared::Shared;

/// The sub-protocols of Kubernetes, in order of preference.
const PROTOCOLS: [&str; 2] = ["v5.channel.k8s.io", "v4.channel.k8s.io"];
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const STATUS: u8 = 3;
/// The messages that may wait for the client.
const QUEUE: usize = 16;

/// A container, with the operations of its node's kubelet.
pub trait Container: Debug + Send + Sync {
    /// Starts a command in the container, with pipes for its input and output.
    fn exec(&self, command: &[String]) -> anyhow::Result<Child>;
    fn log(&self) -> anyhow::Result<String>;
    /// Connects to a port from inside the pod, like the container runtime.
    fn connect(&self, port: u16) -> anyhow::Result<TcpStream>;
}

const PORT_FORWARD: &str = "pods/portforward";

/// A kubelet path: `/api/v1/namespaces/NAMESPACE/pods/NAME/exec`, `/log` or `/portforward`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked<'a> {
    namespace: &'a str,
    pod: &'a str,
    what: &'a str,
}

impl<'a> Asked<'a> {
    pub(crate) fn of(path: &'a str) -> Option<Self> {
        let parts: Vec<_> = path.trim_matches('/').split('/').collect();
        match parts[..] {
            [
                "api",
                "v1",
                "namespaces",
                namespace,
                "pods",
                pod,
                what @ ("exec" | "log" | "portforward"),
            ] => Some(Self {
                namespace,
                pod,
                what,
            }),
            _ => None,
        }
    }
}

/// Answers like the kubelet of the pod's node.
pub(crate) async fn answer(
    shared: &Shared,
    asked: &Asked<'_>,
    request: Request<Incoming>,
) -> Outcome<Answer> {
    let key = (asked.namespace.to_owned(), asked.pod.to_owned());
    let container = shared.read(|state| state.containers.get(&key).cloned());
    let container =
        container.ok_or_else(|| Failure::new(404, format!("pods \"{}\" not found", asked.pod)))?;
    let query: Vec<(String, String)> =
        form_urlencoded::parse(request.uri().query().unwrap_or_default().as_bytes())
            .into_owned()
            .collect();
    match asked.what {
        "log" => log(container.as_ref(), &query),
        "portforward" => {
            // The verb of a WebSocket request, and the verb that servers from 1.35 on also
            // authorise.
            for verb in ["get", "create"] {
                shared.change(|state| state.traffic.asked(verb, "", PORT_FORWARD));
                if let Some(failure) = shared.read(|state| state.faults.answer(verb, PORT_FORWARD))
                {
                    return Err(failure);
                }
            }
            portforward::answer(container, &query, request)
        }
        _ => exec(container, &query, request).await,
    }
}

fn log(container: &dyn Container, query: &[(String, String)]) -> Outcome<Answer> {
    if query
        .iter()
        .any(|(name, value)| name == "previous" && value == "true")
    {
        return Err(Failure::bad_request(
            "previous terminated container not found",
        ));
    }
    let text = container
        .log()
        .map_err(|error| Failure::unexplained(format!("{error:#}")))?;
    let tail = query
        .iter()
        .find(|(name, _)| name == "tailLines")
        .and_then(|(_, lines)| lines.parse().ok());
    let lines: Vec<_> = text.lines().collect();
    let skipped = lines.len().saturating_sub(tail.unwrap_or(usize::MAX));
    let text: String = lines[skipped..]
        .iter()
        .map(|line| format!("{line}\n"))
        .collect();
    Ok(Response::new(
        Full::new(Bytes::from(text))
            .map_err(|never| match never {})
            .boxed_unsync(),
    ))
}

/// Starts the command, then upgrades to WebSocket: like an API server, errors precede the upgrade.
async fn exec(
    container: Arc<dyn Container>,
    query: &[(String, String)],
    request: Request<Incoming>,
) -> Outcome<Answer> {
    let upgrade = Upgrade::of(&request, &PROTOCOLS)?;
    let command: Vec<_> = query
        .iter()
        .filter(|(name, _)| name == "command")
        .map(|(_, word)| word.clone())
        .collect();
    let child = tokio::task::spawn_blocking(move || container.exec(&command)).await;
    let child = child.context("start the command").flatten();
    let mut child =
        child.map_err(|error| Failure::unexplained(format!("container not found: {error:#}")))?;
    if !query
        .iter()
        .any(|(name, value)| name == "stdin" && value == "true")
    {
        child.stdin = None;
    }
    upgrade.accept(request, |upgraded| stream(upgraded, child))
}

/// A client's request to upgrade to WebSocket.
pub(super) struct Upgrade {
    protocol: &'static str,
    accept: String,
}

impl Upgrade {
    /// Parses the upgrade. Uses the first of `protocols` that the client offers.
    pub(super) fn of(request: &Request<Incoming>, protocols: &[&'static str]) -> Outcome<Self> {
        let text = |name: header::HeaderName| {
            request
                .headers()
                .get(name)
                .and_then(|value| value.to_str().ok())
                .unwrap_or_default()
                .to_owned()
        };
        let offered = text(header::SEC_WEBSOCKET_PROTOCOL);
        let protocol = protocols
            .iter()
            .find(|protocol| offered.split(',').any(|one| one.trim() == **protocol));
        let protocol =
            protocol.ok_or_else(|| Failure::bad_request("no known protocol is offered"))?;
        Ok(Self {
            protocol,
            accept: derive_accept_key(text(header::SEC_WEBSOCKET_KEY).as_bytes()),
        })
    }

    pub(super) fn protocol(&self) -> &'static str {
        self.protocol
    }

    /// Accepts the upgrade and continues with `work`.
    pub(super) fn accept<F: Future<Output = ()> + Send + 'static>(
        self,
        mut request: Request<Incoming>,
        work: impl FnOnce(Upgraded) -> F + Send + 'static,
    ) -> Outcome<Answer> {
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            match upgrade.await {
                Ok(upgraded) => work(upgraded).await,
                Err(error) => tracing::debug!(%error, "no upgrade"),
            }
        });
        let mut answer = Response::new(
            Full::default()
                .map_err(|never| match never {})
                .boxed_unsync(),
        );
        *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = [
            (header::CONNECTION, "Upgrade"),
            (header::UPGRADE, "websocket"),
            (header::SEC_WEBSOCKET_ACCEPT, &self.accept),
            (header::SEC_WEBSOCKET_PROTOCOL, self.protocol),
        ];
        for (name, value) in headers {
            let value = value
                .parse()
                .map_err(|_| Failure::unexplained("a header cannot be written"))?;
            answer.headers_mut().insert(name, value);
        }
        Ok(answer)
    }
}

/// Streams a command's input, output and exit status. If the client disconnects, kills the command, like
/// containerd.
async fn stream(upgraded: Upgraded, mut child: Child) {
    let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, None).await;
    let (mut sink, mut source) = socket.split();
    let (sender, mut messages) = mpsc::channel::<Vec<u8>>(QUEUE);
    let pipes = [
        (
            STDOUT,
            child
                .stdout
                .take()
                .map(|pipe| Box::new(pipe) as Box<dyn Read + Send>),
        ),
        (
            STDERR,
            child
                .stderr
                .take()
                .map(|pipe| Box::new(pipe) as Box<dyn Read + Send>),
        ),
    ];
    for (channel, pipe) in pipes {
        let (sender, Some(pipe)) = (sender.clone(), pipe) else {
            continue;
        };
        tokio::task::spawn_blocking(move || pump(channel, pipe, &sender));
    }
    drop(sender);
    let (input, typed) = std::sync::mpsc::channel();
    if let Some(stdin) = child.stdin.take() {
        tokio::task::spawn_blocking(move || feed(stdin, &typed));
    }
    loop {
        tokio::select! {
            message = messages.recv() => match message {
                Some(message) => if sink.send(Message::Binary(message.into())).await.is_err() {
                    break;
                },
                None => {
                    let status = child.wait().map_or(Value::Null, ended);
                    let message = [&[STATUS], status.to_string().as_bytes()].concat();
                    // The client may have disconnected.
                    let _ = sink.send(Message::Binary(message.into())).await;
                    let _ = sink.send(Message::Close(None)).await;
                    break;
                }
            },
            message = source.next() => match message {
                // The command may read no input.
                Some(Ok(Message::Binary(message))) => if message.first() == Some(&STDIN) {
                    let _ = input.send(message);
                },
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                _ => break,
            },
        }
    }
    let _ = child.kill(); // It may have ended already.
    let _ = child.wait();
}

/// Writes the client's messages to the command until either ends.
fn feed(mut stdin: impl Write, typed: &std::sync::mpsc::Receiver<Bytes>) {
    while let Ok(message) = typed.recv() {
        if stdin
            .write_all(&message[1..])
            .and_then(|()| stdin.flush())
            .is_err()
        {
            return;
        }
    }
}

fn pump(channel: u8, mut pipe: impl Read, sender: &mpsc::Sender<Vec<u8>>) {
    let mut buffer = [0; 32_768];
    while let Ok(read @ 1..) = pipe.read(&mut buffer) {
        if sender
            .blocking_send([&[channel], &buffer[..read]].concat())
            .is_err()
        {
            return;
        }
    }
}

/// Returns the Status of a finished command.
fn ended(status: ExitStatus) -> Value {
    if status.success() {
        return json!({"metadata": {}, "status": "Success"});
    }
    // A container runtime reports a signal as shells do.
    let code = status.code().unwrap_or(137).to_string();
    json!({
        "metadata": {}, "status": "Failure", "message": format!("command terminated with exit code {code}"),
        "reason": "NonZeroExitCode", "details": {"causes": [{"reason": "ExitCode", "message": code}]},
    })
}
