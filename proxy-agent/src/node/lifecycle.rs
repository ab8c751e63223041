//! Follows this node's Node object. If the object or its addresses are missing, the machine's own
//! addresses count after [`PATIENCE`], as in kube-proxy: an external cloud controller sets a Node's
//! addresses, and needs the API's ClusterIP before that. The agent takes over later addresses. It
//! ends when an address in use changes or the object is deleted, as kube-proxy does
//! (`pkg/proxy/node.go`), and its supervisor restarts it.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use tokio::time::{Instant, sleep_until};

use proxy_core::desired::Desired;
use proxy_source::health::{Health, Problem};

/// The maximum wait for the Node object and its addresses, as in kube-proxy.
const PATIENCE: Duration = Duration::from_secs(30);

/// The known state of the Node object, and the deadlines for missing facts.
#[derive(Debug)]
pub struct Lifecycle {
    node_name: String,
    /// The timeout of all waits. `None` if the agent needs no Node object, as with handwritten
    /// manifests.
    timeout: Option<Duration>,
    /// The operator's addresses, which replace the object's in their family.
    given: Vec<IpAddr>,
    source_health: Health,
    /// The end of the wait for the object and its addresses; `None` until either is missing.
    patient_until: Option<Instant>,
    /// Set during the wait for the object and its addresses.
    waits: bool,
    /// The time at which the agent gives up because a required fact is missing.
    deadline: Option<Instant>,
    /// Set once the agent serves. The addresses in use must stay then.
    serves: bool,
    /// Set while the object exists.
    exists: bool,
    /// The object's addresses, one for each family without an operator's address.
    addresses: Vec<IpAddr>,
}

impl Lifecycle {
    pub fn new(
        node_name: String,
        timeout: Option<Duration>,
        given: &[IpAddr],
        source_health: Health,
    ) -> Self {
        Self {
            node_name,
            timeout,
            given: given.to_vec(),
            source_health,
            patient_until: None,
            waits: false,
            deadline: None,
            serves: false,
            exists: false,
            addresses: Vec::new(),
        }
    }

    /// Takes over the cluster's complete state. Returns false while the agent must wait, and an
    /// error if it must restart.
    pub fn learn(&mut self, desired: &Desired, health: &Health) -> Result<bool> {
        let Some(timeout) = self.timeout else {
            return Ok(true);
        };
        let name = &self.node_name;
        let known = desired.node_addresses();
        let lack = match desired.has_node() {
            None => {
                let why = "the API server serves no Nodes, or not to kpx: their end and new addresses go unnoticed";
                return Ok(self.serve_without(why, health));
            }
            Some(false) if self.serves && self.exists => {
                bail!("the Node object {name} was deleted")
            }
            Some(false) => Some(format!("no Node is named {name}")),
            Some(true) if known.is_empty() && self.given.is_empty() => {
                Some(format!("{name} has no addresses"))
            }
            Some(true) => None,
        };
        self.exists = desired.has_node() == Some(true);
        let Some(lack) = lack else {
            self.waits = false;
            [health, &self.source_health]
                .iter()
                .for_each(|health| health.end(&Problem::NodeObject));
            return self.take_over(&known).map(|()| true);
        };
        let until = *self
            .patient_until
            .get_or_insert_with(|| Instant::now() + PATIENCE.min(timeout));
        if self.serves || Instant::now() >= until {
            return Ok(self.serve_without(
                &format!("{lack}: this machine's own addresses count"),
                health,
            ));
        }
        self.waits = true;
        health.begin(&Problem::NodeObject, format!("{lack} yet"));
        Ok(false)
    }

    /// Notes that the agent may serve without the object. The problem is the source's, because the
    /// agent works.
    fn serve_without(&mut self, why: &str, health: &Health) -> bool {
        self.waits = false;
        health.end(&Problem::NodeObject);
        self.source_health.begin(&Problem::NodeObject, why);
        true
    }

    /// Returns the end of the wait for the object and its addresses.
    pub fn due(&self) -> Option<Instant> {
        self.patient_until.filter(|_| self.waits)
    }

    /// Takes over the object's addresses. Returns an error if an address in use is missing.
    fn take_over(&mut self, known: &[IpAddr]) -> Result<()> {
        let addresses = self.missing(known);
        let before = std::mem::replace(&mut self.addresses, addresses);
        let now = &self.addresses;
        // An object without addresses keeps its previous addresses.
        if self.serves && !known.is_empty() && before.iter().any(|addr| !now.contains(addr)) {
            bail!(
                "the addresses of the Node object {} have changed from {before:?} to {now:?}",
                self.node_name
            );
        }
        Ok(())
    }

