//! The packets of both directions of a flow.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use proxy_common::service_counts::Passed;
use testbed::reference::place::{self, Device};

use super::wire::{TCP, Transport, UDP};

/// The places where the programs look up a packet's flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Table {
    Arriving,
    Leaving,
    /// On the host's own path to Services.
    Starting,
}

/// The translation of a packet of the flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leg {
    /// The client's packet gets the backend's address as destination.
    ToBackend,
    /// ... and on leaving the node's address as source.
    AsNode,
    /// The backend's packet to the node gets the client's address as destination.
    FromNode,
    /// ... and on leaving the frontend's address as source.
    ToClient,
}

/// A packet's tuple: table, protocol, source, destination.
pub(crate) type Tuple = (Table, u8, SocketAddr, SocketAddr);

#[derive(Clone, Debug)]
pub(crate) struct Flow {
    pub(crate) proto: u8,
    pub(crate) client: SocketAddr,
    pub(crate) frontend: SocketAddr,
    pub(crate) backend: SocketAddr,
    /// The client as the backend sees it.
    pub(crate) source: SocketAddr,
    /// The client is a socket of the host.
    pub(crate) by_host: bool,
    /// The client dialled an address of the host.
    pub(crate) on_lo: bool,
    /// The backend is a socket of the host.
    pub(crate) to_host: bool,
    /// The flow bypasses the stack from its first packet.
    pub(crate) is_bypass: bool,
    /// Another program's connection that left with the tuple of a flow.
    pub(crate) is_foreign_nat: bool,
    /// By its ClusterIP; `None` without a Service.
    pub(crate) service: Option<SocketAddr>,
    pub(crate) client_said: Said,
    pub(crate) backend_said: Said,
    /// The client has proved that it got an answer.
    pub(crate) assured: bool,
    /// The sequence number of the last SYN-ACK.
    pub(crate) answer: Option<u32>,
    /// The last acknowledgement of each side of an established connection; 0 before the first.
    pub(crate) client_acked: u32,
    pub(crate) backend_acked: u32,
    /// The backend's last packets have acknowledged more. The time of its last packet follows.
    pub(crate) backend_advanced: bool,
    pub(crate) backend_secs: u32,
    /// The client has dialled again, and the backend has not answered since ...
    pub(crate) dialled: bool,
    /// ... after a minute.
    pub(crate) redialled: bool,
    /// Another connection has the client's port, as the backend's packets show.
    pub(crate) clashes: bool,
    /// The client has sent a FIN behind data that the model has not seen.
    pub(crate) is_leaving: bool,
    /// The time of the last packet of either side, in seconds since boot.
    pub(crate) last_secs: u32,
    /// The time of opening, and the additional age in seconds.
    pub(crate) opened: Instant,
    pub(crate) aged: u32,
    pub(crate) sent: Passed,
    pub(crate) returned: Passed,
}

/// The packets of one side so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) anything: bool,
    pub(crate) goodbye: bool,
    /// The side reset the connection, and neither side has continued it.
    pub(crate) reset: bool,
}

/// The effect of a packet that would end a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Likely,
    /// A client's end counts once the other side ends as well.
    Early,
    Ignored,
}

impl Said {
    pub(crate) fn hear(&mut self, transport: Option<&Transport>) {
        self.anything = true;
        self.goodbye |= transport.is_some_and(|transport| transport.ends);
        self.reset = transport.is_some_and(|transport| transport.resets);
    }
}

impl Flow {
    pub(crate) fn waited(&self) -> Duration {
        self.opened.elapsed() + Duration::from_secs(self.aged.into())
    }

    pub(crate) fn changes_address(&self) -> bool {
        self.source.ip() != self.client.ip()
    }

    /// Returns the client's address as packets show it between the hooks of devices.
    pub(crate) fn between(&self) -> SocketAddr {
        SocketAddr::new(self.client.ip(), self.source.port())
    }

    /// Returns the table of the geometry: place, tuple and translation of the flow's packets.
    pub(crate) fn legs(&self) -> Vec<(Tuple, Leg)> {
        let tuple = |table, src, dst| (table, self.proto, src, dst);
        if self.is_foreign_nat {
            return vec![
                (
                    tuple(Table::Leaving, self.client, self.frontend),
                    Leg::ToBackend,
                ),
                (
                    tuple(Table::Arriving, self.backend, self.source),
                    Leg::ToClient,
                ),
            ];
        }
        match (self.by_host, self.to_host) {
            (true, true) => vec![
                (
                    tuple(Table::Starting, self.client, self.frontend),
                    Leg::ToBackend,
                ),
                (
                    tuple(Table::Leaving, self.backend, self.between()),
                    Leg::ToClient,
                ),
            ],
            (true, false) => vec![
                (
                    tuple(Table::Starting, self.client, self.frontend),
                    Leg::ToBackend,
                ),
                (
                    tuple(Table::Arriving, self.backend, self.source),
                    Leg::ToClient,
                ),
            ],
            (false, _) => {
                let mut legs = vec![
                    (
                        tuple(Table::Arriving, self.client, self.frontend),
                        Leg::ToBackend,
                    ),
                    (
                        tuple(Table::Leaving, self.backend, self.between()),
                        Leg::ToClient,
                    ),
                ];
                if self.changes_address() {
                    legs.push((
                        tuple(Table::Leaving, self.between(), self.backend),
                        Leg::AsNode,
                    ));
                    legs.push((
                        tuple(Table::Arriving, self.backend, self.source),
                        Leg::FromNode,
                    ));
                }
                legs
            }
        }
    }

