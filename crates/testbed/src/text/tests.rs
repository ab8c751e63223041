//! Every packet of the notation round-trips, and fails if any byte covered by a checksum is wrong.

use super::*;

const PACKETS: [&str; 20] = [
    "tcp SA client:1000 > web:80",
    "tcp SA=1460 client:1000 > web:80 +9",
    "tcp S=1460/1 client:1000 > web:80",
    "tcp PA client:1000 > web:80 +5",
    "udp client:1000 > web:53 +1400",
    "udp client:1000 > web:53",
    "[options] udp client:1000 > web:53 +1",
    "[options=40] tcp S client:1000 > web:80",
    "[first=7] udp client:1000 > web:53 +64",
    "[later=7] udp client > web +64",
    "[first=7] cut tcp client:1000 > web:80",
    "sctp INIT client:1000 > web:3868 +16",
    "sctp COOKIE-ECHO,DATA client:1000 > web:3868 +5",
    "unreachable tcp client:1000 > web:80",
    "unreachable udp client:1000 > web:53",
    "icmp frag-needed=1400 router > web about tcp PA web:80 > client:1000 +100",
    "icmp time-exceeded router > web about cut sctp web:3868 > client:1000",
    "[options] icmp host-unreachable router > web about [options] udp web:53 > client:1000 +2",
    "icmp redirect router > client about cut tcp client:1000 > web:80",
    "icmp echo client > web +8",
];

const PACKETS6: [&str; 4] = [
    "[hop,options,routing,first=70000,options=16] tcp S client:1000 > web:80",
    "[visits] udp client:1000 > web:53",
    "[atomic] udp client:1000 > web:53",
    "icmp frag-needed=1400 router > web about [first=7] udp web:53 > client:1000 +2",
];

fn families() -> [Names; 2] {
    let v4 = [
        ("client", "10.0.0.1"),
        ("web", "10.96.0.10"),
        ("router", "192.0.2.1"),
    ];
    let v6 = [
        ("client", "fd00::1"),
        ("web", "fd00:96::10"),
        ("router", "2001:db8::1"),
    ];
    [v4, v6].map(|addrs| Names::new(addrs.map(|(name, addr)| (name, addr.parse().unwrap()))))
}

#[test]
fn packets_are_read_as_they_are_written() {
    let [v4, v6] = families();
    for (names, packets) in [
        (&v4, &PACKETS[..]),
        (&v6, &PACKETS[..]),
        (&v6, &PACKETS6[..]),
    ] {
        for packet in packets {
            assert_eq!(names.text(&names.frame(packet).unwrap()).unwrap(), *packet);
        }
    }
}

#[test]
fn two_names_may_be_one_port() {
    for mut names in families() {
        let number = "udp router:61000 > web:53";
        let frame = names.frame(number).unwrap();
        for name in ["udp router:$p > web:53", "udp router:$q > web:53"] {
            assert_eq!(names.learn(&frame, name).unwrap(), name);
        }
        assert_eq!(names.text_as(&frame, number).unwrap(), number);
        let other = names.frame("udp router:61001 > web:53").unwrap();
        assert_eq!(
            names.learn(&other, "udp router:$q > web:53").unwrap(),
            "udp router:61001 > web:53"
        );
        assert_eq!(
            names.learn(&frame, "udp client:$q > web:53").unwrap(),
            "udp router:$p > web:53"
        );
    }
}

#[test]
fn a_wrong_byte_shows() {
    for names in families() {
        let is_covered = |packet: &str| !packet.contains("later=") && !packet.contains("] cut");
        for packet in PACKETS.iter().filter(|packet| is_covered(packet)) {
            let frame = names.frame(packet).unwrap();
            // IPv6 has no header checksum: class, label and hop limit may be anything.
            let free: &[usize] = if frame[12] == 0x86 {
                &[14, 15, 16, 17, 21]
            } else {
                &[]
            };
            for at in (14..frame.len()).filter(|at| !free.contains(at)) {
                let mut wrong = frame.clone();
                wrong[at] ^= 0x10;
                assert_ne!(
                    names.text(&wrong).ok().as_deref(),
                    Some(*packet),
                    "byte {at} of {packet}"
                );
            }
        }
    }
}

/// Valid checksums before and after a change prove little if the reader accepts any, so this test
/// uses an independent reader.
#[test]
fn checksums_are_those_of_an_independent_reader() {
    use etherparse::{SlicedPacket, TransportSlice};
    for names in families() {
        let frame = names.frame("tcp SA client:1000 > web:80 +33").unwrap();
        let packet = SlicedPacket::from_ethernet(&frame).unwrap();
        let Some(TransportSlice::Tcp(tcp)) = packet.transport else {
            panic!("no TCP")
        };
        let expected = match (names.addr("client").unwrap(), names.addr("web").unwrap()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                tcp.calc_checksum_ipv4(src.octets(), dst.octets())
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                tcp.calc_checksum_ipv6(src.octets(), dst.octets())
            }
            _ => panic!("mixed families"),
        };
        assert_eq!(tcp.checksum(), expected.unwrap());
    }
    // RFC 3720 appendix B.4: 32 bytes of zeros.
    assert_eq!(wire::crc32c(&[0; 32]), 0x8a91_36aa_u32.to_le_bytes());
}
