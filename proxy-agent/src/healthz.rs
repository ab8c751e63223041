//! The health server: `/healthz` and `/livez`, for load balancers and the kubelet (kube-proxy's
//! `pkg/proxy/healthcheck/proxy_health.go`).

use std::collections::BTreeMap;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::any;
use axum::{Extension, Json, Router};
use http::StatusCode;
use jiff::Timestamp;
use serde::Serialize;

use crate::http_server::{Client, close_after, nosniff, not_found};
use crate::liveness::{Liveness, Report};
use proxy_metrics::{ByCode, Metrics};
use proxy_source::health;

/// Returns the health paths, for any HTTP method: load balancers may use any.
///
/// Only clients on this host get the `problems`, because these name servers, files and Services.
/// Problems never change the status code: without the API server, the node serves as before.
pub fn router(liveness: Liveness, metrics: Metrics, problems: [health::Health; 2]) -> Router {
    Router::new()
        .route("/healthz", any(healthz))
        .route("/livez", any(livez))
        .fallback(not_found)
        .with_state(Health {
            liveness,
            metrics,
            problems,
        })
}

#[derive(Clone)]
struct Health {
    liveness: Liveness,
    metrics: Metrics,
    problems: [health::Health; 2],
}

/// The body of an answer, with fields in kube-proxy's order. Only clients on this host get the
/// problems.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    last_updated: Timestamp,
    current_time: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    /// True if the proxy is healthy, even on an ineligible node.
    healthy: bool,
    status: BTreeMap<&'static str, FamilyAnswer>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    problems: BTreeMap<String, String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyAnswer {
    last_updated: Timestamp,
    healthy: bool,
}

/// Reports whether load balancers may send new traffic to this node.
async fn healthz(State(health): State<Health>, client: Option<Extension<Client>>) -> Response {
    let report = health.liveness.report();
    let response = answer(
        &report,
        Some(report.node_eligible),
        health.problems_for(client),
    );
    health
        .metrics
        .proxy
        .healthz
        .get_or_create(&ByCode::from(response.status()))
        .inc();
    response
}

/// Reports whether desired state is applied in time.
async fn livez(State(health): State<Health>, client: Option<Extension<Client>>) -> Response {
    let response = answer(&health.liveness.report(), None, health.problems_for(client));
    health
        .metrics
        .proxy
        .livez
        .get_or_create(&ByCode::from(response.status()))
        .inc();
    response
}

impl Health {
    fn problems_for(&self, client: Option<Extension<Client>>) -> BTreeMap<String, String> {
        match client.unwrap_or_default().0 {
            Client::OnHost | Client::Own => {
                let problems = self.problems.iter().flat_map(|of| of.problems());
                problems
                    .map(|(problem, reason)| (problem.to_string(), reason.why))
                    .collect()
            }
            Client::Elsewhere => BTreeMap::new(),
        }
    }
}

