//! The guarantees to clients that `testbed::apiserver` and genuine API servers share.
//!
//! Every scenario runs on the testbed's server, and with `KPX_TEST_KUBECONFIG` or
//! `KUBEBUILDER_ASSETS` on that genuine server too. Faults that only the testbed's server can
//! produce are in `apiserver_faults.rs`.

use std::pin::pin;

use anyhow::{Context, Result, bail, ensure};
use futures::{Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{
    Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams,
};
use kube::runtime::watcher::{self, Event};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use testbed::apiserver::place::{Place, TIMEOUT, everywhere};
use tokio::time::timeout;

#[test]
fn a_watcher_that_lists_sees_everything() -> Result<()> {
    everywhere(async |place| {
        watcher_sees_everything(place, watcher::Config::default().page_size(2)).await
    })
}

#[test]
fn a_watcher_that_streams_sees_everything() -> Result<()> {
    everywhere(async |place| {
        watcher_sees_everything(place, watcher::Config::default().streaming_lists()).await
    })
}

async fn watcher_sees_everything(place: &Place, config: watcher::Config) -> Result<()> {
    let services = services(place).await?;
    for name in ["a", "b", "c"] {
        create(&services, service(name)).await?;
    }
    let mut events = pin!(watcher::watcher(services.clone(), config));
    let mut initial = Vec::new();
    loop {
        match next(&mut events).await? {
            Event::Init => initial.clear(),
            Event::InitApply(service) => initial.push(service.name_any()),
            Event::InitDone => break,
            other => bail!("{other} before the end of the initial list"),
        }
    }
    ensure!(initial == ["a", "b", "c"], "initial list is {initial:?}");
    create(&services, service("d")).await?;
    expect(&mut events, "Apply(d)").await?;
    label(&services, "a", json!("web")).await?;
    expect(&mut events, "Apply(a)").await?;
    services.delete("b", &DeleteParams::default()).await?;
    expect(&mut events, "Delete(b)").await
}

#[test]
fn pages_show_one_moment() -> Result<()> {
    everywhere(async |place| {
        let services = services(place).await?;
        for name in ["a", "b", "c", "d", "e"] {
            create(&services, service(name)).await?;
        }
        let first = services.list(&ListParams::default().limit(2)).await?;
        ensure!(
            first.metadata.remaining_item_count == Some(3),
            "{:?}",
            first.metadata
        );
        services.delete("c", &DeleteParams::default()).await?;
        create(&services, service("d2")).await?;
        label(&services, "e", json!("late")).await?;
        let mut names: Vec<_> = first.iter().map(ResourceExt::name_any).collect();
        let mut token = first.metadata.continue_.clone();
        while let Some(at) = token.take().filter(|t| !t.is_empty()) {
            let page = services
                .list(&ListParams::default().limit(2).continue_token(&at))
                .await?;
            ensure!(
                page.metadata.resource_version == first.metadata.resource_version,
                "{:?}",
                page.metadata
            );
            ensure!(
                page.iter().all(|s| s.labels().is_empty()),
                "a page shows a later label"
            );
            names.extend(page.iter().map(ResourceExt::name_any));
            token = page.metadata.continue_;
        }
        ensure!(names == ["a", "b", "c", "d", "e"], "pages have {names:?}");
        Ok(())
    })
}

#[test]
fn watch_adds_and_deletes_objects_by_their_labels() -> Result<()> {
    everywhere(async |place| {
        let services = services(place).await?;
        create(&services, service("a")).await?;
        let version = services
            .list(&ListParams::default())
            .await?
            .metadata
            .resource_version
            .unwrap_or_default();
        let params = WatchParams::default()
            .labels("app in (web, db)")
            .fields("spec.clusterIP!=None")
            .timeout(60);
        let mut events = pin!(services.watch(&params, &version).await?);
        for (app, want) in [
            (json!("web"), "ADDED"),
            (json!("db"), "MODIFIED"),
            (json!("other"), "DELETED"),
            (json!("web"), "ADDED"),
        ] {
            let version = label(&services, "a", app.clone()).await?;
            let got = name_of(&next_watched(&mut events).await?, &version)?;
            ensure!(got == want, "{app}: {got} instead of {want}");
        }
        let mut headless = service("headless");
        headless["spec"]["clusterIP"] = json!("None");
        headless["metadata"]["labels"] = json!({"app": "web"});
        create(&services, headless).await?;
        services.delete("a", &DeleteParams::default()).await?;
        match next_watched(&mut events).await? {
            WatchEvent::Deleted(service) if service.name_any() == "a" => Ok(()),
            other => bail!("{other:?} instead of DELETED a"),
        }
    })
}

#[test]
fn selectors_narrow_lists() -> Result<()> {
    everywhere(async |place| {
        let services = services(place).await?;
        for (name, app) in [("a", "web"), ("b", "db")] {
            let mut service = service(name);
            service["metadata"]["labels"] = json!({"app": app});
            create(&services, service).await?;
        }
        create(&services, service("c")).await?;
        let rows = [
            (ListParams::default().labels("app=web"), vec!["a"]),
            (ListParams::default().labels("app"), vec!["a", "b"]),
            (ListParams::default().labels("!app"), vec!["c"]),
            (
                ListParams::default().labels("app notin (web)"),
                vec!["b", "c"],
            ),
            (ListParams::default().labels("app!=web").limit(1), vec!["b"]),
            (
                ListParams::default().fields("metadata.name!=b"),
                vec!["a", "c"],
            ),
        ];
        for (params, want) in rows {
            let got: Vec<_> = services
                .list(&params)
                .await?
                .iter()
                .map(ResourceExt::name_any)
                .collect();
            ensure!(got == want, "{params:?}: {got:?} instead of {want:?}");
        }
        code(
            services
                .list(&ListParams::default().fields("spec.color=red"))
                .await,
            400,
        )
    })
}

#[test]
fn refusals_name_their_reason() -> Result<()> {
    everywhere(async |place| {
        let services = services(place).await?;
        let created = create(&services, service("a")).await?;
        code(create_result(&services, service("a")).await, 409)?;
        code(services.get("b").await, 404)?;
        code(services.delete("b", &DeleteParams::default()).await, 404)?;
        let elsewhere: Api<Service> =
            Api::namespaced(place.client().await?, "kpx-no-such-namespace");
        code(
            elsewhere
                .create(
                    &PostParams::default(),
                    &serde_json::from_value(service("a"))?,
                )
                .await,
            404,
        )?;
        label(&services, "a", json!("web")).await?;
        code(
            services
                .replace("a", &PostParams::default(), &created)
                .await,
            409,
        )?;
        let moved =
            json!({"spec": {"clusterIP": "10.96.200.200", "clusterIPs": ["10.96.200.200"]}});
        code(
            services
                .patch("a", &PatchParams::default(), &Patch::Merge(moved))
                .await,
            422,
        )?;
        let unknown = json!({"spec": {"color": "red"}});
        let strict = PatchParams {
            field_validation: Some(kube::api::ValidationDirective::Strict),
            ..Default::default()
        };
        code(
            services
                .patch("a", &strict, &Patch::Strategic(unknown))
                .await,
            422,
        )?;
        code(
            services
                .patch(
                    "a",
                    &PatchParams::default(),
                    &Patch::Merge(json!({"spec": {"ports": 1}})),
                )
                .await,
            422,
        )?;
        let unchanged = services.get("a").await?;
        let again = services
            .replace("a", &PostParams::default(), &unchanged)
            .await?;
        ensure!(
            again.resource_version() == unchanged.resource_version(),
            "a write without a change made a version"
        );
        Ok(())
    })
}

#[test]
fn the_server_fills_in_what_is_left_out() -> Result<()> {
    everywhere(async |place| {
        let services = services(place).await?;
        let created = create(&services, service("a")).await?;
        ensure!(
            created.uid().is_some() && created.creation_timestamp().is_some(),
            "{:?}",
            created.metadata
        );
        let spec = serde_json::to_value(&created.spec)?;
        let ip = spec["clusterIP"]
            .as_str()
            .context("no cluster IP")?
            .to_owned();
        let port = json!({"port": 80, "targetPort": 80, "protocol": "TCP"});
        let want = json!({"clusterIP": ip, "clusterIPs": [ip], "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack",
            "internalTrafficPolicy": "Cluster", "sessionAffinity": "None", "type": "ClusterIP", "ports": [port]});
        ensure!(spec == want, "{spec} instead of {want}");

        let mut given = service("b");
        given["spec"]["type"] = json!("NodePort");
        given["spec"]["ipFamilyPolicy"] = json!("PreferDualStack");
        given["spec"]["sessionAffinity"] = json!("ClientIP");
        let created = create(&services, given).await?;
        let spec = serde_json::to_value(&created.spec)?;
        ensure!(spec["ipFamilies"] == json!(["IPv4", "IPv6"]), "{spec}");
        ensure!(
            spec["ports"][0]["nodePort"]
                .as_u64()
                .is_some_and(|p| (30_000..32_768).contains(&p)),
            "{spec}"
        );
        ensure!(spec["externalTrafficPolicy"] == "Cluster", "{spec}");
        ensure!(
            spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"] == 10_800,
            "{spec}"
        );

        let slices: Api<EndpointSlice> = Api::namespaced(place.client().await?, &place.namespace);
        let slice =
            serde_json::from_value(json!({"metadata": {"name": "a-1"}, "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.244.0.5"]}], "ports": [{"port": 8080}]}))?;
        let created = slices.create(&PostParams::default(), &slice).await?;
        let ports = serde_json::to_value(&created.ports)?;
        ensure!(
            ports == json!([{"name": "", "port": 8080, "protocol": "TCP"}]),
            "{ports}"
        );
        ensure!(
            created.metadata.generation == Some(1),
            "{:?}",
            created.metadata
        );
        let label =
            Patch::Merge(json!({"metadata": {"labels": {"kubernetes.io/service-name": "a"}}}));
        let patched = slices.patch("a-1", &PatchParams::default(), &label).await?;
        ensure!(
            patched.metadata.generation == Some(2),
            "{:?}",
            patched.metadata
        );
        Ok(())
    })
}

