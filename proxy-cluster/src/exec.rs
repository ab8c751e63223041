//! Runs kpx in a pod by the API server, and gives back what it said.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::api::{AttachParams, AttachedProcess};
use kube::{Api, Client};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::timeout;

use crate::pods::NodePod;

/// The place of kpx in its image.
const KPX: &str = "/usr/local/bin/kpx";
/// The most bytes of an answer that are read: a node that errs must not fill the operator's memory.
const LONGEST: u64 = 512 << 20;
/// The most bytes of standard error that are kept.
const LONGEST_STDERR: u64 = 64 << 10;

/// The answer of a command.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    pub(crate) code: i32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

/// Starts `kpx` with these arguments in the node's pod.
pub(crate) async fn start(client: &Client, at: &NodePod, arguments: &[String]) -> Result<AttachedProcess> {
    if let Some(absent) = &at.absent {
        bail!("{absent}");
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), &at.namespace);
    let params = AttachParams { container: at.container.clone(), ..AttachParams::default() };
    let command = [KPX].into_iter().chain(arguments.iter().map(String::as_str));
    let started = pods.exec(&at.pod, command, &params.stdin(false).stdout(true).stderr(true)).await;
    started.map_err(|error| refusal(&error)).with_context(|| format!("run kpx in pod {}/{}", at.namespace, at.pod))
}

/// Runs `kpx` to its end.
pub(crate) async fn run(client: &Client, at: &NodePod, arguments: &[String], limit: Duration) -> Result<Answer> {
    let work = async {
        let mut process = start(client, at, arguments).await?;
        let status = process.take_status();
        let (stdout, stderr) = (process.stdout(), process.stderr());
        let (stdout, stderr) = tokio::join!(read(stdout, LONGEST), read(stderr, LONGEST_STDERR));
        let status = match status {
            Some(status) => status.await,
            None => None,
        };
        let (stdout, stderr) = (stdout?, String::from_utf8_lossy(&stderr?).into_owned());
        let status = status.context("the connection to the pod broke off before kpx ended")?;
        Ok(Answer { code: code(&status)?, stdout, stderr })
    };
    timeout(limit, work).await.map_err(|_| anyhow!("no answer within {} s", limit.as_secs()))?
}

/// Reads to the end. A longer answer is an error, and what follows it is still taken off the connection.
async fn read(from: Option<impl AsyncRead + Unpin>, limit: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut from = from.context("kpx has no output")?;
    (&mut from).take(limit).read_to_end(&mut bytes).await.context("read the output of kpx")?;
    let more = tokio::io::copy(&mut from, &mut tokio::io::sink()).await.context("read the output of kpx")?;
    ensure!(more == 0, "the output of kpx is longer than {limit} bytes");
    Ok(bytes)
}

/// Returns the exit status of the command. An error of kubelet or runtime is an error here.
pub(crate) fn code(status: &Status) -> Result<i32> {
    if status.status.as_deref() == Some("Success") {
        return Ok(0);
    }
    let causes = status.details.iter().flat_map(|details| details.causes.iter().flatten());
    let code = causes.filter(|cause| cause.reason.as_deref() == Some("ExitCode"));
    let code = code.filter_map(|cause| cause.message.as_ref()?.parse().ok()).next();
    code.with_context(|| status.message.clone().unwrap_or_else(|| "kpx did not run".to_owned()))
}

/// Says what the API server refused.
fn refusal(error: &kube::Error) -> anyhow::Error {
    let text = error.to_string();
    if text.contains("403") {
        return anyhow!("the API server refuses: it takes the rights to get and to create pods/exec ({text})");
    }
    anyhow!(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn status_tells_how_the_command_ended() {
        let of = |value: serde_json::Value| code(&serde_json::from_value(value).unwrap());
        assert_eq!(of(json!({"status": "Success"})).unwrap(), 0);
        let failure = json!({
            "status": "Failure", "reason": "NonZeroExitCode", "message": "command terminated with exit code 3",
            "details": {"causes": [{"reason": "ExitCode", "message": "3"}]},
        });
        assert_eq!(of(failure).unwrap(), 3);
        let missing = json!({"status": "Failure", "reason": "InternalError", "message": "no such file"});
        assert_eq!(of(missing).unwrap_err().to_string(), "no such file");
    }
}
