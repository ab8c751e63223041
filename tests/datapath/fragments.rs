//! Fragments: later ones have no ports and follow their first.

use anyhow::{Result, ensure};
use proxy_common::names::{ANCHOR, EGRESS, INGRESS};
use testbed::test_run::Verdict::{self, Drop, Pass, Redirect};
use testbed::text::Names;

use crate::lab::{Lab, Row, check, labs};

#[test]
fn later_fragments_follow_the_first_one() -> Result<()> {
    check(&[
        // The first one opens the flow.
        (
            INGRESS,
            "[first=7] udp client:1000 > web:53 +64",
            Pass,
            "[first=7] udp client:1000 > pod:5353 +64",
            "flow_opened forwarded",
        ),
        (INGRESS, "[later=7] udp client > web +64", Pass, "[later=7] udp client > pod +64", "forwarded"),
        (INGRESS, "[later=7] udp client > web +1", Pass, "[later=7] udp client > pod +1", "forwarded"),
        // Nothing is to be done to it any more, ...
        (EGRESS, "[later=7] udp client > pod +64", Pass, "same", "not_ours"),
        // ... and each hook has its own memory, and each direction.
        (
            EGRESS,
            "[first=7] udp pod:5353 > client:1000 +64",
            Pass,
            "[first=7] udp web:53 > client:1000 +64",
            "returned",
        ),
        (EGRESS, "[later=7] udp pod > client +8", Pass, "[later=7] udp web > client +8", "returned"),
        // Two services, one client, one identification, two protocols.
        (
            INGRESS,
            "[first=7] tcp S client:1000 > web:80",
            Pass,
            "[first=7] tcp S client:1000 > pod:8080",
            "flow_opened forwarded",
        ),
        (INGRESS, "[later=7] tcp client > web +64", Pass, "[later=7] tcp client > pod +64", "forwarded"),
        (
            INGRESS,
            "[first=7] sctp INIT client:1000 > web:5060 +64",
            Pass,
            "[first=7] sctp INIT client:1000 > pod:5060 +64",
            "flow_opened forwarded",
        ),
        (INGRESS, "[later=7] sctp client > web +64", Pass, "[later=7] sctp client > pod +64", "forwarded"),
        // With options.
        (
            INGRESS,
            "[options,first=8] udp client:1000 > web:53 +64",
            Pass,
            "[options,first=8] udp client:1000 > pod:5353 +64",
            "forwarded",
        ),
        (
            INGRESS,
            "[options,later=8] udp client > web +64",
            Pass,
            "[options,later=8] udp client > pod +64",
            "forwarded",
        ),
    ])
}

#[test]
fn fragments_whose_source_changes() -> Result<()> {
    check(&[
        (
            INGRESS,
            "[first=7] udp client:1000 > self:53 +64",
            Pass,
            "[first=7] udp client:$p > client:5353 +64",
            "flow_opened forwarded",
        ),
        (INGRESS, "[later=7] udp client > self +64", Pass, "[later=7] udp client > client +64", "forwarded"),
        (EGRESS, "[first=7] udp client:$p > client:5353 +64", Pass, "[first=7] udp node:$p > client:5353 +64", ""),
        (EGRESS, "[later=7] udp client > client +64", Pass, "[later=7] udp node > client +64", ""),
        (INGRESS, "[first=7] udp client:5353 > node:$p +8", Pass, "[first=7] udp client:5353 > client:$p +8", ""),
        (INGRESS, "[later=7] udp client > node +8", Pass, "[later=7] udp client > client +8", ""),
    ])
}

