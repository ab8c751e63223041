//! Protects the page's data from other sites.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::uri::Authority;
use http::{HeaderName, HeaderValue, StatusCode, header};

use crate::http_server::Client;

/// The content security policy: only this server's own files, and no text of an object can become
/// markup or a script.
const POLICY: &str = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

const HEADERS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
];

pub(super) async fn protect(mut response: Response) -> Response {
    let headers = HEADERS.map(|(name, value)| (name, HeaderValue::from_static(value)));
    response.headers_mut().extend(headers);
    response
}

/// Refuses requests whose `Host` is not a name of this server.
///
/// Otherwise a site could resolve its own name to this server, and its scripts would count as the
/// page's (DNS rebinding).
pub(super) async fn known_host(
    State(node_name): State<Arc<str>>,
    request: Request,
    next: Next,
) -> Response {
    let host = request
        .headers()
        .get(header::HOST)
        .and_then(|host| host.to_str().ok())
        .unwrap_or_default();
    if is_known(host, &node_name) {
        return next.run(request).await;
    }
    let hosts = match &*node_name {
        // The page of a cluster.
        "localhost" => "an IP address or localhost".to_owned(),
        node_name => format!("an IP address, localhost or {node_name}"),
    };
    let text = format!("use {hosts} as host, not {host:?}\n");
    (StatusCode::MISDIRECTED_REQUEST, text).into_response()
}

/// The header of the page's own requests. A browser sends it for another site only after the server
/// has agreed, and this server never agrees.
const OF_PAGE: HeaderName = HeaderName::from_static("kpx-page");

/// Refuses requests of other hosts and pods, and requests that do not come from the page.
///
/// Otherwise any site in the operator's browser, or any pod that reaches the metrics address, could
/// make the agent work.
pub(super) async fn page_on_host(
    client: Option<Extension<Client>>,
    request: Request,
    next: Next,
) -> Response {
    let refuse = |text: &'static str| (StatusCode::FORBIDDEN, text).into_response();
    match client.unwrap_or_default().0 {
        Client::Elsewhere => refuse(
            "only clients on this host have access: use `kubectl port-forward` or `ssh -L`\n",
        ),
        Client::OnHost | Client::Own if !request.headers().contains_key(OF_PAGE) => {
            refuse("the header kpx-page is missing\n")
        }
        Client::OnHost | Client::Own => next.run(request).await,
    }
}

fn is_known(host: &str, node_name: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    let name = authority
        .host()
        .trim_start_matches('[')
        .trim_end_matches(']');
    name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || name.eq_ignore_ascii_case(node_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_must_be_address_localhost_or_node() {
        let known = [
            "127.0.0.1:10249",
            "192.0.2.1",
            "[::1]:10249",
            "[fd00::1]",
            "localhost:8080",
            "LOCALHOST",
            "n1:10249",
        ];
        let unknown = [
            "",
            "n2:10249",
            "evil.example",
            "127.0.0.1.evil.example",
            "n1.evil.example",
            "a b",
            "localhost.evil",
        ];
        assert_eq!(known.map(|host| is_known(host, "n1")), [true; 7]);
        assert_eq!(unknown.map(|host| is_known(host, "n1")), [false; 7]);
    }
}
