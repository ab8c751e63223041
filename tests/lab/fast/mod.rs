//! `--fast-path`: packets of open connections skip the node's stack, and only the clock shows it.

mod fixture;

use anyhow::{Context, Result, ensure};
use testbed::agent::{DEADLINE, wait_until};
use testbed::echo::{Connection, Protocol, pattern};
use testbed::lab::Family;

use fixture::{Fixture, Path, said};

/// Exchanges of a flow, and packets of it that may take the stack: its opening, its end, what conntrack hears of.
const EXCHANGES: usize = 50;
const ON_STACK: u64 = 20;

#[test]
fn open_connections_skip_the_stack_wherever_their_backend_is() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.lab.set_firewall(true)?;
    fixture.watch()?;
    let agent = fixture.start("on")?;
    for family in Family::ALL {
        for protocol in Protocol::ALL {
            for path in Path::ALL {
                let what = format!("{protocol:?} over {family}, {path:?}");
                let mut connection = fixture.dial(path, protocol, family).with_context(|| what.clone())?;
                exchange(&mut connection, 3, 100).with_context(|| what.clone())?;
                let before = fixture.passed(&agent)?;
                exchange(&mut connection, EXCHANGES, 1_000).with_context(|| what.clone())?;
                let (fast, on_stack) = fixture.passed(&agent)?.since(before);
                let least = 2 * EXCHANGES as u64 - ON_STACK;
                if path.is_fast() {
                    ensure!(fast >= least && on_stack <= ON_STACK, "{what}: {fast} fast, {on_stack} by the stack");
                } else {
                    ensure!(fast == 0 && on_stack >= least, "{what}: {fast} fast, {on_stack} by the stack");
                }
            }
        }
    }
    let invalid = fixture.lab.invalid_packets()?;
    ensure!(invalid.is_empty(), "conntrack: {invalid:?}");
    let status = agent.status()?;
    let said = status["options"]["fastPath"].as_str().unwrap_or_default().to_owned();
    ensure!(said.starts_with("on, past ") && said.contains("chain forward of table inet firewall drops"), "{said}");
    ensure!(agent.log().contains("packets of open connections skip the stack, and these rules"), "{}", agent.log());
    agent.stop()
}

#[test]
fn conntrack_sees_the_end_of_long_streams() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.lab.set_firewall(true)?;
    let agent = fixture.start("on")?;
    for (family, path) in [(Family::V4, Path::Local), (Family::V6, Path::Remote), (Family::V4, Path::NodePortRemote)] {
        let mut connection = fixture.dial(path, Protocol::Tcp, family)?;
        exchange(&mut connection, 2, 4 << 20).with_context(|| format!("{path:?}"))?;
        ensure!(fixture.tracked("ESTABLISHED")? > 0, "{path:?}: conntrack has not seen the opening");
        said(connection.exchange_last(&pattern(1 << 20)))?;
        wait_until(DEADLINE, "conntrack has seen the end", || Ok(fixture.tracked("ESTABLISHED")? == 0))?;
    }
    let invalid = fixture.lab.invalid_packets()?;
    ensure!(invalid.is_empty(), "conntrack: {invalid:?}");
    agent.stop()
}

#[test]
fn a_connection_lives_on_when_the_fast_path_comes_and_goes() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.lab.set_firewall(true)?;
    fixture.watch()?;
    let agent = fixture.start("off")?;
    let mut connections = Vec::new();
    for (path, protocol) in [(Path::Local, Protocol::Tcp), (Path::Remote, Protocol::Tcp), (Path::Local, Protocol::Udp)]
    {
        connections.push(fixture.dial(path, protocol, Family::V4)?);
    }
    exchange_all(&mut connections)?;
    ensure!(fixture.passed(&agent)?.fast == 0, "fast, though it is off");
    agent.stop()?;
    for (setting, is_fast) in [("on", true), ("off", false), ("on", true)] {
        let agent = fixture.start(setting)?;
        wait_until(DEADLINE, "the fast path is as it was asked for", || {
            exchange_all(&mut connections)?;
            let before = fixture.passed(&agent)?;
            exchange_all(&mut connections)?;
            let (fast, on_stack) = fixture.passed(&agent)?.since(before);
            Ok(if is_fast { fast > on_stack } else { fast == 0 })
        })?;
        fixture.move_services()?;
        exchange_all(&mut connections[..2])?;
        agent.stop()?;
        // No agent runs, and packets go on as before.
        exchange_all(&mut connections[..2])?;
    }
    let invalid = fixture.lab.invalid_packets()?;
    ensure!(invalid.is_empty(), "conntrack: {invalid:?}");
    Ok(())
}

/// By what the route says, if it insists: the kernel's look-up asks for no other.
#[test]
fn hops_are_counted_and_what_is_too_long_is_answered() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.watch()?;
    fixture.count_hops()?;
    let agent = fixture.start("on")?;
    for family in Family::ALL {
        let mut connection = fixture.dial(Path::Local, Protocol::Tcp, family)?;
        exchange(&mut connection, EXCHANGES, 1_000)?;
        let (one, other) = fixture.hops()?;
        ensure!(one >= EXCHANGES as u64 && other == 0, "{family}: {one} packets had one hop behind them, {other} not");

        let before = fixture.passed(&agent)?.fast;
        fixture.narrow(family, 1_300)?;
        exchange(&mut connection, 3, 200_000)?;
        ensure!(fixture.too_long()? > 0, "{family}: no client was told that packets are too long");
        ensure!(fixture.passed(&agent)?.fast > before + 20, "{family}: what is short enough is slow");
        fixture.narrow(family, 1_500)?;
        fixture.expire(family)?;
    }
    agent.stop()
}

#[test]
fn automatic_is_off_as_long_as_rules_are_found() -> Result<()> {
    let fixture = Fixture::new()?;
    let agent = fixture.start("auto")?;
    let is = |what: &str| {
        wait_until(DEADLINE, what, || {
            let status = agent.status()?;
            Ok(status["options"]["fastPath"].as_str().is_some_and(|said| said.contains(what)))
        })
    };
    is("auto: on, no rules found")?;
    let mut connection = fixture.dial(Path::Local, Protocol::Tcp, Family::V4)?;
    exchange(&mut connection, EXCHANGES, 100)?;
    ensure!(fixture.fast(&agent)? > 0, "nothing was fast");
    fixture.lab.set_firewall(true)?;
    is("auto: off, because chain forward of table inet firewall drops")?;
    let before = fixture.fast(&agent)?;
    exchange(&mut connection, EXCHANGES, 100)?;
    ensure!(fixture.fast(&agent)? == before, "fast, though there are rules");
    fixture.lab.set_firewall(false)?;
    is("auto: on, no rules found")?;
    let before = fixture.fast(&agent)?;
    exchange(&mut connection, EXCHANGES, 100)?;
    ensure!(fixture.fast(&agent)? > before, "slow, though there are no rules any more");
    agent.stop()
}

fn exchange(connection: &mut Connection, times: usize, len: usize) -> Result<()> {
    (0..times).try_for_each(|_| said(connection.exchange(&pattern(len))).map(drop))
}

fn exchange_all(connections: &mut [Connection]) -> Result<()> {
    connections.iter_mut().try_for_each(|connection| exchange(connection, 20, 1_000))
}
