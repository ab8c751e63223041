use core::net::Ipv4Addr;

use super::*;
use crate::addr::Port;

const TIMEOUTS: Timeouts = Timeouts {
    tcp_established: 8_100,
    tcp_half_closed: 120,
    udp: 30,
    udp_stream: 180,
};

fn at(last: u8, port: u16) -> SockAddr<Addr4> {
    SockAddr::new(Ipv4Addr::new(10, 0, 0, last).into(), Port::new(port))
}

fn flow(source: SockAddr<Addr4>, flags: u8) -> Flow<Addr4> {
    Flow::new(at(1, 1000), at(2, 80), at(3, 8080), source, flags, 100)
}

#[test]
fn a_device_flow_with_its_own_address_has_two_entries() {
    let flow = flow(at(1, 1000), 0);
    assert_eq!(
        flow.opener_key(Proto::TCP),
        FlowKey::new(Hook::INGRESS, Proto::TCP, at(1, 1000), at(2, 80))
    );
    assert_eq!(
        flow.undnat_key(Proto::TCP),
        FlowKey::new(Hook::EGRESS, Proto::TCP, at(3, 8080), at(1, 1000))
    );
    assert_eq!(flow.kinds(), [Kind::UNDNAT, Kind::DNAT]);
}

#[test]
fn a_masqueraded_flow_has_four_entries_and_its_new_port_between_the_hooks() {
    let flow = flow(at(9, 61000), 0);
    assert_eq!(
        flow.undnat_key(Proto::TCP),
        FlowKey::new(Hook::EGRESS, Proto::TCP, at(3, 8080), at(1, 61000))
    );
    let there = FlowKey::new(Hook::EGRESS, Proto::TCP, at(1, 61000), at(3, 8080));
    assert_eq!(flow.key_as(Kind::SNAT, Proto::TCP), there);
    let back = FlowKey::new(Hook::INGRESS, Proto::TCP, at(3, 8080), at(9, 61000));
    assert_eq!(flow.key_as(Kind::UNSNAT, Proto::TCP), back);
    assert_eq!(flow.kinds().len(), 4);
}

#[test]
fn a_host_flow_has_two_entries_whatever_its_source() {
    let remote = flow(at(9, 61000), Flow::<Addr4>::HOST);
    assert_eq!(
        remote.opener_key(Proto::UDP),
        FlowKey::new(Hook::ANCHOR, Proto::UDP, at(1, 1000), at(2, 80))
    );
    assert_eq!(
        remote.undnat_key(Proto::UDP),
        FlowKey::new(Hook::INGRESS, Proto::UDP, at(3, 8080), at(9, 61000))
    );
    assert_eq!(remote.kinds(), [Kind::UNDNAT, Kind::DNAT]);
    let own = flow(
        at(1, 1000),
        Flow::<Addr4>::HOST | Flow::<Addr4>::HOST_BACKEND,
    );
    assert_eq!(
        own.undnat_key(Proto::UDP),
        FlowKey::new(Hook::EGRESS, Proto::UDP, at(3, 8080), at(1, 1000))
    );
}

#[test]
fn states_follow_what_both_sides_have_shown() {
    let mut flow = flow(at(1, 1000), 0);
    assert_eq!(flow.state(), State::New);
    flow.rx = Seen::PACKET;
    assert_eq!(flow.state(), State::Answered);
    assert!(flow.is_half_open(Proto::TCP));
    let streams = Flow {
        rx: flow.rx.with(Seen::ASSURED),
        ..flow
    };
    flow.tx = flow.tx.with(Seen::ASSURED);
    for flow in [flow, streams] {
        assert_eq!(flow.state(), State::Established);
        assert!(!flow.is_half_open(Proto::TCP));
    }
    flow.tx = flow.tx.with(Seen::FIN);
    assert_eq!(flow.state(), State::HalfClosed);
    flow.rx = flow.rx.with(Seen::FIN);
    assert_eq!(flow.state(), State::Closed);
    flow.rx = flow.rx.with(Seen::RST);
    assert_eq!(flow.state(), State::Reset);
    flow.rx = flow.rx.without(Seen::RST);
    assert_eq!(flow.state(), State::Closed);
}

