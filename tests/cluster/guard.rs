//! Frontends that Services may not have, and the owner of contested ones, with an API server and
//! packets.

use std::net::{SocketAddr, TcpListener};
use std::ops::Deref;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testbed::agent::{Agent, DEADLINE, Object, SERVICE_PORT, Service, wait_until};
use testbed::echo::{Dial, Fault, Protocol};
use testbed::lab::{Dual, EXTERNAL, Family, SERVICE_CIDR};
use testbed::watched_lab::WatchedLab;

/// The port of all servers of the lab.
const PORT: u16 = 8080;
const API_PORT: u16 = 6443;
/// The timeout of one answer. It is short, because early requests are repeated.
const ANSWER: Duration = Duration::from_millis(400);

/// One cluster serves all parts, since each part ends before the next begins.
#[test]
fn a_service_has_what_it_may_have() -> Result<()> {
    let fixture = Fixture::start()?;
    let kpx = fixture.kpx(&[])?;
    fixture
        .the_older_service_has_what_two_want()
        .with_context(|| kpx.log())?;
    fixture
        .a_process_that_is_cut_off_is_told_of()
        .with_context(|| kpx.log())?;
    fixture
        .the_api_server_is_refused()
        .with_context(|| kpx.log())?;
    fixture
        .an_endpoint_is_no_cluster_ip(&kpx)
        .with_context(|| kpx.log())?;
    fixture
        .another_proxys_services_are_left_to_it()
        .with_context(|| kpx.log())?;
    kpx.stop()?;
    // The client connects again, with that Service present from the start.
    let kpx = fixture.kpx(&["--external-ip-cidrs=192.0.2.0/24,2001:db8:ffff::/48"])?;
    fixture
        .the_api_server_is_reached()
        .with_context(|| kpx.log())?;
    fixture
        .the_operators_networks_count(&kpx)
        .with_context(|| kpx.log())?;
    kpx.stop()
}

struct Fixture(WatchedLab);

impl Deref for Fixture {
    type Target = WatchedLab;

    fn deref(&self) -> &WatchedLab {
        &self.0
    }
}

impl Fixture {
    fn start() -> Result<Self> {
        Ok(Self(WatchedLab::start(PORT)?))
    }

