//! `/statusz` and `/flagz`, by KEP-4827 and KEP-4828.

use anyhow::{Result, ensure};
use serde_json::Value;
use testbed::http::{METRICS, ask_with};

use crate::http::fixture::Fixture;

#[test]
fn statusz_and_flagz_tell_process_and_flags() -> Result<()> {
    let cluster = Fixture::start("zpages")?;
    let kpx = cluster.healthy_kpx("--nodeport-addresses=primary --ui")?;
    let paths = "Paths: /configz /flagz /healthz /metrics /proxyMode /ui/\n";
    for (path, kind, line, field, value) in [
        ("/statusz", "Statusz", paths, "/emulationVersion", "1.37"),
        (
            "/flagz",
            "Flagz",
            "nodeport-addresses=[primary]\n",
            "/flags/metrics-bind-address",
            METRICS,
        ),
    ] {
        let text = cluster.get(METRICS, path)?;
        let header = "Content-Type: text/plain; charset=utf-8".to_owned();
        ensure!(
            text.code == 200 && text.headers.contains(&header) && text.body.contains(line),
            "{text:?}"
        );
        let form = format!("application/json;g=config.k8s.io;v=v1beta1;as={kind}");
        let object = ask_with(
            &cluster.ns,
            METRICS,
            "GET",
            path,
            &format!("Accept: {form}\r\n"),
        )?;
        ensure!(
            object.code == 200 && object.headers.contains(&format!("Content-Type: {form}")),
            "{object:?}"
        );
        let object: Value = serde_json::from_str(&object.body)?;
        ensure!(
            object["kind"] == kind && object.pointer(field).is_some_and(|is| is == value),
            "{object}"
        );
        let refused = ask_with(
            &cluster.ns,
            METRICS,
            "GET",
            path,
            "Accept: application/json\r\n",
        )?;
        ensure!(
            refused.code == 406 && refused.body.contains(&form),
            "{refused:?}"
        );
        ensure!(
            cluster.ask(METRICS, "HEAD", path)?.code == 200
                && cluster.ask(METRICS, "POST", path)?.code == 405
        );
    }
    for listed in paths.split_whitespace().skip(1) {
        ensure!(cluster.get(METRICS, listed)?.code != 404, "{listed}");
    }
    kpx.stop()?;
    let kpx = cluster.healthy_kpx("--feature-gates=ComponentStatusz=false,ComponentFlagz=false")?;
    for path in ["/statusz", "/flagz"] {
        ensure!(cluster.get(METRICS, path)?.code == 404, "{path}");
    }
    kpx.stop()
}
