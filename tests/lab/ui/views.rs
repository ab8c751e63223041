//! The views that answer "what is wrong, and why": problems, live packets, map and trace; and their
//! accessibility.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed::agent::{DEADLINE, Service, wait_until};
use testbed::echo::{Dial, Protocol};
use testbed::lab::Family;

use crate::ui::{Fixture, TARGET, address, url, web};
use testbed::browser::{Browser, key, pictures};

/// The time of traffic in the charts of pictures.
const PICTURED: Duration = Duration::from_secs(100);

/// The traffic of a view under test: p1b reaches `web`, and `zero` refuses it.
struct Clients<'a> {
    fixture: &'a Fixture,
    dial: Dial,
    refused: Dial,
}

impl<'a> Clients<'a> {
    fn of(fixture: &'a Fixture) -> Self {
        let dial = |service: &Service| Dial::new(Protocol::Tcp, service.frontend(Family::V4));
        Self {
            fixture,
            dial: dial(&web()),
            refused: dial(&zero()),
        }
    }

    /// Dials for this time, several times a second.
    fn keep_dialling(&self, time: Duration) -> Result<()> {
        let client = &self.fixture.base.lab.host("p1b").ns;
        let started = Instant::now();
        wait_until(time + DEADLINE, "pictures have a past", || {
            self.dial.exchange(client, b"hello")?;
            ensure!(self.refused.exchange(client, b"hello").is_err());
            Ok(started.elapsed() > time)
        })
    }

    /// Dials until an expression is true.
    fn until(&self, browser: &Browser, expression: &str) -> Result<()> {
        let body = format!("try {{ return Boolean({expression}) }} catch {{ return false }}");
        let client = &self.fixture.base.lab.host("p1b").ns;
        wait_until(DEADLINE, expression, || {
            self.dial.exchange(client, b"hello")?;
            ensure!(self.refused.exchange(client, b"hello").is_err());
            Ok(browser.eval(&body)? == true)
        })
        .with_context(|| {
            format!(
                "the page shows: {}",
                browser.text("body").unwrap_or_default()
            )
        })
    }
}

/// Returns a Service without endpoints, which is last by name.
fn zero() -> Service {
    Service::new("zero", 15, &[], TARGET)
}

pub(crate) fn page_leads_from_problem_to_reason(fixture: &Fixture) -> Result<()> {
    fixture.put(&zero())?;
    let clients = Clients::of(fixture);
    let browser = Browser::start(fixture.ns(), &["--window-size=1440,1000"], true)?;
    browser.open(&url(""))?;
    browser.wait("document.querySelectorAll('tr[data-service]').length === 4")?;
    // A Service without endpoints becomes a problem with its first client, and then comes first.
    let problem = "document.querySelector('[data-service=\"default/zero\"] .problem').textContent";
    ensure!(browser.eval(&format!("return {problem}"))? == "–");
    clients.until(&browser, &format!("{problem}.endsWith('/s not served')"))?;
    let first = "document.querySelector('tr[data-service]').dataset.service";
    browser.wait(&format!(
        "{first} === 'default/zero' && document.querySelector('[data-only=refusing] b').textContent === '1'"
    ))?;
    if pictures().is_some() {
        clients.keep_dialling(PICTURED)?;
    }
    browser.accept("services")?;

    live(&browser, &clients)?;
    map(&browser, &clients)?;
    trace(&browser, fixture)?;
    failing_backend(&browser, fixture)?;
    for place in ["#/services/default/web", "#/drops", "#/devices", "#/node"] {
        browser.open("about:blank")?;
        browser.open(&url(place))?;
        browser
            .wait("document.querySelector('#view h2') && document.querySelector('.tile dd').textContent !== '–/s'")?;
        browser.accept(place.rsplit('/').next().unwrap_or_default())?;
    }
    fixture.base.delete(&zero())
}

