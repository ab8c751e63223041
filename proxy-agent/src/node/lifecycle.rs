//! Follows this node's Node object: nothing is served before it exists, and the properties that the agent uses must not
//! change. kube-proxy does the same (`pkg/proxy/node.go`). After a change the agent ends, and its supervisor restarts
//! it.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use tokio::time::{Instant, sleep_until};

use proxy_core::desired::Desired;
use proxy_source::health::{Health, Problem};

/// The known state of the Node object, and the deadline for the rest.
#[derive(Debug)]
pub struct Lifecycle {
    node_name: String,
    /// The time to wait. None where no Node object is needed: with manifests written by hand.
    timeout: Option<Duration>,
    /// The operator's addresses, which replace the object's in their family.
    given: Vec<IpAddr>,
    /// The problems of the source.
    source_health: Health,
    deadline: Option<Instant>,
    /// Set once the agent serves: the properties in use must stay.
    serves: bool,
    /// The object's addresses, one of each family for which the operator gave none. None until there is an object.
    addresses: Option<Vec<IpAddr>>,
}

impl Lifecycle {
    pub fn new(node_name: String, timeout: Option<Duration>, given: &[IpAddr], source_health: Health) -> Self {
        let given = given.to_vec();
        Self { node_name, timeout, given, source_health, deadline: None, serves: false, addresses: None }
    }

    /// Takes in the cluster's complete state. Returns false while the agent must wait, and an error if the agent must
    /// restart.
    pub fn learn(&mut self, desired: &Desired, health: &Health) -> Result<bool> {
        if self.timeout.is_none() {
            return Ok(true);
        }
        let Some(exists) = desired.has_node() else {
            let why = "the API server serves no Nodes, or not to kpx: their end and new addresses go unnoticed";
            self.source_health.begin(&Problem::NodeObject, why);
            return Ok(true);
        };
        self.source_health.end(&Problem::NodeObject);
        let name = &self.node_name;
        let known = desired.node_addresses();
        match (self.serves, exists) {
            (true, false) => bail!("the Node object {name} was deleted"),
            (false, false) => {
                health.begin(&Problem::NodeObject, format!("no Node is named {name} yet"));
                return Ok(false);
            }
            // The node had addresses before, and the agent keeps them.
            (true, true) if known.is_empty() => return Ok(true),
            (false, true) if known.is_empty() && self.given.is_empty() => {
                health.begin(&Problem::NodeObject, format!("{name} has no addresses yet"));
                return Ok(false);
            }
            (_, true) => health.end(&Problem::NodeObject),
        }
        let addresses = self.missing(&known);
        if let Some(before) = self.addresses.replace(addresses.clone())
            && self.serves
            && before != addresses
        {
            bail!("the addresses of the Node object {name} have changed from {before:?} to {addresses:?}");
        }
        Ok(true)
    }

    /// Notes that the node cannot serve yet. The deadline counts from the first call.
    pub fn wait(&mut self) {
        if let Some(timeout) = self.timeout
            && !self.serves
        {
            self.deadline.get_or_insert_with(|| Instant::now() + timeout);
        }
    }

    /// Notes that the agent serves. Returns true for the first time.
    pub fn serve(&mut self) -> bool {
        self.deadline = None;
        !std::mem::replace(&mut self.serves, true)
    }

    /// Ends at the deadline, with an error that names the missing objects.
    pub async fn give_up(&self, health: &Health) -> anyhow::Error {
        match self.deadline {
            Some(deadline) => sleep_until(deadline).await,
            None => std::future::pending().await,
        }
        let problems = health.problems();
        let problems = problems.iter().map(|(what, problem)| format!("{what}: {}", problem.why));
        let timeout = self.timeout.unwrap_or_default();
        anyhow!("gave up after {timeout:?}: {}", problems.collect::<Vec<_>>().join("; "))
    }

