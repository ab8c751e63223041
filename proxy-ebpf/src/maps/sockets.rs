//! The frontends that sockets have dialled, in a table for TCP and one for UDP.

use aya_ebpf::maps::LruHashMap;
use proxy_common::addr::Proto;
use proxy_common::socket::{Socket, SocketKey};

use super::copied;
use crate::net::Net;

#[inline(always)]
pub fn socket<A: Net>(key: &SocketKey<A>) -> Option<Socket<A>> {
    // If the table is full, an element may change hands while it is copied. One socket then sees another one's peer.
    copied(table(key), key)
}

/// Returns false if there is no room.
#[inline(always)]
pub fn remember_socket<A: Net>(key: &SocketKey<A>, socket: &Socket<A>) -> bool {
    table(key).insert(key, socket, 0).is_ok()
}

#[inline(always)]
pub fn forget_socket<A: Net>(key: &SocketKey<A>) {
    // Hardly ever is there one.
    let _gone = table(key).remove(key);
}

#[inline(always)]
fn table<A: Net>(key: &SocketKey<A>) -> &'static LruHashMap<SocketKey<A>, Socket<A>> {
    if key.proto == Proto::UDP { A::MAPS.udp_sockets } else { A::MAPS.tcp_sockets }
}
