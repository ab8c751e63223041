//! One question to a frontend.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use crate::load::datagram;

/// Names of the addresses that a backend can see.
pub(crate) type Names = BTreeMap<IpAddr, String>;

/// The time limit for an answer. The second attempt is for a lost packet.
const ANSWER: Duration = Duration::from_millis(900);
const ATTEMPTS: usize = 2;
/// The number of questions that shows whether one backend gets them all: by chance it does in one of
/// 128 runs.
const OF_AFFINITY: usize = 8;

/// The answer to a process of a node whose datagram a rule of that node drops or rejects.
pub(crate) const NOT_PERMITTED: &str = "not permitted";

#[derive(Clone, Copy, Debug)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

pub(crate) const PROTOCOLS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

impl Protocol {
    /// Returns `tcp4` and the like.
    pub(crate) fn name(self, address: SocketAddr) -> String {
        let family = if address.is_ipv4() { 4 } else { 6 };
        match self {
            Self::Tcp => format!("tcp{family}"),
            Self::Udp => format!("udp{family}"),
        }
    }

    fn ask(self, target: SocketAddr, what: &str) -> io::Result<String> {
        match self {
            Self::Udp => datagram(target, what.as_bytes(), ANSWER),
            Self::Tcp => {
                let mut stream = TcpStream::connect_timeout(&target, ANSWER)?;
                stream.set_read_timeout(Some(ANSWER))?;
                write!(stream, "GET /{what} HTTP/1.0\r\n\r\n")?;
                let mut answer = String::new();
                stream.read_to_string(&mut answer)?;
                let (_, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
                Ok(body.to_owned())
            }
        }
    }
}

/// Returns whom the backend saw, how many of two backends answered with session affinity, or what
/// came instead of an answer.
pub(crate) fn ask(protocol: Protocol, target: SocketAddr, affinity: bool, names: &Names) -> String {
    let answered = if affinity {
        (0..OF_AFFINITY)
            .map(|_| attempts(|| protocol.ask(target, "hostname")))
            .collect::<io::Result<BTreeSet<_>>>()
            .map(|backends| format!("answers of {} backend", backends.len()))
    } else {
        attempts(|| protocol.ask(target, "clientip")).map(|source| named(&source, names))
    };
    answered.unwrap_or_else(|error| kind(&error))
}

fn attempts<T>(mut ask: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut answered = ask();
    for _ in 1..ATTEMPTS {
        match &answered {
            Err(error) if is_timeout(error) => answered = ask(),
            _ => break,
        }
    }
    answered
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock)
}

fn named(source: &str, names: &Names) -> String {
    let name = source
        .trim()
        .parse::<SocketAddr>()
        .ok()
        .and_then(|source| names.get(&source.ip()));
    format!("answer to {}", name.map_or(source, String::as_str))
}

fn kind(error: &io::Error) -> String {
    match error.kind() {
        _ if is_timeout(error) => "silence".to_owned(),
        ErrorKind::ConnectionRefused => "refusal".to_owned(),
        ErrorKind::PermissionDenied => NOT_PERMITTED.to_owned(),
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => "unreachable".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_has_the_name_of_its_address() {
        let names = BTreeMap::from([("fd00::1".parse().unwrap(), "n1".to_owned())]);
        assert_eq!(named("[fd00::1]:4711", &names), "answer to n1");
        assert_eq!(named("10.0.0.1:4711", &names), "answer to 10.0.0.1:4711");
    }

    #[test]
    fn only_silence_is_asked_again() {
        let times = |kind: ErrorKind| {
            let mut times = 0;
            attempts(|| {
                times += 1;
                Err::<(), _>(kind.into())
            })
            .unwrap_err();
            times
        };
        assert_eq!(times(ErrorKind::WouldBlock), ATTEMPTS);
        assert_eq!(times(ErrorKind::ConnectionRefused), 1);
    }
}