#[test]
fn an_opener_takes_over_only_what_is_expired() {
    let mut flow = flow(at(1, 1000), 0);
    assert!(
        !flow.may_be_reused(Proto::TCP, 101, TIMEOUTS),
        "a SYN sent again is the same flow"
    );
    assert!(!flow.may_be_reused(Proto::UDP, 130, TIMEOUTS));
    assert!(
        flow.may_be_reused(Proto::UDP, 131, TIMEOUTS),
        "30 s without an answer"
    );
    flow.rx = Seen::PACKET;
    assert!(!flow.may_be_reused(Proto::UDP, 280, TIMEOUTS));
    assert!(flow.may_be_reused(Proto::UDP, 281, TIMEOUTS));
    assert!(!flow.is_expired(Proto::TCP, 160, TIMEOUTS));
    assert!(
        flow.is_expired(Proto::TCP, 161, TIMEOUTS),
        "a SYN was answered five times, and nobody came"
    );
    flow.tx = flow.tx.with(Seen::ASSURED);
    assert!(!flow.is_expired(Proto::TCP, 161, TIMEOUTS));
    assert!(
        !flow.may_be_reused(Proto::TCP, 161, TIMEOUTS),
        "a SYN in the client's name"
    );
    assert!(
        !flow.is_redialled_by(Signals::OPENER, 160) && flow.is_redialled_by(Signals::OPENER, 161)
    );
    assert!(!flow.is_redialled_by(Signals::PACKET, 161));
    let redialled = Flow {
        tx: flow.tx.with(Seen::REDIALLED),
        ..flow
    };
    assert!(
        !redialled.may_be_reused(Proto::TCP, 102, TIMEOUTS),
        "the backend has not had the time to answer"
    );
    assert!(
        redialled.may_be_reused(Proto::TCP, 103, TIMEOUTS),
        "and has not answered"
    );
    assert!(
        !flow.may_be_reused(Proto::SCTP, 160, TIMEOUTS)
            && flow.may_be_reused(Proto::SCTP, 161, TIMEOUTS)
    );
    assert!(flow.is_expired(Proto::TCP, 8_201, TIMEOUTS));
    flow.rx = flow.rx.with(Seen::RST);
    assert!(flow.may_be_reused(Proto::TCP, 100, TIMEOUTS));
}

#[test]
fn opener_takes_over_what_the_agent_has_ended() {
    let assured = Flow {
        tx: Seen::PACKET.with(Seen::ASSURED),
        rx: Seen::PACKET,
        ..flow(at(1, 1000), 0)
    };
    let lost = Flow {
        rx: assured.rx.with(Seen::LOST),
        ..assured
    };
    assert!(lost.is_lost() && !assured.is_lost());
    assert!(
        lost.may_be_reused(Proto::TCP, 100, TIMEOUTS)
            && !assured.may_be_reused(Proto::TCP, 100, TIMEOUTS)
    );
    assert_eq!(
        (lost.state(), lost.is_expired(Proto::TCP, 8_200, TIMEOUTS)),
        (State::Established, false),
        "it waits for its client"
    );
    let reply = Flow {
        kind: Kind::UNDNAT,
        tx: Seen::LIBERAL,
        rx: lost.rx,
        ..lost
    };
    assert!(!reply.is_lost(), "the opener's entry alone has the mark");
}

