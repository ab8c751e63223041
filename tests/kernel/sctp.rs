//! SCTP: the chunks that open and end an association, and the checksum of every output packet.

use anyhow::Result;
use proxy_common::names::INGRESS;

use crate::fixture::fixtures;
use crate::packets::packet_tests;

packet_tests! {
    sctp:
    association_opens_and_exchanges_data,
    only_init_opens_association,
    ended_association_gives_its_port_back,
    host_has_associations_too,
    missing_backend_is_reported_by_icmp_error,
}

#[test]
fn checksum_is_right_at_every_length() -> Result<()> {
    for mut fixture in fixtures("crc")? {
        fixture.rows("sctp::checksum_is_right_at_every_length")?;
        for len in (1..64).chain([255, 256, 257, 1_000, 1_400, 3_400]) {
            let (there, out) = (
                format!("sctp DATA client:1000 > web:3868 +{len}"),
                format!("sctp DATA client:1000 > pod:13868 +{len}"),
            );
            let outcome = fixture.run(INGRESS, &fixture.names.frame(&there)?)?;
            assert_eq!(fixture.names.text(&outcome.packet)?, out);
        }
    }
    Ok(())
}

/// The kernel's SCTP leaves a zero checksum to the sending device, or to the program in that
/// device's place.
#[test]
fn pending_checksum_stays_pending() -> Result<()> {
    for mut fixture in fixtures("later")? {
        let mut frame = fixture
            .names
            .frame("sctp INIT client:1000 > web:3868 +16")?;
        let checksum =
            14 + if fixture.names.addr("web")?.is_ipv4() {
                20
            } else {
                40
            } + 8;
        frame[checksum..][..4].fill(0);
        let outcome = fixture.run(INGRESS, &frame)?;
        assert_eq!(outcome.packet[checksum..][..4], [0; 4]);
        assert_eq!(
            outcome.packet[checksum - 6..][..2],
            13_868_u16.to_be_bytes(),
            "it is translated"
        );
        fixture.rows("sctp::pending_checksum_stays_pending")?;
    }
    Ok(())
}
