//! From kube-proxy to kpx and back: connections of either proxy go on, and the active proxy serves
//! new ones.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use testbed::agent::{Service, binary, wait_until};
use testbed::echo::{Connection, Dial, Protocol};
use testbed::lab::Family;

use crate::churn::fixture::{Fixture, PORT, PROMPT, TRY};
use crate::churn::kube_proxy::{BACKENDS, Mode};

/// A pod, the node itself, and an outside client, which dials a node port.
const CLIENTS: [&str; 3] = ["p1a", "n1", "x"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proxy {
    KubeProxy,
    Kpx,
}
use Proxy::{Kpx, KubeProxy};

#[test]
fn connections_of_kube_proxy_go_on_and_new_ones_go_through_kpx() -> Result<()> {
    for mode in Mode::ALL {
        // Without the CNI's rules, only kube-proxy's rules need NAT.
        for cni in [true, false] {
            let fixture = Fixture::new()?;
            if !cni {
                fixture.node().nft("delete table inet cni\n")?;
            }
            let what = format!(
                "{mode:?}, {} CNI's rules",
                if cni { "with" } else { "without" }
            );
            forward(&fixture, mode).context(what)?;
        }
    }
    Ok(())
}

fn forward(fixture: &Fixture, mode: Mode) -> Result<()> {
    mode.install(fixture)?;
    let mut kept = Kept::open(fixture, KubeProxy)?;
    let kpx = fixture.kpx("tcx")?;
    kept.go_on().context("both are there")?;
    served_by(fixture, &CLIENTS, Kpx).context("both are there")?;

    let said = cleanup(fixture, "--kube-proxy")?;
    ensure!(
        said.contains("removed") && said.contains("kpx-keep"),
        "{said}"
    );
    ensure!(
        !said.contains("kpx0"),
        "a kpx that runs keeps what it has: {said}"
    );
    kept.go_on().context("kpx alone")?;
    served_by(fixture, &CLIENTS, Kpx).context("kpx alone")?;
    kpx.stop()?;
    kept.go_on().context("without an agent")?;
    let said = cleanup(fixture, "")?;
    ensure!(
        said.contains("kpx-keep") && said.contains("kpx0"),
        "all goes in the end: {said}"
    );
    ensure!(cleanup(fixture, "")? == "nothing to remove\n");
    Ok(())
}

/// The rules of a stopped kube-proxy stay, and refuse packets from its node.
#[test]
fn kpx_reports_kube_proxy_rules_that_refuse() -> Result<()> {
    let fixture = Fixture::new()?;
    Mode::Nftables.install(&fixture)?;
    let kpx = fixture.kpx("tcx")?;
    let is_reported = || -> Result<bool> {
        Ok(kpx
            .typed_status()?
            .notices
            .iter()
            .any(|notice| notice.contains("kube-proxy's nftables rules")))
    };
    wait_until(PROMPT, "kpx reports the rules", is_reported)?;
    let newer = Service::new("newer", 20, &["p1b"], PORT);
    fixture.base.put(&newer)?;
    let reaches = |client: &str| {
        let dial = Dial::new(Protocol::Udp, newer.frontend(Family::V4)).deadline(TRY);
        Ok(dial
            .exchange(&fixture.lab.host(client).ns, b"hello")
            .is_ok())
    };
    wait_until(PROMPT, "a pod reaches the newer Service", || reaches("p1a"))?;
    ensure!(!reaches("n1")?, "the node reaches it in spite of the rules");
    cleanup(&fixture, "--kube-proxy")?;
    wait_until(PROMPT, "the node reaches it", || reaches("n1"))?;
    wait_until(PROMPT, "kpx no longer reports the rules", || {
        Ok(!is_reported()?)
    })?;
    kpx.stop()
}

#[test]
fn connections_of_kpx_go_on_and_new_ones_go_through_kube_proxy() -> Result<()> {
    for mode in Mode::ALL {
        backward(&Fixture::new()?, mode).with_context(|| format!("{mode:?}"))?;
    }
    Ok(())
}

fn backward(fixture: &Fixture, mode: Mode) -> Result<()> {
    let kpx = fixture.kpx("tcx")?;
    let mut kept = Kept::open(fixture, Kpx)?;
    mode.install(fixture)?;
    kept.go_on().context("both are there")?;
    served_by(fixture, &["p1a", "x"], Kpx).context("both are there")?;
    kpx.stop()?;
    served_by(fixture, &["p1a", "x"], Kpx).context("without an agent")?;

    let mut drain = Drain::start(fixture, "5m")?;
    let line = drain.line()?;
    ensure!(line.starts_with("draining: "), "{line}");
    wait_until(PROMPT, "kube-proxy serves", || {
        Ok(served_by(fixture, &CLIENTS, KubeProxy).is_ok())
    })?;
    for _ in 0..5 {
        served_by(fixture, &CLIENTS, KubeProxy).context("draining")?;
        kept.go_on().context("draining")?;
    }
    ensure!(
        drain.child.try_wait()?.is_none(),
        "it does not wait for what is open"
    );
    kept.end()?;
    drain.ended()?;
    let links = fixture
        .node()
        .exec(Command::new("ip").args(["-brief", "link"]))?;
    ensure!(
        !links.contains("kpx") && !fixture.node().bpf_dir().exists(),
        "kpx has left something: {links}"
    );
    served_by(fixture, &CLIENTS, KubeProxy).context("kube-proxy alone")
}

/// The next proxy connects a client to a backend from a source port that kpx has used for them.
#[test]
fn ports_of_ended_connections_are_free_for_the_next_proxy() -> Result<()> {
    let fixture = Fixture::new()?;
    let one = Service::new("one", 21, &["p1b"], PORT);
    fixture.base.put(&one)?;
    let kpx = fixture.kpx("tcx")?;
    let kept = Kept::open(&fixture, Kpx)?;
    let client = &fixture.lab.host("p1a").ns;
    // One connection ends by FINs, the other by an RST.
    let ports = [40_001, 40_002];
    for family in Family::ALL {
        let dial = |port| Dial::new(Protocol::Tcp, one.frontend(family)).source_port(port);
        dial(ports[0]).connect(client)?.exchange_last(b"bye")?;
        let mut reset = dial(ports[1]).connect(client)?;
        reset.exchange(b"bye")?;
        reset.reset()?;
    }
    kpx.stop()?;
    let mut drain = Drain::start(&fixture, "5m")?;
    drain.line()?;
    for family in Family::ALL {
        let pod = (fixture.lab.host("p1b").addrs.ip(family), PORT).into();
        for port in ports {
            let dial = Dial::new(Protocol::Tcp, pod).source_port(port);
            dial.exchange(client, b"again")
                .with_context(|| format!("from {port} by {family}"))?;
        }
    }
    ensure!(
        drain.child.try_wait()?.is_none(),
        "the programs are gone already"
    );
    kept.end()?;
    drain.ended()
}

#[test]
fn a_drain_ends_with_its_time_and_with_the_next_kpx() -> Result<()> {
    let fixture = Fixture::new()?;
    let kpx = fixture.kpx("clsact")?;
    let refused = cleanup(&fixture, "--drain")
        .err()
        .context("a kpx that runs would go on serving")?;
    ensure!(
        format!("{refused:#}").contains("another kpx is running"),
        "{refused:#}"
    );
    let mut kept = Kept::open(&fixture, Kpx)?;
    kpx.stop()?;
    let mut drain = Drain::start(&fixture, "5m")?;
    drain.line()?;
    ensure!(!fixture.serves(&["p1a"]), "no other proxy serves");
    let refused = cleanup(&fixture, "--drain")
        .err()
        .context("a drain keeps every kpx away, and every other drain")?;
    ensure!(
        format!("{refused:#}").contains("another kpx is running"),
        "{refused:#}"
    );
    // An operator changes their mind: ends the drain, and starts kpx again.
    drain.child.kill()?;
    drain.child.wait()?;
    let kpx = fixture.kpx("clsact")?;
    served_by(&fixture, &CLIENTS, Kpx).context("in service again")?;
    kept.go_on()?;
    kpx.stop()?;

    let said = cleanup(&fixture, "--drain --timeout 1s")?;
    ensure!(said.contains("removed the devices kpx0 and kpx1"), "{said}");
    Ok(())
}

/// Connections that stay open.
struct Kept(Vec<(String, Connection)>);

impl Kept {
    fn open(fixture: &Fixture, by: Proxy) -> Result<Self> {
        let mut kept = Vec::new();
        for client in CLIENTS {
            for family in Family::ALL {
                let mut connection = fixture.connect(client, family)?;
                let backend = connection.exchange(b"who?")?.backend;
                ensure!(
                    proxy(&backend) == by,
                    "{client} by {family} is served by {backend}"
                );
                kept.push((format!("{client} by {family}"), connection));
            }
        }
        Ok(Self(kept))
    }

    fn go_on(&mut self) -> Result<()> {
        for (what, connection) in &mut self.0 {
            connection
                .exchange(&[7; 10_000])
                .with_context(|| what.clone())?;
        }
        Ok(())
    }

    fn end(self) -> Result<()> {
        for (what, connection) in self.0 {
            connection.exchange_last(b"bye").context(what)?;
        }
        Ok(())
    }
}

/// Checks new connections, by both families.
fn served_by(fixture: &Fixture, clients: &[&str], by: Proxy) -> Result<()> {
    for client in clients {
        for family in Family::ALL {
            let backend = fixture.ask(client, family)?.backend;
            ensure!(
                proxy(&backend) == by,
                "{client} by {family} is served by {backend}"
            );
        }
    }
    Ok(())
}

fn proxy(backend: &str) -> Proxy {
    if BACKENDS.contains(&backend) {
        KubeProxy
    } else {
        Kpx
    }
}

fn command(fixture: &Fixture, arguments: &str) -> Result<Command> {
    let mut command = Command::new(binary()?);
    command
        .arg("cleanup")
        .arg("--run-dir")
        .arg(fixture.lab.dir().join("n1-run"))
        .arg("--bpf-dir")
        .arg(fixture.node().bpf_dir());
    command.args(arguments.split_whitespace());
    Ok(command)
}

fn cleanup(fixture: &Fixture, arguments: &str) -> Result<String> {
    fixture.node().exec(&mut command(fixture, arguments)?)
}

/// A running `kpx cleanup --drain`.
struct Drain {
    child: Child,
    said: BufReader<std::process::ChildStderr>,
}

impl Drain {
    fn start(fixture: &Fixture, timeout: &str) -> Result<Self> {
        let mut command = command(fixture, &format!("--drain --timeout {timeout}"))?;
        let mut child = fixture
            .node()
            .spawn(command.stdout(Stdio::null()).stderr(Stdio::piped()))?;
        let said = BufReader::new(child.stderr.take().context("no standard error")?);
        Ok(Self { child, said })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.said.read_line(&mut line)?;
        Ok(line)
    }

    fn ended(mut self) -> Result<()> {
        let mut ended = None;
        wait_until(PROMPT, "the drain ends", || {
            ended = self.child.try_wait()?;
            Ok(ended.is_some())
        })?;
        let status = ended.context("it has ended")?;
        ensure!(status.success(), "{status}");
        Ok(())
    }
}

impl Drop for Drain {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ended = self.child.kill().and_then(|()| self.child.wait().map(drop));
    }
}
