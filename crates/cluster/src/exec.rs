//! Runs kpx in a pod through the API server (`pods/exec`), and returns its output.

use std::future::Future;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::api::{AttachParams, AttachedProcess};
use kube::{Api, Client};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::timeout;

use crate::pods::NodePod;
use proxy_source::kubernetes::SourceError;

/// The path of kpx in its image.
pub(crate) const KPX: &str = "/usr/local/bin/kpx";
/// The error for a command whose exit status is missing.
pub(crate) const BROKEN: &str = "the connection to the pod broke off";
/// The size of the buffers between a command's input and output and the connection, in bytes.
const BUFFER: usize = 64 << 10;
/// Maximum size of the kept standard error in bytes.
const LONGEST_STDERR: u64 = 64 << 10;

#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    pub(crate) code: i32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

/// Starts `kpx` with these arguments in the node's pod.
pub(crate) async fn start(
    client: &Client,
    at: &NodePod,
    arguments: &[String],
) -> Result<AttachedProcess> {
    start_as(client, at, arguments, AttachParams::default()).await
}

/// Like [`start`], with an open standard input.
pub(crate) async fn start_with_input(
    client: &Client,
    at: &NodePod,
    arguments: &[String],
) -> Result<AttachedProcess> {
    let params = AttachParams::default()
        .max_stdin_buf_size(BUFFER)
        .max_stdout_buf_size(BUFFER);
    start_as(client, at, arguments, params.stdin(true)).await
}

async fn start_as(
    client: &Client,
    at: &NodePod,
    arguments: &[String],
    params: AttachParams,
) -> Result<AttachedProcess> {
    if let Some(absent) = &at.absent {
        bail!("{absent}");
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), &at.namespace);
    let params = AttachParams {
        container: at.container.clone(),
        ..params
    };
    let command = [KPX]
        .into_iter()
        .chain(arguments.iter().map(String::as_str));
    let started = pods
        .exec(&at.pod, command, &params.stdout(true).stderr(true))
        .await;
    started
        .map_err(|error| refusal(&error))
        .with_context(|| format!("run kpx in pod {}/{}", at.namespace, at.pod))
}

/// Runs `kpx` until it exits. An output of more than `longest` bytes is an error, so that a faulty
/// node cannot fill the operator's memory.
pub(crate) async fn run(
    client: &Client,
    at: &NodePod,
    arguments: &[String],
    limit: Duration,
    longest: u64,
) -> Result<Answer> {
    let work = async {
        let mut process = start(client, at, arguments).await?;
        let status = process.take_status().context("kpx has no status")?;
        let stdout = process.stdout().context("kpx has no output")?;
        let stderr = process.stderr().context("kpx has no standard error")?;
        gather(stdout, stderr, status, longest).await
    };
    timeout(limit, work)
        .await
        .map_err(|_| anyhow!("no answer within {} s", limit.as_secs()))?
}

/// Reads both outputs until the command ends. After a connection error the client drops the status
/// and leaves the outputs open, so the status ends the read.
async fn gather(
    stdout: impl AsyncRead + Unpin,
    stderr: impl AsyncRead + Unpin,
    status: impl Future<Output = Option<Status>>,
    longest: u64,
) -> Result<Answer> {
    let status = async { status.await.context(BROKEN) };
    let words = first_bytes(stderr, LONGEST_STDERR);
    let (status, stdout, stderr) = tokio::try_join!(status, whole(stdout, longest), words)?;
    Ok(Answer {
        code: code(&status)?,
        stdout,
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    })
}

/// Reads to the end. Fails as soon as the output exceeds `longest` bytes.
async fn whole(from: impl AsyncRead + Unpin, longest: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(longest + 1)
        .read_to_end(&mut bytes)
        .await
        .context("read the output of kpx")?;
    ensure!(
        bytes.len() as u64 <= longest,
        "the answer is longer than {} MiB",
        longest >> 20
    );
    Ok(bytes)
}

/// Reads to the end, and keeps the first `longest` bytes. The remaining bytes are read and
/// discarded, because unread bytes block later data of the connection.
pub(crate) async fn first_bytes(mut from: impl AsyncRead + Unpin, longest: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    (&mut from)
        .take(longest)
        .read_to_end(&mut bytes)
        .await
        .context("read kpx's output")?;
    tokio::io::copy(&mut from, &mut tokio::io::sink())
        .await
        .context("read kpx's output")?;
    Ok(bytes)
}

/// Returns the exit status of the command. A failure of the kubelet or of the container runtime is
/// an error.
pub(crate) fn code(status: &Status) -> Result<i32> {
    if status.status.as_deref() == Some("Success") {
        return Ok(0);
    }
    let causes = status
        .details
        .iter()
        .flat_map(|details| details.causes.iter().flatten());
    let code = causes.filter(|cause| cause.reason.as_deref() == Some("ExitCode"));
    let code = code
        .filter_map(|cause| cause.message.as_ref()?.parse().ok())
        .next();
    code.with_context(|| {
        status
            .message
            .clone()
            .unwrap_or_else(|| "kpx did not run".to_owned())
    })
}

/// Returns an error with the API server's reason.
fn refusal(error: &kube::Error) -> anyhow::Error {
    let error = SourceError::from(error);
    let is_refused = error.code == Some(403);
    let error = anyhow::Error::new(error);
    if is_refused {
        return error
            .context("the API server refuses: it takes the rights to get and to create pods/exec");
    }
    error
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use serde_json::json;
    use tokio::io::simplex;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn success() -> Status {
        Status {
            status: Some("Success".to_owned()),
            ..Status::default()
        }
    }

    #[tokio::test]
    async fn connection_that_breaks_off_ends_the_reading() {
        // After an error the client drops both writers, and a reader of such a pipe would wait
        // forever.
        let (stdout, _out) = simplex(64);
        let (stderr, _err) = simplex(64);
        let broken = timeout(MINUTE, gather(stdout, stderr, ready(None), 1 << 20))
            .await
            .unwrap();
        assert_eq!(broken.unwrap_err().to_string(), BROKEN);
    }

    #[tokio::test]
    async fn long_words_do_not_hold_up_the_answer() {
        let words = vec![b'w'; 3 * LONGEST_STDERR as usize];
        let answer = gather(&b"{}"[..], &words[..], ready(Some(success())), 2)
            .await
            .unwrap();
        assert_eq!((answer.code, answer.stdout.as_slice()), (0, &b"{}"[..]));
        assert_eq!(answer.stderr.len() as u64, LONGEST_STDERR);
    }

    #[tokio::test]
    async fn answer_that_never_ends_is_an_error() {
        let endless = tokio::io::repeat(b'a');
        let error = timeout(
            MINUTE,
            gather(endless, tokio::io::empty(), pending(), 1 << 20),
        )
        .await
        .unwrap();
        assert_eq!(
            error.unwrap_err().to_string(),
            "the answer is longer than 1 MiB"
        );
    }

    #[test]
    fn status_tells_how_the_command_ended() {
        let of = |value: serde_json::Value| code(&serde_json::from_value(value).unwrap());
        assert_eq!(of(json!({"status": "Success"})).unwrap(), 0);
        let failure = json!({
            "status": "Failure", "reason": "NonZeroExitCode", "message": "command terminated with exit code 3",
            "details": {"causes": [{"reason": "ExitCode", "message": "3"}]},
        });
        assert_eq!(of(failure).unwrap(), 3);
        let missing =
            json!({"status": "Failure", "reason": "InternalError", "message": "no such file"});
        assert_eq!(of(missing).unwrap_err().to_string(), "no such file");
    }
}
