//! `kubectl kpx trace`: finds the node that gets the client's packets, and runs `kpx trace` there.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::ListParams;
use kube::{Api, Client};
use proxy_view::ServiceView;
use proxy_view::output::{Data, escaped, escaped_json, print, yaml};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::answers::{LONGEST, name_failed};
use crate::connect::ConnectArgs;
use crate::exec::{self, Answer};
use crate::pods::{self, NodePod};

/// Time limit for a node's answer in seconds: the node loads a copy of the programs.
const TIMEOUT: u64 = 60;
/// The reason of an answer in an unknown form.
const OTHER_VERSION: &str = "this node runs another version of kpx";

/// Show the path of a packet on the node that translates it, then on its backend's node, and the
/// reasons for the verdicts.
#[derive(Args, Debug)]
pub(crate) struct TraceArgs {
    /// The client: pod/[NAMESPACE/]NAME, a workload as deploy/[NAMESPACE/]NAME, node/NAME for a
    /// process of the node, or an address. A client outside the cluster needs --node, the node that
    /// its packets come to.
    #[arg(long, value_name = "CLIENT")]
    pub(crate) from: String,
    /// The destination: IP:PORT, a Service as [svc/][NAMESPACE/]NAME[:PORT] or by its DNS name, a
    /// pod as pod/[NAMESPACE/]NAME[:PORT], or node/NAME:PORT. Behind it may stand /tcp, /udp or
    /// /sctp; the default is tcp.
    #[arg(long, value_name = "DESTINATION")]
    pub(crate) to: String,
    /// Trace N packets, each from the next source port, and count the results.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) count: u32,
    /// Print text, or data in a stable form: fields may be added, and no field is renamed or
    /// removed.
    #[arg(long, short, value_enum, default_value_t, value_name = "FORM")]
    pub(crate) output: Data,
}

/// A client, as arguments for its node's kpx.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Origin {
    node: String,
    /// The values of `--from`. The first value in the destination's address family is used.
    from: Vec<String>,
}

/// Makes the text of a node's trace.
pub(crate) type Render = fn(&Value) -> Result<String>;

pub(crate) async fn trace(
    connect: &ConnectArgs,
    args: &TraceArgs,
    render: Render,
) -> Result<ExitCode> {
    let client = connect.client().await?;
    ensure!(
        connect.node.len() <= 1,
        "a packet enters the cluster at a single node: name it with --node"
    );
    let given = connect.node.first().cloned();
    let limit = connect.timeout(TIMEOUT);
    let (node, answer) = traced(&client, connect, args, given, limit).await?;
    let Traced { trace, onward } = match answer {
        Ok(traced) => traced,
        Err(error) => {
            name_failed(1, &[(&node, &error)]);
            return Ok(ExitCode::FAILURE);
        }
    };
    let shown = match args.output {
        Data::Text => {
            let onward = onward.as_ref().map(|onward| onward.text(render));
            escaped(&format!(
                "{}{}",
                text(&trace, render)?,
                onward.transpose()?.unwrap_or_default()
            ))
        }
        Data::Json => escaped_json(&format!("{:#}\n", with_onward(trace, onward))),
        Data::Yaml => yaml(&with_onward(trace, onward))?,
    };
    print(&shown)?;
    Ok(ExitCode::SUCCESS)
}

/// A packet's trace on the client's node, and on the backend's node if that is another.
pub(crate) struct Traced {
    trace: Value,
    onward: Option<Onward>,
}

/// What happens to the packet on the backend's node.
struct Onward {
    /// `None` if the request for the backend's node failed.
    node: Option<String>,
    trace: Result<Value>,
}

impl Traced {
    /// Returns the trace of the client's node, with the backend's node in the field `onward`.
    pub(crate) fn into_value(self) -> Value {
        with_onward(self.trace, self.onward)
    }
}