#[test]
fn reset_in_name_of_a_client_outside_waits_for_the_backend() {
    let of_pod = flow(at(1, 1000), 0);
    let reset = Seen::PACKET.with(Seen::ASSURED).with(Seen::RST);
    let [of_pod, mut flow] = [of_pod, flow(at(1, 1000), Flow::<Addr4>::REMOTE)].map(|flow| Flow {
        tx: reset,
        rx: Seen::PACKET,
        ..flow
    });
    assert!(
        of_pod.may_be_reused(Proto::TCP, 100, TIMEOUTS),
        "its device betrays a stranger"
    );
    assert!(
        !flow.may_be_reused(Proto::TCP, 110, TIMEOUTS)
            && !flow.is_evictable(Proto::TCP, 110, TIMEOUTS)
    );
    assert!(
        flow.is_redialled_by(Signals::OPENER, 100),
        "the backend has to answer"
    );
    assert!(
        flow.may_be_reused(Proto::TCP, 111, TIMEOUTS)
            && flow.is_evictable(Proto::TCP, 111, TIMEOUTS),
        "and has not gone on"
    );
    flow.rx = Seen::PACKET.with(Seen::RST);
    assert!(
        flow.may_be_reused(Proto::TCP, 100, TIMEOUTS),
        "the backend says that it is over"
    );
    (flow.tx, flow.rx) = (reset.with(Seen::FIN), Seen::PACKET.with(Seen::FIN));
    assert!(
        flow.may_be_reused(Proto::TCP, 100, TIMEOUTS),
        "both have said goodbye"
    );
    (flow.tx, flow.rx) = (Seen::PACKET.with(Seen::RST), Seen::PACKET);
    assert!(
        flow.may_be_reused(Proto::TCP, 100, TIMEOUTS),
        "the client has not shown itself"
    );
}

#[test]
fn packet_of_another_connection_is_told_from_an_answer() {
    let flow = flow(at(1, 1000), 0);
    let is_anothers = |signals, seq| flow.is_answered_by_another(Proto::TCP, signals, seq);
    assert!(!is_anothers(Signals::ANSWER, 1000) && !is_anothers(Signals::RST, 0));
    assert!(
        is_anothers(Signals::PACKET, 1001)
            && is_anothers(Signals::FIN, 1001)
            && is_anothers(Signals::RST, 1001)
    );
    assert!(!flow.is_answered_by_another(Proto::UDP, Signals::PACKET, 0));
    let answered = Flow {
        rx: Seen::PACKET.with(Seen::CLASHES),
        ..flow
    };
    assert!(!answered.is_answered_by_another(Proto::TCP, Signals::PACKET, 1001));
    assert!(
        !answered.clashes()
            && Flow {
                rx: Seen::CLASHES,
                ..flow
            }
            .clashes(),
        "until the backend answers"
    );
}

#[test]
fn packet_after_the_end_is_of_another_connection() {
    let fin = Seen::PACKET.with(Seen::ASSURED).with(Seen::FIN);
    let open = Flow {
        tx: Seen::PACKET.with(Seen::ASSURED),
        rx: Seen::PACKET,
        ..flow(at(1, 1000), 0)
    };
    let is_outlived =
        |flow: &Flow<Addr4>, signals, now| flow.is_outlived_by(signals, Proto::TCP, now, TIMEOUTS);
    assert!(
        !is_outlived(&open, Signals::ANSWER, 101) && !is_outlived(&open, Signals::PACKET, 1_000)
    );
    let closed = Flow {
        tx: fin,
        rx: fin,
        ..open
    };
    assert!(
        !is_outlived(&closed, Signals::FIN, 160),
        "the last data and the FIN again"
    );
    assert!(
        is_outlived(&closed, Signals::PACKET, 161) && is_outlived(&closed, Signals::ANSWER, 100)
    );
    let reset = Flow {
        tx: Seen::PACKET.with(Seen::RST),
        ..flow(at(1, 1000), Flow::<Addr4>::REMOTE)
    };
    assert!(
        !is_outlived(&reset, Signals::ANSWER, 103),
        "a stranger has reset the handshake"
    );
    assert!(is_outlived(&reset, Signals::ANSWER, 104));
    let silent = Flow {
        rx: Seen::PACKET,
        ..flow(at(1, 1000), 0)
    };
    let idle = |now| silent.is_outlived_by(Signals::PACKET, Proto::UDP, now, TIMEOUTS);
    assert!(
        !idle(280) && idle(281),
        "after the idle time-out, whether an agent sweeps or not"
    );
}
