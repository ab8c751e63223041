//! `sessionAffinity: ClientIP`.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Service, idle};
use testbed::echo::{Dial, Protocol};
use testbed::lab::Family;

use crate::fixture::{Fixture, combinations};
use crate::services::PORT;

const BACKENDS: [&str; 4] = ["p1b", "p1c", "p2a", "p2b"];

/// Other backends may go, and the order may change; only the removal of the client's backend gives
/// it another one, permanently. Each protocol and family has its own Service, because the clients
/// differ in their backends.
pub(super) fn sticks(fixture: &Fixture) -> Result<()> {
    const NAMES: [&str; 6] = [
        "sticky-1", "sticky-2", "sticky-3", "sticky-4", "sticky-5", "sticky-6",
    ];
    let service = |(name, nth)| Service::new(name, nth, &BACKENDS, PORT).affinity(60);
    let services: Vec<Service> = NAMES.into_iter().zip(80..).map(service).collect();
    let put = |backends: &[Vec<&'static str>]| {
        let mut all = services.iter().zip(backends);
        fixture.settle(|| {
            all.try_for_each(|(service, backends)| fixture.put(&service.clone().backends(backends)))
        })
    };
    put(&vec![BACKENDS.to_vec(); NAMES.len()])?;
    let chosen = || -> Result<Vec<String>> {
        let the_one = |(service, (protocol, family)): (&Service, (Protocol, Family))| {
            let answered =
                fixture.answering("p1a", Dial::new(protocol, service.frontend(family)), 20)?;
            ensure!(
                answered.len() == 1,
                "{answered:?} answer one client, {protocol} {family}"
            );
            answered.into_iter().next().context("somebody answers")
        };
        services.iter().zip(combinations()).map(the_one).collect()
    };
    let without = |gone: &str| {
        BACKENDS
            .into_iter()
            .filter(|backend| *backend != gone)
            .collect::<Vec<_>>()
    };
    let firsts = chosen()?;
    let others: Vec<_> = firsts.iter().map(|first| without(first)).collect();

    put(&others
        .iter()
        .map(|others| without(others[0]))
        .collect::<Vec<_>>())?;
    ensure!(
        chosen()? == firsts,
        "another backend went, and {firsts:?} do not answer any more"
    );

    put(&others)?;
    let seconds = chosen()?;
    put(&vec![BACKENDS.to_vec(); NAMES.len()])?;
    ensure!(
        chosen()? == seconds,
        "the first backend came back, and {seconds:?} do not answer any more"
    );
    fixture.settle(|| {
        services
            .iter()
            .try_for_each(|service| fixture.delete(service))
    })
}

/// Each protocol and family has its own affinity, so chance can hardly repeat all choices.
pub(super) fn expires(fixture: &Fixture) -> Result<()> {
    let timeout_secs = 4;
    let service = Service::new("forgetful", 63, &BACKENDS, PORT).affinity(timeout_secs);
    fixture.start(&service)?;
    let choices = |fixture: &Fixture| -> Result<BTreeMap<(Protocol, Family), String>> {
        let choice = |(protocol, family)| {
            let answer = fixture.dial("p1c", Dial::new(protocol, service.frontend(family)))?;
            Ok(((protocol, family), answer.backend))
        };
        combinations().map(choice).collect()
    };
    let first = choices(fixture)?;
    for _ in 0..5 {
        idle(Duration::from_secs(1))?; // 5 s in all.
        ensure!(
            choices(fixture)? == first,
            "use does not keep the choices {first:?}"
        );
    }
    for _ in 0..3 {
        idle(Duration::from_secs(u64::from(timeout_secs) + 1))?;
        if choices(fixture)? != first {
            return fixture.end(&service);
        }
    }
    anyhow::bail!("idle time does not end the choices {first:?}")
}
