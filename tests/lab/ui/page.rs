//! The page's contents, and its reactions to a reader.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::sys::signal::{Signal, kill};
use serde_json::json;
use testbed::agent::{Agent, DEADLINE, Object, Service, kpx, wait_until};
use testbed::echo::{Dial, Protocol};
use testbed::lab::Family;
use testbed::netns::NetNs;

use crate::ui::{Fixture, TARGET, address, url, web};
use testbed::browser::{Browser, key};

const NAMES: &str =
    "return [...document.querySelectorAll('#services td.name a')].map((link) => link.textContent)";

pub(crate) fn services_are_listed_filtered_and_sorted(fixture: &Fixture) -> Result<()> {
    let browser = Browser::start(fixture.ns(), &["--window-size=1280,900"], true)?;
    browser.open(&url(""))?;
    browser.wait("document.querySelectorAll('tr[data-service]').length === 3")?;
    ensure!(browser.text("h1")?.contains("n1") && browser.text("[data-health]")? == "healthy");
    ensure!(
        browser
            .text("[data-tile=backends]")?
            .contains("for 3 services")
    );
    let cells = browser.strings(
        "return [...document.querySelectorAll('[data-service=\"default/web\"] td')].map((cell) => cell.textContent)",
    )?;
    let web = web();
    for (cell, text) in [
        (0, "–"),
        (1, "default"),
        (2, "web"),
        (3, "NodePort"),
        (5, "80→30080/TCP"),
        (6, "3/3"),
    ] {
        ensure!(cells[cell].contains(text), "{text:?} is not in {cells:?}");
    }
    ensure!(cells[4].contains(&address(&web)), "{cells:?}");
    ensure!(browser.strings(NAMES)? == ["empty", "local", "web"]);

    browser.click("[data-sort=ready]")?;
    ensure!(
        browser.strings(NAMES)? == ["web", "local", "empty"],
        "{:?}",
        browser.strings(NAMES)?
    );
    ensure!(browser.eval("return document.querySelector('th.ready').ariaSort")? == "descending");
    browser.click("[data-sort=ready]")?;
    ensure!(browser.strings(NAMES)? == ["empty", "local", "web"]);
    ensure!(browser.eval("return document.querySelectorAll('[aria-sort]').length")? == 1);

    browser.press("/")?;
    browser.wait("document.activeElement.id === 'filter'")?;
    browser.press(&address(&web))?;
    browser.wait("document.querySelectorAll('tr[data-service]').length === 1")?;
    ensure!(browser.strings(NAMES)? == ["web"] && browser.text("#shown")? == "1 of 3 services");
    // An update does not disturb the input of a reader who is typing.
    browser.press(" nodeport")?;
    let shown = "document.querySelector('.who').textContent";
    let before = browser.eval(&format!("return {shown}"))?;
    browser.wait(&format!("{shown} !== {before}"))?;
    ensure!(
        browser.eval("return document.activeElement.value")?
            == format!("{} nodeport", address(&web))
    );
    browser.press(" nobody")?;
    browser.wait("document.querySelectorAll('tr[data-service]').length === 0")?;
    Ok(())
}

