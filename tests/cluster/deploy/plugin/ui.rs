//! `kubectl kpx ui`: the page of the whole cluster.

use std::io::Write as _;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use testbed::apiserver::Container;
use testbed::browser::Browser;
use testbed::netns::NetNs;
use testbed::pod::Inside;

use super::*;
use crate::deploy::cluster::PORT;

/// The most that a node may send in a second: a status, changes of 256 rows, and packets.
const BOUND: f64 = 40_000.0;

/// The page's server, and its place.
struct Page<'a> {
    _process: Watched,
    ns: &'a NetNs,
    port: u16,
}

impl<'a> Page<'a> {
    fn start(nodes: &Nodes<'a>) -> Result<Self> {
        Self::start_with(nodes, "--timeout 5")
    }

    fn start_with(nodes: &Nodes<'a>, flags: &str) -> Result<Self> {
        let mut command = nodes.command(&format!("ui --port 0 {flags}"));
        let ns = &nodes.cluster.lab.fabric.ns;
        let mut process = Watched(ns.spawn(command.stdout(Stdio::piped()))?);
        let stdout = process.0.stdout.take().context("an output")?;
        let line = BufReader::new(stdout).lines().next().context("a line")??;
        let port = line
            .strip_prefix("http://127.0.0.1:")
            .and_then(|rest| rest.split_once("/ui/"))
            .with_context(|| line.clone())?
            .0;
        Ok(Self {
            port: port.parse()?,
            _process: process,
            ns,
        })
    }

    /// Returns the status, the headers and the body of an answer, to a request with these headers.
    fn get(&self, path: &str, headers: &str) -> Result<(u16, String, String)> {
        let mut stream = self
            .ns
            .run(|| TcpStream::connect(("127.0.0.1", self.port)))?;
        stream.set_read_timeout(Some(DEADLINE))?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nConnection: close\r\n{headers}\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("a header's end")?;
        let code = head.split(' ').nth(1).context("a status")?.parse()?;
        Ok((code, head.to_lowercase(), body.to_owned()))
    }

    fn data(&self, what: &str) -> Result<String> {
        let headers = "Host: localhost\r\nkpx-page: 1\r\n";
        let (code, _, body) = self.get(&format!("/ui/api/{what}"), headers)?;
        ensure!(code == 200, "{what}: {code}: {body}");
        Ok(body)
    }

    fn status(&self) -> Result<Value> {
        Ok(serde_json::from_str(&self.data("status")?)?)
    }

    /// Returns the row of a Service; null without one.
    fn row(&self, name: &str) -> Result<Value> {
        let rows = self.data("rows")?;
        let rows = rows.lines().skip(1).map(serde_json::from_str::<Value>);
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        let row = rows.into_iter().find(|row| row["name"] == name);
        Ok(row.unwrap_or_default())
    }

    /// Waits until the status has the state of each node.
    fn wait(&self, states: [&str; 2]) -> Result<()> {
        let mut seen = Value::Null;
        wait_until(DEADLINE, &format!("nodes are {states:?}"), || {
            seen = self.status()?;
            Ok([0, 1].map(|at| seen["nodes"][at]["state"].clone()) == states)
        })
        .with_context(|| seen.to_string())
    }

    fn wait_row(&self, name: &str, what: &str, is: impl Fn(&Value) -> bool) -> Result<Value> {
        let mut row = Value::Null;
        wait_until(DEADLINE, &format!("{name} {what}"), || {
            row = self.row(name)?;
            Ok(is(&row))
        })
        .with_context(|| format!("{row}"))?;
        Ok(row)
    }

    fn url(&self, place: &str) -> String {
        format!("http://127.0.0.1:{}/ui/?every=0.5{place}", self.port)
    }
}

/// Returns a pod of the lab as the API server has it.
fn pod(nodes: &Nodes<'_>, name: &str, node: &str) -> Object {
    let addrs = nodes.cluster.lab.host(name).addrs;
    Object(json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "shop"},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "c"}]},
        "status": {"phase": "Running", "podIP": addrs.v4, "podIPs": [{"ip": addrs.v4}, {"ip": addrs.v6}]},
    }))
}

