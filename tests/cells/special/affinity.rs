//! `sessionAffinity: ClientIP`.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kpx_tests::agent::Service;
use kpx_tests::echo::{Dial, Protocol};
use kpx_tests::lab::Family;

use crate::bed::{Bed, combinations, idle};
use crate::services::PORT;

const BACKENDS: [&str; 4] = ["p1b", "p1c", "p2a", "p2b"];

/// Others may go, and it may not be the first any more; only when it goes itself is there another, for good.
pub(super) fn sticks(bed: &Bed, protocol: Protocol, family: Family) -> Result<()> {
    let service = Service::new("sticky", 62, &BACKENDS, PORT).affinity(60);
    bed.start(&service)?;
    let dial = Dial::new(protocol, service.frontend(family));
    let the_one = |bed: &Bed| -> Result<String> {
        let answered = bed.answering("p1a", dial, 20)?;
        ensure!(answered.len() == 1, "{answered:?} answer one client");
        answered.into_iter().next().context("somebody answers")
    };
    let first = the_one(bed)?;
    let others: Vec<_> = BACKENDS.into_iter().filter(|backend| *backend != first).collect();

    let fewer: Vec<_> = BACKENDS.into_iter().filter(|backend| *backend != others[0]).collect();
    bed.settle(|| bed.put(&service.clone().backends(&fewer)))?;
    ensure!(the_one(bed)? == first, "another backend went, and {first} does not answer any more");

    bed.settle(|| bed.put(&service.clone().backends(&others)))?;
    let second = the_one(bed)?;
    bed.settle(|| bed.put(&service))?;
    ensure!(the_one(bed)? == second, "the first backend came back, and {second} does not answer any more");
    bed.end(&service)
}

/// Each protocol and family remembers by itself, so that chance can hardly choose all as before.
pub(super) fn expires(bed: &Bed) -> Result<()> {
    let timeout_secs = 4;
    let service = Service::new("forgetful", 63, &BACKENDS, PORT).affinity(timeout_secs);
    bed.start(&service)?;
    let choices = |bed: &Bed| -> Result<BTreeMap<(Protocol, Family), String>> {
        let choice = |(protocol, family)| {
            let answer = bed.dial("p1c", Dial::new(protocol, service.frontend(family)))?;
            Ok(((protocol, family), answer.backend))
        };
        combinations().map(choice).collect()
    };
    let first = choices(bed)?;
    for _ in 0..5 {
        idle(Duration::from_secs(1))?; // 5 s in all.
        ensure!(choices(bed)? == first, "use does not keep the choices {first:?}");
    }
    for _ in 0..3 {
        idle(Duration::from_secs(u64::from(timeout_secs) + 1))?;
        if choices(bed)? != first {
            return bed.end(&service);
        }
    }
    anyhow::bail!("idle time does not end the choices {first:?}")
}
