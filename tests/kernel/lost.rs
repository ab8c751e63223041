//! Connections that the agent has ended because their backends went with their nodes.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use proxy_common::names::INGRESS;
use proxy_core::health::Path;

use crate::fixture::{Fixture, fixtures};
use crate::packets::packet_tests;

packet_tests! {
    lost:
    next_packet_to_lost_node_is_answered,
    socket_of_host_is_answered,
    socket_that_dials_its_own_node_is_answered,
    client_outside_is_answered,
    backend_that_speaks_takes_the_end_back,
    half_open_connection_leaves_lost_backend,
    connection_past_the_stack_is_answered,
    bypass_connection_is_answered,
}

/// A client accepts a RST only with exactly the next sequence number that it expects (RFC 5961
/// §3.2).
#[test]
fn answer_has_the_number_that_the_client_expects() -> Result<()> {
    for mut fixture in fixtures("lost")? {
        fixture.rows("lost::answer_has_the_number_that_the_client_expects/opens")?;
        fixture.end_connections("web:80", "pod:8080")?;
        let frame = fixture.names.frame("tcp A@77000 client:1000 > web:80 +5")?;
        let answer = fixture.run(INGRESS, &frame)?.packet;
        let tcp = if fixture.is_v4() { 14 + 20 } else { 14 + 40 };
        let seq = answer.get(tcp + 4..tcp + 8).context("a TCP header")?;
        ensure!(seq == 77_000_u32.to_be_bytes(), "{seq:?}");
        // `text` verifies the checksums.
        ensure!(fixture.names.text(&answer)? == "tcp R web:80 > client:1000");
    }
    Ok(())
}

/// The control plane had lost the node for a while, during which the client sent nothing.
#[test]
fn connection_to_restored_endpoint_survives() -> Result<()> {
    for mut fixture in fixtures("lost")? {
        fixture.rows("lost::answer_has_the_number_that_the_client_expects/opens")?;
        fixture.end_connections("web:80", "pod:8080")?;
        let mut flows = fixture.bench.datapath.flows.lost()?;
        flows.spare(&[fixture.path("web:80", "pod:8081")?].into())?;
        let frame = fixture.names.frame("tcp A client:1000 > web:80 +5")?;
        let run = |fixture: &Fixture| -> Result<String> {
            fixture.names.text(&fixture.run(INGRESS, &frame)?.packet)
        };
        ensure!(
            run(&fixture)? == "tcp R web:80 > client:1000",
            "another backend is back"
        );
        flows.spare(&[fixture.path("web:80", "pod:8080")?].into())?;
        ensure!(
            run(&fixture)? == "tcp A client:1000 > pod:8080 +5",
            "{}",
            run(&fixture)?
        );
    }
    Ok(())
}

impl Fixture {
    /// Ends the connections of a Service to a backend, as the agent does.
    pub(crate) fn end_connections(&self, service: &str, backend: &str) -> Result<()> {
        let path = self.path(service, backend)?;
        let mut flows = self.bench.datapath.flows.lost()?;
        ensure!(
            flows.find(&[path].into())?.open.contains(&path),
            "no flow of {service} to {backend}"
        );
        flows.end(&[path].into()).map(drop)
    }

    fn path(&self, service: &str, backend: &str) -> Result<Path> {
        let at = |text: &str| -> Result<SocketAddr> {
            let (name, port) = text.split_once(':').context("a port")?;
            Ok((self.names.addr(name)?, port.parse()?).into())
        };
        Ok(Path {
            service: at(service)?,
            backend: at(backend)?,
        })
    }
}