pub(crate) fn phone_has_services_in_upper_half(fixture: &Fixture) -> Result<()> {
    let browser = Browser::start(fixture.ns(), &[], true)?;
    browser.resize(400, 800)?;
    browser.open(&url(""))?;
    browser.wait("document.querySelectorAll('tr[data-service]').length === 3 && document.querySelector('[data-health=good]')")?;
    let top = "return document.querySelector('tr[data-service]').getBoundingClientRect().top";
    let top = browser.eval(top)?;
    ensure!(
        top.as_f64().is_some_and(|top| top > 0.0 && top < 400.0),
        "the first row begins at {top}"
    );
    fits_width(&browser)?;
    // The heading of the last column ends before the table's edge.
    let room = "const range = document.createRange(); range.selectNodeContents(document.querySelector('th.refused button').firstChild);
        return document.querySelector('#services').getBoundingClientRect().right - range.getBoundingClientRect().right";
    let room = browser.eval(room)?;
    ensure!(room.as_f64().is_some_and(|room| room >= 8.0), "{room}");
    for view in ["node", "live", "services"] {
        browser.open(&url(&format!("#/{view}")))?;
        browser.wait(&format!(
            "(([link, nav]) => link.left >= nav.left && link.right <= nav.right)(
                ['nav [href*=\"/{view}\"][aria-current]', 'nav'].map((selector) => document.querySelector(selector).getBoundingClientRect()))"
        ))?;
        fits_width(&browser)?;
    }
    // On a wide screen, the number of further ports has room.
    browser.resize(1400, 800)?;
    browser.wait("innerWidth === 1400 && document.querySelector('td.ports .more')")?;
    browser.wait("[...document.querySelectorAll('td .more')].every((more) => more.getBoundingClientRect().right <= more.closest('td').getBoundingClientRect().right)")
}

/// Checks that the reader need not scroll sideways.
fn fits_width(browser: &Browser) -> Result<()> {
    browser.wait("document.documentElement.scrollWidth <= innerWidth")
}

pub(crate) fn a_service_opens_with_its_backends_by_zone_and_node(fixture: &Fixture) -> Result<()> {
    let browser = Browser::start(fixture.ns(), &[], true)?;
    browser.open(&url(""))?;
    browser.wait("document.querySelectorAll('tr[data-service]').length === 3")?;
    // By keyboard alone: from the filter down the table and back.
    browser.press("/")?;
    browser.wait("document.activeElement.id === 'filter'")?;
    for name in ["empty", "local", "web"] {
        browser.press(key::DOWN)?;
        browser.wait(&format!("document.activeElement.textContent === {name:?}"))?;
    }
    browser.press(key::ENTER)?;
    browser.wait(
        "location.hash === '#/services/default/web' && document.querySelector('[data-zone]')",
    )?;
    let port = ".port[data-port='80']";
    let zones = browser.strings(&format!("return [...document.querySelector(\"{port}\").querySelectorAll('[data-zone]')].map((zone) => zone.dataset.zone + ' ' + zone.querySelector('[data-node]').dataset.node)"))?;
    ensure!(zones == ["zone-n1 n1", "zone-n2 n2"], "{zones:?}");
    let text = browser.text(port)?;
    let [p1a, p2a] = ["p1a", "p2a"].map(|name| {
        format!(
            "{}:{TARGET}",
            fixture.base.lab.host(name).addrs.ip(Family::V4)
        )
    });
    for text_wanted in [
        p1a.as_str(),
        &p2a,
        "this node",
        "takes flows",
        "3 of 3 ready",
        &format!("{}:80", address(&web())),
    ] {
        ensure!(
            text.contains(text_wanted),
            "{text_wanted:?} is not in {text}"
        );
    }

    fixture.put(&web().terminating(&["p2a"]))?;
    let state = format!("document.querySelector('[data-backend=\"{p2a}\"] .state').textContent");
    browser.wait(&format!("{state} === 'terminating, serving'"))?;
    ensure!(browser.text(".title")?.contains("2 of 3"));
    fixture.put(&web())?;
    browser.wait("document.querySelector('.title').textContent.includes('3 of 3')")?;
    browser.press(key::ESCAPE)?;
    browser.wait("document.querySelectorAll('tr[data-service]').length === 3")?;
    browser.open(&url("#/services/default/nobody"))?;
    browser.wait(
        "document.querySelector('.nothing')?.textContent.includes('no service default/nobody')",
    )?;
    Ok(())
}

