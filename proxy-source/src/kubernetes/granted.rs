//! Asks an API server what it grants to a machine outside of the cluster.

use std::time::Duration;

use anyhow::{Context as _, Result};
use http::Request;
use ipnet::IpNet;
use kube::Client;
use serde_json::Value;
use tokio::time::timeout;

use super::Options;

/// The longest wait for each answer.
const ANSWER: Duration = Duration::from_secs(10);
/// The objects that kpx reads in mode host: the resources, and the paths of their lists.
const LISTS: [(&str, &str); 4] = [
    ("services", "/api/v1/services?limit=1"),
    ("endpointslices", "/apis/discovery.k8s.io/v1/endpointslices?limit=1"),
    ("nodes", "/api/v1/nodes?limit=1"),
    ("servicecidrs", "/apis/networking.k8s.io/v1/servicecidrs"),
];

/// The rights that an API server grants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Granted {
    pub server: String,
    /// The resources that may not be listed, with the server's words.
    pub refused: Vec<(String, String)>,
    /// The ranges of ClusterIPs, if the server tells them.
    pub service_cidrs: Vec<IpNet>,
}

impl Options {
    /// Asks for what kpx reads in mode host. An error says why the server is not reached.
    pub async fn granted(&self) -> Result<Granted> {
        let server = self.directed().await?.cluster_url.to_string();
        let client = self.stream_client().await?;
        let mut granted = Granted { server, ..Granted::default() };
        for (resource, path) in LISTS {
            match timeout(ANSWER, get(&client, path))
                .await
                .with_context(|| format!("{} does not answer", granted.server))?
            {
                Ok(list) if resource == "servicecidrs" => granted.service_cidrs = ranges(&list),
                Ok(_) => {}
                // Servers before 1.33 have no such resource.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(kube::Error::Api(status)) if status.code == 403 => {
                    granted.refused.push((resource.to_owned(), status.message.clone()));
                }
                Err(error) => return Err(error).with_context(|| format!("ask {}", granted.server)),
            }
        }
        Ok(granted)
    }
}

async fn get(client: &Client, path: &str) -> kube::Result<Value> {
    let request = Request::get(path).body(Vec::new()).map_err(kube::Error::HttpError)?;
    client.request(request).await
}

fn ranges(list: &Value) -> Vec<IpNet> {
    let items = list["items"].as_array().into_iter().flatten();
    let texts = items.flat_map(|item| item["spec"]["cidrs"].as_array().into_iter().flatten());
    texts.filter_map(|text| text.as_str()?.parse().ok()).collect()
}