#[test]
fn page_of_the_cluster_names_nodes_that_differ_fail_or_are_silent() -> Result<()> {
    let cluster = Cluster::start()?;
    let web = cluster.web()?;
    let empty = Service::new("empty", 13, &[], PORT);
    cluster.put_service(&empty)?;
    let nodes = Nodes::start(&cluster)?;
    cluster.serves("n1")?;
    cluster.serves("n2")?;
    for (name, node) in [("p1a", "n1"), ("p2a", "n2")] {
        cluster.put(&pod(&nodes, name, node))?;
    }
    let page = Page::start(&nodes)?;
    guards(&page)?;
    page.wait(["answers", "answers"])?;
    let row = page.wait_row("web", "is served by both", |row| row["serving"] == 2)?;
    ensure!(
        row["ready"] == 1 && row["differing"] == 0 && row["failing"] == json!([]),
        "{row}"
    );

    view(&page, &nodes, &web, &empty)?;

    // A node that does not hear of a change differs once the others have had time.
    let n2 = &cluster.lab.host("n2").ns;
    let nft = |text: &str| n2.exec(Command::new("nft").arg(text)).map(drop);
    let api = cluster.api().address().ip();
    nft(&format!(
        "add table ip lag; add chain ip lag in {{ type filter hook input priority 0; }}; add rule ip lag in ip saddr {api} drop"
    ))?;
    cluster.put_service(&web.backed_by(&["p2a", "p1b"]))?;
    let row = page.wait_row("web", "differs on n2", |row| row["differing"] == 1)?;
    let differs = json!([{"node": "n2", "what": "1/1 ready"}]);
    ensure!(row["differ"] == differs && row["ready"] == 2, "{row}");
    nft("delete table ip lag")?;

    // A node that hangs is named, and the others answer meanwhile.
    let hung = nodes.running["n2"].pid();
    kill(hung, Signal::SIGSTOP)?;
    let asked = Instant::now();
    let row = page.row("web");
    let service = page.data("service?namespace=default&name=web");
    let took = asked.elapsed();
    let silent = page.wait(["answers", "silent"]);
    let left = page.wait_row("web", "is served by n1", |row| row["serving"] == 1);
    kill(hung, Signal::SIGCONT)?;
    silent?;
    left?;
    ensure!(row?["name"] == "web", "the rows wait for n2");
    let service: Value = serde_json::from_str(&service?)?;
    ensure!(
        service["nodes"][0]["state"] == "serves" && service["nodes"][1]["state"] == "silent",
        "{service}"
    );
    ensure!(took < Duration::from_secs(6), "n2 slows n1 down: {took:?}");
    page.wait(["answers", "answers"])?;

    // The stream of each node stays within its bound.
    let rates = || -> Result<[f64; 2]> {
        let status = page.status()?;
        let rate = |at: usize| status["nodes"][at]["bytesPerSec"].as_f64();
        Ok([rate(0), rate(1)].map(Option::unwrap_or_default))
    };
    wait_until(DEADLINE, "both nodes send", || {
        Ok(rates()?.iter().all(|rate| *rate > 0.0))
    })?;
    let rates = rates()?;
    ensure!(rates.iter().all(|rate| *rate < BOUND), "{rates:?}");

    cluster.put_service(&web)?;
    page.wait_row("web", "has one backend, on n2", |row| {
        row["ready"] == 1 && row["serving"] == 2
    })?;
    traces(&nodes)
}

/// A container in which another command runs in the place of `kpx trace`.
#[derive(Debug)]
pub(super) struct TracesAs {
    pub(super) inside: Inside,
    pub(super) command: &'static [&'static str],
}

impl Container for TracesAs {
    fn exec(&self, command: &[String]) -> Result<Child> {
        let other: Vec<_> = self.command.iter().map(|&word| word.to_owned()).collect();
        let is_trace = command.iter().any(|word| word == "trace");
        self.inside.exec(if is_trace { &other } else { command })
    }

    fn log(&self) -> Result<String> {
        self.inside.log()
    }

    fn connect(&self, port: u16) -> Result<TcpStream> {
        self.inside.connect(port)
    }
}

