//! A full conntrack table. Each network namespace has its own, up to the machine's limit.

use anyhow::{Context, Result, ensure};
use testbed::agent::wait_until;
use testbed::conntrack::ConnectionTable;
use testbed::echo::{Dial, Protocol};
use testbed::lab::Family;

use crate::churn::fixture::{Fixture, PORT, PROMPT, TRY};
use crate::faults::process::CLIENTS;

const TRACKING: &str = "table inet tracking {
    chain forward { type filter hook forward priority 0; ct state established accept; }
    chain input { type filter hook input priority 0; ct state established accept; }
    chain output { type filter hook output priority 0; ct state established accept; }
}";

#[test]
fn full_connection_table_costs_no_open_connection() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.node().nft(TRACKING)?;
    ["off", "on"].iter().try_for_each(|fast_path| {
        survives(&fixture, fast_path).with_context(|| format!("fast path {fast_path}"))
    })
}

fn survives(fixture: &Fixture, fast_path: &str) -> Result<()> {
    let kpx = fixture
        .base
        .kpx(&["--fast-path", fast_path, "--iptables-sync-period", "1s"])?;
    let both = CLIENTS
        .iter()
        .flat_map(|client| Family::ALL.map(|family| (*client, family)));
    let mut kept = both
        .map(|(client, family)| fixture.connect(client, family))
        .collect::<Result<Vec<_>>>()?;
    let table = ConnectionTable::of(fixture.node())?;
    table.fill()?;
    // The stack drops new connections, with or without a Service. A bypass connection between two
    // pods of the node needs no entry in the table; a connection of a client outside does.
    let direct = Dial::new(
        Protocol::Tcp,
        (fixture.lab.host("p2a").addrs.ip(Family::V4), PORT).into(),
    )
    .deadline(TRY);
    ensure!(
        direct
            .exchange(&fixture.lab.host("p1a").ns, b"hello")
            .is_err(),
        "there is room without a Service"
    );
    for family in Family::ALL {
        let outside = fixture
            .dial("x", family)
            .deadline(TRY)
            .exchange(&fixture.lab.host("x").ns, b"hello");
        ensure!(outside.is_err(), "there is room for a Service by {family}");
    }
    for connection in &mut kept {
        connection
            .exchange(b"while the table is full")
            .context("an open connection")?;
    }
    ensure!(kpx.status()?["healthy"] == true, "{}", kpx.status()?);
    table.flush()?;
    wait_until(PROMPT, "all are served", || Ok(fixture.serves(&CLIENTS)))?;
    for connection in &mut kept {
        connection
            .exchange(b"after that")
            .context("an open connection")?;
    }
    kpx.stop()
}
