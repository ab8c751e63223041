//! Fills a network namespace's conntrack table by netlink messages, up to the machine's limit.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};
use nix::libc::{AF_INET, AF_INET6, AF_NETLINK};
use socket2::{Domain, Protocol, Socket, Type};

use crate::netns::NetNs;

/// Above all default limits.
const MOST: u32 = 1 << 20;
/// Messages and attributes of linux/nfnetlink_conntrack.h.
const NEW: u16 = 1 << 8;
const DELETE: u16 = NEW | 2;
const NESTED: u16 = 0x8000;
const REQUEST: u16 = 1;
const CREATE: u16 = 0x400;
const NETLINK_NETFILTER: i32 = 12;
/// Placeholders for the client's port and the server's port.
const PORTS: [[u8; 2]; 2] = [[0xfe, 0xdc], [0xdc, 0xfe]];

/// The conntrack table of a namespace, through a socket there.
#[derive(Debug)]
pub struct ConnectionTable<'a> {
    ns: &'a NetNs,
    socket: Socket,
}

impl<'a> ConnectionTable<'a> {
    pub fn of(ns: &'a NetNs) -> Result<Self> {
        let socket = ns.run(|| {
            Socket::new(
                Domain::from(AF_NETLINK),
                Type::RAW,
                Some(Protocol::from(NETLINK_NETFILTER)),
            )
        })?;
        Ok(Self { ns, socket })
    }

    /// Fills the table with established connections, which the kernel does not evict.
    pub fn fill(&self) -> Result<()> {
        let number = |name: &str| -> Result<u32> {
            let path = format!("/proc/sys/net/netfilter/{name}");
            self.ns.read(&path)?.trim().parse().context(path)
        };
        let most = number("nf_conntrack_max")?;
        ensure!(most <= MOST, "a table of {most} takes too long to fill");
        let entry = established();
        let at = |port| {
            entry
                .windows(2)
                .enumerate()
                .filter(move |(_, bytes)| *bytes == port)
                .map(|(at, _)| at)
                .collect()
        };
        let places: [Vec<usize>; 2] = PORTS.map(at);
        let mut batch = Vec::new();
        for nth in 0..most {
            let ports = [(nth % 60_000 + 1_024) as u16, (nth / 60_000 + 1) as u16];
            let start = batch.len();
            batch.extend_from_slice(&entry);
            for (places, port) in places.iter().zip(ports) {
                places.iter().for_each(|at| {
                    batch[start + at..start + at + 2].copy_from_slice(&port.to_be_bytes())
                });
            }
            if batch.len() > 60_000 || nth + 1 == most {
                self.socket.send(&batch)?;
                batch.clear();
            }
        }
        let count = number("nf_conntrack_count")?;
        ensure!(count >= most, "{count} entries of {most}");
        Ok(())
    }

    /// Removes all entries. The kernel recreates those of open connections with their next packets.
    pub fn flush(&self) -> Result<()> {
        for family in [AF_INET, AF_INET6] {
            self.socket
                .send(&message(DELETE, REQUEST, family as u8, &[]))?;
        }
        Ok(())
    }
}

/// Returns the message of a TCP connection, with [`PORTS`] in place of ports.
fn established() -> Vec<u8> {
    let client = Ipv4Addr::new(198, 51, 100, 1);
    let server = Ipv4Addr::new(198, 51, 100, 2);
    let tuple = |kind, src: Ipv4Addr, dst: Ipv4Addr, [sport, dport]: [[u8; 2]; 2]| {
        let addrs = [attribute(1, &src.octets()), attribute(2, &dst.octets())].concat();
        let ports = [
            attribute(1, &[6]),
            attribute(2, &sport),
            attribute(3, &dport),
        ]
        .concat();
        attribute(
            kind | NESTED,
            &[attribute(1 | NESTED, &addrs), attribute(2 | NESTED, &ports)].concat(),
        )
    };
    // Reply seen, assured, confirmed.
    let status = attribute(3, &0xe_u32.to_be_bytes());
    let state = attribute(4 | NESTED, &attribute(1 | NESTED, &attribute(1, &[3])));
    let timeout = attribute(7, &60_u32.to_be_bytes());
    let [sport, dport] = PORTS;
    let tuples = [
        tuple(1, client, server, [sport, dport]),
        tuple(2, server, client, [dport, sport]),
    ]
    .concat();
    message(
        NEW,
        REQUEST | CREATE,
        AF_INET as u8,
        &[tuples, status, state, timeout].concat(),
    )
}

fn message(kind: u16, flags: u16, family: u8, attributes: &[u8]) -> Vec<u8> {
    let length = (20 + attributes.len()) as u32;
    let header = [
        &length.to_ne_bytes()[..],
        &kind.to_ne_bytes(),
        &flags.to_ne_bytes(),
        &[0; 8],
        &[family, 0, 0, 0],
    ];
    [&header.concat(), attributes].concat()
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = (4 + value.len()) as u16;
    let padding = vec![0; value.len().next_multiple_of(4) - value.len()];
    [
        &length.to_ne_bytes()[..],
        &kind.to_ne_bytes(),
        value,
        &padding,
    ]
    .concat()
}
