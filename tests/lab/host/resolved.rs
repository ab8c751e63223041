//! A real systemd-resolved on a host outside of the cluster queries kpx for the cluster's names,
//! and another server for all other names.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, Service, wait_until};
use testbed::lab::{Family, Host, Layout};

use crate::host::fixture::{Fixture, PORT};
use crate::host::names::{headless, lookup_at};

const STUB: &str = "127.0.0.53";
const UPSTREAM: &str = "127.0.0.77";
const BUS: &str = "unix:path=/run/systemd/bus";

/// Runs a bus and systemd-resolved, then the program that follows.
///
/// They have their own PID namespace and /run/systemd, where systemd-resolved finds the server for
/// all names that no device claims: /etc/resolv.conf may link there. The user of systemd-resolved
/// need not exist on the machine of the test.
const SCRIPT: &str = "set -e
mkdir -p /run/systemd
mount -t tmpfs tmpfs /run/systemd
mkdir /run/systemd/resolved.conf.d
cp \"$FILES/upstream.conf\" /run/systemd/resolved.conf.d
for file in passwd group; do mount --bind \"$FILES/$file\" /etc/$file; done
dbus-daemon --config-file=\"$FILES/bus.conf\" --nofork --nopidfile &
\"$TOOLS/lib/systemd/systemd-resolved\" &
until resolvectl dns >/dev/null 2>&1; do sleep 0.02; done
exec \"$@\"";

const BUS_CONF: &str = "<!DOCTYPE busconfig PUBLIC \"-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN\"
 \"http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd\">
<busconfig><type>system</type><listen>unix:path=/run/systemd/bus</listen><auth>EXTERNAL</auth>
<policy context=\"default\"><allow user=\"*\"/><allow own=\"*\"/><allow send_destination=\"*\"/><allow receive_sender=\"*\"/>
<allow send_type=\"method_call\"/></policy></busconfig>";

/// Returns the folder of the unpacked Debian package, from `cargo xtask setup`.
fn tools() -> Result<PathBuf> {
    let own = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../target/tools/systemd-resolved"
    );
    let folder = std::env::var_os("RESOLVED").map_or_else(|| own.into(), PathBuf::from);
    folder
        .canonicalize()
        .with_context(|| format!("no {}: `cargo xtask setup` makes it", folder.display()))
}

/// An empty name server, which records its queries.
struct Upstream(Arc<Mutex<Vec<String>>>);

impl Upstream {
    fn start(host: &Host) -> Result<Self> {
        let socket = host.ns.run(|| UdpSocket::bind((UPSTREAM, 53)))?;
        socket.set_read_timeout(Some(Duration::from_millis(100)))?;
        let asked = Arc::new(Mutex::new(Vec::new()));
        let weak = Arc::downgrade(&asked);
        host.ns
            .thread("upstream", move || answer_all(&socket, &weak))?;
        Ok(Self(asked))
    }

    fn asked(&self) -> Vec<String> {
        self.0.lock().expect("no thread panics").clone()
    }
}

fn answer_all(socket: &UdpSocket, asked: &Weak<Mutex<Vec<String>>>) {
    const NO_SUCH_NAME: u8 = 3;
    let mut packet = [0; 1500];
    while let Some(asked) = asked.upgrade() {
        match socket.recv_from(&mut packet) {
            Ok((length, client)) if length > 12 => {
                asked
                    .lock()
                    .expect("no thread panics")
                    .push(name(&packet[12..length]));
                packet[2] |= 0x80;
                packet[3] = 0x80 | NO_SUCH_NAME;
                let _ = socket.send_to(&packet[..length], client);
            }
            Ok(_) => {}
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) => {}
            Err(_) => return,
        }
    }
}

/// Returns the name at the start of a DNS question.
fn name(mut question: &[u8]) -> String {
    let mut labels = Vec::new();
    while let [length @ 1..=63, rest @ ..] = question {
        let Some((label, rest)) = rest.split_at_checked(usize::from(*length)) else {
            break;
        };
        labels.push(String::from_utf8_lossy(label).to_lowercase());
        question = rest;
    }
    labels.join(".")
}