#[test]
fn the_status_is_written_apart() -> Result<()> {
    everywhere(async |place| {
        let services = services(place).await?;
        let mut given = service("a");
        given["spec"]["type"] = json!("LoadBalancer");
        given["status"] = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}});
        let created = create(&services, given.clone()).await?;
        let ingress = |s: &Service| {
            s.status
                .clone()
                .and_then(|s| s.load_balancer?.ingress)
                .unwrap_or_default()
        };
        ensure!(ingress(&created).is_empty(), "creation wrote the status");
        // A Service of another type gets no default mode. A status write keeps the type.
        let status = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.1", "ipMode": "VIP"}]}});
        let status = Patch::Merge(json!({"status": status, "spec": {"type": "ClusterIP"}}));
        services
            .patch_status("a", &PatchParams::default(), &status)
            .await?;
        label(&services, "a", json!("web")).await?;
        let now = services.get("a").await?;
        ensure!(
            ingress(&now).len() == 1,
            "the status was not written, or lost"
        );
        ensure!(
            now.spec.and_then(|s| s.type_).as_deref() == Some("LoadBalancer"),
            "the status's patch wrote the spec"
        );
        Ok(())
    })
}

#[test]
fn a_load_balancers_address_has_a_mode_and_a_service_of_that_type() -> Result<()> {
    everywhere(async |place| {
        let services = services(place).await?;
        for (name, kind) in [("a", "LoadBalancer"), ("b", "NodePort")] {
            let mut given = service(name);
            given["spec"]["type"] = json!(kind);
            create(&services, given).await?;
        }
        let write = async |name: &str, status: Value, of: &str| {
            let mut patch = json!({"status": {"loadBalancer": {"ingress": [status]}}});
            if !of.is_empty() {
                patch["spec"]["type"] = json!(of);
            }
            services
                .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
                .await
        };
        let written = serde_json::to_value(write("a", json!({"ip": "192.0.2.1"}), "").await?)?;
        ensure!(
            written["status"]["loadBalancer"]["ingress"][0]["ipMode"] == "VIP",
            "{written}"
        );
        let refused = [
            (
                "a",
                json!({"ip": "192.0.2.1"}),
                "ClusterIP",
                "ingress[0].ipMode: Required",
            ),
            (
                "a",
                json!({"ip": "192.0.2.1", "ipMode": "vip"}),
                "",
                "ingress[0].ipMode: Unsupported",
            ),
            (
                "a",
                json!({"hostname": "lb.example", "ipMode": "VIP"}),
                "",
                "ingress[0].ipMode: Forbidden",
            ),
            (
                "a",
                json!({"ip": "lb.example", "ipMode": "VIP"}),
                "",
                "ingress[0].ip: Invalid",
            ),
            (
                "b",
                json!({"ip": "192.0.2.1", "ipMode": "VIP"}),
                "",
                "ingress: Forbidden",
            ),
        ];
        for (name, status, of, why) in refused {
            let error = write(name, status.clone(), of)
                .await
                .err()
                .with_context(|| format!("{status} was written"))?;
            ensure!(
                error
                    .to_string()
                    .contains(&format!("status.loadBalancer.{why}")),
                "{status}: {error}"
            );
            code::<Service>(Err(error), 422)?;
        }
        write("a", json!({"hostname": "lb.example"}), "").await?;
        Ok(())
    })
}

