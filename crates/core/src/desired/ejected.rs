//! Ejects backends that are silent on this node: see [`crate::health`].

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::frontend::{Backend, FrontendKey};

use super::Desired;
use super::family::Family;
use crate::health::{HealthMode, Path, Silent};
use crate::input::ObjectName;
use crate::model::{self, FamilyModel, ObjectRef};

impl Desired {
    /// Replaces the silent backends. Returns true if that affects a Service.
    pub fn set_silent(&mut self, silent: Silent) -> bool {
        let before = &*self.options.silent;
        if *before == silent {
            return false;
        }
        let changed = before.symmetric_difference(&silent);
        let ports: BTreeSet<_> = changed.map(|path| path.service).collect();
        let services: BTreeSet<_> = ports
            .into_iter()
            .filter_map(|port| self.service_of(port))
            .collect();
        let silent = Arc::new(silent);
        self.node.silent = Arc::clone(&silent);
        self.options.silent = silent;
        let concerns_any = !services.is_empty();
        self.dirty.extend(services);
        concerns_any
    }

    /// Returns the silent backends, of all modes.
    pub fn silent(&self) -> &Silent {
        &self.options.silent
    }

    pub fn ejected(&self) -> impl Iterator<Item = &Path> {
        self.options
            .silent
            .iter()
            .filter(|path| self.is_ejected(path))
    }

    /// Returns true if the path's backend is a current backend of a Service with backend health.
    pub fn is_backend(&self, path: &Path) -> bool {
        match path.service {
            SocketAddr::V4(_) => self.v4.is_backend(path),
            SocketAddr::V6(_) => self.v6.is_backend(path),
        }
    }

    pub fn is_ejected(&self, path: &Path) -> bool {
        match path.service {
            SocketAddr::V4(_) => self.v4.is_ejected(path),
            SocketAddr::V6(_) => self.v6.is_ejected(path),
        }
    }

    pub fn service_at(&self, path: &Path) -> Option<ObjectRef> {
        Some(model::claimant(&self.service_of(path.service)?))
    }

    /// Returns the Service of a TCP port.
    pub(super) fn service_of(&self, port: SocketAddr) -> Option<ObjectName> {
        let ip = port.ip();
        let port = Port::new(port.port());
        let v4 = Addr4::from_ip(ip)
            .and_then(|addr| self.v4.claimant(&FrontendKey::new(addr, port, Proto::TCP)));
        let v6 = Addr6::from_ip(ip)
            .and_then(|addr| self.v6.claimant(&FrontendKey::new(addr, port, Proto::TCP)));
        v4.or(v6).map(|(service, _)| service.clone())
    }
}

impl<A: Addr> Family<A> {
    fn is_backend(&self, path: &Path) -> bool {
        self.asked(path, |model, key, at| {
            let Some(port) = model.ports.get(&key) else {
                return false;
            };
            let place = |backend: &Backend<A>| SockAddr::new(backend.addr, backend.port);
            let is_in = |set: &[_]| set.binary_search_by_key(&at, place).is_ok();
            let is_judged = port.health != HealthMode::Off;
            is_judged
                && (is_in(&port.cluster)
                    || is_in(&port.local)
                    || port.ejected.binary_search(&at).is_ok())
        })
    }

    fn is_ejected(&self, path: &Path) -> bool {
        self.asked(path, |model, key, at| {
            model
                .ports
                .get(&key)
                .is_some_and(|port| port.ejected.binary_search(&at).is_ok())
        })
    }