/// Checks that a backend's node which hangs costs the reader only its own half of a trace.
fn traces(nodes: &Nodes<'_>) -> Result<()> {
    let page = Page::start_with(nodes, "")?;
    nodes.trace_as("n2", &["/usr/local/bin/kpx", "monitor"])?;
    let asked = Instant::now();
    let trace = page.data("trace?from=pod%2Fshop%2Fp1a&to=default%2Fweb%3A80")?;
    let took = asked.elapsed();
    let trace: Value = serde_json::from_str(&trace)?;
    let onward = &trace["onward"];
    ensure!(
        trace["outcome"]["verdict"] == "forward"
            && onward["node"] == "n2"
            && onward["error"] == "no answer within 8 s",
        "{trace}"
    );
    // The browser waits for 30 s.
    ensure!(took < Duration::from_secs(25), "{took:?}");

    // A node whose answers have another form is named, and the other half is shown.
    let browser = Browser::start(page.ns, &["--window-size=1400,900"], true)?;
    let place = "#/trace?from=pod/shop/p1a&to=default/web&port=80";
    browser.open(&page.url(place))?;
    browser.wait("document.getElementById('field-to')?.value === 'default/web'")?;
    let shown = |client: &str, backend: &str| -> Result<()> {
        browser.click("#trace .primary")?;
        browser.wait(&format!("document.getElementById('traced')?.textContent.startsWith('On n1: {client}') && (document.getElementById('onward')?.textContent ?? '').startsWith('{backend}')"))
    };
    let other: &[&str] = &["/usr/local/bin/kpx", "events", "--output=json"];
    nodes.trace_as("n2", other)?;
    shown("forward", "Then on n2: no trace")?;
    browser.accept("cluster-trace-other")?;
    nodes.trace_as("n1", &["/usr/local/bin/kpx", "status", "--output=json"])?;
    shown("no trace", "")
}

#[test]
fn page_of_the_cluster_shows_udp_and_the_time_before_it_was_opened() -> Result<()> {
    let cluster = Cluster::start()?;
    let web = cluster.web()?;
    let nodes = Nodes::start(&cluster)?;
    cluster.serves("n1")?;
    cluster.serves("n2")?;
    for (name, node) in [("p1a", "n1"), ("p2a", "n2")] {
        cluster.put(&pod(&nodes, name, node))?;
    }
    // The backend receives nothing of n1's pod by UDP.
    let (client, backend) = (cluster.lab.host("p1a"), cluster.lab.host("p2a"));
    let [v4, v6] = Family::ALL.map(|family| client.addrs.ip(family));
    backend.ns.nft(&format!(
        "add table inet deaf; add chain inet deaf in {{ type filter hook input priority 0; }}; add rule inet deaf in ip saddr {v4} meta l4proto udp drop; add rule inet deaf in ip6 saddr {v6} meta l4proto udp drop"
    ))?;
    let other = &cluster.lab.host("p2b").ns;
    let ask = || -> Result<()> {
        for family in Family::ALL {
            let answered = Dial::new(Protocol::Udp, web.frontend(family));
            let mut dial = answered;
            dial.deadline = Duration::from_millis(50);
            for _ in 0..5 {
                ensure!(dial.exchange(&client.ns, b"question").is_err());
            }
            answered.exchange(other, b"question")?;
        }
        Ok(())
    };
    // The nodes record before anyone looks.
    let mut seen = Value::Null;
    wait_until(DEADLINE, "the CLI shows unanswered UDP of n1", || {
        ask()?;
        let answers = nodes.json("services default/web")?;
        seen = json!(answers);
        let udp = |node: &str| {
            let ports = answers[node]["answer"][0]["ports"].as_array();
            let udp = ports?.iter().find(|port| port["protocol"] == "UDP")?;
            Some((
                udp["udp"]["answered"].as_u64()?,
                udp["udp"]["unanswered"].as_u64()?,
            ))
        };
        let (n1, n2) = (udp("n1"), udp("n2"));
        Ok(n1.is_some_and(|(_, unanswered)| unanswered >= 10)
            && n2.is_some_and(|(answered, unanswered)| answered > 0 && unanswered == 0))
    })
    .with_context(|| seen.to_string())?;
    let wide = nodes.run("backends default/web -o wide")?;
    let wide = String::from_utf8(wide.stdout)?;
    ensure!(wide.contains("UDP-ANSWERED"), "{wide}");

    let page = Page::start(&nodes)?;
    page.wait(["answers", "answers"])?;
    let what = "history?service=default%2Fweb";
    let mut history = Value::Null;
    wait_until(DEADLINE, "the history has n1's share", || {
        ask()?;
        history = serde_json::from_str(&page.data(what)?)?;
        let share = |at: usize, of: &str| history["nodes"][at][of].as_f64();
        Ok(share(0, "unanswered").is_some_and(|rate| rate > 0.0)
            && share(1, "unanswered") == Some(0.0))
    })
    .with_context(|| history.to_string())?;
    let total = history["total"]["opened"].as_array().context("a series")?;
    let opened = total.iter().filter_map(Value::as_f64);
    ensure!(
        total.len() > 2 && opened.fold(0.0, f64::max) > 0.0,
        "before the page was opened: {history}"
    );
    let row = {
        let mut row = Value::Null;
        wait_until(DEADLINE, "web fails on n1 alone", || {
            ask()?;
            row = page.row("web")?;
            Ok(row["failing"][0]["node"] == "n1" && row["failingNodes"]["failed"] == 1)
        })
        .with_context(|| row.to_string())?;
        row
    };
    ensure!(row["failed"].as_f64() > Some(0.0), "{row}");

    let browser = Browser::start(page.ns, &["--window-size=1400,900"], true)?;
    browser.open(&page.url("#/services/default/web"))?;
    let is = "try { return document.querySelector('[data-share=n1] .why').textContent.endsWith(' %') && document.querySelector('[data-share=n2]').textContent === '0 %' && document.querySelector('[data-chart=\"service udpUnanswered\"] path.line') !== null && [...document.querySelectorAll('.backend .why')].some((why) => why.textContent.endsWith(' unanswered')) } catch { return false }";
    wait_until(DEADLINE, "the page shows n1's share", || {
        ask()?;
        Ok(browser.eval(is)? == true)
    })
    .with_context(|| browser.text("body").unwrap_or_default())?;
    browser.accept("cluster-udp")?;

    // A trace names the rule of the client's node that may drop these packets.
    cluster.lab.host("n1").ns.nft(
        "add table inet pods; add chain inet pods early { type filter hook forward priority -5; }; add rule inet pods early meta l4proto udp drop"
    )?;
    ask()?;
    let trace = page.data("trace?from=pod%2Fshop%2Fp1a&to=default%2Fweb%3A80%2Fudp")?;
    let rule = "rule 1 of chain early of table inet pods may drop the packet";
    ensure!(trace.contains(rule), "{trace}");
    Ok(())
}