#[test]
fn a_watch_ends_at_its_timeout() -> Result<()> {
    everywhere(async |place| {
        let services = services(place).await?;
        let version = services
            .list(&ListParams::default())
            .await?
            .metadata
            .resource_version
            .unwrap_or_default();
        let events = services
            .watch(&WatchParams::default().timeout(1), &version)
            .await?;
        let events: Vec<_> = timeout(TIMEOUT, events.try_collect())
            .await
            .context("the watch does not end")??;
        ensure!(
            events.iter().all(|e| matches!(e, WatchEvent::Bookmark(_))),
            "{events:?}"
        );
        Ok(())
    })
}

async fn services(place: &Place) -> Result<Api<Service>> {
    let client: Client = place.client().await?;
    Ok(Api::namespaced(client, &place.namespace))
}

fn service(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"ports": [{"port": 80}]}})
}

async fn create(services: &Api<Service>, service: Value) -> Result<Service> {
    create_result(services, service)
        .await
        .context("create a service")
}

async fn create_result(services: &Api<Service>, service: Value) -> kube::Result<Service> {
    let service = serde_json::from_value(service).map_err(kube::Error::SerdeError)?;
    services.create(&PostParams::default(), &service).await
}

/// Sets the label `app`, and returns the resource version of that write.
async fn label(services: &Api<Service>, name: &str, app: Value) -> Result<String> {
    let patch = Patch::Merge(json!({"metadata": {"labels": {"app": app}}}));
    let service = services
        .patch(name, &PatchParams::default(), &patch)
        .await
        .context("label a service")?;
    service.resource_version().context("no resource version")
}