    fn asked(
        &self,
        path: &Path,
        ask: impl Fn(&FamilyModel<A>, FrontendKey<A>, SockAddr<A>) -> bool,
    ) -> bool {
        let Some((key, at)) = path.in_family::<A>() else {
            return false;
        };
        self.holder(&key).is_some_and(|model| ask(model, key, at))
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::frontend::Service;

    use super::*;
    use crate::builders::{listed, service, slice};
    use crate::model::ModelOptions;
    use crate::tables::Tables;

    fn path(service: &str, backend: u8) -> Path {
        Path {
            service: service.parse().unwrap(),
            backend: format!("10.244.0.{backend}:8080").parse().unwrap(),
        }
    }

    /// Returns the last address bytes of the cluster set, and whether flows leave silent backends.
    fn served(desired: &Desired) -> (Vec<String>, bool) {
        let tables = &desired.tables().v4;
        let is_web = |key: &&FrontendKey<Addr4>| key.addr.ip().to_string() == "10.96.0.1";
        let slots = tables
            .slots
            .iter()
            .filter(|(slot, _)| is_web(&&slot.service));
        let last = |ip: std::net::IpAddr| ip.to_string().rsplit('.').next().unwrap().to_owned();
        let fails_over = tables
            .services
            .iter()
            .any(|(key, service)| is_web(&key) && service.has(Service::FAILS_OVER));
        (
            slots.map(|(_, backend)| last(backend.addr.ip())).collect(),
            fails_over,
        )
    }

    fn desired(mode: HealthMode, backends: u8, annotation: Option<&str>) -> Desired {
        let options = ModelOptions {
            backend_health: mode,
            ..ModelOptions::default()
        };
        let mut desired = Desired::with_options("here", options);
        let mut web = service("web").cluster_ip("10.96.0.1").port("", "TCP", 80);
        if let Some(value) = annotation {
            web = web.annotation("kpx.dev/backend-health", value);
        }
        let mut endpoints = slice("web-1", "web").tcp(8080);
        for nth in 1..=backends {
            endpoints = endpoints.ready(&format!("10.244.0.{nth}"));
        }
        listed()
            .into_iter()
            .chain([web.into(), endpoints.into()])
            .for_each(|input| desired.apply(input));
        desired.sync();
        desired
    }

    #[test]
    fn silent_backend_leaves_its_set_and_comes_back() {
        let mut desired = desired(HealthMode::On, 3, None);
        assert_eq!(
            served(&desired),
            (["1", "2", "3"].map(str::to_owned).to_vec(), true)
        );
        let silent = path("10.96.0.1:80", 2);
        assert!(desired.set_silent([silent].into()), "it concerns a Service");
        assert!(!desired.set_silent([silent].into()), "it is known");
        desired.sync();
        assert_eq!(
            served(&desired),
            (["1", "3"].map(str::to_owned).to_vec(), true)
        );
        assert_eq!(
            desired.tables(),
            &Tables::of(&desired.store, &desired.options)
        );
        assert!(
            desired.is_backend(&silent)
                && desired.is_ejected(&silent)
                && !desired.is_ejected(&path("10.96.0.1:80", 1))
        );
        assert_eq!(
            desired.service_at(&silent).unwrap().name.to_string(),
            "default/web"
        );
        assert!(desired.set_silent(Silent::new()));
        desired.sync();
        assert_eq!(served(&desired).0.len(), 3);
        assert!(
            !desired.set_silent([path("10.96.0.9:80", 1)].into()),
            "no Service is there"
        );
    }

    #[test]
    fn half_of_a_set_serves_and_one_backend_is_never_set_aside() {
        for (backends, silent, left) in [
            (1, 1, 1),
            (2, 1, 1),
            (2, 2, 2),
            (3, 1, 2),
            (3, 2, 3),
            (4, 2, 2),
            (4, 3, 4),
        ] {
            let mut desired = desired(HealthMode::On, backends, None);
            desired.set_silent((1..=silent).map(|nth| path("10.96.0.1:80", nth)).collect());
            desired.sync();
            let (served, fails_over) = served(&desired);
            assert_eq!(
                (served.len(), fails_over),
                (left, backends > 1),
                "{silent} of {backends}"
            );
        }
    }

    #[test]
    fn backend_that_another_set_keeps_is_not_set_aside() {
        let mut desired = desired(HealthMode::On, 0, None);
        let web = service("web")
            .cluster_ip("10.96.0.1")
            .port("", "TCP", 80)
            .type_("NodePort")
            .node_port(30080)
            .external_local();
        let endpoints = slice("web-1", "web")
            .tcp(8080)
            .ready("10.244.0.1")
            .on("here")
            .ready("10.244.0.2")
            .ready("10.244.0.3");
        [web.into(), endpoints.into()]
            .into_iter()
            .for_each(|input| desired.apply(input));
        let here = path("10.96.0.1:80", 1);
        let elsewhere = path("10.96.0.1:80", 2);
        for (silent, ejected) in [(here, None), (elsewhere, Some(elsewhere))] {
            desired.set_silent([silent].into());
            desired.sync();
            let served = served(&desired).0;
            assert_eq!(
                served.len(),
                3,
                "two of the cluster and one of the node: {served:?}"
            );
            assert_eq!(desired.ejected().next(), ejected.as_ref());
        }
    }

    #[test]
    fn annotation_goes_before_the_node() {
        let left = |mode, annotation| {
            let mut desired = desired(mode, 2, annotation);
            desired.set_silent([path("10.96.0.1:80", 1)].into());
            desired.sync();
            let skipped: Vec<_> = desired.skipped().map(ToString::to_string).collect();
            (served(&desired).0.len(), skipped)
        };
        for (mode, annotation, want) in [
            (HealthMode::Observe, None, 2),
            (HealthMode::Off, None, 2),
            (HealthMode::Off, Some("on"), 1),
            (HealthMode::On, Some("off"), 2),
            (HealthMode::On, Some("observe"), 2),
        ] {
            assert_eq!(
                left(mode, annotation),
                (want, vec![]),
                "{mode:?} {annotation:?}"
            );
        }
        let want = "Service default/web metadata.annotations[kpx.dev/backend-health]: \"maybe\" is not one of off, observe, on";
        assert_eq!(
            left(HealthMode::On, Some("maybe")),
            (1, vec![want.to_owned()])
        );
    }
}