fn start<'a>(fixture: &'a Fixture, host: &'a Host, tools: &Path) -> Result<Agent<'a>> {
    let files = fixture.lab.dir().join("resolved");
    fs::create_dir(&files)?;
    let user = |file: &str, line: &str| {
        let text = fs::read_to_string(format!("/etc/{file}"))?;
        let own = if text.contains("systemd-resolve:") {
            ""
        } else {
            line
        };
        fs::write(files.join(file), format!("{text}{own}\n")).with_context(|| file.to_owned())
    };
    user(
        "passwd",
        "systemd-resolve:x:64901:64901::/:/usr/sbin/nologin",
    )?;
    user("group", "systemd-resolve:x:64901:")?;
    fs::write(
        files.join("upstream.conf"),
        format!("[Resolve]\nDNS={UPSTREAM}\n"),
    )?;
    fs::write(files.join("bus.conf"), BUS_CONF)?;
    let path = format!(
        "{}:{}",
        tools.join("usr/bin").display(),
        std::env::var("PATH")?
    );
    let mut by = Command::new("unshare");
    by.args([
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        SCRIPT,
        "sh",
    ]);
    by.env("PATH", path)
        .env("DBUS_SYSTEM_BUS_ADDRESS", BUS)
        .env("FILES", &files)
        .env("TOOLS", tools);
    Agent::launch_by(
        Some(by),
        &fixture.lab,
        host,
        fixture.cluster.source(),
        &["--mode", "host"],
    )?
    .having("complete")
}

#[test]
fn systemd_resolved_sends_kpx_only_cluster_names() -> Result<()> {
    let tools = tools()?;
    let fixture = Fixture::start(Layout::Routed)?;
    let c = &fixture.lab.xl;
    let web = Service::new("web", 10, &["p1b"], PORT);
    fixture.put(&web)?;
    let pod: IpAddr = fixture.lab.host("p1b").addrs.v4.into();
    headless("db", "db-0", pod)
        .iter()
        .try_for_each(|object| fixture.cluster.put(object))?;
    let upstream = Upstream::start(c)?;
    let kpx = start(&fixture, c, &tools)?;
    wait_until(DEADLINE, "systemd-resolved has the name server", || {
        Ok(kpx.status()?["names"]["askedByResolved"] == true)
    })
    .with_context(|| kpx.log())?;

    let both = Family::ALL.map(|family| web.frontend(family).ip());
    for (name, addresses) in [
        ("web.default.svc.cluster.local", both.as_slice()),
        ("db.default.svc.cluster.local", &[pod]),
        ("db-0.db.default.svc.cluster.local", &[pod]),
        ("ns.dns.cluster.local", &[[127, 0, 0, 153].into()]),
        ("nothing.default.svc.cluster.local", &[]),
        ("example.com", &[]),
    ] {
        let mut wanted = addresses.to_vec();
        wanted.sort();
        let mut last = Vec::new();
        wait_until(DEADLINE, &format!("{name} leads to {wanted:?}"), || {
            last = lookup_at(&fixture, c, STUB, name)?;
            Ok(last == wanted)
        })
        .with_context(|| format!("it leads to {last:?}"))?;
    }
    let asked = upstream.asked();
    ensure!(
        asked.iter().any(|name| name == "example.com"),
        "the other server was asked for {asked:?}"
    );
    ensure!(
        !asked.iter().any(|name| name.ends_with("cluster.local")),
        "the other server was asked for {asked:?}"
    );

    let resolvectl = |arguments: &[&str]| {
        let mut command = Command::new("nsenter");
        command
            .args(["--mount", "--target", &kpx.pid().to_string()])
            .arg(tools.join("usr/bin/resolvectl"));
        c.ns.exec(command.args(arguments).env("DBUS_SYSTEM_BUS_ADDRESS", BUS))
    };
    for (kind, name, wanted) in [
        ("NS", "cluster.local", "ns.dns.cluster.local"),
        (
            "SRV",
            "_sql._tcp.db.default.svc.cluster.local",
            "5432 db-0.db.default.svc.cluster.local",
        ),
    ] {
        let said = resolvectl(&["query", &format!("--type={kind}"), name])?;
        ensure!(said.contains(wanted), "{kind} of {name}: {said}");
    }
    let servers = resolvectl(&["dns", "kpx1"])?;
    let domains = resolvectl(&["domain", "kpx1"])?;
    ensure!(
        servers.contains("127.0.0.153") && domains.contains("~cluster.local"),
        "{servers}{domains}"
    );
    Ok(())
}