pub(crate) fn rates_move_when_packets_flow(fixture: &Fixture) -> Result<()> {
    let browser = Browser::start(fixture.ns(), &[], true)?;
    browser.open(&url(""))?;
    let tile = |id: &str| format!("document.querySelector('[data-tile={id}] dd').textContent");
    let [connections, packets, drops] = ["connections", "packets", "drops"].map(tile);
    browser.wait(&format!(
        "[{connections}, {packets}, {drops}].every((rate) => rate === '0/s')"
    ))?;

    let client = &fixture.base.lab.host("p1b").ns;
    let dial = Dial::new(Protocol::Tcp, web().frontend(Family::V4));
    let refused = Dial::new(
        Protocol::Tcp,
        Service::new("empty", 13, &[], TARGET).frontend(Family::V4),
    );
    wait_until(DEADLINE, "the rates are shown", || {
        dial.exchange(client, b"hello")?;
        ensure!(refused.exchange(client, b"hello").is_err());
        let moved = format!(
            "return [{connections}, {packets}, {drops}].every((rate) => parseFloat(rate) > 0)"
        );
        Ok(browser.eval(&moved)? == true)
    })?;
    let row = |name: &str, id: &str| {
        format!("document.querySelector('[data-service=\"default/{name}\"] .{id}').textContent")
    };
    let opened = format!("parseFloat({}) > 0", row("web", "opened"));
    let dropped = format!("parseFloat({}) > 0", row("empty", "refused"));
    wait_until(DEADLINE, "the rates of services are shown", || {
        dial.exchange(client, b"hello")?;
        ensure!(refused.exchange(client, b"hello").is_err());
        Ok(browser.eval(&format!("return {opened} && {dropped}"))? == true)
    })?;
    // The rates fall to zero again.
    browser.wait(&format!("{} === '0'", row("web", "opened")))?;

    browser.open(&url("#/drops"))?;
    browser.wait(
        "document.querySelector('#drops [data-reason=no_endpoints]')?.textContent.includes('no endpoint that serves')",
    )?;
    ensure!(browser.text("#drops [data-reason=no_endpoints] .verdict")? == "reject");
    browser.open(&url("#/devices"))?;
    let roles = browser.strings("return [...document.querySelectorAll('[data-device]')].map((row) => row.dataset.device + ' ' + row.querySelector('.role').textContent)")?;
    ensure!(
        roles.contains(&"lo loopback".to_owned())
            && roles.iter().any(|role| role.ends_with(" pod")),
        "{roles:?}"
    );
    Ok(())
}

#[test]
fn page_shows_problems() -> Result<()> {
    let fixture = Fixture::build()?;
    let agent = fixture.serve()?;
    let browser = Browser::start(fixture.ns(), &[], true)?;
    browser.open(&url(""))?;
    browser.wait("document.querySelector('[data-health=good]')")?;
    ensure!(browser.text("#notices")?.is_empty());

    // kpx cannot serve a health check at an occupied port.
    let taken = fixture
        .ns()
        .run(|| std::net::TcpListener::bind(("0.0.0.0", 0)))?;
    let number = taken.local_addr()?.port();
    let checked = Service::new("checked", 14, &["p1a"], TARGET).external_local();
    let checked = checked
        .load_balancer(fixture.base.lab.x.addrs, "VIP")
        .health_check_node_port(number);
    fixture.put(
        &checked
            .clone()
            .annotation("kpx.dev/lb-algorithm", "fastest"),
    )?;
    browser.wait("document.querySelector('[data-health=bad]')?.textContent === 'unhealthy'")?;
    ensure!(
        browser.text("#notices")?.contains(&number.to_string()),
        "{}",
        browser.text("#notices")?
    );
    ensure!(
        browser
            .eval("return document.title")?
            .as_str()
            .is_some_and(|title| title.starts_with('⚠'))
    );
    browser.open(&url("#/node"))?;
    browser.wait("document.querySelector('#skipped')?.textContent.includes('fastest')")?;

    drop(taken);
    fixture.put(&checked)?;
    browser.wait(
        "document.querySelector('[data-health=good]') && !document.querySelector('#skipped')",
    )?;
    options_have_words_of_status(&browser, fixture.ns(), &agent)?;
    hanging_agent_is_noticed(&browser, &agent)?;
    agent.stop()?;
    browser.wait("document.querySelector('[data-health=unknown]')")?;
    ensure!(browser.text("#notices")?.contains("does not answer"));
    let _agent = fixture.serve()?;
    browser.wait("document.querySelector('[data-health=good]')")
}

