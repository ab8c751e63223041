//! Fragments: later fragments have no ports and follow the first one.

use anyhow::{Result, ensure};
use proxy_common::names::INGRESS;
use testbed::rows::parse::Row;
use testbed::test_run::Verdict::{self, Drop, Pass};
use testbed::text::Names;

use crate::fixture::{Fixture, fixtures};
use crate::packets::{packet_tests, rows_of};

packet_tests! {
    fragments:
    later_fragments_follow_first,
    fragments_follow_flow_that_changes_source,
    host_sends_and_receives_fragments,
    fragments_without_flow_are_not_remembered,
    repeated_identification_replaces_earlier_packet,
    first_fragment_without_whole_header_reaches_no_service,
}

#[test]
fn later_fragment_opens_no_flow() -> Result<()> {
    for mut fixture in fixtures("fragments")? {
        fixture.rows("fragments::later_fragment_opens_no_flow/before")?;
        // The ports coincide by chance once in thousands of runs.
        if fixture.names.port("$r") != fixture.names.port("$q") {
            fixture.rows("fragments::later_fragment_opens_no_flow/after")?;
        }
    }
    Ok(())
}

#[test]
fn split_datagram_is_whole_again_with_its_checksum() -> Result<()> {
    let rows = rows_of("fragments::split_datagram_is_whole_again_with_its_checksum")?;
    for mut fixture in fixtures("split")? {
        for (id, row) in (0..).zip(&rows) {
            let frame = fixture.names.frame(&row.packet)?;
            // Two hooks of one host see the same fragments.
            let fragments = split(&frame, 40, id / 2);
            ensure!(
                fragments.len() > 2,
                "{}: only {} fragments",
                row.place,
                fragments.len()
            );
            let rewritten = run(&fixture, row, &fragments)?;
            let found = fixture.names.learn(&join(&rewritten), &row.out)?;
            ensure!(
                found == row.out,
                "{}: became {found}, not {}",
                row.place,
                row.out
            );
        }
    }
    Ok(())
}

fn run(fixture: &Fixture, row: &Row, fragments: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
    let one = |fragment: &Vec<u8>| {
        let outcome = fixture.run_from(row.program, fragment, &row.packet)?;
        ensure!(
            outcome.verdict == row.verdict(),
            "{}: {:?}",
            row.place,
            outcome.verdict
        );
        Ok(outcome.packet)
    };
    fragments.iter().map(one).collect()
}

/// Splits a frame into fragments of `len` bytes, as an IPv4 router or an IPv6 sender does.
fn split(frame: &[u8], len: usize, id: u32) -> Vec<Vec<u8>> {
    let v4 = frame[14] >> 4 == 4;
    let (header, transport) = frame.split_at(if v4 { 34 } else { 54 });
    let fragments = transport.chunks(len).enumerate().map(|(n, payload)| {
        let more = (n + 1) * len < transport.len();
        let at = n * len / 8;
        let mut header = header.to_vec();
        if v4 {
            let fragment = at as u16 | if more { 0x2000 } else { 0 };
            header[16..18].copy_from_slice(&(20 + payload.len() as u16).to_be_bytes());
            header[18..20].copy_from_slice(&(id as u16).to_be_bytes());
            header[20..22].copy_from_slice(&fragment.to_be_bytes());
            fix_header(&mut header);
            return [&header, payload].concat();
        }
        let fragment = [
            &[header[20], 0][..],
            &((at as u16) << 3 | u16::from(more)).to_be_bytes(),
            &id.to_be_bytes(),
        ];
        header[18..20].copy_from_slice(&(8 + payload.len() as u16).to_be_bytes());
        header[20] = 44;
        [&header, fragment.concat().as_slice(), payload].concat()
    });
    fragments.collect()
}

