//! The moment from which no connection begins at a backend that was cut off.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt, socket,
    sockopt,
};
use nix::sys::time::TimeVal;
use testbed::lab::Host;

/// The time that ends the connections of before: a backend on trial gets connections five seconds
/// after it was set aside, at the earliest.
const PAUSE: Duration = Duration::from_secs(4);
/// The bits of a TCP header that say SYN and not ACK.
const SYN: u8 = 0x02;
const SYN_OR_ACK: u8 = 0x12;

/// A SYN as the backends' machine gets it, before its firewall.
#[derive(Clone, Copy)]
pub(super) struct Syn {
    at: Instant,
    client: SocketAddrV4,
    backend: Ipv4Addr,
}

/// A running watch for SYNs.
pub(super) struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<Syn>>>,
}

impl Watch {
    pub(super) fn start(host: &Host) -> Result<Self> {
        let open = || -> Result<OwnedFd> {
            let flags = SockFlag::SOCK_CLOEXEC;
            let proto = SockProtocol::EthAll;
            let socket = socket(AddressFamily::Packet, SockType::Datagram, flags, proto)?;
            setsockopt(&socket, sockopt::RcvBufForce, &(16 << 20))?;
            setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::new(0, 50_000))?;
            Ok(socket)
        };
        let socket = host.ns.run(open).context("open a packet socket")?;
        let stop = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&stop);
        let thread = host.ns.thread("watch", move || collect(&socket, &until))?;
        Ok(Self { stop, thread })
    }

    pub(super) fn stop(self) -> Result<Vec<Syn>> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread
            .join()
            .map_err(|_| anyhow!("the watch has panicked"))?
    }
}

fn collect(socket: &OwnedFd, stop: &AtomicBool) -> Result<Vec<Syn>> {
    let mut syns = Vec::new();
    let mut buffer = [0; 128];
    while !stop.load(Ordering::Relaxed) {
        match recvfrom::<LinkAddr>(socket.as_raw_fd(), &mut buffer) {
            Ok((length, _)) => syns.extend(syn(&buffer[..length], Instant::now())),
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(errno) => return Err(errno).context("receive"),
        }
    }
    Ok(syns)
}

/// Reads a packet that begins with its IPv4 header; None if it is no SYN.
fn syn(packet: &[u8], at: Instant) -> Option<Syn> {
    let tcp = packet.get(usize::from(packet.first()? & 0x0f) * 4..)?;
    let is_syn =
        packet[0] >> 4 == 4 && packet.get(9) == Some(&6) && tcp.get(13)? & SYN_OR_ACK == SYN;
    let addr = |at: usize| {
        Some(Ipv4Addr::from(
            <[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?,
        ))
    };
    let client = SocketAddrV4::new(addr(12)?, u16::from_be_bytes([*tcp.first()?, *tcp.get(1)?]));
    is_syn.then_some(Syn {
        at,
        client,
        backend: addr(16)?,
    })
}

/// How long connections went on to begin at one backend that was cut off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Avoided {
    /// The time from the cut until the last one began there before a pause of [`PAUSE`]; None if
    /// there is no such pause.
    pub(super) after: Option<Duration>,
    /// The part of it that had passed when the second client first dialled the backend.
    pub(super) met_by_two: Option<Duration>,
}

impl Avoided {
    /// Returns how long connections began there while two clients waited.
    pub(super) fn since_two(&self) -> Option<Duration> {
        Some(
            self.after?
                .saturating_sub(self.met_by_two.unwrap_or(Duration::MAX)),
        )
    }
}

/// Where connections began after the cut.
#[derive(Debug)]
pub(super) struct Begun {
    /// Of each backend that was cut off.
    pub(super) avoided: Vec<Avoided>,
    /// The connections of each second: those that began at such backends, and all.
    pub(super) dead_of_all: Vec<[usize; 2]>,
}

