use std::fmt::Write as _;
use std::os::unix::fs::symlink;
use std::time::Duration;

use expect_test::expect;
use tempfile::TempDir;
use tokio::sync::mpsc::{self, Receiver};
use tokio::time::timeout;

use super::*;
use proxy_core::compact::{Address, Compact, Service};

mod damaged;
mod refused;

const WEB: &str = "\
apiVersion: v1
kind: Service
metadata:
  name: web
spec:
  clusterIP: 10.96.0.10
  ports:
  - port: 80
";

fn service(name: &str, port: u16) -> String {
    WEB.replace("web", name).replace("80", &port.to_string())
}

fn slice(name: &str, address: &str) -> String {
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: {name}}}\naddressType: IPv4\n\
         endpoints: [{{addresses: [{address}]}}]\nports: [{{port: 8080}}]\n"
    )
}

#[test]
fn objects_are_completed_as_an_api_server_would() {
    let json = serde_json::json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "two", "namespace": "shop"}, "spec":
            {"clusterIP": "10.96.0.2", "clusterIPs": ["10.96.0.2", "fd00::2"], "sessionAffinity": "ClientIP", "ports": [{"port": 80}]}},
        {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSliceList", "items": []},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "ignored"}},
        {"apiVersion": "serving.knative.dev/v1", "kind": "Service", "metadata": {"name": "ignored"}},
    ]});
    let (_, (objects, problems)) = folder(&[
        ("a.yml", &slice("web-1", "10.0.0.1")),
        ("b.json", &json.to_string()),
    ]);
    assert_eq!(problems, BTreeMap::new());
    let objects: String = objects
        .values()
        .map(|object| match &**object {
            Object::EndpointSlice(slice) => format!("{}\n", serde_json::to_string(slice).unwrap()),
            Object::Service(service) => format!("{}\n", serde_json::to_string(service).unwrap()),
            other => panic!("{other:?}"),
        })
        .collect();
    expect![[r#"
        {"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","addressType":"IPv4","endpoints":[{"addresses":["10.0.0.1"]}],"metadata":{"name":"web-1","namespace":"default"},"ports":[{"name":"","port":8080,"protocol":"TCP"}]}
        {"apiVersion":"v1","kind":"Service","metadata":{"name":"two","namespace":"shop"},"spec":{"clusterIP":"10.96.0.2","clusterIPs":["10.96.0.2","fd00::2"],"ipFamilies":["IPv4","IPv6"],"ports":[{"port":80,"protocol":"TCP"}],"sessionAffinity":"ClientIP","sessionAffinityConfig":{"clientIP":{"timeoutSeconds":10800}}}}
    "#]].assert_eq(&objects);
}

/// Accepts multicast endpoints that are not link-local, and addresses with leading zeros, as in old
/// objects.
#[test]
fn objects_that_an_api_server_holds_are_accepted() {
    let v6 = slice("web-2", "'ff05::1:3', 'FD00:0::0001'").replace("IPv4", "IPv6");
    let slices = [
        slice("web-1", "239.1.1.1"),
        slice("web-3", "010.000.000.001"),
        v6,
    ];
    let web = WEB.replace(
        "clusterIP: 10.96.0.10",
        "clusterIP: 010.096.000.010\n  externalIPs: [192.000.002.001]",
    );
    let web = web.replace(
        "spec:",
        "spec:\n  loadBalancerSourceRanges: [010.000.0.0/8]",
    );
    let text = slices
        .into_iter()
        .chain([web])
        .collect::<Vec<_>>()
        .join("---\n");
    let (objects, problems) = folder(&[("a.yaml", &text)]).1;
    assert_eq!((objects.len(), problems), (4, BTreeMap::new()));
    let service = objects.values().find_map(|object| match &**object {
        Object::Service(service) => service.spec.clone(),
        _ => None,
    });
    let spec = service.expect("a Service");
    assert_eq!(spec.ip_families, Some(vec!["IPv4".to_owned()]));
    assert_eq!(
        spec.cluster_ips,
        Some(vec!["010.096.000.010".to_owned()]),
        "as it was written"
    );
}

#[test]
fn an_object_outside_the_watch_selectors_is_not_sent() {
    let labelled = |text: &str, label: &str| {
        text.replacen(
            "metadata:",
            &format!("metadata:\n  labels: {{{label}: ''}}"),
            1,
        )
    };
    let slice =
        slice("web-1", "10.0.0.1").replace("metadata: {name: web-1}", "metadata:\n  name: web-1");
    let node = |name: &str| format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\n");
    for (text, sent) in [
        (WEB.to_owned(), true),
        (
            labelled(WEB, "service.kubernetes.io/service-proxy-name"),
            true,
        ),
        (labelled(WEB, "service.kubernetes.io/headless"), true),
        (WEB.replace("10.96.0.10", "None"), false),
        (slice.clone(), true),
        (labelled(&slice, "service.kubernetes.io/headless"), false),
        (node("node-a"), true),
        (node("node-b"), false),
    ] {
        let (objects, problems) = folder(&[("a.yaml", &text)]).1;
        assert_eq!(
            (objects.len(), problems.len()),
            (usize::from(sent), 0),
            "{text}"
        );
    }
}

#[test]
fn the_first_of_two_documents_wins_and_the_other_is_a_problem() {
    let (_, (objects, problems)) = folder(&[
        ("b.yaml", &service("web", 2)),
        (
            "a.yaml",
            &format!("{}---\n{}", service("web", 1), service("web", 3)),
        ),
    ]);
    assert_eq!(ports(&objects), ["web 1"]);
    let mut said = String::new();
    show_problems(&mut said, &problems);
    expect![[r#"
        a.yaml:10: Service default/web: duplicate of a.yaml:1, which stays programmed
        b.yaml:1: Service default/web: duplicate of a.yaml:1, which stays programmed
    "#]]
    .assert_eq(&said);
}

#[test]
fn a_bad_document_keeps_its_last_readable_object() {
    let two = |one: &str, other: &str| format!("{one}---\n{other}");
    let (dir, _) = folder(&[]);
    let mut manifests = Manifests::default();
    let mut now = |text: &str| {
        fs::write(dir.path().join("web.yaml"), text).unwrap();
        manifests = read(&dir, std::mem::take(&mut manifests));
        let (objects, problems) = manifests.state();
        (ports(&objects).join(", "), problems.len())
    };
    let bad = |text: String| text.replace("port:", "prot:");
    let unreadable = |text: String| text.replace("kind:", "- kind:");
    let is = |objects: &str, problems: usize| (objects.to_owned(), problems);

    assert_eq!(
        now(&two(&service("a", 1), &bad(service("b", 1)))),
        is("a 1", 1),
        "nothing to keep"
    );
    assert_eq!(
        now(&two(&service("a", 1), &service("b", 1))),
        is("a 1, b 1", 0)
    );
    assert_eq!(
        now(&two(&service("a", 2), &bad(service("b", 2)))),
        is("a 2, b 1", 1),
        "b is kept, a is new"
    );
    assert_eq!(
        now(&bad(service("b", 2))),
        is("b 1", 1),
        "a is gone, b is still kept"
    );
    assert_eq!(
        now(&two(&service("b", 2), &service("a", 3))),
        is("a 3, b 2", 0),
        "good again"
    );
    assert_eq!(
        now(&two(&unreadable(service("x", 3)), &service("b", 3))),
        is("a 3, b 3", 1),
        "it might be a"
    );
    assert_eq!(now("kind: ["), is("a 3, b 3", 1), "it might be any");
    assert_eq!(now(&service("b", 4)), is("b 4", 0), "a is gone");
    assert_eq!(now(""), is("", 0));
}

#[test]
fn an_object_that_moves_out_of_a_bad_file_is_not_kept_there() {
    let (dir, _) = folder(&[("a.yaml", &service("web", 1))]);
    let manifests = read(&dir, Manifests::default());
    fs::write(dir.path().join("a.yaml"), "kind: [").unwrap();
    fs::write(dir.path().join("b.yaml"), service("web", 2)).unwrap();
    let (objects, problems) = read(&dir, manifests).state();
    assert_eq!(
        (ports(&objects).join(", "), problems.len()),
        ("web 2".to_owned(), 1)
    );
}

#[tokio::test]
async fn changes_are_sent_as_they_happen() {
    let (dir, _) = folder(&[("web.yaml", WEB)]);
    let mut running = Running::start(&dir);
    assert_eq!(
        running.next(4).await,
        ["cidrs", "nodes", "slices", "services web 80"]
    );

    write(&dir, "slices.yaml", &slice("web-1", "10.0.0.1"));
    assert_eq!(running.next(1).await, ["put slice web-1 10.0.0.1"]);

    // Editors write in this way.
    write(&dir, ".web.yaml.tmp", &service("web", 81));
    fs::rename(dir.path().join("web.yaml"), dir.path().join("web.yaml~")).unwrap();
    fs::rename(
        dir.path().join(".web.yaml.tmp"),
        dir.path().join("web.yaml"),
    )
    .unwrap();
    assert_eq!(running.next(1).await, ["put web 81"]);

    write(&dir, "web.yaml", &WEB.replace("port:", "prot:"));
    running
        .problems(|problems| problems.contains_key(&Problem::Manifest("web.yaml:8".into())))
        .await;
    write(&dir, "web.yaml", &service("web", 82));
    assert_eq!(running.next(1).await, ["put web 82"]);
    running.problems(BTreeMap::is_empty).await;

    // A new Service is sent after its backends, a deleted Service before them.
    write(
        &dir,
        "shop.yaml",
        &format!("{}---\n{}", service("shop", 1), slice("shop-1", "10.0.0.2")),
    );
    assert_eq!(
        running.next(2).await,
        ["put slice shop-1 10.0.0.2", "put shop 1"]
    );
    fs::remove_file(dir.path().join("shop.yaml")).unwrap();
    assert_eq!(
        running.next(2).await,
        ["del service default/shop", "del slice default/shop-1"]
    );

    write(
        &dir,
        "web.yaml",
        &format!("# the same\n{}", service("web", 82)),
    );
    write(&dir, "last.yaml", &service("last", 1));
    assert_eq!(
        running.next(1).await,
        ["put last 1"],
        "and no file without a real change"
    );
}

#[tokio::test]
async fn a_mounted_config_map_is_followed() {
    let (dir, _) = folder(&[]);
    let path = |name: &str| dir.path().join(name);
    let version = |name: &str, port| {
        fs::create_dir(path(name)).unwrap();
        fs::write(path(name).join("web.yaml"), service("web", port)).unwrap();
        symlink(name, path("..data_tmp")).unwrap();
        fs::rename(path("..data_tmp"), path("..data")).unwrap();
    };
    version("..1", 1);
    symlink("..data/web.yaml", path("web.yaml")).unwrap();
    let mut running = Running::start(&dir);
    assert_eq!(running.next(4).await[3], "services web 1");
    version("..2", 2);
    fs::remove_dir_all(path("..1")).unwrap();
    assert_eq!(running.next(1).await, ["put web 2"]);
}

#[tokio::test]
async fn a_folder_that_goes_and_comes_back_loses_no_object() {
    let (parent, _) = folder(&[]);
    let path = parent.path().join("manifests");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("web.yaml"), WEB).unwrap();
    let mut running = Running::start_at(path.clone());
    assert_eq!(running.next(4).await[3], "services web 80");

    fs::rename(&path, parent.path().join("elsewhere")).unwrap();
    let problem = Problem::Folder(path.clone());
    running
        .problems(|problems| problems.contains_key(&problem))
        .await;
    fs::create_dir(parent.path().join("new")).unwrap();
    fs::write(parent.path().join("new/web.yaml"), service("web", 81)).unwrap();
    fs::rename(parent.path().join("new"), &path).unwrap();
    assert_eq!(running.next(1).await, ["put web 81"]);
    running.problems(BTreeMap::is_empty).await;

    fs::write(path.join("web.yaml"), service("web", 82)).unwrap();
    assert_eq!(running.next(1).await, ["put web 82"]);
}

#[tokio::test]
async fn the_source_ends_with_its_receiver_and_needs_a_folder() {
    let (dir, _) = folder(&[]);
    let running = Running::start(&dir);
    drop(running.inputs);
    timeout(DEADLINE, running.task)
        .await
        .unwrap()
        .unwrap()
        .unwrap();

    let (inputs, _receiver) = mpsc::channel(8);
    let error = run("/nowhere/manifests".into(), None, inputs, Health::default())
        .await
        .unwrap_err();
    assert_eq!(error.to_string(), "read folder /nowhere/manifests");
}

const DEADLINE: Duration = Duration::from_secs(10);

fn folder(files: &[(&str, &str)]) -> (TempDir, (Objects, BTreeMap<String, String>)) {
    let dir = TempDir::new().unwrap();
    for (name, text) in files {
        write(&dir, name, text);
    }
    let state = read(&dir, Manifests::default()).state();
    (dir, state)
}

fn write(dir: &TempDir, name: &str, text: &str) {
    fs::write(dir.path().join(name), text).unwrap();
}

fn read(dir: &TempDir, before: Manifests) -> Manifests {
    let mut manifests = Manifests {
        path: dir.path().to_owned(),
        node_name: Some("node-a".into()),
        ..before
    };
    manifests.read(Folder::new(dir.path().to_owned()).list().unwrap());
    manifests
}

fn ports(objects: &Objects) -> Vec<String> {
    let services = objects.values().filter_map(|object| match &**object {
        Object::Service(service) => Some(show(&Service::from(service.as_ref().clone()))),
        Object::ServiceCidr(_) | Object::Node(_) | Object::EndpointSlice(_) => None,
    });
    services.collect()
}

fn show(service: &Service) -> String {
    format!("{} {}", service.name.name, service.ports[0].port)
}

fn show_problems(to: &mut String, problems: &BTreeMap<String, String>) {
    for (place, why) in problems {
        writeln!(to, "{place}: {why}").unwrap();
    }
}

struct Running {
    inputs: Receiver<Input>,
    health: Health,
    task: tokio::task::JoinHandle<anyhow::Result<()>>,
}

impl Running {
    fn start(dir: &TempDir) -> Self {
        Self::start_at(dir.path().to_owned())
    }

    fn start_at(path: PathBuf) -> Self {
        let (sender, inputs) = mpsc::channel(1);
        let health = Health::default();
        let task = tokio::spawn(run(path, Some("node-a".into()), sender, health.clone()));
        Self {
            inputs,
            health,
            task,
        }
    }

    async fn next(&mut self, count: usize) -> Vec<String> {
        let mut next = Vec::new();
        for _ in 0..count {
            let input = timeout(DEADLINE, self.inputs.recv())
                .await
                .expect("an input in time")
                .expect("a sender");
            next.push(show_input(&input));
        }
        next
    }

    async fn problems(&self, fit: impl FnMut(&crate::health::Problems) -> bool) {
        timeout(DEADLINE, self.health.subscribe().wait_for(fit))
            .await
            .expect("these problems in time")
            .unwrap();
    }
}

fn show_input(input: &Input) -> String {
    fn all<K>(what: &str, all: &[K], show: impl Fn(&K) -> String) -> String {
        std::iter::once(what.to_owned())
            .chain(all.iter().map(show))
            .collect::<Vec<_>>()
            .join(" ")
    }
    fn name<K: Compact>(object: &K) -> String {
        object.name().name.to_string()
    }
    match input {
        Input::Service(Update::All(services)) => all("services", services, show),
        Input::Service(Update::Put(service)) => format!("put {}", show(service)),
        Input::Service(Update::Del(name)) => format!("del service {name}"),
        Input::EndpointSlice(Update::All(slices)) => all("slices", slices, name),
        Input::EndpointSlice(Update::Put(slice)) => {
            let Address::Ip(address) = slice.endpoints[0].address else {
                panic!("no address")
            };
            format!("put slice {} {address}", name(&**slice))
        }
        Input::EndpointSlice(Update::Del(name)) => format!("del slice {name}"),
        Input::Node(Update::All(nodes)) => all("nodes", nodes, name),
        Input::ServiceCidr(Update::All(cidrs)) => all("cidrs", cidrs, name),
        other => format!("{other:?}"),
    }
}

#[test]
fn a_file_that_is_too_long_is_a_problem_and_costs_only_itself() {
    let dir = TempDir::new().unwrap();
    write(&dir, "a.yaml", WEB);
    write(&dir, "b.yaml", &service("api", 81));
    let manifests = read(&dir, Manifests::default());
    // A hole takes no disk space.
    let file = fs::File::options()
        .append(true)
        .open(dir.path().join("a.yaml"))
        .unwrap();
    file.set_len(2 << 30).unwrap();
    let (objects, problems) = read(&dir, manifests).state();
    assert_eq!(objects.len(), 2, "what was read before stays in force");
    let why = "has more than 64 MiB: divide it into several files".to_owned();
    assert_eq!(problems, [("a.yaml".to_owned(), why)].into());
}
