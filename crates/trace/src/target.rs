//! Parses the packet's addresses on the command line.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use proxy_common::addr::Proto;

/// The default port of a client: the first of Linux's ephemeral ports.
pub(crate) const CLIENT_PORT: u16 = 32_768;

/// A packet's source: `10.244.1.10`, `10.244.1.10:4000`, `fd00::1`, `[fd00::1]:4000`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Client(pub SocketAddr);

impl FromStr for Client {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let whole = text.parse().ok();
        let addr = text
            .strip_prefix('[')
            .and_then(|text| text.strip_suffix(']'))
            .unwrap_or(text);
        let bare = || {
            addr.parse::<IpAddr>()
                .ok()
                .map(|ip| SocketAddr::new(ip, CLIENT_PORT))
        };
        let addr: SocketAddr = whole
            .or_else(bare)
            .ok_or_else(|| format!("{text:?} is not IP or IP:PORT"))?;
        if addr.port() == 0 {
            Err("a client has no port 0".to_owned())
        } else {
            Ok(Self(addr))
        }
    }
}

/// A packet's destination: `10.96.0.10:80`, `10.96.0.10:53/udp`, `[fd00::a]:80/tcp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub addr: SocketAddr,
    pub proto: Proto,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (addr, proto) = text.rsplit_once('/').unwrap_or((text, "tcp"));
        let addr = addr
            .parse()
            .map_err(|_| format!("{addr:?} is not IP:PORT"))?;
        Ok(Self {
            addr,
            proto: protocol(proto)?,
        })
    }
}

/// Parses a protocol's name, case-insensitive.
pub(crate) fn protocol(text: &str) -> Result<Proto, String> {
    match text.to_ascii_lowercase().as_str() {
        "tcp" => Ok(Proto::TCP),
        "udp" => Ok(Proto::UDP),
        "sctp" => Ok(Proto::SCTP),
        other => Err(format!("protocol {other:?} is not one of tcp, udp, sctp")),
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.addr, self.proto)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_may_leave_out_their_port() {
        let cases = [
            ("10.244.1.10", "10.244.1.10:32768"),
            ("10.244.1.10:4000", "10.244.1.10:4000"),
            ("fd00::1", "[fd00::1]:32768"),
            ("[fd00::1]", "[fd00::1]:32768"),
            ("[fd00::1]:4000", "[fd00::1]:4000"),
        ];
        for (text, want) in cases {
            assert_eq!(
                text.parse::<Client>()
                    .map(|client| client.0.to_string())
                    .as_deref(),
                Ok(want),
                "{text}"
            );
        }
        for text in [
            "",
            "web",
            "10.244.1",
            "10.244.1.10:",
            "10.244.1.10:0",
            "fd00::1:99999",
        ] {
            assert!(text.parse::<Client>().is_err(), "{text}");
        }
    }

    #[test]
    fn targets_have_a_port_and_are_tcp_by_default() {
        let cases = [
            ("10.96.0.10:80", "10.96.0.10:80/tcp"),
            ("10.96.0.10:53/UDP", "10.96.0.10:53/udp"),
            ("[fd00::a]:80/sctp", "[fd00::a]:80/sctp"),
        ];
        for (text, want) in cases {
            assert_eq!(
                text.parse::<Target>()
                    .map(|target| target.to_string())
                    .as_deref(),
                Ok(want),
                "{text}"
            );
        }
        for text in ["10.96.0.10", "fd00::a", "10.96.0.10:80/icmp", "web:80"] {
            assert!(text.parse::<Target>().is_err(), "{text}");
        }
    }
}