#[test]
fn fragments_of_the_host() -> Result<()> {
    check(&[
        (
            ANCHOR,
            "[first=7] udp node:1000 > remote:53 +64",
            Redirect,
            "[first=7] udp uplink:$p > far:5353 +64",
            "flow_opened forwarded",
        ),
        (ANCHOR, "[later=7] udp node > remote +64", Redirect, "[later=7] udp uplink > far +64", "forwarded"),
        (ANCHOR, "[later=8] udp node > remote +64", Drop, "-", "fragment"),
        (
            INGRESS,
            "[first=9] udp far:5353 > uplink:$p +64",
            Redirect,
            "[first=9] udp remote:53 > node:1000 +64",
            "returned",
        ),
        (INGRESS, "[later=9] udp far > uplink +64", Redirect, "[later=9] udp remote > node +64", "returned"),
    ])
}

#[test]
fn what_is_not_ours_is_not_remembered() -> Result<()> {
    check(&[
        (INGRESS, "[later=7] udp client > web +64", Pass, "same", "fragment"),
        (INGRESS, "[first=7] udp client:1000 > stranger:53 +64", Pass, "same", "not_ours"),
        (INGRESS, "[later=7] udp client > stranger +64", Pass, "same", "fragment"),
        (INGRESS, "[first=8] tcp A client:1000 > web:80 +64", Pass, "same", "no_flow"),
        (INGRESS, "[later=8] tcp client > web +64", Pass, "same", "fragment"),
        (EGRESS, "[first=9] udp pod:5353 > client:1000 +64", Pass, "same", "not_ours"),
        (EGRESS, "[later=9] udp pod > client +64", Pass, "same", "fragment"),
        // A rejected one, neither.
        (
            INGRESS,
            "[first=10] tcp S client:1000 > none:80",
            Redirect,
            "tcp RA none:80 > client:1000",
            "no_endpoints rejected",
        ),
        (INGRESS, "[later=10] tcp client > none +64", Pass, "same", "fragment"),
    ])
}

/// Identifications come again, IPv4's soon: the later fragments of a packet are not those of an earlier one.
#[test]
fn an_identification_comes_again() -> Result<()> {
    check(&[
        (INGRESS, "udp client:1000 > web:53", Pass, "udp client:1000 > pod:5353", "flow_opened forwarded"),
        (
            EGRESS,
            "[first=7] udp pod:5353 > client:1000 +64",
            Pass,
            "[first=7] udp web:53 > client:1000 +64",
            "returned",
        ),
        (EGRESS, "[later=7] udp pod > client +64", Pass, "[later=7] udp web > client +64", "returned"),
        (EGRESS, "[first=7] udp pod:7000 > client:7000 +64", Pass, "same", "not_ours"),
        (EGRESS, "[later=7] udp pod > client +64", Pass, "same", "fragment"),
    ])
}

#[test]
fn a_later_fragment_opens_nothing() -> Result<()> {
    let ended = [
        (INGRESS, "udp client:1000 > self:53", Pass, "udp client:$p > client:5353", "flow_opened forwarded"),
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$q > client:8080", "flow_opened forwarded"),
        (INGRESS, "[first=7] tcp SA client:8080 > node:$q", Pass, "[first=7] tcp SA client:8080 > client:$q", ""),
        (
            EGRESS,
            "[first=7] tcp SA client:8080 > client:$q",
            Pass,
            "[first=7] tcp SA self:80 > client:1000",
            "returned",
        ),
        (INGRESS, "[later=7] tcp client > node +8", Pass, "[later=7] tcp client > client +8", ""),
        (EGRESS, "[later=7] tcp client > client +8", Pass, "[later=7] tcp self > client +8", "returned"),
        // Its flow ends, and the next one has another port.
        (INGRESS, "tcp RA client:8080 > node:$q", Pass, "tcp RA client:8080 > client:$q", ""),
        (EGRESS, "tcp RA client:8080 > client:$q", Pass, "tcp RA self:80 > client:1000", "returned"),
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$r > client:8080", "flow_opened forwarded"),
    ];
    for mut lab in labs("fragments")? {
        lab.check(&ended)?;
        // By chance it may be the same one, once in thousands.
        if lab.names.port("$r") != lab.names.port("$q") {
            lab.check(&[(EGRESS, "[later=7] tcp client > client +8", Pass, "same", "not_ours")])?;
        }
    }
    Ok(())
}

