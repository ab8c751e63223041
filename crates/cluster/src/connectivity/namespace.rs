//! The test's namespace. A run removes only the namespace that it created.

use std::fs::File;
use std::io::Read;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Namespace;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Preconditions};
use tokio::time::sleep;

use super::objects::{self, ENDS_BY, LABEL, RUN};
use super::stage::{AGAIN, Stage, report};
use proxy_source::kubernetes::SourceError;

/// Time limit for the removal of the namespace.
const REMOVAL: Duration = Duration::from_secs(60);
/// The time in which the API server may still carry out a request after the client's timeout.
const LATE: Duration = Duration::from_secs(3);

/// The state of the request that creates the namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Made {
    /// The request was not sent, or the API server refused it.
    No,
    /// The request was sent, and its response is missing.
    Unknown,
    /// The API server created the namespace with this UID.
    Yes(String),
}

impl Stage<'_> {
    pub(super) async fn make_namespace(&mut self, ends_by: &str) -> Result<()> {
        let namespace = objects::namespace(&self.namespace, &self.run, ends_by)?;
        self.made = Made::Unknown;
        let answer = self
            .make(
                &self.namespaces(),
                format!("namespace {}", self.namespace),
                &namespace,
            )
            .await;
        match &answer {
            Ok(made) => self.made = made.metadata.uid.clone().map_or(Made::Unknown, Made::Yes),
            Err(error) if is_refusal(error) => self.made = Made::No,
            Err(_) => {}
        }
        answer.map(drop)
    }

    /// Removes this run's namespace, or keeps it with `keep`. All other namespaces stay.
    pub(super) async fn close(&self, keep: bool) -> Result<()> {
        let name = &self.namespace;
        let uid = match &self.made {
            Made::No => None,
            Made::Yes(uid) => Some(uid.clone()),
            Made::Unknown => self
                .find_own()
                .await
                .with_context(|| format!("namespace {name} may be left"))?,
        };
        match uid {
            Some(_) if keep => report(&format!("namespace {name} is kept")),
            Some(uid) => self.remove(name, uid).await?,
            None => {}
        }
        Ok(())
    }

    /// Returns the UID of the namespace if it has this run's marks.
    async fn find_own(&self) -> Result<Option<String>> {
        let until = Instant::now() + LATE;
        loop {
            match self.look_for(&self.namespace).await? {
                Some(found) => {
                    return Ok(found
                        .metadata
                        .uid
                        .clone()
                        .filter(|_| is_of(&found, &self.run)));
                }
                None if Instant::now() >= until => return Ok(None),
                None => sleep(AGAIN).await,
            }
        }
    }

    /// Removes the namespaces of earlier runs. Reports and keeps a namespace whose run may still be
    /// active, or whose end time is unknown.
    pub(super) async fn remove_leftovers(&self) -> Result<()> {
        let ours = ListParams::default().labels(&format!("{}={}", LABEL.0, LABEL.1));
        let listed = self
            .call(
                "list the namespaces of earlier tests",
                self.namespaces().list(&ours),
            )
            .await?;
        for namespace in listed.items {
            let ends_by: Option<Timestamp> =
                annotation(&namespace, ENDS_BY).and_then(|ends_by| ends_by.parse().ok());
            let name = namespace.metadata.name.unwrap_or_default();
            match (ends_by, namespace.metadata.uid) {
                (Some(ends_by), _) if ends_by > Timestamp::now() => {
                    report(&format!(
                        "namespace {name} is that of another test, which may run until {ends_by}"
                    ));
                }
                (Some(_), Some(uid)) => {
                    report(&format!(
                        "namespace {name} is left from an earlier test, and is removed"
                    ));
                    self.remove(&name, uid).await?;
                }
                _ => report(&format!(
                    "namespace {name} has the label of a test and no time in {ENDS_BY}, and is not removed"
                )),
            }
        }
        Ok(())
    }

    /// Removes the namespace of this UID with its contents, and waits for the end of the removal.
    async fn remove(&self, name: &str, uid: String) -> Result<()> {
        let only = Preconditions {
            uid: Some(uid.clone()),
            resource_version: None,
        };
        let params = DeleteParams::default().preconditions(only);
        match self
            .call(
                format!("remove namespace {name}"),
                self.namespaces().delete(name, &params),
            )
            .await
        {
            Ok(_) => {}
            Err(error) => match status_code(&error) {
                Some(404) => return Ok(()),
                // Another namespace has taken the name, or this namespace is terminating.
                Some(409) => {}
                _ => return Err(error),
            },
        }
        let until = Instant::now() + REMOVAL;
        while self
            .look_for(name)
            .await?
            .is_some_and(|found| found.metadata.uid.as_ref() == Some(&uid))
        {
            if Instant::now() >= until {
                bail!(
                    "namespace {name} still exists after {} s; the API server continues to remove it",
                    REMOVAL.as_secs()
                );
            }
            sleep(AGAIN).await;
        }
        Ok(())
    }

    async fn look_for(&self, name: &str) -> Result<Option<Namespace>> {
        self.call(
            format!("look for namespace {name}"),
            self.namespaces().get_opt(name),
        )
        .await
    }

    fn namespaces(&self) -> Api<Namespace> {
        Api::all(self.client.clone())
    }
}

/// Returns a word that is unique to this run.
pub(super) fn random() -> Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .context("read /dev/urandom")?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}

fn is_of(namespace: &Namespace, run: &str) -> bool {
    let label = namespace
        .metadata
        .labels
        .as_ref()
        .and_then(|all| all.get(LABEL.0));
    label.is_some_and(|label| label == LABEL.1) && annotation(namespace, RUN) == Some(run)
}

fn annotation<'a>(namespace: &'a Namespace, key: &str) -> Option<&'a str> {
    namespace
        .metadata
        .annotations
        .as_ref()?
        .get(key)
        .map(String::as_str)
}

/// Returns true if the error proves that the API server created nothing. A conflict proves nothing:
/// the first try of the same request may have succeeded.
fn is_refusal(error: &anyhow::Error) -> bool {
    status_code(error).is_some_and(|code| (400..500).contains(&code) && ![408, 409].contains(&code))
}

fn status_code(error: &anyhow::Error) -> Option<u16> {
    error.downcast_ref::<SourceError>()?.code
}
