use core::net::{Ipv4Addr, Ipv6Addr};

use super::LAYOUT;
use crate::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use crate::balance::{Affinity, AffinityKey};
use crate::connect::Connects;
use crate::device::{Device, Node, OwnAddr};
use crate::flow::{Flow, FlowKey, Hook, Kind, Seen};
use crate::foreign_nat::ForeignNat;
use crate::fragment::{FragmentKey, Ports};
use crate::frontend::{
    Backend, Endpoint, EndpointKey, Frontend, FrontendKey, FrontendKind, MAGLEV_PLACES, Maglev,
    Service, Set, SetKey, SlotKey, SourceRange,
};
use crate::service_counts::{Passed, ServiceCounts};
use crate::socket::{Dialled, Side, Socket, SocketKey};

/// A moved field or a number with another meaning is another layout.
#[test]
fn bytes_of_keys_and_values_are_those_of_this_layout() {
    let v4 = |last| Addr4::from(Ipv4Addr::new(192, 0, 2, last));
    let v6 = |last| Addr6::from(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last));
    let mut text = format!("layout {LAYOUT}\n");
    for (name, bytes) in samples([v4(1), v4(2), v4(3), v4(4)])
        .into_iter()
        .chain(samples([v6(1), v6(2), v6(3), v6(4)]))
    {
        text += &format!(
            "{name} {}\n",
            bytes
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect::<String>()
        );
    }
    let want = include_str!("v2.txt");
    assert_eq!(
        text, want,
        "LAYOUT has to grow, and with it the name of the file\n{text}"
    );
}

#[expect(clippy::too_many_lines, reason = "a table with one value of each type")]
fn samples<A: Addr>([a, b, c, d]: [A; 4]) -> Vec<(&'static str, Vec<u8>)> {
    let at = |addr, port| SockAddr::new(addr, Port::new(port));
    let service = FrontendKey::new(a, Port::new(80), Proto::TCP);
    let mut slots = [0; MAGLEV_PLACES];
    slots[1] = 0x102;
    let mut flow = Flow::new(
        at(a, 1000),
        at(b, 80),
        at(c, 8080),
        at(d, 61_000),
        Flow::<A>::COUNTED,
        0x0102_0304,
    );
    (flow.kind, flow.tx, flow.rx) = (Kind::UNSNAT, Seen::FIN, Seen::PACKET.with(Seen::RST));
    (flow.generation, flow.service, flow.passed) = (
        5,
        service,
        Passed {
            packets: 6,
            bytes: 7,
        },
    );
    let mut settings = Service::new(1, 2, Service::SOURCE_RANGES);
    settings.affinity_secs = 10_800;
    let two = Passed {
        packets: 4,
        bytes: 5,
    };
    let counts = ServiceCounts {
        opened: 1,
        dropped: 2,
        rejected: 3,
        sent: two,
        returned: Passed {
            packets: 6,
            bytes: 7,
        },
    };
    let mut connects = Connects::NOTHING;
    (connects.buckets, connects.units) = (core::array::from_fn(|nth| nth as u64), 20);
    (
        connects.refused,
        connects.unanswered,
        connects.retransmitted,
        connects.last_secs,
    ) = (21, 22, 23, 0x0102_0304);
    let [addr4, addr6] = [Ipv4Addr::new(192, 0, 2, 9).into(), Addr4::UNSPECIFIED];
    let node = Node::new(
        addr4,
        Addr6::UNSPECIFIED,
        7,
        [1, 2, 3, 4, 5, 6],
        Node::COMPAT | Node::HOST,
    );
    vec![
        ("FrontendKey", bytes(&service)),
        (
            "Frontend",
            bytes(&Frontend::new(service, FrontendKind::LOAD_BALANCER)),
        ),
        ("Service", bytes(&settings)),
        (
            "SlotKey",
            bytes(&SlotKey::new(service, Set::CLUSTER, 0x102)),
        ),
        ("Backend", bytes(&Backend::new(c, Port::new(8080), 1))),
        (
            "EndpointKey",
            bytes(&EndpointKey::new(service, at(c, 8080))),
        ),
        ("Endpoint", bytes(&Endpoint::new(1))),
        ("SetKey", bytes(&SetKey::new(service, Set::LOCAL))),
        ("Maglev", bytes(&Maglev::new(slots))[..8].to_vec()),
        ("SourceRange", bytes(&SourceRange::new(service, d))),
        (
            "FlowKey",
            bytes(&FlowKey::new(
                Hook::EGRESS,
                Proto::UDP,
                at(a, 1000),
                at(b, 80),
            )),
        ),
        ("Flow", bytes(&flow)),
        ("AffinityKey", bytes(&AffinityKey::new(service, a))),
        ("Affinity", bytes(&Affinity::new(at(c, 8080), 9))),
        (
            "FragmentKey's addresses",
            FragmentKey::<A>::ADDRS_OFFSET.to_be_bytes().to_vec(),
        ),
        (
            "Ports",
            bytes(&Ports::new(Port::new(1), Port::new(2), Proto::SCTP)),
        ),
        ("ServiceCounts", bytes(&counts)),
        ("Node", bytes(&node)),
        (
            "Device",
            bytes(
                &Device::new(Device::POD | Device::DETECTED, addr6, Addr6::UNSPECIFIED).with_link(
                    8,
                    1500,
                    [1, 2, 3, 4, 5, 6],
                ),
            ),
        ),
        (
            "Guest",
            bytes(&ForeignNat::after(
                ForeignNat::NONE,
                Default::default(),
                Proto::UDP,
                256,
            )),
        ),
        (
            "SocketKey",
            bytes(&SocketKey::new(
                0x0102_0304_0506_0708,
                at(c, 8080),
                Side::FRONTEND,
            )),
        ),
        (
            "Dialled",
            bytes(&Dialled {
                backend: at(b, 80),
                frontend: at(c, 8080),
            }),
        ),
        ("Socket", bytes(&Socket::new(at(b, 80), service, 9))),
        ("OwnAddr", bytes(&OwnAddr::new(3, OwnAddr::NODE_PORTS))),
        ("Connects", bytes(&connects)),
    ]
}

fn bytes<T: Copy>(value: &T) -> Vec<u8> {
    // SAFETY: the types here have no padding, as asserted next to their definitions.
    unsafe { core::slice::from_raw_parts((&raw const *value).cast::<u8>(), size_of::<T>()) }
        .to_vec()
}