    /// Notes whether the node has all required facts. The deadline counts from the first call with
    /// `false`.
    pub fn ready(&mut self, is_ready: bool) {
        self.deadline = match self.timeout.filter(|_| !is_ready && !self.serves) {
            Some(timeout) => self.deadline.or_else(|| Some(Instant::now() + timeout)),
            None => None,
        };
    }

    /// Notes that the agent serves. Returns true at the first call.
    pub fn serve(&mut self) -> bool {
        !std::mem::replace(&mut self.serves, true)
    }

    /// Waits for the deadline, and returns an error that names the missing fact.
    pub async fn give_up(&self, health: &Health) -> anyhow::Error {
        match self.deadline {
            Some(deadline) => sleep_until(deadline).await,
            None => std::future::pending().await,
        }
        let problems = health.problems();
        let problems = problems
            .iter()
            .map(|(what, problem)| format!("{what}: {}", problem.why));
        let timeout = self.timeout.unwrap_or_default();
        anyhow!(
            "gave up after {timeout:?}: {}",
            problems.collect::<Vec<_>>().join("; ")
        )
    }

    /// Returns the first address of each family without an operator's address.
    fn missing(&self, known: &[IpAddr]) -> Vec<IpAddr> {
        let is_given = |is_of_family: fn(&IpAddr) -> bool| self.given.iter().any(is_of_family);
        let families = [IpAddr::is_ipv4 as fn(&IpAddr) -> bool, IpAddr::is_ipv6];
        let missing = families.into_iter().filter(|family| !is_given(*family));
        missing
            .filter_map(|family| known.iter().copied().find(family))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_core::builders::{listed, node};
    use proxy_core::input::{Input, ObjectName, Update};

    const V4: (&str, &str) = ("InternalIP", "192.0.2.1");
    const V6: (&str, &str) = ("InternalIP", "fd00::1");
    const OTHER4: (&str, &str) = ("InternalIP", "192.0.2.2");
    const OUTSIDE: (&str, &str) = ("ExternalIP", "198.51.100.1");

    #[test]
    fn the_agent_waits_for_a_node_that_must_not_change() {
        let mut fixture = Fixture::new(Some(Duration::from_secs(300)), &[]);
        assert!(!fixture.learn().unwrap());
        assert_eq!(fixture.problem(), "no Node is named here yet");
        assert!(
            !fixture
                .hears(node("here", None, &[("Hostname", "here")]))
                .unwrap()
        );
        assert_eq!(fixture.problem(), "here has no addresses yet");
        assert!(fixture.hears(node("here", None, &[OTHER4])).unwrap());
        assert!(
            fixture.hears(node("here", None, &[V4, OUTSIDE])).unwrap(),
            "may change as long as nothing is served"
        );
        assert!(fixture.health.problems().is_empty());
        assert!(fixture.lifecycle.serve());
        assert!(!fixture.lifecycle.serve());

        assert!(
            fixture.hears(node("here", Some("a"), &[V4])).unwrap(),
            "other addresses than the primary one may change"
        );
        assert!(
            fixture.hears(node("here", None, &[])).unwrap(),
            "it has none for a while"
        );
        assert_eq!(
            fixture.source_problem(),
            "here has no addresses: this machine's own addresses count"
        );
        let error = fixture
            .hears(node("here", None, &[OTHER4]))
            .unwrap_err()
            .to_string();
        let want =
            "the addresses of the Node object here have changed from [192.0.2.1] to [192.0.2.2]";
        assert_eq!(error, want);
    }

    #[test]
    fn address_that_goes_or_deletion_ends_the_agent() {
        let ends = [
            node("here", None, &[V6]),
            Input::Node(Update::Del(ObjectName::new("", "here"))),
        ];
        for end in ends {
            let mut fixture = Fixture::new(Some(Duration::from_secs(300)), &[]);
            assert!(fixture.hears(node("here", None, &[V4])).unwrap());
            fixture.lifecycle.serve();
            assert!(
                fixture.hears(node("here", None, &[V4, V6])).unwrap(),
                "a family's first address is taken over"
            );
            assert!(fixture.hears(end).is_err());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn agent_serves_without_node_or_addresses_after_patience_and_takes_them_over() {
        let mut fixture = Fixture::new(Some(Duration::from_secs(300)), &[]);
        assert!(!fixture.learn().unwrap());
        assert_eq!(fixture.lifecycle.due(), Some(Instant::now() + PATIENCE));
        tokio::time::advance(PATIENCE / 2).await;
        assert!(
            !fixture.hears(node("here", None, &[])).unwrap(),
            "the wait goes on"
        );
        tokio::time::advance(PATIENCE / 2).await;
        assert!(
            fixture
                .hears(Input::Node(Update::Del(ObjectName::new("", "here"))))
                .unwrap()
        );
        assert_eq!(fixture.lifecycle.due(), None);
        fixture.lifecycle.serve();
        assert!(fixture.health.problems().is_empty(), "the agent serves");
        let own = "this machine's own addresses count";
        assert_eq!(
            fixture.source_problem(),
            format!("no Node is named here: {own}")
        );
        assert!(fixture.hears(node("here", None, &[])).unwrap());
        assert_eq!(
            fixture.source_problem(),
            format!("here has no addresses: {own}")
        );
        assert!(fixture.hears(node("here", None, &[V4, V6])).unwrap());
        assert!(fixture.source_health.problems().is_empty());
        assert!(
            fixture.hears(node("here", None, &[OTHER4, V6])).is_err(),
            "from now on they must stay"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn short_timeout_shortens_patience() {
        let mut fixture = Fixture::new(Some(Duration::from_secs(1)), &[]);
        assert!(!fixture.learn().unwrap());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(fixture.learn().unwrap());
    }

    #[test]
    fn addresses_that_the_operator_gave_do_not_change() {
        let mut fixture = Fixture::new(
            Some(Duration::from_secs(300)),
            &["192.0.2.9".parse().unwrap()],
        );
        assert!(fixture.hears(node("here", None, &[])).unwrap());
        assert!(fixture.hears(node("here", None, &[V4, V6])).unwrap());
        fixture.lifecycle.serve();
        assert!(fixture.hears(node("here", None, &[OTHER4, V6])).unwrap());
        assert!(
            fixture.hears(node("here", None, &[V4])).is_err(),
            "but those of the other family do"
        );
    }

    #[test]
    fn the_agent_serves_at_once_without_a_node_only_if_nodes_are_refused() {
        let mut manifests = Fixture::new(None, &[]);
        assert!(manifests.learn().unwrap());

        let mut fixture = Fixture::new(Some(Duration::from_secs(300)), &[]);
        assert!(fixture.hears(Input::Node(Update::Refused)).unwrap());
        assert!(fixture.source_health.has(&Problem::NodeObject));
        fixture.lifecycle.serve();
        let Input::Node(Update::Put(allowed)) = node("here", None, &[V4]) else {
            panic!("no node")
        };
        assert!(
            fixture
                .hears(Input::Node(Update::All(vec![*allowed])))
                .unwrap(),
            "allowed later"
        );
        assert!(!fixture.source_health.has(&Problem::NodeObject));
        assert!(fixture.hears(node("here", None, &[OTHER4])).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_names_what_is_missing() {
        let mut fixture = Fixture::new(Some(Duration::from_secs(300)), &[]);
        fixture.health.begin(&Problem::LocalPods, "no podCIDRs");
        fixture.lifecycle.ready(false);
        let began = Instant::now();
        tokio::time::advance(Duration::from_secs(100)).await;
        fixture.lifecycle.ready(false);
        let error = fixture.lifecycle.give_up(&fixture.health).await.to_string();
        assert_eq!(error, "gave up after 300s: local pods: no podCIDRs");
        assert_eq!(began.elapsed().as_secs(), 300, "since the first time");
    }

    struct Fixture {
        lifecycle: Lifecycle,
        desired: Desired,
        health: Health,
        source_health: Health,
    }

    impl Fixture {
        fn new(timeout: Option<Duration>, given: &[IpAddr]) -> Self {
            let mut desired = Desired::new("here");
            let source_health = Health::default();
            listed().into_iter().for_each(|input| desired.apply(input));
            let lifecycle =
                Lifecycle::new("here".to_owned(), timeout, given, source_health.clone());
            Self {
                lifecycle,
                desired,
                health: Health::default(),
                source_health,
            }
        }

        fn hears(&mut self, input: Input) -> Result<bool> {
            self.desired.apply(input);
            self.learn()
        }

        fn learn(&mut self) -> Result<bool> {
            self.lifecycle.learn(&self.desired, &self.health)
        }

        fn problem(&self) -> String {
            self.health.problems()[&Problem::NodeObject].why.clone()
        }

        fn source_problem(&self) -> String {
            self.source_health.problems()[&Problem::NodeObject]
                .why
                .clone()
        }
    }
}
