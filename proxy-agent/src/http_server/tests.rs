use std::net::{IpAddr, Ipv4Addr};

use axum::routing::any;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::*;

const DEADLINE: Duration = Duration::from_secs(30);
const REQUEST: &str = "GET / HTTP/1.1\r\nHost: node\r\n\r\n";

#[test]
fn client_with_loopback_address_is_on_the_host() {
    for addr in [
        "127.0.0.1:5",
        "127.9.9.9:5",
        "[::1]:5",
        "[::ffff:127.0.0.1]:5",
    ] {
        assert_eq!(
            addr.parse::<SocketAddr>().unwrap().client(),
            Client::OnHost,
            "{addr}"
        );
    }
    for addr in [
        "192.0.2.1:5",
        "[fd00::1]:5",
        "[::ffff:192.0.2.1]:5",
        "0.0.0.0:5",
    ] {
        assert_eq!(
            addr.parse::<SocketAddr>().unwrap().client(),
            Client::Elsewhere,
            "{addr}"
        );
    }
}

/// Three pods' ordinary connections wait to be accepted by a busy agent. Then a load balancer
/// connects.
#[tokio::test]
async fn probe_that_waits_behind_connections_of_three_pods_is_answered() {
    let listener = bind((Ipv4Addr::LOCALHOST, 0).into(), true).unwrap();
    let at = listener.local_addr().unwrap();
    let mut pods = Vec::new();
    for host in [2, 3, 4].repeat(300) {
        pods.push(connect(host, at).await);
    }
    let mut probe = connect(9, at).await;
    probe.write_all(REQUEST.as_bytes()).await.unwrap();
    let answer = async { read_some(&mut probe).await };
    tokio::select! {
        answer = answer => assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}"),
        () = serve(listener, router(), Room::default().place()) => unreachable!("a server does not end"),
    }
}

#[tokio::test(start_paused = true)]
async fn header_of_16_kib_is_read_and_a_longer_one_refused() {
    for (bytes, status) in [
        (15 << 10, "HTTP/1.1 200"),
        (17 << 10, "HTTP/1.1 431"),
        (400 << 10, "HTTP/1.1 431"),
    ] {
        let (mut client, _served) = conversation(false);
        let header = format!(
            "GET / HTTP/1.1\r\nHost: node\r\nX: {}\r\n\r\n",
            "x".repeat(bytes)
        );
        // The server stops reading at its own limit.
        let _sent = client.write_all(header.as_bytes()).await;
        assert!(read_some(&mut client).await.starts_with(status), "{bytes}");
    }
}

#[tokio::test(start_paused = true)]
async fn half_a_header_ends_the_connection_after_5_seconds() {
    for (sent, speaks_http2) in [
        ("", false),
        (&REQUEST[..20], false),
        ("", true),
        (&REQUEST[..20], true),
        ("PRI * HTTP", true),
    ] {
        let since = Instant::now();
        let (mut client, served) = conversation(speaks_http2);
        client.write_all(sent.as_bytes()).await.unwrap();
        served.await.unwrap();
        assert_eq!(since.elapsed().as_secs(), 5, "{sent:?} {speaks_http2}");
    }
}

/// `kubectl kpx ui` has many answers in one stream through the agent's socket.
#[tokio::test]
async fn local_client_may_speak_either_version_of_http() {
    let (mut client, _served) = conversation(true);
    client.write_all(REQUEST.as_bytes()).await.unwrap();
    assert!(read_some(&mut client).await.starts_with("HTTP/1.1 200"));

    let (client, _served) = conversation(true);
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(client))
            .await
            .unwrap();
    tokio::spawn(connection);
    for _ in 0..2 {
        let request = http::Request::get("http://kpx/")
            .body(String::new())
            .unwrap();
        let answer = timeout(DEADLINE, sender.send_request(request))
            .await
            .unwrap();
        assert_eq!(answer.unwrap().status(), StatusCode::OK);
    }
}

/// Returns the client's side of a connection, and the server's task.
fn conversation(speaks_http2: bool) -> (DuplexStream, JoinHandle<()>) {
    let (client, server) = duplex(1 << 10);
    (
        client,
        tokio::spawn(converse(server, router(), speaks_http2)),
    )
}

fn router() -> Router {
    Router::new().fallback(any("well"))
}

/// Connects from 127.0.0.`host`.
async fn connect(host: u8, to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket
        .bind((IpAddr::from([127, 0, 0, host]), 0).into())
        .unwrap();
    let connected = timeout(DEADLINE, socket.connect(to))
        .await
        .expect("the queue of the listener is full");
    let stream = connected.unwrap();
    // The ports must not stay in TIME_WAIT.
    SockRef::from(&stream)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    stream
}

async fn read_some(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> String {
    let mut bytes = [0; 1_024];
    let count = timeout(DEADLINE, stream.read(&mut bytes))
        .await
        .expect("no answer")
        .unwrap();
    String::from_utf8_lossy(&bytes[..count]).into_owned()
}
