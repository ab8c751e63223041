//! Which of a service's backends may answer.

use anyhow::Result;
use testbed::agent::{Hint, Service};
use testbed::echo::{Dial, Protocol};
use testbed::lab::Family;

use crate::bed::{Bed, combinations};
use crate::cell::{To, same};
use crate::services::{PORT, frontend};

/// So many that none of two or three backends is missed by chance.
const OFTEN: usize = 40;

pub(super) fn policy_local(bed: &Bed, protocol: Protocol, family: Family) -> Result<()> {
    bed.only("p1a", Dial::new(protocol, frontend("local", family)), 200, &["p1b"])
}

pub(super) fn policy_cluster(bed: &Bed, protocol: Protocol, family: Family) -> Result<()> {
    bed.only("p1a", Dial::new(protocol, frontend("everywhere", family)), OFTEN, &["p1b", "p2a"])
}

pub(super) fn external_policy(bed: &Bed, protocol: Protocol, family: Family) -> Result<()> {
    for to in [To::NodePort("n1"), To::LoadBalancer, To::ExternalIp] {
        for (client, backends) in [("x", &["p1b"][..]), ("p1a", &["p1b", "p2a"]), ("n1", &["p1b", "p2a"])] {
            let cell = same("N05", client, to, "both-local", crate::cell::Expect::Silence);
            bed.only(client, Dial::new(protocol, cell.addr(bed.lab, family)), OFTEN, backends)?;
        }
    }
    Ok(())
}

pub(super) fn terminating(bed: &Bed) -> Result<()> {
    let service = Service::new("terminating", 60, &["p1b"], PORT).terminating(&["p1b"]);
    bed.start(&service)?;
    all_answer(bed, &service, "p1a", &["p1b"])?;
    let service = service.backends(&["p1b", "p2a"]);
    bed.settle(|| bed.put(&service))?;
    all_answer(bed, &service, "p1a", &["p2a"])?;
    bed.end(&service)
}

pub(super) fn hints(bed: &Bed) -> Result<()> {
    let service = Service::new("hinted", 61, &["p1b", "p2a"], PORT);
    bed.start(&service)?;
    let zones = [("p1b", Hint::Zone("zone-n1")), ("p2a", Hint::Zone("zone-n2"))];
    let nodes = [("p1b", Hint::Node("n1")), ("p2a", Hint::Node("n2"))];
    let crossed = [("p1b", Hint::Zone("zone-n2")), ("p2a", Hint::Zone("zone-n1"))];
    for (hints, from_n1, from_n2) in [(zones, "p1b", "p2a"), (crossed, "p2a", "p1b"), (nodes, "p1b", "p2a")] {
        bed.settle(|| bed.put(&service.clone().hints(&hints)))?;
        all_answer(bed, &service, "p1a", &[from_n1])?;
        all_answer(bed, &service, "n1", &[from_n1])?;
        all_answer(bed, &service, "p2b", &[from_n2])?;
    }
    // Somebody has no hint, or nobody is for this zone: all are for everybody.
    for unusable in [&zones[..1], &[("p1b", Hint::Zone("far")), ("p2a", Hint::Zone("farther"))]] {
        bed.settle(|| bed.put(&service.clone().hints(unusable)))?;
        all_answer(bed, &service, "p1a", &["p1b", "p2a"])?;
        bed.settle(|| bed.put(&service.clone().hints(&zones)))?;
    }
    bed.end(&service)
}

fn all_answer(bed: &Bed, service: &Service, client: &str, backends: &[&str]) -> Result<()> {
    combinations().try_for_each(|(protocol, family)| {
        bed.only(client, Dial::new(protocol, service.frontend(family)), 20, backends)
    })
}
