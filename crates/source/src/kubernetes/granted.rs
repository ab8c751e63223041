//! Checks the rights that an API server grants to a machine outside the cluster.

use std::fmt;
use std::time::Duration;

use anyhow::Error;
use http::Request;
use ipnet::IpNet;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::Client;
use kube::api::{Api, PostParams};
use serde_json::Value;
use tokio::time::timeout;

use super::Options;
use super::errors::{Fault, SourceError};

/// The timeout of each request.
const ANSWER: Duration = Duration::from_secs(10);
/// The resources that kpx lists in host mode: group, name, path of the list.
const LISTS: [(&str, &str, &str); 4] = [
    ("", "services", "/api/v1/services?limit=1"),
    (
        "discovery.k8s.io",
        "endpointslices",
        "/apis/discovery.k8s.io/v1/endpointslices?limit=1",
    ),
    ("", "nodes", "/api/v1/nodes?limit=1"),
    (
        "networking.k8s.io",
        "servicecidrs",
        "/apis/networking.k8s.io/v1/servicecidrs",
    ),
];
/// The verbs of pods/portforward that a stream needs. API servers before 1.35 check only the first.
const STREAM: [&str; 2] = ["get", "create"];

/// The rights that an API server grants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Granted {
    pub server: String,
    /// The resources that may not be listed or watched, with the server's message.
    pub refused: Vec<(String, String)>,
    /// The ranges of ClusterIPs, if the server lists them.
    pub service_cidrs: Vec<IpNet>,
    /// The pods whose ports accept streams; `None` if not checked.
    pub streams: Option<Streams>,
}

/// The pods to whose ports a client may open streams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Streams {
    Everywhere,
    /// Only the pods in the namespace of the kubeconfig's context.
    In(String),
    /// No pods: `lacks` are the missing verbs in the namespace of the kubeconfig's context.
    Nowhere {
        namespace: String,
        lacks: Vec<&'static str>,
    },
    /// Not determined, with the server's message.
    Unknown(String),
}

/// The reason why the rights could not be checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotGranted {
    pub fault: Fault,
    why: String,
}

impl From<Error> for NotGranted {
    fn from(error: Error) -> Self {
        Self {
            fault: SourceError::fault_of(&error),
            why: format!("{error:#}"),
        }
    }
}

impl fmt::Display for NotGranted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl Options {
    /// Checks the rights to read objects in host mode and, if `with_streams`, to open streams to
    /// ports of pods.
    pub async fn granted(&self, with_streams: bool) -> Result<Granted, NotGranted> {
        let server = self.server().await?;
        let client = self.stream_client().await?;
        let mut granted = Granted {
            server,
            ..Granted::default()
        };
        for (group, resource, path) in LISTS {
            match answer(get(&client, path)).await {
                Ok(list) => {
                    if resource == "servicecidrs" {
                        granted.service_cidrs = ranges(&list);
                    }
                    let asked = ResourceAttributes {
                        group: Some(group.to_owned()),
                        resource: Some(resource.to_owned()),
                        verb: Some("watch".to_owned()),
                        ..ResourceAttributes::default()
                    };
                    // A server that cannot review access may still grant the watch.
                    if !allows(&client, asked).await.unwrap_or(true) {
                        granted.refused.push((
                            resource.to_owned(),
                            "may be listed, and not watched".to_owned(),
                        ));
                    }
                }
                // Servers before 1.33 have no such resource.
                Err(SourceError {
                    code: Some(404), ..
                }) if resource == "servicecidrs" => {}
                Err(error) if error.code == Some(403) => granted
                    .refused
                    .push((resource.to_owned(), error.to_string())),
                Err(error) => {
                    return Err(Error::new(error)
                        .context(format!("ask {}", granted.server))
                        .into());
                }
            }
        }
        if with_streams {
            granted.streams = Some(
                streams(&client)
                    .await
                    .unwrap_or_else(|error| Streams::Unknown(error.to_string())),
            );
        }
        Ok(granted)
    }
}