/// Judges what was seen until `end`. A connection begins at the backend that gets the first SYN
/// from its port.
pub(super) fn begun(syns: &[Syn], dead: &[Ipv4Addr], cut: Instant, end: Instant) -> Begun {
    let mut known = BTreeSet::new();
    let mut begun: BTreeMap<Ipv4Addr, Vec<(Duration, Ipv4Addr)>> = BTreeMap::new();
    let mut dead_of_all = vec![[0; 2]; (end - cut).as_secs_f64().ceil() as usize];
    for syn in syns
        .iter()
        .filter(|syn| known.insert(syn.client) && (cut..end).contains(&syn.at))
    {
        let since = syn.at - cut;
        begun
            .entry(syn.backend)
            .or_default()
            .push((since, *syn.client.ip()));
        let second = since.as_secs() as usize;
        dead_of_all[second][0] += usize::from(dead.contains(&syn.backend));
        dead_of_all[second][1] += 1;
    }
    let judge = |backend| {
        let begun = begun.get(backend).map_or(&[][..], Vec::as_slice);
        let mut after = Duration::ZERO;
        let mut clients = BTreeSet::new();
        let mut met_by_two = None;
        for (at, client) in begun.iter().take_while(|(at, _)| {
            let is_before = *at < after + PAUSE;
            after = if is_before { *at } else { after };
            is_before
        }) {
            clients.insert(client);
            met_by_two = met_by_two.or((clients.len() == 2).then_some(*at));
        }
        Avoided {
            after: (after + PAUSE <= end - cut).then_some(after),
            met_by_two,
        }
    };
    Begun {
        avoided: dead.iter().map(judge).collect(),
        dead_of_all,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet_is_a_syn_without_ack_alone() {
        let packet = |flags: u8| {
            let mut packet = vec![0_u8; 40];
            (packet[0], packet[9], packet[33]) = (0x45, 6, flags);
            packet[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
            packet[20..22].copy_from_slice(&1000_u16.to_be_bytes());
            packet
        };
        let now = Instant::now();
        let read = syn(&packet(0xc2), now).unwrap();
        assert_eq!(
            (read.client.to_string().as_str(), read.backend),
            ("10.0.0.1:1000", Ipv4Addr::new(10, 0, 0, 2))
        );
        assert!(
            [0x12, 0x10, 0x04]
                .into_iter()
                .all(|flags| syn(&packet(flags), now).is_none())
        );
        assert!(
            (0..packet(2).len() - 6).all(|len| syn(&packet(2)[..len], now).is_none()),
            "cut short"
        );
    }

    #[test]
    fn backend_is_avoided_from_the_last_connection_before_a_pause() {
        let cut = Instant::now();
        let ms = Duration::from_millis;
        let dead = Ipv4Addr::new(10, 0, 0, 9);
        let judge = |seen: &[(u64, u8, u16)]| {
            let syns = seen.iter().map(|(at, client, port)| Syn {
                at: cut + ms(*at),
                client: SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, *client), *port),
                backend: dead,
            });
            let syns: Vec<_> = syns.collect();
            begun(&syns, &[dead], cut, cut + ms(10_000)).avoided[0]
        };
        let of = |after, met_by_two: Option<u64>| Avoided {
            after,
            met_by_two: met_by_two.map(ms),
        };
        assert_eq!(judge(&[]), of(Some(ms(0)), None));
        // A SYN that comes again, and a trial after a pause.
        let seen = [
            (100, 1, 1),
            (200, 1, 2),
            (300, 2, 1),
            (900, 1, 3),
            (1_100, 1, 1),
            (6_000, 2, 7),
        ];
        assert_eq!(judge(&seen), of(Some(ms(900)), Some(300)));
        assert_eq!(judge(&seen).since_two(), Some(ms(600)));
        let all_the_time: Vec<_> = (0..10).map(|nth| (nth * 900, 1, nth as u16)).collect();
        assert_eq!(judge(&all_the_time), of(None, None));
    }

    #[test]
    fn share_of_a_second_counts_first_syns() {
        let cut = Instant::now();
        let dead = Ipv4Addr::new(10, 0, 0, 9);
        let syn = |ms, port, backend| Syn {
            at: cut + Duration::from_millis(ms),
            client: SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 1), port),
            backend: Ipv4Addr::new(10, 0, 0, backend),
        };
        // The second one comes again, to another backend.
        let syns = [
            syn(0, 1, 8),
            syn(100, 2, 9),
            syn(1_100, 2, 8),
            syn(2_100, 3, 8),
            syn(9_000, 4, 9),
        ];
        let begun = begun(&syns, &[dead], cut, cut + Duration::from_secs(3));
        assert_eq!(begun.dead_of_all, [[1, 2], [0, 0], [0, 1]]);
    }
}
