//! Questions to CoreDNS through its ClusterIP while its pods come and go.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::Args;

use crate::clients::{self, Client, OUTSIDE};
use crate::command::output;
use crate::network::DNS;
use crate::parts::Parts;
use crate::state::State;
use crate::web;

/// The time limit for an answer. A lost datagram is a failure: no question is repeated.
const ANSWER: Duration = Duration::from_secs(2);
/// The time between two questions of a client.
const PAUSE: Duration = Duration::from_millis(5);
/// The name of each question.
const NAME: &str = "kubernetes.default.svc.cluster.local";
const PORT: u16 = 53;
/// The numbers of CoreDNS' pods, one after the other.
const REPLICAS: [&str; 6] = ["4", "1", "3", "2", "4", "2"];

#[derive(Args)]
pub(crate) struct Options {
    /// The number of questions, half of them over TCP
    #[arg(long, default_value_t = 20_000)]
    questions: u32,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let state = State::running()?;
    let targets = [SocketAddr::from((DNS, PORT))];
    let mut clients = web::start(&state, &Parts::of(&state))?;
    // A client outside does not reach ClusterIPs.
    clients.retain(|client| client.name != OUTSIDE);
    for client in &mut clients {
        client.targets = targets.to_vec();
    }
    let each = options.questions / u32::try_from(clients.len())?;
    println!("{} clients, {each} questions each", clients.len());
    let ended = AtomicBool::new(false);
    let failures = thread::scope(|scope| {
        let churn = scope.spawn(|| churn(&state, &ended));
        let asked = clients::in_each(&clients, |client| ask(client, each));
        ended.store(true, Ordering::Relaxed);
        let mut failures = BTreeMap::new();
        for (what, number) in asked?.into_iter().flatten() {
            *failures.entry(what).or_insert(0) += number;
        }
        let changes = churn.join().map_err(|_| anyhow!("the churn panicked"))??;
        println!("CoreDNS changed its number of pods {changes} times");
        Ok::<_, anyhow::Error>(failures)
    })?;
    let failed: u32 = failures.values().sum();
    for (what, number) in &failures {
        println!("    {number} x {what}");
    }
    println!(
        "{} questions, {failed} without an answer",
        each * u32::try_from(clients.len())?
    );
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Scales CoreDNS up and down. Returns the number of changes.
fn churn(state: &State, ended: &AtomicBool) -> Result<u32> {
    let mut changes = 0;
    for replicas in REPLICAS.iter().cycle() {
        if ended.load(Ordering::Relaxed) {
            break;
        }
        let system = ["--namespace=kube-system"];
        let count = format!("--replicas={replicas}");
        output(
            state
                .kubectl()
                .args(system)
                .args(["scale", "deployment/coredns", &count]),
        )?;
        output(state.kubectl().args(system).args([
            "rollout",
            "status",
            "deployment/coredns",
            "--timeout=60s",
        ]))?;
        changes += 1;
    }
    Ok(changes)
}

/// Asks over UDP and TCP in turn. Returns the numbers of failures by kind.
fn ask(client: &Client, number: u32) -> Result<BTreeMap<String, u32>> {
    let mut failures = BTreeMap::new();
    for nth in 0..number {
        let target = client.targets[0];
        let id = u16::try_from(nth & 0xffff)?;
        thread::sleep(PAUSE);
        let (protocol, answered) = if nth.is_multiple_of(2) {
            ("UDP", ask_udp(target, id))
        } else {
            ("TCP", ask_tcp(target, id))
        };
        if let Err(error) = answered {
            let what = format!("{protocol} from {} to {target}: {error}", client.name);
            *failures.entry(what).or_insert(0) += 1;
        }
    }
    Ok(failures)
}

fn ask_udp(target: SocketAddr, id: u16) -> io::Result<()> {
    let any = if target.is_ipv4() { "0.0.0.0" } else { "::" };
    let any: IpAddr = any.parse().map_err(io::Error::other)?;
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_read_timeout(Some(ANSWER))?;
    socket.connect(target)?;
    socket.send(&question(id))?;
    let mut buffer = [0; 1500];
    let length = socket.recv(&mut buffer)?;
    check(&buffer[..length], id)
}

fn ask_tcp(target: SocketAddr, id: u16) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&target, ANSWER)?;
    stream.set_read_timeout(Some(ANSWER))?;
    let question = question(id);
    let length = u16::try_from(question.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), question.as_slice()].concat())?;
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut answer = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut answer)?;
    check(&answer, id)
}

/// Returns a question for the IPv4 address of [`NAME`].
fn question(id: u16) -> Vec<u8> {
    let mut message = Vec::new();
    // Recursion desired; one question.
    for word in [id, 0x0100, 1, 0, 0, 0] {
        message.extend(word.to_be_bytes());
    }
    for label in NAME.split('.') {
        message.push(label.len() as u8);
        message.extend(label.as_bytes());
    }
    message.push(0);
    for word in [1_u16, 1] {
        message.extend(word.to_be_bytes());
    }
    message
}

/// Checks that a message answers the question with at least one record.
fn check(answer: &[u8], id: u16) -> io::Result<()> {
    let word = |at: usize| {
        answer
            .get(at..at + 2)
            .map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    };
    let (Some(found), Some(flags), Some(records)) = (word(0), word(2), word(6)) else {
        return Err(io::Error::other("an answer without a header"));
    };
    let code = flags & 0xf;
    if found != id || code != 0 || records == 0 {
        return Err(io::Error::other(format!(
            "answer {found} to question {id}, code {code}, {records} records"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_is_checked() {
        let mut answer = question(7);
        check(&answer, 7).unwrap_err();
        answer[7] = 1; // One record.
        check(&answer, 7).unwrap();
        check(&answer, 8).unwrap_err();
        answer[3] = 2; // SERVFAIL.
        check(&answer, 7).unwrap_err();
        check(&answer[..4], 7).unwrap_err();
    }
}