/// Compares the node's options on the page with the lines of `kpx status`.
fn options_have_words_of_status(browser: &Browser, ns: &NetNs, agent: &Agent) -> Result<()> {
    let output = kpx(
        ns,
        &format!("status --run-dir {}", agent.run_dir().display()),
    )?;
    let text = String::from_utf8(output.stdout)?;
    let rows = text
        .lines()
        .skip_while(|line| !line.starts_with("Options:"));
    let rows = rows
        .skip(1)
        .take_while(|line| line.starts_with("  ") || line.starts_with("Restarts:"));
    let expected = rows
        .filter_map(|row| row.split_once(':'))
        .map(|(name, value)| format!("{}: {}", name.trim().to_lowercase(), value.trim()))
        .collect::<Vec<_>>();
    ensure!(
        ["node ports: ", "fast path: ", "socket lb: ", "restarts: "]
            .iter()
            .all(|name| expected.iter().any(|row| row.starts_with(name))),
        "{text}"
    );
    browser.wait("document.querySelector('#options dd')")?;
    let shown = "return [...document.querySelectorAll('#options .facts > div')].map((fact) =>
        [...fact.children].map((part) => part.textContent).join(': ').replace(/^[^:]*/, (name) => name.toLowerCase()))";
    let shown = browser.strings(shown)?;
    ensure!(shown == expected, "{shown:#?} instead of {expected:#?}");
    Ok(())
}

/// Stops the agent's process for a while: the kernel still accepts the page's connections.
fn hanging_agent_is_noticed(browser: &Browser, agent: &Agent) -> Result<()> {
    kill(agent.pid(), Signal::SIGSTOP)?;
    let stopped = Instant::now();
    browser.wait("document.querySelector('[data-health=unknown]')")?;
    // The page waits 4 s for a status, and 15 s for other answers.
    ensure!(
        stopped.elapsed() < Duration::from_secs(10),
        "noticed after {:?}",
        stopped.elapsed()
    );
    ensure!(browser.text("#notices")?.contains("does not answer"));
    kill(agent.pid(), Signal::SIGCONT)?;
    browser.wait("document.querySelector('[data-health=good]')")
}

#[test]
fn failing_services_lead_at_first_paint() -> Result<()> {
    // More Services than the page shows before all have come.
    const NUMBER: u8 = 250;
    let fixture = Fixture::build()?;
    for n in 0..NUMBER {
        fixture.base.cluster.put(&idle(n))?;
    }
    let down = Service::new("down", 17, &["p1a"], TARGET)
        .in_namespace("zzz")
        .terminating(&["p1a"]);
    let zero = Service::new("zero", 15, &[], TARGET).in_namespace("zzz");
    fixture.put(&down)?;
    fixture.put(&zero)?;
    let agent = fixture.serve()?;
    let browser = Browser::start(fixture.ns(), &["--window-size=1280,900"], true)?;
    browser.open(&url(""))?;
    let client = &fixture.base.lab.host("p1b").ns;
    let refused = Dial::new(Protocol::Tcp, zero.frontend(Family::V4));
    let line = "return fetch('api/rows').then((rows) => rows.text()).then((text) =>
        text.split('\\n').some((line) => line.includes('\"zero\"') && /\"unserved\":[^0]/.test(line)))";
    wait_until(DEADLINE, "the agent counts the refusals", || {
        ensure!(refused.exchange(client, b"hello").is_err());
        Ok(browser.eval(line)? == true)
    })?;
    // Like a Service without a series, as there are many in a large cluster.
    browser.begin_with("const get = fetch; window.fetch = (path, ...rest) =>
            path === 'api/history' ? Promise.resolve(new Response('', { status: 404 })) : get(path, ...rest);
        new MutationObserver(() => {
            const rows = [...document.querySelectorAll('tr[data-service]')].map((row) => row.dataset.service);
            if (rows.length > 0) window.painted ??= rows;
        }).observe(document, { childList: true, subtree: true })")?;
    browser.open("about:blank")?;
    browser.open(&url(""))?;
    browser.wait("painted.length > 2")?;
    let painted = browser.strings("return painted.slice(0, 3)")?;
    ensure!(
        painted == ["zzz/zero", "zzz/down", "default/empty"],
        "{painted:?}"
    );
    let number = format!("{} services", usize::from(NUMBER) + 5);
    browser.wait(&format!(
        "document.getElementById('shown').textContent === {number:?}"
    ))?;
    ensure!(browser.strings(NAMES)?[..3] == ["zero", "down", "empty"]);
    agent.stop()
}

/// Returns a Service without endpoints and clients.
fn idle(n: u8) -> Object {
    Object(json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": format!("s{n:05}"), "namespace": "idle" },
        "spec": { "clusterIP": format!("10.97.0.{}", 1 + n), "ports": [{ "port": 80 }] },
    }))
}

