//! Packets as text, and back: `tcp S client:1000 > web:80 +5` is a SYN with 5 bytes of payload.
//!
//! Names stand for addresses, so that a table of packets serves both families. A port `$x` stands
//! for the number in the first packet that uses it. `+N` after a packet is the payload length in
//! bytes.
//!
//! - `tcp SA …`: flags as in tcpdump (S, F, R, P, A for `.`). A SYN has the sequence number 1000,
//!   other packets have and acknowledge 1001. `A@N` acknowledges N, `R#N` has the sequence number
//!   N. Text from a frame omits these numbers. `SA=1460` announces that maximum segment size, and
//!   `SA=1460/1` after one byte of padding.
//! - `udp …`
//! - `sctp INIT …`: chunks, as in `COOKIE-ECHO,DATA`; the last chunk has the payload.
//! - `icmp frag-needed=1400 router > web about tcp …`: an ICMP error of a kind in `wire::ICMP`, and
//!   the quoted packet. After `about cut`, the quote has only 8 bytes of the transport and shows no
//!   TCP flags.
//! - `unreachable tcp …`: short for a port unreachable with this packet as a cut quote, from its
//!   destination to its source.
//! - `icmp echo client > web`
//!
//! Brackets before a packet add parts of the IP header. `[options]` or `[options=16]`: bytes of
//! IPv4 options or of an IPv6 destination header. `first=ID` and `later=ID`: a fragment. IPv6 also
//! has `hop`, `routing`, `auth`, `esp`, `none` and `visits` (a routing header with segments left).
//! `atomic`: a fragment header on an unfragmented packet. A later fragment has no ports:
//! `[later=7] udp client > web +64`. After `[first=7] cut tcp …`, the first fragment has only 8
//! bytes of the transport and shows no TCP flags.

mod build;
pub use build::DST_MAC;
mod read;
mod wire;

use std::collections::BTreeMap;
use std::iter;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};

/// The names of one family's addresses, and the ports recorded so far.
#[derive(Clone, Debug, Default)]
pub struct Names {
    addrs: BTreeMap<&'static str, IpAddr>,
    ports: BTreeMap<String, u16>,
}

impl Names {
    pub fn new(addrs: impl IntoIterator<Item = (&'static str, IpAddr)>) -> Self {
        Self {
            addrs: addrs.into_iter().collect(),
            ports: BTreeMap::new(),
        }
    }

    pub fn addr(&self, name: &str) -> Result<IpAddr> {
        self.addrs
            .get(name)
            .copied()
            .with_context(|| format!("no address is called {name}"))
    }

    /// Returns the port `$name`, once a packet has shown it.
    pub fn port(&self, name: &str) -> Option<u16> {
        self.ports.get(name).copied()
    }

    /// Returns the frame of `text`, with valid checksums.
    pub fn frame(&self, text: &str) -> Result<Vec<u8>> {
        build::frame(self, text)
    }

    /// Returns `frame` as text. Verifies all checksums, except where a fragment or a quote has only
    /// a part of the packet.
    pub fn text(&self, frame: &[u8]) -> Result<String> {
        read::frame(self, frame)
    }

    /// Returns `frame` as [`Names::text`] does, and records the ports called `$x` in `expected`.
    /// The result equals `expected` if the frame is as expected.
    pub fn learn(&mut self, frame: &[u8], expected: &str) -> Result<String> {
        let plain = Self {
            ports: BTreeMap::new(),
            ..self.clone()
        }
        .text(frame)?;
        for (found, wanted) in plain.split_whitespace().zip(expected.split_whitespace()) {
            let (Some((_, number)), Some((_, name))) =
                (found.rsplit_once(':'), wanted.rsplit_once(':'))
            else {
                continue;
            };
            if name.starts_with('$') && !self.ports.contains_key(name) {
                self.ports.insert(name.to_owned(), number.parse()?);
            }
        }
        self.text_as(frame, expected)
    }

    /// Returns `frame` as [`Names::text`] does, with the names that `expected` has for peers
    /// wherever they are right: two flows may have the same port.
    pub fn text_as(&self, frame: &[u8], expected: &str) -> Result<String> {
        let text = self.text(frame)?;
        let words = text
            .split(' ')
            .zip(expected.split(' ').chain(iter::repeat("")));
        let words = words.map(
            |(found, wanted)| match (self.peer(found), self.peer(wanted)) {
                (Ok(is), Ok(should_be)) if is == should_be => wanted,
                _ => found,
            },
        );
        Ok(words.collect::<Vec<_>>().join(" "))
    }

    fn peer(&self, text: &str) -> Result<SocketAddr> {
        // Later fragments and ICMP messages have no ports.
        let Some((name, port)) = text.split_once(':') else {
            return Ok(SocketAddr::new(self.addr(text)?, 0));
        };
        let port = match port.strip_prefix('$') {
            Some(_) => *self
                .ports
                .get(port)
                .with_context(|| format!("port {port} is not known yet"))?,
            None => port.parse().with_context(|| format!("port of {text}"))?,
        };
        Ok(SocketAddr::new(self.addr(name)?, port))
    }

    pub fn name(&self, addr: IpAddr) -> String {
        let name = self.addrs.iter().find(|(_, known)| **known == addr);
        name.map_or_else(|| addr.to_string(), |(name, _)| (*name).into())
    }

    fn peer_name(&self, peer: SocketAddr) -> String {
        let name = self
            .ports
            .iter()
            .find(|(_, known)| **known == peer.port())
            .map(|(name, _)| name.clone());
        format!(
            "{}:{}",
            self.name(peer.ip()),
            name.unwrap_or_else(|| peer.port().to_string())
        )
    }
}

#[cfg(test)]
mod tests;