/// Checks that the page of a Service shows, at a backend, the connections that the backend refuses,
/// and that a trace warns of them.
fn failing_backend(browser: &Browser, fixture: &Fixture) -> Result<()> {
    let closed = Service::new("closed", 16, &["p1a"], TARGET + 1);
    fixture.put(&closed)?;
    let dial = Dial::new(Protocol::Tcp, closed.frontend(Family::V4));
    let client = &fixture.base.lab.host("p1b").ns;
    for _ in 0..3 {
        ensure!(dial.exchange(client, b"hello").is_err());
    }
    browser.open("about:blank")?;
    browser.open(&url("#/services/default/closed"))?;
    browser.wait("[...document.querySelectorAll('.backend .why')].some((why) => why.textContent.endsWith('3 refused'))")?;
    browser.accept("failing")?;
    let from = fixture.base.lab.host("p1b").addrs.ip(Family::V4);
    browser.open(&url(&format!(
        "#/trace?from={from}&to=default/closed&port=80"
    )))?;
    browser.wait("document.getElementById('field-to').value === 'default/closed'")?;
    browser.click("#trace .primary")?;
    browser.wait("[...document.querySelectorAll('#traced .why')].some((note) => note.textContent.includes('were reset and none was answered'))")?;
    browser.accept("warned")?;
    fixture.base.delete(&closed)
}

/// Checks that the page shows refused packets live, and explains their reason.
fn live(browser: &Browser, clients: &Clients) -> Result<()> {
    // A link of the previous release has the old name of `spoofed`.
    browser.open(&url("#/live?reason=forged"))?;
    browser.wait("document.getElementById('field-reason').value === 'spoofed' && document.getElementById('heard').textContent.startsWith('0 packets')")?;
    browser.open(&url("#/live?kind=unserved"))?;
    clients.until(
        browser,
        "document.querySelectorAll('[data-event=reject]').length > 2",
    )?;
    let shown = browser.strings(
        "return [...document.querySelectorAll('[data-event]')].map((row) => row.dataset.event)",
    )?;
    ensure!(
        shown.iter().all(|event| event == "reject"),
        "only the unserved: {shown:?}"
    );
    let row = browser.text("[data-event=reject]")?;
    let client = clients
        .fixture
        .base
        .lab
        .host("p1b")
        .addrs
        .ip(Family::V4)
        .to_string();
    for wanted in [
        client.as_str(),
        &format!("{}:80", address(&zero())),
        "default/zero",
        "no_endpoints",
    ] {
        ensure!(row.contains(wanted), "{wanted:?} is not in {row}");
    }
    browser.click("#pause")?;
    browser.open(&url("#/live"))?;
    clients.until(
        browser,
        "document.querySelector('[data-event=decision]') && document.querySelector('[data-event=reject]')",
    )?;
    browser.accept("live")?;
    browser.click("[data-event=reject] a[href*=drops]")?;
    browser.wait(
        "location.hash === '#/drops/no_endpoints' && document.querySelector('#explanation')",
    )?;
    let text = browser.text("#explanation")?;
    for wanted in [
        "no endpoint that serves",
        "What to do",
        "kpx explain no_endpoints",
    ] {
        ensure!(text.contains(wanted), "{wanted:?} is not in {text}");
    }
    browser.accept("reason")
}

/// Checks that the map shows clients, their Services, and the answering backends.
fn map(browser: &Browser, clients: &Clients) -> Result<()> {
    // The busiest namespace is not the first by name.
    let quiet = Service::new("quiet", 18, &[], TARGET).in_namespace("a-quiet");
    clients.fixture.put(&quiet)?;
    browser.open(&url("#/services"))?;
    browser.wait("document.querySelector('[data-service=\"a-quiet/quiet\"]')")?;
    browser.open(&url("#/map"))?;
    browser.wait("document.getElementById('field-namespace').value === 'default'")?;
    // The page shows addresses at first, and names once the agent has them.
    let way = |service: &str, backend: &str| {
        format!(
            "document.querySelector('[data-way=\"default/p1b → default/{service} → {backend}\"]')"
        )
    };
    let served = way("web", "default/p1a");
    let refused = way("zero", "not served");
    clients.until(
        browser,
        &format!("parseFloat({served}.cells[3].textContent) > 0 && parseFloat({refused}.cells[4].textContent) > 0"),
    )?;
    ensure!(
        browser
            .eval(&format!("return {refused}.textContent"))?
            .as_str()
            .is_some_and(|text| text.contains("no_endpoints"))
    );
    browser.wait(
        "document.querySelector('.map svg[role=img]').querySelectorAll('.edge.bad').length === 2",
    )?;
    browser.accept("map")?;
    clients.fixture.base.delete(&quiet)?;
    browser.open(&url("#/map?namespace=default&service=host"))?;
    nodes_keep_their_names(browser, clients)
}

