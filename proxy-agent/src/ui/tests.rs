//! Tests of the router's answers, without a listener.

mod costly;

use std::collections::BTreeSet;
use std::path::Path;

use axum::body::Body;
use http::{Method, Request, StatusCode};
use http_body_util::BodyExt;
use tower::ServiceExt;

use super::*;

const FILES: [(&str, &str); 4] = [
    ("/ui/", "text/html; charset=utf-8"),
    ("/ui/style.css", "text/css; charset=utf-8"),
    ("/ui/main.js", "text/javascript; charset=utf-8"),
    ("/ui/icon.svg", "image/svg+xml"),
];

/// Returns sources whose agent has ended.
fn sources() -> Sources {
    let (agent, _) = AgentHandle::new();
    Sources::new(&agent, &Watchers::default(), Path::new("/nonexistent"))
}

async fn ask(method: Method, path: &str, headers: &[(&str, &str)]) -> Response {
    send(&router(sources(), "n1"), method, path, headers).await
}

async fn send(router: &Router, method: Method, path: &str, headers: &[(&str, &str)]) -> Response {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    router
        .clone()
        .oneshot(request.body(Body::empty()).unwrap())
        .await
        .unwrap()
}

async fn get(path: &str) -> Response {
    ask(Method::GET, path, &[("host", "127.0.0.1:10249")]).await
}

async fn text(response: Response) -> String {
    String::from_utf8(
        response
            .into_body()
            .collect()
            .await
            .unwrap()
            .to_bytes()
            .to_vec(),
    )
    .unwrap()
}

#[tokio::test]
async fn files_have_their_type_and_are_sent_once() {
    for (path, content_type) in FILES {
        let response = get(path).await;
        assert_eq!(
            (response.status(), &response.headers()["content-type"]),
            (StatusCode::OK, &content_type.parse().unwrap())
        );
        assert_eq!(response.headers()["cache-control"], "no-cache", "{path}");
        let tag = response.headers()["etag"].to_str().unwrap().to_owned();
        assert!(!text(response).await.is_empty());
        for (kept, status) in [
            (tag.clone(), StatusCode::NOT_MODIFIED),
            (format!("\"0\", W/{tag}"), StatusCode::NOT_MODIFIED),
            ("\"0\"".to_owned(), StatusCode::OK),
        ] {
            let response = ask(
                Method::GET,
                path,
                &[("host", "localhost"), ("if-none-match", &kept)],
            )
            .await;
            assert_eq!(
                (response.status(), &response.headers()["etag"]),
                (status, &tag.parse().unwrap()),
                "{path} {kept}"
            );
            assert_eq!(
                text(response).await.is_empty(),
                status == StatusCode::NOT_MODIFIED
            );
        }
    }
    let moved = get("/ui").await;
    assert_eq!(
        (moved.status(), &moved.headers()["location"]),
        (StatusCode::PERMANENT_REDIRECT, &"/ui/".parse().unwrap())
    );
}

#[tokio::test]
async fn every_file_of_the_folder_is_served_and_each_named_file_exists() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ui/assets");
    let mut names = BTreeSet::new();
    for entry in dir.read_dir().unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let path = if name == "index.html" {
            "/ui/".to_owned()
        } else {
            format!("/ui/{name}")
        };
        assert_eq!(
            text(get(&path).await).await,
            std::fs::read_to_string(dir.join(&name)).unwrap(),
            "{path}"
        );
        names.insert(name);
    }
    for name in &names {
        let content = std::fs::read_to_string(dir.join(name)).unwrap();
        let quoted = content.split('"').skip(1).step_by(2);
        for file in quoted.filter(|text| {
            [".js", ".css", ".svg"]
                .iter()
                .any(|end| text.ends_with(end))
        }) {
            assert!(
                names.contains(file.trim_start_matches("./")),
                "{name} names {file}"
            );
        }
        let namespaces = ["http://www.w3.org/2000/svg"];
        let urls = content
            .split('"')
            .filter(|text| text.contains("://") && !namespaces.contains(text));
        assert_eq!(
            urls.collect::<Vec<_>>(),
            Vec::<&str>::new(),
            "{name} leads elsewhere"
        );
    }
}