#[test]
fn a_split_datagram_is_whole_again_with_its_checksum() -> Result<()> {
    const ROWS: [Row; 8] = [
        (INGRESS, "udp client:1000 > web:53 +3000", Pass, "udp client:1000 > pod:5353 +3000", ""),
        (EGRESS, "udp pod:5353 > client:1000 +60000", Pass, "udp web:53 > client:1000 +60000", ""),
        (INGRESS, "udp client:1000 > self:53 +3000", Pass, "udp client:$p > client:5353 +3000", ""),
        (EGRESS, "udp client:$p > client:5353 +3000", Pass, "udp node:$p > client:5353 +3000", ""),
        (INGRESS, "udp client:5353 > node:$p +100", Pass, "udp client:5353 > client:$p +100", ""),
        (EGRESS, "udp client:5353 > client:$p +100", Pass, "udp self:53 > client:1000 +100", ""),
        (ANCHOR, "udp node:1000 > remote:53 +3000", Redirect, "udp uplink:$q > far:5353 +3000", ""),
        (INGRESS, "udp far:5353 > uplink:$q +3000", Redirect, "udp remote:53 > node:1000 +3000", ""),
    ];
    for mut lab in labs("split")? {
        for (id, (program, packet, verdict, out, _)) in ROWS.iter().enumerate() {
            let frame = lab.names.frame(packet)?;
            // Two hooks of one host see the same pieces.
            let pieces = split(&frame, 40, id as u32 / 2);
            ensure!(pieces.len() > 2, "only {} pieces", pieces.len());
            let rewritten = run(&lab, (program, packet), &pieces, *verdict)?;
            let found = lab.names.learn(&join(&rewritten), out)?;
            ensure!(found == *out, "became {found}, not {out}");
        }
    }
    Ok(())
}

fn run(lab: &Lab, (program, packet): (&str, &str), pieces: &[Vec<u8>], verdict: Verdict) -> Result<Vec<Vec<u8>>> {
    let one = |piece: &Vec<u8>| {
        let outcome = lab.run_from(program, piece, packet)?;
        ensure!(outcome.verdict == verdict, "{:?}", outcome.verdict);
        Ok(outcome.packet)
    };
    pieces.iter().map(one).collect()
}

/// As a router would split it, `len` bytes a piece; over IPv6 as its sender would.
fn split(frame: &[u8], len: usize, id: u32) -> Vec<Vec<u8>> {
    let v4 = frame[14] >> 4 == 4;
    let (header, transport) = frame.split_at(if v4 { 34 } else { 54 });
    let pieces = transport.chunks(len).enumerate().map(|(n, piece)| {
        let more = (n + 1) * len < transport.len();
        let at = n * len / 8;
        let mut header = header.to_vec();
        if v4 {
            let fragment = at as u16 | if more { 0x2000 } else { 0 };
            header[16..18].copy_from_slice(&(20 + piece.len() as u16).to_be_bytes());
            header[18..20].copy_from_slice(&(id as u16).to_be_bytes());
            header[20..22].copy_from_slice(&fragment.to_be_bytes());
            fix_header(&mut header);
            return [&header, piece].concat();
        }
        let fragment = [&[header[20], 0][..], &((at as u16) << 3 | u16::from(more)).to_be_bytes(), &id.to_be_bytes()];
        header[18..20].copy_from_slice(&(8 + piece.len() as u16).to_be_bytes());
        header[20] = 44;
        [&header, fragment.concat().as_slice(), piece].concat()
    });
    pieces.collect()
}