fn answer(
    report: &Report,
    node_eligible: Option<bool>,
    problems: BTreeMap<String, String>,
) -> Response {
    let current_time = Timestamp::now();
    let ok = report.live && node_eligible.unwrap_or(true);
    let status = report.families.iter().map(|(family, family_report)| {
        (
            family.name(),
            FamilyAnswer {
                last_updated: family_report.last_updated,
                healthy: family_report.healthy,
            },
        )
    });
    let body = Answer {
        // A healthy proxy without pending changes counts as up to date.
        last_updated: if ok {
            current_time
        } else {
            report.last_updated
        },
        current_time,
        node_eligible,
        healthy: report.live,
        status: status.collect(),
        problems,
    };
    let code = if ok {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let mut response: Response<Body> =
        axum::response::IntoResponse::into_response((code, Json(body)));
    nosniff(&mut response);
    close_after(&mut response);
    response
}

#[cfg(test)]
mod tests {
    use http::Request;
    use http_body_util::BodyExt;
    use serde_json::Value;
    use tower::ServiceExt;

    use super::*;
    use crate::choices::Mode;
    use proxy_core::ip_family::IpFamily;

    async fn ask(router: &Router, method: &str, path: &str) -> (u16, String) {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .body(Body::empty())
            .unwrap();
        let response = router.clone().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        if status != 404 {
            assert_eq!(response.headers()["content-type"], "application/json");
        }
        assert_eq!(response.headers()["x-content-type-options"], "nosniff");
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    /// Returns the body with its times, which must be in RFC 3339, replaced.
    fn form(body: &str) -> String {
        let mut text = body.to_owned();
        let value: Value = serde_json::from_str(body).unwrap();
        let families = value["status"]
            .as_object()
            .unwrap()
            .values()
            .map(|family| &family["lastUpdated"]);
        for time in families.chain([&value["lastUpdated"], &value["currentTime"]]) {
            let time = time.as_str().unwrap();
            time.parse::<Timestamp>().unwrap();
            assert!(time.ends_with('Z'), "{time}");
            text = text.replace(time, "T");
        }
        text
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_and_codes_match_kube_proxy() {
        let liveness = Liveness::new(std::time::Duration::from_secs(30), Mode::Node);
        let problems = [health::Health::default(), health::Health::default()];
        let router = router(liveness.clone(), Metrics::new(), problems.clone());
        let (code, body) = ask(&router, "GET", "/healthz").await;
        let families = r#""status":{"IPv4":{"lastUpdated":"T","healthy":true},"IPv6":{"lastUpdated":"T","healthy":true}}"#;
        assert_eq!(code, 503);
        assert_eq!(
            form(&body),
            format!(
                r#"{{"lastUpdated":"T","currentTime":"T","nodeEligible":false,"healthy":true,{families}}}"#
            )
        );

        liveness.set_node_eligible(true);
        let (code, body) = ask(&router, "POST", "/healthz").await;
        let value: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((code, &value["nodeEligible"]), (200, &Value::Bool(true)));
        assert_eq!(
            value["lastUpdated"], value["currentTime"],
            "now, if all is well"
        );

        let watch = health::Problem::Watch("Service".into());
        problems[1].begin(&watch, "refused");
        for path in ["/healthz", "/livez"] {
            let (code, body) = ask(
                &router.clone().layer(Extension(Client::OnHost)),
                "GET",
                path,
            )
            .await;
            assert_eq!(
                code, 200,
                "an API server that is away takes no traffic from the node"
            );
            assert!(
                body.ends_with(r#","problems":{"Service watch":"refused"}}"#),
                "{body}"
            );
            for stranger in [
                router.clone(),
                router.clone().layer(Extension(Client::Elsewhere)),
            ] {
                let (code, body) = ask(&stranger, "GET", path).await;
                assert!(
                    code == 200 && body.ends_with("}}}") && !body.contains("refused"),
                    "{body}"
                );
            }
        }
        problems[1].end(&watch);

        liveness.queued(IpFamily::V6);
        tokio::time::advance(std::time::Duration::from_secs(60)).await;
        let (code, body) = ask(&router, "GET", "/livez").await;
        let families = families.replace(
            r#""IPv6":{"lastUpdated":"T","healthy":true"#,
            r#""IPv6":{"lastUpdated":"T","healthy":false"#,
        );
        assert_eq!(code, 503);
        assert_eq!(
            form(&body),
            format!(r#"{{"lastUpdated":"T","currentTime":"T","healthy":false,{families}}}"#)
        );
        let value: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            value["lastUpdated"], value["status"]["IPv4"]["lastUpdated"],
            "the latest of the families'"
        );
        assert_eq!(ask(&router, "GET", "/healthz").await.0, 503);

        for path in ["/", "/healthz/", "/readyz"] {
            assert_eq!(
                ask(&router, "GET", path).await,
                (404, "404 page not found\n".to_owned()),
                "{path}"
            );
        }
    }
}