#[tokio::test]
async fn other_sites_cannot_read() {
    for path in [
        "/ui/",
        "/ui/main.js",
        "/ui/api/reasons",
        "/ui/api/status",
        "/ui/api/options",
        "/ui/api/rows",
        "/ui/api/service",
        "/ui",
    ] {
        let response = get(path).await;
        let headers = response.headers();
        let policy = headers["content-security-policy"].to_str().unwrap();
        for directive in [
            "default-src 'self'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        ] {
            assert!(policy.contains(directive), "{path}: {policy}");
        }
        assert_eq!(headers["x-content-type-options"], "nosniff");
        assert_eq!(headers["cross-origin-resource-policy"], "same-origin");
        assert!(
            !headers
                .keys()
                .any(|name| name.as_str().starts_with("access-control")),
            "{path}"
        );
        for host in ["evil.example", "n2:10249"] {
            let response = ask(
                Method::GET,
                path,
                &[("host", host), ("origin", "http://evil.example")],
            )
            .await;
            assert_eq!(
                response.status(),
                StatusCode::MISDIRECTED_REQUEST,
                "{path} at {host}"
            );
            assert!(
                text(response)
                    .await
                    .starts_with("use an IP address, localhost or n1 as host, not ")
            );
        }
        assert_eq!(
            ask(Method::GET, path, &[]).await.status(),
            StatusCode::MISDIRECTED_REQUEST,
            "without a host"
        );
    }
}

#[tokio::test]
async fn page_allows_only_reading() {
    for path in [
        "/ui/",
        "/ui/style.css",
        "/ui/api/status",
        "/ui/api/services",
        "/ui/api/history",
        "/ui/api/rows",
        "/ui/api/service",
    ] {
        for method in [
            Method::POST,
            Method::PUT,
            Method::DELETE,
            Method::PATCH,
            Method::OPTIONS,
        ] {
            let response = ask(method.clone(), path, &[("host", "n1")]).await;
            assert_eq!(
                response.status(),
                StatusCode::METHOD_NOT_ALLOWED,
                "{method} {path}"
            );
        }
    }
    assert_eq!(get("/ui/../secret").await.status(), StatusCode::NOT_FOUND);
    assert_eq!(get("/metrics").await.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn reasons_are_explained_and_never_kept() {
    let response = get("/ui/api/reasons").await;
    assert_eq!(response.headers()["cache-control"], "no-store");
    assert_eq!(response.headers()["content-type"], "application/json");
    let reasons: Vec<serde_json::Value> = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!(reasons.len(), Reason::ALL.len());
    let full = reasons
        .iter()
        .find(|reason| reason["name"] == "flows_full")
        .unwrap();
    assert_eq!(
        (&full["verdict"], &full["meaning"]),
        (&"drop".into(), &"the flow table is full".into())
    );
    assert!(full["remedy"][0].as_str().unwrap().ends_with('.'), "{full}");
}

#[tokio::test]
async fn history_is_never_kept_by_browser() {
    let response = get("/ui/api/history?service=shop/web").await;
    assert_eq!(
        (response.status(), &response.headers()["cache-control"]),
        (StatusCode::OK, &"no-store".parse().unwrap())
    );
    let history: proxy_view::HistoryView = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!(
        (history.step_secs, history.points, history.end),
        (10, 0, None)
    );
}

#[tokio::test]
async fn answers_that_are_not_read_are_bounded() {
    let router = router(sources(), "n1");
    let host = [("host", "127.0.0.1:10249")];
    let mut unread = Vec::new();
    for _ in 0..8 {
        let response = send(&router, Method::GET, "/ui/api/history", &host).await;
        assert_eq!(response.status(), StatusCode::OK);
        unread.push(response);
    }
    for path in ["/ui/api/history", "/ui/api/services"] {
        let response = send(&router, Method::GET, path, &host).await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE, "{path}");
        assert_eq!(
            text(response).await,
            "the limit of concurrent answers is reached: 8\n"
        );
    }
    let taken = text(unread.pop().unwrap()).await;
    assert!(taken.starts_with('{') && taken.ends_with('}'), "{taken}");
    assert_eq!(
        send(&router, Method::GET, "/ui/api/history", &host)
            .await
            .status(),
        StatusCode::OK,
        "one was read"
    );
    unread.clear();
    // A failed answer returns its permit.
    for _ in 0..9 {
        let response = send(&router, Method::GET, "/ui/api/services", &host).await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
}

#[tokio::test]
async fn ended_agent_is_an_error() {
    for what in [
        "status",
        "options",
        "services",
        "rows",
        "rows?ahead=true",
        "service?namespace=shop&name=web",
    ] {
        let response = get(&format!("/ui/api/{what}")).await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(response.headers()["cache-control"], "no-store");
        assert_eq!(text(response).await, "the agent has ended");
    }
}
