//! The frontends that sockets have dialled. A TCP socket keeps its own, and the time of its first
//! SYN, in storage that the kernel frees with it; those of UDP sockets are in a table.

use aya_ebpf::btf_maps::SkStorage;
use aya_ebpf::macros::{btf_map, map};
use aya_ebpf::maps::HashMap;
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::connect::DialTime;
use proxy_common::maps::NO_PREALLOC;
use proxy_common::socket::{Dialled, LED, PODS_MAX, Socket, SocketKey};

use super::Maps;
use super::copied_here;

#[btf_map]
pub static DIALLED4: SkStorage<Dialled<Addr4>> = SkStorage::new();
#[btf_map]
pub static DIALLED6: SkStorage<Dialled<Addr6>> = SkStorage::new();
#[btf_map]
pub static CONNECTING: SkStorage<DialTime> = SkStorage::new();

#[map]
static SOCKET_PODS: HashMap<u64, u32> = HashMap::with_max_entries(PODS_MAX, NO_PREALLOC);

/// Returns true if this is the cgroup of a pod with socket load balancing.
#[inline(always)]
pub fn is_served_pod(cgroup: u64) -> bool {
    copied_here(&SOCKET_PODS, &cgroup) == Some(LED)
}

#[inline(always)]
pub fn socket<A: Maps>(key: &SocketKey<A>) -> Option<Socket<A>> {
    // If the table is full, the kernel may reuse an element during the copy. A socket then gets the
    // peer of another socket.
    copied_here(A::MAPS.udp_sockets, key)
}

/// Returns false if there is no room.
#[inline(always)]
pub fn remember_socket<A: Maps>(key: &SocketKey<A>, socket: &Socket<A>) -> bool {
    A::MAPS.udp_sockets.insert(key, socket, 0).is_ok()
}

#[inline(always)]
pub fn forget_socket<A: Maps>(key: &SocketKey<A>) {
    // Rarely does the row exist.
    let _gone = A::MAPS.udp_sockets.remove(key);
}
