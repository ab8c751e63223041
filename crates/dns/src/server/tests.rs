//! Tests of clients that block each other.

use std::future::pending;

use tokio::task::JoinHandle;

use super::*;
use crate::cluster_names::{Known, Wanted};

const PATIENCE: Duration = Duration::from_secs(20);

/// A cluster that never returns the Service `slow`.
#[derive(Clone)]
struct Halting;

impl Cluster for Halting {
    async fn known(&self, wanted: Wanted) -> Option<Known> {
        match wanted {
            Wanted::Service(name) if &*name.name == "slow" => pending().await,
            _ => Some(Known::default()),
        }
    }
}

async fn serve() -> (SocketAddr, JoinHandle<Result<()>>) {
    let zone = Zone::new("cluster.local").unwrap();
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), zone)
        .await
        .unwrap();
    (
        server.address().unwrap(),
        tokio::spawn(server.serve(Halting)),
    )
}

/// Returns a query for the addresses of a Service.
fn question(id: u8, service: &str) -> Vec<u8> {
    let mut bytes = vec![0, id, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in [service, "shop", "svc", "cluster", "local"] {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend(label.as_bytes());
    }
    bytes.extend([0, 0, 1, 0, 1]);
    bytes
}

#[tokio::test]
async fn slow_question_holds_no_other_up() {
    let (server, task) = serve().await;
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    for (id, service) in [(1, "slow"), (2, "web")] {
        client
            .send_to(&question(id, service), server)
            .await
            .unwrap();
    }
    let mut answer = [0; 512];
    timeout(PATIENCE, client.recv_from(&mut answer))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(answer[1], 2);
    task.abort();
}

#[tokio::test]
async fn idle_streams_hold_no_other_up() {
    let (server, task) = serve().await;
    let mut idle = Vec::new();
    for _ in 0..STREAMS {
        idle.push(TcpStream::connect(server).await.unwrap());
    }
    let begun = tokio::time::Instant::now();
    let mut client = TcpStream::connect(server).await.unwrap();
    let request = question(3, "web");
    client
        .write_u16(u16::try_from(request.len()).unwrap())
        .await
        .unwrap();
    client.write_all(&request).await.unwrap();
    timeout(PATIENCE, client.read_u16()).await.unwrap().unwrap();
    assert!(
        begun.elapsed() < IDLE,
        "{:?}: it waits until the others are idle for long",
        begun.elapsed()
    );
    task.abort();
}
