//! Words errors of the kube client for operators. kube's own texts end with a dump of the server's
//! Status or of a plugin's output.

use std::error::Error;
use std::fmt;

use kube::client::AuthError;
use kube::core::Status;

/// The step that failed on the way to the API server's objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No kubeconfig and no service account was found.
    NoKubeconfig,
    /// The kubeconfig, or a file that it names, is unusable.
    Kubeconfig,
    /// The kubeconfig has no such context.
    Context,
    /// The kubeconfig's credential plugin has failed.
    Plugin,
    Credentials,
    /// The client does not trust the server's certificate.
    Certificate,
    /// The server's name has no address.
    Name,
    /// The server does not answer.
    Unreachable,
    /// The server answers with an error.
    Answer,
}

/// An error in plain words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceError {
    pub fault: Fault,
    /// The HTTP status of the server's answer.
    pub code: Option<u16>,
    text: String,
}

impl SourceError {
    pub(super) fn new(fault: Fault, text: impl Into<String>) -> Self {
        Self {
            fault,
            code: None,
            text: text.into(),
        }
    }

    /// Returns the fault of an error. An error of another type comes from the kubeconfig, whose
    /// files are read first.
    pub(super) fn fault_of(error: &anyhow::Error) -> Fault {
        let error = error.chain().find_map(|cause| cause.downcast_ref::<Self>());
        error.map_or(Fault::Kubeconfig, |error| error.fault)
    }
}

impl From<&kube::Error> for SourceError {
    fn from(error: &kube::Error) -> Self {
        let text = explain(error);
        let code = status(error).map(|status| status.code);
        let fault = match (code, text.to_lowercase()) {
            (Some(401), _) => Fault::Credentials,
            (Some(_), _) => Fault::Answer,
            (None, _) if auth_error(error).is_some_and(is_of_plugin) => Fault::Plugin,
            (None, _) if auth_error(error).is_some() || is_of_kubeconfig(error) => {
                Fault::Kubeconfig
            }
            // In this TLS alert, the server refuses the client's certificate.
            (None, text) if text.contains("fatal alert") && text.contains("certificate") => {
                Fault::Credentials
            }
            (None, text) if text.contains("certificate") => Fault::Certificate,
            (None, text) if text.contains("dns error") => Fault::Name,
            (None, _) => match error {
                kube::Error::Service(_) | kube::Error::HyperError(_) => Fault::Unreachable,
                _ => Fault::Answer,
            },
        };
        Self { fault, code, text }
    }
}

impl From<kube::Error> for SourceError {
    fn from(error: kube::Error) -> Self {
        Self::from(&error)
    }
}

impl fmt::Display for SourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Error for SourceError {}

pub(super) fn status(error: &kube::Error) -> Option<&Status> {
    match error {
        kube::Error::Api(status) => Some(status),
        _ => None,
    }
}

/// Returns the error and its causes without repetitions: many errors repeat their cause.
pub(super) fn explain(error: &kube::Error) -> String {
    if let Some(Status {
        code,
        reason,
        message,
        ..
    }) = status(error)
    {
        return format!("{code} {reason}: {message}");
    }
    if let Some(AuthError::AuthExecRun { out, .. }) = auth_error(error) {
        // The error holds the plugin's environment and output, which clients of the health server
        // must not see.
        return format!("the kubeconfig's credential plugin failed: {}", out.status);
    }
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// Returns true for errors before any contact with the server.
fn is_of_kubeconfig(error: &kube::Error) -> bool {
    use kube::Error::{
        InferKubeconfig, ProxyProtocolDisabled, ProxyProtocolUnsupported, RustlsTls,
    };
    matches!(
        error,
        InferKubeconfig(_)
            | RustlsTls(_)
            | ProxyProtocolUnsupported { .. }
            | ProxyProtocolDisabled { .. }
    )
}

fn is_of_plugin(error: &AuthError) -> bool {
    use AuthError::{
        AuthExec, AuthExecParse, AuthExecRun, AuthExecSerialize, AuthExecStart, ExecPluginFailed,
    };
    matches!(
        error,
        AuthExec(_)
            | AuthExecParse(_)
            | AuthExecRun { .. }
            | AuthExecSerialize(_)
            | AuthExecStart(_)
            | ExecPluginFailed
    )
}

fn auth_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a AuthError> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref() {
            return Some(error);
        }
        cause = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{ExitStatus, Output};

    use super::*;

    fn api(code: u16, reason: &str, message: &str) -> kube::Error {
        let status = Status {
            code,
            reason: reason.to_owned(),
            message: message.to_owned(),
            ..Status::default()
        };
        kube::Error::Api(Box::new(status))
    }

    #[test]
    fn errors_are_told_in_words_with_their_fault() {
        let io = |kind, text: &str| kube::Error::Service(Box::new(io::Error::new(kind, text)));
        let out = Output {
            status: ExitStatus::from_raw(256),
            stdout: b"s3cret".to_vec(),
            stderr: Vec::new(),
        };
        let plugin = AuthError::AuthExecRun {
            cmd: "aws".to_owned(),
            out: Box::new(out),
        };
        let cases = [
            (
                api(
                    403,
                    "Forbidden",
                    "nodes is forbidden: User \"a\" cannot list resource \"nodes\"",
                ),
                Fault::Answer,
                "403 Forbidden: nodes is forbidden: User \"a\" cannot list resource \"nodes\"",
            ),
            (
                api(401, "Unauthorized", "Unauthorized"),
                Fault::Credentials,
                "401 Unauthorized: Unauthorized",
            ),
            (
                kube::Error::Auth(plugin),
                Fault::Plugin,
                "the kubeconfig's credential plugin failed: exit status: 1",
            ),
            (
                kube::Error::Service(Box::new(AuthError::ReadTokenFile(
                    io::Error::other("gone"),
                    "/token".into(),
                ))),
                Fault::Kubeconfig,
                "ServiceError: failed to read token file '\"/token\"': gone",
            ),
            (
                io(
                    io::ErrorKind::InvalidData,
                    "invalid peer certificate: UnknownIssuer",
                ),
                Fault::Certificate,
                "ServiceError: invalid peer certificate: UnknownIssuer",
            ),
            (
                io(
                    io::ErrorKind::InvalidData,
                    "received fatal alert: CertificateExpired",
                ),
                Fault::Credentials,
                "ServiceError: received fatal alert: CertificateExpired",
            ),
            (
                io(
                    io::ErrorKind::Other,
                    "dns error: failed to lookup address information",
                ),
                Fault::Name,
                "ServiceError: dns error: failed to lookup address information",
            ),
            (
                io(io::ErrorKind::ConnectionRefused, "Connection refused"),
                Fault::Unreachable,
                "ServiceError: Connection refused",
            ),
        ];
        for (error, fault, text) in cases {
            let error = SourceError::from(&error);
            assert_eq!((error.fault, error.to_string().as_str()), (fault, text));
            let wrapped = anyhow::Error::new(error).context("ask").context("more");
            assert_eq!(SourceError::fault_of(&wrapped), fault);
            assert!(!format!("{wrapped:#}").contains(['{', '[']), "{wrapped:#}");
        }
    }
}