#[test]
fn page_of_a_thousand_services_has_elements_for_the_rows_in_sight() -> Result<()> {
    const NUMBER: u32 = 1_000;
    let fixture = Fixture::build()?;
    for n in 0..NUMBER {
        let ip = format!("10.97.{}.{}", n / 250, 1 + n % 250);
        let metadata =
            json!({ "name": format!("s{n:05}"), "namespace": format!("many-{:03}", n / 20) });
        fixture.base.cluster.put(&Object(json!({
            "apiVersion": "v1", "kind": "Service", "metadata": metadata,
            "spec": { "clusterIP": ip, "ports": [{ "port": 80 }] },
        })))?;
    }
    let agent = fixture.serve()?;
    let browser = Browser::start(fixture.ns(), &["--window-size=1280,900"], true)?;
    browser.open(&url(""))?;
    browser.wait(&format!(
        "document.querySelector('#shown')?.textContent.replace(',', '') === '{} services'",
        NUMBER + 3
    ))?;
    has_few_rows(&browser)?;
    browser.eval("scrollTo(0, document.body.scrollHeight)")?;
    browser.wait(&format!(
        "[...document.querySelectorAll('td.name a')].at(-1).textContent === 's{:05}'",
        NUMBER - 1
    ))?;
    has_few_rows(&browser)?;
    ensure!(
        browser.eval("return document.querySelector('#services').ariaRowCount")?
            == (NUMBER + 4).to_string()
    );
    browser.press("/")?;
    browser.wait("document.activeElement.id === 'filter'")?;
    browser.press("s00999")?;
    browser.wait("document.querySelectorAll('tr[data-service]').length === 1")?;
    browser.press(&key::BACKSPACE.repeat(6))?;
    focus_stays_with_its_row(&browser)?;
    agent.stop()
}

fn has_few_rows(browser: &Browser) -> Result<()> {
    browser.wait(
        "(rows => rows >= 10 && rows < 60)(document.querySelectorAll('tr[data-service]').length)",
    )
}

/// Scrolls past a focused link: the page reuses row elements, but the focused row keeps its
/// element.
fn focus_stays_with_its_row(browser: &Browser) -> Result<()> {
    browser.eval("scrollTo(0, 4400)")?;
    let row = "[...document.querySelectorAll('tr[data-service]')].find((row) => row.getBoundingClientRect().top > 600)";
    browser.wait(row)?;
    let name = browser.eval(&format!(
        "const link = {row}.querySelector('a'); link.focus(); return link.textContent"
    ))?;
    browser.eval("scrollBy(0, 400); return new Promise((done) => setTimeout(done, 200))")?;
    ensure!(
        browser.eval("return document.activeElement.textContent")? == name,
        "the focus left {name}"
    );
    browser.eval("scrollBy(0, 40000)")?;
    browser.wait("document.activeElement === document.body")
}