fn code<T>(result: kube::Result<T>, want: u16) -> Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.code == want => Ok(()),
        Err(error) => bail!("{error:?} instead of {want}"),
        Ok(_) => bail!("success instead of {want}"),
    }
}

async fn next<T: Stream<Item = watcher::Result<Event<Service>>> + Unpin>(
    events: &mut T,
) -> Result<Event<Service>> {
    let event = timeout(TIMEOUT, events.next()).await.context("no event")?;
    Ok(event.context("the watcher ended")??)
}

async fn expect<T: Stream<Item = watcher::Result<Event<Service>>> + Unpin>(
    events: &mut T,
    want: &str,
) -> Result<()> {
    let got = next(events).await?.to_string();
    ensure!(got == want, "{got} instead of {want}");
    Ok(())
}

async fn next_watched<T>(events: &mut T) -> Result<WatchEvent<Service>>
where
    T: Stream<Item = kube::Result<WatchEvent<Service>>> + Unpin,
{
    loop {
        let event = timeout(TIMEOUT, events.next())
            .await
            .context("no event")?
            .context("the watch ended")??;
        if !matches!(event, WatchEvent::Bookmark(_)) {
            return Ok(event);
        }
    }
}

/// Returns the event's type, after checking that its object has the version of the change.
fn name_of(event: &WatchEvent<Service>, version: &str) -> Result<&'static str> {
    let (name, service) = match event {
        WatchEvent::Added(service) => ("ADDED", service),
        WatchEvent::Modified(service) => ("MODIFIED", service),
        WatchEvent::Deleted(service) => ("DELETED", service),
        WatchEvent::Bookmark(_) | WatchEvent::Error(_) => bail!("{event:?}"),
    };
    ensure!(
        service.resource_version().as_deref() == Some(version),
        "{name} is not of version {version}: {service:?}"
    );
    Ok(name)
}