/// Reassembles a packet from fragments in order.
fn join(fragments: &[Vec<u8>]) -> Vec<u8> {
    let v4 = fragments[0][14] >> 4 == 4;
    let start = if v4 { 34 } else { 62 };
    let transport: Vec<u8> = fragments
        .iter()
        .flat_map(|fragment| fragment[start..].to_vec())
        .collect();
    let mut header = fragments[0][..if v4 { 34 } else { 54 }].to_vec();
    if v4 {
        for fragment in fragments {
            assert_eq!(sum(&fragment[14..34]), 0xffff, "an IPv4 header checksum");
            assert_eq!(fragment[26..34], header[26..34], "addresses differ");
        }
        header[16..18].copy_from_slice(&(20 + transport.len() as u16).to_be_bytes());
        header[20..22].fill(0);
        fix_header(&mut header);
    } else {
        assert!(
            fragments
                .iter()
                .all(|fragment| fragment[22..54] == header[22..54]),
            "addresses differ"
        );
        header[18..20].copy_from_slice(&(transport.len() as u16).to_be_bytes());
        header[20] = fragments[0][54];
    }
    [header, transport].concat()
}

fn fix_header(header: &mut [u8]) {
    header[24..26].fill(0);
    let checksum = !sum(&header[14..34]);
    header[24..26].copy_from_slice(&checksum.to_be_bytes());
}

/// Returns the one's complement sum (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes
        .chunks(2)
        .map(|two| u32::from(u16::from_be_bytes([two[0], two[1]])))
        .sum();
    ((sum & 0xffff) + (sum >> 16)) as u16
}

#[test]
fn lying_fragments_change_nothing_but_ip_header() -> Result<()> {
    for mut fixture in fixtures("lies")? {
        fixture.rows("fragments::lying_fragments_change_nothing_but_ip_header")?;
        let changed = |names: &Names,
                       text: &str,
                       edit: &dyn Fn(&mut Vec<u8>)|
         -> Result<(Vec<u8>, Vec<u8>, Verdict)> {
            let mut frame = names.frame(text)?;
            edit(&mut frame);
            let outcome = fixture.run(INGRESS, &frame)?;
            Ok((frame, outcome.packet, outcome.verdict))
        };
        let v4 = fixture.names.addr("web")?.is_ipv4();
        let (len_at, fragment_header, header_len) = if v4 { (16, 0, 20) } else { (18, 8, 0) };
        // A first fragment with less than a transport header, followed by arbitrary bytes, to a
        // Service.
        for (text, most) in [
            ("udp client:1000 > web:53 +64", 7),
            ("tcp S client:1000 > web:80 +64", 19),
        ] {
            for len in 0..=most {
                let total = (header_len + fragment_header + len) as u16;
                let edit = |frame: &mut Vec<u8>| {
                    frame[len_at..len_at + 2].copy_from_slice(&total.to_be_bytes())
                };
                let (.., verdict) = changed(&fixture.names, &format!("[first=9] {text}"), &edit)?;
                ensure!(verdict == Drop, "{text}: {len} bytes");
            }
        }
        // A later fragment changes only in its IP header.
        for (len, behind) in [(1, 63), (8, 0), (64, 0)] {
            let total = (header_len + fragment_header + len) as u16;
            let (before, after, verdict) =
                changed(&fixture.names, "[later=7] udp client > web +64", &|frame| {
                    frame[len_at..len_at + 2].copy_from_slice(&total.to_be_bytes());
                    frame.truncate(frame.len() - 64 + len + behind);
                })?;
            let start = if v4 { 34 } else { 54 };
            ensure!(
                verdict == Pass && before[..start] != after[..start],
                "{len} bytes and {behind}: not rewritten"
            );
            ensure!(
                before[start..] == after[start..],
                "{len} bytes and {behind}: written to"
            );
        }
        // The length field exceeds the packet.
        let (before, after, verdict) =
            changed(&fixture.names, "[later=7] udp client > web +64", &|frame| {
                frame.truncate(frame.len() - 1)
            })?;
        ensure!(verdict == Pass && before == after, "longer than it is");
    }
    Ok(())
}
