//! The stock kubectl against `testbed::apiserver`, and against genuine API servers as in
//! `apiserver.rs`.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::ResourceExt;
use kube::api::Api;
use serde_json::{Value, json};
use testbed::apiserver::place::{TIMEOUT, everywhere};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::time::timeout;

#[test]
#[expect(
    clippy::too_many_lines,
    reason = "one object's life, from its creation on"
)]
fn kubectl_is_served() -> Result<()> {
    everywhere(async |place| {
        let mut watch = place.kubectl_command(&["get", "service", "--watch", "--output=name"]);
        let mut watch = watch.spawn().context("start kubectl")?;
        let mut lines = BufReader::new(watch.stdout.take().context("output of kubectl")?).lines();

        let manifest = |port: u16| {
            format!(
                "{}\n{}\n",
                json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
                    "spec": {"selector": {"app": "web"}, "ports": [{"name": "http", "port": 80, "targetPort": port},
                        {"name": "https", "port": 443, "targetPort": 8443}]}}),
                json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
                    "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
                    "endpoints": [{"addresses": ["10.244.0.5"]}], "ports": [{"name": "http", "port": port}]}),
            )
        };
        let created = place
            .kubectl(&["apply", "-f", "-"], &manifest(8080))
            .await?;
        ensure!(
            created == "service/web created\nendpointslice.discovery.k8s.io/web-1 created\n",
            "first apply: {created}"
        );
        let line = timeout(TIMEOUT, lines.next_line())
            .await
            .context("kubectl shows nothing")??;
        ensure!(
            line.as_deref().is_some_and(|l| l.contains("service/web")),
            "kubectl get --watch: {line:?}"
        );
        // kubectl prints "configured" after each patch, even if nothing changed.
        let slices: Api<EndpointSlice> = Api::namespaced(place.client().await?, &place.namespace);
        let before = slices.get("web-1").await?.resource_version();
        let again = place
            .kubectl(&["apply", "-f", "-"], &manifest(8080))
            .await?;
        ensure!(
            again.contains("service/web unchanged"),
            "second apply: {again}"
        );
        ensure!(
            slices.get("web-1").await?.resource_version() == before,
            "an apply without a change made a version"
        );
        let diff = place
            .kubectl(&["apply", "--dry-run=server", "-f", "-"], &manifest(8081))
            .await?;
        ensure!(
            diff.contains("service/web configured (server dry run)"),
            "dry run: {diff}"
        );
        place
            .kubectl(&["apply", "-f", "-"], &manifest(8081))
            .await?;
        let services: Api<Service> = Api::namespaced(place.client().await?, &place.namespace);
        let targets = |s: &Service| {
            let spec = serde_json::to_value(&s.spec).unwrap_or_default();
            spec["ports"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|p| p["targetPort"].clone())
                .collect::<Vec<_>>()
        };
        ensure!(
            targets(&services.get("web").await?) == [json!(8081), json!(8443)],
            "third apply did not take"
        );
        let line = timeout(TIMEOUT, lines.next_line())
            .await
            .context("kubectl shows nothing")??;
        ensure!(
            line.as_deref().is_some_and(|l| l.contains("service/web")),
            "kubectl get --watch: {line:?}"
        );

        let refused = place
            .kubectl(
                &["apply", "-f", "-"],
                &manifest(8081).replace("\"selector\"", "\"selektor\""),
            )
            .await;
        let refused = format!("{:#}", refused.err().context("a misspelt field was taken")?);
        ensure!(
            refused.contains("unknown field \"spec.selektor\""),
            "{refused}"
        );
        let table = place
            .kubectl(&["get", "service,endpointslice", "-o", "wide"], "")
            .await?;
        for word in [
            "CLUSTER-IP",
            "80/TCP,443/TCP",
            "ADDRESSTYPE",
            "10.244.0.5",
            "8081",
        ] {
            ensure!(table.contains(word), "no {word} in\n{table}");
        }
        place
            .kubectl(&["label", "service", "web", "tier=front"], "")
            .await?;
        place
            .kubectl(
                &[
                    "patch",
                    "service",
                    "web",
                    "-p",
                    r#"{"spec":{"sessionAffinity":"ClientIP"}}"#,
                ],
                "",
            )
            .await?;
        let json = place
            .kubectl(
                &["get", "service", "web", "-l", "tier=front", "-o", "json"],
                "",
            )
            .await;
        ensure!(json.is_err(), "kubectl takes a name and a selector at once");
        let json = place
            .kubectl(&["get", "service", "-l", "tier=front", "-o", "json"], "")
            .await?;
        let list: Value = serde_json::from_str(&json).context("read kubectl's output")?;
        ensure!(
            list["items"][0]["spec"]["sessionAffinity"] == "ClientIP",
            "{list}"
        );
        place
            .kubectl(&["replace", "-f", "-"], &list["items"][0].to_string())
            .await?;
        let other = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "other"},
            "spec": {"ports": [{"port": 80}]}});
        place
            .kubectl(&["create", "-f", "-"], &other.to_string())
            .await?;
        place.kubectl(&["describe", "service", "web"], "").await?;
        let deleted = place
            .kubectl(
                &[
                    "delete",
                    "service/web",
                    "endpointslice/web-1",
                    "service/other",
                ],
                "",
            )
            .await?;
        ensure!(
            deleted.contains("service \"web\" deleted"),
            "delete: {deleted}"
        );
        ensure!(
            services.get_opt("web").await?.is_none(),
            "kubectl delete left the service"
        );
        watch.kill().await.context("end kubectl")
    })
}
