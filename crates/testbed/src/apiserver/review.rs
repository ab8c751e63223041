//! `SelfSubjectAccessReview`: clients may do everything that no test fails with 403.

use http::{Method, Request, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::admit::text;
use super::failure::{Failure, Outcome};
use super::http::{Answer, json_answer};
use super::shared::Shared;

pub(crate) const PATH: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";

/// Answers whether the client may use the verb on the resource.
pub(crate) async fn answer(shared: &Shared, request: Request<Incoming>) -> Outcome<Answer> {
    if request.method() != Method::POST {
        return Err(Failure::method_not_allowed());
    }
    let body = request
        .into_body()
        .collect()
        .await
        .map_err(|error| Failure::bad_request(error.to_string()))?
        .to_bytes();
    let mut review: Value = serde_json::from_slice(&body)
        .map_err(|error| Failure::bad_request(format!("no review: {error}")))?;
    let of = |field: &str| text(&review, &format!("/spec/resourceAttributes/{field}"));
    let resource = match of("subresource") {
        "" => of("resource").to_owned(),
        subresource => format!("{}/{subresource}", of("resource")),
    };
    let failure = shared.read(|state| state.faults.answer(of("verb"), &resource));
    review["status"] = json!({ "allowed": failure.is_none_or(|failure| failure.code != 403) });
    Ok(json_answer(StatusCode::CREATED, &review))
}