/// Sets the second half. Only this program does, so that no node speaks for another.
fn with_onward(mut trace: Value, onward: Option<Onward>) -> Value {
    let Some(fields) = trace.as_object_mut() else {
        return trace;
    };
    fields.remove("onward");
    if let Some(Onward { node, trace }) = onward {
        let (trace, error) = match trace {
            Ok(trace) => (Some(trace), None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        let onward = json!({"node": node, "trace": trace, "error": error});
        fields.insert("onward".to_owned(), onward);
    }
    trace
}

impl Onward {
    fn text(&self, render: Render) -> Result<String> {
        let Self { node, trace } = self;
        Ok(match trace {
            Ok(trace) => format!("\nthen on the backend's node:\n{}", text(trace, render)?),
            Err(error) => {
                let node = node.as_ref().map(|node| format!(", {node}"));
                format!(
                    "\nthen on the backend's node{}: no trace: {error:#}\n",
                    node.unwrap_or_default()
                )
            }
        })
    }
}

/// Formats a trace. A node of another version may send a form that is not known here.
fn text(trace: &Value, render: Render) -> Result<String> {
    render(trace).or_else(|_| yaml(trace))
}

/// Runs the trace on the client's node, or on the `given` node for an address, and then on the
/// backend's node, with a time limit for each. Returns the client's node, and the answer.
pub(crate) async fn traced(
    client: &Client,
    connect: &ConnectArgs,
    args: &TraceArgs,
    given: Option<String>,
    limit: Duration,
) -> Result<(String, Result<Traced>)> {
    let Origin { node, from } = origin(client, connect, args, given).await?;
    let at = pods::find(client, connect, std::slice::from_ref(&node)).await?;
    let at = at.first().context("a node to ask")?;
    let answer = match ask(client, args, at, &from, limit).await {
        Ok(answer) => answer,
        Err(error) => return Ok((node, Err(error))),
    };
    let trace = parsed(answer).and_then(|trace| named(&node, trace));
    let trace = trace.with_context(|| node.clone())?;
    let onward = onward(client, connect, at, &trace, limit).await;
    Ok((node, Ok(Traced { trace, onward })))
}

/// Tries each address of the client until kpx accepts the address family.
async fn ask(
    client: &Client,
    args: &TraceArgs,
    at: &NodePod,
    from: &[String],
    limit: Duration,
) -> Result<Answer> {
    let mut last = Answer::default();
    for from in from {
        let arguments = arguments(from, &args.to, args.count);
        last = exec::run(client, at, &arguments, limit, LONGEST).await?;
        if last.code == 0 || !last.stderr.contains("different families") {
            break;
        }
    }
    Ok(last)
}

fn arguments(from: &str, to: &str, count: u32) -> Vec<String> {
    vec![
        "trace".to_owned(),
        format!("--from={from}"),
        format!("--to={to}"),
        format!("--count={count}"),
        "--output=json".to_owned(),
    ]
}

/// Returns the document that a node's kpx printed. Fails with its standard error if it failed.
fn parsed<T: DeserializeOwned>(answer: Answer) -> Result<T> {
    let Answer {
        code,
        stdout,
        stderr,
    } = answer;
    if code != 0 {
        let words = stderr.trim().trim_start_matches("kpx: ");
        bail!("{}", escaped(words).replace('\n', " "));
    }
    serde_json::from_slice(&stdout).context(OTHER_VERSION)
}

/// Sets the name of a trace's node, which the answer may lack or forge.
fn named(node: &str, mut trace: Value) -> Result<Value> {
    let fields = trace.as_object_mut().context(OTHER_VERSION)?;
    fields.insert("node".to_owned(), node.into());
    Ok(trace)
}

/// A packet as it leaves the client's node.
#[derive(Debug, PartialEq, Eq)]
struct Sent {
    source: SocketAddr,
    /// The backend, or the address of the Service if the packet is handed over.
    destination: SocketAddr,
    backend: SocketAddr,
    protocol: &'static str,
    service: String,
}

impl Sent {
    fn is_handed_over(&self) -> bool {
        self.destination != self.backend
    }

    /// Returns the packet of a trace that leads to a backend elsewhere.
    fn of(trace: &Value) -> Option<Self> {
        let outcome = &trace["outcome"];
        let at = |end: &Value| end["at"].as_str()?.parse().ok();
        let backend = &outcome["backend"];
        let mut protocols = ["tcp", "udp", "sctp"].into_iter();
        let [namespace, name] = ["namespace", "name"].map(|key| outcome["service"][key].as_str());
        if outcome["verdict"] != "forward" || backend["local"] != false {
            return None;
        }
        let backend = at(backend)?;
        let destination = match outcome["handedOver"].as_bool() {
            Some(true) => trace["packet"]["to"].as_str()?.parse().ok()?,
            _ => backend,
        };
        Some(Self {
            source: at(&outcome["source"])?,
            destination,
            backend,
            protocol: protocols.find(|known| trace["packet"]["protocol"] == *known)?,
            service: format!("{}/{}", namespace?, name?),
        })
    }

    /// Returns the command that reads the packet's Service. The name comes from a node, so nothing in
    /// it may be a flag.
    fn services(&self) -> [String; 4] {
        ["services", "--output=json", "--", &self.service].map(str::to_owned)
    }
}

/// Traces the packet on the backend's node, which the client's node knows from the
/// EndpointSlice. `None` if the backend is on the client's node or on no node.
async fn onward(
    client: &Client,
    connect: &ConnectArgs,
    at: &NodePod,
    trace: &Value,
    limit: Duration,
) -> Option<Onward> {
    let packet = Sent::of(trace)?;
    let services = packet.services();
    let services: Result<Vec<ServiceView>> =
        async { parsed(exec::run(client, at, &services, limit, LONGEST).await?) }.await;
    let services = match services {
        Ok(services) => services,
        Err(error) => {
            let trace = Err(error.context("find the node of the backend"));
            return Some(Onward { node: None, trace });
        }
    };
    let ports = services.into_iter().flat_map(|service| service.ports);
    let mut backends = ports.flat_map(|port| port.backends);
    let node = backends
        .find(|one| one.address == packet.backend)
        .and_then(|backend| backend.node)?;
    let there = async {
        let at = pods::find(client, connect, std::slice::from_ref(&node)).await?;
        let at = at.first().context("a node to ask")?;
        let to = format!("{}/{}", packet.destination, packet.protocol);
        let mut arguments = arguments(&packet.source.to_string(), &to, 1);
        if packet.is_handed_over() {
            arguments.push("--handed-over".to_owned());
        }
        let trace = parsed(exec::run(client, at, &arguments, limit, LONGEST).await?)?;
        named(&node, trace)
    };
    let trace = there.await;
    Some(Onward {
        node: Some(node),
        trace,
    })
}

async fn origin(
    client: &Client,
    connect: &ConnectArgs,
    args: &TraceArgs,
    given: Option<String>,
) -> Result<Origin> {
    let whole = args.from.parse::<SocketAddr>().ok().map(|at| at.ip());
    if let Some(address) = whole.or_else(|| args.from.parse().ok()) {
        let node = match given {
            Some(node) => node,
            None => node_of_address(client, connect, address).await?,
        };
        return Ok(Origin {
            node,
            from: vec![args.from.clone()],
        });
    }
    let (kind, name) = args
        .from
        .split_once('/')
        .with_context(|| format!("{:?} is neither an address nor KIND/NAME", args.from))?;
    if ["node", "no", "nodes"].contains(&kind) {
        return Ok(Origin {
            node: name.to_owned(),
            from: vec![args.from.clone()],
        });
    }
    let (namespace, name) = name
        .split_once('/')
        .unwrap_or((client.default_namespace(), name));
    let pod = find_pod(client, connect, kind, namespace, name).await?;
    ensure!(
        is_running(&pod),
        "pod {namespace}/{} does not run, and sends no packets",
        name_of(&pod)
    );
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
    let node =
        node.with_context(|| format!("pod {namespace}/{} has no node yet", name_of(&pod)))?;
    if pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true) {
        return Ok(Origin {
            from: vec![format!("node/{node}")],
            node,
        });
    }
    let mut from: Vec<_> = addresses(&pod).iter().map(IpAddr::to_string).collect();
    ensure!(
        !from.is_empty(),
        "pod {namespace}/{} has no address yet",
        name_of(&pod)
    );
    // A destination's name has no address family, so kpx reports whether the client's address fits.
    let to = args
        .to
        .split('/')
        .next()
        .and_then(|to| to.parse::<SocketAddr>().ok());
    from.retain(|address| to.is_none_or(|to| address.contains(':') == to.is_ipv6()));
    ensure!(
        !from.is_empty(),
        "pod {namespace}/{} has no address of the family of {}",
        name_of(&pod),
        args.to
    );
    Ok(Origin { node, from })
}

/// Returns the pod, or the first running pod of a workload.
async fn find_pod(
    client: &Client,
    connect: &ConnectArgs,
    kind: &str,
    namespace: &str,
    name: &str,
) -> Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    if ["pod", "po", "pods"].contains(&kind) {
        return connect
            .call(
                TIMEOUT,
                format!("find pod {namespace}/{name}"),
                pods.get(name),
            )
            .await;
    }
    let what = format!("list the pods of {namespace}");
    let listed = connect
        .call(TIMEOUT, what, pods.list(&ListParams::default()))
        .await?;
    let is_client =
        |pod: &Pod| is_of(pod, kind, name) && is_running(pod) && !addresses(pod).is_empty();
    let found = listed.items.into_iter().find(is_client);
    found.with_context(|| format!("no running pod of {kind}/{namespace}/{name}"))
}