/// Checks that the only pod on the node's network does not give the node's address its name.
fn nodes_keep_their_names(browser: &Browser, clients: &Clients) -> Result<()> {
    let lab = &clients.fixture.base.lab;
    let host = Service::new("host", 19, &["n1"], TARGET);
    clients.fixture.put(&host)?;
    let dial = Dial::new(Protocol::Tcp, host.frontend(Family::V4));
    let way = format!(
        "document.querySelector('[data-way=\"default/p1b → default/host → n1:{TARGET}\"]')"
    );
    let body = format!("return Boolean({way})");
    wait_until(DEADLINE, "the map has the node's name", || {
        dial.exchange(&lab.host("p1b").ns, b"hello")?;
        Ok(browser.eval(&body)? == true)
    })
    .with_context(|| {
        format!(
            "the page shows: {}",
            browser.text("body").unwrap_or_default()
        )
    })?;
    clients.fixture.base.delete(&host)
}

/// Traces a refused packet and a forwarded packet through the form.
fn trace(browser: &Browser, fixture: &Fixture) -> Result<()> {
    let from = fixture.base.lab.host("p1b").addrs.ip(Family::V4);
    browser.open(&url(&format!(
        "#/trace?from={from}&to=default/zero&port=80"
    )))?;
    browser.wait("document.getElementById('field-to').value === 'default/zero'")?;
    browser.click("#trace .primary")?;
    browser.wait("document.querySelector('#traced[data-verdict=reject]')")?;
    let text = browser.text("#traced")?;
    for wanted in [
        "no_endpoints",
        "kpx backends default/zero shows the endpoints.",
        "pod",
        "default/zero",
    ] {
        ensure!(text.contains(wanted), "{wanted:?} is not in {text}");
    }
    browser.accept("trace")?;
    browser.eval("const to = document.getElementById('field-to'); to.value = 'default/web'; to.dispatchEvent(new Event('input', { bubbles: true }))")?;
    browser.click("#trace .primary")?;
    browser.wait("document.querySelector('#traced[data-verdict=forward]')")?;
    ensure!(
        browser
            .text("#traced")?
            .contains("3 backends in the cluster set"),
        "{}",
        browser.text("#traced")?
    );
    // The page shows the agent's error.
    browser.eval("const to = document.getElementById('field-to'); to.value = 'default/nobody'; to.dispatchEvent(new Event('input', { bubbles: true }))")?;
    browser.click("#trace .primary")?;
    browser.wait("document.querySelector('#answer .notice')?.textContent.includes('nobody')")
}

pub(crate) fn choices_survive_reload_and_back(fixture: &Fixture) -> Result<()> {
    let browser = Browser::start(fixture.ns(), &[], true)?;
    browser.open(&url(""))?;
    browser.wait("document.querySelectorAll('tr[data-service]').length === 3")?;
    browser.press("/")?;
    browser.wait("document.activeElement.id === 'filter'")?;
    browser.press("def")?;
    browser.click("[data-sort=name]")?;
    browser.click("[data-sort=name]")?;
    let choose = "const field = document.getElementById('field-namespace'); field.value = 'default'; field.dispatchEvent(new Event('input', { bubbles: true }))";
    browser.eval(choose)?;
    let names = "[...document.querySelectorAll('#services td.name a')].map((link) => link.textContent).join()";
    let kept = format!(
        "{names} === 'web,local,empty' && document.getElementById('filter').value === 'def' && document.getElementById('field-namespace').value === 'default'"
    );
    browser.wait(&kept)?;
    ensure!(
        browser.eval("return location.hash")?
            == "#/services?filter=def&sort=-name&namespace=default"
    );
    browser.eval("location.reload()")?;
    browser.wait(&kept)?;
    browser.click("[data-service='default/web'] a")?;
    browser.wait(
        "location.hash.startsWith('#/services/default/web?') && document.querySelector('.port')",
    )?;
    // The keyboard reads a chart's values.
    browser.eval("document.querySelector('#timeline [data-plot]').focus()")?;
    let value = "document.activeElement.ariaValueText";
    browser.wait(&format!("/at \\d\\d:\\d\\d/.test({value})"))?;
    browser.press(key::LEFT)?;
    browser.wait("document.activeElement.querySelector('.value')")?;
    browser.eval("history.back()")?;
    browser.wait(&kept)?;
    browser.eval(
        "document.getElementById('theme').click(); document.getElementById('theme').click()",
    )?;
    browser.wait("getComputedStyle(document.documentElement).colorScheme === 'dark'")?;
    Ok(())
}
