//! The virtual servers of IPVS in this network namespace, through generic netlink (linux/ip_vs.h).

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, Result, bail};
use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST};
use proxy_common::addr::Proto;
use rtnetlink::proto::{ConnectionHandle, new_connection};
use rtnetlink::sys::protocols::NETLINK_GENERIC;

use super::netfilter::attrs::Attrs;
use super::netlink::{deleted, dumped, kernel};
use super::raw::{self, Message, attribute, nested};

/// This file exists if IPVS is loaded. A netlink request for the IPVS family would load the module.
const IP_VS: &str = "/proc/thread-self/net/ip_vs";
/// The netlink family that resolves the names of other families (linux/genetlink.h).
const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// The length of `struct genlmsghdr`.
const GENL_HEAD_LEN: usize = 4;

const IPVS_CMD_DEL_SERVICE: u8 = 3;
const IPVS_CMD_GET_SERVICE: u8 = 4;
const IPVS_CMD_ATTR_SERVICE: u16 = 1;
const IPVS_SVC_ATTR_AF: u16 = 1;
const IPVS_SVC_ATTR_PROTOCOL: u16 = 2;
const IPVS_SVC_ATTR_ADDR: u16 = 3;
const IPVS_SVC_ATTR_PORT: u16 = 4;

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;

/// A virtual server with an address. Virtual servers by firewall mark are excluded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VirtualServer {
    pub proto: Proto,
    pub at: SocketAddr,
}

impl fmt::Display for VirtualServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.at, self.proto)
    }
}

/// Lists the virtual servers; empty if IPVS is not loaded.
pub async fn virtual_servers() -> Result<Vec<VirtualServer>> {
    if fs::metadata(IP_VS).is_err() {
        return Ok(Vec::new());
    }
    let (mut connection, handle, _) =
        new_connection(NETLINK_GENERIC).context("open a netlink socket for IPVS")?;
    // The message that ends a dump carries its error.
    connection.set_forward_done(true);
    tokio::select! {
        servers = list(handle) => servers.context("list the virtual servers of IPVS"),
        () = connection => bail!("the netlink socket for IPVS has failed"),
    }
}

/// Deletes virtual servers and so their connections. Returns the number of deleted servers, even
/// after a failure. Servers that are already gone count as deleted.
pub async fn delete(servers: &[VirtualServer]) -> (usize, Result<()>) {
    let mut deleted = 0;
    let result = async {
        let (connection, handle, _) =
            new_connection(NETLINK_GENERIC).context("open a netlink socket for IPVS")?;
        tokio::select! {
            result = delete_all(handle, servers, &mut deleted) => result,
            () = connection => bail!("the netlink socket for IPVS has failed"),
        }
    };
    let result = result.await;
    (deleted, result)
}

async fn list(handle: ConnectionHandle<Message>) -> io::Result<Vec<VirtualServer>> {
    let family = family(&handle).await?;
    let request = raw::request(
        family,
        NLM_F_REQUEST | NLM_F_DUMP,
        head(IPVS_CMD_GET_SERVICE).to_vec(),
    );
    let answers = handle
        .request(request, kernel())
        .map_err(io::Error::other)?;
    let mut servers = Vec::new();
    dumped(answers, |message| servers.extend(server(&message))).await?;
    Ok(servers)
}

async fn delete_all(
    handle: ConnectionHandle<Message>,
    servers: &[VirtualServer],
    number: &mut usize,
) -> Result<()> {
    let family = family(&handle).await.context("find IPVS")?;
    for server in servers {
        let request = raw::request(family, NLM_F_REQUEST | NLM_F_ACK, name(server));
        let answers = handle
            .request(request, kernel())
            .map_err(io::Error::other)?;
        match deleted(answers).await {
            Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => {}
            result => drop(result.with_context(|| format!("delete the virtual server {server}"))?),
        }
        *number += 1;
    }
    Ok(())
}

