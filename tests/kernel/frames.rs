//! Frames without a translatable packet, and odd frames.

use anyhow::{Context, Result, ensure};
use proxy_common::names::INGRESS;
use testbed::rows::words;
use testbed::test_run::Verdict::Pass;

use crate::fixture::{counted_since, fixtures};

#[test]
#[expect(clippy::too_many_lines, reason = "a table of frames")]
fn foreign_frames_pass_untouched() -> Result<()> {
    for fixture in fixtures("odd")? {
        let v4 = fixture.names.addr("web")?.is_ipv4();
        let syn = fixture.names.frame("tcp S client:1000 > web:80")?;
        let ip_len = if v4 { 20 } else { 40 };
        let edited = |edit: &dyn Fn(&mut Vec<u8>)| {
            let mut frame = syn.clone();
            edit(&mut frame);
            frame
        };
        let set = |at: usize, bytes: &[u8]| {
            edited(&|frame| frame[at..at + bytes.len()].copy_from_slice(bytes))
        };
        let cut = |l4_len: u8| {
            edited(&|frame| {
                frame.truncate(14 + ip_len + usize::from(l4_len));
                let at = if v4 { 17 } else { 19 };
                frame[at] = if v4 { 20 + l4_len } else { l4_len };
            })
        };
        let mut cases = vec![
            ("ARP", set(12, &[0x08, 0x06]), "not_ip"),
            ("LLDP", set(12, &[0x88, 0xcc]), "not_ip"),
            ("a TCP header cut short", cut(12), "malformed"),
            ("a TCP header cut before its checksum", cut(16), "malformed"),
            ("a TCP header cut before its end", cut(19), "malformed"),
        ];
        if v4 {
            cases.extend([
                ("IP version 5", set(14, &[0x55]), "malformed"),
                ("a header of 16 bytes", set(14, &[0x44]), "malformed"),
                (
                    "a total length beyond the packet",
                    set(16, &[5, 0xdc]),
                    "malformed",
                ),
                (
                    "a total length within the header",
                    set(16, &[0, 24]),
                    "malformed",
                ),
                (
                    "a total length of the TCP header, almost",
                    set(16, &[0, 39]),
                    "malformed",
                ),
                (
                    "a header longer than the packet",
                    set(14, &[0x4f]),
                    "malformed",
                ),
                ("a later fragment", set(20, &[0, 1]), "fragment"),
                ("ICMP", set(23, &[1]), "protocol"),
                ("GRE", set(23, &[47]), "protocol"),
            ]);
            for at in [26, 30] {
                let strange = [[127, 0, 0, 1], [224, 0, 0, 1], [255; 4], [0; 4]];
                cases.extend(
                    strange.map(|addr| ("an address of no host", set(at, &addr), "not_unicast")),
                );
            }
        } else {
            let link_local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
            let loopback = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
            cases.extend([
                ("IP version 4", set(14, &[0x45]), "malformed"),
                (
                    "a payload length beyond the packet",
                    set(18, &[5, 0xdc]),
                    "malformed",
                ),
                // The TCP header stands in the place of these headers: port 1000 reads as 3, 232.
                (
                    "a hop-by-hop header of 1,864 bytes",
                    set(20, &[0]),
                    "malformed",
                ),
                (
                    "a routing header with segments left",
                    set(20, &[43]),
                    "protocol",
                ),
                ("a fragment of no transport", set(20, &[44]), "fragment"),
                ("ESP", set(20, &[50]), "protocol"),
                ("AH", set(20, &[51]), "protocol"),
                ("ICMPv6", set(20, &[58]), "protocol"),
                ("no next header", set(20, &[59]), "protocol"),
                ("to loopback", set(38, &loopback), "not_unicast"),
                ("from link-local", set(22, &link_local), "not_unicast"),
            ]);
        }
        for (name, frame, counted) in cases {
            let before = fixture.counts()?;
            let outcome = fixture
                .run(INGRESS, &frame)
                .with_context(|| name.to_owned())?;
            ensure!(
                outcome.verdict == Pass && outcome.packet == frame,
                "{name}: {:?}",
                outcome.verdict
            );
            let now = counted_since(&before, &fixture.counts()?);
            ensure!(now == words(counted), "{name}: {now:?}");
        }
    }
    Ok(())
}

/// Ethernet pads short frames; the padding belongs to no packet.
#[test]
fn padding_stays() -> Result<()> {
    for fixture in fixtures("padding")? {
        for packet in [
            "tcp S client:1000 > web:80",
            "udp client:1000 > web:53",
            "sctp INIT client:1000 > web:3868",
        ] {
            let frame = fixture.names.frame(packet)?;
            let padding: Vec<u8> = (1..=46).collect();
            let outcome = fixture.run(INGRESS, &[&frame[..], &padding].concat())?;
            ensure!(
                outcome.verdict == Pass && outcome.packet[..frame.len()] != frame,
                "{packet}: not rewritten"
            );
            ensure!(
                outcome.packet[frame.len()..] == padding,
                "{packet}: padding became {:?}",
                outcome.packet
            );
            let text = fixture.names.text(&outcome.packet)?;
            ensure!(text.contains("> pod:"), "{packet} became {text}");
        }
    }
    Ok(())
}

#[test]
fn zero_udp_checksum_stays_zero() -> Result<()> {
    for fixture in fixtures("zero")? {
        if !fixture.names.addr("web")?.is_ipv4() {
            continue; // Illegal over IPv6 (RFC 8200 §8.1).
        }
        let mut frame = fixture.names.frame("udp client:1000 > web:53 +4")?;
        frame[40..42].fill(0);
        let outcome = fixture.run(INGRESS, &frame)?;
        ensure!(
            outcome.packet[40..42] == [0, 0],
            "the checksum became {:?}",
            &outcome.packet[40..42]
        );
        assert_eq!(
            fixture.names.text(&outcome.packet)?,
            "udp client:1000 > pod:5353 +4"
        );
    }
    Ok(())
}