    /// Returns true for a flow that counts for shares: its client is proved, and neither a RST nor
    /// both FINs have ended it.
    pub(crate) fn goes_on(&self) -> bool {
        let client = self.client_said;
        let backend = self.backend_said;
        let is_closed = (client.goodbye || self.is_leaving) && backend.goodbye;
        self.assured && !client.reset && !backend.reset && !is_closed
    }

    /// Returns true if the flow has ended, or has been silent longer than its state allows.
    pub(crate) fn is_over(&self, now_secs: u32) -> bool {
        let client = self.client_said;
        let backend = self.backend_said;
        client.reset && !self.may_survive_reset()
            || backend.reset
            || ((client.goodbye || self.is_leaving) && backend.goodbye)
            || now_secs.saturating_sub(self.last_secs) > self.timeout_secs()
    }

    /// Returns true for a backend's packet of another connection between the same ports: the packet
    /// does not answer a SYN.
    pub(crate) fn is_answered_by_another(&self, transport: Option<&Transport>) -> bool {
        let answers = |it: &Transport| it.answer.is_some() || it.resets && it.seq == Some(0);
        self.proto == TCP && !self.backend_said.anything && transport.is_some_and(|it| !answers(it))
    }

    /// Returns true for a backend's packet after the end, which must belong to another connection.
    pub(crate) fn is_outlived_by(&self, transport: Option<&Transport>, now_secs: u32) -> bool {
        let client = self.client_said;
        let backend = self.backend_said;
        let idle_secs = now_secs.saturating_sub(self.last_secs);
        let is_certain = self.assured || !self.is_from_outside() || idle_secs > 3;
        let answers = transport.is_some_and(|it| it.answer.is_some());
        let silent_secs = match () {
            () if client.reset || backend.reset => 10,
            () if (client.goodbye || self.is_leaving) && backend.goodbye => 60,
            () => self.timeout_secs(),
        };
        answers && is_certain && self.is_over(now_secs) || idle_secs > silent_secs
    }

    /// Returns true if the backend of an outside connection may ignore the client's RST. Then the
    /// connection continues.
    pub(crate) fn may_survive_reset(&self) -> bool {
        self.proto == TCP && self.client_said.reset && self.assured && self.is_from_outside()
    }

    /// Returns true if the client is behind an uplink. Uplinks have no other clients: no flow opens
    /// from a spoofed address.
    pub(crate) fn is_from_outside(&self) -> bool {
        let leads_to_pods = place::route(self.client.ip()).is_some_and(Device::leads_to_pods);
        !self.by_host && !self.is_foreign_nat && !leads_to_pods
    }

    /// Returns true if the client's packet proves that it got the backend's answer: any datagram;
    /// an acknowledgement of at most 2^17 bytes of it; nothing in SCTP.
    pub(crate) fn is_proven_by(&self, transport: Option<&Transport>) -> bool {
        match self.proto {
            UDP => self.backend_said.anything,
            TCP => {
                let ack = transport.and_then(|transport| transport.ack);
                let acked = self
                    .answer
                    .zip(ack)
                    .map(|(answer, ack)| ack.wrapping_sub(answer));
                acked.is_some_and(|acked| (1..=1 << 17).contains(&acked))
            }
            _ => false,
        }
    }

    /// Records that the backend accepts another connection, which its client has to prove.
    pub(crate) fn begin_anew(&mut self) {
        self.backend_said = Said::default();
        self.client_said = Said {
            anything: true,
            ..Said::default()
        };
        (self.assured, self.is_leaving, self.clashes) = (false, false, false);
    }

    /// Judges a packet that would end the connection. The receiver expects the number that it has
    /// acknowledged (RFC 5961 §3.2), or a higher number if more data may be in flight: up to 2^20
    /// before a RST, up to 2^25 before a backend's FIN.
    pub(crate) fn judge_end(
        &self,
        transport: Option<&Transport>,
        said: Said,
        is_clients: bool,
        acked: u32,
        advances: bool,
    ) -> End {
        let Some(Transport {
            seq: Some(seq),
            ends,
            resets,
            ..
        }) = transport
        else {
            return End::Likely;
        };
        if !self.assured || !(*ends && !said.goodbye || *resets) || acked == 0 {
            return End::Likely;
        }
        match seq.wrapping_sub(acked) {
            0 => End::Likely,
            ahead if *resets && ahead < 1 << 20 && advances => End::Likely,
            ahead if !resets && ahead < 1 << 25 && advances && !is_clients => End::Likely,
            ahead if ahead < 1 << 25 && !resets => End::Early,
            _ => End::Ignored,
        }
    }

    fn timeout_secs(&self) -> u32 {
        let client = self.client_said;
        let backend = self.backend_said;
        match self.proto {
            _ if client.reset => 10,
            TCP if client.goodbye || backend.goodbye => 3_600,
            _ if client.goodbye || backend.goodbye => 120,
            _ if !backend.anything => 30,
            UDP => 180,
            _ if !self.assured => 60,
            TCP => 86_400,
            _ => 18_000,
        }
    }

    /// Returns true if an opening packet of the same client may replace the flow: the flow has
    /// ended, or has been silent longer than its state allows. After a minute, an SCTP client has
    /// forgotten the flow, and so has a TCP client that has sent a FIN. A backend that still has
    /// another connection answers within 3 s.
    pub(crate) fn yields(&self, now_secs: u32) -> bool {
        let idle_secs = now_secs.saturating_sub(self.last_secs);
        let forgotten = match self.proto {
            UDP => false,
            TCP if self.client_said.goodbye && idle_secs > 60 => true,
            TCP => self.redialled && idle_secs >= 3,
            _ => idle_secs > 60,
        };
        forgotten || self.is_over(now_secs)
    }
}
