//! Watches the files with credentials: after a change, a refused client is replaced at once.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::config::Kubeconfig;
use tokio::time::sleep;

use super::Options;
use crate::health::Health;

const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The time between two checks while the source has a problem.
const EVERY: Duration = Duration::from_secs(1);

/// The files with their content when the client was created; `None` for a missing file.
pub(super) struct Files(BTreeMap<PathBuf, Option<Vec<u8>>>);

impl Options {
    pub(super) fn files(&self) -> Files {
        Files::read(self.paths())
    }

    /// Returns the kubeconfigs and the files that they name.
    pub fn paths(&self) -> Vec<PathBuf> {
        let kubeconfigs = self.kubeconfigs();
        let named = kubeconfigs
            .iter()
            .filter_map(|path| Kubeconfig::read_from(path).ok())
            .flat_map(|config| {
                let users = config
                    .auth_infos
                    .into_iter()
                    .filter_map(|user| user.auth_info);
                let of_users = users
                    .flat_map(|user| [user.token_file, user.client_certificate, user.client_key]);
                let clusters = config
                    .clusters
                    .into_iter()
                    .filter_map(|cluster| cluster.cluster);
                let of_clusters = clusters.map(|cluster| cluster.certificate_authority);
                of_users
                    .chain(of_clusters)
                    .flatten()
                    .map(PathBuf::from)
                    .collect::<Vec<_>>()
            });
        let account = ["token", "ca.crt"].map(|name| Path::new(SERVICE_ACCOUNT).join(name));
        kubeconfigs
            .iter()
            .cloned()
            .chain(named)
            .chain(account)
            .collect()
    }
}

impl Files {
    fn read(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        Self(
            paths
                .into_iter()
                .map(|path| (path.clone(), fs::read(path).ok()))
                .collect(),
        )
    }

    /// Returns when the source has a problem and the files have changed.
    pub(super) async fn changed(&self, health: &Health) {
        let mut problems = health.subscribe();
        loop {
            if problems
                .wait_for(|problems| !problems.is_empty())
                .await
                .is_err()
            {
                return std::future::pending().await;
            }
            if Self::read(self.0.keys().cloned()).0 != self.0 {
                return;
            }
            sleep(EVERY).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;
    use crate::health::Problem;

    #[tokio::test(start_paused = true)]
    async fn changed_files_count_while_there_is_a_problem() {
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = folder.path().join("config");
        let token = folder.path().join("token");
        fs::write(&kubeconfig, "users: [{name: me, user: {tokenFile: token}}]").unwrap();
        fs::write(&token, "old").unwrap();
        let options = Options {
            kubeconfig: Some(kubeconfig),
            ..Options::default()
        };
        let files = options.files();
        let health = Health::default();
        assert!(files.0.contains_key(&token), "{:?}", files.0.keys());

        fs::write(&token, "new").unwrap();
        assert!(
            timeout(10 * EVERY, files.changed(&health)).await.is_err(),
            "nothing is wrong"
        );
        health.begin(&Problem::Watch("Service".into()), "401");
        timeout(2 * EVERY, files.changed(&health)).await.unwrap();

        let files = options.files();
        assert!(
            timeout(10 * EVERY, files.changed(&health)).await.is_err(),
            "nothing has changed"
        );
        fs::remove_file(&token).unwrap();
        timeout(2 * EVERY, files.changed(&health)).await.unwrap();
    }
}
