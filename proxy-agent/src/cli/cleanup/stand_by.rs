//! `kpx cleanup --drain --stand-by`: returns a whole cluster to kube-proxy, whose DaemonSet ran
//! kpx's image until the operator restored its own image. kpx's programs then remain on each node
//! without an agent.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use anyhow::{Context, Result};
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep, timeout};

use super::{CleanupArgs, once};
use proxy_check::holds_lock;
use proxy_net::{Handle, anchor, filter, lock};

/// Time between two checks of the node.
const PERIOD: Duration = Duration::from_secs(1);
/// Time limit for a response of kube-proxy.
const TIMEOUT: Duration = Duration::from_secs(2);
/// kube-proxy's default ports.
const HEALTHZ: u16 = 10_256;
const METRICS: u16 = 10_249;
/// kube-proxy's metric that is 0 until kube-proxy has written rules.
const LAST_SYNC: &str = "kubeproxy_sync_proxy_rules_last_timestamp_seconds";

/// Cleans up each time that kube-proxy has replaced kpx, until SIGTERM.
pub(super) async fn stand_by(args: &CleanupArgs, time: Duration, handle: &Handle) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let work = async {
        loop {
            eprintln!("standing by until a kube-proxy has served in kpx's place for {time:?}");
            let lock = replaced(time, handle).await?;
            eprintln!("kube-proxy serves, and no kpx runs");
            let _outcome = once(args, Ok(lock), handle).await?;
        }
    };
    tokio::select! {
        result = work => result,
        _ = terminate.recv() => Ok(()),
    }
}

/// Waits until kpx's state is left, no agent runs, and kube-proxy has served for `time`. Returns
/// kpx's lock, which prevents the start of an agent.
async fn replaced(time: Duration, handle: &Handle) -> Result<UnixListener> {
    let period = PERIOD.min(time / 2).max(Duration::from_millis(100));
    let mut since: Option<Instant> = None;
    loop {
        let kpx_runs = holds_lock()?;
        // A busy node has a long list of sockets, so the check is less frequent while kpx runs.
        sleep(if kpx_runs {
            period.max(time / 6)
        } else {
            period
        })
        .await;
        let is_replaced = !kpx_runs && is_left(handle).await? && kube_proxy_serves().await;
        since = is_replaced.then(|| since.unwrap_or_else(Instant::now));
        // An agent may start at this moment.
        if since.is_some_and(|since| since.elapsed() >= time)
            && let Ok(lock) = lock::take()
        {
            return Ok(lock);
        }
    }
}

/// Returns true if this host has state of kpx.
async fn is_left(handle: &Handle) -> Result<bool> {
    Ok(anchor::exists(handle).await? || !filter::ours(handle).await?.is_empty())
}

/// Returns true if kube-proxy is healthy and has written rules. kube-proxy reports health from its
/// start, so health alone counts only if its metrics are not at the default port.
async fn kube_proxy_serves() -> bool {
    let is_healthy = get(HEALTHZ, "/healthz")
        .await
        .is_ok_and(|(status, _)| status.is_success());
    is_healthy
        && get(METRICS, "/metrics")
            .await
            .map_or(true, |(_, text)| has_synced(&text))
}

/// Returns true if kube-proxy has written rules of any family, or does not report it.
fn has_synced(metrics: &str) -> bool {
    let samples = metrics.lines().filter(|line| line.starts_with(LAST_SYNC));
    let values = samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values
        .fold(None, |most: Option<f64>, value| {
            Some(most.map_or(value, |most| most.max(value)))
        })
        .is_none_or(|at| at > 0.0)
}

async fn get(port: u16, path: &str) -> Result<(StatusCode, String)> {
    let answer = async {
        let stream = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let request = Request::get(path)
            .header("host", "localhost")
            .body(Empty::<Bytes>::new())?;
        let answer = async move {
            let response = sender.send_request(request).await?;
            let status = response.status();
            anyhow::Ok((status, response.into_body().collect().await?.to_bytes()))
        };
        let (answer, _ended) = tokio::join!(answer, connection);
        let (status, body) = answer?;
        anyhow::Ok((status, String::from_utf8_lossy(&body).into_owned()))
    };
    timeout(TIMEOUT, answer)
        .await
        .with_context(|| format!("no answer at port {port} within {TIMEOUT:?}"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsynced_kube_proxy_does_not_serve() {
        let sample =
            |family: &str, value: &str| format!("{LAST_SYNC}{{ip_family=\"{family}\"}} {value}\n");
        let cases = [
            (String::new(), true),
            (format!("# TYPE {LAST_SYNC} gauge\n{LAST_SYNC} 0\n"), false),
            (format!("{LAST_SYNC} 1.7e+09\n"), true),
            (sample("IPv4", "0") + &sample("IPv6", "0"), false),
            (sample("IPv4", "1.7e+09") + &sample("IPv6", "0"), true),
        ];
        for (metrics, expected) in cases {
            assert_eq!(has_synced(&metrics), expected, "{metrics}");
        }
    }
}
