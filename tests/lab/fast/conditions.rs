//! Rules, filters, programs and policies for packets between pods appear and disappear.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use anyhow::{Context, Result, anyhow};
use aya::programs::tc::TcAttachOptions;
use aya::programs::{LinkOrder, SchedClassifier, TcAttachType};
use proxy_datapath::verifier;
use testbed::agent::{DEADLINE, wait_until};
use testbed::cases::Running;
use testbed::echo::Protocol;
use testbed::lab::{CLUSTER_PODS, Family};

use super::fixture::{Fixture, Path};
use super::{exchange, says, until_bypass};
use crate::churn::neighbours::{OTHER, other};
use crate::forbid;
use crate::tables::alone;

/// A bypass connection, and datagrams, which no client repeats after a loss.
pub(super) fn rules_come_and_go_under_load_and_nothing_is_lost(
    running: &Running<Fixture>,
) -> Result<()> {
    const ROUNDS: usize = 5;
    let Running { fixture, agent } = running;
    let mut kept = Vec::new();
    for family in Family::ALL {
        until_bypass(fixture, agent, family)?;
        for protocol in Protocol::COMMON {
            kept.push(fixture.dial(Path::Local, protocol, family)?);
        }
    }
    let done = AtomicBool::new(false);
    let exchanged = AtomicU64::new(0);
    let opened = AtomicU64::new(0);
    let node = &fixture.lab.n1.host.ns;
    thread::scope(|scope| {
        let exchange_all = || kept.iter_mut().try_for_each(|one| exchange(one, 1, 1_000));
        let exchanges = scope.spawn(|| repeat(&done, &exchanged, exchange_all));
        let openings = scope.spawn(|| {
            let open = |family| {
                fixture
                    .dial(Path::Local, Protocol::Tcp, family)
                    .and_then(|mut one| exchange(&mut one, 1, 100))
            };
            repeat(&done, &opened, || {
                Family::ALL.into_iter().try_for_each(open)
            })
        });
        // A connection that merely waits for the rules to go does not count.
        let goes_on = || {
            let before = [&exchanged, &opened].map(|count| count.load(Ordering::Relaxed));
            wait_until(DEADLINE, "connections go on and are opened", || {
                let now = [&exchanged, &opened].map(|count| count.load(Ordering::Relaxed));
                Ok(exchanges.is_finished()
                    || now
                        .iter()
                        .zip(before)
                        .all(|(now, before)| *now > before + 2))
            })
        };
        let come_and_go = || {
            for _ in 0..ROUNDS {
                // Conntrack has not seen the kept connections from their start, so it must see none
                // of their packets.
                forbid(
                    node,
                    "ct state invalid drop\ntcp flags & (syn | ack) == ack ct state new drop\ncounter",
                )?;
                says(
                    agent,
                    "because rule 2 of chain forward of table inet netpol may drop the packet",
                )?;
                goes_on()?;
                node.nft("delete table inet netpol")?;
                says(agent, "; bypass for connections between")?;
                goes_on()?;
            }
            anyhow::Ok(())
        };
        let came_and_went = come_and_go();
        done.store(true, Ordering::Relaxed);
        let joined = |thread: thread::ScopedJoinHandle<'_, Result<()>>| {
            thread
                .join()
                .map_err(|_| anyhow!("a thread of the load panicked"))?
        };
        joined(exchanges).context("connections that stay")?;
        joined(openings).context("connections that are opened")?;
        came_and_went
    })
}

/// Repeats an action until `done`, and counts the repetitions.
fn repeat(done: &AtomicBool, times: &AtomicU64, mut act: impl FnMut() -> Result<()>) -> Result<()> {
    while !done.load(Ordering::Relaxed) {
        act().with_context(|| format!("after {} times", times.load(Ordering::Relaxed)))?;
        times.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

pub(super) fn filters_of_other_programs_meet_bypass_connections(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    let node = &fixture.lab.n1.host.ns;
    let tc = |words: String, more: &[&str]| {
        node.exec(Command::new("tc").args(words.split(' ')).args(more))
            .map(drop)
    };
    for (device, hook) in [("p1a", "egress"), ("p1b", "egress"), ("p1b", "ingress")] {
        // Where kpx attaches by TCX, the device lacks this qdisc.
        let was_missing = tc(format!("qdisc add dev {device} clsact"), &[]).is_ok();
        // The offset of the header byte with the transport protocol.
        for (family, at) in [(Family::V4, 23), (Family::V6, 20)] {
            until_bypass(fixture, agent, family)?;
            // A classic BPF program that drops TCP.
            let program = format!("4,48 0 0 {at},21 0 1 6,6 0 0 2,6 0 0 4294967295");
            tc(
                format!("filter add dev {device} {hook} prio 5"),
                &["bpf", "da", "bytecode", &program],
            )?;
            wait_until(
                DEADLINE,
                &format!("the filter at {hook} of {device} decides about {family}"),
                || Ok(fixture.is_blocked(family)),
            )?;
            tc(format!("filter del dev {device} {hook} prio 5"), &[])?;
        }
        if was_missing {
            tc(format!("qdisc del dev {device} clsact"), &[])?;
        }
    }
    Ok(())
}

/// A foreign program on the device, which passes every packet to the next program.
#[test]
fn programs_of_others_meet_bypass_connections() -> Result<()> {
    let _alone = alone();
    let fixture = Fixture::new()?;
    let agent = fixture.kpx(&[
        "--fast-path",
        "auto",
        "--attach",
        "tcx",
        "--iptables-sync-period",
        "1s",
    ])?;
    let node = &fixture.lab.n1.host.ns;
    for (device, direction) in [
        ("p1a", TcAttachType::Ingress),
        ("p1b", TcAttachType::Egress),
    ] {
        for family in Family::ALL {
            until_bypass(&fixture, &agent, family)?;
        }
        let mut other = other()?;
        let program: &mut SchedClassifier = other
            .program_mut(OTHER)
            .context("no other program")?
            .try_into()?;
        verifier::load(|| program.load())?;
        node.run(|| {
            program.attach_with_options(
                device,
                direction,
                TcAttachOptions::TcxOrder(LinkOrder::first()),
            )
        })?;
        for family in Family::ALL {
            wait_until(
                DEADLINE,
                &format!("connections meet the program at {device}"),
                || {
                    let before = fixture.stack_saw(&agent)?;
                    exchange(
                        &mut fixture.dial(Path::Local, Protocol::Tcp, family)?,
                        1,
                        100,
                    )?;
                    Ok(fixture.stack_saw(&agent)? > before)
                },
            )?;
        }
        drop(other);
    }
    for family in Family::ALL {
        until_bypass(&fixture, &agent, family)?;
    }
    agent.stop()
}

pub(super) fn ipsec_policies_for_forwarded_packets_hold_for_bypass_connections(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    for family in Family::ALL {
        until_bypass(fixture, agent, family)?;
        let pod = fixture.lab.host("p1a").addrs.ip(family);
        let len = if family == Family::V4 { 32 } else { 128 };
        let packets = format!("src {pod}/{len} dst {} dir fwd", CLUSTER_PODS.cidr(family));
        fixture
            .lab
            .n1
            .host
            .ns
            .ip(&format!("xfrm policy add {packets} action block"))?;
        wait_until(DEADLINE, "the policy decides", || {
            Ok(fixture.is_blocked(family))
        })?;
        says(agent, "auto: off, because 1 IPsec policies")?;
        fixture
            .lab
            .n1
            .host
            .ns
            .ip(&format!("xfrm policy delete {packets}"))?;
    }
    says(agent, "; bypass for connections")
}
