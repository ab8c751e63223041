//! The server's side of SCTP: a raw socket per address for all ports.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::UdpSocket;

use super::sctp::{Chunk, Packet, payload};
use super::{WHO, greeting};

/// The names of the servers at an address, by port.
pub(super) type Listeners = Arc<Mutex<BTreeMap<u16, Arc<str>>>>;

/// Answers until the task ends. An INIT for a port without a server, and a packet outside an
/// association, get an ABORT. The raw socket reads and writes like a UDP socket.
pub(super) async fn serve(socket: UdpSocket, listeners: Listeners) {
    let mut associations = BTreeMap::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        // The error is an ICMP message about an earlier answer to a client that is gone.
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else {
            continue;
        };
        let Some(packet) = Packet::decode(payload(from.ip(), &buffer[..length])) else {
            continue;
        };
        let name = listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&packet.dst_port)
            .cloned();
        if name.is_none() && !matches!(packet.chunk, Chunk::Init(_)) {
            continue; // It may be for a client at the same address.
        }
        let peer = SocketAddr::new(from.ip(), packet.src_port);
        let Some((tag, chunk)) = answer(&mut associations, name.as_deref(), peer, &packet) else {
            continue;
        };
        let answer = Packet {
            src_port: packet.dst_port,
            dst_port: packet.src_port,
            tag,
            chunk,
        };
        let _ = socket
            .send_to(&answer.encode(), SocketAddr::new(from.ip(), 0))
            .await; // A failed send counts as a lost packet.
    }
}

/// By peer and own port: own tag, peer's tag, number of sent messages.
type Associations = BTreeMap<(SocketAddr, u16), (u32, u32, u32)>;

fn answer(
    associations: &mut Associations,
    name: Option<&str>,
    peer: SocketAddr,
    packet: &Packet,
) -> Option<(u32, Chunk)> {
    let key = (peer, packet.dst_port);
    match (&packet.chunk, name) {
        (Chunk::Init(peer_tag), None) => Some((*peer_tag, Chunk::Abort)),
        (Chunk::Init(peer_tag), Some(_)) => {
            let tag = rand::random_range(1..u32::MAX);
            Some((
                *peer_tag,
                Chunk::InitAck(tag, peer_tag.to_be_bytes().to_vec()),
            ))
        }
        (Chunk::CookieEcho(cookie), _) => {
            let peer_tag = u32::from_be_bytes(cookie.as_slice().try_into().ok()?);
            associations.insert(key, (packet.tag, peer_tag, 0));
            Some((peer_tag, Chunk::CookieAck))
        }
        (Chunk::Data(_, message), Some(name)) => {
            let Some((_, peer_tag, sent)) = associations
                .get_mut(&key)
                .filter(|(tag, ..)| *tag == packet.tag)
            else {
                return Some((packet.tag, Chunk::Abort));
            };
            *sent += 1;
            let message = if message == WHO {
                greeting(name, peer)
            } else {
                message.clone()
            };
            Some((*peer_tag, Chunk::Data(*sent, message)))
        }
        (Chunk::Abort, _) => {
            associations.remove(&key);
            None
        }
        _ => None,
    }
}