    fn kpx(&self, args: &[&str]) -> Result<Agent<'_>> {
        let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        Agent::start_with(&self.lab, &self.lab.n1, self.source(), &args)
    }

    fn the_older_service_has_what_two_want(&self) -> Result<()> {
        let shared = EXTERNAL.host(7);
        // If both have the same second, the names give the same order.
        let old = Service::new("old", 10, &["p2a"], PORT)
            .external_ips(shared)
            .node_port(30_080);
        let young = Service::new("young", 11, &["p1b"], PORT)
            .external_ips(shared)
            .node_port(30_080);
        self.put_all(old.objects(&self.lab))?;
        self.put_all(young.objects(&self.lab))?;
        let made = Instant::now();
        let frontends = |family| {
            [
                (shared.ip(family), 80).into(),
                (self.lab.n1.host.addrs.ip(family), 30_080).into(),
            ]
        };
        let reported = self.reported("FrontendConflict", "young")?;
        ensure!(
            reported["note"]
                .as_str()
                .is_some_and(|note| note.contains("is held by Service default/old")),
            "{reported}"
        );
        self.answers(frontends, "p2a").context("the older one")?;
        self.api().delete("Service", "default", "old")?;
        self.answers(frontends, "p1b").context("the next")?;
        // Within one second, the names would decide which Service is older.
        wait_until(DEADLINE, "it is another second", || {
            Ok(made.elapsed() > Duration::from_secs(1))
        })?;
        self.put_all(vec![old.service()])?;
        // The Service is the youngest now.
        self.reported("FrontendConflict", "old")?;
        self.answers(frontends, "p1b")
            .context("the oldest there is")?;
        self.api().delete("Service", "default", "young")?;
        self.answers(frontends, "p2a").context("the only one")?;
        self.api().delete("Service", "default", "old")
    }

    fn a_process_that_is_cut_off_is_told_of(&self) -> Result<()> {
        let n1 = &self.lab.n1.host;
        let _process = n1
            .ns
            .run(|| TcpListener::bind("0.0.0.0:80"))
            .context("listen on the node")?;
        let shadow = Service::new("shadow", 12, &["p2a"], PORT).external_ips(n1.addrs);
        self.put_all(shadow.objects(&self.lab))?;
        self.answers(|family| [(n1.addrs.ip(family), 80).into()], "p2a")?;
        let reported = self.reported("FrontendShadowsHost", "shadow")?;
        let expected = format!("a process listens at {}:80/tcp", n1.addrs.v4);
        ensure!(
            reported["note"]
                .as_str()
                .is_some_and(|note| note.contains(&expected)),
            "{reported}"
        );
        // The node answers at all other ports of that address.
        self.answers(|family| [(n1.addrs.ip(family), PORT).into()], "n1")?;
        self.api().delete("Service", "default", "shadow")
    }

    fn the_api_server_is_refused(&self) -> Result<()> {
        let greedy = Service::new("greedy", 13, &["p2a"], PORT).external_ips(self.lab.fabric.addrs);
        let mut objects = greedy.objects(&self.lab);
        for port in objects[0].0["spec"]["ports"]
            .as_array_mut()
            .into_iter()
            .flatten()
        {
            port["port"] = API_PORT.into();
        }
        self.put_all(objects)?;
        let reported = self.reported("FrontendRefused", "greedy")?;
        let at = SocketAddr::from((self.lab.fabric.addrs.v4, API_PORT));
        assert_eq!(
            reported["note"],
            json!(format!("spec.externalIPs[0]: {at}/tcp is the API server's"))
        );
        // The rest of the Service is served, even at that very address.
        let ns = &self.lab.host("p1a").ns;
        wait_until(DEADLINE, "its UDP port is served", || {
            is_answered(&Dial::new(Protocol::Udp, at), ns, "p2a")
        })?;
        self.the_api_server_is_reached()
    }

    /// A frontend on it would lead its clients to another backend, past the NetworkPolicy of the
    /// pods behind it.
    fn an_endpoint_is_no_cluster_ip(&self, kpx: &Agent<'_>) -> Result<()> {
        let victim = Service::new("victim", 20, &["p1b"], PORT);
        let evil = Service::new("evil", 21, &["p1b"], PORT);
        self.put_all(victim.objects(&self.lab))?;
        self.answers(|family| [victim.frontend(family)], "p1b")
            .context("the victim itself")?;
        let mut objects = evil.objects(&self.lab);
        for (slice, family) in objects[1..].iter_mut().zip(Family::ALL) {
            slice.0["endpoints"][0]["addresses"][0] = json!(victim.cluster_ip().ip(family));
            slice.0["ports"]
                .as_array_mut()
                .into_iter()
                .flatten()
                .for_each(|port| port["port"] = SERVICE_PORT.into());
        }
        self.put_all(objects)?;
        let reported = self.reported("EndpointRefused", "evil")?;
        let note = reported["note"].as_str().unwrap_or_default();
        let field = "EndpointSlice default/evil-ipv4 endpoints[0].addresses[0]: ";
        ensure!(
            note.starts_with(field) || note.contains("evil-ipv6"),
            "{reported}"
        );
        let skipped = kpx.status()?["skipped"].to_string();
        ensure!(
            skipped.contains(&format!("{field}{} is in ", victim.cluster_ip().v4)),
            "{skipped}"
        );
        for client in ["p1a", "n1"] {
            for family in Family::ALL {
                let dial = Dial::new(Protocol::Tcp, evil.frontend(family)).deadline(ANSWER);
                let answer = dial.exchange(&self.lab.host(client).ns, b"hello");
                ensure!(
                    matches!(answer, Err(Fault::Refused)),
                    "{client} got {answer:?}, and it has no endpoint"
                );
            }
        }
        ["victim", "evil"]
            .iter()
            .try_for_each(|name| self.api().delete("Service", "default", name))
    }

    /// Services of a proxy that uses netfilter. The proxy's backend is outside the Service's
    /// endpoints, so that an answer identifies the proxy.
    fn another_proxys_services_are_left_to_it(&self) -> Result<()> {
        let n1 = &self.lab.n1.host.ns;
        let plain = Service::new("other", 22, &["p1b"], PORT);
        let labelled = plain
            .clone()
            .label("service.kubernetes.io/service-proxy-name", "another");
        let rules = Family::ALL.map(|family| {
            let at = plain.cluster_ip().ip(family);
            let to = self.lab.host("p2a").addrs.ip(family);
            let (table, to) = if family == Family::V4 {
                ("ip", to.to_string())
            } else {
                ("ip6", format!("[{to}]"))
            };
            let dnat = format!(
                "{table} daddr {at} meta l4proto {{ tcp, udp }} th dport 80 dnat to {to}:{PORT};"
            );
            let chain = |hook: &str| {
                format!("chain {hook} {{ type nat hook {hook} priority -100; {dnat} }}\n")
            };
            format!(
                "table {table} another {{\n{}{}}}\n",
                chain("prerouting"),
                chain("output")
            )
        });
        n1.nft(&rules.concat())?;
        self.put_all(labelled.objects(&self.lab))?;
        self.answers(|family| [plain.frontend(family)], "p2a")
            .context("the other proxy's")?;
        self.is_dropped(SERVICE_CIDR.host(200))?;

        let by_pod = |backend: &str| -> Result<()> {
            let ns = &self.lab.host("p1a").ns;
            let dials = Family::ALL.map(|family| Dial::new(Protocol::Tcp, plain.frontend(family)));
            let what = format!("p1a hears {backend}");
            wait_until(DEADLINE, &what, || {
                Ok(is_answered(&dials[0], ns, backend)? && is_answered(&dials[1], ns, backend)?)
            })
        };
        self.put_all(vec![plain.service()])?;
        by_pod("p1b").context("without the label it is kpx's")?;
        self.put_all(vec![labelled.service()])?;
        by_pod("p2a").context("with it, the other proxy's again")?;
        n1.nft("delete table ip another\ndelete table ip6 another")?;
        self.api().delete("Service", "default", "other")
    }

    /// Checks that a client there gets no answer, not even a refusal.
    fn is_dropped(&self, addrs: Dual) -> Result<()> {
        for family in Family::ALL {
            let dial =
                Dial::new(Protocol::Tcp, (addrs.ip(family), SERVICE_PORT).into()).deadline(ANSWER);
            let answer = dial.exchange(&self.lab.host("p1a").ns, b"hello");
            ensure!(
                matches!(answer, Err(Fault::TimedOut(_))),
                "an address of no host: {answer:?}"
            );
        }
        Ok(())
    }

    /// Checks that pods and the node reach a server that speaks TLS, unlike the lab's servers.
    fn the_api_server_is_reached(&self) -> Result<()> {
        let at = SocketAddr::from((self.lab.fabric.addrs.v4, API_PORT));
        for client in ["p1a", "n1"] {
            let dial = Dial::new(Protocol::Tcp, at).deadline(ANSWER);
            let answer = dial.exchange(&self.lab.host(client).ns, b"hello");
            ensure!(
                answer.is_err(),
                "{client} got {answer:?} from the API server's place"
            );
        }
        let accepted = self.api().traffic().kinds().count();
        ensure!(accepted > 0, "the API server was never asked");
        Ok(())
    }

    fn the_operators_networks_count(&self, kpx: &Agent<'_>) -> Result<()> {
        let elsewhere =
            Service::new("elsewhere", 14, &["p2a"], PORT).external_ips(EXTERNAL.host(7));
        self.put_all(elsewhere.objects(&self.lab))?;
        let reported = self.reported("FrontendRefused", "elsewhere")?;
        ensure!(
            reported["note"]
                .as_str()
                .is_some_and(|note| note.contains("external-ip-cidrs")),
            "{reported}"
        );
        self.answers(|family| [elsewhere.frontend(family)], "p2a")
            .context("its ClusterIP")?;
        let skipped = kpx.status()?["skipped"].to_string();
        ensure!(
            skipped.contains("Service default/elsewhere spec.externalIPs[0]"),
            "{skipped}"
        );
        Ok(())
    }

    fn put_all(&self, objects: Vec<Object>) -> Result<()> {
        objects.iter().try_for_each(|object| self.put(object))
    }

    /// Waits until only `backend` answers a pod and the node itself.
    fn answers<const N: usize>(
        &self,
        frontends: impl Fn(Family) -> [SocketAddr; N],
        backend: &str,
    ) -> Result<()> {
        for client in ["p1a", "n1"] {
            for (protocol, family) in [(Protocol::Tcp, Family::V4), (Protocol::Udp, Family::V6)] {
                for at in frontends(family) {
                    let dial = Dial::new(protocol, at);
                    let ns = &self.lab.host(client).ns;
                    let what = format!("{client} hears {backend} at {at}");
                    wait_until(DEADLINE, &what, || is_answered(&dial, ns, backend))?;
                }
            }
        }
        Ok(())
    }

    /// Waits for an Event about a Service.
    fn reported(&self, reason: &str, service: &str) -> Result<Value> {
        let is_it =
            |event: &Value| event["reason"] == reason && event["regarding"]["name"] == service;
        let find = || {
            self.api()
                .list("events.events.k8s.io")
                .into_iter()
                .find(is_it)
        };
        wait_until(
            DEADLINE,
            &format!("{reason} is reported for {service}"),
            || Ok(find().is_some()),
        )?;
        find().context("an event that stays")
    }
}

fn is_answered(dial: &Dial, ns: &testbed::netns::NetNs, backend: &str) -> Result<bool> {
    match (*dial).deadline(ANSWER).exchange(ns, b"hello") {
        Ok(answer) => Ok(answer.backend == backend),
        Err(Fault::Refused | Fault::TimedOut(_)) => Ok(false),
        Err(fault) => Err(fault.into()),
    }
}
