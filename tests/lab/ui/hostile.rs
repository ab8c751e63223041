//! Attacks that must fail: injected markup, requests to other origins, reads from other origins.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use testbed::agent::Object;

use crate::ui::{Fixture, ORIGIN, url};
use testbed::browser::Browser;

const MARKUP: &str = "<img src=x onerror=\"window.harmed=1\"><script>window.harmed=1</script>";

pub(crate) fn text_of_objects_stays_text(fixture: &Fixture) -> Result<()> {
    hostile()
        .iter()
        .try_for_each(|object| fixture.base.cluster.put(object))?;
    let browser = Browser::start(fixture.ns(), &[], true)?;
    browser.open(&url(""))?;
    browser.wait("document.querySelector('[data-service=\"default/hostile\"]')")?;
    for place in [
        "",
        "#/services/default/hostile",
        "#/node",
        "#/drops",
        "#/devices",
        &format!("#/services/{MARKUP}/x"),
    ] {
        // The browser leaves the page first, because a change of the fragment alone loads nothing.
        browser.open("about:blank")?;
        browser.open(&url(place))?;
        browser.wait("document.querySelector('[data-health]')")?;
        if place.ends_with("hostile") {
            browser.wait("document.querySelectorAll('[data-zone]').length === 1")?;
            let text = browser.text("#view")?;
            ensure!(
                text.matches(MARKUP).count() >= 3,
                "port, zone and node are shown as they are: {text}"
            );
        }
        let lives = "return document.querySelectorAll('#view :is(img, script, iframe), #notices img, #tiles img').length";
        ensure!(
            browser.eval(lives)? == 0 && browser.eval("return window.harmed ?? 0")? == 0,
            "{place}"
        );
    }
    // The policy blocks these attempts even from the page itself.
    for attempt in [
        "document.body.innerHTML = '<b>bold</b>'",
        "const script = document.createElement('script'); script.text = 'window.harmed = 1'; document.head.append(script)",
        "document.write('<b>bold</b>')",
    ] {
        let outcome = browser.eval(&format!(
            "try {{ {attempt}; return 'done' }} catch (error) {{ return error.name }}"
        ))?;
        ensure!(outcome != "done", "{attempt}: {outcome}");
    }
    hostile()
        .iter()
        .try_for_each(|object| fixture.base.cluster.delete(object))
}

/// Markup in objects. An API server would refuse them; a folder of manifests accepts them.
fn hostile() -> [Object; 2] {
    let service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": "hostile", "namespace": "default", "annotations": { "note": MARKUP } },
        "spec": { "clusterIP": "10.96.0.99", "ports": [{ "name": MARKUP, "port": 80 }] },
    });
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": { "name": "hostile", "namespace": "default", "labels": { "kubernetes.io/service-name": "hostile" } },
        "addressType": "IPv4",
        "ports": [{ "name": MARKUP, "port": 80, "protocol": "TCP" }],
        "endpoints": [{
            "addresses": ["10.244.9.9"], "conditions": { "ready": true }, "zone": MARKUP, "nodeName": MARKUP,
            "targetRef": { "kind": "Pod", "namespace": "default", "name": MARKUP },
        }],
    });
    [Object(service), Object(slice)]
}

pub(crate) fn page_sends_nothing_and_admits_no_other_origin(fixture: &Fixture) -> Result<()> {
    let browser = Browser::start(
        fixture.ns(),
        &["--host-resolver-rules=MAP evil.example 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"],
        true,
    )?;
    browser.open(&url(""))?;
    browser.wait("document.querySelectorAll('tr[data-service]').length === 3")?;
    let requests = browser
        .strings("return performance.getEntriesByType('resource').map((entry) => entry.name)")?;
    ensure!(
        requests
            .iter()
            .any(|request| request.contains("/ui/api/rows")),
        "{requests:?}"
    );
    ensure!(
        requests
            .iter()
            .all(|request| request.starts_with(&format!("{ORIGIN}/ui/"))),
        "{requests:?}"
    );
    let fetched =
        "return fetch('http://127.0.0.2:10249/').then(() => 'sent', (error) => error.name)";
    ensure!(
        browser.eval(fetched)? == "TypeError",
        "the policy lets requests out"
    );

    // DNS rebinding: a foreign name resolves to the page's address.
    for path in ["", "api/status", "api/services"] {
        browser.open(&format!("http://evil.example:10249/ui/{path}"))?;
        let text = browser.text("body")?;
        ensure!(
            text.starts_with("use an IP address, localhost or n1 as host"),
            "{text}"
        );
    }
    // A script of another origin: another port is another origin.
    let server = fixture
        .ns()
        .run(|| std::net::TcpListener::bind("127.0.0.1:0"))?;
    let other = server.local_addr()?;
    let page = std::thread::spawn(move || serve_once(&server));
    browser.open(&format!("http://{other}/"))?;
    page.join().ok().context("the other fixture")??;
    let stolen = format!(
        "return fetch('{ORIGIN}/ui/api/services').then((answer) => answer.text(), (error) => error.name)"
    );
    ensure!(
        browser.eval(&stolen)? == "TypeError",
        "another origin reads"
    );
    // Nor does another origin cause work for the agent: the header of the page's requests needs a
    // CORS preflight, which fails.
    let work = format!(
        "const path = '{ORIGIN}/ui/api/trace?to=10.96.0.10:80';
         return Promise.all([{{ headers: {{ 'kpx-page': '1' }} }}, {{ mode: 'no-cors', headers: {{ 'kpx-page': '1' }} }}].map((how) =>
             fetch(path, how).then((answer) => answer.type, (error) => error.name)))"
    );
    ensure!(
        browser.eval(&work)? == json!(["TypeError", "TypeError"]),
        "{}",
        browser.eval(&work)?
    );
    let framed = format!(
        "const frame = document.createElement('iframe'); frame.src = '{ORIGIN}/ui/'; document.body.append(frame);
         return new Promise((done) => {{ frame.onload = () => {{
             try {{ done(frame.contentDocument ? 'readable' : 'blocked') }} catch {{ done('blocked') }} }} }})"
    );
    ensure!(browser.eval(&framed)? == "blocked");
    Ok(())
}

fn serve_once(server: &std::net::TcpListener) -> Result<()> {
    use std::io::{Read, Write};
    let (mut stream, _) = server.accept()?;
    let _read = stream.read(&mut [0; 4096])?;
    let page = "<!doctype html><title>other</title><body>other</body>";
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{page}",
        page.len()
    )?;
    Ok(())
}

pub(crate) fn page_without_javascript_names_alternatives(fixture: &Fixture) -> Result<()> {
    let browser = Browser::start(fixture.ns(), &[], false)?;
    browser.open(&url(""))?;
    let text = browser.text("body")?;
    ensure!(
        text.contains("This page needs JavaScript") && text.contains("kpx status"),
        "{text}"
    );
    Ok(())
}

#[test]
fn page_is_off_by_default() -> Result<()> {
    let fixture = Fixture::build()?;
    let agent = testbed::agent::Agent::start(
        &fixture.base.lab,
        &fixture.base.lab.n1,
        fixture.base.cluster.source(),
    )?;
    let browser = Browser::start(fixture.ns(), &[], true)?;
    // Either no server listens there, or the server has no such page.
    let opened = browser.open(&url(""));
    ensure!(
        opened.is_err() || browser.eval("return document.getElementById('view') === null")? == true
    );
    agent.stop()
}