/// The packet again, from pieces in order.
fn join(pieces: &[Vec<u8>]) -> Vec<u8> {
    let v4 = pieces[0][14] >> 4 == 4;
    let start = if v4 { 34 } else { 62 };
    let transport: Vec<u8> = pieces.iter().flat_map(|piece| piece[start..].to_vec()).collect();
    let mut header = pieces[0][..if v4 { 34 } else { 54 }].to_vec();
    if v4 {
        for piece in pieces {
            assert_eq!(sum(&piece[14..34]), 0xffff, "an IPv4 header checksum");
            assert_eq!(piece[26..34], header[26..34], "addresses differ");
        }
        header[16..18].copy_from_slice(&(20 + transport.len() as u16).to_be_bytes());
        header[20..22].fill(0);
        fix_header(&mut header);
    } else {
        assert!(pieces.iter().all(|piece| piece[22..54] == header[22..54]), "addresses differ");
        header[18..20].copy_from_slice(&(transport.len() as u16).to_be_bytes());
        header[20] = pieces[0][54];
    }
    [header, transport].concat()
}

fn fix_header(header: &mut [u8]) {
    header[24..26].fill(0);
    let checksum = !sum(&header[14..34]);
    header[24..26].copy_from_slice(&checksum.to_be_bytes());
}

/// One's complement sum (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes.chunks(2).map(|two| u32::from(u16::from_be_bytes([two[0], two[1]]))).sum();
    ((sum & 0xffff) + (sum >> 16)) as u16
}

#[test]
fn fragments_that_lie_are_left_alone_and_written_to_nowhere_else() -> Result<()> {
    for mut lab in labs("lies")? {
        lab.check(&[(
            INGRESS,
            "[first=7] udp client:1000 > web:53 +64",
            Pass,
            "[first=7] udp client:1000 > pod:5353 +64",
            "flow_opened forwarded",
        )])?;
        let changed = |names: &Names, text: &str, edit: &dyn Fn(&mut Vec<u8>)| -> Result<(Vec<u8>, Vec<u8>, Verdict)> {
            let mut frame = names.frame(text)?;
            edit(&mut frame);
            let outcome = lab.run(INGRESS, &frame)?;
            Ok((frame, outcome.packet, outcome.verdict))
        };
        let v4 = lab.names.addr("web")?.is_ipv4();
        let (len_at, fragment_header, header_len) = if v4 { (16, 0, 20) } else { (18, 8, 0) };
        // A first fragment with less than a transport header, whatever lies behind it.
        for (text, most) in [("udp client:1000 > web:53 +64", 7), ("tcp S client:1000 > web:80 +64", 19)] {
            for len in 0..=most {
                let total = (header_len + fragment_header + len) as u16;
                let edit = |frame: &mut Vec<u8>| frame[len_at..len_at + 2].copy_from_slice(&total.to_be_bytes());
                let (before, after, verdict) = changed(&lab.names, &format!("[first=9] {text}"), &edit)?;
                ensure!(verdict == Pass && before == after, "{text}: {len} bytes");
            }
        }
        // Of later ones nothing is touched but the IP header.
        for (len, behind) in [(1, 63), (8, 0), (64, 0)] {
            let total = (header_len + fragment_header + len) as u16;
            let (before, after, verdict) = changed(&lab.names, "[later=7] udp client > web +64", &|frame| {
                frame[len_at..len_at + 2].copy_from_slice(&total.to_be_bytes());
                frame.truncate(frame.len() - 64 + len + behind);
            })?;
            let start = if v4 { 34 } else { 54 };
            ensure!(verdict == Pass && before[..start] != after[..start], "{len} bytes and {behind}: not rewritten");
            ensure!(before[start..] == after[start..], "{len} bytes and {behind}: written to");
        }
        // What goes beyond the packet.
        let (before, after, verdict) =
            changed(&lab.names, "[later=7] udp client > web +64", &|frame| frame.truncate(frame.len() - 1))?;
        ensure!(verdict == Pass && before == after, "longer than it is");
    }
    Ok(())
}
