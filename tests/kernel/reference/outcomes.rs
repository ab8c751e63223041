//! The outcomes of the random packets. An outcome that never occurs is untested, so each has a
//! minimum.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, ensure};
use proxy_common::counter::Reason;

use testbed::reference::cluster::{Hook, Packet, Proto};
use testbed::reference::model::{Answer, Kind};

/// The minimum number of each outcome.
const ENOUGH: u64 = 100;

#[derive(Debug, Default)]
pub(crate) struct Outcomes(BTreeMap<String, u64>);

impl Outcomes {
    pub(crate) fn add(&mut self, packet: &Packet, answer: &Answer) {
        let place = match packet.hook {
            Hook::Ingress(_) => "ingress",
            Hook::Anchor => "anchor",
            Hook::Lo => "lo",
        };
        let key = match answer {
            Answer::Pass(reason) => format!("pass {}", reason.name()),
            Answer::Reject(reason) => format!("reject {}", reason.name()),
            Answer::Drop(reason) => format!("drop {}", reason.name()),
            Answer::Forward(forward) => {
                let masqueraded = forward
                    .backends
                    .values()
                    .any(|source| *source != packet.src.ip());
                let to = if masqueraded {
                    "with another source"
                } else {
                    "with its own source"
                };
                format!("forward {:?} {to}", forward.kind)
            }
        };
        *self.0.entry(key).or_default() += 1;
        *self
            .0
            .entry(format!(
                "at {place}, {:?} {}",
                packet.family(),
                packet.proto.name()
            ))
            .or_default() += 1;
    }

    pub(crate) fn check(&self) -> Result<()> {
        let mut wanted: Vec<String> = Vec::new();
        wanted.extend(
            [Reason::NotOurs, Reason::NotUnicast].map(|reason| format!("pass {}", reason.name())),
        );
        wanted.extend(
            [Reason::NoEndpoints, Reason::UnknownPort]
                .map(|reason| format!("reject {}", reason.name())),
        );
        let drops = [
            Reason::NoLocalEndpoints,
            Reason::Outside,
            Reason::SourceRange,
            Reason::Unallocated,
        ];
        wanted.extend(drops.map(|reason| format!("drop {}", reason.name())));
        for kind in [
            Kind::ClusterIp,
            Kind::NodePort,
            Kind::ExternalIp,
            Kind::LoadBalancer,
        ] {
            wanted.extend(
                ["its own", "another"].map(|whose| format!("forward {kind:?} with {whose} source")),
            );
        }
        for place in ["ingress", "anchor", "lo"] {
            let families = ["V4", "V6"].into_iter();
            let protos = Proto::ALL.map(Proto::name);
            wanted
                .extend(families.flat_map(|family| {
                    protos.map(|proto| format!("at {place}, {family} {proto}"))
                }));
        }
        let seldom: Vec<_> = wanted
            .iter()
            .filter(|what| self.0.get(*what).is_none_or(|n| *n < ENOUGH))
            .collect();
        ensure!(seldom.is_empty(), "hardly ever: {seldom:?}");
        Ok(())
    }
}

impl fmt::Display for Outcomes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .iter()
            .try_for_each(|(what, count)| writeln!(f, "{count:7} {what}"))
    }
}