/// Checks in which namespaces streams may be opened to ports of pods.
async fn streams(client: &Client) -> Result<Streams, SourceError> {
    if lacks(client, None).await?.is_empty() {
        return Ok(Streams::Everywhere);
    }
    let namespace = client.default_namespace().to_owned();
    let lacks = lacks(client, Some(&namespace)).await?;
    Ok(if lacks.is_empty() {
        Streams::In(namespace)
    } else {
        Streams::Nowhere { namespace, lacks }
    })
}

/// Returns the missing verbs of pods/portforward in a namespace; in all namespaces for `None`.
async fn lacks(client: &Client, namespace: Option<&str>) -> Result<Vec<&'static str>, SourceError> {
    let mut lacks = Vec::new();
    for verb in STREAM {
        let attributes = ResourceAttributes {
            namespace: namespace.map(str::to_owned),
            resource: Some("pods".to_owned()),
            subresource: Some("portforward".to_owned()),
            verb: Some(verb.to_owned()),
            ..ResourceAttributes::default()
        };
        if !allows(client, attributes).await? {
            lacks.push(verb);
        }
    }
    Ok(lacks)
}

async fn allows(client: &Client, attributes: ResourceAttributes) -> Result<bool, SourceError> {
    let spec = SelfSubjectAccessReviewSpec {
        resource_attributes: Some(attributes),
        ..Default::default()
    };
    let review = SelfSubjectAccessReview {
        spec,
        ..Default::default()
    };
    let reviews = Api::<SelfSubjectAccessReview>::all(client.clone());
    let review = answer(reviews.create(&PostParams::default(), &review)).await?;
    Ok(review.status.is_some_and(|status| status.allowed))
}

async fn answer<T>(asked: impl Future<Output = kube::Result<T>>) -> Result<T, SourceError> {
    let late = || {
        SourceError::new(
            Fault::Unreachable,
            format!("no answer within {} s", ANSWER.as_secs()),
        )
    };
    timeout(ANSWER, asked)
        .await
        .map_err(|_| late())?
        .map_err(SourceError::from)
}

async fn get(client: &Client, path: &str) -> kube::Result<Value> {
    let request = Request::get(path)
        .body(Vec::new())
        .map_err(kube::Error::HttpError)?;
    client.request(request).await
}

fn ranges(list: &Value) -> Vec<IpNet> {
    let items = list["items"].as_array().into_iter().flatten();
    let texts = items.flat_map(|item| item["spec"]["cidrs"].as_array().into_iter().flatten());
    texts
        .filter_map(|text| text.as_str()?.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::BodyExt as _;
    use kube::client::Body;
    use tower::service_fn;

    use super::*;

    /// Returns a client in the namespace `shop` with these verbs: there, or everywhere.
    fn client(in_shop: &'static [&'static str], everywhere: &'static [&'static str]) -> Client {
        let service = service_fn(move |request: Request<Body>| async move {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let mut review: Value = serde_json::from_slice(&body).unwrap();
            let asked = &review["spec"]["resourceAttributes"];
            assert_eq!(
                (&asked["resource"], &asked["subresource"]),
                (&"pods".into(), &"portforward".into())
            );
            let granted = if asked["namespace"] == "shop" {
                in_shop
            } else {
                everywhere
            };
            review["status"] =
                serde_json::json!({ "allowed": granted.iter().any(|verb| asked["verb"] == *verb) });
            Ok::<_, Infallible>(http::Response::new(Body::from(
                review.to_string().into_bytes(),
            )))
        });
        Client::new(service, "shop")
    }

    #[tokio::test]
    async fn right_to_streams_is_asked_for_all_namespaces_and_the_contexts() {
        let nowhere = |lacks: &[&'static str]| Streams::Nowhere {
            namespace: "shop".to_owned(),
            lacks: lacks.to_vec(),
        };
        for (in_shop, everywhere, want) in [
            (&STREAM[..], &STREAM[..], Streams::Everywhere),
            (&STREAM, &["get"], Streams::In("shop".to_owned())),
            (&["get"], &[], nowhere(&["create"])),
            (&[], &[], nowhere(&STREAM)),
        ] {
            assert_eq!(streams(&client(in_shop, everywhere)).await.unwrap(), want);
        }
    }
}