async fn family(handle: &ConnectionHandle<Message>) -> io::Result<u16> {
    let asked = [
        &[CTRL_CMD_GETFAMILY, 1, 0, 0][..],
        &attribute(CTRL_ATTR_FAMILY_NAME, b"IPVS\0"),
    ]
    .concat();
    let request = raw::request(GENL_ID_CTRL, NLM_F_REQUEST, asked);
    let message = raw::first(handle, request).await?;
    attrs(&message)
        .and_then(|attrs| attrs.get(CTRL_ATTR_FAMILY_ID)?.try_into().ok())
        .map(u16::from_ne_bytes)
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Returns the header of an IPVS request, version 1.
const fn head(command: u8) -> [u8; GENL_HEAD_LEN] {
    [command, 1, 0, 0]
}

/// Returns the attributes that identify a virtual server in a request.
fn name(server: &VirtualServer) -> Vec<u8> {
    let (family, mut addr) = match server.at.ip() {
        IpAddr::V4(addr) => (AF_INET, addr.octets().to_vec()),
        IpAddr::V6(addr) => (AF_INET6, addr.octets().to_vec()),
    };
    // The kernel's union has the size of an IPv6 address.
    addr.resize(16, 0);
    let service = [
        attribute(IPVS_SVC_ATTR_AF, &family.to_ne_bytes()),
        attribute(
            IPVS_SVC_ATTR_PROTOCOL,
            &u16::from(server.proto.0).to_ne_bytes(),
        ),
        attribute(IPVS_SVC_ATTR_ADDR, &addr),
        attribute(IPVS_SVC_ATTR_PORT, &server.at.port().to_be_bytes()),
    ];
    [
        &head(IPVS_CMD_DEL_SERVICE)[..],
        &nested(IPVS_CMD_ATTR_SERVICE, &service.concat()),
    ]
    .concat()
}

/// Returns the virtual server in a message; `None` for a server by firewall mark.
fn server(message: &Message) -> Option<VirtualServer> {
    let service = attrs(message)?.inside(IPVS_CMD_ATTR_SERVICE).ok()?;
    let u16_of = |kind| Some(u16::from_ne_bytes(service.get(kind)?.try_into().ok()?));
    let addr = service.get(IPVS_SVC_ATTR_ADDR)?;
    let addr: IpAddr = match u16_of(IPVS_SVC_ATTR_AF)? {
        AF_INET => Ipv4Addr::from(<[u8; 4]>::try_from(addr.get(..4)?).ok()?).into(),
        AF_INET6 => Ipv6Addr::from(<[u8; 16]>::try_from(addr.get(..16)?).ok()?).into(),
        _ => return None,
    };
    let port = u16::from_be_bytes(service.get(IPVS_SVC_ATTR_PORT)?.try_into().ok()?);
    let proto = Proto(u8::try_from(u16_of(IPVS_SVC_ATTR_PROTOCOL)?).ok()?);
    Some(VirtualServer {
        proto,
        at: SocketAddr::new(addr, port),
    })
}

fn attrs(message: &Message) -> Option<Attrs<'_>> {
    Attrs::parse(message.bytes.get(GENL_HEAD_LEN..)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_reads_as_it_was_named() {
        for (at, proto) in [
            ("10.96.0.1:443", Proto::TCP),
            ("[fd00::1]:53", Proto::UDP),
            ("192.0.2.1:1", Proto::SCTP),
        ] {
            let named = VirtualServer {
                proto,
                at: at.parse().unwrap(),
            };
            assert_eq!(
                server(&Message {
                    kind: 0,
                    bytes: name(&named)
                }),
                Some(named)
            );
        }
    }

    #[test]
    fn a_server_of_a_mark_is_none() {
        let of_mark = [
            attribute(IPVS_SVC_ATTR_AF, &AF_INET.to_ne_bytes()),
            attribute(5, &7_u32.to_ne_bytes()),
        ];
        let bytes = [
            &head(1)[..],
            &nested(IPVS_CMD_ATTR_SERVICE, &of_mark.concat()),
        ]
        .concat();
        assert_eq!(server(&Message { kind: 0, bytes }), None);
        assert_eq!(
            server(&Message {
                kind: 0,
                bytes: vec![1, 1, 0]
            }),
            None
        );
    }
}