/// Checks that no other site and no frame gets at the data.
fn guards(page: &Page<'_>) -> Result<()> {
    let header = "kpx-page: 1\r\n";
    for (headers, code) in [
        (format!("Host: evil.example\r\n{header}"), 421),
        (header.to_owned(), 421),
        ("Host: localhost\r\n".to_owned(), 403),
        (format!("Host: localhost\r\n{header}"), 200),
    ] {
        for what in [
            "status",
            "rows",
            "reasons",
            "service?namespace=default&name=web",
        ] {
            let (seen, head, body) = page.get(&format!("/ui/api/{what}"), &headers)?;
            // No node may have answered yet.
            let is_missing = what.starts_with("service") && code == 200 && seen == 404;
            ensure!(
                seen == code || is_missing,
                "{what} {headers}: {seen}: {body}"
            );
            ensure!(
                head.contains("frame-ancestors 'none'") && head.contains("cache-control: no-store")
                    || code == 421,
                "{head}"
            );
        }
    }
    let (code, _, body) = page.get("/ui/", "Host: localhost\r\n")?;
    ensure!(
        code == 200 && body.contains("data-of=\"cluster\""),
        "{body}"
    );
    // Views of a node alone have no data here.
    let (code, ..) = page.get("/ui/api/options", &format!("Host: localhost\r\n{header}"))?;
    ensure!(code == 404, "{code}");
    Ok(())
}

