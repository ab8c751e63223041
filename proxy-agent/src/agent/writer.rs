//! Writes changes to the maps, and tracks the service ports with incomplete rows.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use tracing::debug;

use proxy_core::diff::{Change, ServiceKey};
use proxy_core::ip_family::IpFamily;
use proxy_core::tables::Tables;
use proxy_datapath::Maps;

/// The maximum number of changes in one call. After a refused change the agent filters the rest
/// again.
const BATCH: usize = 1_024;

pub(super) struct Writer<M> {
    maps: M,
    /// The service ports with a refused or omitted write. Later changes of such a port assume rows
    /// that the maps do not hold, so these changes wait for a pass that starts from the maps.
    behind: BTreeSet<ServiceKey>,
    /// Set if a required read of the maps failed.
    unread: bool,
}

impl<M: Maps> Writer<M> {
    pub(super) fn new(maps: M) -> Self {
        Self {
            maps,
            behind: BTreeSet::new(),
            unread: false,
        }
    }

    pub(super) fn read(&mut self) -> Result<Tables> {
        let tables = self.maps.read();
        self.unread = tables.is_err();
        tables
    }

    /// Returns true if all writes of a family succeeded.
    pub(super) fn is_whole(&self, family: IpFamily) -> bool {
        let of = |service: &ServiceKey| match service {
            ServiceKey::V4(_) => IpFamily::V4,
            ServiceKey::V6(_) => IpFamily::V6,
        };
        !self.unread && self.behind.iter().all(|service| of(service) != family)
    }

    /// Writes the changes from the real content of the maps to the desired state.
    pub(super) fn write_from_maps(&mut self, changes: &[Change]) -> Result<()> {
        self.behind.clear();
        self.write(changes)
    }

    /// Writes changes in order. A refused write stops the later writes of its service port, because
    /// their order would no longer be safe. Other ports continue: they may delete rows, which frees
    /// space.
    pub(super) fn write(&mut self, changes: &[Change]) -> Result<()> {
        let mut first_error = Ok(());
        let mut left = changes;
        let mut most = BATCH;
        while let [next, rest @ ..] = left {
            if self.is_behind(next) {
                self.behind.extend(next.services());
                left = rest;
                continue;
            }
            let ready = left
                .iter()
                .take(most)
                .take_while(|change| !self.is_behind(change))
                .count();
            let (made, result) = self.maps.apply_all(&left[..ready]);
            left[..made]
                .iter()
                .for_each(|change| debug!(%change, "map"));
            left = &left[made..];
            // In a full map, many refusals follow.
            most = if result.is_ok() {
                (most * 2).min(BATCH)
            } else {
                1
            };
            if let Err(error) = result {
                if let [refused, rest @ ..] = left {
                    self.behind.extend(refused.services());
                    left = rest;
                }
                first_error = first_error.and(Err(error));
            }
        }
        first_error.with_context(|| {
            format!(
                "{} service ports could not be written, the first",
                self.behind.len()
            )
        })
    }

    fn is_behind(&self, change: &Change) -> bool {
        !self.behind.is_empty()
            && change
                .services()
                .any(|service| self.behind.contains(&service))
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;
    use proxy_common::frontend::{Set, SlotKey};

    use super::*;
    use proxy_core::builders::{ServiceBuilder, SliceBuilder, listed, service, slice};
    use proxy_core::desired::Desired;
    use proxy_core::diff::FamilyChange;

    #[derive(Default)]
    struct SmallMaps(Tables);

    impl Maps for SmallMaps {
        fn read(&self) -> Result<Tables> {
            Ok(self.0.clone())
        }

        fn apply(&mut self, change: &Change) -> Result<()> {
            if let Change::V4(FamilyChange::PutSlot(slot, _)) = change
                && !self.0.v4.slots.contains_key(slot)
                && self.0.v4.slots.len() == 2
            {
                bail!("no room");
            }
            self.0.apply(change);
            Ok(())
        }
    }

    #[test]
    fn a_refused_service_port_waits_for_a_pass_from_the_maps() {
        let mut desired = Desired::new("here");
        listed().into_iter().for_each(|input| desired.apply(input));
        let mut writer = Writer::new(SmallMaps::default());
        desired.apply(web(60).into());
        desired.apply(pods(2).into());
        assert!(writer.write(&desired.sync().changes).is_ok());
        desired.apply(pods(4).into());
        assert!(writer.write(&desired.sync().changes).is_err());
        // This change needs no space, but builds on a refused change.
        desired.apply(web(30).into());
        assert!(writer.write(&desired.sync().changes).is_ok());
        assert_whole(&writer);
        // Changes of another service port do not wait.
        desired.apply(service("other").cluster_ip("10.96.0.2").tcp(80).into());
        assert!(writer.write(&desired.sync().changes).is_ok());
        assert_eq!(writer.maps.0.v4.services.len(), 2);
        let now = writer.read().unwrap();
        assert!(
            writer
                .write_from_maps(&desired.sync_from(&now).changes)
                .is_err()
        );
        assert_whole(&writer);
        desired.apply(pods(1).into());
        desired.sync();
        let now = writer.read().unwrap();
        assert!(
            writer
                .write_from_maps(&desired.sync_from(&now).changes)
                .is_ok()
        );
        assert_eq!(&writer.maps.0, desired.tables());
    }

    fn assert_whole(writer: &Writer<SmallMaps>) {
        let tables = &writer.maps.0.v4;
        for (name, service) in &tables.services {
            for index in 0..service.count(Set::CLUSTER) {
                let slot = SlotKey::new(*name, Set::CLUSTER, index);
                assert!(tables.slots.contains_key(&slot), "{slot:?} is a hole");
            }
        }
    }

    fn web(affinity_secs: i32) -> ServiceBuilder {
        service("web")
            .cluster_ip("10.96.0.1")
            .tcp(80)
            .affinity(Some(affinity_secs))
    }

    fn pods(count: u8) -> SliceBuilder {
        let none = slice("web-1", "web").tcp(80);
        (1..=count).fold(none, |slice, last| slice.ready(&format!("10.244.0.{last}")))
    }
}
