//! Asks the pages as clients do.

use expect_test::{Expect, expect};
use http::header::ACCEPT;
use serde_json::json;

use super::*;

fn told() -> Told {
    let flags = BTreeMap::from([
        ("proxy-mode", json!("nftables")),
        ("node-ip", json!(["192.0.2.1"])),
    ]);
    Told {
        kubernetes_version: Some("1.37".to_owned()),
        flags: Some(flags),
    }
}

/// Returns a page of a process that started at 09:35:40.5 on a Friday.
fn page(path: &str) -> Page {
    let pages = told().pages(&["/metrics", "/configz"]);
    let mut page = pages.into_iter().find(|page| page.path == path).unwrap();
    if let Content::Statusz(statusz) = &mut page.content {
        *statusz = Statusz::new(
            "1.37".to_owned(),
            vec!["/configz", "/flagz"],
            "2026-11-06T09:35:40.5Z".parse().unwrap(),
        );
    }
    page
}

fn ask(path: &str, accept: &str) -> Response<String> {
    let headers = HeaderMap::from_iter([(ACCEPT, accept.parse().unwrap())]);
    page(path).answer(&headers, "2026-11-07T10:37:43Z".parse().unwrap())
}

/// Returns code, headers and body as text, with the names RUST and VERSION for the versions of
/// compiler and kpx.
fn shown(response: &Response<String>) -> String {
    let headers = response
        .headers()
        .iter()
        .map(|(name, value)| format!("{name}: {}\n", value.to_str().unwrap()));
    let text = format!(
        "{}\n{}\n{}",
        response.status().as_u16(),
        headers.collect::<String>(),
        response.body()
    );
    text.replace(env!("KPX_RUST_VERSION"), "RUST")
        .replace(env!("CARGO_PKG_VERSION"), "VERSION")
}

fn check(path: &str, accept: &str, want: &Expect) {
    want.assert_eq(&shown(&ask(path, accept)));
}

#[test]
fn statusz_tells_which_process_answers() {
    check(
        "/statusz",
        "*/*",
        &expect![[r#"
        200
        content-type: text/plain; charset=utf-8
        x-content-type-options: nosniff

        kpx statusz
        Warning: this text is for people, and may change. For programs: -H 'Accept: application/json;g=config.k8s.io;v=v1beta1;as=Statusz'

        Started: Fri Nov  6 09:35:40 UTC 2026
        Up: 25 hr 02 min 03 sec
        Rust version: RUST
        Binary version: VERSION
        Emulation version: 1.37
        Paths: /configz /flagz
    "#]],
    );
    check(
        "/statusz",
        "application/json;v=v1beta1;g=config.k8s.io;as=Statusz",
        &expect![[r#"
        200
        content-type: application/json;g=config.k8s.io;v=v1beta1;as=Statusz
        x-content-type-options: nosniff

        {
          "kind": "Statusz",
          "apiVersion": "config.k8s.io/v1beta1",
          "metadata": {
            "name": "kpx",
            "annotations": {
              "kpx.dev/rust-version": "RUST"
            }
          },
          "startTime": "2026-11-06T09:35:40Z",
          "uptimeSeconds": 90123,
          "goVersion": "",
          "binaryVersion": "VERSION",
          "emulationVersion": "1.37",
          "paths": [
            "/configz",
            "/flagz"
          ]
        }
    "#]],
    );
}

#[test]
fn deprecated_version_has_a_warning() {
    check(
        "/statusz",
        "application/yaml;v=v1alpha1;g=config.k8s.io;as=Statusz",
        &expect![[r#"
        200
        content-type: application/yaml;g=config.k8s.io;v=v1alpha1;as=Statusz
        x-content-type-options: nosniff
        warning: 299 - "config.k8s.io/v1alpha1 is deprecated, and config.k8s.io/v1beta1 takes its place"

        kind: Statusz
        apiVersion: config.k8s.io/v1alpha1
        metadata:
          name: kpx
          annotations:
            kpx.dev/rust-version: "RUST"
        startTime: "2026-11-06T09:35:40Z"
        uptimeSeconds: 90123
        goVersion: ""
        binaryVersion: "VERSION"
        emulationVersion: "1.37"
        paths:
        - /configz
        - /flagz
    "#]],
    );
}

#[test]
fn flagz_tells_the_flags_in_force() {
    check(
        "/flagz",
        "text/plain",
        &expect![[r#"
        200
        content-type: text/plain; charset=utf-8
        x-content-type-options: nosniff

        kpx flagz
        Warning: this text is for people, and may change. For programs: -H 'Accept: application/json;g=config.k8s.io;v=v1beta1;as=Flagz'

        node-ip=[192.0.2.1]
        proxy-mode=nftables
    "#]],
    );
    check(
        "/flagz",
        "application/json;v=v1beta1;g=config.k8s.io;as=Flagz",
        &expect![[r#"
        200
        content-type: application/json;g=config.k8s.io;v=v1beta1;as=Flagz
        x-content-type-options: nosniff

        {
          "kind": "Flagz",
          "apiVersion": "config.k8s.io/v1beta1",
          "metadata": {
            "name": "kpx"
          },
          "flags": {
            "node-ip": "[192.0.2.1]",
            "proxy-mode": "nftables"
          }
        }
    "#]],
    );
}

#[test]
fn form_that_no_page_has_is_refused() {
    check(
        "/statusz",
        "application/json",
        &expect![[r#"
        406
        content-type: application/json
        x-content-type-options: nosniff

        {
          "apiVersion": "v1",
          "code": 406,
          "kind": "Status",
          "message": "/statusz is served as text/plain, application/json;g=config.k8s.io;v=v1beta1;as=Statusz or application/yaml;g=config.k8s.io;v=v1beta1;as=Statusz",
          "metadata": {},
          "reason": "NotAcceptable",
          "status": "Failure"
        }
    "#]],
    );
    check(
        "/flagz",
        "application/json;v=v1beta1;g=config.k8s.io;as=Statusz",
        &expect![[r#"
        406
        content-type: application/json
        x-content-type-options: nosniff

        {
          "apiVersion": "v1",
          "code": 406,
          "kind": "Status",
          "message": "/flagz is served as text/plain, application/json;g=config.k8s.io;v=v1beta1;as=Flagz or application/yaml;g=config.k8s.io;v=v1beta1;as=Flagz",
          "metadata": {},
          "reason": "NotAcceptable",
          "status": "Failure"
        }
    "#]],
    );
}

#[test]
fn page_whose_gate_is_off_is_not_there() {
    let paths = |told: Told| -> Vec<_> {
        told.pages(&["/metrics"])
            .iter()
            .map(|page| page.path)
            .collect()
    };
    assert_eq!(paths(told()), ["/statusz", "/flagz"]);
    assert_eq!(
        paths(Told {
            flags: None,
            ..told()
        }),
        ["/statusz"]
    );
    assert_eq!(
        paths(Told {
            kubernetes_version: None,
            ..told()
        }),
        ["/flagz"]
    );
    let listed = |told: Told| match &told.pages(&["/metrics", "/configz"])[0].content {
        Content::Statusz(statusz) => statusz.text(Timestamp::UNIX_EPOCH),
        Content::Flagz(_) => String::new(),
    };
    assert!(
        listed(told()).contains("Paths: /configz /flagz /metrics\n"),
        "{}",
        listed(told())
    );
    assert!(
        listed(Told {
            flags: None,
            ..told()
        })
        .contains("Paths: /configz /metrics\n")
    );
    assert!(
        listed(told()).contains("Up: 0 hr 00 min 00 sec\n"),
        "the clock was set back"
    );
}