/// Checks in a browser what a reader sees: problems first, packets with names, the nodes.
fn view(page: &Page<'_>, nodes: &Nodes<'_>, web: &Service, empty: &Service) -> Result<()> {
    let browser = Browser::start(page.ns, &["--window-size=1400,900"], true)?;
    browser.open(&page.url("#/services"))?;
    browser.wait(
        "document.querySelector('[data-service=\"default/web\"] .nodes')?.textContent === '2/2'",
    )?;
    let views = "return [...document.querySelectorAll('nav a')].map((link) => link.textContent)";
    let views = browser.strings(views)?;
    ensure!(
        views == ["Services", "Nodes", "Live", "Map", "Trace", "Unserved"],
        "{views:?}"
    );

    // Clients of n1 alone are not served.
    let client = &nodes.cluster.lab.host("p1a").ns;
    let refused = Dial::new(Protocol::Tcp, empty.frontend(Family::V4));
    let until = |what: &str| {
        wait_until(DEADLINE, what, || {
            for _ in 0..20 {
                ensure!(refused.exchange(client, b"hello").is_err());
            }
            let is = format!("try {{ return Boolean({what}) }} catch {{ return false }}");
            Ok(browser.eval(&is)? == true)
        })
        .with_context(|| browser.text("body").unwrap_or_default())
    };
    until(
        "document.querySelector('[data-service=\"default/empty\"] .problem').textContent.match(/^no endpoints: .* from n1$/)",
    )?;
    ensure!(
        browser.eval("return document.querySelector('tr[data-service]').dataset.service")?
            == "default/empty",
        "problems come first"
    );
    ensure!(
        browser.eval("return document.querySelector('[data-health]').textContent")?
            == "clients of 1 Service fail"
    );
    browser.accept("cluster-services")?;
    browser.open(&page.url("#/services/default/empty"))?;
    until(
        "document.querySelector('#of-nodes [data-node=n1] .state').textContent === 'clients fail' && document.querySelector('#of-nodes [data-node=n2] .state').textContent === 'serves'",
    )?;
    browser.accept("cluster-service")?;

    browser.open(&page.url("#/live"))?;
    browser.wait("document.getElementById('heard')?.textContent.startsWith('0 packets')")?;
    let cells = "[...document.querySelector('[data-event=decision]').children].map((cell) => cell.textContent)";
    let dial = Dial::new(Protocol::Tcp, web.frontend(Family::V4));
    wait_until(DEADLINE, "a packet with names", || {
        dial.exchange(client, b"hello")?;
        let cells = browser.eval(&format!("try {{ return {cells} }} catch {{ return [] }}"))?;
        Ok(cells[1] == "n1")
    })?;
    let cells = browser.strings(&format!("return {cells}"))?;
    let p2a = nodes
        .cluster
        .lab
        .host("p2a")
        .addrs
        .ip(Family::V4)
        .to_string();
    ensure!(cells[3].starts_with("shop/p1a "), "{cells:?}");
    ensure!(
        cells[6].starts_with("shop/p2a ") && cells[6].contains(&p2a),
        "{cells:?}"
    );
    browser.accept("cluster-live")?;

    // Who calls what, over both nodes.
    let open = nodes.connect("p1a", web)?;
    browser.open(&page.url("#/map?namespace=default"))?;
    let cells = "[...document.querySelector('#ways tbody tr').children].slice(0, 4).map((cell) => cell.textContent)";
    browser.wait(&format!(
        "{cells}.join() === 'shop/p1a,default/web,shop/p2a,n2' && document.querySelectorAll('.map .box').length >= 4"
    ))?;
    browser.accept("cluster-map")?;
    drop(open);

    let place = "#/trace?from=pod/shop/p1a&to=default/web&port=80";
    browser.open(&page.url(place))?;
    browser.wait("document.getElementById('field-to')?.value === 'default/web'")?;
    browser.click("#trace .primary")?;
    browser.wait("document.getElementById('traced')?.dataset.verdict === 'forward'")?;
    browser.wait("document.getElementById('onward')?.dataset.verdict === 'pass'")?;
    let onward = browser.text("#onward")?;
    let way = "the route to ";
    ensure!(
        onward.starts_with("Then on n2: ") && onward.contains(&p2a) && onward.contains(way),
        "{onward}"
    );
    let text = browser.text("#traced")?;
    let command = "kubectl kpx trace --from pod/shop/p1a --to default/web:80";
    ensure!(
        text.contains("of n1") && text.contains(&p2a) && text.contains(command),
        "{text}"
    );
    browser.accept("cluster-trace")?;

    browser.open(&page.url("#/nodes"))?;
    browser.wait("document.querySelectorAll('#nodes tbody tr').length === 2 && [...document.querySelectorAll('#nodes .clock')].every((cell) => cell.textContent.includes('±'))")?;
    browser.accept("cluster-nodes")?;
    browser.open(&page.url("#/drops"))?;
    browser.wait("document.querySelector('#drops [data-reason=no_endpoints]')")?;
    // The page of a node has further views, and their links lead to the Services here.
    browser.open("about:blank")?;
    browser.open(&page.url("#/devices"))?;
    browser.wait("document.querySelector('nav [aria-current]')?.textContent === 'Services'")?;
    Ok(())
}
