use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::time::Duration;

use tokio::time::timeout;

use super::dial::{Outcome, dial_all};
use super::serve::respond;
use super::{Protocol, QUESTION, Target};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn target_reads_what_it_writes() {
    for target in [
        Target::new(Protocol::Tcp, "[fd00::1]:80").bytes(65_536),
        Target::new(Protocol::Udp, "web:53").times(9),
    ] {
        assert_eq!(target.to_string().parse::<Target>().unwrap(), target);
    }
    for wrong in [
        "tcp/10.0.0.1:80",
        "sctp/10.0.0.1:80/200/1",
        "tcp/10.0.0.1:80/199/1",
        "udp/10.0.0.1:80/200/0",
    ] {
        assert!(wrong.parse::<Target>().is_err(), "{wrong}");
    }
}

#[tokio::test]
async fn reply_tells_a_refusal_from_silence_and_from_a_stall() {
    let port = |at: SocketAddr| at.port();
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let stalls = port(held.local_addr().unwrap());
    let is_silent = port(silent.local_addr().unwrap());
    let gone = port(
        TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap(),
    );
    let targets = [
        Target::new(Protocol::Tcp, format!("127.0.0.1:{stalls}")),
        Target::new(Protocol::Udp, format!("127.0.0.1:{is_silent}")),
        Target::new(Protocol::Tcp, format!("127.0.0.1:{gone}")),
        Target::new(Protocol::Udp, format!("127.0.0.1:{gone}")),
        Target::new(Protocol::Tcp, "name.invalid:80"),
    ];
    let replies = dial_all(&targets, SECOND).await;
    let outcomes: Vec<_> = replies.iter().map(|replies| replies[0].outcome).collect();
    use Outcome::{Refused, Silent, Stalled, Unresolved};
    assert_eq!(outcomes, [Stalled, Silent, Refused, Refused, Unresolved]);
}

#[tokio::test]
async fn server_answers_a_question_and_no_answer_of_a_server() {
    let server = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let client = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    client.connect(server.local_addr().unwrap()).await.unwrap();
    tokio::spawn(respond(server, "server-1".into()));
    let mut answer = [0; 1024];
    client.send(&[QUESTION; 300]).await.unwrap();
    let length = timeout(SECOND, client.recv(&mut answer))
        .await
        .unwrap()
        .unwrap();
    // The server reads datagrams in order, so the next answer would belong to the first datagram.
    client.send(&answer[..length]).await.unwrap();
    client.send(&[]).await.unwrap();
    client.send(&[QUESTION; 400]).await.unwrap();
    assert_eq!(
        (
            length,
            timeout(SECOND, client.recv(&mut answer))
                .await
                .unwrap()
                .unwrap()
        ),
        (300, 400)
    );
}