/// Returns true while the pod runs. The address of an ended pod may already belong to another pod.
fn is_running(pod: &Pod) -> bool {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        == Some("Running")
}

/// Returns true if the workload owns the pod. The names of a Deployment's ReplicaSets end with a
/// template hash.
fn is_of(pod: &Pod, kind: &str, name: &str) -> bool {
    pod.metadata
        .owner_references
        .iter()
        .flatten()
        .any(|owner| match (kind, owner.kind.as_str()) {
            ("deploy" | "deployment" | "deployments", "ReplicaSet") => owner
                .name
                .rsplit_once('-')
                .is_some_and(|(deployment, _)| deployment == name),
            ("rs" | "replicaset" | "replicasets", "ReplicaSet")
            | ("sts" | "statefulset" | "statefulsets", "StatefulSet")
            | ("ds" | "daemonset" | "daemonsets", "DaemonSet")
            | ("job" | "jobs", "Job") => owner.name == name,
            _ => false,
        })
}

fn name_of(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

fn addresses(pod: &Pod) -> Vec<IpAddr> {
    let ips = pod
        .status
        .iter()
        .flat_map(|status| status.pod_ips.iter().flatten());
    ips.filter_map(|ip| ip.ip.parse().ok()).collect()
}

async fn node_of_address(
    client: &Client,
    connect: &ConnectArgs,
    address: IpAddr,
) -> Result<String> {
    let nodes: Api<Node> = Api::all(client.clone());
    let nodes = connect
        .call(
            TIMEOUT,
            "list the nodes",
            nodes.list(&ListParams::default()),
        )
        .await?;
    let has = |node: &Node| {
        let addresses = node
            .status
            .iter()
            .flat_map(|status| status.addresses.iter().flatten());
        addresses
            .filter_map(|own| own.address.parse::<IpAddr>().ok())
            .any(|own| own == address)
    };
    if let Some(node) = nodes.items.into_iter().find(has) {
        return node.metadata.name.context("a node has a name");
    }
    let pods: Api<Pod> = Api::all(client.clone());
    // The API server's selector matches only a pod's first address, so the second list finds
    // addresses of the other family.
    for selector in [
        format!("status.podIP={address}"),
        "status.phase=Running".to_owned(),
    ] {
        let params = ListParams::default().fields(&selector);
        let listed = connect
            .call(TIMEOUT, "list the pods of the cluster", pods.list(&params))
            .await?;
        let found = listed
            .items
            .into_iter()
            .find(|pod| has_address(pod, address));
        if let Some(node) = found.and_then(|pod| pod.spec?.node_name) {
            return Ok(node);
        }
    }
    bail!(
        "{address} is neither a pod's nor a node's: --node names the node that its packets come to"
    )
}

/// Returns true if the pod runs and the address is the pod's own, rather than the node's.
fn has_address(pod: &Pod, address: IpAddr) -> bool {
    let is_node = pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true);
    is_running(pod) && !is_node && addresses(pod).contains(&address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(backend: Value) -> Value {
        json!({
            "node": "n1", "packet": {"from": "10.244.1.2:32768", "to": "10.96.0.1:80", "protocol": "tcp", "count": 1},
            "outcome": {
                "verdict": "forward", "backend": backend, "source": {"at": "10.244.1.2:32768", "masqueraded": false},
                "service": {"key": "10.96.0.1:80/tcp", "namespace": "shop", "name": "web", "portName": ""},
            },
        })
    }

    #[test]
    fn packet_to_a_backend_of_another_node_goes_on_as_it_was_sent() {
        let mut elsewhere = trace(json!({"at": "10.244.2.2:8080", "local": false}));
        let expected = |destination: &str| Sent {
            source: "10.244.1.2:32768".parse().unwrap(),
            destination: destination.parse().unwrap(),
            backend: "10.244.2.2:8080".parse().unwrap(),
            protocol: "tcp",
            service: "shop/web".to_owned(),
        };
        assert_eq!(Sent::of(&elsewhere), Some(expected("10.244.2.2:8080")));
        elsewhere["outcome"]["handedOver"] = json!(true);
        assert_eq!(Sent::of(&elsewhere), Some(expected("10.96.0.1:80")));
        for here in [json!({"at": "10.244.1.3:8080", "local": true}), Value::Null] {
            assert_eq!(Sent::of(&trace(here)), None);
        }
    }

    #[test]
    fn name_of_a_node_stands_behind_all_flags() {
        let mut trace = trace(json!({"at": "10.244.2.2:8080", "local": false}));
        trace["outcome"]["service"]["namespace"] = json!("--output=yaml");
        let command = Sent::of(&trace).unwrap().services();
        let expected = ["services", "--output=json", "--", "--output=yaml/web"];
        assert_eq!(command, expected);
    }

    #[test]
    fn both_halves_are_shown_in_order() {
        let render: Render = |trace| Ok(format!("on {}\n", trace["node"]));
        let onward = |trace| Onward {
            node: Some("n2".to_owned()),
            trace,
        };
        let there = onward(Ok(json!({"node": "n2"})));
        let text = there.text(render).unwrap();
        assert_eq!(text, "\nthen on the backend's node:\non \"n2\"\n");
        let silent = onward(Err(anyhow::anyhow!("no answer")));
        assert!(
            silent
                .text(render)
                .unwrap()
                .ends_with("n2: no trace: no answer\n")
        );
        let whole = with_onward(json!({"node": "n1"}), Some(silent));
        let expected =
            json!({"node": "n1", "onward": {"node": "n2", "trace": null, "error": "no answer"}});
        assert_eq!(whole, expected);
        let unknown = Onward {
            node: None,
            trace: Err(anyhow::anyhow!("no answer")),
        };
        assert_eq!(
            unknown.text(render).unwrap(),
            "\nthen on the backend's node: no trace: no answer\n"
        );
    }

    #[test]
    fn node_speaks_for_no_other_node() {
        let forged = json!({"node": "n1", "onward": {"node": "n2", "trace": {"node": "n2"}}});
        assert_eq!(with_onward(forged, None), json!({"node": "n1"}));
        let trace = named("n2", json!({"node": "n3"})).unwrap();
        assert_eq!(trace, json!({"node": "n2"}));
    }

    #[test]
    fn answer_in_another_form_has_the_name_of_its_node() {
        let trace = named("n1", json!({"outcome": null})).unwrap();
        assert_eq!(trace, json!({"outcome": null, "node": "n1"}));
        let error = named("n1", Value::Null).unwrap_err();
        assert_eq!(error.to_string(), OTHER_VERSION);
    }

    #[test]
    fn workload_owns_its_pods_alone() {
        let pod = |kind: &str, name: &str| -> Pod {
            let owner = json!({"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": "1"});
            serde_json::from_value(json!({"metadata": {"name": "a", "ownerReferences": [owner]}}))
                .unwrap()
        };
        let cases = [
            ("ReplicaSet", "web-5d4f", "deploy", "web", true),
            ("ReplicaSet", "web-front-5d4f", "deploy", "web", false),
            ("ReplicaSet", "web-5d4f", "rs", "web-5d4f", true),
            ("StatefulSet", "db", "sts", "db", true),
            ("StatefulSet", "db", "deploy", "db", false),
        ];
        for (owner, owner_name, kind, name, is) in cases {
            assert_eq!(
                is_of(&pod(owner, owner_name), kind, name),
                is,
                "{owner}/{owner_name} {kind}/{name}"
            );
        }
    }

    #[test]
    fn address_is_of_a_running_pod_with_its_own_network() {
        let pod = |phase: &str, host_network: bool| -> Pod {
            let spec = json!({"containers": [], "nodeName": "n1", "hostNetwork": host_network});
            let ips = json!([{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]);
            let status = json!({"phase": phase, "podIP": "10.0.0.1", "podIPs": ips});
            serde_json::from_value(
                json!({"metadata": {"name": "a"}, "spec": spec, "status": status}),
            )
            .unwrap()
        };
        for address in ["10.0.0.1", "fd00::1"].map(|ip| ip.parse().unwrap()) {
            assert!(has_address(&pod("Running", false), address), "{address}");
            assert!(!has_address(&pod("Succeeded", false), address), "{address}");
            assert!(!has_address(&pod("Running", true), address), "{address}");
        }
        assert!(!has_address(
            &pod("Running", false),
            "10.0.0.2".parse().unwrap()
        ));
    }
}