    /// Returns the first address of each family for which the operator gave none.
    fn missing(&self, known: &[IpAddr]) -> Vec<IpAddr> {
        let is_given = |is_of_family: fn(&IpAddr) -> bool| self.given.iter().any(is_of_family);
        let families = [IpAddr::is_ipv4 as fn(&IpAddr) -> bool, IpAddr::is_ipv6];
        let missing = families.into_iter().filter(|family| !is_given(*family));
        missing.filter_map(|family| known.iter().copied().find(family)).collect()
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
        assert!(!fixture.hears(node("here", None, &[("Hostname", "here")])).unwrap());
        assert_eq!(fixture.problem(), "here has no addresses yet");
        assert!(fixture.hears(node("here", None, &[OTHER4])).unwrap());
        assert!(fixture.hears(node("here", None, &[V4, OUTSIDE])).unwrap(), "may change as long as nothing is served");
        assert!(fixture.health.problems().is_empty());
        assert!(fixture.lifecycle.serve());
        assert!(!fixture.lifecycle.serve());

        assert!(
            fixture.hears(node("here", Some("a"), &[V4])).unwrap(),
            "other addresses than the primary one may change"
        );
        assert!(fixture.hears(node("here", None, &[])).unwrap(), "it has none for a while");
        let error = fixture.hears(node("here", None, &[OTHER4])).unwrap_err().to_string();
        let want = "the addresses of the Node object here have changed from [192.0.2.1] to [192.0.2.2]";
        assert_eq!(error, want);
    }

    #[test]
    fn a_new_family_or_a_deletion_ends_the_agent() {
        let ends = [node("here", None, &[V4, V6]), Input::Node(Update::Del(ObjectName::new("", "here")))];
        for end in ends {
            let mut fixture = Fixture::new(Some(Duration::from_secs(300)), &[]);
            assert!(fixture.hears(node("here", None, &[V4])).unwrap());
            fixture.lifecycle.serve();
            assert!(fixture.hears(end).is_err());
        }
    }

    #[test]
    fn addresses_that_the_operator_gave_do_not_change() {
        let mut fixture = Fixture::new(Some(Duration::from_secs(300)), &["192.0.2.9".parse().unwrap()]);
        assert!(fixture.hears(node("here", None, &[])).unwrap());
        assert!(fixture.hears(node("here", None, &[V4, V6])).unwrap());
        fixture.lifecycle.serve();
        assert!(fixture.hears(node("here", None, &[OTHER4, V6])).unwrap());
        assert!(fixture.hears(node("here", None, &[V4])).is_err(), "but those of the other family do");
    }

    #[test]
    fn the_agent_serves_without_a_node_only_if_nodes_are_refused() {
        let mut manifests = Fixture::new(None, &[]);
        assert!(manifests.learn().unwrap());

        let mut fixture = Fixture::new(Some(Duration::from_secs(300)), &[]);
        assert!(fixture.hears(Input::Node(Update::Refused)).unwrap());
        assert!(fixture.source_health.has(&Problem::NodeObject));
        fixture.lifecycle.serve();
        let Input::Node(Update::Put(allowed)) = node("here", None, &[V4]) else { panic!("no node") };
        assert!(fixture.hears(Input::Node(Update::All(vec![*allowed]))).unwrap(), "allowed later");
        assert!(!fixture.source_health.has(&Problem::NodeObject));
        assert!(fixture.hears(node("here", None, &[OTHER4])).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_names_the_missing_objects() {
        let mut fixture = Fixture::new(Some(Duration::from_secs(300)), &[]);
        assert!(!fixture.learn().unwrap());
        fixture.lifecycle.wait();
        let began = Instant::now();
        tokio::time::advance(Duration::from_secs(100)).await;
        fixture.lifecycle.wait();
        let error = fixture.lifecycle.give_up(&fixture.health).await.to_string();
        assert_eq!(error, "gave up after 300s: Node object: no Node is named here yet");
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
            let (mut desired, source_health) = (Desired::new("here"), Health::default());
            listed().into_iter().for_each(|input| desired.apply(input));
            let lifecycle = Lifecycle::new("here".to_owned(), timeout, given, source_health.clone());
            Self { lifecycle, desired, health: Health::default(), source_health }
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
    }
}
